"""Equal calls in flight: sent once, and what happens to those who wait when the sender ends badly."""

from __future__ import annotations

import asyncio
import gc

import pytest
from runtime_helpers import Worker, caller, duty

from lemon_jax.backends import Message, Reply, Request
from lemon_jax.errors import LemonError


def request(text: str = "x", index: int = 0) -> Request:
    messages = (Message(role="system", content=f"\n\nYour duty: {text}"), Message(role="user", content="?"))
    return Request(model="scripted-small", messages=messages, max_tokens=8, sample_index=index)


def fail(_: Request) -> str:
    raise LemonError("models.m: the server does not start")


def test_equal_calls_in_flight_are_sent_once():
    worker = Worker(delay_s=0.01)
    seen = []

    async def scenario(c):
        return await asyncio.gather(*(c.ask([request()], scope=str(i)) for i in range(5)))

    with caller(worker, on_live_call=lambda call, reply: seen.append((call, reply))) as c:
        answers = asyncio.run(scenario(c))
        origin = c.store.origin([answers[0][0].key])
    assert len(worker.calls) == c.live_calls == len(seen) == 1
    assert len({call.key for (call,) in answers}) == 1
    assert {call.reply.text for (call,) in answers} == {"Answer: 7"}
    assert list(origin.values()) == [("0", False)]


def test_replies_come_in_the_order_of_the_requests_repeats_included():
    worker = Worker(duty)
    with caller(worker) as c:
        asked = [request(text) for text in "abacb"]
        calls = asyncio.run(c.ask(asked))
    assert [call.reply.text for call in calls] == list("abacb")
    assert worker.duties == ["a", "b", "c"]


def test_overlapping_batches_do_not_wait_for_each_other_forever():
    worker = Worker(duty, delay_s=0.01)

    async def scenario(c):
        batches = ["ab", "bc", "ca", "abc"]
        jobs = (c.ask([request(text) for text in batch]) for batch in batches)
        return await asyncio.wait_for(asyncio.gather(*jobs), 5)

    with caller(worker) as c:
        answers = asyncio.run(scenario(c))
    assert ["".join(call.reply.text for call in calls) for calls in answers] == ["ab", "bc", "ca", "abc"]
    assert sorted(worker.duties) == ["a", "b", "c"]


def test_a_senders_failure_reaches_all_who_wait(caplog):
    worker = Worker(fail, delay_s=0.01)

    async def scenario(c):
        jobs = (c.ask([request(), request("y")]), c.ask([request("y")]), c.ask([request(), request("z")]))
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 5)

    with caller(worker) as c:
        found = asyncio.run(scenario(c))
        assert [str(error) for error in found] == ["models.m: the server does not start"] * 3
        assert all(type(error) is LemonError for error in found)
        worker.answer = duty  # nothing of the failure is left behind
        assert asyncio.run(c.ask([request("y")]))[0].reply.text == "y"
    gc.collect()
    assert not caplog.records  # asyncio logs failures that nobody retrieved


def test_a_failure_that_nobody_waits_for_is_reported_once(caplog):
    with caller(Worker(fail)) as c, pytest.raises(LemonError):
        asyncio.run(c.ask([request()]))
    gc.collect()
    assert not caplog.records


def test_a_cancelled_sender_leaves_the_call_to_those_who_wait():
    worker = Worker(duty, delay_s=0.02)

    async def scenario(c):
        sender = asyncio.create_task(c.ask([request()]))
        waiting = [asyncio.create_task(c.ask([request()])) for _ in range(3)]
        await asyncio.sleep(0.005)
        sender.cancel()
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert sender.cancelled()
        return answers

    with caller(worker) as c:
        answers = asyncio.run(scenario(c))
    assert {calls[0].reply.text for calls in answers} == {"x"}
    assert len(worker.calls) == 2


def test_one_who_stops_waiting_takes_the_reply_from_nobody():
    worker = Worker(duty, delay_s=0.02)

    async def scenario(c):
        first, second, third = (asyncio.create_task(c.ask([request()])) for _ in range(3))
        await asyncio.sleep(0.005)
        second.cancel()
        answers = await asyncio.wait_for(asyncio.gather(first, third), 5)
        assert second.cancelled()
        return answers

    with caller(worker) as c:
        answers = asyncio.run(scenario(c))
    assert [calls[0].reply.text for calls in answers] == ["x", "x"]
    assert len(worker.calls) == 1


def test_a_backend_that_stays_silent_has_failed():
    class Silent(Worker):
        async def generate(self, requests):
            self.calls += requests
            for index, text in list(enumerate(requests))[:1]:
                yield index, Reply(text=duty(text), finish="stop")

    with caller(Silent()) as c:
        first, second = asyncio.run(c.ask([request("a"), request("b")]))
        assert (first.reply.text, second.reply.error) == ("a", "the backend gave no reply")
        assert c.store.count() == 1


def test_a_roles_prefix_is_measured_once():
    worker = Worker(delay_s=0.005)

    async def scenario(c):
        jobs = (c.ask([request(text)], prefix="one two three") for text in "abcd")
        return await asyncio.gather(*jobs)

    with caller(worker) as c:
        answers = asyncio.run(scenario(c))
        assert {call.prefix_tokens for (call,) in answers} == {4}  # "one two three" and "."
        (short,) = asyncio.run(c.ask([request("e")], prefix="a very long prefix " * 20))
        assert short.prefix_tokens == short.prompt_tokens  # never more than the prompt
    probes = [i for i, call in enumerate(worker.calls) if not duty(call)]
    # Each before the calls that need it: a server that takes calls in turn would else answer it last.
    assert probes == [0, 5]

"""Attempts at one request that overlap: which reply counts, and when another attempt is made."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from fault_server import chat, serving
from test_faults import timed
from test_openai_backend import REQUEST

from lemon_jax.backends import OpenAIBackend

# Late replies


def by_turn(*steps):
    """Requests are answered by these steps in the order in which they come."""
    left = list(steps)

    def step(state, body):
        with state["lock"]:
            return left.pop(0) if left else chat("none is left")

    return step


def test_a_late_reply_counts_if_it_is_the_first():
    late = (*chat("first", usage=(7, 1)), {"X-Delay": "0.5"})
    never = (*chat("second", usage=(7, 2)), {"X-Delay": "1.9"})
    (reply,), state, seconds = timed([by_turn(late, never)], timeout_s=0.8)  # the second goes out after 0.4 s
    assert (reply.text, reply.generated_tokens, len(state["bodies"])) == ("first", 1, 2)
    assert 0.5 <= seconds < 0.8 + 1.5  # the server's threads are waited for
    assert reply.seconds < 0.8


def test_a_late_reply_is_nobodys_when_another_came_before():
    late = (*chat("first"), {"X-Delay": "0.9"})

    async def run(url):
        backend = OpenAIBackend(url + "/v1", "m", timeout_s=0.8, max_concurrency=4)
        texts = []
        try:
            for index in range(8):
                request = replace(REQUEST, sample_index=index)
                texts += [reply.text async for _, reply in backend.generate([request])]
                await asyncio.sleep(0.1)
        finally:
            await backend.aclose()
        return texts

    with serving(steps=[by_turn(late, *(chat(f"reply {i}") for i in range(8)))]) as (url, state):
        texts = asyncio.run(run(url))
    assert texts == [f"reply {i}" for i in range(8)]
    assert len(state["bodies"]) == 9
    assert state["bodies"][0] == state["bodies"][1]


def test_a_second_attempt_may_fail_while_the_first_goes_on():
    late = (*chat("first"), {"X-Delay": "0.7"})
    (reply,), _, _ = timed(
        [by_turn(late, (503, b"busy"), *[(*chat("third"), {"X-Delay": "2"})] * 9)], timeout_s=1.0
    )
    assert reply.text == "first"


def test_a_second_attempt_needs_a_free_place():
    """Silence halves what may be open, four to two: the calls that are open leave no room for another."""
    peaks = []

    def slow(state, body):
        with state["lock"]:
            state["open"] = state.get("open", 0) + 1
            peaks.append(state["open"])
        time.sleep(0.7)
        with state["lock"]:
            state["open"] -= 1
        return chat("late")

    requests = [replace(REQUEST, sample_index=i) for i in range(4)]
    replies, state, _ = timed([slow], requests, timeout_s=1.0, max_concurrency=4)
    assert [reply.text for reply in replies] == ["late"] * 4
    assert (max(peaks), len(state["bodies"])) == (4, 4)


def test_the_last_attempt_may_take_the_time_that_is_left():
    (reply,), state, _ = timed([*[(500, b"oops")] * 4, (*chat("5"), {"X-Delay": "0.7"})], timeout_s=1.0)
    assert (reply.text, len(state["bodies"])) == ("5", 5)


def test_waiting_for_a_turn_is_no_part_of_a_requests_time():
    """One slot, and calls that together take three times what one may take."""
    requests = [replace(REQUEST, sample_index=i) for i in range(6)]
    replies, _, seconds = timed(
        [(*chat("5"), {"X-Delay": "0.3"})], requests, timeout_s=0.9, max_concurrency=1
    )
    assert {reply.text for reply in replies} == {"5"}
    assert seconds >= 1.8

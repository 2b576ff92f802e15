"""Several servers of the same weights: which one a call goes to, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from fault_server import Handler, Server, chat, serving
from test_openai_backend import REQUEST
from test_worker_file import CAPACITIES, parse, run_pool

from lemon_jax.backends import OpenAIBackend
from lemon_jax.backends.concurrency import AdaptiveLimit, Places
from lemon_jax.errors import LemonError

DEAD = "http://127.0.0.1:9/v1"
REQUESTS = [replace(REQUEST, sample_index=i) for i in range(60)]


def quick(seconds):
    """A step that answers, after some seconds."""
    return [(*chat("5"), {"X-Delay": str(seconds)})]


async def ask_all(backend, requests=REQUESTS):
    return {i: reply async for i, reply in backend.generate(requests)}


def ask(urls, requests=REQUESTS, **options):
    async def run():
        backend = OpenAIBackend(urls, "m", **({"first_wait_s": 0.02} | options))
        try:
            return await ask_all(backend, requests)
        finally:
            await backend.aclose()

    replies = asyncio.run(run())
    return [replies[i] for i in range(len(requests))]


class Killable:
    """A server that can die with its connections, and come back at the same address."""

    def __init__(self, delay_s=0.05):
        self.delay_s, self.answered, self.port = delay_s, 0, 0
        self.begun = threading.Event()
        self.start()

    def start(self):
        killable = self

        class Connection(Handler):
            def setup(self):
                super().setup()
                killable.connections.append(self.connection)

            def do_POST(self):
                killable.begun.set()
                super().do_POST()

        self.connections = []
        self.server = Server(("127.0.0.1", self.port), Connection)
        self.server.state = {"lock": threading.Lock(), "bodies": [], "headers": []}
        self.server.state["steps"] = quick(self.delay_s)
        self.port = self.server.server_port
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def calls(self):
        return len(self.server.state["bodies"])

    def kill(self):
        self.server.shutdown()
        self.server.socket.close()
        for connection in self.connections:
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def killables():
    servers = []

    def make(**options):
        servers.append(Killable(**options))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


def test_a_call_goes_where_fewest_are_open_and_ties_go_by_order():
    limits = [AdaptiveLimit(2), AdaptiveLimit(4), AdaptiveLimit(4)]
    places = Places(limits)
    taken = [places.enter_now() for _ in range(10)]
    assert [place.index for place in taken] == [0, 1, 2, 0, 1, 2, 1, 2, 1, 2]
    assert places.enter_now() is None
    taken[1].leave()
    taken[4].leave()
    taken[5].leave()
    assert [places.enter_now().index for _ in range(3)] == [1, 1, 2]


def test_choice_equals_the_obvious_one():
    rng, limits = random.Random(0), [AdaptiveLimit(n) for n in (3, 1, 5)]
    places, held = Places(limits), []
    for _ in range(3000):
        limits[rng.randrange(3)].aside = rng.random() < 0.3
        avoid = rng.choice([None, 0, 1, 2])
        whole = [i for i in range(3) if not limits[i].aside] or [0, 1, 2]
        # The slow way: sort everything, take the head.
        order = sorted((i == avoid, limits[i].open, i) for i in whole if limits[i].open < limits[i].limit)
        place = places.enter_now(avoid)
        assert (place and place.index) == (order[0][2] if order else None)
        if place:
            held.append(place)
        while held and rng.random() < 0.5:
            held.pop(rng.randrange(len(held))).leave()


def test_no_call_waits_for_a_full_server_while_another_has_room():
    async def play():
        places = Places([AdaptiveLimit(1), AdaptiveLimit(1)])
        slow, quick = await places.enter(), await places.enter()
        waiting = [asyncio.create_task(places.enter()) for _ in range(3)]
        indices = []
        for task in waiting:
            await asyncio.sleep(0)
            quick.leave()
            quick = await task
            indices.append(quick.index)
        return slow.index, indices

    assert asyncio.run(play()) == (0, [1, 1, 1])


def test_calls_are_shared_out_and_each_server_has_its_own_limit():
    peaks = {}

    def step(state, body):
        with state["lock"]:
            state["open"] = state.get("open", 0) + 1
            peaks[id(state)] = max(peaks.get(id(state), 0), state["open"])
        time.sleep(0.02)
        with state["lock"]:
            state["open"] -= 1
        return chat("5")

    with ExitStack() as stack:
        servers = [stack.enter_context(serving(steps=[step])) for _ in range(3)]
        replies = ask([url + "/v1" for url, _ in servers], max_concurrency=4)
    assert {reply.text for reply in replies} == {"5"}
    calls = [len(state["bodies"]) for _, state in servers]
    assert sum(calls) == 60
    assert min(calls) >= 12
    assert sorted(peaks.values()) == [4, 4, 4]


def test_a_slow_server_gets_less():
    with serving(steps=quick(0.3)) as (slow, slow_state), serving(steps=quick(0.01)) as (fast, fast_state):
        replies = ask([slow + "/v1", fast + "/v1"], max_concurrency=4)
    assert {reply.text for reply in replies} == {"5"}
    assert len(slow_state["bodies"]) + len(fast_state["bodies"]) == 60
    assert len(slow_state["bodies"]) <= 20


def test_a_server_that_dies_loses_no_call(killables, caplog):
    dying, other = killables(), killables()

    def kill():
        assert dying.begun.wait(5)
        dying.kill_later = threading.Thread(target=dying.kill)
        dying.kill_later.start()

    async def run():
        backend = OpenAIBackend([dying.url, other.url], "m", max_concurrency=4, first_wait_s=30.0)
        try:
            killer = asyncio.create_task(asyncio.to_thread(kill))
            replies = await ask_all(backend)
            await killer
            return replies
        finally:
            await backend.aclose()

    with caplog.at_level(logging.WARNING):
        replies = asyncio.run(asyncio.wait_for(run(), 20))  # no call waits the 30 s of a backoff
    dying.kill_later.join()
    assert {reply.text for reply in replies.values()} == {"5"}
    assert dying.calls < 30
    assert other.calls >= 60 - dying.calls
    assert f"127.0.0.1:{dying.port} is set aside" in caplog.text


def test_a_server_that_comes_back_is_used_again(killables, caplog):
    coming, other = killables(delay_s=0.01), killables(delay_s=0.01)
    coming.kill()

    async def run():
        backend = OpenAIBackend([coming.url, other.url], "m", max_concurrency=4, first_wait_s=0.02)
        try:
            first = await ask_all(backend)
            while_away = other.calls
            coming.start()
            async with asyncio.timeout(10):
                while backend._servers[0].pace.aside:
                    await asyncio.sleep(0.01)
            return first, while_away, await ask_all(backend)
        finally:
            await backend.aclose()

    with caplog.at_level(logging.WARNING):
        first, while_away, second = asyncio.run(run())
    assert {reply.text for reply in [*first.values(), *second.values()]} == {"5"}
    assert while_away == 60
    assert 10 <= coming.calls <= 50
    assert f"127.0.0.1:{coming.port} is back" in caplog.text


def test_all_dead_is_an_infrastructure_failure():
    replies = ask([DEAD, "http://127.0.0.1:10/v1"], REQUESTS[:5], first_wait_s=0.001)
    assert all(reply.finish == "error" for reply in replies)
    assert all(reply.error.startswith("cannot connect: ") for reply in replies)


def test_many_dead_servers_take_no_attempt_from_a_call():
    with serving(steps=[chat("5")]) as (url, state):
        urls = [*(f"http://127.0.0.1:{port}/v1" for port in range(2, 12)), url + "/v1"]
        (reply,) = ask(urls, REQUESTS[:1], first_wait_s=30.0)  # and none waits
    assert reply.text == "5"
    assert len(state["bodies"]) == 1


def test_a_failed_attempt_is_repeated_elsewhere():
    with serving(steps=[(500, b"oops")]) as (bad, bad_state), serving(steps=[chat("5")]) as (good, _):
        replies = ask([bad + "/v1", good + "/v1"], REQUESTS[:8])
    assert {reply.text for reply in replies} == {"5"}
    assert len(bad_state["bodies"]) <= 8


def test_a_failed_health_check_sets_aside_and_frees_the_calls():
    hang = threading.Event()

    class Unwell(Handler):
        def do_GET(self):
            self.reply((503, b"engine dead"))

        def do_POST(self):
            first = not self.server.state["bodies"]
            super().do_POST() if first else hang.wait(10)

    try:
        with serving(Unwell, steps=[(500, b"oops")]) as (bad, _), serving(steps=quick(0.02)) as (good, _):
            start = time.monotonic()
            replies = ask([bad + "/v1", good + "/v1"], REQUESTS[:20], max_concurrency=4)
            seconds = time.monotonic() - start
            hang.set()
    finally:
        hang.set()
    assert {reply.text for reply in replies} == {"5"}
    assert seconds < 8  # the calls that hang were not waited for


def test_cancelling_leaves_no_place_taken():
    async def run(url):
        backend = OpenAIBackend([url, DEAD], "m", max_concurrency=3, first_wait_s=0.01)
        try:
            for pause_s in (0.0, 0.001, 0.01, 0.03):
                task = asyncio.create_task(ask_all(backend))
                await asyncio.sleep(pause_s)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await asyncio.sleep(0)
                assert [server.pace.open for server in backend._servers] == [0, 0]
            return await ask_all(backend, REQUESTS[:5])
        finally:
            await backend.aclose()

    with serving(steps=quick(0.01)) as (url, _):
        assert {reply.text for reply in asyncio.run(run(url + "/v1")).values()} == {"5"}


def test_identity_does_not_depend_on_the_server():
    names = []
    for urls in ("http://a:1/v1", ["http://a:1/v1"], ["http://a:1/v1", "http://b:1/v1"]):
        backend = OpenAIBackend(urls, "m")
        names.append(backend.identity)
        asyncio.run(backend.aclose())
    assert set(names) == {"openai:m@a:1"}


def file(line):
    return f'[models.m]\nbackend = "openai"\nmodel = "x"\n{line}\n' + CAPACITIES


def test_worker_file_takes_one_address_or_several():
    assert parse(file('base_url = "http://a/v1"')).models["m"].base_urls == ("http://a/v1",)
    two = parse(file('base_urls = ["http://a/v1", "http://b/v1"]')).models["m"].base_urls
    assert two == ("http://a/v1", "http://b/v1")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "base_urls = []",
        'base_urls = "http://a/v1"',
        'base_urls = ["http://a/v1", "b"]',
        'base_urls = ["http://a/v1", "http://a/v1/"]',
        'base_urls = ["http://a/v1", 3]',
        'base_url = "http://a/v1"\nbase_urls = ["http://b/v1"]',
    ],
)
def test_unfit_addresses_are_named(line):
    with pytest.raises(LemonError, match=r"w\.toml: models\.m\.base_url"):
        parse(file(line))


def test_check_wants_one_server_and_names_those_away(caplog):
    async def check(pool):
        await pool.check()

    dead = file(f'base_urls = ["{DEAD}", "http://127.0.0.1:10/v1"]')
    with pytest.raises(
        LemonError, match=r"127\.0\.0\.1:9/v1: cannot reach.*127\.0\.0\.1:10/v1: cannot reach"
    ):
        run_pool(dead, check)
    with serving(steps=[chat()]) as (url, _), caplog.at_level(logging.WARNING):
        run_pool(file(f'base_urls = ["{DEAD}", "{url}/v1"]'), check)
    assert f"{DEAD}: cannot reach" in caplog.text
    assert f"{url}/v1: " not in caplog.text

"""The number of open calls: halved by overload, grown by successes, never above its ceiling."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from fault_server import chat
from test_openai_backend import REQUEST, ask

from lemon_jax.backends.concurrency import AdaptiveLimit, Places


def one_server(ceiling: int) -> tuple[AdaptiveLimit, Places]:
    limit = AdaptiveLimit(ceiling)
    return limit, Places([limit])


def after(events: str, ceiling: int = 16) -> int:
    """The limit after a call each that succeeds ("s") or is refused ("r"), one after another."""

    async def play() -> int:
        limit, places = one_server(ceiling)
        for event in events:
            place = await places.enter()
            place.succeeded() if event == "s" else place.overloaded()
            place.leave()
        return limit.limit

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("events", "limit"),
    [
        ("", 16),
        ("s" * 100, 16),
        ("r", 8),
        ("rr", 4),
        ("r" * 50, 1),
        ("rrrr" + "s" * 4, 1),
        ("rrrr" + "s" * 5, 2),
        ("rrrr" + "s" * 15, 4),
        ("rr" + "s" * 5, 5),
        ("rr" + "s" * 5 + "r", 2),
        ("rr" + "s" * 4 + "r" + "s", 2),  # successes before a cut do not count after it
        ("r" + "s" * (8 + 9 + 10 + 11 + 12 + 13 + 14 + 15 - 1), 15),
        ("r" + "s" * (8 + 9 + 10 + 11 + 12 + 13 + 14 + 15 + 50), 16),
    ],
)
def test_halves_and_grows(events, limit):
    assert after(events) == limit


def test_a_burst_of_refusals_is_one_cut():
    async def play():
        limit, places = one_server(16)
        cuts = [place.overloaded() for place in [await places.enter() for _ in range(16)]]
        return limit.limit, cuts

    assert asyncio.run(play()) == (8, [True] + [False] * 15)


def test_successes_of_calls_sent_before_a_cut_do_not_raise_the_limit():
    async def play():
        (limit, places), limits = one_server(16), []
        early = [await places.enter() for _ in range(16)]
        early[0].overloaded()
        for place in early[1:]:
            place.succeeded()
        limits.append(limit.limit)
        for place in early[:9]:
            place.leave()
        late = await places.enter()
        for _ in range(8):
            late.succeeded()
        limits.append(limit.limit)
        # One that took its place anew is sent after the cut.
        again = await places.enter(again=True)
        for _ in range(9):
            again.succeeded()
        limits.append(limit.limit)
        return limits

    assert asyncio.run(play()) == [8, 9, 10]


def test_another_place_is_taken_only_where_one_is_free():
    async def play():
        limit, places = one_server(4)
        a, b = await places.enter(), await places.enter()
        a.overloaded()  # four become two, and both are taken
        assert places.enter_now() is None
        b.leave()
        c = places.enter_now()
        assert c is not None
        assert (limit.open, places.enter_now()) == (2, None)
        a.leave()
        c.leave()
        assert limit.open == 0

    asyncio.run(play())


class Server:
    """Room for some calls at once; one more is refused. Time is turns of the event loop."""

    def __init__(self, room: int):
        self.room = room
        self.open = self.peak = self.refused = 0

    async def call(self, turns: int) -> bool:
        self.open += 1
        self.peak = max(self.peak, self.open)
        fits = self.open <= self.room
        self.refused += not fits
        for _ in range(turns):
            await asyncio.sleep(0)
        self.open -= 1
        return fits


def flood(room: int, calls: int, ceiling: int = 16) -> tuple[Server, list[int]]:
    """The server after that many calls, all begun together; and the limit whenever one was answered."""
    server, (limit, places), limits = Server(room), one_server(ceiling), []

    async def one(turns: int) -> None:
        place = await places.enter()
        while not await server.call(turns):
            place.overloaded()
            place.leave()
            await asyncio.sleep(0)
            place = await places.enter(again=True)
        place.succeeded()
        place.leave()
        limits.append(limit.limit)

    async def play() -> None:
        rng = random.Random(room)
        await asyncio.gather(*(one(rng.randint(2, 9)) for _ in range(calls)))

    asyncio.run(play())
    assert server.open == limit.open == 0
    return server, limits


@pytest.mark.parametrize("room", [1, 2, 4, 7, 16, 99])
def test_finds_the_room_of_a_server(room):
    server, limits = flood(room, 400)
    assert len(limits) == 400
    assert server.peak == 16  # it begins at the ceiling, and never exceeds it
    assert max(limits) <= 16
    if room >= 16:
        assert server.refused == 0
    else:
        # Once settled it swings between half the room and a little above it.
        settled = Counter(limits[100:])
        assert max(settled) <= room + 2
        assert min(settled) >= max(1, room // 4)
        assert server.refused < 160  # calls that wait for their turn are not refused over and over


def test_those_who_wait_may_be_cancelled_at_any_moment():
    async def play(seed: int) -> None:
        rng, (limit, places) = random.Random(seed), one_server(3)
        open_now = 0

        async def one() -> None:
            nonlocal open_now
            for attempt in range(rng.randint(1, 3)):
                place = await places.enter(again=attempt > 0)
                open_now += 1
                assert open_now <= 3
                try:
                    await asyncio.sleep(0)
                    place.overloaded() if rng.random() < 0.3 else place.succeeded()
                finally:
                    open_now -= 1
                    place.leave()
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(one()) for _ in range(40)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
        failed = [t for t in tasks if not t.cancelled() and t.exception()]
        assert not failed
        assert limit.open == 0
        # Nothing is left in the queues: the places are all free.
        async with asyncio.timeout(1):
            (await places.enter()).leave()

    for seed in range(30):
        asyncio.run(play(seed))


def test_refused_calls_go_before_new_ones():
    async def play():
        (_, places), order = one_server(1), []

        async def one(name: str, refusals: int) -> None:
            place = await places.enter()
            for _ in range(refusals):
                order.append(f"{name} refused")
                place.leave()
                await asyncio.sleep(0)
                place = await places.enter(again=True)
            for _ in range(5):
                await asyncio.sleep(0)
            order.append(f"{name} done")
            place.leave()

        await asyncio.gather(one("a", 1), one("b", 0), one("c", 0))
        return order

    # b has taken the place while a paused; then a goes before c, which has waited for longer.
    assert asyncio.run(play()) == ["a refused", "b done", "a done", "c done"]


def test_a_server_with_little_room_answers_everything():
    """Over HTTP: a server that refuses the fifth call at once, and a worker file that allows sixteen."""

    def crowded(state, body):
        with state["lock"]:
            state["open"] = state.get("open", 0) + 1
            state["peak"] = max(state.get("peak", 0), state["open"])
            fits = state["open"] <= 4
        time.sleep(0.005)
        with state["lock"]:
            state["open"] -= 1
        return chat("5") if fits else (429, b"busy")

    requests = [replace(REQUEST, sample_index=i) for i in range(120)]
    replies, state = ask([crowded], requests, max_concurrency=16)
    assert {reply.text for reply in replies} == {"5"}
    assert state["peak"] <= 16
    assert len(state["bodies"]) < 2 * len(requests)


def test_a_fault_that_is_no_overload_changes_nothing():
    requests = [replace(REQUEST, sample_index=i) for i in range(30)]
    steps = [(500, b"oops"), *[chat("5")] * 3] * 10 + [chat("5")]
    replies, state = ask(steps, requests, max_concurrency=3)
    assert {reply.text for reply in replies} == {"5"}
    assert len(state["bodies"]) == 40

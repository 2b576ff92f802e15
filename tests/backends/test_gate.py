from __future__ import annotations

import asyncio
import random

import pytest

from lemon_jax.backends import ExclusiveGate


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_never_two_names_and_nobody_is_forgotten():
    async def run():
        gate, inside, done, rng = ExclusiveGate(quantum_s=0.002), [], [], random.Random(0)

        async def call(name):
            await asyncio.sleep(rng.random() * 0.02)
            async with gate.turn(name):
                inside.append(name)
                assert len(set(inside)) == 1
                await asyncio.sleep(rng.random() * 0.003)
                inside.remove(name)
            done.append(name)

        await asyncio.gather(*(call(rng.choice("abc")) for _ in range(150)))
        assert len(done) == 150
        assert gate._name is None
        assert not gate._waiting

    asyncio.run(run())


def holder(gate, name, log, release):
    async def run():
        async with gate.turn(name):
            log.append(name)
            await release.wait()

    return asyncio.create_task(run())


def test_shared_by_one_name_until_the_quantum_when_others_wait():
    async def run():
        clock, log, release = Clock(), [], asyncio.Event()
        gate = ExclusiveGate(quantum_s=30.0, clock=clock)
        tasks = [holder(gate, "a", log, release), holder(gate, "a", log, release)]
        await settle()
        clock.now = 100.0
        tasks.append(holder(gate, "a", log, release))  # nobody waits: the quantum does not matter
        await settle()
        assert log == ["a", "a", "a"]
        tasks += [holder(gate, "b", log, release), holder(gate, "a", log, release)]
        await settle()
        assert log == ["a", "a", "a"]  # b waits for a, and the late a waits behind b
        release.set()
        await asyncio.gather(*tasks)
        assert log == ["a", "a", "a", "b", "a"]

    asyncio.run(run())


def test_admits_within_the_quantum_and_is_fifo_between_names():
    async def run():
        clock, log, release = Clock(), [], asyncio.Event()
        gate = ExclusiveGate(quantum_s=30.0, clock=clock)
        tasks = [holder(gate, n, log, release) for n in ("a", "b", "c", "b")]
        await settle()
        clock.now = 29.0
        tasks.append(holder(gate, "a", log, release))
        await settle()
        assert log == ["a", "a"]
        release.set()
        await asyncio.gather(*tasks)
        assert log == ["a", "a", "b", "b", "c"]

    asyncio.run(run())


def test_cancelled_waiters_and_holders_leave_no_trace():
    async def run():
        clock, log, release = Clock(), [], asyncio.Event()
        gate = ExclusiveGate(quantum_s=0.0, clock=clock)
        first = holder(gate, "a", log, release)
        await settle()
        waiters = [holder(gate, n, log, release) for n in ("b", "c", "b")]
        await settle()
        waiters[0].cancel()
        waiters[2].cancel()
        first.cancel()  # its turn passes on while b's cancellations are under way
        await settle()
        assert log == ["a", "c"]
        waiters[1].cancel()
        await settle()
        assert gate._name is None
        late = holder(gate, "d", log, release)
        release.set()
        await late
        assert log == ["a", "c", "d"]

    asyncio.run(run())


def test_granted_and_cancelled_at_once():
    async def run():
        gate, log, release = ExclusiveGate(), [], asyncio.Event()
        first = holder(gate, "a", log, asyncio.Event())
        await settle()
        waiter = holder(gate, "b", log, release)
        await settle()
        gate._leave()  # grants b, whose task has not run yet
        waiter.cancel()
        await settle()
        assert gate._name is None
        gate._holders = 1  # what the line above took from a
        first.cancel()
        await settle()

    asyncio.run(run())


def test_last_waiter_of_another_name_gone_lets_the_own_name_in():
    async def run():
        clock, log, release = Clock(), [], asyncio.Event()
        gate = ExclusiveGate(quantum_s=10.0, clock=clock)
        first = holder(gate, "a", log, release)
        await settle()
        clock.now = 20.0
        other, own = holder(gate, "b", log, release), holder(gate, "a", log, release)
        await settle()
        assert log == ["a"]
        other.cancel()
        await settle()
        assert log == ["a", "a"]
        release.set()
        await asyncio.gather(first, own)

    asyncio.run(run())


def test_an_exception_in_a_turn_releases_it():
    async def run():
        gate = ExclusiveGate()
        with pytest.raises(ValueError, match="boom"):
            async with gate.turn("a"):
                raise ValueError("boom")
        async with gate.turn("b"):
            pass

    asyncio.run(run())

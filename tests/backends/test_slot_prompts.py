"""Slots of a llama.cpp server: a double that counts what is computed, and which state lies where."""

from __future__ import annotations

import asyncio

import pytest

from lemon_jax.backends import Message, Request
from lemon_jax.backends.slot_prompts import SlotPrompts, Waiting, common, prompt_text

ROLE, OTHER_ROLE = "role " * 200, "another role " * 100  # characters; the beginning of a system message


class Double:
    """A server whose slots hold texts; a character that is computed counts one."""

    def __init__(self, slots, *, reads=True):
        self.held = [""] * slots
        self.busy = [False] * slots
        self.files = {}
        self.computed = 0
        self.restored = 0
        self.largest = 0  # files at once
        self.reads = reads

    async def save(self, slot, name):
        assert not self.busy[slot]
        await asyncio.sleep(0)
        self.files[name] = self.held[slot]
        self.largest = max(self.largest, len(self.files))
        return len(self.held[slot])

    async def restore(self, slot, name):
        assert not self.busy[slot]
        await asyncio.sleep(0)
        if not self.reads or name not in self.files:
            return False
        self.held[slot] = self.files[name]
        self.restored += 1
        return True

    def remove(self, name):
        self.files.pop(name, None)

    async def answer(self, slot, text):
        assert not self.busy[slot]
        self.busy[slot] = True
        try:
            await asyncio.sleep(0.01)
            self.computed += len(text) - common(self.held[slot], text)
            self.held[slot] = text
            return "done"
        finally:
            self.busy[slot] = False


def run(texts, *, slots=8, double=None, limit=None):
    """Ask for all at once, as `EmbeddedBackend` does; the double afterwards."""
    double = double or Double(slots)

    async def main():
        waiting = Waiting()
        prompts = SlotPrompts(double, slots, waiting)
        room = asyncio.Semaphore(slots)

        async def one(text):
            async with room:
                ticket = waiting.add(text)
                async with prompts.slot_for(text, ticket, lambda slot: double.answer(slot, text)) as slot:
                    await double.answer(slot, text)

        await asyncio.gather(*(one(text) for text in texts))
        assert not waiting._texts

    asyncio.run(asyncio.wait_for(main(), 10))
    return double


def distinct(texts):
    """Characters of all texts, a common beginning counted once."""
    ordered = sorted(texts)
    return sum(len(b) - common(a, b) for a, b in zip(["", *ordered], ordered, strict=False))


def test_a_common_beginning_is_computed_once_whoever_asks_together():
    texts = [f"{ROLE}{i} question {i}" for i in range(6)] + [f"{OTHER_ROLE}{i} task" for i in range(2)]
    double = run(texts)
    assert double.computed == distinct(texts)
    assert double.restored == 6  # all but the two that computed the beginnings


def test_equal_prompts_are_computed_once_also_where_the_role_is_known():
    samples = [f"{ROLE}5 long question {'word ' * 100}"] * 5
    texts = [f"{ROLE}{i} question" for i in range(3)] + samples
    assert run(texts).computed == distinct(texts)


def test_more_calls_than_slots_and_short_prompts_are_answered_too():
    texts = [f"{i} short" for i in range(20)]
    double = run(texts, slots=3)
    assert not double.files  # nothing is worth a file
    texts = [f"{ROLE}{letter}" for letter in "abcdefghijklmnopqrst"]
    assert run(texts, slots=3).computed == distinct(texts)


def test_a_file_that_cannot_be_read_costs_time_only():
    texts = [f"{ROLE}{i} question" for i in range(4)]
    double = run(texts, double=Double(4, reads=False), slots=4)
    assert double.computed > distinct(texts)
    assert not double.files  # nobody would read it


def test_a_file_that_cannot_be_written_leaves_nothing():
    class Full(Double):
        async def save(self, slot, name):
            await super().save(slot, name)
            return 0

    double = run([f"{ROLE}{i} question" for i in range(4)], double=Full(4), slots=4)
    assert double.largest > 0
    assert not double.files


@pytest.mark.parametrize(("bound", "value"), [("_FILES", 2), ("_BYTES", 1300)])
def test_the_least_used_file_makes_room(monkeypatch, bound, value):
    """By their number, or by their bytes: here each has 600 to 610."""
    monkeypatch.setattr(f"lemon_jax.backends.slot_prompts.{bound}", value)
    texts = [f"{r} {'beginning ' * 60}{i}" for r in range(5) for i in range(3)]
    double = run(texts, slots=2)
    assert len(double.files) == 2
    assert 3 <= double.largest <= 4  # by those that are being written


def test_a_file_larger_than_all_may_be_is_not_kept(monkeypatch):
    monkeypatch.setattr("lemon_jax.backends.slot_prompts._BYTES", 100)
    double = run([f"{ROLE}{i} question" for i in range(4)], slots=4)
    assert double.largest > 0
    assert not double.files


@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_a_prompt_that_is_refused_says_nothing_of_the_server(outcome):
    class Fails(Double):
        tries = 0

        async def answer(self, slot, text):
            if not text.endswith("long"):
                return await super().answer(slot, text)
            self.tries += 1
            await asyncio.sleep(0.01)
            return outcome

    texts = [f"{ROLE}{i} question {i}" for i in range(4)]
    double = run([f"{ROLE} too long", *texts], double=Fails(5), slots=5)
    assert double.tries == 2  # as the first of all, and for its own reply
    if outcome == "refused":
        assert double.computed == distinct(texts)
        assert double.restored == 3
    else:
        assert not double.files  # whoever waited for another one's beginning would wait in vain


def test_who_waits_for_a_call_that_fails_goes_on():
    class Fails(Double):
        async def answer(self, slot, text):
            if text.endswith("bad"):
                await asyncio.sleep(0.01)
                raise RuntimeError("the server died")
            return await super().answer(slot, text)

    texts = [f"{ROLE} bad", f"{ROLE}1", f"{ROLE}2"]
    double = Fails(4)
    with pytest.raises(RuntimeError, match="died"):
        run(texts, double=double, slots=4)

    async def main():
        waiting, answered = Waiting(), []
        prompts = SlotPrompts(double, 4, waiting)

        async def one(text):
            ticket = waiting.add(text)
            async with prompts.slot_for(text, ticket, lambda slot: double.answer(slot, text)) as slot:
                await double.answer(slot, text)
                answered.append(text)

        await asyncio.gather(*map(one, texts), return_exceptions=True)
        return answered

    assert sorted(asyncio.run(asyncio.wait_for(main(), 10))) == texts[1:]


def test_prompts_begin_alike_where_their_chats_do():
    def text(*contents):
        messages = tuple(
            Message(role=role, content=c) for role, c in zip(("system", "user"), contents, strict=True)
        )
        return prompt_text(Request(model="m", messages=messages, max_tokens=1))

    assert common(text("role", "a"), text("role", "b")) > len("role")
    assert text("ab", "c") != text("a", "bc")
    for a, b, expected in (
        ("", "", 0),
        ("abc", "abd", 2),
        ("abc", "abc", 3),
        ("abc", "abcd", 3),
        ("x", "y", 0),
    ):
        assert common(a, b) == expected

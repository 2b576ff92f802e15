"""The scheduler of the jax workers on an engine of lists: who shares a step decides nothing but the time."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from lemon_jax.backends.pages import PagePool
from lemon_jax.backends.scheduler import Job, Scheduler

EOS = 0


@dataclass(frozen=True)
class Shape:
    slots: int = 3
    context: int = 32
    pages: int = 20
    page: int = 4
    parts: int = 2

    @property
    def most_pages(self):
        return self.context // self.page


def next_token(sequence, temperature=0.0, seed=0, drawn=0):
    """What the engine draws after a sequence: any function will do that depends on all of it."""
    key = [int(token) for token in (*sequence, *((seed, drawn) if temperature else ()))]
    return random.Random(repr(key)).randrange(1, 12) % 11


class ListEngine:
    """Keeps every page's tokens, and reads a sequence only through the table it is given."""

    def __init__(self, shape=None):
        self.shape = shape or Shape()
        self.memory = np.full((self.shape.pages, self.shape.page), -1)
        self.calls = 0
        self.written = 0
        self.decoded_rows = set()

    def rows(self, count):
        return min(2, self.shape.slots) if count <= 2 else self.shape.slots

    def prefill(self, tokens_RxC, table_RxM, index_R):
        self.calls += 1
        for tokens, table, index in zip(tokens_RxC, table_RxM, index_R, strict=True):
            page = table[index]
            self.written += page != 0
            self.memory[page] = tokens
            assert page == 0 or (self.memory[table[: index + 1]] >= 0).all()

    def decode(self, tokens_S, positions_S, table_SxM, temperature_S, seed_S, drawn_S):
        self.calls += 1
        self.decoded_rows.add(len(tokens_S))
        out = np.zeros(len(tokens_S), np.int32)
        for slot, (table, at) in enumerate(zip(table_SxM, positions_S, strict=True)):
            self.memory[table[at // self.shape.page], at % self.shape.page] = tokens_S[slot]
            sequence = self.memory[table].reshape(-1)[: at + 1]
            assert not table.any() or (sequence >= 0).all()
            out[slot] = next_token(sequence, temperature_S[slot], seed_S[slot], drawn_S[slot])
        return out


def text_of(ids):
    return "".join("abcdefghijk"[i] for i in ids)


def alone(job, context=32):
    """The oracle: a job's text and end, token after token."""
    drawn = []
    while True:
        drawn.append(next_token([*job.prompt, *drawn], job.temperature, job.seed, len(drawn)))
        end = drawn[-1] == EOS
        text = text_of(drawn[:-1] if end else drawn)
        starts = [text.find(stop) for stop in job.stop if stop in text]
        if starts:
            return text[: min(starts)], "stop", len(drawn)
        if end:
            return text, "stop", len(drawn)
        if len(drawn) == min(job.max_new, context - len(job.prompt)):
            return text, "length", len(drawn)


def random_job(rng):
    beginning = rng.choice([(), (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9)])
    return Job(
        prompt=beginning + tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 14))),
        max_new=rng.randrange(1, 16),
        stop=rng.choice([(), ("a",), ("bc", "f"), ("gg",)]),
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.randrange(3),
    )


def drain(scheduler, most=10_000):
    done = []
    while scheduler.busy:
        done += scheduler.step()
        most -= 1
        assert most, "no end"
    return done


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_gives_every_job_its_own_reply(seed):
    rng = random.Random(seed)
    shape = Shape(slots=rng.choice([1, 3, 8]), pages=rng.choice([9, 12, 40]), parts=rng.choice([1, 2, 4]))
    engine = ListEngine(shape)
    scheduler = Scheduler(engine, text_of, [EOS])
    jobs = [random_job(rng) for _ in range(30)]
    waiting, cancelled, done = list(jobs), [], []
    while waiting or scheduler.busy:
        for _ in range(rng.randrange(4)):
            if waiting:
                scheduler.submit(waiting.pop())
        done += scheduler.step()
        if rng.random() < 0.1:
            open_jobs = [
                job for job in jobs if job not in waiting and job not in done and job not in cancelled
            ]
            if open_jobs:
                cancelled.append(rng.choice(open_jobs))
                scheduler.cancel(cancelled[-1])
    assert len(done) + len(cancelled) == 30
    assert not set(map(id, done)) & set(map(id, cancelled))
    for job in done:
        assert (job.text, job.finish, len(job.drawn)) == alone(job)
    assert scheduler._pool.available == shape.pages - 1  # nothing is held any more
    assert not scheduler._parts
    assert not scheduler._order
    assert engine.decoded_rows <= {min(2, shape.slots), shape.slots}


def test_a_common_beginning_is_computed_once():
    engine = ListEngine(Shape(pages=60, slots=8))
    scheduler = Scheduler(engine, text_of, [EOS])
    beginning = (*range(1, 9), 3, 3, 3, 3)  # three pages
    jobs = [Job(prompt=(*beginning, i, 5), max_new=3) for i in range(1, 7)]
    for job in jobs[:4]:  # at once: three wait for what the first is having computed
        scheduler.submit(job)
    drain(scheduler)
    for job in jobs[4:]:  # later: it is still known
        scheduler.submit(job)
    drain(scheduler)
    assert engine.written == 3 + len(jobs)  # the beginning, and every job's own last page
    assert [(j.text, j.finish, len(j.drawn)) for j in jobs] == [alone(j) for j in jobs]


def test_a_beginning_survives_the_one_who_had_it_computed():
    engine = ListEngine(Shape(pages=60))
    scheduler = Scheduler(engine, text_of, [EOS])
    first, second = (Job(prompt=(*range(1, 10), i), max_new=4) for i in (1, 2))
    scheduler.submit(first)
    scheduler.submit(second)
    scheduler._admit()
    scheduler.cancel(first)
    assert drain(scheduler) == [second]
    assert (second.text, second.finish, len(second.drawn)) == alone(second)
    # Pages that were cancelled before they were written are not taken for known.
    third = Job(prompt=(9,) * 9, max_new=4)
    scheduler.submit(third)
    scheduler._admit()
    scheduler.cancel(third)
    again = Job(prompt=(9,) * 9, max_new=4)
    scheduler.submit(again)
    assert drain(scheduler) == [again]
    assert (again.text, again.finish, len(again.drawn)) == alone(again)


def test_a_pool_that_is_too_small_for_all_makes_the_last_wait():
    shape = Shape(slots=4, pages=9)
    scheduler = Scheduler(ListEngine(shape), text_of, [])
    jobs = [Job(prompt=(i,) * 5, max_new=20) for i in range(1, 5)]
    for job in jobs:
        scheduler.submit(job)
    done = drain(scheduler)
    assert sorted(map(id, done)) == sorted(map(id, jobs))
    assert scheduler.restarts > 0
    for job in jobs:
        assert len(job.drawn) == 20
        expected = Job(prompt=job.prompt, max_new=20)
        drawn = []
        while len(drawn) < 20:
            drawn.append(next_token([*expected.prompt, *drawn]))
        assert job.drawn == drawn


def test_slots_are_filled_as_they_become_free():
    scheduler = Scheduler(ListEngine(Shape(slots=2, pages=40)), text_of, [])
    for new in (1, 10, 1, 1, 1):
        scheduler.submit(Job(prompt=(new, 2), max_new=new))
    drain(scheduler)
    assert scheduler.decode_steps <= 12  # the long one's ten, the others beside it


def test_a_prompt_that_does_not_fit_is_refused():
    scheduler = Scheduler(ListEngine(), text_of, [EOS])
    for prompt, new in (((1,) * 32, 1), ((), 1), ((1,), 0)):
        with pytest.raises(ValueError, match="do not fit"):
            scheduler.submit(Job(prompt=prompt, max_new=new))
    job = Job(prompt=(1,) * 31, max_new=9)
    scheduler.submit(job)
    assert drain(scheduler) == [job]
    assert len(job.drawn) == 1  # all that the context has room for
    with pytest.raises(ValueError, match="hold no context"):
        Scheduler(ListEngine(Shape(pages=8)), text_of, [EOS])


def cut(tokens, stop, max_new=99):
    """A job whose tokens are those bytes, drawn one after the other."""
    scheduler = Scheduler(ListEngine(), lambda ids: bytes(ids).decode("utf-8", "replace"), [EOS])
    job = Job(prompt=(1,), max_new=max_new, stop=stop)
    for token in tokens:
        scheduler._advance(job, token)
        if job.finish:
            return job.text, job.finish, len(job.drawn)
    raise AssertionError("no end")


def test_text_ends_where_the_stop_begins():
    assert cut(b"abc\ndef", ("\n",)) == ("abc", "stop", 4)
    assert cut("héé€x".encode(), ("€",)) == ("héé", "stop", 8)
    assert cut(b"one two", ("two", "e t")) == ("on", "stop", 5)
    assert cut(b"aab\0", ("ab",)) == ("a", "stop", 3)
    assert cut(b"never\0", ("no",)) == ("never", "stop", 6)
    assert cut(b"x" * 500 + b"END" + b"y", ("END",), max_new=600) == ("x" * 500, "stop", 503)
    # At the limit too the stop wins, and of a character that is not whole nothing is left.
    assert cut(b"ab", ("b",), max_new=2) == ("a", "stop", 2)
    assert cut("a€".encode()[:3], (), max_new=3) == ("a", "length", 3)


def test_pages_are_kept_until_their_room_is_needed():
    pool = PagePool(6, 2)
    first = pool.take(3)
    pool.know([1, 2, 3, 4, 5], first)
    pool.release(first)
    assert pool.available == 5
    assert pool.begin([1, 2, 3, 4, 9, 9]) == first[:2]  # its third page was never full
    assert pool.begin([1, 2, 7, 7]) == first[:1]
    assert pool.take(4) is None
    pool.release(first[:2])
    pool.release(first[:1])
    assert pool.take(5) is not None
    assert pool.begin([1, 2]) == []

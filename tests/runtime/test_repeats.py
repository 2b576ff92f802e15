"""Equal agents of a spec take different samples, and an edit leaves those of the others alone."""

import asyncio
from dataclasses import replace

from runtime_helpers import PROBLEM, Worker, agent, caller, duty, spec

from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Executor, repeat_indices

PAIR = spec(
    agent("a", says="solve"), agent("b", says="solve"), agent("c", says="solve"), agent("d", "a", "b", "c")
)


def edited(agent_id, **changes):
    return spec(*(replace(a, **changes) if a.id == agent_id else a for a in PAIR.agents))


def test_places_among_equals():
    assert repeat_indices(PAIR) == {"a": 0, "b": 1, "c": 2, "d": 0}
    assert repeat_indices(edited("b", capacity="medium")) == {"a": 0, "b": 0, "c": 1, "d": 0}


def test_an_edit_leaves_the_places_of_the_others():
    places = repeat_indices(PAIR)
    for changed in "abc":
        kept = {i: place for i, place in places.items() if i != changed}
        for changes in ({"capacity": "medium"}, {"duty": "other"}):
            assert repeat_indices(edited(changed, **changes), kept) == kept | {changed: 0}


def test_an_agent_that_becomes_the_equal_of_others_takes_a_free_place():
    mixed = spec(agent("a", says="other"), agent("b", says="solve"), agent("c", says="solve"))
    places = repeat_indices(mixed)
    assert places == {"a": 0, "b": 0, "c": 1}
    now = spec(agent("a", says="solve"), agent("b", says="solve"), agent("c", says="solve"))
    assert repeat_indices(now, {"b": 0, "c": 1}) == {"a": 2, "b": 0, "c": 1}


def test_agents_that_the_edit_leaves_alone_are_asked_nothing_new():
    """The listener hears other replies only where the edit is: common random numbers."""
    worker = Worker(lambda request: f"{duty(request)} {request.sample_index}. Answer: 7")

    async def both(executor):
        original = await executor.execute(PAIR, PROBLEM)
        kept = {i: place for i, place in repeat_indices(PAIR).items() if i != "a"}
        return original, await executor.execute(edited("a", duty="other"), PROBLEM, repeats=kept)

    with caller(worker) as c:
        before, after = asyncio.run(both(Executor(c, read_answer)))
    outputs = {a.id: (a.output, b.output) for a, b in zip(before.agents, after.agents, strict=True)}
    assert outputs["a"][0] != outputs["a"][1]
    assert outputs["b"][0] == outputs["b"][1]
    assert outputs["c"][0] == outputs["c"][1]
    assert len({a.output for a in before.agents[:3]}) == 3

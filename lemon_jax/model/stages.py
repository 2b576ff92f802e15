"""Decoding in stages: a short cache while completions are short, and few rows once most have ended.

A decoding step costs by its rows and by the slots of its cache, used or not. Lengths differ: the longest
completion of a batch is often twice as long as the mean one. So the cache grows from stage to stage, and the
rows that go on are taken together in groups of half the size, group after group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from lemon_jax.model.decoder import KVCache

FIRST_STAGE = 64  # completion slots of the first stage; each next one has twice as many
FEWEST_ROWS = 8  # below that a step does not get cheaper

State = TypeVar("State")


def stage_ends(max_new: int) -> list[int]:
    """The completion slots at which stages end: 64, 128, 256, … and `max_new`."""
    ends: list[int] = []
    while (end := FIRST_STAGE << len(ends)) < max_new:
        ends.append(end)
    return [*ends, max_new]


def in_stages(
    state: State,
    cache: KVCache,
    *,
    max_new: int,
    spare: int,
    going: Callable[[State, int], Bool[Array, " batch"]],
    step: Callable[[State, KVCache, Bool[Array, " batch"]], tuple[State, KVCache]],
    regroup: bool,
) -> State:
    """Step until no row is `going(state, max_new)`. Rows come first in every leaf of `state` and `cache`.

    `going(state, end)` says which rows may go on below `end` completion slots; `step` takes some rows, and
    is told which of them may: those one step further. `cache` holds the prompts' slots; it is given `spare`
    slots beyond the completion's. Rows are independent of each other, so the groups change nothing but
    rounding. Without `regroup` all rows stay together: gathering rows that are split over devices would cost
    more than it saves.
    """
    batch = jax.tree.leaves(cache)[0].shape[0]
    prompt_slots = jax.tree.leaves(cache)[0].shape[2]
    for stage, end in enumerate(stage_ends(max_new)):
        cache = jax.tree.map(lambda x, slots=prompt_slots + end + spare: _grown(x, slots), cache)
        rows = max(-(-batch // 2**stage), min(batch, FEWEST_ROWS)) if regroup else batch
        may_go = lambda state, end=end: going(state, end)  # noqa: E731
        if rows == batch:
            state, cache = _run(state, cache, may_go, step)
        else:
            state, cache = _run_groups(state, cache, may_go, step, rows)
    return state


def _grown(x_BxKxSxE: Array, slots: int) -> Array:
    return jnp.pad(x_BxKxSxE, ((0, 0), (0, 0), (0, slots - x_BxKxSxE.shape[2]), (0, 0)))


_Going = Callable[[State], Bool[Array, " batch"]]
_Step = Callable[[State, KVCache, Bool[Array, " batch"]], tuple[State, KVCache]]


def _run(state: State, cache: KVCache, may_go: _Going, step: _Step) -> tuple[State, KVCache]:
    return jax.lax.while_loop(
        lambda both: jnp.any(may_go(both[0])), lambda both: step(*both, may_go(both[0])), (state, cache)
    )


def _run_groups(
    state: State, cache: KVCache, may_go: _Going, step: _Step, rows: int
) -> tuple[State, KVCache]:
    """One group of `rows` after the other: those that go on first, until none is left."""
    batch = jax.tree.leaves(cache)[0].shape[0]
    going_B = may_go(state)
    order_B = jnp.argsort(~going_B, stable=True)
    # A last group that is not full computes its last row again and writes it nowhere: to place `batch`.
    missing = -batch % rows
    source = jnp.concatenate([order_B, jnp.full((missing,), order_B[-1])])
    target = jnp.concatenate([order_B, jnp.full((missing,), batch)])

    def body(carry: tuple[Array, State, KVCache]) -> tuple[Array, State, KVCache]:
        group, state, cache = carry
        taken, written = (jax.lax.dynamic_slice_in_dim(x, group * rows, rows) for x in (source, target))
        some, some_cache = jax.tree.map(lambda x: x[taken], (state, cache))
        ran, ran_cache = _run(some, some_cache, may_go, step)
        state = jax.tree.map(lambda x, new: x.at[written].set(new, mode="drop"), state, ran)
        cache = jax.tree.map(lambda x, new: x.at[written].set(new, mode="drop"), cache, ran_cache)
        return group + 1, state, cache

    count = jnp.sum(going_B)
    _, state, cache = jax.lax.while_loop(
        lambda carry: carry[0] * rows < count, body, (jnp.int32(0), state, cache)
    )
    return state, cache

"""The automaton on the device: which tokens may come, where a token leads, and both for given completions.

A token may come if the language has it there, if the free text around it has room for it, and if what
remains of the `max_new` tokens is enough to finish: so whatever is drawn, a sample ends in time as a
valid text. All of it follows from the tokens before, so that training finds the same support again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lemon_jax.model.automaton import Automaton
from lemon_jax.model.layout import MASKED


class Place(NamedTuple):
    """Where a text has come to: its state, the room in the free text around it, the tokens left."""

    state: Int[Array, "*shape"]
    room: Int[Array, "*shape"]
    left: Int[Array, "*shape"]


class Constraint(NamedTuple):
    """A language, and how many tokens a completion may have."""

    automaton: Automaton
    max_new: Array | int


class Trace(NamedTuple):
    """The places before each token of given completions.

    `known` is False from the first token on that its place does not allow, and on padding; `free` is True
    where a known token was one of several.
    """

    automaton: Automaton
    places_BxC: Place
    known_BxC: Bool[Array, "batch completion"]
    free_BxC: Bool[Array, "batch completion"]

    def first(self, rows: int) -> Trace:
        """Of the first rows alone."""
        places, known, free = jax.tree.map(lambda x: x[:rows], self[1:])
        return Trace(self.automaton, places, known, free)


def allowed_classes(automaton: Automaton, place: Place) -> Bool[Array, "*shape classes"]:
    """The classes of tokens that may come."""
    a = automaton
    action = a.action_RxC[a.row_S[place.state]].astype(jnp.int32)
    target = place.state[..., None] + a.step_A[action]
    left = place.room[..., None] - a.use_A[action]
    room = jnp.where(a.room_A[action] < 0, left, a.room_A[action])
    in_time = a.distance_S[target] < place.left[..., None]
    return (action > 0) & (left >= 0) & (room >= a.need_S[target]) & in_time


def mask_logits(
    automaton: Automaton, place: Place, logits: Float[Array, "*shape vocab"]
) -> Float[Array, "*shape vocab"]:
    """The logits, `MASKED` where a token may not come; as they are where none may."""
    classes = open_classes(automaton, place)
    return jnp.where(jnp.take(classes, automaton.class_V, axis=-1, mode="clip"), logits, MASKED)


def open_classes(automaton: Automaton, place: Place) -> Bool[Array, "*shape classes"]:
    """The classes whose logits stay: those that may come, or all where none may."""
    classes = allowed_classes(automaton, place)
    return classes | ~jnp.any(classes, axis=-1, keepdims=True)


def count_allowed(automaton: Automaton, place: Place) -> Int[Array, "*shape"]:
    """How many tokens may come."""
    return _sizes(automaton, allowed_classes(automaton, place))


def _sizes(automaton: Automaton, classes: Array) -> Array:
    """How many tokens these classes hold: a plain sum, as not every device multiplies integer matrices."""
    size = jnp.broadcast_to(automaton.class_size_C, classes.shape)
    return jnp.sum(jnp.where(classes, size, 0), axis=-1)


def advance(automaton: Automaton, place: Place, token: Int[Array, "*shape"]) -> Place:
    """The place behind a token that may come."""
    a = automaton
    action = a.action_RxC[a.row_S[place.state], a.class_V[token]].astype(jnp.int32)
    room = jnp.where(a.room_A[action] < 0, place.room - a.use_A[action], a.room_A[action])
    return Place(place.state + a.step_A[action], room, place.left - 1)


def where(condition: Bool[Array, "*shape"], yes: Place, no: Place) -> Place:
    """The places of `yes` where the condition holds, else those of `no`."""
    return Place(*(jnp.where(condition, a, b) for a, b in zip(yes, no, strict=True)))


def begin(constraint: Constraint, batch: int) -> Place:
    """The places behind the prefix that all texts begin with."""
    a = constraint.automaton
    left = jnp.asarray(constraint.max_new, jnp.int32) - a.prefix_F.shape[0]
    return Place(*(jnp.full((batch,), x, jnp.int32) for x in (a.start, a.start_room, left)))


def trace(
    constraint: Constraint,
    completions_BxC: Int[Array, "batch completion"],
    lengths_B: Int[Array, " batch"],
) -> Trace:
    """The support under which each token of these completions was drawn."""
    a = constraint.automaton
    batch, steps = completions_BxC.shape
    prefix = min(a.prefix_F.shape[0], steps)
    start = begin(constraint, batch)
    begun_B = jnp.all(completions_BxC[:, :prefix] == a.prefix_F[None, :prefix], axis=-1)

    def walk(carry, xs):
        place, known_B = carry
        token_B, step = xs
        classes_BxK = allowed_classes(a, place)
        fits_B = jnp.take_along_axis(classes_BxK, a.class_V[token_B][:, None], axis=-1)[:, 0]
        known_B = known_B & fits_B & (step < lengths_B)
        count_B = _sizes(a, classes_BxK)
        after = where(known_B, advance(a, place, token_B), place)
        return (after, known_B), (place, known_B, known_B & (count_B > 1))

    xs = (completions_BxC[:, prefix:].T, jnp.arange(prefix, steps))
    _, (places, known, free) = jax.lax.scan(walk, (start, begun_B), xs)

    def with_prefix(x_TxB, first_B):
        head = jnp.broadcast_to(first_B[:, None], (batch, prefix))
        return jnp.concatenate([head, x_TxB.T], axis=1)

    in_prefix_B = jnp.zeros((batch,), bool)
    return Trace(
        automaton=a,
        places_BxC=jax.tree.map(with_prefix, places, start),
        known_BxC=with_prefix(known, begun_B),
        free_BxC=with_prefix(free, in_prefix_B),
    )

"""The automaton walked token by token on the host: to write given texts with it, and to check the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lemon_jax.model.automaton import MAX_TOKEN_BYTES, Automaton

Pieces = Mapping[bytes, Sequence[int]]  # the ids of tokens by what they spell


@dataclass(frozen=True)
class Walk:
    """Where a text has come to. `room` counts the bytes that the free text around it may still have,
    `left` the tokens. The arrays of `automaton` are NumPy's."""

    automaton: Automaton
    state: int
    room: int
    left: int

    @classmethod
    def begin(cls, automaton: Automaton, max_new: int) -> Walk:
        """Behind the prefix, of a completion of at most `max_new` tokens."""
        left = max_new - len(automaton.prefix_F)
        return cls(automaton, int(automaton.start), int(automaton.start_room), left)

    def step(self, token: int) -> Walk | None:
        """Behind this token; None if it may not come."""
        a = self.automaton
        action = int(a.action_RxC[a.row_S[self.state], a.class_V[token]])
        if action == 0:
            return None
        state, rest = self.state + int(a.step_A[action]), self.room - int(a.use_A[action])
        room = rest if a.room_A[action] < 0 else int(a.room_A[action])
        # There is no other way to end a text than to have room and tokens for its end.
        if rest < 0 or room < a.need_S[state] or a.distance_S[state] >= self.left:
            return None
        return Walk(a, state, room, self.left - 1)

    def follow(self, tokens: Iterable[int]) -> Walk | None:
        """Behind all of these; None if one of them may not come."""
        walk = self
        for token in tokens:
            after = walk.step(token)
            if after is None:
                return None
            walk = after
        return walk

    def spell(self, text: str, canonical: Sequence[int], pieces: Pieces) -> tuple[int, ...] | None:
        """Tokens that may come here and spell `text`: its canonical ones if they may, else the fewest.

        None if the text is outside of the language here, or does not leave enough tokens to end it.
        """
        if self.follow(canonical) is not None:
            return tuple(canonical)
        data = text.encode()
        # At each byte, the shortest way there. Where it leads follows from the bytes alone.
        best: list[tuple[Walk, tuple[int, ...]] | None] = [(self, ()), *[None] * len(data)]
        for i, here in enumerate(best):
            if here is None:
                continue
            walk, ids = here
            for end in range(i + 1, min(i + MAX_TOKEN_BYTES, len(data)) + 1):
                known = best[end]
                if known is not None and len(known[1]) <= len(ids) + 1:
                    continue
                for token in pieces.get(data[i:end], ()):
                    if (after := walk.step(token)) is not None:
                        best[end] = (after, (*ids, token))
                        break
        return None if best[-1] is None else best[-1][1]


def pieces_of(token_bytes: Sequence[bytes | None]) -> Pieces:
    """The ids of tokens by what they spell, from what each token spells."""
    pieces: dict[bytes, list[int]] = {}
    for token, spelled in enumerate(token_bytes):
        if spelled:
            pieces.setdefault(spelled, []).append(token)
    return pieces


def allowed(walk: Walk) -> np.ndarray:
    """[V]: True where a token may come. Slow: for tests, and for who wants to look."""
    _, one_of_each_C = np.unique(walk.automaton.class_V, return_index=True)
    fits_C = np.array([walk.step(int(token)) is not None for token in one_of_each_C])
    return fits_C[walk.automaton.class_V]

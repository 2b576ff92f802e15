"""The inside of a canonical quoted text, byte by byte: valid UTF-8, escapes of `dump`, something shown.

The states do not count: how long a text may be is the business of whoever walks them (see `grammar`).
"""

from __future__ import annotations

import sys
import unicodedata

import numpy as np

from .check import HIDDEN
from .dump import ESCAPED
from .reader import FORBIDDEN

EMPTY, SHOWN = 0, 1  # at a character's border: nothing shown yet; something shown, so the text may end
CLOSED = -1  # behind the closing quote
_NEVER, _BLANK, _VISIBLE = 0, 1, 2

Edges = list[dict[int, int]]  # state -> {byte: state}


def text_states() -> Edges:
    """The transitions of the states between the quotes; EMPTY is the first.

    Accepted is what `dump.quote` writes for a text that the strict verdict accepts as a name or a duty.
    """
    states = _States(_characters())
    for border in (EMPTY, SHOWN):
        states.characters(border)
        states.escapes(border)
    states.edges[SHOWN][ord('"')] = CLOSED
    return states.edges


def bytes_to_close(edges: Edges) -> list[int]:
    """For each state, the fewest bytes after which a closing quote may follow."""
    need = [0 if CLOSED in out.values() else sys.maxsize for out in edges]
    changed = True
    while changed:
        changed = False
        for state, out in enumerate(edges):
            best = min((need[target] + 1 for target in out.values() if target != CLOSED), default=sys.maxsize)
            if best < need[state]:
                need[state], changed = best, True
    return need


def _characters() -> np.ndarray:
    """What each code point is in a canonical text: never there as itself, blank, or visible."""
    kinds = np.full(sys.maxunicode + 1, _BLANK, np.uint8)
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    # Visible is what was so in Unicode 3.2 and still is: the same characters in every version of Python.
    old = unicodedata.ucd_3_2_0.category
    for code, char in enumerate(everything):
        if old(char)[0] not in "ZC" and unicodedata.category(char)[0] not in "ZC":
            kinds[code] = _VISIBLE
    kinds[[m.start() for m in HIDDEN.finditer(everything)]] = _BLANK
    for pattern in (FORBIDDEN, ESCAPED):
        kinds[[m.start() for m in pattern.finditer(everything)]] = _NEVER
    kinds[:0x20] = _NEVER  # written as escapes, as are the quote and the backslash
    kinds[[ord('"'), ord("\\")]] = _NEVER
    return kinds


class _States:
    """States made so far. Equal tails of characters share their states."""

    def __init__(self, kinds: np.ndarray):
        self.kinds = kinds
        self.edges: Edges = [{}, {}]
        self.known: dict[tuple[tuple[int, int], ...], int] = {}
        self.blocks: dict[tuple[int, bytes], int | None] = {}

    def characters(self, border: int) -> None:
        """One character of 1 to 4 bytes (RFC 3629) from `border` to the border behind it."""
        out = self.edges[border]
        for code in range(0x80):
            if self.kinds[code] != _NEVER:
                out[code] = SHOWN if self.kinds[code] == _VISIBLE else border
        for first_lead, leads, more, lowest in (
            (0xC0, 32, 1, 0x80),
            (0xE0, 16, 2, 0x800),
            (0xF0, 5, 3, 0x10000),
        ):
            for lead in range(leads):
                tail = self.tail(border, lead << (6 * more), more, lowest)
                if tail is not None:
                    out[first_lead + lead] = tail

    def tail(self, border: int, first: int, more: int, lowest: int) -> int | None:
        """The state before the last `more` bytes of the code points from `first` on; None if it has none.

        Below `lowest` a character would be written with fewer bytes, which UTF-8 forbids.
        """
        if more > 1:
            step = 1 << (6 * (more - 1))
            below = {0x80 + i: self.tail(border, first + i * step, more - 1, lowest) for i in range(64)}
            return self.state({byte: state for byte, state in below.items() if state is not None})
        if first < lowest or first > sys.maxunicode:
            return None
        key = (border, self.kinds[first : first + 64].tobytes())
        if key not in self.blocks:
            ends = {_BLANK: border, _VISIBLE: SHOWN}
            self.blocks[key] = self.state({0x80 + i: ends[k] for i, k in enumerate(key[1]) if k != _NEVER})
        return self.blocks[key]

    def escapes(self, border: int) -> None:
        r"""\" and \\ show something; \n, \r, \t and the two separators \u2028 and \u2029 do not."""
        last = self.state({ord("8"): border, ord("9"): border})
        assert last is not None
        for byte in b"202"[::-1]:
            last = self.state({byte: last})
            assert last is not None
        out = dict.fromkeys(b"nrt", border) | dict.fromkeys(b'"\\', SHOWN) | {ord("u"): last}
        escape = self.state(out)
        assert escape is not None
        self.edges[border][ord("\\")] = escape

    def state(self, out: dict[int, int]) -> int | None:
        if not out:
            return None
        key = tuple(sorted(out.items()))
        if key not in self.known:
            self.known[key] = len(self.edges)
            self.edges.append(out)
        return self.known[key]

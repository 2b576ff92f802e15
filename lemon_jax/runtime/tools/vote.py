"""Majority vote over the answers of several agents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from lemon_jax.numbers import parse_number


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, as it was first written; of equals the one seen first.

    Numbers are compared by value ("39", "39.0" and "$39" are one answer), other texts without regard
    to case and spacing. None and blank entries do not vote; None if nobody does.
    """
    first: dict[Hashable, str] = {}
    votes: Counter[Hashable] = Counter()
    for answer in answers:
        if answer is None or not answer.strip():
            continue
        number = parse_number(answer)
        key: Hashable = " ".join(answer.casefold().split()) if number is None else number
        first.setdefault(key, answer.strip())
        votes[key] += 1
    # Counter keeps insertion order and max takes the first of equals, so ties go to the earliest.
    return first[max(votes, key=votes.__getitem__)] if votes else None

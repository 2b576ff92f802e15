"""Adaptive edit sampling: families whose contrasts were large are drawn more often, none never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lemon_jax.spec import FAMILIES, Edit


@dataclass(frozen=True, kw_only=True)
class EditSampler:
    """The running mean of |contrast| of each family.

    sum_k <- (1 - rate) sum_k + rate |D|, weight_k <- (1 - rate) weight_k + rate;  ema_k = sum_k / weight_k
    p_k = floor + (1 - K floor) ema_k / sum ema, over the K families applicable to a spec

    so that the mean is one of contrasts that were seen, from the first one on (Adam's bias correction). A
    family that was not drawn yet counts as the mean of the others; without any contrast all are equal. So
    they are, always, if it is not `adaptive`.
    """

    families: tuple[str, ...] = FAMILIES
    sums: tuple[float, ...] = ()  # of each family; nothing seen yet
    weights: tuple[float, ...] = ()
    rate: float = 0.1
    floor: float = 0.1
    adaptive: bool = True

    def __post_init__(self) -> None:
        for name in ("sums", "weights"):
            if not getattr(self, name):
                object.__setattr__(self, name, (0.0,) * len(self.families))

    @property
    def ema(self) -> tuple[float, ...]:
        """The mean |contrast| of each family."""
        seen = [s / w for s, w in zip(self.sums, self.weights, strict=True) if w > 0]
        unseen = sum(seen) / len(seen) if seen else 1.0
        return tuple(s / w if w > 0 else unseen for s, w in zip(self.sums, self.weights, strict=True))

    def probabilities(self, families: Sequence[str] | None = None) -> dict[str, float]:
        """Probability of each of these families, of all without any named; they sum to 1."""
        ema = self.ema if self.adaptive else (1.0,) * len(self.families)
        values = {name: ema[self.families.index(name)] for name in families or self.families}
        total = sum(values.values())
        k = len(values)
        floor = min(self.floor, 1.0 / k) if k else 0.0
        if total <= 0:
            return dict.fromkeys(values, 1.0 / k)
        return {name: floor + (1 - k * floor) * value / total for name, value in values.items()}

    def draw(self, edits: Sequence[Edit], rng: random.Random) -> Edit | None:
        """A family by its probability, then one of its edits evenly; None if nothing can be edited."""
        if not edits:
            return None
        by_family: dict[str, list[Edit]] = {}
        for edit in edits:
            by_family.setdefault(edit.family, []).append(edit)
        p = self.probabilities(list(by_family))
        (family,) = rng.choices(list(p), weights=list(p.values()))
        return rng.choice(by_family[family])

    def updated(self, contrasts: Sequence[tuple[str, float]]) -> EditSampler:
        """After these (family, contrast) pairs, in their order."""
        sums, weights = list(self.sums), list(self.weights)
        for family, contrast in contrasts:
            k = self.families.index(family)
            sums[k] = (1 - self.rate) * sums[k] + self.rate * abs(contrast)
            weights[k] = (1 - self.rate) * weights[k] + self.rate
        return replace(self, sums=tuple(sums), weights=tuple(weights))

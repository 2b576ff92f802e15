"""Contrasts of a step: which fields are edited, and what an edited spec is worth beside its original."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lemon_jax.orchestrator import Rollout
from lemon_jax.runtime import places_of_sample, repeat_indices
from lemon_jax.spec import Edit, applicable
from lemon_jax.train.config import RunConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import Scored
from lemon_jax.train.rewards import Reward

NOISE_ERRORS = 2.0  # a contrast within so many standard errors of 0 is reported as noise


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One execution of a spec, with its reward."""

    scored: Scored
    reward: Reward


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """An edited spec beside its original, both executed K times: D = mean of R(original) - R(edited).

    Sample 0 of the original is the rollout's own execution. Samples are paired; a pair of which either is
    masked is left out.
    """

    index: int  # of the rollout
    edit: Edit
    originals: tuple[Reward, ...]  # [K]
    samples: tuple[Sample, ...]  # [K], of the edited spec
    noise_gate: float = 0.0  # in standard errors; see `gated`

    @property
    def differences(self) -> np.ndarray:
        """R(original) - R(edited) of the pairs that are known."""
        pairs = zip(self.originals, self.samples, strict=True)
        each = np.array([original.total - edited.reward.total for original, edited in pairs])
        return each[~np.isnan(each)]

    @property
    def difference(self) -> float:
        """D; NaN if no pair is known."""
        known = self.differences
        return float(np.mean(known)) if len(known) else math.nan

    @property
    def standard_error(self) -> float:
        """Of D: the standard deviation of the differences (ddof 1) over sqrt(their number); NaN below two."""
        known = self.differences
        return float(np.std(known, ddof=1) / math.sqrt(len(known))) if len(known) > 1 else math.nan

    def within(self, errors: float) -> bool:
        """Whether a known D is at most so many standard errors from 0, or has none that is known."""
        # So put, a standard error that is NaN makes it True.
        return not math.isnan(self.difference) and not abs(self.difference) > errors * self.standard_error

    @property
    def gated(self) -> bool:
        """Whether the noise gate takes the contrast out of the loss."""
        return self.noise_gate > 0 and self.within(self.noise_gate)

    @property
    def size(self) -> float:
        """|D| as far as it reaches the loss: 0 behind the noise gate, NaN where D is unknown.

        By it the edit sampler chooses. Noise makes |D| large even where D is 0, so that by |D| alone the
        families that say least would be drawn.
        """
        return 0.0 if self.gated else abs(self.difference)


def choose_edits(
    rollouts: Sequence[Rollout],
    count: int,
    sampler: EditSampler,
    rng: random.Random,
    *,
    per_rollout: int = 1,
) -> list[tuple[int, Edit]]:
    """At most `count` edits, before any of them is executed: of each valid rollout one, then, as far as
    `per_rollout` allows, of each another one, whose edited text is new."""
    order = [i for i, r in enumerate(rollouts) if r.valid]
    rng.shuffle(order)
    chosen: list[tuple[int, Edit]] = []
    left: dict[int, list[Edit]] = {}
    for _ in range(per_rollout):
        for index in order:
            if len(chosen) == count:
                return chosen
            if index not in left:
                left[index] = applicable(rollouts[index].parsed, sampler.families)
            edit = sampler.draw(left[index], rng)
            if edit is not None:
                chosen.append((index, edit))
                left[index] = [other for other in left[index] if other.text != edit.text]
    return chosen


def places_of_original(rollout: Rollout, sample: int) -> dict[str, int]:
    """Where the agents of a valid rollout stand in its `sample`-th execution."""
    assert rollout.parsed.spec is not None
    return places_of_sample(repeat_indices(rollout.parsed.spec), sample)


def places_of_edited(rollout: Rollout, edit: Edit, sample: int, config: RunConfig) -> dict[str, int]:
    """Where the agents of the edited spec stand in its `sample`-th execution.

    Agents that the edit leaves alone stand where they do in the original's, so that those whose inputs are
    the same ask nothing new and share their luck (common random numbers). Without common random numbers no
    agent shares a sample with any of the original's.
    """
    if not config.common_random_numbers:
        return places_of_sample(repeat_indices(edit.spec), config.contrast_samples + sample)
    kept = places_of_original(rollout, 0)
    kept.pop(edit.agent_id)
    return places_of_sample(repeat_indices(edit.spec, kept), sample)


def contrast_metrics(contrasts: Sequence[Contrast], *, noise_gate: float) -> dict[str, float | None]:
    """What the samples of a step's contrasts say of their noise; shares are of those that are known."""
    known = [c for c in contrasts if not math.isnan(c.difference)]
    errors = [c.standard_error for c in known if not math.isnan(c.standard_error)]
    noise = [float(c.within(NOISE_ERRORS)) for c in known]
    metrics = {"contrast/se": mean_of(errors), "frac_contrast_noise": mean_of(noise)}
    if noise_gate:
        metrics["frac_contrast_gated"] = mean_of([float(c.gated) for c in known])
    return metrics


def contrast_facts(contrast: Contrast) -> dict[str, float | None]:
    """D and, if there are several samples, its standard error, in the lines of executions.jsonl."""
    facts = {"contrast": contrast.difference}
    if len(contrast.samples) > 1:
        facts["contrast_se"] = contrast.standard_error
    return {name: None if math.isnan(value) else round(value, 6) for name, value in facts.items()}


def mean_of(values: Sequence[float] | np.ndarray) -> float | None:
    """The mean, for a line of metrics.jsonl: null where there is nothing to average."""
    return float(np.mean(values)) if len(values) else None

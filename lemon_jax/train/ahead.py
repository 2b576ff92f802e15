"""The specs of a step that is executed ahead, beside the update of the step before it, as a checkpoint
holds them: they cannot be sampled again, since the parameters that sampled them are gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lemon_jax.model import Samples
from lemon_jax.orchestrator import Orchestrator, Rollout

Packed = dict[str, np.ndarray]


def pack(rollouts: Sequence[Rollout], rows: int, slots: int) -> Packed:
    """The sampled ids and log-probabilities [rows, slots] and what else `Samples` has, of fixed shapes;
    without rollouts every length is 0."""
    tokens_BxC = np.zeros((rows, slots), np.int32)
    log_probs_BxC = np.zeros((rows, slots), np.float32)
    lengths_B, finished_B = np.zeros(rows, np.int32), np.zeros(rows, bool)
    for row, rollout in enumerate(rollouts):
        length = len(rollout.token_ids)
        tokens_BxC[row, :length] = rollout.token_ids
        log_probs_BxC[row, :length] = rollout.log_probs
        lengths_B[row], finished_B[row] = length, rollout.finished
    return dict(zip(Samples._fields, (tokens_BxC, log_probs_BxC, lengths_B, finished_B), strict=True))


def unpack(
    packed: Mapping[str, np.ndarray], policy: Orchestrator, texts: Sequence[str], group: int
) -> list[Rollout] | None:
    """The rollouts for the tasks with these texts, equal to those packed; None if there were none."""
    arrays: dict[str, Any] = {name: np.asarray(packed[name]) for name in Samples._fields}
    samples = Samples(**arrays)
    return policy.rollouts(texts, samples, group) if np.any(packed["lengths_B"]) else None

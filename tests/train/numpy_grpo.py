"""The losses once more, in plain loops: values and derivatives, written from the formulas."""

from __future__ import annotations

import math

import numpy as np


def advantages(rewards, group: int, floor: float = 0.2) -> np.ndarray:
    """(r - mean) / max(std, floor) over a group's known rewards; 0 for unknown and for equal ones."""
    out = np.zeros(len(rewards))
    for start in range(0, len(rewards), group):
        rows = [i for i in range(start, start + group) if not math.isnan(rewards[i])]
        known = [rewards[i] for i in rows]
        if len(set(known)) < 2:
            continue
        mean = sum(known) / len(known)
        std = math.sqrt(sum((r - mean) ** 2 for r in known) / len(known))
        for i in rows:
            out[i] = (rewards[i] - mean) / max(std, floor)
    return out


def grpo(log_probs, old, advantage, mask, clip: float):
    """Mean over the unmasked tokens of -min(rho A, clip(rho) A): (loss, its gradient, clipped share)."""
    total, count, clipped_tokens = 0.0, 0, 0
    gradient = np.zeros(np.shape(log_probs))
    for b in range(len(log_probs)):
        for t in range(len(log_probs[b])):
            if not mask[b][t]:
                continue
            count += 1
            rho = math.exp(log_probs[b][t] - old[b][t])
            a = advantage[b]
            bounded = min(max(rho, 1 - clip), 1 + clip)
            if bounded * a < rho * a:
                clipped_tokens += 1
                total -= bounded * a  # flat: no gradient
            else:
                total -= rho * a
                gradient[b][t] = -rho * a
    count = max(count, 1)
    return total / count, gradient / count, clipped_tokens / count


def kl(log_probs, ref, mask):
    """Mean over the unmasked tokens of exp(d) - d - 1, d = log pi_ref - log pi: (value, gradient)."""
    total, count = 0.0, 0
    gradient = np.zeros(np.shape(log_probs))
    for b in range(len(log_probs)):
        for t in range(len(log_probs[b])):
            if mask[b][t]:
                count += 1
                d = ref[b][t] - log_probs[b][t]
                total += math.exp(d) - d - 1
                gradient[b][t] = 1 - math.exp(d)
    count = max(count, 1)
    return total / count, gradient / count


def counterfactual(originals, editeds, contrasts, weights, tau: float):
    """Weighted mean of -|D| log sigmoid(sgn(D) tau (s - s')): (loss, dloss/ds, dloss/ds')."""
    total, weight = 0.0, 0.0
    by_original, by_edited = np.zeros(len(originals)), np.zeros(len(originals))
    for k in range(len(originals)):
        if weights[k] == 0:
            continue
        weight += weights[k]
        size, sign = abs(contrasts[k]), int(contrasts[k] > 0) - int(contrasts[k] < 0)
        margin = sign * tau * (originals[k] - editeds[k])
        total += weights[k] * size * math.log1p(math.exp(-margin))
        slope = -weights[k] * size * sign * tau / (1 + math.exp(margin))
        by_original[k], by_edited[k] = slope, -slope
    weight = weight or 1.0
    return total / weight, by_original / weight, by_edited / weight


def span_score(log_probs, first: int, last: int, normalise: bool) -> float:
    total = sum(log_probs[t] for t in range(first, last))
    return total / max(last - first, 1) if normalise else total

"""The losses once more, in plain loops: values and derivatives, written from the formulas."""

from __future__ import annotations

import math

import numpy as np


def advantages(rewards, group: int, floor: float = 0.2, scale: str = "group") -> np.ndarray:
    """(r - mean) / divisor over a group's known rewards; 0 for unknown and for equal ones."""
    out = np.zeros(len(rewards))
    everyone = [r for r in rewards if not math.isnan(r)]
    for start in range(0, len(rewards), group):
        rows = [i for i in range(start, start + group) if not math.isnan(rewards[i])]
        known = [rewards[i] for i in rows]
        if len(set(known)) < 2:
            continue
        mean = sum(known) / len(known)
        divisor = {"group": max(_std(known), floor), "batch": max(_std(everyone), floor), "none": 1.0}[scale]
        for i in rows:
            out[i] = (rewards[i] - mean) / divisor
    return out


def _std(values) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def token_weights(mask, how: str = "token") -> np.ndarray:
    """What the loss of each token is multiplied with: they are what its kind of mean divides by."""
    mask = np.asarray(mask, bool)
    out = np.zeros(mask.shape)
    specs = sum(any(row) for row in mask)
    for b, row in enumerate(mask):
        for t, seen in enumerate(row):
            if seen:
                divisors = {"token": mask.sum(), "sequence": specs * row.sum(), "constant": specs * 256}
                out[b, t] = 1.0 / divisors[how]
    return out


def grpo(log_probs, old, advantage, mask, low: float, high: float | None = None, how: str = "token"):
    """-min(rho A, clip(rho) A), summed with the weights of its mean: (loss, its gradient, clipped share)."""
    total, clipped_tokens = 0.0, 0
    weights = token_weights(mask, how)
    gradient = np.zeros(np.shape(log_probs))
    for b in range(len(log_probs)):
        for t in range(len(log_probs[b])):
            if not mask[b][t]:
                continue
            rho = math.exp(log_probs[b][t] - old[b][t])
            a = advantage[b]
            bounded = min(max(rho, 1 - low), 1 + (low if high is None else high))
            if bounded * a < rho * a:
                clipped_tokens += 1
                total -= weights[b][t] * bounded * a  # flat: no gradient
            else:
                total -= weights[b][t] * rho * a
                gradient[b][t] = -weights[b][t] * rho * a
    return total, gradient, clipped_tokens / max(np.sum(mask), 1)


def truncated(log_probs, old, advantage, mask, truncate: float, how: str = "token"):
    """-min(rho, truncate) A log pi, the weight held fixed: (loss, its gradient, truncated share)."""
    total, count = 0.0, 0
    weights = token_weights(mask, how)
    gradient = np.zeros(np.shape(log_probs))
    for b in range(len(log_probs)):
        for t in range(len(log_probs[b])):
            if mask[b][t]:
                rho = math.exp(log_probs[b][t] - old[b][t])
                count += rho > truncate
                gradient[b][t] = -weights[b][t] * min(rho, truncate) * advantage[b]
                total += gradient[b][t] * log_probs[b][t]
    return total, gradient, count / max(np.sum(mask), 1)


def kl(log_probs, ref, mask, estimator: str = "k3", how: str = "token"):
    """Schulman's estimates from d = log pi_ref - log pi: (value, gradient)."""
    total = 0.0
    weights = token_weights(mask, how)
    gradient = np.zeros(np.shape(log_probs))
    for b in range(len(log_probs)):
        for t in range(len(log_probs[b])):
            if mask[b][t]:
                d = ref[b][t] - log_probs[b][t]
                value = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]
                slope = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d)}[estimator]
                total += weights[b][t] * value
                gradient[b][t] = weights[b][t] * slope
    return total, gradient


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


def counterfactual_gradient(originals, contrasts, weights):
    """Weighted mean of -D s: (loss, dloss/ds)."""
    used = [k for k in range(len(originals)) if weights[k]]
    weight = sum(weights[k] for k in used) or 1.0
    by_original = np.zeros(len(originals))
    for k in used:
        by_original[k] = -weights[k] * contrasts[k] / weight
    return sum(by_original[k] * originals[k] for k in used), by_original


def span_score(log_probs, first: int, last: int, normalise: bool) -> float:
    total = sum(log_probs[t] for t in range(first, last))
    return total / max(last - first, 1) if normalise else total

"""GRPO and the counterfactual span loss, as (sum, weight) over per-token log-probabilities.

Both take log-probabilities, not logits, so that the big arrays stay inside `model.scoring`, and both
divide once, at the end, by a weight counted after masking.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LOG_RATIO_BOUND = 20.0


class Sum(NamedTuple):
    """A loss before its division: `total / max(weight, 1e-9)`."""

    total: Array
    weight: Array

    def mean(self) -> Array:
        return self.total / jnp.maximum(self.weight, 1e-9)


STD_FLOOR = 0.2  # a fifth of a success


def group_advantages(rewards: np.ndarray, group: int, *, floor: float = STD_FLOOR) -> np.ndarray:
    """Group-relative advantages (r - mean) / max(std, floor), after Shao et al. 2024 (GRPO), eq. 3.

    There the divisor is the std alone, which makes small differences of cost among specs that are all right
    (or all wrong) as loud as success against failure; the floor keeps them small.

    Args:
        rewards: [N * group], row n * group + g; NaN marks a masked execution, which is left out of
            mean and std and gets advantage 0.
        floor: in units of reward, positive.

    A group whose rewards are all equal gets exactly 0: equality of rewards is tested, since a float
    std of equal rewards need not be 0. So does a group with fewer than two rewards.
    """
    out = np.zeros(len(rewards), np.float32)
    for start in range(0, len(rewards), group):
        r = np.asarray(rewards[start : start + group], np.float64)
        seen = ~np.isnan(r)
        known = r[seen]
        if len(known) < 2 or np.all(known == known[0]):
            continue
        out[start : start + group][seen] = (known - known.mean()) / max(known.std(), floor)
    return out


def zero_std_fraction(rewards: np.ndarray, group: int) -> float:
    """Share of groups that carry no signal: all known rewards equal, or fewer than two known."""
    groups = [r[~np.isnan(r)] for r in rewards.reshape(-1, group)]
    return float(np.mean([len(r) < 2 or bool(np.all(r == r[0])) for r in groups]))


def token_mask(lengths_B: Int[Array, " batch"], steps: int) -> Bool[Array, "batch steps"]:
    """True on a row's first `length` positions."""
    return jnp.arange(steps)[None, :] < lengths_B[:, None]


def span_mask(
    first_K: Int[Array, " edits"], last_K: Int[Array, " edits"], steps: int
) -> Bool[Array, "edits steps"]:
    """True on positions [first, last) of each row."""
    t = jnp.arange(steps)[None, :]
    return (t >= first_K[:, None]) & (t < last_K[:, None])


def grpo(
    log_probs_BxC: Float[Array, "batch steps"],
    old_log_probs_BxC: Float[Array, "batch steps"],
    advantages_B: Float[Array, " batch"],
    mask_BxC: Bool[Array, "batch steps"],
    *,
    clip: float,
) -> tuple[Sum, Array]:
    """Clipped policy-gradient loss, token by token, and the share of clipped tokens.

    -min(rho A, clip(rho, 1 - clip, 1 + clip) A) with rho = pi / pi_old, summed over the tokens of
    all specs; its weight is their number (Shao et al. 2024, eq. 3, with the token mean of DAPO).
    """
    # Twice masked: 0 * inf on padding would be NaN.
    log_ratio = jnp.where(mask_BxC, log_probs_BxC - old_log_probs_BxC, 0.0)
    ratio = jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    advantage = advantages_B[:, None]
    clipped = jnp.clip(ratio, 1.0 - clip, 1.0 + clip)
    per_token = -jnp.minimum(ratio * advantage, clipped * advantage)
    weight = jnp.sum(mask_BxC.astype(jnp.float32))
    was_clipped = jnp.sum(jnp.where(mask_BxC & (ratio * advantage > clipped * advantage), 1.0, 0.0))
    return Sum(jnp.sum(jnp.where(mask_BxC, per_token, 0.0)), weight), was_clipped / jnp.maximum(weight, 1.0)


def kl_to_reference(
    log_probs_BxC: Float[Array, "batch steps"],
    ref_log_probs_BxC: Float[Array, "batch steps"],
    mask_BxC: Bool[Array, "batch steps"],
) -> Sum:
    """The k3 estimate exp(d) - d - 1 with d = log pi_ref - log pi (Schulman 2020).

    d is clamped before the exponential; clamped after it, the value is finite and the gradient NaN.
    """
    d = jnp.where(mask_BxC, ref_log_probs_BxC - log_probs_BxC, 0.0)
    d = jnp.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Sum(jnp.sum(jnp.exp(d) - d - 1.0), jnp.sum(mask_BxC.astype(jnp.float32)))


def span_score(
    log_probs_KxC: Float[Array, "edits steps"], mask_KxC: Bool[Array, "edits steps"], *, normalise: bool
) -> Float[Array, " edits"]:
    """s(z|c): the span's summed token log-probabilities, or their mean."""
    total_K = jnp.sum(jnp.where(mask_KxC, log_probs_KxC, 0.0), axis=-1)
    if not normalise:
        return total_K
    return total_K / jnp.maximum(jnp.sum(mask_KxC.astype(jnp.float32), axis=-1), 1.0)


def counterfactual(
    original_K: Float[Array, " edits"],
    edited_K: Float[Array, " edits"],
    contrast_K: Float[Array, " edits"],
    weight_K: Float[Array, " edits"],
    *,
    tau: float,
) -> Sum:
    """Localised counterfactual preference, weighted by the contrast D = R(y) - R(y').

    L = -|D| log sigmoid( sgn(D) tau (s(z|c) - s(z'|c)) ), METHOD of LEMON (arXiv 2605.14483): only the
    tokens of the edited span are scored, all else is frozen context. `weight_K` is 0 for an absent or
    masked edit; the weight of the sum counts the others. D = 0 gives no loss and no gradient.
    """
    contrast_K = jnp.where(weight_K > 0, contrast_K, 0.0)
    margin_K = jnp.sign(contrast_K) * tau * (original_K - edited_K)
    per_edit_K = -jnp.abs(contrast_K) * jax.nn.log_sigmoid(margin_K)
    return Sum(jnp.sum(per_edit_K * weight_K), jnp.sum(weight_K))

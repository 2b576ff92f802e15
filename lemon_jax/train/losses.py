"""GRPO and the counterfactual span loss, as (sum, weight) over per-token log-probabilities.

Both take log-probabilities, not logits, so that the big arrays stay inside `model.scoring`, and both
divide once, at the end, by a weight counted after masking.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

LOG_RATIO_BOUND = 20.0
TOKEN_BUDGET = 256  # of a spec: what the shipped policies may write at most


class Sum(NamedTuple):
    """A loss before its division: `total / max(weight, 1e-9)`."""

    total: Array
    weight: Array

    def mean(self) -> Array:
        return self.total / jnp.maximum(self.weight, 1e-9)


STD_FLOOR = 0.2  # a fifth of a success


def group_advantages(
    rewards: np.ndarray,
    group: int,
    *,
    floor: float = STD_FLOOR,
    scale: Literal["group", "batch", "none"] = "group",
) -> np.ndarray:
    """Group-relative advantages (r - mean) / divisor, after Shao et al. 2024 (GRPO), eq. 3.

    There the divisor is the group's std alone, which makes small differences of cost among specs that are all
    right (or all wrong) as loud as success against failure; the floor keeps them small.

    Args:
        rewards: [N * group], row n * group + g; NaN marks a masked execution, which is left out of
            mean and std and gets advantage 0.
        floor: in units of reward, positive.
        scale: the divisor. "group": max(std of the group, floor). "batch": max(std of all known rewards,
            floor), so that a group with small differences stays small beside the others (Liu et al. 2025,
            "Tricks or Traps?", arXiv 2508.08221; REINFORCE++ divides by the std of the centred rewards
            instead). "none": 1, which has no bias towards groups of one difficulty (Liu et al. 2025,
            Dr. GRPO).

    A group whose rewards are all equal gets exactly 0: equality of rewards is tested, since a float
    std of equal rewards need not be 0. So does a group with fewer than two rewards.
    """
    out = np.zeros(len(rewards), np.float32)
    all_known = np.asarray(rewards, np.float64)
    all_known = all_known[~np.isnan(all_known)]
    for start in range(0, len(rewards), group):
        r = np.asarray(rewards[start : start + group], np.float64)
        seen = ~np.isnan(r)
        known = r[seen]
        if len(known) < 2 or np.all(known == known[0]):
            continue
        divisor = 1.0 if scale == "none" else max((all_known if scale == "batch" else known).std(), floor)
        out[start : start + group][seen] = (known - known.mean()) / divisor
    return out


def carries_signal(rewards: np.ndarray, group: int) -> np.ndarray:
    """[groups] True where two known rewards differ; [N * group] rewards, NaN where masked."""
    groups = [r[~np.isnan(r)] for r in rewards.reshape(-1, group)]
    return np.array([len(r) > 1 and bool(np.any(r != r[0])) for r in groups], bool)


def zero_std_fraction(rewards: np.ndarray, group: int) -> float:
    """Share of groups that carry no signal: all known rewards equal, or fewer than two known."""
    return float(np.mean(~carries_signal(rewards, group)))


def token_mask(lengths_B: Int[Array, " batch"], steps: int) -> Bool[Array, "batch steps"]:
    """True on a row's first `length` positions."""
    return jnp.arange(steps)[None, :] < lengths_B[:, None]


def span_mask(
    first_K: Int[Array, " edits"], last_K: Int[Array, " edits"], steps: int
) -> Bool[Array, "edits steps"]:
    """True on positions [first, last) of each row."""
    t = jnp.arange(steps)[None, :]
    return (t >= first_K[:, None]) & (t < last_K[:, None])


def _clamped_log_ratio(numerator: Array, denominator: Array, mask: Array) -> Array:
    """log(p / q) where the mask is True and 0 elsewhere, clamped before anyone takes its exponential.

    Clamped after it, the value is finite and the gradient NaN; and 0 * inf on padding would be NaN too.
    """
    return jnp.clip(jnp.where(mask, numerator - denominator, 0.0), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def grpo(
    log_probs_BxC: Float[Array, "batch steps"],
    old_log_probs_BxC: Float[Array, "batch steps"],
    advantages_B: Float[Array, " batch"],
    mask_BxC: Bool[Array, "batch steps"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "batch steps"], Float[Array, "batch steps"]]:
    """The clipped policy-gradient loss of each token (0 on padding), and 1 where a token was clipped.

    -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = pi / pi_old (Shao et al. 2024, eq. 3);
    a higher upper bound leaves rare tokens room to rise (Yu et al. 2025, DAPO).
    """
    ratio = jnp.exp(_clamped_log_ratio(log_probs_BxC, old_log_probs_BxC, mask_BxC))
    advantage = advantages_B[:, None]
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    per_token = -jnp.minimum(ratio * advantage, clipped * advantage)
    was_clipped = mask_BxC & (ratio * advantage > clipped * advantage)
    return jnp.where(mask_BxC, per_token, 0.0), was_clipped.astype(jnp.float32)


def truncated_policy_gradient(
    log_probs_BxC: Float[Array, "batch steps"],
    old_log_probs_BxC: Float[Array, "batch steps"],
    advantages_B: Float[Array, " batch"],
    mask_BxC: Bool[Array, "batch steps"],
    *,
    truncate: float,
) -> tuple[Float[Array, "batch steps"], Float[Array, "batch steps"]]:
    """-stop_gradient(min(rho, truncate)) A log pi of each token, and 1 where the weight was truncated.

    Truncated importance weights: unlike a clipped token, a truncated one still has a gradient (Espeholt et
    al. 2018, IMPALA; MiniMax 2025, CISPO).
    """
    ratio = jnp.exp(_clamped_log_ratio(log_probs_BxC, old_log_probs_BxC, mask_BxC))
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, truncate))
    log_probs = jnp.where(mask_BxC, log_probs_BxC, 0.0)
    per_token = -weight * advantages_B[:, None] * log_probs
    was_truncated = mask_BxC & (ratio > truncate)
    return jnp.where(mask_BxC, per_token, 0.0), was_truncated.astype(jnp.float32)


def kl_to_reference(
    log_probs_BxC: Float[Array, "batch steps"],
    ref_log_probs_BxC: Float[Array, "batch steps"],
    mask_BxC: Bool[Array, "batch steps"],
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> Float[Array, "batch steps"]:
    """An estimate of KL(pi || pi_ref) at each token (0 on padding), from d = log pi_ref - log pi.

    Schulman 2020, "Approximating KL divergence": k1 = -d, unbiased, may be negative; k2 = d^2 / 2, biased,
    its gradient is that of the KL; k3 = exp(d) - d - 1, unbiased and never negative. As a loss on samples,
    k1 has an expected gradient of 0 and only adds noise: it is for reports.
    """
    d = _clamped_log_ratio(ref_log_probs_BxC, log_probs_BxC, mask_BxC)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d * d
    return jnp.exp(d) - d - 1.0


def aggregate(
    per_token_BxC: Float[Array, "batch steps"],
    mask_BxC: Bool[Array, "batch steps"],
    how: Literal["token", "sequence", "constant"] = "token",
) -> Sum:
    """One number of the losses of tokens, which are 0 on padding.

    "token": the mean over all tokens of the batch (DAPO): long specs weigh more. "sequence": the mean over
    specs of the mean over their tokens (Shao et al. 2024): a token of a long spec weighs less. "constant":
    the sum over specs and tokens, divided by the number of specs and TOKEN_BUDGET, whatever their lengths
    (Liu et al. 2025, Dr. GRPO). Specs without a token are in no mean.
    """
    tokens_B = jnp.sum(mask_BxC.astype(jnp.float32), axis=-1)
    if how == "token":
        return Sum(jnp.sum(per_token_BxC), jnp.sum(tokens_B))
    specs = jnp.sum((tokens_B > 0).astype(jnp.float32))
    if how == "sequence":
        return Sum(jnp.sum(jnp.sum(per_token_BxC, axis=-1) / jnp.maximum(tokens_B, 1.0)), specs)
    return Sum(jnp.sum(per_token_BxC), specs * TOKEN_BUDGET)


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


def counterfactual_gradient(
    original_K: Float[Array, " edits"],
    contrast_K: Float[Array, " edits"],
    weight_K: Float[Array, " edits"],
) -> Sum:
    """The plain policy-gradient form of the same credit: L = -D s(z|c) (METHOD of LEMON, an ablation).

    The original span is made likelier by its contrast; the edited one is not scored. Weights and masked
    edits as in `counterfactual`.
    """
    contrast_K = jnp.where(weight_K > 0, contrast_K, 0.0)
    return Sum(jnp.sum(-contrast_K * original_K * weight_K), jnp.sum(weight_K))

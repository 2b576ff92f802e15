"""One jit-compiled update: GRPO + KL to the reference + localised counterfactual credit."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array

from lemon_jax.model import Constraint, Decoder, completion_log_probs, trace
from lemon_jax.model.sharding import constrain_tree, mesh_of, tree_shardings
from lemon_jax.train import losses
from lemon_jax.train.batch import UpdateBatch
from lemon_jax.train.config import UpdateConfig

SCORING_CHUNK = 64


class TrainState(NamedTuple):
    """What training changes on the device: parameters (all of the policy, or its adapters) and optimiser."""

    params: nnx.State
    opt_state: Any


def optimizer(config: UpdateConfig) -> optax.GradientTransformation:
    """Adam after clipping by global norm, with a short linear warm-up."""
    schedule = optax.linear_schedule(
        config.learning_rate / (config.warmup + 1), config.learning_rate, config.warmup
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.adam(schedule, b2=0.95))


def init_state(params: nnx.State, config: UpdateConfig) -> TrainState:
    """A fresh optimiser for these parameters, its moments split like them."""
    init, mesh = optimizer(config).init, mesh_of(params)
    if mesh is not None:
        init = jax.jit(init, out_shardings=tree_shardings(jax.eval_shape(init, params), mesh))
    return TrainState(params=params, opt_state=init(params))


def cast(params: nnx.State, config: UpdateConfig) -> nnx.State:
    """The parameters as the decoder computes with them: in `compute_dtype`, but for the scales of norms."""

    def one(path: tuple[Any, ...], x: Array) -> Array:
        scale = any(getattr(key, "key", None) == "scale" for key in path)
        return x if scale else x.astype(config.compute_dtype)

    return jax.tree_util.tree_map_with_path(one, params)


class Weights(NamedTuple):
    """What the losses of a step are divided by; of the whole step also where its parts are accumulated."""

    policy: Array  # as `aggregation` counts
    tokens: Array


def weights_of(mask_BxC: Array, config: UpdateConfig) -> Weights:
    """The weights of the tokens that count."""
    nothing = jnp.zeros(mask_BxC.shape, jnp.float32)
    counted = losses.aggregate(nothing, mask_BxC, config.aggregation)
    return Weights(policy=counted.weight, tokens=jnp.sum(mask_BxC.astype(jnp.float32)))


def loss_weights(batches: UpdateBatch, config: UpdateConfig, constraint: Constraint | None) -> Weights:
    """The weights of micro-batches stacked along a first axis."""
    steps, lengths_B = batches.completions_BxC.shape[-1], batches.lengths_B.reshape(-1)
    mask_BxC = losses.token_mask(lengths_B, steps) & batches.kept_B.reshape(-1, 1)
    if constraint is not None:
        mask_BxC &= trace(constraint, batches.completions_BxC.reshape(-1, steps), lengths_B).free_BxC
    return weights_of(mask_BxC, config)


def span_scores(
    log_probs_BxC: Array,
    edited_KxC: Array,
    batch: UpdateBatch,
    *,
    normalise: bool,
    free_BxC: Array | None = None,
    edited_free_KxC: Array | None = None,
) -> tuple[Array, Array]:
    """(s(z|c), s(z'|c)) of every edit. The original's comes from its rollout's own scoring pass.

    A token that had no alternative is in no span: where `free` is given, it is True for the others.
    """
    steps = log_probs_BxC.shape[1]
    original = losses.span_mask(batch.first_K, batch.last_K, steps)
    edited = losses.span_mask(batch.first_K, batch.edited_lengths_K, steps)
    if free_BxC is not None and edited_free_KxC is not None:
        original, edited = original & free_BxC[batch.source_K], edited & edited_free_KxC
    return (
        losses.span_score(log_probs_BxC[batch.source_K], original, normalise=normalise),
        losses.span_score(edited_KxC, edited, normalise=normalise),
    )


def _policy_loss(
    log_probs_BxC: Array, batch: UpdateBatch, mask_BxC: Array, config: UpdateConfig
) -> tuple[Array, Array]:
    """The loss of each token, and 1 where its ratio was bounded."""
    given = (log_probs_BxC, batch.old_log_probs_BxC, batch.advantages_B, mask_BxC)
    if config.policy_loss == "clipped":
        return losses.grpo(*given, clip_low=config.clip_low, clip_high=config.clip_high)
    return losses.truncated_policy_gradient(*given, truncate=config.truncate)


def _credit(
    log_probs_BxC: Array,
    edited_KxC: Array,
    batch: UpdateBatch,
    config: UpdateConfig,
    free_BxC: Array | None,
    edited_free_KxC: Array | None,
) -> losses.Sum:
    """The counterfactual loss of the step's edits, before its division."""
    original_K, edited_K = span_scores(
        log_probs_BxC,
        edited_KxC,
        batch,
        normalise=config.normalise_spans,
        free_BxC=free_BxC,
        edited_free_KxC=edited_free_KxC,
    )
    if config.counterfactual_form == "preference":
        return losses.counterfactual(original_K, edited_K, batch.contrast_K, batch.weight_K, tau=config.tau)
    return losses.counterfactual_gradient(original_K, batch.contrast_K, batch.weight_K)


def total_loss(
    decoder: Decoder,
    reference: Decoder,
    batch: UpdateBatch,
    config: UpdateConfig,
    constraint: Constraint | None = None,
    weights: Weights | None = None,
    *,
    remat: bool = False,
) -> tuple[Array, dict[str, Array]]:
    """L = L_GRPO + kl * KL(pi || pi_ref) + counterfactual * L_CF, and the metrics of the step.

    L_GRPO and the KL are aggregated as `aggregation` says. The counterfactual loss is divided by the number
    of tokens of the step: with "token", a token of an edited span weighs as much as one of GRPO, times
    `counterfactual`. Without KL no reference is scored, and the metric `kl` is 0.

    Rollouts and edited specs are scored in one pass, in the layout that sampled them. With a `constraint`
    they are scored over the support that it left when they were sampled; tokens without alternative have no
    loss and are counted nowhere. Of a micro-batch, with the `weights` of the whole step, this is its share of
    the step's loss and metrics: they add up, but for `sampling_gap`, which is a maximum.
    """
    num_rollouts = batch.completions_BxC.shape[0]
    rows = (
        jnp.concatenate([batch.prompts_BxP, batch.prompts_BxP[batch.source_K]]),
        jnp.concatenate([batch.prompt_lengths_B, batch.prompt_lengths_B[batch.source_K]]),
        jnp.concatenate([batch.completions_BxC, batch.edited_completions_KxC]),
        jnp.concatenate([batch.lengths_B, batch.edited_lengths_K]),
    )
    score = partial(completion_log_probs, temperature=config.temperature, chunk=SCORING_CHUNK, remat=remat)
    support = None if constraint is None else trace(constraint, rows[2], rows[3])
    all_log_probs, all_entropy = score(decoder, *rows, trace=support)
    log_probs_BxC = all_log_probs[:num_rollouts]

    mask_BxC = losses.token_mask(batch.lengths_B, log_probs_BxC.shape[1]) & batch.kept_B[:, None]
    free = edited_free = None
    if support is not None:
        free, edited_free = support.free_BxC[:num_rollouts], support.free_BxC[num_rollouts:]
        mask_BxC = mask_BxC & free
    weights = weights or weights_of(mask_BxC, config)
    per_token, was_clipped = _policy_loss(log_probs_BxC, batch, mask_BxC, config)
    policy = losses.Sum(losses.aggregate(per_token, mask_BxC, config.aggregation).total, weights.policy)
    tokens = weights.tokens
    kl = losses.Sum(jnp.float32(0), jnp.float32(1))
    if config.kl:
        own = None if support is None else support.first(num_rollouts)
        ref_log_probs_BxC, _ = score(reference, *(x[:num_rollouts] for x in rows), trace=own)
        estimate = losses.kl_to_reference(
            log_probs_BxC, ref_log_probs_BxC, mask_BxC, estimator=config.kl_estimator
        )
        kl = losses.Sum(losses.aggregate(estimate, mask_BxC, config.aggregation).total, weights.policy)
    spans = _credit(log_probs_BxC, all_log_probs[num_rollouts:], batch, config, free, edited_free)
    loss_cf = losses.Sum(spans.total, jnp.maximum(tokens, 1.0)).mean()
    loss = policy.mean() + config.kl * kl.mean() + config.counterfactual * loss_cf
    entropy = jnp.sum(jnp.where(mask_BxC, all_entropy[:num_rollouts], 0.0))
    log_ratio = jnp.where(mask_BxC, log_probs_BxC - batch.old_log_probs_BxC, 0.0)
    metrics = {
        "loss": loss,
        "loss_grpo": policy.mean(),
        "loss_cf": loss_cf,
        "kl": kl.mean(),
        "entropy": entropy / jnp.maximum(tokens, 1.0),
        "clip_fraction": jnp.sum(was_clipped) / jnp.maximum(tokens, 1.0),
        # How far scoring is from sampling: 0 up to rounding, or the two disagree.
        "sampling_gap": jnp.max(jnp.abs(log_ratio)),
    }
    return loss, metrics


@partial(jax.jit, static_argnames=("graph", "config", "remat"), donate_argnames=("state",))
def update(
    state: TrainState,
    reference: nnx.State,
    batch: UpdateBatch,
    constraint: Constraint | None = None,
    *,
    frozen: tuple[nnx.State, ...] = (),
    graph: nnx.GraphDef,
    config: UpdateConfig,
    remat: bool = False,
) -> tuple[TrainState, dict[str, Array]]:
    """The state after one step of Adam on `total_loss`, and the step's metrics.

    A batch of `batch.micro_batches` is accumulated: one decoder pass a micro-batch, one step of Adam. What
    policy and reference share, and nothing trains, is `frozen`, in the dtype it is computed with.
    """

    def loss_fn(
        params: nnx.State, batch: UpdateBatch, weights: Weights | None
    ) -> tuple[Array, dict[str, Array]]:
        decoder = nnx.merge(graph, cast(params, config), *frozen)
        start = nnx.merge(graph, reference, *frozen)
        return total_loss(decoder, start, batch, config, constraint, weights, remat=remat)

    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    if batch.completions_BxC.ndim == 2:
        (_, metrics), grads = gradient(state.params, batch, None)
    else:
        weights = loss_weights(batch, config, constraint)
        grads, metrics = _accumulate(partial(gradient, state.params), state.params, batch, weights)
    updates, opt_state = optimizer(config).update(grads, state.opt_state, state.params)
    metrics["grad_norm"] = optax.tree.norm(grads)
    stepped = TrainState(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    return constrain_tree(stepped), metrics


def _accumulate(
    gradient: Any, params: nnx.State, batches: UpdateBatch, weights: Weights
) -> tuple[nnx.State, dict[str, Array]]:
    """Gradients and metrics of a step from those of its micro-batches, one after the other."""

    def add(total: nnx.State, batch: UpdateBatch) -> tuple[nnx.State, dict[str, Array]]:
        (_, metrics), grads = gradient(batch, weights)
        return constrain_tree(jax.tree.map(jnp.add, total, grads)), metrics

    grads, each = jax.lax.scan(add, constrain_tree(jax.tree.map(jnp.zeros_like, params)), batches)
    metrics = {name: jnp.sum(values) for name, values in each.items()}
    return grads, metrics | {"sampling_gap": jnp.max(each["sampling_gap"])}

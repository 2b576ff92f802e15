"""The same update as tunix (google-tunix) computes it; update.py times it.

tunix's own Llama of the policy's sizes, its own `grpo_loss_fn` and the train step of its trainer, compiled
as it compiles them. It has no counterfactual part: the edited sequences are rollouts to it, 32 in all. The
reference scores the 24 rollouts, as here.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl import common
from tunix.rl.algo_core import grpo_loss_fn
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

from lemon_jax.model import DecoderConfig
from lemon_jax.train.batch import UpdateBatch
from lemon_jax.train.config import UpdateConfig

PAD, EOS = 0, 1  # no row holds them: all are of full length


def llama(config: DecoderConfig, seed: int) -> Llama3:
    """tunix's Llama of these sizes; its weights are random, which costs the same time."""
    assert (config.tie_embeddings, config.qkv_bias, config.qk_norm) == (True, False, False)
    sizes = ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.embed_dim,
        hidden_dim=config.mlp_dim,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        rope_theta=int(config.rope_theta),
        norm_eps=config.norm_eps,
        weight_tying=True,
    )
    return Llama3(sizes, rngs=nnx.Rngs(seed))


def example(batch: UpdateBatch, reference: Llama3, settings: UpdateConfig) -> Callable[[], Any]:
    """A call that scores the rollouts with the reference and gives what tunix trains on."""
    graph, state = nnx.split(reference)
    prompts = jnp.concatenate([batch.prompts_BxP, batch.prompts_BxP[np.asarray(batch.source_K)]])
    completions = jnp.concatenate([batch.completions_BxC, batch.edited_completions_KxC])
    rollouts, rows = len(batch.prompts_BxP), len(prompts)
    advantages = jnp.concatenate([batch.advantages_B, batch.contrast_K])
    old = jnp.full(completions.shape, float(np.asarray(batch.old_log_probs_BxC)[0, 0]), jnp.float32)

    @jax.jit
    def score(state: Any, prompts: jax.Array, completions: jax.Array) -> jax.Array:
        scores = common.compute_per_token_logps(
            graph, state, prompts, completions, PAD, EOS, temperature=settings.temperature
        )
        assert isinstance(scores, jax.Array)
        return scores

    def make() -> Any:
        scores = score(state, prompts[:rollouts], completions[:rollouts])
        return common.TrainExample(
            prompt_ids=prompts,
            prompt_mask=jnp.ones_like(prompts, bool),
            completion_ids=completions,
            completion_mask=jnp.ones_like(completions, bool),
            advantages=advantages,
            ref_per_token_logps=jnp.pad(scores, ((0, rows - rollouts), (0, 0))),
            old_per_token_logps=old,
        )

    return make


def tunix_step(
    config: DecoderConfig, settings: UpdateConfig, batch: UpdateBatch, parts: int
) -> Callable[[], object]:
    """A call that makes one update, its rows in `parts` micro-batches (tunix's gradient accumulation)."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(settings.learning_rate, b1=0.9, b2=0.95, weight_decay=0.0),
    )
    grpo = SimpleNamespace(
        beta=settings.kl, epsilon=settings.clip_low, epsilon_high=settings.clip_high, loss_algo="grpo",
        loss_agg_mode="token-mean", temperature=settings.temperature, kl_loss_mode="low_var_kl",
        kl_clamp_value=None,
    )  # fmt: skip
    # Its layers name the axes of a mesh, also on one device.
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with mesh:
        trainer = PeftTrainer(
            llama(config, 0),
            optimizer,
            TrainingConfig(
                eval_every_n_steps=10**9, gradient_accumulation_steps=parts if parts > 1 else None
            ),
        )
        trainer = trainer.with_loss_fn(
            lambda model, train_example: grpo_loss_fn(model, train_example, grpo, PAD, EOS), has_aux=True
        ).with_gen_model_input_fn(lambda x: {"train_example": x})
        train, _ = trainer.jit_train_and_eval_step()
        make = example(batch, llama(config, 1), settings)

    def step() -> object:
        with mesh:
            pieces = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), make())
            for part in range(parts):
                train(jax.tree.map(itemgetter(part), pieces))
            return jax.block_until_ready(nnx.state(trainer.model))

    return step

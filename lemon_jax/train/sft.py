"""SFT warm start: the policy learns to write the teacher's specs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from lemon_jax.errors import LemonError
from lemon_jax.model import Decoder, completion_log_probs
from lemon_jax.orchestrator import Orchestrator, pad

# Padded lengths: few, so that few programs are compiled, but close enough to waste little.
PROMPT_BUCKETS = (64, 128, 192, 256)
COMPLETION_BUCKETS = (64, 112, 160, 224, 320)
LONG_BUCKET = 128  # of what is longer than these


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Warm-start hyperparameters; `steps` updates of `batch` specs each."""

    steps: int = 700
    batch: int = 32
    learning_rate: float = 1.5e-3
    warmup: int = 40
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Example:
    """One task's prompt ids and one spec's ids, end token included."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


def encode_examples(
    policy: Orchestrator, pairs: Sequence[tuple[str, str]], *, skip_long: bool = False
) -> list[Example]:
    """(task text, canonical spec) pairs as ids; with `skip_long`, without specs that the policy cannot write.

    Raises LemonError for a spec longer than `policy.max_new` tokens otherwise.
    """
    out = []
    for task_text, spec_text in pairs:
        completion = (*policy.tokenizer.encode(spec_text), policy.tokenizer.eos_id)
        if len(completion) > policy.max_new:
            if skip_long:
                continue
            raise LemonError(
                f"a teacher's spec has {len(completion)} tokens, the policy writes at most {policy.max_new}"
            )
        out.append(Example(prompt=tuple(policy.prompt_ids(task_text)), completion=completion))
    return out


def _bucket(length: int, buckets: Sequence[int]) -> int:
    # A chat prompt explains the spec language, so it is longer than the buckets.
    return next((b for b in buckets if length <= b), -(-length // LONG_BUCKET) * LONG_BUCKET)


def batches(examples: Sequence[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless shuffled batches, each of one padded shape where a batch of that shape can be filled."""
    if len(examples) < size:
        raise LemonError(f"{len(examples)} examples do not fill one batch of {size}; use a smaller batch")
    groups = _by_shape(examples, size)
    while True:
        epoch: list[list[Example]] = []
        for group in groups:
            members = list(group)
            rng.shuffle(members)
            epoch += [members[i : i + size] for i in range(0, len(members) - size + 1, size)]
        rng.shuffle(epoch)
        yield from epoch


def _by_shape(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """The examples of each padded shape. Fewer than a batch of them go with those of the next longer shape,
    of the longest with those before: else they would never be trained on."""
    shapes: dict[tuple[int, int], list[Example]] = {}
    for e in examples:
        shape = (_bucket(len(e.prompt), PROMPT_BUCKETS), _bucket(len(e.completion), COMPLETION_BUCKETS))
        shapes.setdefault(shape, []).append(e)
    groups: list[list[Example]] = []
    waiting: list[Example] = []
    for shape in sorted(shapes):
        waiting = waiting + shapes[shape]
        if len(waiting) >= size:
            groups.append(waiting)
            waiting = []
    if waiting:
        groups[-1] = groups[-1] + waiting
    return groups


def sft_loss(
    decoder: Decoder,
    prompts_BxP: Int[Array, "batch prompt"],
    prompt_lengths_B: Int[Array, " batch"],
    completions_BxC: Int[Array, "batch completion"],
    lengths_B: Int[Array, " batch"],
) -> Float[Array, ""]:
    """Mean negative log-probability of a spec token, in nats."""
    log_probs_BxC, _ = completion_log_probs(
        decoder, prompts_BxP, prompt_lengths_B, completions_BxC, lengths_B, chunk=32
    )
    return -jnp.sum(log_probs_BxC) / jnp.maximum(jnp.sum(lengths_B), 1).astype(jnp.float32)


def optimizer(config: SFTConfig) -> optax.GradientTransformation:
    """AdamW with linear warm-up and cosine decay; norms' scales are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        config.warmup,
        max(config.steps, config.warmup + 1),
        0.05 * config.learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
        ),
    )


def train(
    policy: Orchestrator,
    examples: Sequence[Example],
    config: SFTConfig,
    on_step: Callable[[int, float], None] | None = None,
) -> Orchestrator:
    """The policy after `config.steps` updates. `on_step(step, loss)` is called once a step."""
    graph, params = nnx.split(policy.decoder)
    params = jax.tree.map(lambda x: x.copy(), params)  # donated below; the given policy keeps its own
    tx = optimizer(config)
    opt_state = tx.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step_fn(params, opt_state, *batch):
        loss, grads = jax.value_and_grad(lambda p: sft_loss(nnx.merge(graph, p), *batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    stream = batches(examples, config.batch, random.Random(config.seed))
    pending = None  # the loss of step k is read after step k + 1 is dispatched
    for step in range(config.steps):
        batch = next(stream)
        prompts = pad(
            [e.prompt for e in batch],
            _bucket(max(len(e.prompt) for e in batch), PROMPT_BUCKETS),
            policy.tokenizer.pad_id,
        )
        completions = pad(
            [e.completion for e in batch],
            _bucket(max(len(e.completion) for e in batch), COMPLETION_BUCKETS),
            policy.tokenizer.pad_id,
        )
        params, opt_state, loss = step_fn(params, opt_state, *prompts, *completions)
        if pending is not None:
            _report(step - 1, pending, on_step)
        pending = loss
    if pending is not None:
        _report(config.steps - 1, pending, on_step)
    return policy.with_decoder(nnx.merge(graph, params))


def _report(step: int, loss: Array, on_step: Callable[[int, float], None] | None) -> None:
    value = float(np.asarray(loss))
    if not np.isfinite(value):
        raise LemonError(f"warm start: the loss of step {step} is {value}; lower the learning rate")
    if on_step:
        on_step(step, value)

"""Log-probabilities of given completions, without ever holding [batch, time, vocabulary]."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lemon_jax.model.decoder import Decoder, project_logits
from lemon_jax.model.head_gradient import Support, head_gradients
from lemon_jax.model.layout import attention_mask, rope_positions
from lemon_jax.model.sharding import batch_shards, gathered, on_one_device
from lemon_jax.model.support import Trace, mask_logits, open_classes

TOKENS_OF_A_DEVICE = 512  # whose logits it computes at a time on a mesh


def completion_hidden(
    decoder: Decoder,
    prompts_BxP: Int[Array, "batch prompt"],
    prompt_lengths_B: Int[Array, " batch"],
    completions_BxC: Int[Array, "batch completion"],
    *,
    remat: bool = False,
) -> Float[Array, "batch completion dim"]:
    """The hidden state that predicts each completion token: that of the token before it.

    In the layout of cached decoding, so that both give the same numbers (see `layout`).
    """
    prompt_slots, steps = prompts_BxP.shape[1], completions_BxC.shape[1]
    num_slots = prompt_slots + steps
    slots = jnp.arange(num_slots)
    hidden_BxSxD, _ = decoder(
        jnp.concatenate([prompts_BxP, completions_BxC], axis=1),
        rope_positions(prompt_lengths_B, slots, prompt_slots),
        attention_mask(prompt_lengths_B, slots, prompt_slots, num_slots),
        remat=remat,
        keep_cache=False,
    )
    # The first token is predicted by the last true prompt token, which lies before the padding.
    last_Bx1xD = jnp.take_along_axis(hidden_BxSxD, (prompt_lengths_B - 1)[:, None, None], axis=1)
    return jnp.concatenate([last_Bx1xD, hidden_BxSxD[:, prompt_slots : num_slots - 1]], axis=1)


def token_log_probs(
    logits: Float[Array, "*shape vocab"], tokens: Int[Array, "*shape"], temperature: float
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """log p(token) and the entropy -sum p log p, in nats, of softmax(logits / temperature).

    The entropy is a measurement: it has no gradient, whose backward pass would cost as much as the other's.
    """
    return _with_total(logits, tokens, temperature)[:2]


def _with_total(logits: Array, tokens: Array, temperature: float) -> tuple[Array, Array, Array]:
    """What `token_log_probs` gives, and logsumexp(logits / temperature)."""
    logits = logits / temperature
    log_total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - log_total
    fixed, fixed_total = jax.lax.stop_gradient((logits, log_total))
    p = jnp.exp(fixed - fixed_total[..., None])
    return chosen, fixed_total - jnp.sum(p * fixed, axis=-1), fixed_total


def completion_log_probs(
    decoder: Decoder,
    prompts_BxP: Int[Array, "batch prompt"],
    prompt_lengths_B: Int[Array, " batch"],
    completions_BxC: Int[Array, "batch completion"],
    completion_lengths_B: Int[Array, " batch"],
    *,
    temperature: float = 1.0,
    chunk: int = 64,
    remat: bool = False,
    trace: Trace | None = None,
) -> tuple[Float[Array, "batch completion"], Float[Array, "batch completion"]]:
    """(log p(completion token | prompt, earlier tokens), entropy there): fp32, nats, 0 on padding.

    Prompts and completions are right-padded, and every prompt has at least one token. `temperature`
    (> 0) divides the logits, as in `sampling.sample`. Logits exist for `chunk` steps at a time (for more
    where a mesh splits the rows), in the forward and in the backward pass; `remat` as in `Decoder`. The
    log-probabilities are differentiable in `decoder`, the entropy is not, and all is finite whatever the
    padding holds, as long as its ids lie in the vocabulary. With the `trace` of completions that were sampled
    within a language, only tokens that could have come count: a token without alternative has 0, and so has
    one beyond the language. Raises ValueError for a temperature or chunk <= 0.
    """
    if temperature <= 0 or chunk <= 0:
        raise ValueError(f"temperature {temperature} and chunk {chunk} must be positive")
    batch, steps = completions_BxC.shape
    hidden_BxCxD = completion_hidden(decoder, prompts_BxP, prompt_lengths_B, completions_BxC, remat=remat)
    valid_BxC = jnp.arange(steps)[None, :] < completion_lengths_B[:, None]
    # Where twice: cleaning only the result would let the padding's gradient through as 0 * inf.
    hidden_BxCxD = jnp.where(valid_BxC[:, :, None], hidden_BxCxD, 0)

    # On a mesh a device holds few of the rows, and for each chunk it adds up the head's gradient with all
    # others. So its rows take longer chunks, of as many tokens as keep it busy meanwhile.
    shards = batch_shards()
    busy = TOKENS_OF_A_DEVICE // -(-batch // shards)
    chunk = min(max(chunk, min(busy, chunk * shards)), steps)
    given = decoder.head_weight(), hidden_BxCxD, completions_BxC, trace
    score = _on_one_device if on_one_device() else _in_chunks
    log_probs, entropy, *_ = score(*given, temperature, chunk)
    counted_BxC = valid_BxC if trace is None else valid_BxC & trace.free_BxC
    return jnp.where(counted_BxC, log_probs, 0.0), jnp.where(counted_BxC, entropy, 0.0)


def _in_chunks(
    head_VxD: Array,
    hidden_BxCxD: Array,
    tokens_BxC: Array,
    trace: Trace | None,
    temperature: float,
    chunk: int,
) -> tuple[Array, Array, Array]:
    """What `_with_total` gives, `chunk` steps at a time."""
    batch, steps = tokens_BxC.shape
    num_chunks = -(-steps // chunk)
    fill = num_chunks * chunk - steps
    head_VxD = gathered(head_VxD, "head")  # once for all chunks

    # Recomputed in the backward pass, which would otherwise keep every chunk's logits.
    @jax.checkpoint
    def score(head_VxD, hidden_BxKxD, tokens_BxK, place_BxK):
        logits_BxKxV = project_logits(hidden_BxKxD, head_VxD)
        if trace is not None:
            logits_BxKxV = mask_logits(trace.automaton, place_BxK, logits_BxKxV)
        return _with_total(logits_BxKxV, tokens_BxK, temperature)

    def chunked(x):
        x = jnp.pad(x, [(0, 0), (0, fill)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, num_chunks, chunk, *x.shape[2:]), 1, 0)

    places_BxC = None if trace is None else trace.places_BxC
    scores_NxBxK = jax.lax.map(
        lambda xs: score(head_VxD, *xs), jax.tree.map(chunked, (hidden_BxCxD, tokens_BxC, places_BxC))
    )
    log_probs, entropy, total = (jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :steps] for x in scores_NxBxK)
    return log_probs, entropy, total


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _on_one_device(
    head_VxD: Array,
    hidden_BxCxD: Array,
    tokens_BxC: Array,
    trace: Trace | None,
    temperature: float,
    chunk: int,
) -> tuple[Array, Array]:
    """As `_in_chunks`, with the gradient of `head_gradient`, which keeps that of the head in one piece."""
    return _in_chunks(head_VxD, hidden_BxCxD, tokens_BxC, trace, temperature, chunk)[:2]


def _forward(
    head_VxD: Array,
    hidden_BxCxD: Array,
    tokens_BxC: Array,
    trace: Trace | None,
    temperature: float,
    chunk: int,
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    *out, total = _in_chunks(head_VxD, hidden_BxCxD, tokens_BxC, trace, temperature, chunk)
    return (out[0], out[1]), (head_VxD, hidden_BxCxD, tokens_BxC, trace, total)


def _backward(
    temperature: float, _: int, kept: tuple[Any, ...], given: tuple[Array, Array]
) -> tuple[Any, ...]:
    head_VxD, hidden_BxCxD, tokens_BxC, trace, total_BxC = kept
    support = None
    if trace is not None:
        allowed_BxCxK = open_classes(trace.automaton, trace.places_BxC)
        support = Support(allowed_BxCxK.reshape(-1, allowed_BxCxK.shape[-1]), trace.automaton.class_V)
    head_gradient, hidden_gradient = head_gradients(
        head_VxD,
        hidden_BxCxD.reshape(-1, hidden_BxCxD.shape[-1]),
        tokens_BxC.reshape(-1),
        total_BxC.reshape(-1),
        support,
        given[0].reshape(-1),
        temperature,
    )
    return head_gradient, hidden_gradient.reshape(hidden_BxCxD.shape), None, None


_on_one_device.defvjp(_forward, _backward)

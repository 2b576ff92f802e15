"""Drawing the next token of many independent requests in one step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# What llama.cpp's server draws from where a request names no limits of its own: the likeliest tokens up to a
# number, up to a total probability, and of no less than a share of the likeliest one's.
TOP_K, TOP_P, MIN_P = 40, 0.95, 0.05
_BLOCK = 64


def draw_tokens(
    logits_SxV: Float[Array, "slots vocab"],
    temperature_S: Float[Array, " slots"],
    seed_S: Array,
    drawn_S: Int[Array, " slots"],
) -> Int[Array, " slots"]:
    """The next token of each slot: the likeliest at temperature 0, else drawn at its temperature.

    Draws are limited as TOP_K, TOP_P and MIN_P say, on the probabilities at temperature 1. The random number
    is a function of the slot's seed (uint32) and of how many tokens its request has drawn, nothing else.
    """
    top_SxN, ids_SxN = top_tokens(logits_SxV, TOP_K)
    p_SxN = jax.nn.softmax(top_SxN, axis=-1)
    before_SxN = jnp.cumsum(p_SxN, axis=-1) - p_SxN
    kept_SxN = (before_SxN < TOP_P) & (p_SxN >= MIN_P * p_SxN[:, :1])
    divisor_S = jnp.where(temperature_S > 0, temperature_S, 1.0)
    scaled_SxN = jnp.where(kept_SxN, (top_SxN - top_SxN[:, :1]) / divisor_S[:, None], -jnp.inf)
    weights_SxN = jnp.exp(scaled_SxN)  # descending; 0 also where the temperature is too low for a float
    upto_SxN = jnp.cumsum(weights_SxN, axis=-1)

    def number(seed: Array, drawn: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), drawn))

    target_S = jax.vmap(number)(seed_S, drawn_S) * upto_SxN[:, -1]
    # The first candidate whose sum exceeds the target. Rounding may put the target at the total itself, and
    # have the sums fall where only zeros are added.
    index_S = jnp.sum(upto_SxN <= target_S[:, None], axis=-1)
    index_S = jnp.minimum(index_S, jnp.sum(weights_SxN > 0, axis=-1) - 1)
    index_S = jnp.where(temperature_S > 0, index_S, 0)
    return jnp.take_along_axis(ids_SxN, index_S[:, None], axis=1)[:, 0]


def top_tokens(
    logits_SxV: Float[Array, "slots vocab"], count: int
) -> tuple[Float[Array, "slots count"], Int[Array, "slots count"]]:
    """The `count` largest logits of each row in descending order, and their ids; all, if there are fewer.

    The largest `count` lie in the `count` blocks with the largest maxima, so only these are searched: on CPU
    many times faster than one search of the whole row.
    """
    slots, vocab = logits_SxV.shape
    count = min(count, vocab)
    blocks = -(-vocab // _BLOCK)
    padding = ((0, 0), (0, blocks * _BLOCK - vocab))
    logits_SxJxI = jnp.pad(logits_SxV, padding, constant_values=-jnp.inf).reshape(slots, blocks, _BLOCK)
    _, block_SxN = jax.lax.top_k(jnp.max(logits_SxJxI, axis=-1), min(count, blocks))
    inside_SxNxI = jnp.take_along_axis(logits_SxJxI, block_SxN[:, :, None], axis=1)
    ids_SxNI = (block_SxN[:, :, None] * _BLOCK + jnp.arange(_BLOCK)[None, None, :]).reshape(slots, -1)
    top_SxN, at_SxN = jax.lax.top_k(inside_SxNxI.reshape(slots, -1), count)
    # Without the barrier XLA on CPU takes the search apart to fuse its parts, and sorts whole rows instead.
    top_SxN, at_SxN = jax.lax.optimization_barrier((top_SxN, at_SxN))
    return top_SxN, jnp.take_along_axis(ids_SxNI, at_SxN, axis=1).astype(jnp.int32)

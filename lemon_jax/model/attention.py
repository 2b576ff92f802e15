"""Softmax attention of grouped queries, in the form that each platform computes fastest.

Shape suffixes as in `decoder`: B batch, T query slots, S key slots, H heads, K key/value heads, E head_dim,
G = H / K heads that read one key/value head, C query slots of a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lemon_jax.model.layout import MASKED

BLOCK = 64  # query slots at a time: their scores then stay in a core's cache


def attend(
    q_BxHxTxE: Float[Array, "batch heads time head_dim"],
    k_BxKxSxE: Float[Array, "batch kv_heads slots head_dim"],
    v_BxKxSxE: Float[Array, "batch kv_heads slots head_dim"],
    mask_BxTxS: Bool[Array, "batch time slots"],
    *,
    divisor: float,
    causal: bool,
) -> Float[Array, "batch heads time head_dim"]:
    """softmax(q k^T / divisor, where `mask`) v (Vaswani et al. 2017, arXiv 1706.03762), weights in fp32.

    Head h reads key/value head h // G. `causal` promises that S = T and that no query slot reads a later
    slot, which `mask` says too. All forms agree up to rounding; `attend_at_once` is their definition.
    """
    if not causal or mask_BxTxS.shape[1] <= BLOCK:
        return attend_at_once(q_BxHxTxE, k_BxKxSxE, v_BxKxSxE, mask_BxTxS, divisor=divisor)
    return jax.lax.platform_dependent(
        q_BxHxTxE, k_BxKxSxE, v_BxKxSxE, mask_BxTxS,
        cpu=lambda *qkvm: attend_in_blocks(*qkvm, divisor=divisor),
        default=lambda *qkvm: attend_by_jax(*qkvm, divisor=divisor),
    )  # fmt: skip


def attend_at_once(
    q_BxHxTxE: Array, k_BxKxSxE: Array, v_BxKxSxE: Array, mask_BxTxS: Array, *, divisor: float
) -> Array:
    """All scores [B, H, T, S] at once."""
    batch, heads, time, head_dim = q_BxHxTxE.shape
    kv_heads, slots = k_BxKxSxE.shape[1:3]
    # The G heads of one key/value head lie in one matrix.
    q = q_BxHxTxE.reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkqe,bkse->bkqs", q, k_BxKxSxE, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, time, slots) / divisor
    weights = jax.nn.softmax(jnp.where(mask_BxTxS[:, None], scores, MASKED), axis=-1)
    weights = weights.astype(v_BxKxSxE.dtype).reshape(batch, kv_heads, -1, slots)
    return jnp.einsum("bkqs,bkse->bkqe", weights, v_BxKxSxE).reshape(q_BxHxTxE.shape)


def attend_in_blocks(
    q_BxHxTxE: Array, k_BxKxTxE: Array, v_BxKxTxE: Array, mask_BxTxT: Array, *, divisor: float
) -> Array:
    """Block after block of queries, each over the keys up to its own end: half of the scores are never
    computed. The backward pass keeps the weights of every block; `remat` in `Decoder` computes them anew."""
    time = mask_BxTxT.shape[1]
    out = []
    for start in range(0, time, BLOCK):
        end = min(start + BLOCK, time)
        keys, values = k_BxKxTxE[:, :, :end], v_BxKxTxE[:, :, :end]
        queries, mask = q_BxHxTxE[:, :, start:end], mask_BxTxT[:, start:end, :end]
        out.append(_block(queries, keys, values, mask, 1 / divisor))
    return jnp.concatenate(out, axis=2)


def _block(q_BxHxCxE: Array, k_BxKxSxE: Array, v_BxKxSxE: Array, mask_BxCxS: Array, scale: float) -> Array:
    """Keys lie before queries, so that maxima run over rows of many queries, which vectorises on CPU; the
    sums are one more row of the values' product, and the division comes after it (Dao et al. 2022,
    arXiv 2205.14135, section 3.1). Values are transposed first: the product then reads both as they lie."""
    batch, block, head_dim = q_BxHxCxE.shape[0], *q_BxHxCxE.shape[2:]
    kv_heads, slots = k_BxKxSxE.shape[1:3]
    q = (q_BxHxCxE * scale).reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum("bkse,bkqe->bksq", k_BxKxSxE, q, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, slots, -1, block)
    scores = jnp.where(jnp.swapaxes(mask_BxCxS, 1, 2)[:, None, :, None, :], scores, MASKED)
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=2, keepdims=True))
    weights = jnp.exp(scores - largest).astype(v_BxKxSxE.dtype).reshape(batch, kv_heads, slots, -1)
    ones = jnp.ones((batch, kv_heads, 1, slots), v_BxKxSxE.dtype)
    values = jnp.concatenate([jnp.swapaxes(v_BxKxSxE, 2, 3), ones], axis=2)
    mixed = jnp.einsum(
        "bkes,bksq->bkeq", jax.lax.optimization_barrier(values), weights, preferred_element_type=jnp.float32
    )
    mixed = (mixed[:, :, :-1] / mixed[:, :, -1:]).astype(v_BxKxSxE.dtype)
    return jnp.swapaxes(mixed, 2, 3).reshape(q_BxHxCxE.shape)


def attend_by_jax(
    q_BxHxTxE: Array, k_BxKxSxE: Array, v_BxKxSxE: Array, mask_BxTxS: Array, *, divisor: float
) -> Array:
    """JAX's own attention, which XLA compiles for any platform: all scores [B, H, T, S], no fused kernel.

    cuDNN's kernel (`implementation="cudnn"`) would have to be asked for while tracing, where its checks want
    the very device: it takes 16-bit inputs on CUDA alone. It is not used.
    """
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BxHxTxE, k_BxKxSxE, v_BxKxSxE))
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask_BxTxS[:, None], scale=1 / divisor)
    return jnp.swapaxes(mixed, 1, 2)

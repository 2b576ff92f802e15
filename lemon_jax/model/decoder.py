"""One decoder for training, scoring and cached decoding: RMSNorm, GQA, rotary positions, SwiGLU.

Shape suffixes: B batch, T query slots, S key slots, D embed_dim, H heads, K key/value heads,
G heads per key/value head, E head_dim, F mlp_dim, V vocabulary.

Activations have the dtype of the parameters (fp32 as initialised; cast the parameters to change it).
Norms, rotary angles, attention weights and logits are fp32 throughout.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.sharding import KV_CACHE, constrain

# One (keys, values) pair a layer, each [B, K, S, E]: with the slots next to the features both products
# of attention are plain batched matrix products (2.5 times faster on CPU than [B, S, K, E]). A tuple,
# not one stacked array: an array carried through a scan over layers is copied at every decoding step.
KVCache = tuple[tuple[Array, Array], ...]

RESIDUAL = ("batch", "time", "residual")  # logical axes of the activations between blocks
MASKED = -1e30  # finite, so that a row which sees nothing gives a number that nobody reads, not a NaN


def rotate(x_BxHxTxE: Array, cos_BxTxE: Array, sin_BxTxE: Array) -> Array:
    """Rotary embedding in the half-split form (Su et al. 2021, arXiv 2104.09864; pairs as in GPT-NeoX).

    Dimension i is paired with i + E/2 and turned by position * theta ** (-2i / E).
    """
    x1, x2 = jnp.split(x_BxHxTxE.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BxTxE[:, None], sin_BxTxE[:, None]
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BxHxTxE.dtype)


def write_slots(cache_BxKxSxE: Array, new_BxKxTxE: Array, index: Array | int) -> Array:
    """The cache with T slots of all rows replaced, from `index` on, a common one or one a row."""
    if jnp.ndim(index) == 0:
        return jax.lax.dynamic_update_slice_in_dim(cache_BxKxSxE, new_BxKxTxE, index, axis=2)
    write_row = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_row)(cache_BxKxSxE, new_BxKxTxE, index)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float = 1.0) -> nnx.Param:
    return nnx.Param(0.02 * scale * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x_BxTxD: Float[Array, "batch time dim"]) -> Float[Array, "batch time dim"]:
        x32 = x_BxTxD.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * inverse_rms).astype(x_BxTxD.dtype) * self.scale[...][None, None, :]


class Attention(nnx.Module):
    """Grouped-query attention: H query heads read K key/value heads, H / K heads each."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        dim, heads, kv_heads, head_dim = (
            config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim,
        )  # fmt: skip
        self.q = _normal(rngs, (dim, heads, head_dim))
        self.k = _normal(rngs, (dim, kv_heads, head_dim))
        self.v = _normal(rngs, (dim, kv_heads, head_dim))
        # The residual stream sums 2L projections; this keeps its variance independent of L (GPT-2).
        self.o = _normal(rngs, (heads, head_dim, dim), 1 / math.sqrt(2 * config.num_layers))
        self.qkv_bias = config.qkv_bias
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((heads, head_dim), jnp.float32))
            self.k_bias = nnx.Param(jnp.zeros((kv_heads, head_dim), jnp.float32))
            self.v_bias = nnx.Param(jnp.zeros((kv_heads, head_dim), jnp.float32))

    def __call__(
        self,
        x_BxTxD: Float[Array, "batch time dim"],
        cos_BxTxE: Float[Array, "batch time half"],
        sin_BxTxE: Float[Array, "batch time half"],
        mask_BxTxS: Bool[Array, "batch time slots"],
        cache: tuple[Array, Array] | None,
        write_index: Int[Array, ""] | Int[Array, " batch"] | int,
    ) -> tuple[Float[Array, "batch time dim"], tuple[Array, Array]]:
        q = jnp.einsum("btd,dhe->bhte", x_BxTxD, self.q[...])
        k = jnp.einsum("btd,dke->bkte", x_BxTxD, self.k[...])
        v = jnp.einsum("btd,dke->bkte", x_BxTxD, self.v[...])
        if self.qkv_bias:
            q = q + self.q_bias[...][None, :, None]
            k = k + self.k_bias[...][None, :, None]
            v = v + self.v_bias[...][None, :, None]
        q, k = rotate(q, cos_BxTxE, sin_BxTxE), rotate(k, cos_BxTxE, sin_BxTxE)
        if cache is not None:
            k, v = write_slots(cache[0], k, write_index), write_slots(cache[1], v, write_index)

        q = constrain(q, "batch", "heads", "time", "head_dim")
        k, v = constrain(k, *KV_CACHE), constrain(v, *KV_CACHE)

        batch, heads, time, head_dim = q.shape
        kv_heads, slots = k.shape[1:3]
        # Head h reads key/value head h // G: the G heads of one key/value head lie in one matrix.
        q = q.reshape(batch, kv_heads, -1, head_dim)
        scores = jnp.einsum("bkqe,bkse->bkqs", q, k, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, heads, time, slots) / math.sqrt(head_dim)
        weights = jax.nn.softmax(jnp.where(mask_BxTxS[:, None], scores, MASKED), axis=-1)
        weights = weights.astype(v.dtype).reshape(batch, kv_heads, -1, slots)
        mixed = jnp.einsum("bkqs,bkse->bkqe", weights, v).reshape(batch, heads, time, head_dim)
        return jnp.einsum("bhte,hed->btd", mixed, self.o[...]), (k, v)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = _normal(rngs, (config.embed_dim, config.mlp_dim))
        self.up = _normal(rngs, (config.embed_dim, config.mlp_dim))
        self.down = _normal(rngs, (config.mlp_dim, config.embed_dim), 1 / math.sqrt(2 * config.num_layers))

    def __call__(self, x_BxTxD: Float[Array, "batch time dim"]) -> Float[Array, "batch time dim"]:
        gate = jnp.einsum("btd,df->btf", x_BxTxD, self.gate[...])
        up = jnp.einsum("btd,df->btf", x_BxTxD, self.up[...])
        return jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, self.down[...])


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x, cos, sin, mask, cache, write_index):
        mixed, new_cache = self.attention(self.attention_norm(x), cos, sin, mask, cache, write_index)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), new_cache


class Decoder(nnx.Module):
    """The decoder. It is a pytree: pass it to `jax.jit` and `jax.grad` as an ordinary argument."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = _normal(rngs, (config.vocab_size, config.embed_dim))
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.embed_dim, config.norm_eps)
        if not config.tie_embeddings:
            self.head = _normal(rngs, (config.vocab_size, config.embed_dim))

    def __call__(
        self,
        tokens_BxT: Int[Array, "batch time"],
        positions_BxT: Int[Array, "batch time"],
        mask_BxTxS: Bool[Array, "batch time slots"],
        cache: KVCache | None = None,
        write_index: Int[Array, ""] | Int[Array, " batch"] | int = 0,
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "batch time dim"], KVCache]:
        """Normalised hidden states [B, T, D], and the keys and values.

        Without a cache S = T and the returned cache holds these T slots. With a cache of S slots the
        T tokens are written at slots `write_index`.. of every row, or from each row's own index on; `mask`
        says which slots each reads. With `remat` the backward pass keeps only what enters each block and
        computes the rest anew.
        """
        x = self.embed[...][tokens_BxT]
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = positions_BxT.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        new_cache = []
        run = jax.checkpoint(Block.__call__) if remat else Block.__call__
        # Unrolled in Python: see KVCache.
        for i, block in enumerate(self.layers):
            layer_cache = None if cache is None else cache[i]
            x = constrain(x, *RESIDUAL)  # pinned at every layer, or the compiler may gather whole batches
            x, layer_cache = run(block, x, cos, sin, mask_BxTxS, layer_cache, write_index)
            new_cache.append(layer_cache)
        return constrain(self.final_norm(x), *RESIDUAL), tuple(new_cache)

    def head_weight(self) -> Float[Array, "vocab dim"]:
        """The output projection: the embedding itself when tied."""
        return self.embed[...] if self.config.tie_embeddings else self.head[...]

    def logits(self, hidden: Float[Array, "*shape dim"]) -> Float[Array, "*shape vocab"]:
        """fp32 logits of hidden states. Only for few positions at a time: see `scoring`."""
        return project_logits(hidden, self.head_weight())


def project_logits(
    hidden: Float[Array, "*shape dim"], head_VxD: Float[Array, "vocab dim"]
) -> Float[Array, "*shape vocab"]:
    """hidden @ head^T, accumulated in fp32 whatever the dtype of the inputs."""
    return jnp.einsum("...d,vd->...v", hidden, head_VxD, preferred_element_type=jnp.float32)

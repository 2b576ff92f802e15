"""One decoder for training, scoring and cached decoding: RMSNorm, GQA, rotary positions, gated MLP.

The config chooses between the families it stands for: Llama, Qwen2.5, Qwen3, Gemma 3 (see `families`).

Shape suffixes: B batch, T query slots, S key slots, D embed_dim, H heads, K key/value heads,
G heads per key/value head, E head_dim, F mlp_dim, V vocabulary.

Activations have the dtype of the matrices (fp32 as initialised; cast those to change it, and leave the
scales of norms fp32). Norms, rotary angles, attention weights and logits are fp32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lemon_jax.model.attention import attend
from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.layout import window_mask
from lemon_jax.model.projection import project
from lemon_jax.model.rope import rotary_angles, rotate
from lemon_jax.model.sharding import KV_CACHE, constrain, constrain_tree, loops_over_layers

# One (keys, values) pair a layer, each [B, K, S, E]: with the slots next to the features both products
# of attention are plain batched matrix products (2.5 times faster on CPU than [B, S, K, E]). A tuple,
# not one stacked array: an array carried through a scan over layers is copied at every decoding step.
KVCache = tuple[tuple[Array, Array], ...]

Seen = tuple[Array, Array, Array]  # of a block's slots: cos, sin, and the mask
RESIDUAL = ("batch", "time", "residual")  # logical axes of the activations between blocks


def write_slots(cache_BxKxSxE: Array, new_BxKxTxE: Array, index: Array | int) -> Array:
    """The cache with T slots of all rows replaced, from `index` on, a common one or one a row."""
    if jnp.ndim(index) == 0:
        return jax.lax.dynamic_update_slice_in_dim(cache_BxKxSxE, new_BxKxTxE, index, axis=2)
    write_row = partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write_row)(cache_BxKxSxE, new_BxKxTxE, index)


def nearer_zero(k_BxKxSxE: Array) -> Array:
    """The keys less that of slot 0. All scores of a query move by the same, which softmax takes away, and so
    every gradient of that key (SageAttention subtracts the mean: Zhang et al. 2024, arXiv 2410.02367).
    Scores are rounded less where keys share large features: the biases of Qwen2.5's keys exceed 200, and an
    fp32 score in the thousands is exact to 3e-4 only."""
    return k_BxKxSxE - jax.lax.stop_gradient(k_BxKxSxE[:, :, :1])


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], scale: float = 1.0) -> nnx.Param:
    return nnx.Param(0.02 * scale * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale (Zhang & Sennrich 2019, arXiv 1910.07467), over the last axis,
    rounded once to the dtype of x."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((dim,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape dim"]) -> Float[Array, "*shape dim"]:
        x32 = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * inverse_rms * scale).astype(x.dtype)


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
        self.score_divisor = math.sqrt(config.query_pre_attn_scalar or head_dim)
        self.qkv_bias = config.qkv_bias
        self.qk_norm = config.qk_norm
        if config.qkv_bias:
            self.q_bias = nnx.Param(jnp.zeros((heads, head_dim), jnp.float32))
            self.k_bias = nnx.Param(jnp.zeros((kv_heads, head_dim), jnp.float32))
            self.v_bias = nnx.Param(jnp.zeros((kv_heads, head_dim), jnp.float32))
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, config.norm_eps)
            self.k_norm = RMSNorm(head_dim, config.norm_eps)

    def __call__(
        self,
        x_BxTxD: Float[Array, "batch time dim"],
        cos_BxTxE: Float[Array, "batch time half"],
        sin_BxTxE: Float[Array, "batch time half"],
        mask_BxTxS: Bool[Array, "batch time slots"],
        cache: tuple[Array, Array] | None,
        write_index: Int[Array, ""] | Int[Array, " batch"] | int,
    ) -> tuple[Float[Array, "batch time dim"], tuple[Array, Array]]:
        q, k, v = (project(self, name, x_BxTxD) for name in "qkv")
        if self.qkv_bias:
            q = q + self.q_bias[...][None, None]
            k = k + self.k_bias[...][None, None]
            v = v + self.v_bias[...][None, None]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos_BxTxE, sin_BxTxE), rotate(k, cos_BxTxE, sin_BxTxE)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        if cache is not None:
            k, v = write_slots(cache[0], k, write_index), write_slots(cache[1], v, write_index)

        q = constrain(q, "batch", "heads", "time", "head_dim")
        k, v = constrain(k, *KV_CACHE), constrain(v, *KV_CACHE)

        # Not in bfloat16, whose keys are rounded already, nor of a cache, which every step would copy.
        shifted = self.qkv_bias and cache is None and k.dtype == jnp.float32
        near = nearer_zero(k) if shifted else k
        mixed = attend(q, near, v, mask_BxTxS, divisor=self.score_divisor, causal=cache is None)
        return project(self, "o", jnp.swapaxes(mixed, 1, 2), inputs=2), (k, v)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)): SwiGLU or GeGLU (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = _normal(rngs, (config.embed_dim, config.mlp_dim))
        self.up = _normal(rngs, (config.embed_dim, config.mlp_dim))
        self.down = _normal(rngs, (config.mlp_dim, config.embed_dim), 1 / math.sqrt(2 * config.num_layers))
        self.activation = config.activation

    def __call__(self, x_BxTxD: Float[Array, "batch time dim"]) -> Float[Array, "batch time dim"]:
        gate = project(self, "gate", x_BxTxD)
        up = project(self, "up", x_BxTxD)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return project(self, "down", gate * up)


class Block(nnx.Module):
    """Pre-norm residual block; `post_norms` norms the two branches once more before they are added."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)
        self.post_norms = config.post_norms
        if config.post_norms:
            self.attention_post_norm = RMSNorm(config.embed_dim, config.norm_eps)
            self.mlp_post_norm = RMSNorm(config.embed_dim, config.norm_eps)

    def __call__(self, x, cos, sin, mask, cache, write_index):
        mixed, new_cache = self.attention(self.attention_norm(x), cos, sin, mask, cache, write_index)
        x = x + (self.attention_post_norm(mixed) if self.post_norms else mixed)
        update = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_post_norm(update) if self.post_norms else update), new_cache


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
        keep_cache: bool = True,
    ) -> tuple[Float[Array, "batch time dim"], KVCache]:
        """Normalised hidden states [B, T, D], and the keys and values.

        Without a cache S = T and the returned cache holds these T slots, or none unless `keep_cache`. With a
        cache of S slots the T tokens are written at slots `write_index`.. of every row, or from each row's
        own index on; `mask` says which slots each reads.
        With `remat` the backward pass keeps only what enters each block and computes the rest anew.
        """
        config = self.config
        x = self.embed[...][tokens_BxT]
        if config.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(config.embed_dim), x.dtype)
        everywhere = nearby = (*rotary_angles(positions_BxT, config), mask_BxTxS)
        if config.sliding_layers:
            assert config.sliding_window is not None  # the config's own check
            local_mask = window_mask(mask_BxTxS, config.sliding_window)
            nearby = (*rotary_angles(positions_BxT, config, local=True), local_mask)
        run = jax.checkpoint(Block.__call__) if remat else Block.__call__
        if cache is None and not keep_cache and loops_over_layers():
            x = self._looped(run, x, everywhere, nearby)
            return constrain(self.final_norm(x), *RESIDUAL), ()
        new_cache = []
        # Unrolled in Python: see KVCache.
        for i, block in enumerate(self.layers):
            layer_cache = None if cache is None else cache[i]
            x = constrain(x, *RESIDUAL)  # pinned at every layer, or the compiler may gather whole batches
            seen = nearby if i in config.sliding_layers else everywhere
            x, layer_cache = run(block, x, *seen, layer_cache, write_index)
            new_cache.append(layer_cache)
        return constrain(self.final_norm(x), *RESIDUAL), tuple(new_cache) if keep_cache else ()

    def _looped(self, run: Callable[..., Any], x_BxTxD: Array, everywhere: Seen, nearby: Seen) -> Array:
        """All blocks, as a loop over their stacked parameters: one block is compiled, not tens, and of few
        the gathered parameters are there at a time. The stack is a copy, in the dtype that computes."""
        graphs, states = zip(*(nnx.split(block) for block in self.layers), strict=True)
        stacked = constrain_tree(jax.tree.map(lambda *layers: jnp.stack(layers), *states), stacked=True)
        local_L = jnp.array([i in self.config.sliding_layers for i in range(self.config.num_layers)])

        def step(x, layer):
            state, local = layer
            seen = everywhere
            if self.config.sliding_layers:
                seen = jax.tree.map(partial(jnp.where, local), nearby, everywhere)
            x = constrain(x, *RESIDUAL)
            return run(nnx.merge(graphs[0], state), x, *seen, None, 0)[0], None

        return jax.lax.scan(step, x_BxTxD, (stacked, local_L))[0]

    def head_weight(self) -> Float[Array, "vocab dim"]:
        """The output projection: the embedding itself when tied."""
        return self.embed[...] if self.config.tie_embeddings else self.head[...]

    def logits(self, hidden: Float[Array, "*shape dim"]) -> Float[Array, "*shape vocab"]:
        """fp32 logits of hidden states. Only for few positions at a time: see `scoring`. On a mesh the output
        projection stays where it lies, as other parameters do for few tokens (`projection.project`)."""
        lead = ("time",) * (hidden.ndim - 1)
        logits = project_logits(constrain(hidden, *lead, "embed"), self.head_weight())
        return constrain(logits, "batch", *lead[1:], "vocab")


def project_logits(
    hidden: Float[Array, "*shape dim"], head_VxD: Float[Array, "vocab dim"]
) -> Float[Array, "*shape vocab"]:
    """hidden @ head^T, accumulated in fp32 whatever the dtype of the inputs."""
    return jnp.einsum("...d,vd->...v", hidden, head_VxD, preferred_element_type=jnp.float32)

"""Two compiled steps that serve many requests: a part of some prompts, and one token of every slot.

No row of them depends on another: a reply is the same, bit for bit, alone and in any company. The first has
one shape, the second two: of all slots, and of FEW where few requests are left, if that computes the same
bits on this machine (see `warm_up`). `backends/scheduler.py` decides what the rows are.

Shape suffixes as in `decoder` and `paged_attention`; N rows of tokens, S slots, R parts of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.decoder import project_logits
from lemon_jax.model.paged_attention import Pages, empty_pages, paged_attention, stored
from lemon_jax.model.rope import rotary_angles, rotate
from lemon_jax.model.serving_sampling import draw_tokens
from lemon_jax.model.serving_weights import ServingWeights

FEW = 8  # rows of the smaller step: on CPUs fewer take hardly less time, which reading the weights takes


@dataclass(frozen=True, kw_only=True)
class ServingShape:
    """The sizes that are compiled in, in tokens unless it says otherwise."""

    slots: int = 32  # requests that decode at once
    context: int = 2048  # of one request, a multiple of `page`
    pages: int = 256  # pages of the pool, the unused page 0 among them
    page: int = 64
    parts: int = 4  # pages of prompts that are computed at once

    @property
    def most_pages(self) -> int:
        """Pages of one request."""
        return self.context // self.page


class ServingEngine:
    """Weights, the pool of pages, and the compiled steps. Not to be used by two threads at once."""

    def __init__(self, weights: ServingWeights, config: DecoderConfig, shape: ServingShape):
        self.shape = shape
        self.config = config
        self._weights = weights
        self._few: int | None = None
        self._pages: Pages = empty_pages(
            config.num_layers,
            shape.pages,
            config.num_kv_heads,
            shape.page,
            config.head_dim,
            weights["layers"][0]["o"].dtype,
        )

    def warm_up(self, go_on: Callable[[], None] = lambda: None) -> None:
        """Compile the steps, or read them from the compilation cache; `go_on` is called before each.

        The decoding step of FEW rows is used from here on if it gives the tokens, logits, keys and values
        that the step of all slots gives, bit for bit. That depends on the processor and its libraries, which
        may choose another order of sums for another number of rows.
        """
        shape = self.shape
        go_on()
        self.prefill(
            np.zeros((shape.parts, shape.page), np.int32),
            np.zeros((shape.parts, shape.most_pages), np.int32),
            np.zeros(shape.parts, np.int32),
        )
        go_on()
        whole = self._tried(shape.slots)
        if shape.slots > FEW and shape.pages > FEW:
            go_on()
            few = self._tried(FEW)
            same = all(np.array_equal(a[:FEW], b) for a, b in zip(whole, few, strict=True))
            self._few = FEW if same else None

    def _tried(self, rows: int) -> list[np.ndarray]:
        """What three steps of decoding compute, from tokens that differ: in FEW rows with a page each the
        logits and the tokens drawn, and that page's contents. Nothing is in the pool yet."""
        shape, found = self.shape, []
        tokens_N = (np.arange(rows, dtype=np.int32) * 7919 + 1) % self.config.vocab_size
        table_NxM = np.zeros((rows, shape.most_pages), np.int32)
        own = min(rows, FEW, shape.pages - 1)
        table_NxM[:own, 0] = 1 + np.arange(own)
        for position in range(3):
            at_N = np.full(rows, position, np.int32)
            requests = tokens_N, at_N, table_NxM, np.zeros(rows, np.float32), np.zeros(rows, np.uint32), at_N
            self._pages, tokens, logits = decode(self._weights, self._pages, *requests, config=self.config)
            tokens_N = np.asarray(tokens)
            found += [tokens_N, np.asarray(logits)]
        return found + [np.asarray(x[1 : FEW + 1, :, :3]) for pair in self._pages for x in pair]

    def rows(self, count: int) -> int:
        """Rows of the decoding step that serves `count` requests."""
        return self._few if self._few is not None and count <= self._few else self.shape.slots

    def prefill(self, tokens_RxC: np.ndarray, table_RxM: np.ndarray, index_R: np.ndarray) -> None:
        """Compute keys and values of R pages of prompts; see `prefill`."""
        self._pages = prefill(self._weights, self._pages, tokens_RxC, table_RxM, index_R, config=self.config)

    def decode(
        self,
        tokens_S: np.ndarray,
        positions_S: np.ndarray,
        table_SxM: np.ndarray,
        temperature_S: np.ndarray,
        seed_S: np.ndarray,
        drawn_S: np.ndarray,
    ) -> np.ndarray:
        """The next token of every row, of which there are as many as `rows` says; see `decode`."""
        requests = tokens_S, positions_S, table_SxM, temperature_S, seed_S, drawn_S
        self._pages, next_S, _ = decode(self._weights, self._pages, *requests, config=self.config)
        return np.asarray(next_S)


@partial(jax.jit, static_argnames="config", donate_argnames="pages")
def prefill(
    weights: ServingWeights,
    pages: Pages,
    tokens_RxC: Int[Array, "parts page"],
    table_RxM: Int[Array, "parts most"],
    index_R: Int[Array, " parts"],
    *,
    config: DecoderConfig,
) -> Pages:
    """Write keys and values of R parts of prompts, each as long as a page, into the pages of their rows.

    Row r holds tokens index[r] * C ... of a prompt whose pages are table[r]. What it attends to must have
    been written before, or be a row of the same call. What follows the end of a prompt in its last page is
    overwritten before it is read.
    """
    parts, page = tokens_RxC.shape
    positions_RxC = index_R[:, None] * page + jnp.arange(page)[None, :]
    page_R = jnp.take_along_axis(table_RxM, index_R[:, None], axis=1)[:, 0]
    groups = config.num_heads // config.num_kv_heads

    def attend(
        q_NxHxE: Array, k_NxKxE: Array, v_NxKxE: Array, keys: Array, values: Array, window: int | None
    ) -> tuple[Array, tuple[Array, Array]]:
        def by_page(x_NxKxE: Array) -> Array:
            return x_NxKxE.reshape(parts, page, config.num_kv_heads, -1).transpose(0, 2, 1, 3)

        keys = keys.at[page_R].set(stored(by_page(k_NxKxE), keys))
        values = values.at[page_R].set(stored(by_page(v_NxKxE), values))
        q = q_NxHxE.reshape(parts, page, config.num_kv_heads, groups, -1)
        q_RxKxQxE = q.transpose(0, 2, 3, 1, 4).reshape(parts, config.num_kv_heads, groups * page, -1)
        positions_RxQ = jnp.tile(positions_RxC, (1, groups))
        mixed = paged_attention(q_RxKxQxE, keys, values, table_RxM, positions_RxQ, window)
        mixed = mixed.reshape(parts, config.num_kv_heads, groups, page, -1).transpose(0, 3, 1, 2, 4)
        return mixed.reshape(parts * page, -1), (keys, values)

    # What the last layer adds to the residual stream nobody reads: the compiler leaves it out.
    _, new_pages = _layers(weights, pages, tokens_RxC.reshape(-1), positions_RxC.reshape(-1), attend, config)
    return new_pages


@partial(jax.jit, static_argnames="config", donate_argnames="pages")
def decode(
    weights: ServingWeights,
    pages: Pages,
    tokens_S: Int[Array, " slots"],
    positions_S: Int[Array, " slots"],
    table_SxM: Int[Array, "slots most"],
    temperature_S: Float[Array, " slots"],
    seed_S: Array,
    drawn_S: Int[Array, " slots"],
    *,
    config: DecoderConfig,
) -> tuple[Pages, Int[Array, " slots"], Float[Array, " slots"]]:
    """Feed every slot's token at its position, and draw the one that follows (see `draw_tokens`): the pages,
    the tokens drawn, and their logits.

    A slot without a request has position 0 and a table of zeros.
    """
    slots = tokens_S.shape[0]
    page = pages[0][0].shape[2]
    page_S = jnp.take_along_axis(table_SxM, positions_S[:, None] // page, axis=1)[:, 0]
    offset_S = positions_S % page
    groups = config.num_heads // config.num_kv_heads
    positions_SxG = jnp.tile(positions_S[:, None], (1, groups))

    def attend(
        q_SxHxE: Array, k_SxKxE: Array, v_SxKxE: Array, keys: Array, values: Array, window: int | None
    ) -> tuple[Array, tuple[Array, Array]]:
        keys = keys.at[page_S, :, offset_S].set(stored(k_SxKxE, keys))
        values = values.at[page_S, :, offset_S].set(stored(v_SxKxE, values))
        q_SxKxGxE = q_SxHxE.reshape(slots, config.num_kv_heads, groups, -1)
        mixed = paged_attention(q_SxKxGxE, keys, values, table_SxM, positions_SxG, window)
        return mixed.reshape(slots, -1), (keys, values)

    hidden_SxD, pages = _layers(weights, pages, tokens_S, positions_S, attend, config)
    hidden_SxD = _norm(hidden_SxD, weights["final_norm"], config.norm_eps)
    head_VxD = weights["embed" if config.tie_embeddings else "head"]
    logits_SxV = project_logits(hidden_SxD.astype(head_VxD.dtype), head_VxD)
    next_S = draw_tokens(logits_SxV, temperature_S, seed_S, drawn_S)
    return pages, next_S, jnp.take_along_axis(logits_SxV, next_S[:, None], axis=1)[:, 0]


_Attend = Callable[[Array, Array, Array, Array, Array, int | None], tuple[Array, tuple[Array, Array]]]


def _layers(
    weights: ServingWeights,
    pages: Pages,
    tokens_N: Array,
    positions_N: Array,
    attend: _Attend,
    config: DecoderConfig,
) -> tuple[Array, Pages]:
    """The residual stream after all layers [N, D], fp32, and the pages with the new keys and values.

    What `decoder.Decoder` computes, for rows of tokens that lie in pages.
    """
    x_NxD = weights["embed"][tokens_N].astype(jnp.float32)
    if config.scale_embeddings:
        x_NxD = x_NxD * math.sqrt(config.embed_dim)
    everywhere = rotary_angles(positions_N[:, None], config)
    nearby = rotary_angles(positions_N[:, None], config, local=True) if config.sliding_layers else everywhere
    new_pages = []
    # Unrolled in Python: pages carried through a scan over layers would be copied at every step.
    for i, layer in enumerate(weights["layers"]):
        local = i in config.sliding_layers
        qkv = _qkv(layer, _norm(x_NxD, layer["attention_norm"], config.norm_eps), config)
        q_NxHxE, k_NxKxE, v_NxKxE = _rotated(qkv, nearby if local else everywhere)
        q_NxHxE = q_NxHxE / math.sqrt(config.query_pre_attn_scalar or config.head_dim)
        window = config.sliding_window if local else None
        mixed_NxHE, written = attend(q_NxHxE, k_NxKxE, v_NxKxE, *pages[i], window)
        new_pages.append(written)
        x_NxD = x_NxD + _post(_product(mixed_NxHE, layer["o"]), layer, "attention_post_norm", config)
        update_NxD = _mlp(layer, _norm(x_NxD, layer["mlp_norm"], config.norm_eps), config)
        x_NxD = x_NxD + _post(update_NxD, layer, "mlp_post_norm", config)
    return x_NxD, tuple(new_pages)


def _product(x_NxD: Array, weight_FxD: Array) -> Array:
    return jnp.einsum(
        "nd,fd->nf", x_NxD.astype(weight_FxD.dtype), weight_FxD, preferred_element_type=jnp.float32
    )


def _norm(x: Array, scale: Array, eps: float) -> Array:
    inverse_rms = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse_rms * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def _post(x_NxD: Array, layer: dict[str, Array], name: str, config: DecoderConfig) -> Array:
    return _norm(x_NxD, layer[name], config.norm_eps) if config.post_norms else x_NxD


def _qkv(layer: dict[str, Array], x_NxD: Array, config: DecoderConfig) -> tuple[Array, Array, Array]:
    qkv = _product(x_NxD, layer["qkv"])
    if config.qkv_bias:
        qkv = qkv + layer["qkv_bias"][None, :]
    qkv = qkv.reshape(x_NxD.shape[0], -1, config.head_dim)
    q, k, v = jnp.split(qkv, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
    if config.qk_norm:
        q = _norm(q, layer["q_norm"], config.norm_eps)
        k = _norm(k, layer["k_norm"], config.norm_eps)
    return q, k, v


def _rotated(qkv: tuple[Array, Array, Array], angles: tuple[Any, Any]) -> tuple[Array, Array, Array]:
    q, k, v = qkv
    # Every token is a row of its own with one position.
    return rotate(q[:, None], *angles)[:, 0], rotate(k[:, None], *angles)[:, 0], v


def _mlp(layer: dict[str, Array], x_NxD: Array, config: DecoderConfig) -> Array:
    gate, up = jnp.split(_product(x_NxD, layer["gate_up"]), 2, axis=-1)
    gate = jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return _product(gate * up, layer["down"])

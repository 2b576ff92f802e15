"""Keys and values in pages of fixed size, and the attention that reads them through a table of pages.

A sequence of tokens lies in the pages that its row of the table names, `page` tokens each, so sequences of
any length share one pool and a common beginning is stored once (Kwon et al. 2023, arXiv 2309.06180).
Page 0 belongs to nobody: rows without a sequence write there, and unused entries of a table point there.

Shape suffixes: B rows, Q queries of a row for each key/value head, K key/value heads, E head_dim,
P pages of the pool, C tokens of a page, M pages of a row at most.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lemon_jax.model.layout import MASKED

# One (keys, values) pair a layer, each [P, K, C, E].
Pages = tuple[tuple[Array, Array], ...]


def empty_pages(layers: int, pages: int, kv_heads: int, page: int, head_dim: int, dtype: jnp.dtype) -> Pages:
    """A pool for keys and values of `dtype`."""
    # XLA widens a scatter of bfloat16 to fp32, the whole pool each time; the bits alone it writes in place.
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    shape = (pages, kv_heads, page, head_dim)
    return tuple((jnp.zeros(shape, stored), jnp.zeros(shape, stored)) for _ in range(layers))


def stored(x: Array, pages_PxKxCxE: Array) -> Array:
    """`x` as the pool holds it."""
    if pages_PxKxCxE.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(pages_PxKxCxE.dtype)


def _gathered(pages_PxKxCxE: Array, page_B: Array) -> Array:
    found = jnp.take(pages_PxKxCxE, page_B, axis=0, mode="clip")
    return jax.lax.bitcast_convert_type(found, jnp.bfloat16) if found.dtype == jnp.uint16 else found


def paged_attention(
    q_BxKxQxE: Float[Array, "rows kv_heads queries head_dim"],
    keys_PxKxCxE: Array,
    values_PxKxCxE: Array,
    table_BxM: Int[Array, "rows most"],
    positions_BxQ: Int[Array, "rows queries"],
    window: int | None = None,
) -> Float[Array, "rows kv_heads queries head_dim"]:
    """softmax(q k^T) v over the tokens up to each query's position, the last `window` of them if given.

    `q` holds scaled queries, fp32. Pages are read one after the other, with the running maximum and sum of an
    online softmax (Milakov & Gimelshein 2018, arXiv 1805.02867), up to the last page that any row needs. A
    page behind a row's own last one leaves the row's numbers as they are, bit for bit, so that no row
    depends on how long the others are.
    """
    batch, kv_heads, queries, head_dim = q_BxKxQxE.shape
    page = keys_PxKxCxE.shape[2]
    dtype = jnp.bfloat16 if keys_PxKxCxE.dtype == jnp.uint16 else keys_PxKxCxE.dtype
    q_BxKxQxE = q_BxKxQxE.astype(dtype)

    def read_page(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum_BxKxQ, total_BxKxQ, mixed_BxKxQxE = state
        keys_BxKxCxE = _gathered(keys_PxKxCxE, table_BxM[:, j])
        values_BxKxCxE = _gathered(values_PxKxCxE, table_BxM[:, j])
        scores = jnp.einsum("bkqe,bkce->bkqc", q_BxKxQxE, keys_BxKxCxE, preferred_element_type=jnp.float32)
        age_BxQxC = positions_BxQ[:, :, None] - (j * page + jnp.arange(page))[None, None, :]
        seen_BxQxC = age_BxQxC >= 0 if window is None else (age_BxQxC >= 0) & (age_BxQxC < window)
        scores = jnp.where(seen_BxQxC[:, None], scores, MASKED)
        higher_BxKxQ = jnp.maximum(maximum_BxKxQ, jnp.max(scores, axis=-1))
        # Where nothing was seen so far, this sums up nonsense; the first true score multiplies it by 0.
        weights = jnp.exp(scores - higher_BxKxQ[..., None])
        kept_BxKxQ = jnp.exp(maximum_BxKxQ - higher_BxKxQ)
        added = jnp.einsum(
            "bkqc,bkce->bkqe", weights.astype(dtype), values_BxKxCxE, preferred_element_type=jnp.float32
        )
        total_BxKxQ = total_BxKxQ * kept_BxKxQ + jnp.sum(weights, axis=-1)
        return higher_BxKxQ, total_BxKxQ, mixed_BxKxQxE * kept_BxKxQ[..., None] + added

    nothing = jnp.full((batch, kv_heads, queries), MASKED, jnp.float32)
    start = (nothing, jnp.zeros_like(nothing), jnp.zeros((batch, kv_heads, queries, head_dim), jnp.float32))
    needed = jnp.max(positions_BxQ) // page + 1
    _, total_BxKxQ, mixed_BxKxQxE = jax.lax.fori_loop(0, needed, read_page, start)
    return mixed_BxKxQxE / total_BxKxQ[..., None]

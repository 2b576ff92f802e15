"""Log-probabilities over a large vocabulary, whose gradient is computed block after block of the vocabulary.

With l = h W^T / temperature and L = logsumexp(l), log p(y) = l_y - L and d log p(y) / d l_v = [v = y] - p_v.
A loop over the tokens would add a gradient of all of W to their sum for each chunk, and hold it twice; a loop
over the vocabulary writes each row of it once.

Shape suffixes: N tokens, D embed_dim, V vocabulary, J vocabulary of a block, C classes of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lemon_jax.model.layout import MASKED

BLOCK_LOGITS = 1 << 22  # of a block of the vocabulary: 16 MiB in fp32


class Support(NamedTuple):
    """The tokens that may come: those of the allowed classes."""

    allowed_NxC: Bool[Array, "tokens classes"]
    class_V: Int[Array, " vocab"]


def head_gradients(
    head_VxD: Float[Array, "vocab dim"],
    hidden_NxD: Float[Array, "tokens dim"],
    token_N: Int[Array, " tokens"],
    log_total_N: Float[Array, " tokens"],
    support: Support | None,
    given_N: Float[Array, " tokens"],
    temperature: float,
) -> tuple[Float[Array, "vocab dim"], Float[Array, "tokens dim"]]:
    """The gradients of sum(given * log p(token)) in head and hidden.

    `log_total` is logsumexp of the logits after temperature and support. Logits lie with the vocabulary
    first, so that the head's gradient is a plain product.
    """
    tokens, vocab = hidden_NxD.shape[0], head_VxD.shape[0]
    blocks = -(-vocab // max(BLOCK_LOGITS // tokens, 1))
    block = -(-vocab // blocks)
    given_N = given_N / temperature
    hidden32_NxD = hidden_NxD.astype(jnp.float32)

    def add(carried: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], None]:
        head_gradient_VxD, hidden_gradient_DxN = carried
        start = jnp.minimum(index * block, vocab - block)  # the last block begins within the one before
        row_J = start + jnp.arange(block)
        head_JxD = jax.lax.dynamic_slice_in_dim(head_VxD, start, block)
        logits_JxN = jnp.einsum("jd,nd->jn", head_JxD, hidden_NxD, preferred_element_type=jnp.float32)
        logits_JxN = logits_JxN / temperature
        if support is not None:
            class_J = jax.lax.dynamic_slice_in_dim(support.class_V, start, block)
            allowed_JxN = jnp.take(support.allowed_NxC.T, class_J, axis=0, mode="clip")
            logits_JxN = jnp.where(allowed_JxN, logits_JxN, MASKED)
        chosen_JxN = (row_J[:, None] == token_N[None]).astype(jnp.float32)
        gradient_JxN = given_N[None] * (chosen_JxN - jnp.exp(logits_JxN - log_total_N[None]))
        of_head_JxD = (gradient_JxN @ hidden32_NxD).astype(head_VxD.dtype)
        head_gradient_VxD = jax.lax.dynamic_update_slice_in_dim(head_gradient_VxD, of_head_JxD, start, 0)
        new_JxN = jnp.where(row_J[:, None] >= index * block, gradient_JxN, 0)
        return (head_gradient_VxD, hidden_gradient_DxN + head_JxD.T.astype(jnp.float32) @ new_JxN), None

    nothing = jnp.zeros_like(head_VxD), jnp.zeros(hidden_NxD.shape[::-1], jnp.float32)
    (head_gradient_VxD, hidden_gradient_DxN), _ = jax.lax.scan(add, nothing, jnp.arange(blocks))
    return head_gradient_VxD, hidden_gradient_DxN.T.astype(hidden_NxD.dtype)

"""Small decoders whose parameters are large enough that mistakes show."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lemon_jax.model import PRESETS, Decoder, DecoderConfig, attention_mask, rope_positions

TINY = PRESETS["tiny"]


def random_decoder(config: DecoderConfig = TINY, seed: int = 0, scale: float = 0.16) -> Decoder:
    """As initialised a decoder is nearly uniform, and a wrong one nearly passes; biases are 0, scales 1."""
    rng = np.random.default_rng(seed)

    def perturb(path, x):
        if "scale" in str(path):
            return jnp.asarray(1 + 0.2 * rng.normal(size=x.shape), jnp.float32)
        return jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32)

    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(perturb, state))


ORACLE_SLOTS = 20  # one compilation for all lengths: what follows a token cannot change its logits


@jax.jit
def plain_logits(decoder: Decoder, tokens_T):
    """Logits [T, V] of one unpadded sequence: the uncached, unchunked path."""
    length = tokens_T.shape[0]
    lengths, slots = jnp.array([length]), jnp.arange(length)
    hidden, _ = decoder(
        tokens_T[None], rope_positions(lengths, slots, length), attention_mask(lengths, slots, length, length)
    )
    return decoder.logits(hidden)[0]


def full_logits(decoder: Decoder, tokens):
    """`plain_logits` for token ids of any length up to ORACLE_SLOTS."""
    tokens = np.asarray(tokens)
    padded = np.zeros(ORACLE_SLOTS, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(plain_logits(decoder, jnp.asarray(padded)))[: len(tokens)]


def random_prompts(rng: np.random.Generator, lengths: list[int], slots: int, vocab: int = TINY.vocab_size):
    """Right-padded prompts whose padding is noise, as it must not matter."""
    return jnp.asarray(rng.integers(0, vocab, (len(lengths), slots)), jnp.int32), jnp.asarray(lengths)

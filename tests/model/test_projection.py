"""The products' own gradient against JAX's, and what a mesh moves for them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lemon_jax.model import Decoder, DecoderConfig
from lemon_jax.model.projection import product
from lemon_jax.model.sharding import make_mesh, place, using


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_plain_product(shape, dtype):
    """Whichever of both is the narrower, which is then transposed."""
    rng = np.random.default_rng(0)
    x, w, given = (
        jnp.asarray(rng.normal(size=size), dtype) for size in [(7, shape[0]), shape, (7, shape[1])]
    )

    def gradients(multiply):
        return jax.jit(lambda x, w: jax.vjp(multiply, x, w)[1](given))(x, w)

    for actual, expected in zip(gradients(product), gradients(jnp.matmul), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(
            *(np.asarray(z, np.float32) for z in (actual, expected)),
            rtol=1e-5 if dtype == "float32" else 2e-2,
            atol=1e-5 if dtype == "float32" else 2e-2,
        )


LINKS = r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\("


@pytest.mark.parametrize("slots", [1, 64])
def test_few_tokens_travel_and_of_many_the_parameters(slots):
    """One device's numbers. Decoding 8 rows on 4 devices moves no array of a parameter's size."""
    config = DecoderConfig(
        vocab_size=1024, embed_dim=256, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=32, mlp_dim=512,
        tie_embeddings=False,
    )  # fmt: skip
    decoder = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(8 * slots).reshape(8, slots) % 1024
    positions = jnp.broadcast_to(jnp.arange(slots), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((slots, slots), bool)), (8, slots, slots))

    @jax.jit
    def last_logits(decoder, tokens):
        return decoder.logits(decoder(tokens, positions, mask)[0][:, -1])

    expected = last_logits(decoder, tokens)
    graph, params = nnx.split(decoder)
    split = nnx.merge(graph, place(params, make_mesh(fsdp=4, devices=jax.devices()[:4])))
    with using(split):
        actual = last_logits(split, tokens)
        text = last_logits.lower(split, tokens).compile().as_text()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(LINKS, text) if dims]
    smallest = config.embed_dim * config.num_heads * config.head_dim  # but for keys and values
    assert sizes
    assert (max(sizes) >= smallest) == (slots > 1)

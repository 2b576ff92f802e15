"""What "float32" means where JAX computes on something else than a CPU."""

import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest

from lemon_jax.model import PRESETS, Decoder, completion_log_probs
from lemon_jax.model.attention import BLOCK
from lemon_jax.precision import keep_float32

NAME = "jax_default_matmul_precision"
PRODUCT = re.compile(r"stablehlo\.dot_general .*?precision = \[(\w+), (\w+)\]")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Says what the process computes on; the setting is afterwards as it was."""
    before = jax.config.values[NAME]
    yield lambda platform: monkeypatch.setattr(jax, "default_backend", lambda: platform)
    jax.config.update(NAME, before)


def products(platform: str) -> set[str]:
    """The precisions of all products in scoring and its gradient, as they are compiled for a platform."""
    from flax import nnx

    decoder = nnx.eval_shape(lambda: Decoder(PRESETS["tiny"], rngs=nnx.Rngs(0)))
    tokens, lengths = jnp.zeros((2, BLOCK), jnp.int32), jnp.full((2,), BLOCK)

    def loss(decoder: Decoder) -> jax.Array:
        scores = completion_log_probs(decoder, tokens, lengths, tokens, lengths, temperature=1.0)
        return jnp.sum(scores[0])

    text = jax.jit(jax.grad(loss)).trace(decoder).lower(lowering_platforms=(platform,)).as_text()
    found = PRODUCT.findall(text)
    assert len(found) == text.count("stablehlo.dot_general") > 20
    return {precision for pair in found for precision in pair}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_every_product_is_of_full_precision_on_accelerators(on: Callable, platform: str) -> None:
    assert products(platform) == {"DEFAULT"}
    on("tpu" if platform == "tpu" else "gpu")
    keep_float32()
    assert products(platform) == {"HIGHEST"}


def test_nothing_is_set_on_a_cpu_or_against_the_user(on: Callable) -> None:
    keep_float32()
    assert jax.config.values[NAME] is None
    on("gpu")
    jax.config.update(NAME, "tensorfloat32")
    keep_float32()
    assert jax.config.values[NAME] == "tensorfloat32"

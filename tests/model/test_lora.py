"""Low-rank adapters: nothing changes at first, they alone are trained, merged they compute the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_helpers import TINY, full_logits, random_decoder, random_prompts

from lemon_jax.errors import LemonError
from lemon_jax.model import completion_log_probs, named_params
from lemon_jax.model.lora import TARGETS, add_lora, has_lora, merge_lora
from lemon_jax.model.projection import LoraParam, project
from lemon_jax.model.sharding import logical_axes

TOKENS = np.arange(9) * 31 % TINY.vocab_size
SETTINGS = {"rank": 3, "alpha": 6.0, "key": jax.random.key(1)}


def moved(decoder, scale=0.1):
    """The decoder with other adapters, as after training."""
    graph, adapters, rest = nnx.split(decoder, LoraParam, ...)
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), adapters)
    return nnx.merge(graph, adapters, rest)


def test_a_fresh_adapter_changes_nothing():
    decoder = random_decoder()
    adapted = add_lora(decoder, **SETTINGS)
    assert has_lora(adapted)
    assert not has_lora(decoder)
    # Up to how the compiler arranges the sums of a larger program.
    np.testing.assert_allclose(full_logits(adapted, TOKENS), full_logits(decoder, TOKENS), atol=1e-5)
    for name, value in named_params(decoder).items():
        assert named_params(adapted)[name] is value  # shared, not copied


def test_shapes_and_names_are_those_that_are_split_over_a_mesh():
    adapted = add_lora(random_decoder(), **SETTINGS)
    factors = named_params(nnx.state(adapted, LoraParam))
    assert len(factors) == 2 * len(TARGETS) * TINY.num_layers
    for name, value in factors.items():
        axes = logical_axes(name, value.ndim)
        assert value.shape[axes.index("rank")] == 3, name
        of, which = name.rsplit("_lora_", 1)
        weight = named_params(adapted)[of].shape
        inputs = TARGETS[of.rpartition(".")[2]]
        assert value.shape == ((*weight[:inputs], 3) if which == "a" else (3, *weight[inputs:])), name
        assert (np.abs(value).max() > 0) == (which == "a")


@pytest.mark.parametrize("targets", [tuple(TARGETS), ("q", "v"), ("o", "down")])
def test_merged_computes_what_the_adapters_do(targets):
    decoder = random_decoder(dataclasses.replace(TINY, qkv_bias=True, qk_norm=True))
    adapted = moved(add_lora(decoder, targets=targets, **SETTINGS))
    merged = merge_lora(adapted)
    assert not has_lora(merged)
    assert nnx.graphdef(merged) == nnx.graphdef(decoder)
    expected = full_logits(adapted, TOKENS)
    assert np.abs(expected - full_logits(decoder, TOKENS)).max() > 0.1
    np.testing.assert_allclose(full_logits(merged, TOKENS), expected, atol=1e-4)
    changed = {
        name.rpartition(".")[2]
        for name, value in named_params(merged).items()
        if (np.asarray(value) != np.asarray(named_params(decoder)[name])).any()
    }
    assert changed == set(targets)


def test_the_correction_is_alpha_over_rank_times_the_product():
    """One projection, by the formula."""
    adapted = moved(add_lora(random_decoder(), targets=("o",), **SETTINGS))
    attention = adapted.layers[0].attention
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 2, 8)), jnp.float32)
    a, b = (np.asarray(getattr(attention, f"o_lora_{which}")[...], np.float64) for which in "ab")
    weight = np.asarray(attention.o[...], np.float64) + 6.0 / 3 * (a.reshape(32, 3) @ b).reshape(4, 8, 32)
    expected = sum(np.asarray(x, np.float64)[0, h] @ weight[h] for h in range(4))
    actual = project(attention, "o", jnp.swapaxes(x, 1, 2), inputs=2)[0]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_gradients_are_those_of_the_merged_parameter():
    """Of A and B alone, and equal to the chain rule through W + s A B."""
    adapted = moved(add_lora(random_decoder(), targets=("k", "up"), **SETTINGS))
    prompts = random_prompts(np.random.default_rng(0), [4, 2], slots=4)
    completions = jnp.asarray(np.random.default_rng(1).integers(0, TINY.vocab_size, (2, 5)))
    graph, adapters, rest = nnx.split(adapted, LoraParam, ...)

    def loss(adapters, merge):
        decoder = nnx.merge(graph, adapters, rest)
        log_probs, _ = completion_log_probs(
            merge_lora(decoder) if merge else decoder, *prompts, completions, jnp.array([5, 3])
        )
        return -log_probs.sum()

    grads = jax.grad(loss)(adapters, False)
    expected = jax.grad(loss)(adapters, True)
    assert set(named_params(grads)) == set(named_params(adapters))
    for name, value in named_params(grads).items():
        assert np.abs(value).max() > 1e-3
        np.testing.assert_allclose(value, named_params(expected)[name], atol=1e-3, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("change", [{"rank": 0}, {"targets": ("q", "x")}, {"targets": ()}, {"alpha": 0.0}])
def test_impossible_adapters_are_refused(change):
    with pytest.raises(LemonError, match="expected a rank of at least 1"):
        add_lora(random_decoder(), **SETTINGS | change)


def test_two_adapters_are_refused():
    with pytest.raises(LemonError, match="merge them first"):
        add_lora(add_lora(random_decoder(), **SETTINGS), **SETTINGS)

"""The decoder against its plain NumPy twin, and the layout it is used with."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import pytest
from flax import nnx
from model_helpers import TINY, full_logits, plain_logits, random_decoder

from lemon_jax.errors import LemonError
from lemon_jax.model import (
    PRESETS,
    Decoder,
    DecoderConfig,
    attention_mask,
    named_params,
    rope_positions,
)
from lemon_jax.model import decoder as decoder_module
from lemon_jax.model.layout import window_mask

QWEN_SHAPE = DecoderConfig(
    vocab_size=61, embed_dim=28, num_layers=2, num_heads=14, num_kv_heads=2, head_dim=4, mlp_dim=36,
    rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        QWEN_SHAPE,
        dataclasses.replace(QWEN_SHAPE, tie_embeddings=False),
        dataclasses.replace(QWEN_SHAPE, qkv_bias=False, num_kv_heads=14, rope_theta=1e4),
    ],
    ids=["tied", "untied", "no-bias-mha"],
)
def test_logits_equal_the_plain_numpy_decoder(config):
    decoder = random_decoder(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 9)
    expected = numpy_decoder.logits(named_params(decoder), config, tokens)
    actual = np.asarray(full_logits(decoder, tokens))
    assert np.ptp(expected) > 1  # a flat distribution would hide a wrong decoder
    np.testing.assert_allclose(actual, expected, atol=1e-4)


BIASED = dataclasses.replace(QWEN_SHAPE, num_heads=4, num_kv_heads=2, head_dim=16)


def _with_key_biases(scale: float) -> Decoder:
    """As in Qwen2.5, whose keys have biases above 200 in single features."""
    decoder = random_decoder(BIASED)
    slow = np.array([5, 6, 7, 13, 14, 15])  # features whose angle hardly grows with the position
    signs = np.random.default_rng(0).choice([-1, 1], len(slow))
    large = jnp.zeros((BIASED.num_kv_heads, BIASED.head_dim)).at[:, slow].set(scale * signs)
    for block in decoder.layers:
        block.attention.k_bias[...] += large
        block.attention.q_bias[...] += jnp.repeat(large / 100, 2, axis=0)
    return decoder


def test_large_biases_of_keys_cost_no_accuracy(monkeypatch):
    decoder, tokens = _with_key_biases(400.0), np.random.default_rng(1).integers(0, BIASED.vocab_size, 9)
    exact = numpy_decoder.logits(named_params(decoder), BIASED, tokens)

    def error() -> float:
        plain_logits.clear_cache()
        return np.abs(np.asarray(full_logits(decoder, tokens)) - exact).max()

    shifted = error()
    monkeypatch.setattr(decoder_module, "nearer_zero", lambda k: k)
    plain = error()
    plain_logits.clear_cache()
    assert np.ptp(exact) > 1
    assert shifted < plain / 4


def test_keys_of_bfloat16_stay_as_they_are(monkeypatch):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _with_key_biases(400.0))
    monkeypatch.setattr(decoder_module, "nearer_zero", None)
    assert np.isfinite(plain_logits.__wrapped__(low, jnp.arange(9))).all()


def test_keys_nearer_zero_leave_the_gradient_as_it_is(monkeypatch):
    # So many tokens are attended to in blocks on CPUs.
    decoder, tokens = _with_key_biases(1.0), jnp.arange(70) % BIASED.vocab_size
    mixed = jnp.asarray(np.random.default_rng(2).normal(size=(70, BIASED.vocab_size)))

    def gradient():
        return jax.grad(lambda d: jnp.sum(plain_logits.__wrapped__(d, tokens) * mixed))(decoder)

    shifted = gradient()
    monkeypatch.setattr(decoder_module, "nearer_zero", lambda k: k)
    for a, b in zip(jax.tree.leaves(shifted), jax.tree.leaves(gradient()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * max(1.0, np.abs(b).max()))


def test_layout_of_the_docstring():
    lengths, slots = jnp.array([2]), jnp.arange(6)
    assert rope_positions(lengths, slots, 4).tolist() == [[0, 1, 2, 3, 2, 3]]
    mask = attention_mask(lengths, slots, 4, 6)
    assert mask[0, 5].astype(int).tolist() == [1, 1, 0, 0, 1, 1]
    assert mask[0, 0].astype(int).tolist() == [1, 0, 0, 0, 0, 0]


def test_a_window_counts_tokens_not_slots():
    lengths, slots = jnp.array([2, 4]), jnp.arange(7)
    mask = attention_mask(lengths, slots, 4, 7)
    positions = np.asarray(rope_positions(lengths, slots, 4))
    for window in (1, 3, 7):
        near = positions[:, :, None] - positions[:, None, :] < window
        rows = np.array([[0, 1, 4, 5, 6], [0, 1, 2, 3, 4]])  # prompt padding asks nothing
        for b, queries in enumerate(rows):
            actual = np.asarray(window_mask(mask, window))[b, queries]
            assert (actual == (np.asarray(mask) & near)[b, queries]).all()
    assert window_mask(mask, 3)[0, 5].astype(int).tolist() == [0, 1, 0, 0, 1, 1, 0]


def test_bfloat16_parameters_compute_in_bfloat16_but_give_fp32_logits():
    decoder = random_decoder()
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), decoder)
    tokens = np.arange(7)
    low_logits, logits = full_logits(low, tokens), full_logits(decoder, tokens)
    assert low_logits.dtype == np.float32
    assert np.abs(low_logits - logits).max() < 0.1 * np.ptp(logits)


def test_initialisation_is_fp32_small_and_scales_residual_projections():
    shallow = dataclasses.replace(TINY, num_layers=1)
    params = jax.device_get(named_params(Decoder(shallow, rngs=nnx.Rngs(0))))
    assert {value.dtype for value in params.values()} == {np.dtype(np.float32)}
    assert np.std(params["embed"]) == pytest.approx(0.02, rel=0.05)
    assert np.std(params["layers.0.mlp.down"]) == pytest.approx(0.02 / 2**0.5, rel=0.1)  # 2L = 2


def test_compact_fits_its_budget():
    shapes = nnx.eval_shape(lambda: Decoder(PRESETS["compact"], rngs=nnx.Rngs(0)))
    count = sum(np.prod(value.shape) for value in named_params(shapes).values())
    assert count == pytest.approx(9.2e6, rel=0.01)
    assert 2 * count < 19 * 2**20


def test_config_round_trip_and_faults():
    assert DecoderConfig.from_dict(TINY.to_dict()) == TINY
    assert len(TINY.to_dict()) == 11  # what files held before there were other families
    sliding = dataclasses.replace(TINY, sliding_layers=(1,), sliding_window=4, query_pre_attn_scalar=9.0)
    assert DecoderConfig.from_dict(json.loads(json.dumps(sliding.to_dict()))) == sliding
    values = TINY.to_dict() | {"heads": 3, "mlp_dim": "64"}
    del values["vocab_size"]
    with pytest.raises(LemonError, match=r"unknown key 'heads'; missing key 'vocab_size'; mlp_dim is '64'"):
        DecoderConfig.from_dict(values)
    for change, message in [
        ({"num_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "odd"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"activation": "relu"}, "activation is 'relu', expected one of silu, gelu_tanh"),
        ({"sliding_layers": (0,)}, "needs a sliding_window"),
        ({"sliding_layers": (0, 2), "sliding_window": 4}, "outside 0..1"),
        ({"rope_scaling": "llama3", "rope_high_freq_factor": 1.0}, "must exceed"),
        ({"query_pre_attn_scalar": float("nan")}, "must be positive and finite"),
    ]:
        with pytest.raises(LemonError, match=message):
            dataclasses.replace(TINY, **change)

"""Chunked scoring against an oracle that materialises the logits of every step, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_helpers import ORACLE_SLOTS, TINY, plain_logits, random_decoder, random_prompts

from lemon_jax.model import completion_log_probs, head_gradient
from lemon_jax.model.sharding import make_mesh, place, using

PROMPT_LENGTHS = [5, 2, 1]
LENGTHS = [11, 1, 6]
TEMPERATURE = 0.7
CHUNK = 4


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    return random_decoder(), *random_prompts(rng, PROMPT_LENGTHS, 5), *random_prompts(rng, LENGTHS, 11)


def oracle(decoder, prompts, completions):
    """[B][length] log-probabilities and entropies; each row is its true tokens, one after the other."""
    prompts, completions = np.asarray(prompts), np.asarray(completions)
    sequences = np.zeros((len(LENGTHS), ORACLE_SLOTS), np.int32)
    for b, (n, c) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        sequences[b, : n + c] = np.concatenate([prompts[b, :n], completions[b, :c]])
    logits_BxTxV = jax.lax.map(lambda row: plain_logits(decoder, row), jnp.asarray(sequences))
    rows = []
    for b, (n, c) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        log_probs = jax.nn.log_softmax(logits_BxTxV[b, n - 1 : n + c - 1] / TEMPERATURE)
        chosen = log_probs[np.arange(c), sequences[b, n : n + c]]
        rows.append((chosen, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)))
    return rows


@pytest.fixture(scope="module")
def weights():
    return np.random.default_rng(1).normal(size=(len(LENGTHS), 11)).astype(np.float32)


@pytest.fixture(scope="module")
def compiled_gradient(case, weights):
    """(decoder, completion lengths) -> gradient, compiled; its text shows what it keeps in memory."""
    _, prompts, prompt_lengths, completions, _ = case

    def loss(decoder, lengths):
        log_probs, entropy = completion_log_probs(
            decoder, prompts, prompt_lengths, completions, lengths, temperature=TEMPERATURE, chunk=CHUNK
        )
        return jnp.sum(weights * log_probs) + 0.3 * jnp.sum(entropy)  # which has no gradient

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_gradient, "BLOCK_LOGITS", 100 * len(LENGTHS) * 11)  # six blocks; the last overlaps
        return jax.jit(jax.grad(loss)).lower(case[0], case[4]).compile()


@pytest.mark.parametrize("chunk", [CHUNK, 64])
def test_values_equal_the_oracle_and_padding_is_zero(case, chunk):
    decoder, prompts, _, completions, _ = case
    score = jax.jit(completion_log_probs, static_argnames=("temperature", "chunk"))
    scores = jax.device_get(score(*case, temperature=TEMPERATURE, chunk=chunk))
    expected = jax.jit(lambda decoder: oracle(decoder, prompts, completions))(decoder)
    for b, rows in enumerate(jax.device_get(expected)):
        for actual, row in zip(scores, rows, strict=True):
            assert actual.dtype == np.float32
            np.testing.assert_allclose(actual[b, : LENGTHS[b]], row, atol=1e-4)
            assert not actual[b, LENGTHS[b] :].any()


def test_gradients_equal_the_oracle(case, weights, compiled_gradient):
    decoder, prompts, _, completions, lengths = case

    def oracle_loss(decoder):
        rows = oracle(decoder, prompts, completions)
        return sum(jnp.sum(weights[b, : LENGTHS[b]] * p) for b, (p, _) in enumerate(rows))

    actual = jax.tree.leaves(jax.device_get(compiled_gradient(decoder, lengths)))
    expected = jax.tree.leaves(jax.device_get(jax.jit(jax.grad(oracle_loss))(decoder)))
    for chunked, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(chunked, wanted, atol=1e-4 * max(1.0, np.abs(wanted).max()))


def test_on_a_mesh_the_gradient_goes_chunk_after_chunk(case, weights, compiled_gradient):
    """One device goes through the vocabulary, a mesh through the tokens."""
    graph, params = nnx.split(case[0])
    split = place(params, make_mesh(data=8))

    def loss(params):
        log_probs, _ = completion_log_probs(
            nnx.merge(graph, params), *case[1:], temperature=TEMPERATURE, chunk=CHUNK
        )
        return jnp.sum(weights * log_probs)

    with using(split):
        actual = jax.device_get(jax.jit(jax.grad(loss))(split))
    expected = jax.device_get(compiled_gradient(case[0], case[4]))
    for there, here in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(there, here, atol=1e-4 * max(1.0, np.abs(here).max()))


def test_rows_of_padding_alone_give_a_gradient_of_zero(case, compiled_gradient):
    gradient = compiled_gradient(case[0], jnp.zeros_like(case[4]))
    assert all(not leaf.any() for leaf in jax.tree.leaves(jax.device_get(gradient)))


def test_no_array_holds_logits_of_every_step(compiled_gradient):
    text = compiled_gradient.as_text()
    batch, steps, vocab = len(LENGTHS), 12, TINY.vocab_size  # 11 steps, padded to whole chunks
    assert f"f32[{batch},{CHUNK},{vocab}]" in text
    assert f"f32[86,{batch * 11}]" in text  # a block of the vocabulary for all tokens
    whole = [(batch, steps, vocab), (steps // CHUNK, batch, CHUNK, vocab), (batch, 11, vocab)]
    for shape in [*whole, (vocab, batch * 11)]:
        assert f"f32[{','.join(map(str, shape))}]" not in text


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"chunk": 0}])
def test_impossible_settings_are_refused(case, change):
    with pytest.raises(ValueError, match="must be positive"):
        completion_log_probs(*case, **change)

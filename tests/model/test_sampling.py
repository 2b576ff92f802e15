"""Cached sampling against the uncached decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, full_logits, random_decoder, random_prompts

from lemon_jax.model import completion_log_probs, stages
from lemon_jax.model import sample as device_sample
from lemon_jax.model.sampling import inverse_cdf

LENGTHS = [6, 1, 4]
STATIC = {"group": 3, "max_new": 12, "temperature": 0.8}


def sample(*args, **static):
    """On the host, where slicing compiles nothing."""
    return jax.device_get(device_sample(*args, **static))


def log_softmax(logits, temperature):
    logits = np.asarray(logits, np.float64) / temperature
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def decoder():
    return random_decoder()


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(np.random.default_rng(0), LENGTHS, slots=6)


@pytest.fixture(scope="module")
def drawn(decoder, prompts):
    """Free-running samples, and an id to end on that occurs in the middle of some of them."""
    samples = sample(decoder, *prompts, jax.random.key(3), eos_ids=(-1,), **STATIC)
    return samples, int(samples.tokens_BxC[4, 5])


def test_log_probs_equal_the_full_forward_pass_for_uneven_prompts(decoder, prompts, drawn):
    samples, _ = drawn
    assert samples.lengths_B.tolist() == [12] * 9
    assert not samples.finished_B.any()
    for row in range(9):
        n = LENGTHS[row // 3]
        tokens = np.concatenate([prompts[0][row // 3, :n], samples.tokens_BxC[row]])
        expected = log_softmax(full_logits(decoder, tokens), 0.8)[np.arange(n - 1, n + 11), tokens[n:]]
        np.testing.assert_allclose(samples.log_probs_BxC[row], expected, atol=1e-4)


def test_log_probs_equal_the_scoring_pass(decoder, prompts, drawn):
    _, eos = drawn
    samples = sample(decoder, *prompts, jax.random.key(3), eos_ids=(eos,), **STATIC)
    score = jax.jit(completion_log_probs, static_argnames=("temperature", "chunk"))
    repeated = [np.repeat(x, 3, axis=0) for x in prompts]
    log_probs, _ = score(
        decoder,
        *map(jnp.asarray, [*repeated, samples.tokens_BxC, samples.lengths_B]),
        temperature=0.8,
        chunk=5,
    )
    np.testing.assert_allclose(samples.log_probs_BxC, log_probs, atol=1e-4)


def test_any_of_several_ids_ends_a_row(decoder, prompts, drawn):
    free, eos = drawn
    other = int(free.tokens_BxC[0, 2])  # occurs in another row
    assert other != eos
    samples = sample(decoder, *prompts, jax.random.key(3), eos_ids=(eos, other), **STATIC)
    lengths = []
    for row in np.asarray(free.tokens_BxC):
        found = np.flatnonzero(np.isin(row, [eos, other]))
        lengths.append(found[0] + 1 if len(found) else 12)
    assert samples.lengths_B.tolist() == lengths
    assert lengths[0] <= 3
    assert lengths[4] <= 6
    assert samples.finished_B.sum() == sum(bool(np.isin(row, [eos, other]).any()) for row in free.tokens_BxC)


def test_eos_ends_a_row_and_counts_as_its_last_token(decoder, prompts, drawn):
    free, eos = drawn
    samples = sample(decoder, *prompts, jax.random.key(3), eos_ids=(eos,), **STATIC)
    assert samples.finished_B[4]
    for row in range(9):
        found = np.flatnonzero(np.asarray(free.tokens_BxC[row]) == eos)
        length = found[0] + 1 if len(found) else 12
        assert samples.lengths_B[row] == length
        assert samples.finished_B[row] == bool(len(found))
        assert (samples.tokens_BxC[row, :length] == free.tokens_BxC[row, :length]).all()
        assert not samples.tokens_BxC[row, length:].any()
        assert not samples.log_probs_BxC[row, length:].any()


def test_a_row_depends_on_no_other(decoder, prompts, drawn):
    samples, _ = drawn
    tokens = np.array(prompts[0])
    tokens[1:] = (tokens[1:] + 17) % TINY.vocab_size
    changed = sample(
        decoder, jnp.asarray(tokens), jnp.array([6, 5, 2]), jax.random.key(3), eos_ids=(-1,), **STATIC
    )
    assert (changed.tokens_BxC[:3] == samples.tokens_BxC[:3]).all()
    np.testing.assert_allclose(changed.log_probs_BxC[:3], samples.log_probs_BxC[:3], atol=1e-5)
    assert (changed.tokens_BxC[3:] != samples.tokens_BxC[3:]).any()
    # Members of a group share the prompt, not the randomness.
    assert len({tuple(row) for row in samples.tokens_BxC[:3].tolist()}) == 3


def test_padding_does_not_change_results(decoder, prompts, drawn):
    samples, _ = drawn
    wider = jnp.pad(prompts[0], ((0, 0), (0, 5)), constant_values=7)
    padded = sample(decoder, wider, prompts[1], jax.random.key(3), eos_ids=(-1,), **STATIC)
    assert (padded.tokens_BxC == samples.tokens_BxC).all()
    np.testing.assert_allclose(padded.log_probs_BxC, samples.log_probs_BxC, atol=1e-4)


def test_greedy_equals_repeated_argmax(decoder, prompts):
    samples = sample(decoder, *prompts, jax.random.key(0), eos_ids=(-1,), group=1, max_new=8, temperature=0.0)
    for row, n in enumerate(LENGTHS):
        tokens = prompts[0][row, :n].tolist()
        for step in range(8):
            log_probs = log_softmax(full_logits(decoder, tokens), 1.0)[-1]
            tokens.append(int(np.argmax(log_probs)))
            log_prob = log_probs[tokens[-1]]
            np.testing.assert_allclose(samples.log_probs_BxC[row, step], log_prob, atol=1e-4)
        assert samples.tokens_BxC[row].tolist() == tokens[n:]


def test_one_step_needs_no_cache_slot(decoder, prompts):
    static = STATIC | {"max_new": 1, "group": 1}
    samples = sample(decoder, *prompts, jax.random.key(3), eos_ids=(-1,), **static)
    assert samples.lengths_B.tolist() == [1] * 3


@pytest.mark.parametrize("change", [{"group": 0}, {"max_new": 0}, {"temperature": -1.0}])
def test_impossible_settings_are_refused(decoder, prompts, change):
    with pytest.raises(ValueError, match="must be >= 1"):
        sample(decoder, *prompts, jax.random.key(0), eos_ids=(2,), **STATIC | change)


@pytest.mark.parametrize("vocab", [1, 17, 512])
def test_inverse_cdf_equals_the_plain_search(vocab):
    rng = np.random.default_rng(vocab)
    logits = jnp.asarray(rng.normal(size=(64, vocab)) * 3, jnp.float32)
    # Forbidden tokens, as long as one is left.
    logits = jnp.where(
        jnp.asarray(rng.random((64, vocab)) < 0.3).at[:, vocab // 2].set(False), -jnp.inf, logits
    )
    uniform = jnp.asarray(rng.random(64), jnp.float32).at[:2].set(jnp.array([0.0, 1 - 2**-23]))
    tokens = np.asarray(inverse_cdf(logits, uniform))
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    upper = np.cumsum(p, axis=-1)[np.arange(64), tokens]
    assert (p[np.arange(64), tokens] > 0).all()
    assert (upper >= np.asarray(uniform) - 1e-6).all()
    assert (upper - p[np.arange(64), tokens] <= np.asarray(uniform) + 1e-6).all()


@pytest.mark.parametrize("vocab", [8000, 151_936])
def test_inverse_cdf_takes_no_forbidden_token_where_sums_round(vocab):
    """Random numbers at the sums of many tokens, and a hair beside them."""
    rng = np.random.default_rng(1)
    row = np.where(rng.random(vocab) < 0.5, rng.normal(size=vocab) * 3, -np.inf).astype(np.float32)
    p = np.exp(row - row.max())
    upper = np.cumsum(p, dtype=np.float64) / p.sum(dtype=np.float64)
    near = upper[:16_384].astype(np.float32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    uniform = np.unique(near.view(np.float32))
    uniform = uniform[(uniform >= 0) & (uniform < 1)]
    draw = jax.jit(jax.vmap(lambda row, u: inverse_cdf(row[None], u[None])[0], in_axes=(None, 0)))
    tokens = np.asarray(draw(row, uniform))
    assert (p[tokens] > 0).all()
    np.testing.assert_array_less(uniform, upper[tokens] + 1e-5)
    np.testing.assert_array_less(upper[tokens] - p[tokens] / p.sum(), uniform + 1e-5)


def test_inverse_cdf_draws_the_distribution():
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    uniform = jax.random.uniform(jax.random.key(0), (20000,))
    tokens = inverse_cdf(jnp.tile(jnp.log(jnp.asarray(p, jnp.float32))[None, :], (20000, 1)), uniform)
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / 20000, p, atol=0.012)


@pytest.mark.parametrize(("first_stage", "fewest_rows"), [(2, 2), (3, 4), (12, 8)])
def test_stages_and_groups_draw_the_same(decoder, prompts, drawn, monkeypatch, first_stage, fewest_rows):
    """Nine rows in groups of 9, 5, 3 and 2, which leave none, one or two places empty."""
    free, eos = drawn
    monkeypatch.setattr(stages, "FIRST_STAGE", first_stage)
    monkeypatch.setattr(stages, "FEWEST_ROWS", fewest_rows)
    anew = jax.jit(device_sample.__wrapped__, static_argnames=[*STATIC, "eos_ids"])
    for eos_ids in ((-1,), (eos,)):
        whole = sample(decoder, *prompts, jax.random.key(3), eos_ids=eos_ids, **STATIC)
        staged = jax.device_get(anew(decoder, *prompts, jax.random.key(3), eos_ids=eos_ids, **STATIC))
        for name in ("tokens_BxC", "lengths_B", "finished_B"):
            np.testing.assert_array_equal(getattr(staged, name), getattr(whole, name))
        np.testing.assert_allclose(staged.log_probs_BxC, whole.log_probs_BxC, atol=1e-5)
    assert free.tokens_BxC.any()


def test_stages_end_where_the_completion_does():
    assert stages.stage_ends(256) == [64, 128, 256]
    assert stages.stage_ends(320) == [64, 128, 256, 320]
    assert stages.stage_ends(64) == [64]
    assert stages.stage_ends(3) == [3]

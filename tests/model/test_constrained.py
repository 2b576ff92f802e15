"""Constrained sampling and scoring against a loop that takes one token at a time without a cache."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grammar_helpers import tiny_automaton, tiny_tokenizer
from model_helpers import TINY, random_decoder, random_prompts

from lemon_jax.model import (
    Constraint,
    Walk,
    attention_mask,
    completion_log_probs,
    rope_positions,
    sample_constrained,
    stages,
    trace,
)
from lemon_jax.model.host_walk import allowed
from lemon_jax.model.sampling import inverse_cdf
from lemon_jax.spec import parse

LENGTHS, SLOTS, GROUP, TEMPERATURE = [6, 1, 4], 6, 2, 0.8
KEY = 5


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(replace(TINY, vocab_size=tiny_tokenizer().vocab_size))


@pytest.fixture(scope="module")
def prompts():
    vocab = tiny_tokenizer().vocab_size
    return random_prompts(np.random.default_rng(0), LENGTHS, slots=SLOTS, vocab=vocab)


@pytest.fixture(scope="module")
def automaton():
    return jax.tree.map(jnp.asarray, tiny_automaton())


@pytest.fixture(scope="module")
def max_new():
    """So few that the samples are steered to their end."""
    a = tiny_automaton()
    return len(a.prefix_F) + int(a.distance_S[a.start]) + 20


@pytest.fixture(scope="module")
def write(decoder, prompts, automaton, max_new):
    def write(**changes):
        static = {"group": GROUP, "max_new": max_new, "temperature": TEMPERATURE, "block": 4} | changes
        eos_ids = (tiny_tokenizer().eos_id,)
        return jax.device_get(
            sample_constrained(decoder, *prompts, jax.random.key(KEY), automaton, eos_ids=eos_ids, **static)
        )

    return write


@pytest.fixture(scope="module")
def drawn(write):
    return write()


@pytest.fixture(scope="module")
def scored(decoder, prompts, automaton, max_new):
    """completion_log_probs of given completions, and the trace."""

    @jax.jit
    def score(decoder, tokens, lengths):
        found = trace(Constraint(automaton, max_new), tokens, lengths)
        rows = [jnp.repeat(x, GROUP, axis=0) for x in prompts]
        log_probs, entropy = completion_log_probs(
            decoder, *rows, tokens, lengths, temperature=TEMPERATURE, chunk=7, trace=found
        )
        return log_probs, entropy, found

    return score


@jax.jit
def logits_at(decoder, tokens_S, last):
    slots = tokens_S.shape[0]
    lengths, at = jnp.array([slots]), jnp.arange(slots)
    hidden, _ = decoder(
        tokens_S[None], rope_positions(lengths, at, slots), attention_mask(lengths, at, slots, slots)
    )
    return decoder.logits(hidden[0, last])


def oracle(decoder, prompts, max_new, row, temperature):
    """(tokens, log-probabilities, sizes of the support) of one row."""
    automaton, slots = tiny_automaton(), SLOTS + max_new
    n = LENGTHS[row // GROUP]
    key = jax.random.fold_in(jax.random.key(KEY), row)

    written, log_probs, sizes = automaton.prefix_F.tolist(), [0.0] * len(automaton.prefix_F), []
    walk = Walk.begin(automaton, max_new)
    while written[-1] != tiny_tokenizer().eos_id:
        tokens = np.zeros(slots, np.int32)
        tokens[: n + len(written)] = [*np.asarray(prompts[0])[row // GROUP, :n], *written]
        logits = np.asarray(logits_at(decoder, jnp.asarray(tokens), n + len(written) - 1), np.float64)
        may = allowed(walk)
        logits = np.where(may, logits / (temperature or 1.0), -np.inf)
        uniform = jax.random.uniform(jax.random.fold_in(key, len(written)))
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(inverse_cdf(jnp.asarray(logits[None], jnp.float32), uniform[None])[0])
        top = logits.max()
        log_probs.append(logits[token] - top - np.log(np.exp(logits - top).sum()))
        sizes.append(int(may.sum()))
        written.append(token)
        walk = walk.step(token)
    return written, log_probs, sizes


@pytest.mark.parametrize(("row", "temperature"), [(0, TEMPERATURE), (4, 0.0)])
def test_it_equals_drawing_one_token_at_a_time(decoder, prompts, write, max_new, row, temperature):
    samples = write(temperature=temperature)
    tokens, log_probs, sizes = oracle(decoder, prompts, max_new, row, temperature)
    length = int(samples.lengths_B[row])
    assert samples.tokens_BxC[row, :length].tolist() == tokens
    np.testing.assert_allclose(samples.log_probs_BxC[row, :length], log_probs, atol=1e-5)
    forced = np.array([True] * (len(tokens) - len(sizes)) + [size == 1 for size in sizes])
    assert forced.sum() > 20
    assert (samples.log_probs_BxC[row, :length][forced] == 0).all()
    assert not samples.tokens_BxC[row, length:].any()
    assert not samples.log_probs_BxC[row, length:].any()


@pytest.mark.parametrize("block", [1, 7])
def test_the_width_of_a_step_changes_nothing(write, drawn, block):
    other = write(block=block)
    assert (other.tokens_BxC == drawn.tokens_BxC).all()
    assert (other.lengths_B == drawn.lengths_B).all()
    np.testing.assert_allclose(other.log_probs_BxC, drawn.log_probs_BxC, atol=1e-5)


def test_an_untrained_policy_writes_valid_specs_only(write, max_new):
    for temperature in (0.5, 2.0):
        samples = write(group=40, temperature=temperature)
        assert samples.finished_B.all()
        assert samples.lengths_B.max() <= max_new
        texts = [
            tiny_tokenizer().decode(row[: length - 1].tolist())
            for row, length in zip(samples.tokens_BxC, samples.lengths_B, strict=True)
        ]
        assert [text for text in texts if not parse(text).strict_ok] == []
        assert len(set(texts)) > 100


def test_scoring_gives_what_sampling_gave(decoder, drawn, scored):
    log_probs, entropy, found = scored(decoder, drawn.tokens_BxC, drawn.lengths_B)
    np.testing.assert_allclose(log_probs, drawn.log_probs_BxC, atol=1e-5)
    steps = np.arange(drawn.tokens_BxC.shape[1])[None]
    assert (found.known_BxC == (steps < drawn.lengths_B[:, None])).all()
    assert (np.asarray(log_probs)[~found.free_BxC] == 0).all()
    assert (np.asarray(entropy)[~found.free_BxC] == 0).all()
    assert (np.asarray(entropy)[found.free_BxC] >= 0).all()
    assert found.free_BxC.sum(axis=1).min() > 5
    # Against the host: where the support has one token, nothing is free.
    automaton = tiny_automaton()
    walk = Walk.begin(automaton, drawn.tokens_BxC.shape[1])
    for c in range(len(automaton.prefix_F), drawn.lengths_B[1]):
        assert bool(found.free_BxC[1, c]) == (allowed(walk).sum() > 1)
        walk = walk.step(int(drawn.tokens_BxC[1, c]))


def test_forced_tokens_have_no_gradient_and_the_others_a_finite_one(decoder, drawn, scored):
    tokens, lengths = drawn.tokens_BxC, drawn.lengths_B
    free = scored(decoder, tokens, lengths)[2].free_BxC

    def total(decoder, mask, what):
        return jnp.sum(jnp.where(mask, scored(decoder, tokens, lengths)[what], 0.0))

    gradient = jax.grad(total)
    forced = jax.tree.leaves(gradient(decoder, ~free, 0))
    assert all((np.asarray(x) == 0).all() for x in forced)
    others = [np.asarray(x) for x in jax.tree.leaves(gradient(decoder, free, 0))]
    assert all(np.isfinite(x).all() for x in others)
    assert sum(np.abs(x).sum() for x in others) > 1
    entropy = jax.tree.leaves(gradient(decoder, free | ~free, 1))  # a measurement
    assert all((np.asarray(x) == 0).all() for x in entropy)


def test_tokens_beyond_the_language_count_nowhere(decoder, drawn, scored):
    tokens = np.array(drawn.tokens_BxC)
    prefix = tiny_automaton().prefix_F.shape[0]
    tokens[0, prefix + 2] = tiny_tokenizer().eos_id  # in the middle of a name
    tokens[1, 0] = 7  # not even the beginning is right
    log_probs, _, found = scored(decoder, tokens, drawn.lengths_B)
    assert found.known_BxC[0].sum() == prefix + 2
    assert not found.known_BxC[1].any()
    assert not np.asarray(log_probs)[0, prefix + 2 :].any()
    assert not np.asarray(log_probs)[1].any()
    np.testing.assert_allclose(log_probs[2:], drawn.log_probs_BxC[2:], atol=1e-5)

    def total(decoder):
        return jnp.sum(scored(decoder, tokens, drawn.lengths_B)[0])

    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(jax.grad(total)(decoder)))


def test_impossible_settings_are_refused(write):
    for change in ({"group": 0}, {"max_new": 0}, {"temperature": -1.0}, {"block": 0}):
        with pytest.raises(ValueError, match="must be >= 1"):
            write(**change)


@pytest.mark.parametrize(("first_stage", "fewest_rows"), [(5, 2), (17, 4)])
def test_stages_and_groups_draw_the_same(
    decoder, prompts, automaton, max_new, drawn, monkeypatch, first_stage, fewest_rows
):
    """Rows that advance by different numbers of tokens reach the end of a stage at different steps."""
    monkeypatch.setattr(stages, "FIRST_STAGE", first_stage)
    monkeypatch.setattr(stages, "FEWEST_ROWS", fewest_rows)
    static = {"group": GROUP, "max_new": max_new, "temperature": TEMPERATURE, "block": 4}
    static |= {"eos_ids": (tiny_tokenizer().eos_id,)}
    anew = jax.jit(sample_constrained.__wrapped__, static_argnames=list(static))
    staged = jax.device_get(anew(decoder, *prompts, jax.random.key(KEY), automaton, **static))
    for name in ("tokens_BxC", "lengths_B", "finished_B"):
        np.testing.assert_array_equal(getattr(staged, name), getattr(drawn, name))
    np.testing.assert_allclose(staged.log_probs_BxC, drawn.log_probs_BxC, atol=1e-5)

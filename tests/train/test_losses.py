import jax
import jax.numpy as jnp
import numpy as np
import numpy_grpo
import pytest

from lemon_jax.model.scoring import token_log_probs
from lemon_jax.train import losses
from lemon_jax.train.batch import UpdateBatch
from lemon_jax.train.update import span_scores

NAN = float("nan")
CLIP = 0.2


def _random_case(seed: int = 0, batch: int = 6, steps: int = 9):
    """Log-probabilities whose ratios lie on both sides of both clipping bounds."""
    rng = np.random.default_rng(seed)
    old = -rng.uniform(0.1, 3.0, (batch, steps)).astype(np.float32)
    new = (old + rng.normal(0, 0.3, old.shape)).astype(np.float32)
    ref = (new + rng.normal(0, 0.5, old.shape)).astype(np.float32)
    advantage = rng.normal(0, 1, batch).astype(np.float32)
    lengths = rng.integers(1, steps + 1, batch)
    mask = np.arange(steps)[None, :] < lengths[:, None]
    mask[2] = False  # a masked member
    return new, old, ref, advantage, mask


def _grpo(log_probs, old, advantage, mask, how="token", low=CLIP, high=CLIP):
    per_token, _ = losses.grpo(log_probs, old, advantage, mask, clip_low=low, clip_high=high)
    return losses.aggregate(per_token, mask, how).mean()


def _kl(log_probs, ref, mask, estimator="k3", how="token"):
    return losses.aggregate(
        losses.kl_to_reference(log_probs, ref, mask, estimator=estimator), mask, how
    ).mean()


AGGREGATIONS = ("token", "sequence", "constant")


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.2, 0.28), (0.1, 0.4)])
def test_grpo_equals_the_plain_reference_in_value_and_gradient(how, bounds):
    new, old, _, advantage, mask = _random_case()
    low, high = bounds
    ratio = np.exp(new - old)[mask]
    assert (ratio > 1 + high).any()
    assert (ratio < 1 - low).any()
    expected, gradient, share = numpy_grpo.grpo(new, old, advantage, mask, low, high, how)
    value, found = jax.value_and_grad(_grpo)(jnp.asarray(new), old, advantage, mask, how, low, high)
    assert float(value) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(found, gradient, atol=1e-5)
    _, clipped = losses.grpo(new, old, advantage, mask, clip_low=low, clip_high=high)
    assert float(clipped.sum()) / mask.sum() == pytest.approx(share)
    assert not np.asarray(found)[~mask].any()


def test_the_kinds_of_mean_differ_in_what_a_long_spec_weighs():
    mask = np.array([[True, True, True, True], [True, False, False, False], [False] * 4])
    one_each = jnp.where(mask, 1.0, 0.0)
    gradient = {
        how: jax.grad(lambda x, how=how: losses.aggregate(x, mask, how).mean())(one_each)
        for how in AGGREGATIONS
    }
    shares = {how: np.where(mask, g, 0).sum(axis=-1) for how, g in gradient.items()}
    np.testing.assert_allclose(shares["token"], [0.8, 0.2, 0])
    np.testing.assert_allclose(shares["sequence"], [0.5, 0.5, 0])  # the third has no token: it is in no mean
    np.testing.assert_allclose(shares["constant"], [4 / 512, 1 / 512, 0])  # of 2 specs x 256 tokens


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_slots_without_a_token_change_no_mean(how):
    mask = np.array([[True, True, True], [True, False, False]])
    wider = np.pad(mask, ((0, 0), (0, 64)))
    narrow, wide = (losses.aggregate(jnp.where(m, 2.0, 0.0), m, how).mean() for m in (mask, wider))
    assert float(narrow) == float(wide) > 0


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_the_truncated_loss_equals_the_plain_reference(how):
    new, old, _, advantage, mask = _random_case()
    truncate = 1.2
    expected, gradient, share = numpy_grpo.truncated(new, old, advantage, mask, truncate, how)
    assert 0 < share < 1

    def loss(log_probs):
        found = losses.truncated_policy_gradient(log_probs, old, advantage, mask, truncate=truncate)
        return losses.aggregate(found[0], mask, how).mean()

    value, found = jax.value_and_grad(loss)(jnp.asarray(new))
    assert float(value) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(found, gradient, atol=1e-5)
    _, bounded = losses.truncated_policy_gradient(new, old, advantage, mask, truncate=truncate)
    assert float(bounded.sum()) / mask.sum() == pytest.approx(share)
    # A clipped token stands still, a truncated one goes on.
    assert np.asarray(found)[np.asarray(bounded) > 0].all()


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "moves"),
    [(1.0, 0.5, False), (1.0, -0.5, True), (-1.0, 0.5, True), (-1.0, -0.5, False), (1.0, 0.0, True)],
)
def test_clipping_stops_only_the_way_further_out(advantage, log_ratio, moves):
    old = jnp.full((1, 1), -2.0)

    def loss(log_probs):
        mask = jnp.ones((1, 1), bool)
        return _grpo(log_probs, old, jnp.array([advantage]), mask)

    gradient = float(jax.grad(loss)(old + log_ratio)[0, 0])
    assert gradient == pytest.approx(-advantage * np.exp(log_ratio) if moves else 0.0, abs=1e-6)


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_equals_the_plain_reference_in_value_and_gradient(estimator, how):
    new, _, ref, _, mask = _random_case(1)
    expected, gradient = numpy_grpo.kl(new, ref, mask, estimator, how)
    value, found = jax.value_and_grad(_kl)(jnp.asarray(new), ref, mask, estimator, how)
    assert float(value) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(found, gradient, atol=1e-5)


def test_the_estimates_of_kl_over_many_samples():
    """k1 and k3 have the mean KL(pi || pi_ref); the gradient of k2 is that of the KL, that of k1 is 0."""
    logits, ref_logits = jnp.array([0.3, -0.2, 0.9, 0.0]), jnp.array([0.0, 0.4, 0.5, -0.3])
    p, q = jax.nn.softmax(logits), jax.nn.softmax(ref_logits)
    tokens = jax.random.categorical(jax.random.key(0), logits, shape=(200_000,))
    mask = jnp.ones((1, len(tokens)), bool)

    def estimate(logits, estimator):
        return _kl(jax.nn.log_softmax(logits)[tokens][None], jnp.log(q)[tokens][None], mask, estimator)

    def exact(logits):
        p = jax.nn.softmax(logits)
        return jnp.sum(p * (jnp.log(p) - jnp.log(q)))

    for estimator in ("k1", "k3"):
        assert float(estimate(logits, estimator)) == pytest.approx(
            float(jnp.sum(p * jnp.log(p / q))), abs=0.005
        )
    np.testing.assert_allclose(jax.grad(estimate)(logits, "k2"), jax.grad(exact)(logits), atol=0.005)
    np.testing.assert_allclose(jax.grad(estimate)(logits, "k1"), 0, atol=0.005)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_far_apart_policies_is_finite_with_its_gradient(estimator):
    far = jnp.array([[-500.0, -1e-6]])
    mask = jnp.ones((1, 2), bool)
    value, gradient = jax.value_and_grad(_kl)(far, jnp.zeros((1, 2)), mask, estimator)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("rewards", "group"),
    [
        ([1, NAN, 0, 1], 4),
        ([NAN, 1, 0.5, -0.5, 1, 1, 1, NAN], 4),
        ([0.3, -0.5, 1.2, 1.2, 0.0, 0.1], 2),
        ([0.1 + 0.2, 0.3], 2),  # differ by one ulp: not equal, and finite
    ],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_plain_reference(rewards, group, scale):
    found = losses.group_advantages(np.array(rewards, float), group, scale=scale)
    np.testing.assert_allclose(found, numpy_grpo.advantages(rewards, group, scale=scale), atol=1e-5)
    assert np.isfinite(found).all()


def test_a_masked_member_is_left_out_of_mean_and_std():
    with_gap = losses.group_advantages(np.array([1, NAN, 0, 1]), 4)
    without = losses.group_advantages(np.array([1.0, 0.0, 1.0]), 3)
    assert with_gap[1] == 0
    np.testing.assert_array_equal(with_gap[[0, 2, 3]], without)


@pytest.mark.parametrize(
    ("rewards", "group"),
    [
        ([0.7], 1),
        ([0.7, 1.2, -0.5], 1),
        ([NAN] * 4, 4),
        ([NAN, NAN, 0.4, NAN], 4),
        ([0.1] * 7, 7),  # the float std of seven 0.1 is not 0
        ([1.3, NAN, 1.3, 1.3], 4),
    ],
)
def test_groups_without_a_difference_have_no_advantage_and_are_counted(rewards, group):
    rewards = np.array(rewards, float)
    found = losses.group_advantages(rewards, group)
    assert not found.any()
    assert losses.zero_std_fraction(rewards, group) == 1.0


def test_the_share_of_groups_without_signal():
    assert losses.zero_std_fraction(np.array([1, 1, 0, 1, NAN, 1, NAN, NAN]), 2) == 0.75


def test_a_fully_masked_batch_has_loss_zero_and_zero_gradients():
    new, old, ref, advantage, mask = _random_case()
    nothing = np.zeros_like(mask)

    def loss(log_probs):
        return _grpo(log_probs, old, advantage, nothing) + _kl(log_probs, ref, nothing)

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(new))
    assert float(value) == 0
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("junk", [-np.inf, np.inf, NAN])
def test_junk_in_the_padding_reaches_neither_value_nor_gradient(junk, how):
    new, old, ref, advantage, mask = _random_case()

    def loss(log_probs, old, ref):
        truncated, _ = losses.truncated_policy_gradient(log_probs, old, advantage, mask, truncate=1.5)
        kl = sum(_kl(log_probs, ref, mask, estimator, how) for estimator in ("k1", "k2", "k3"))
        grpo = _grpo(log_probs, old, advantage, mask, how)
        return grpo + losses.aggregate(truncated, mask, how).mean() + kl

    clean = jax.value_and_grad(loss)(jnp.asarray(new), old, ref)
    dirty = jax.value_and_grad(loss)(
        jnp.asarray(np.where(mask, new, junk)), np.where(mask, old, junk), np.where(mask, ref, junk)
    )
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])


# Two rollouts, three edits of which one is absent; rows of logits: rollouts first, then edits.
ROLLOUTS, EDITS, STEPS, VOCAB = 2, 3, 8, 11
FIRST, LAST, EDITED_LAST = [2, 4, 0], [5, 6, 0], [4, 7, 1]


def _span_batch(contrasts, weights=(1.0, 1.0, 0.0), seed: int = 0) -> UpdateBatch:
    rng = np.random.default_rng(seed)
    completions = rng.integers(0, VOCAB, (ROLLOUTS + EDITS, STEPS)).astype(np.int32)
    return UpdateBatch(
        prompts_BxP=np.ones((ROLLOUTS, 2), np.int32),
        prompt_lengths_B=np.array([2, 2], np.int32),
        completions_BxC=completions[:ROLLOUTS],
        lengths_B=np.array([8, 7], np.int32),
        old_log_probs_BxC=np.zeros((ROLLOUTS, STEPS), np.float32),
        advantages_B=np.zeros(ROLLOUTS, np.float32),
        kept_B=np.ones(ROLLOUTS, bool),
        source_K=np.array([1, 0, 0], np.int32),
        first_K=np.array(FIRST, np.int32),
        last_K=np.array(LAST, np.int32),
        edited_completions_KxC=completions[ROLLOUTS:],
        edited_lengths_K=np.array(EDITED_LAST, np.int32),
        contrast_K=np.array(contrasts, np.float32),
        weight_K=np.array(weights, np.float32),
    )


def _span_loss(logits, batch: UpdateBatch, *, normalise: bool = True, tau: float = 1.3):
    tokens = jnp.concatenate([batch.completions_BxC, batch.edited_completions_KxC])
    log_probs, _ = token_log_probs(logits, tokens, 1.0)
    original, edited = span_scores(log_probs[:ROLLOUTS], log_probs[ROLLOUTS:], batch, normalise=normalise)
    loss = losses.counterfactual(original, edited, batch.contrast_K, batch.weight_K, tau=tau).mean()
    return loss, (log_probs, original, edited)


def _logits(seed: int = 3):
    shape = (ROLLOUTS + EDITS, STEPS, VOCAB)
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _inside():
    """True where an edit's span lies: in its source's row and in its own."""
    inside = np.zeros((ROLLOUTS + EDITS, STEPS), bool)
    inside[1, 2:5] = inside[0, 4:6] = True
    inside[2, 2:4] = inside[3, 4:7] = True
    return inside


@pytest.mark.parametrize("normalise", [True, False])
def test_the_counterfactual_gradient_is_exactly_zero_outside_the_edited_spans(normalise):
    batch = _span_batch([0.8, -0.4, 5.0])
    gradient, _ = jax.grad(_span_loss, has_aux=True)(_logits(), batch, normalise=normalise)
    gradient = np.asarray(gradient)
    inside = _inside()
    assert (gradient[~inside] == 0).all()
    assert (np.abs(gradient[inside]).max(axis=-1) > 0).all()


@pytest.mark.parametrize("normalise", [True, False])
def test_the_counterfactual_loss_equals_the_plain_reference(normalise):
    contrasts, weights = [0.8, -0.4, 5.0], [1.0, 1.0, 0.0]
    batch = _span_batch(contrasts, weights)
    (value, (log_probs, original, edited)), gradient = jax.value_and_grad(_span_loss, has_aux=True)(
        _logits(), batch, normalise=normalise
    )
    rows = np.asarray(log_probs, float)
    s = [numpy_grpo.span_score(rows[batch.source_K[k]], FIRST[k], LAST[k], normalise) for k in range(3)]
    z = [numpy_grpo.span_score(rows[2 + k], FIRST[k], EDITED_LAST[k], normalise) for k in range(3)]
    np.testing.assert_allclose(original[:2], s[:2], atol=1e-5)
    np.testing.assert_allclose(edited[:2], z[:2], atol=1e-5)
    expected, by_original, _ = numpy_grpo.counterfactual(s, z, contrasts, weights, 1.3)
    assert float(value) == pytest.approx(expected, abs=1e-5)
    # d loss / d logits of a span's token: slope * (one-hot - softmax), and 1/n of it when normalised.
    tokens, p = batch.completions_BxC[1], np.exp(np.asarray(jax.nn.log_softmax(_logits())))[1]
    for t in range(2, 5):
        slope = by_original[0] / (3 if normalise else 1)
        np.testing.assert_allclose(gradient[1, t], slope * (np.eye(VOCAB)[tokens[t]] - p[t]), atol=1e-5)


def test_the_gradient_form_of_the_credit_equals_the_plain_reference():
    scores, contrasts, weights = [-1.5, -0.3, -9.0], [0.8, -0.4, NAN], [1.0, 1.0, 0.0]

    def loss(scores):
        found = losses.counterfactual_gradient(scores, jnp.array(contrasts), jnp.array(weights))
        return found.mean()

    value, gradient = jax.value_and_grad(loss)(jnp.array(scores))
    expected, by_original = numpy_grpo.counterfactual_gradient(scores, contrasts, weights)
    assert float(value) == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradient, by_original, atol=1e-6)


@pytest.mark.parametrize(
    ("contrasts", "weights"),
    [([0, 0, 0], [1, 1, 0]), ([0.8, -0.4, 1.0], [0, 0, 0]), ([NAN, NAN, NAN], [0, 0, 0])],
)
def test_no_contrast_or_no_weight_gives_exactly_no_gradient(contrasts, weights):
    batch = _span_batch(contrasts, weights)
    (value, _), gradient = jax.value_and_grad(_span_loss, has_aux=True)(_logits(), batch)
    assert float(value) == 0
    assert (np.asarray(gradient) == 0).all()


def test_the_contrast_of_a_masked_edit_leaks_nowhere():
    clean = jax.value_and_grad(_span_loss, has_aux=True)(_logits(), _span_batch([0.8, 0.0, 0], [1, 0, 0]))
    masked = jax.value_and_grad(_span_loss, has_aux=True)(_logits(), _span_batch([0.8, NAN, NAN], [1, 0, 0]))
    np.testing.assert_array_equal(clean[0][0], masked[0][0])
    np.testing.assert_array_equal(clean[1], masked[1])


@pytest.mark.parametrize("contrast", [0.7, -0.7])
def test_a_step_moves_the_margin_to_the_side_of_the_better_text(contrast):
    batch = _span_batch([contrast, 0, 0], [1, 0, 0])
    (before, (_, s, z)), gradient = jax.value_and_grad(_span_loss, has_aux=True)(_logits(), batch)
    after, (_, s2, z2) = _span_loss(_logits() - 0.1 * gradient, batch)
    assert float(after) < float(before)
    assert np.sign(float((s2 - z2)[0] - (s - z)[0])) == np.sign(contrast)
    # A contrast twice as large counts twice.
    double, _ = _span_loss(_logits(), _span_batch([2 * contrast, 0, 0], [1, 0, 0]))
    assert float(double) == pytest.approx(2 * float(before), rel=1e-6)

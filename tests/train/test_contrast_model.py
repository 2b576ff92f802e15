"""Predicted contrasts: the posterior against stacked least squares, and which edits are drawn."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from policy_helpers import CHECKED, SOLVER, TASKS, rollout
from test_trainer import CONFIG, _train

from lemon_jax.spec import Agent, Spec, applicable, dump, parse
from lemon_jax.train import contrast_model
from lemon_jax.train.contrast_model import (
    NOISE,
    PRIOR,
    ContrastModel,
    differences_of,
    features,
    predicted_edits,
    prediction_metrics,
)
from lemon_jax.train.contrasts import Contrast, Sample
from lemon_jax.train.evaluate import NOT_EXECUTED, Scored
from lemon_jax.train.rewards import Reward
from lemon_jax.train.run_dir import METRICS, RunDir

FAMILIES = ("lower_capacity", "raise_capacity", "change_role")


def spec(role="math_solver", capacity="medium", duty="-"):
    return Spec(agents=(Agent(id="a1", name="A", role=role, duty=duty, capacity=capacity),), output="a1")


def contrast(index, edit, difference, pairs=1):
    scored = Scored(task=TASKS[0], parsed=parse(edit.text), execution=None, grade=NOT_EXECUTED)
    edited = Sample(scored=scored, reward=Reward(success=0.0))
    originals = (Reward(success=difference),) * pairs
    return Contrast(index=index, edit=edit, originals=originals, samples=(edited,) * pairs)


def test_only_what_differs_is_in_the_difference_of_features():
    changed = features(spec(capacity="large")) - features(spec(capacity="small"))
    assert np.count_nonzero(changed) == 4  # the count of each level, and who answers at which level
    assert changed.sum() == 0
    assert not np.any(features(spec(duty="One.")) - features(spec(duty="Another.")))
    # Behind a tool the agents that it reads are those that answer.
    voters = tuple(
        Agent(id=f"a{i}", name="A", role="math_solver", duty="-", capacity=level)
        for i, level in enumerate(("small", "large"), 1)
    )
    vote = Agent(id="a3", name="V", role="majority_vote", duty="-", capacity="small", depends_on=("a1", "a2"))
    voted = features(Spec(agents=(*voters, vote), output="a3"))
    assert np.sum(voted == 0.5) == 2


def test_the_posterior_is_that_of_stacked_rows():
    rng = np.random.default_rng(0)
    size = len(features(spec()))
    x_NxF, r_N = rng.normal(size=(30, size)), rng.normal(size=30)
    model = ContrastModel()
    model.learn([(x, r) for x, r in zip(x_NxF, r_N, strict=True)])
    model.learn([(np.ones(size), math.nan)])  # unknown: teaches nothing

    # Bayesian linear regression, written out: N(0, PRIOR^2) weights, N(0, NOISE^2) noise.
    precision = x_NxF.T @ x_NxF / NOISE**2 + np.eye(size) / PRIOR**2
    mean = np.linalg.solve(precision, x_NxF.T @ r_N / NOISE**2)
    pair = spec(), spec(role="equation_writer")
    x = features(pair[0]) - features(pair[1])
    predicted, error = model.predict([pair])
    assert predicted[0] == pytest.approx(x @ mean, rel=1e-9)
    assert error[0] == pytest.approx(math.sqrt(x @ np.linalg.solve(precision, x)), rel=1e-9)


def test_differences_are_within_groups_and_from_originals_to_edits(tokenizer):
    texts = [dump(SOLVER), dump(CHECKED), "no spec", dump(SOLVER), dump(CHECKED), dump(SOLVER)]
    rollouts = [rollout(tokenizer, text) for text in texts]
    rewards = [1.0, 0.0, -0.5, 0.5, math.nan, 0.1]
    edit = applicable(texts[1])[0]
    found = differences_of(rollouts, rewards, 3, [contrast(1, edit, 0.25)])

    solver, checked = features(SOLVER), features(CHECKED)
    expected = [
        ((solver - checked) / 2, 0.5),
        ((checked - solver) / 2, -0.5),
        (np.zeros_like(solver), 0.2),
        (np.zeros_like(solver), -0.2),
        (math.sqrt(0.5) * (checked - features(edit.spec)), math.sqrt(0.5) * 0.25),
    ]
    assert len(found) == len(expected)
    for (x, r), (want_x, want_r) in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, want_x, atol=1e-12)
        assert r == pytest.approx(want_r)


@pytest.mark.parametrize("pairs", [1, 3])
def test_two_rollouts_and_a_contrast_of_them_teach_alike(pairs, tokenizer):
    text = dump(spec())
    edit = next(e for e in applicable(text, ("lower_capacity",)))
    original, edited = rollout(tokenizer, text), rollout(tokenizer, edit.text)
    by_group, by_contrast = ContrastModel(), ContrastModel()
    for _ in range(pairs):
        by_group.learn(differences_of([original, edited], [0.7, 0.3], 2, []))
    by_contrast.learn(differences_of([original], [0.7], 1, [contrast(0, edit, 0.4, pairs=pairs)]))
    np.testing.assert_allclose(by_contrast.products, by_group.products, atol=1e-12)
    np.testing.assert_allclose(by_contrast.targets, by_group.targets, atol=1e-12)


def test_it_finds_the_better_capacity_under_much_noise(tokenizer):
    """Contrasts of +-1 that are right in 7 of 10 cases; their mean is learned, and its sign is sure."""
    one = rollout(tokenizer, dump(spec()))
    lower = next(e for e in applicable(one.text, ("lower_capacity",)))
    model = ContrastModel()
    assert prediction_metrics(model, [one], [contrast(0, lower, 1.0)]) == {
        "prediction_error": 1.0,
        "prediction_error_of_0": 1.0,
    }
    for i in range(40):
        seen = contrast(0, lower, 1.0 if i % 10 < 7 else -1.0)
        model.learn(differences_of([one], [0.5], 1, [seen]))
    (predicted,), (error,) = model.predict([(spec(), lower.spec)])
    assert 0.2 < predicted < 0.6
    assert 0 < error < 0.15
    (other,), (wide,) = model.predict([(spec(), spec(role="equation_writer"))])
    assert abs(other) < wide  # of what was never tried nothing is known


def test_edits_are_drawn_from_every_spec_before_a_second_of_one(tokenizer):
    rollouts = [rollout(tokenizer, t) for t in (dump(spec()), dump(spec()), "no spec")]
    model = ContrastModel()
    assert predicted_edits(model, rollouts, FAMILIES, 8, random.Random(0)) == []  # nothing is known yet
    lower = next(e for e in applicable(rollouts[0].text, ("lower_capacity",)))
    for _ in range(50):
        model.learn(differences_of(rollouts[:1], [0.0], 1, [contrast(0, lower, 0.5)]))
    chosen = predicted_edits(model, rollouts, FAMILIES, 8, random.Random(0))
    assert {i for i, _, _ in chosen[:2]} == {0, 1}
    assert {i for i, _, _ in chosen} == {0, 1}
    assert len({(i, edit.text) for i, edit, _ in chosen}) == len(chosen)
    assert next(d for i, e, d in chosen if i == 0 and e.text == lower.text) == pytest.approx(0.5, abs=0.1)
    assert predicted_edits(model, rollouts, FAMILIES, 1, random.Random(0)) == chosen[:1]
    seen = [contrast(0, lower, 0.5)]
    others = predicted_edits(model, rollouts, FAMILIES, 8, random.Random(0), executed=seen)
    assert {(i, e.text) for i, e, _ in chosen} - {(i, e.text) for i, e, _ in others} == {(0, lower.text)}
    assert predicted_edits(model, rollouts, FAMILIES, 0, random.Random(0)) == []
    counted = predicted_edits(model, rollouts, FAMILIES, 8, random.Random(0), masked={0})
    assert {i for i, _, _ in counted} == {1}


def test_predicted_edits_are_learned_from_and_a_resumed_run_remembers(policy, tmp_path, monkeypatch):
    monkeypatch.setattr(contrast_model, "NOISE", 0.01)  # three steps of scripted rewards are then enough
    config = replace(CONFIG, predicted_edits=4)

    def metrics_of(folder):
        return RunDir(folder).read(METRICS)

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    digest, _ = _train(policy, straight, config=config)
    assert sum(m["predicted_edits"] for m in metrics_of(straight)) > 0
    without, _ = _train(policy, tmp_path / "without", config=CONFIG)
    assert digest != without
    _train(policy, stopped, config=config, stop_after=2)
    assert _train(policy, stopped, config=config, resume=True) == (digest, 2)
    assert metrics_of(stopped) == metrics_of(straight)

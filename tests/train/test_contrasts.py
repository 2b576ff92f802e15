"""Contrasts of several samples: their numbers by hand, what is asked for them, and the noise gate."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from policy_helpers import ALONE, CHECKED, SOLVER, TASKS, rollout, workers

from lemon_jax.errors import LemonError
from lemon_jax.spec import applicable, dump, parse
from lemon_jax.train.config import RunConfig
from lemon_jax.train.contrasts import (
    Contrast,
    Sample,
    choose_edits,
    contrast_facts,
    contrast_metrics,
    places_of_edited,
    places_of_original,
)
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import NOT_EXECUTED, Scored
from lemon_jax.train.presets import check_counts
from lemon_jax.train.rewards import Reward, masked_reward
from lemon_jax.train.rollouts import execution_rows, run_step, step_metrics

CONFIG = RunConfig(bench="multiarith", workers="scripted", tasks_per_step=2, group=3, edits_per_step=3)
TEXTS = [dump(SOLVER), dump(CHECKED), dump(SOLVER), dump(ALONE), "not a spec", dump(CHECKED)]
EDIT = applicable(dump(CHECKED))[0]


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """Two tasks with three specs each; the fifth is no spec."""
    return [rollout(tokenizer, text) for text in TEXTS]


def _step(rollouts, config, **options):
    """(outcome, metrics, lines, the requests that were sent)."""
    with workers(**options) as (executor, calls, pool):
        sampler = config.edit_sampler
        outcome = asyncio.run(run_step(executor, config, 0, list(TASKS[:2]), rollouts, sampler))
        metrics = step_metrics(outcome, calls, sampler, config, 0)
        sent = [call for backend in pool.opened.values() for call in backend.calls]
        return outcome, metrics, execution_rows(outcome, config, 0), sent


def contrast(originals, edited, *, noise_gate=0.0, edit=EDIT):
    """Of these rewards; None is masked."""
    scored = Scored(task=TASKS[0], parsed=parse(edit.text), execution=None, grade=NOT_EXECUTED)
    found = [
        [masked_reward() if r is None else Reward(success=r) for r in row] for row in (originals, edited)
    ]
    samples = tuple(Sample(scored=scored, reward=r) for r in found[1])
    return Contrast(index=0, edit=edit, originals=tuple(found[0]), samples=samples, noise_gate=noise_gate)


def test_mean_and_standard_error_by_hand():
    c = contrast([1.0, 0.0, 1.0], [0.0, 0.0, 0.5])  # differences 1, 0, 0.5
    assert c.difference == pytest.approx(0.5)
    assert c.standard_error == pytest.approx(0.5 / math.sqrt(3))  # sqrt((0.25 + 0.25 + 0) / 2) = 0.5
    one = contrast([1.0], [0.25])
    assert (one.difference, math.isnan(one.standard_error)) == (0.75, True)
    assert contrast_facts(one) == {"contrast": 0.75}
    assert contrast_facts(c) == {"contrast": 0.5, "contrast_se": 0.288675}


@pytest.mark.parametrize("seed", range(5))
def test_mean_and_standard_error_against_numpy(seed):
    rng = np.random.default_rng(seed)
    first, second = rng.normal(size=(2, 7))
    lost = rng.random((2, 7)) < 0.2
    rows = [
        [None if gone else x for x, gone in zip(*row, strict=True)]
        for row in zip((first, second), lost, strict=True)
    ]
    kept = (first - second)[~lost.any(axis=0)]
    c = contrast(*rows)
    assert c.difference == pytest.approx(kept.mean())
    assert c.standard_error == pytest.approx(kept.std(ddof=1) / np.sqrt(len(kept)))


def test_pairs_with_a_masked_side_are_left_out():
    c = contrast([None, 1.0, 1.0, 0.0], [1.0, None, 0.0, 1.0])
    np.testing.assert_array_equal(c.differences, [1.0, -1.0])
    assert c.difference == 0
    assert c.standard_error == pytest.approx(1)
    nothing = contrast([None, 1.0], [1.0, None], noise_gate=1.0)
    assert math.isnan(nothing.difference)
    assert math.isnan(nothing.size)
    assert not nothing.gated
    assert contrast_facts(nothing) == {"contrast": None, "contrast_se": None}


def test_the_gate_is_at_z_standard_errors():
    rewards = [1.0, 0.0, 1.0], [0.0, 0.0, 0.5]  # D = 0.5, SE = 0.2887, D / SE = 1.732
    for gate, gated in ((0.0, False), (1.7, False), (1.74, True)):
        for originals, edited in (rewards, rewards[::-1]):  # D of either sign
            c = contrast(originals, edited, noise_gate=gate)
            assert c.gated == gated
            assert c.size == (0 if gated else pytest.approx(0.5))
    assert contrast([1.0, None], [0.0, 0.0], noise_gate=0.1).gated  # one pair: an error that nobody knows
    assert contrast([0.0, 1.0], [0.0, 1.0], noise_gate=1.0).gated  # no difference, without noise
    assert not contrast([0.1, 0.1], [0.0, 0.0], noise_gate=9.0).gated  # a difference without noise


def test_metrics_of_noise():
    sure, noisy = contrast([1.0, 1.0], [0.0, 0.0]), contrast([1.0, 0.0], [0.0, 1.0])
    unknown = contrast([None, None], [0.0, 0.0])
    assert contrast_metrics([sure, noisy, unknown], noise_gate=0.0) == {
        "contrast/se": pytest.approx(0.5),  # 0 and sqrt(2) / sqrt(2)
        "frac_contrast_noise": 0.5,
    }
    gated = [contrast([1.0, 1.0], [0.0, 0.0], noise_gate=1.0)] * 3 + [
        contrast([1.0, 0.0], [0.0, 1.0], noise_gate=1.0)
    ]
    assert contrast_metrics(gated, noise_gate=1.0)["frac_contrast_gated"] == 0.25
    assert set(contrast_metrics([unknown], noise_gate=1.0).values()) == {None}


def test_several_edits_of_a_rollout_after_one_of_each(rollouts):
    seen = Counter()
    for seed in range(20):
        chosen = choose_edits(rollouts, 8, EditSampler(), random.Random(seed), per_rollout=2)
        assert len(chosen) == 8
        indices = [i for i, _ in chosen]
        assert sorted(indices[:5]) == [0, 1, 2, 3, 5]  # the five that are valid
        assert len(set(indices[5:])) == 3
        for i in set(indices):
            texts = [e.text for j, e in chosen if j == i]
            assert len(texts) == len(set(texts)) <= 2
            seen[len(texts)] += 1
        # The first round is that of one edit a rollout.
        assert chosen[:5] == choose_edits(rollouts, 8, EditSampler(), random.Random(seed))
    assert seen == {1: 40, 2: 60}


def test_no_more_edits_than_there_are(rollouts):
    every = choose_edits(rollouts, 999, EditSampler(), random.Random(0), per_rollout=99)
    possible = {(i, e.text) for i, r in enumerate(rollouts) if r.valid for e in applicable(r.parsed)}
    assert {(i, e.text) for i, e in every} == possible
    assert len(every) == len(possible)


def test_samples_are_paired_by_common_random_numbers(rollouts):
    config = replace(CONFIG, contrast_samples=3)
    outcome, metrics, rows, sent = _step(rollouts, config)
    plain, plain_metrics, plain_rows, plain_sent = _step(rollouts, CONFIG)
    # The rewards of GRPO and the edits are those of one sample; so is sample 0 of each contrast.
    np.testing.assert_array_equal(outcome.totals(), plain.totals())
    assert [(c.index, c.edit) for c in outcome.contrasts] == [(c.index, c.edit) for c in plain.contrasts]
    for c, p in zip(outcome.contrasts, plain.contrasts, strict=True):
        assert c.originals[0] == p.originals[0] == outcome.rewards[c.index]
        assert c.samples[0] == p.samples[0]
        assert (len(c.originals), len(c.samples)) == (3, 3)
    assert rows[:6] == plain_rows[:6]
    edited = {c.index for c in outcome.contrasts}
    assert metrics["executions"] == 5
    assert metrics["counterfactual_executions"] == 2 * len(edited) + 3 * 3
    assert {"contrast/se", "frac_contrast_noise"} == set(metrics) - set(plain_metrics)
    # Greedy replies are those of sample 0 alone, and no request is sent twice.
    assert len(set(sent)) == len(sent)
    assert set(plain_sent) < set(sent)
    # Sample k begins behind 16 places; an agent of capacity large has 5 replies at each.
    assert {call.sample_index // 16 for call in sent} == {0, 1, 2, 5, 10}
    assert all((call.temperature == 0) == (call.sample_index == 0) for call in sent)


def test_what_an_edit_leaves_alone_is_asked_nothing_new_in_any_sample(tokenizer):
    """Lowering the last agent asks that agent alone, in each sample after the very same input."""
    written = rollout(tokenizer, dump(CHECKED))
    config = replace(CONFIG, tasks_per_step=1, group=2, edits_per_step=1, edit_families="lower_capacity")
    config = replace(config, contrast_samples=4)
    for seed in range(20):
        outcome, _, _, sent = _step([written, rollout(tokenizer, "none")], replace(config, seed=seed))
        (c,) = outcome.contrasts
        if c.edit.agent_id != "a2":
            continue
        first = [call.sample_index for call in sent if call.messages[1].content.endswith("Expression:")]
        assert sorted(first) == [0, 16, 32, 48]
        for sample, original in zip(c.samples[1:], outcome.resampled[0], strict=True):
            assert sample.scored.execution.agents[0] == original.scored.execution.agents[0]
        return
    raise AssertionError("the last agent was never edited")


def test_places_of_the_samples(rollouts):
    written = rollouts[3]  # two agents that ask different things
    assert places_of_original(written, 0) == {"a1": 0, "a2": 0}
    assert places_of_original(written, 2) == {"a1": 32, "a2": 32}
    (edit,) = [e for e in applicable(written.parsed) if e.family == "restore_duty"]
    config = replace(CONFIG, contrast_samples=3)
    assert places_of_edited(written, edit, 2, config) == {"a1": 32, "a2": 32}
    apart = replace(config, common_random_numbers=False)
    assert [places_of_edited(written, edit, k, apart)["a1"] // 16 for k in range(3)] == [3, 4, 5]


def test_without_common_random_numbers_nothing_is_shared(rollouts):
    config = replace(CONFIG, contrast_samples=2, common_random_numbers=False)
    outcome, metrics, _, _ = _step(rollouts, config)
    paired, shared, _, _ = _step(rollouts, replace(config, common_random_numbers=True))
    np.testing.assert_array_equal(outcome.totals(), paired.totals())
    for c in outcome.contrasts:
        original = [outcome.scored[c.index], *(s.scored for s in outcome.resampled[c.index])]
        asked = {key for scored in original for key in scored.call_keys()}
        assert asked.isdisjoint(key for s in c.samples for key in s.scored.call_keys())
    assert metrics["counterfactual_tokens"] > shared["counterfactual_tokens"]


def test_a_failure_takes_out_single_samples(rollouts):
    config = replace(CONFIG, contrast_samples=4, edits_per_step=5)
    outcome, metrics, rows, _ = _step(rollouts, config, failures=0.15)
    known = [len(c.differences) for c in outcome.contrasts]
    assert {*known} & {1, 2, 3}
    for c in outcome.contrasts:
        pairs = [(o.total, s.reward.total) for o, s in zip(c.originals, c.samples, strict=True)]
        kept = [a - b for a, b in pairs if not math.isnan(a) and not math.isnan(b)]
        assert len(c.differences) == len(kept)
        assert not kept or c.difference == pytest.approx(sum(kept) / len(kept))
    masked = sum(r["infra_failed"] for r in rows)
    assert metrics["infra_failed"] == masked > 0


def test_lines_of_samples(rollouts):
    outcome, metrics, rows, _ = _step(rollouts, replace(CONFIG, contrast_samples=2))
    extra = rows[6:]
    assert {r["phase"] for r in extra} == {"counterfactual"}
    assert len(extra) == metrics["counterfactual_executions"]
    again = [r for r in extra if "edit" not in r]
    assert [r["sample"] for r in again] == [1] * len({c.index for c in outcome.contrasts})
    of_edits = [r for r in extra if "edit" in r]
    assert [r["sample"] for r in of_edits] == [0, 1] * 3
    for c, pair in zip(outcome.contrasts, zip(of_edits[::2], of_edits[1::2], strict=True), strict=True):
        for row in pair:
            assert row["contrast"] == round(c.difference, 6)
            assert row["contrast_se"] == round(c.standard_error, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_gate": 1.0}, "noise-gate is 1.0 with one sample .* give contrast-samples = 2"),
        (
            {"noise_gate": -1.0, "contrast_samples": 2},
            "noise-gate is -1.0, it must be finite and not negative",
        ),
        ({"contrast_samples": 0}, "contrast-samples is 0, it must be at least 1"),
        ({"edits_per_rollout": 0}, "edits-per-rollout is 0, it must be at least 1"),
        ({"edits_per_rollout": 2, "edits_per_step": 33}, "edits-per-step is 33, .* 16 specs .* each 2 times"),
        ({"fixed_choices": "capacity"}, "fixed-choices is 'capacity' without constrained"),
        (
            {"fixed_choices": "roles", "constrained": True},
            "fixed-choices has roles, expected some of capacity",
        ),
        (
            {"fixed_choices": "capacity", "constrained": True, "edit_families": "lower_capacity"},
            "edits-per-step is 4, and all edit-families edit what fixed-choices fixes",
        ),
    ],
)
def test_what_no_run_can_have(changes, message):
    with pytest.raises(LemonError, match=message):
        check_counts(replace(RunConfig(bench="aqua"), **changes))


def test_what_a_run_can_have():
    config = RunConfig(
        bench="aqua", edits_per_rollout=2, edits_per_step=32, contrast_samples=2, noise_gate=1.5
    )
    check_counts(config)
    everything = "capacity, role, structure"
    check_counts(RunConfig(bench="aqua", constrained=True, fixed_choices=everything, edits_per_step=0))

import asyncio
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from policy_helpers import ALONE, CHECKED, SOLVER, TASKS, rollout, teacher_specs, workers

from lemon_jax.runtime import CallStore
from lemon_jax.spec import applicable, dump, edges
from lemon_jax.train.config import RunConfig
from lemon_jax.train.contrasts import choose_edits
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import count_calls
from lemon_jax.train.rollouts import (
    execution_rows,
    run_step,
    scope_of,
    step_metrics,
    tasks_of_step,
)

CONFIG = RunConfig(bench="multiarith", workers="scripted", tasks_per_step=2, group=3, edits_per_step=3)
TEXTS = [dump(SOLVER), dump(CHECKED), dump(SOLVER), dump(ALONE), "not a spec", dump(CHECKED)]


@pytest.fixture(scope="module")
def rollouts(tokenizer):
    """Two tasks with three specs each; the fifth is no spec."""
    return [rollout(tokenizer, text) for text in TEXTS]


def _step(rollouts, *, store=None, config=CONFIG, step=0, **options):
    """(outcome, metrics, lines, calls sent)."""
    with workers(store, **options) as (executor, calls, pool):
        outcome = asyncio.run(run_step(executor, config, step, list(TASKS[:2]), rollouts, EditSampler()))
        metrics = step_metrics(outcome, calls, EditSampler(), config, step)
        return outcome, metrics, execution_rows(outcome, config, step), pool.num_calls


def test_the_tasks_of_a_step_depend_on_seed_and_step_alone():
    config = replace(CONFIG, tasks_per_step=3)
    steps = [tasks_of_step(TASKS, config, s) for s in range(8)]  # 24 positions: three epochs of 8
    assert [tasks_of_step(TASKS, config, s) for s in reversed(range(8))] == steps[::-1]
    flat = [t.id for tasks in steps for t in tasks]
    for epoch in range(3):
        assert sorted(flat[8 * epoch : 8 * epoch + 8]) == sorted(t.id for t in TASKS)
    assert flat[:8] != flat[8:16]
    other = [t.id for s in range(8) for t in tasks_of_step(TASKS, replace(config, seed=1), s)]
    assert other != flat


def test_a_step_may_hold_more_tasks_than_there_are():
    counts = Counter(t.id for t in tasks_of_step(TASKS, replace(CONFIG, tasks_per_step=20), 0))
    assert set(counts) == {t.id for t in TASKS}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_edits_are_of_valid_rollouts_each_of_another_one(rollouts):
    unfinished = [*rollouts, replace(rollouts[0], finished=False)]
    seen = set()
    for seed in range(30):
        chosen = choose_edits(unfinished, 4, EditSampler(), random.Random(seed))
        indices = [i for i, _ in chosen]
        assert len(indices) == len(set(indices)) == 4
        assert not {4, 6} & set(indices)
        for index, edit in chosen:
            assert edit in applicable(unfinished[index].parsed)
            seen.add(edit.family)
    assert len(seen) == 3
    assert len(choose_edits(unfinished, 99, EditSampler(), random.Random(0))) == 5
    assert choose_edits(unfinished, 0, EditSampler(), random.Random(0)) == []


def test_a_spec_that_nothing_can_be_taken_from_is_passed_over(tokenizer):
    plain = next(t for t in teacher_specs(200) if not applicable(t))
    chosen = choose_edits([rollout(tokenizer, plain)], 1, EditSampler(), random.Random(0))
    assert chosen == []


def test_rewards_contrasts_and_metrics_of_a_step(rollouts):
    outcome, metrics, rows, _ = _step(rollouts)
    totals = outcome.totals()
    assert totals[4] == CONFIG.reward.invalid
    assert outcome.scored[4].execution is None
    assert len(outcome.contrasts) == 3
    for c in outcome.contrasts:
        (edited,) = c.samples
        assert c.difference == totals[c.index] - edited.reward.total
        assert edited.scored.parsed.spec == c.edit.spec
    assert totals[0] == totals[2]  # the same spec on the same task
    assert metrics["invalid_rate"] == pytest.approx(1 / 6)
    assert metrics["executions"] == 5
    assert metrics["counterfactual_executions"] == 3
    assert metrics["infra_failed"] == 0
    assert metrics["reward"] == pytest.approx(np.mean(totals))
    assert metrics["dependencies_per_spec"] == pytest.approx(
        np.mean([edges(s) for s in (SOLVER, CHECKED, SOLVER, ALONE, CHECKED)])
    )
    assert [r["phase"] for r in rows] == ["train"] * 6 + ["counterfactual"] * 3
    assert [r["group_index"] for r in rows[:6]] == [0, 1, 2, 0, 1, 2]
    assert [r["task"] for r in rows[:6]] == [TASKS[0].id] * 3 + [TASKS[1].id] * 3
    assert not rows[4]["valid"]
    assert rows[4]["reward"]["total"] == CONFIG.reward.invalid
    assert all(set(r["edit"]) == {"family", "agent"} for r in rows[6:])


def test_an_unfinished_spec_is_invalid_even_if_it_reads_as_one(rollouts):
    cut = [replace(rollouts[0], finished=False), *rollouts[1:]]
    outcome, _, rows, _ = _step(cut)
    assert outcome.totals()[0] == CONFIG.reward.invalid
    assert outcome.scored[0].execution is None
    assert not rows[0]["valid"]


def test_a_repairable_spec_earns_the_penalty_and_is_not_executed(tokenizer, rollouts):
    written = rollout(tokenizer, dump(SOLVER).replace("capacity: small", "capacity: Small"))
    assert written.parsed.spec is not None
    outcome, _, _, _ = _step([written, *rollouts[1:]])
    assert outcome.totals()[0] == CONFIG.reward.invalid
    assert outcome.scored[0].execution is None


def test_infrastructure_failures_are_masked_and_counted(rollouts):
    outcome, metrics, rows, _ = _step(rollouts, failures=1.0)
    totals = outcome.totals()
    assert np.isnan(totals[[0, 1, 2, 3, 5]]).all()
    assert totals[4] == CONFIG.reward.invalid
    assert all(math.isnan(c.difference) for c in outcome.contrasts)
    assert metrics["infra_failed"] == 5 + 3
    assert metrics["reward"] == CONFIG.reward.invalid
    assert metrics["accuracy"] is None
    assert metrics["worker_tokens"] == metrics["cached_calls"] == 0  # no call was answered
    assert rows[0]["reward"]["total"] is None
    assert rows[0]["infra_failed"]
    assert rows[6]["contrast"] is None


def test_a_partial_failure_masks_only_what_it_touched(rollouts):
    whole, _, _, _ = _step(rollouts)
    partial, metrics, _, _ = _step(rollouts, failures=0.3)
    masked = np.isnan(partial.totals())
    assert 0 < masked.sum() < 5
    np.testing.assert_array_equal(partial.totals()[~masked], whole.totals()[~masked])
    touched = masked.sum() + sum(c.samples[0].reward.masked for c in partial.contrasts)
    assert metrics["infra_failed"] == touched


def test_accounting_does_not_depend_on_the_order_in_which_calls_return(rollouts):
    _, wide, rows, _ = _step(rollouts)
    _, narrow, narrow_rows, _ = _step(rollouts, max_concurrency=1, delay_s=0.001)
    assert narrow == wide
    assert narrow_rows == rows
    assert wide["worker_tokens"] > wide["counterfactual_tokens"] > 0
    assert wide["cached_calls"] > 0  # the same spec twice, and agents that no edit affected


def test_a_step_taken_again_counts_the_same_and_asks_nothing(rollouts):
    store = CallStore(None)
    _, first, rows, sent = _step(rollouts, store=store)
    _, again, rows_again, sent_again = _step(rollouts, store=store)
    assert sent > 0
    assert sent_again == 0
    assert again == first
    assert rows_again == rows
    # Another step finds the same calls cached: they were paid for by the first.
    _, later, _, _ = _step(rollouts, store=store, config=replace(CONFIG, edits_per_step=0), step=1)
    assert later["worker_tokens"] == 0
    store.close()


def test_a_step_half_done_when_killed_counts_the_same(rollouts):
    _, whole, _, _ = _step(rollouts)
    store = CallStore(None)
    with workers(store) as (executor, _, _):
        asyncio.run(executor.execute(CHECKED, TASKS[0], scope=scope_of(0)))
    _, resumed, _, _ = _step(rollouts, store=store)
    assert resumed == whole
    store.close()


def test_recorded_calls_are_counted_as_such(rollouts):
    store = CallStore(None)
    _, live, _, _ = _step(rollouts, store=store)
    replay = CallStore(None, store.replies())
    _, replayed, _, sent = _step(rollouts, store=replay)
    assert sent == 0
    assert live["recorded_calls"] == 0
    new = replayed.pop("recorded_calls")
    assert new > 0
    assert replayed == {k: v for k, v in live.items() if k != "recorded_calls"}
    store.close()
    replay.close()


def test_calls_that_failed_are_neither_new_nor_cached():
    store = CallStore(None)
    count = count_calls(store, "train:0", ["never answered", "never answered"])
    assert (count.calls, count.new, count.cached, count.tokens) == (2, 0, 0, 0)
    store.close()

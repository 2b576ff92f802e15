"""What summary.json says of a training, beside the report that is drawn of the same metrics."""

from __future__ import annotations

import json

import pytest

from lemon_jax.bench.stats import fifth
from lemon_jax.report import write_report
from lemon_jax.train.job import training_facts

COUNTED = ("executions", "counterfactual_executions", "worker_tokens", "counterfactual_tokens")


def step(number, reward=0.0, invalid_rate=0.0):
    counts = dict.fromkeys((*COUNTED, "cached_calls", "recorded_calls"), number)
    return {"step": number, "reward": reward, "invalid_rate": invalid_rate} | counts


def written(phase, step, valid, invalid):
    rows = [True] * valid + [False] * invalid
    return [{"phase": phase, "step": step, "valid": each} for each in rows]


def test_a_fifth_is_at_least_one_step_and_rounded_up():
    assert [fifth(n) for n in (0, 1, 5, 6, 10, 12, 15)] == [1, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("masked", [None, 0])
def test_summary_and_report_have_the_same_ends_of_twelve_steps(masked, tmp_path):
    """Also where the first step has no reward: a server failed for all of it."""
    metrics = [step(n, None if n == masked else float(n * n)) for n in range(12)]
    facts = training_facts(metrics, [])
    first, last = facts["reward_first"], facts["reward_last"]
    known = [m["reward"] for m in metrics if m["reward"] is not None]
    assert (first, last) == pytest.approx((sum(known[:3]) / 3, sum(known[-3:]) / 3), abs=1e-4)
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    (tmp_path / "summary.json").write_text(json.dumps({"train": facts, "eval": []}))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert f"{first:.2f} → {last:.2f}" in page  # the tile
    assert f"<span>Reward</span><b>{first:.3g} → {last:.3g}</b>" in page  # the chart


def test_counts_are_sums_over_the_steps():
    facts = training_facts([step(n) for n in range(4)], [])
    assert {facts[name] for name in (*COUNTED, "cached_calls", "recorded_calls")} == {6}


def test_without_steps_there_is_no_reward():
    facts = training_facts([], [])
    assert (facts["reward_first"], facts["reward_last"], facts["invalid_rate"]) == (None, None, 0.0)


def test_the_invalid_rate_is_of_specs_also_where_steps_have_unlike_numbers_of_them():
    """As with dynamic sampling; repaired specs of the evaluation are not the training's."""
    rows = written("train", 0, 6, 2) + written("train", 1, 24, 0)
    rows += written("counterfactual", 0, 2, 0) + written("eval", None, 0, 9)
    facts = training_facts([step(0, invalid_rate=0.25), step(1)], rows)
    assert facts["invalid_rate"] == 2 / 32

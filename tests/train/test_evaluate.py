import asyncio
from dataclasses import replace

import pytest
from policy_helpers import CHECKED, CHOICES, SOLVER, TASKS, workers

from lemon_jax.backends import ScriptedBackend
from lemon_jax.bench import grade, wilson
from lemon_jax.errors import LemonError
from lemon_jax.report import compare
from lemon_jax.report.table import warnings
from lemon_jax.spec import baselines, dump, parse
from lemon_jax.train.evaluate import Setting, choose_tasks, evaluate, execute, fixed
from lemon_jax.train.rewards import RewardConfig, reward_of

SETTING = Setting(bench="sample", split="test", seed=3)


def _evaluate(specs, tasks=TASKS, method="lemon", setting=SETTING, **options):
    with workers(**options) as (executor, store, _):
        return asyncio.run(evaluate(executor, store, method, list(tasks), specs, setting=setting))


def _without_time(row):
    return {k: v for k, v in row.items() if k != "wall_s"}


def test_a_row_adds_up_its_lines():
    row, lines = _evaluate(fixed(CHECKED, len(TASKS)))
    assert row["n"] == len(lines) == len(TASKS)
    correct = sum(line["correct"] for line in lines)
    assert row["accuracy"] == pytest.approx(correct / row["n"], abs=1e-4)
    assert row["ci95"] == pytest.approx(wilson(correct, row["n"]), abs=1e-4)
    for key in ("prompt_tokens", "prefix_tokens", "generated_tokens"):
        total = sum(agent[key] for line in lines for agent in line["agents"])
        assert row[f"{key}_per_task"] == pytest.approx(total / row["n"], abs=0.01)
    assert row["cost_per_task"] == pytest.approx(sum(line["cost"] for line in lines) / row["n"], abs=0.01)
    assert row["calls"] == sum(agent["calls"] for line in lines for agent in line["agents"])
    assert (row["infra_failed"], row["invalid"], row["recorded_calls"]) == (0, 0, 0)
    assert {line["phase"] for line in lines} == {"eval"}
    assert [line["task"] for line in lines] == [t.id for t in TASKS]


def test_a_row_says_what_it_was_measured_on():
    row, _ = _evaluate(fixed(SOLVER, 2), TASKS[:2])
    names = ("bench", "split", "n", "seed", "extractor", "protocol")
    assert [row[name] for name in names] == ["sample", "test", 2, 3, "lemon", "full"]
    other = Setting(bench="b", split="validation", seed=0, extractor="strict", protocol="paper")
    row, _ = _evaluate(fixed(SOLVER, 2), TASKS[:2], setting=other)
    assert [row[name] for name in names] == ["b", "validation", 2, 0, "strict", "paper"]


def test_lines_keep_the_output_that_was_graded():
    _, lines = _evaluate([*fixed(SOLVER, 2), parse("no spec")], TASKS[:3])
    for task, line in zip(TASKS[:2], lines, strict=False):
        verdict = grade(task, line["output"])
        assert (verdict.answer, verdict.correct) == (line["answer"], line["correct"])
        assert line["output"]
    assert lines[2]["output"] == ""


def test_it_is_the_same_every_time_and_in_any_order():
    specs = fixed(CHECKED, len(TASKS))
    first, lines = _evaluate(specs)
    again, lines_again = _evaluate(specs, max_concurrency=1, delay_s=0.001)
    assert _without_time(again) == _without_time(first)
    assert lines_again == lines


def test_infrastructure_failures_are_left_out_of_the_accuracy():
    whole, _ = _evaluate(fixed(SOLVER, len(TASKS)))
    row, lines = _evaluate(fixed(SOLVER, len(TASKS)), failures=0.3)
    failed = [line for line in lines if line["infra_failed"]]
    assert 0 < len(failed) == row["infra_failed"] < len(TASKS)
    known = [line for line in lines if not line["infra_failed"]]
    assert row["accuracy"] == pytest.approx(sum(line["correct"] for line in known) / len(known), abs=1e-4)
    assert whole["infra_failed"] == 0


def test_tokens_that_a_server_does_not_report_make_the_cost_unknown(monkeypatch):
    answer = ScriptedBackend._answer

    async def silent(self, request):
        return replace(await answer(self, request), generated_tokens=None)

    monkeypatch.setattr(ScriptedBackend, "_answer", silent)
    row, lines = _evaluate(fixed(SOLVER, 2), TASKS[:2])
    names = ("prompt_tokens_per_task", "generated_tokens_per_task", "cost_per_task")
    assert [row[name] for name in names] == [None] * 3
    assert row["unmetered_calls"] == row["calls"] > 0
    assert [line["cost"] for line in lines] == [line["agents"][0]["cost"] for line in lines] == [None, None]
    assert f"{row['calls']} calls came without token counts" in " ".join(warnings({"eval": [row]}))
    assert [c.cost_ratio for c in compare([*lines, *(x | {"method": "other"} for x in lines)])] == [None]

    with workers() as (executor, _, _):
        scored = asyncio.run(execute(executor, TASKS[0], fixed(SOLVER, 1)[0], "train:0"))
    with pytest.raises(LemonError, match="does not report token counts"):
        reward_of(RewardConfig(), scored)
    assert reward_of(RewardConfig(efficiency=0.0), scored).efficiency == 0.0


def test_prompts_that_do_not_fit_stay_in_the_accuracy_and_are_counted(monkeypatch):
    answer = ScriptedBackend._answer
    long = {task.question for task in TASKS[:3]}

    async def overflows(self, request):
        reply = await answer(self, request)
        if any(question in request.messages[-1].content for question in long):
            return replace(reply, text="", finish="overflow", generated_tokens=0, error="context overflow: x")
        return reply

    whole, whole_lines = _evaluate(fixed(SOLVER, len(TASKS)))
    monkeypatch.setattr(ScriptedBackend, "_answer", overflows)
    row, lines = _evaluate(fixed(SOLVER, len(TASKS)))
    assert (row["context_overflows"], row["no_answer"] - whole["no_answer"], row["infra_failed"]) == (3, 3, 0)
    assert not any(line["correct"] or line["infra_failed"] for line in lines[:3])
    assert lines[3:] == whole_lines[3:]
    assert [line.keys() for line in lines] == [line.keys() for line in whole_lines]
    agent = lines[0]["agents"][-1]
    assert (agent["status"], agent["cost"] > 0) == ("EMPTY", True)
    assert agent["note"] == f"context overflow: a prompt of {agent['prompt_tokens']} tokens"
    assert row["accuracy"] == pytest.approx(sum(line["correct"] for line in lines) / len(TASKS), abs=1e-4)
    assert "context_overflows" not in whole


def test_nothing_but_failures_is_no_knowledge():
    row, _ = _evaluate(fixed(SOLVER, len(TASKS)), failures=1.0)
    assert row["infra_failed"] == len(TASKS)
    assert (row["accuracy"], row["ci95"]) == (None, [0.0, 1.0])
    names = ("prompt_tokens_per_task", "prefix_tokens_per_task", "generated_tokens_per_task", "cost_per_task")
    assert [row[name] for name in names] == [None] * 4


def test_repaired_specs_are_executed_and_hopeless_ones_are_wrong():
    repaired = parse(dump(SOLVER).replace("capacity: medium", "capacity: Medium"))
    row, lines = _evaluate([repaired, parse("no spec")], TASKS[:2])
    assert row["invalid"] == 2
    assert row["no_answer"] >= 1
    assert lines[0]["agents"]
    assert lines[0]["repairs"] == ["fold_case"]
    assert lines[1]["agents"] == []
    assert not lines[1]["correct"]


@pytest.mark.parametrize("tasks", [TASKS[:2], CHOICES[:2]])
def test_every_baseline_runs(tasks):
    for name, spec in baselines().items():
        row, lines = _evaluate(fixed(spec, len(tasks)), tasks, method=name)
        assert row["infra_failed"] == row["invalid"] == 0
        assert all(line["agents"][0]["calls"] for line in lines), name
        assert all(line["answer"] is not None for line in lines if not tasks[0].options), name


def test_fewer_tasks_are_a_subset_of_more():
    few, more = choose_tasks(TASKS, 3, seed=0), choose_tasks(TASKS, 6, seed=0)
    assert more[:3] == few
    assert sorted(t.id for t in choose_tasks(TASKS, 100, seed=0)) == sorted(t.id for t in TASKS)
    assert choose_tasks(TASKS, 6, seed=1) != more

"""The main job from its command line to the files it writes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
import tomllib
from types import SimpleNamespace

import jax
import pytest
from experiment_helpers import ROOT, SECONDS, json_lines, run_main, run_script, start

from lemon_jax.backends import Reply, ScriptedBackend
from lemon_jax.report.run_files import load_run
from lemon_jax.spec import baselines, dump
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.hosts import Hosts

SMALL = ("--workers", "scripted", "--tasks-per-step", 2, "--eval-tasks", 3, "--fresh")
METHODS = {"lemon", "warmstart", "vanilla", "cot", "sc", "chain", "complete"}
# The contract that other programs read: fields and their types; a run may add more.
NUMBER = (int, float)
SUMMARY = {"bench": str, "workers": str, "policy": str, "seed": int, "steps": int, "wall_s": NUMBER}
DATA = {"source": str, "split": str, "n": int, "sha256": str}
TRAIN = {
    "executions": int,
    "counterfactual_executions": int,
    "worker_tokens": int,
    "cached_calls": int,
    "recorded_calls": int,
    "invalid_rate": NUMBER,
    "reward_first": NUMBER,
    "reward_last": NUMBER,
}
EVAL = {
    "method": str,
    "bench": str,
    "split": str,
    "n": int,
    "seed": int,
    "extractor": str,
    "protocol": str,
    "accuracy": NUMBER,
    "ci95": list,
    "prompt_tokens_per_task": NUMBER,
    "generated_tokens_per_task": NUMBER,
    "cost_per_task": NUMBER,
    "no_answer": int,
    "infra_failed": int,
    "wall_s": NUMBER,
}


def check_fields(found, expected):
    for name, kind in expected.items():
        assert isinstance(found[name], kind), f"{name} is {found[name]!r}"
        assert not isinstance(found[name], bool)


def run_bench(bench, policy, out, *more):
    assert run_main("--bench", bench, "--policy", policy, "--out", out, *SMALL, *more) == 0
    return load_run(out)


def test_a_run_writes_everything_a_reader_needs(policy_folder, tmp_path, capsys):
    # A seed with which the tiny policy writes valid specs, so that there is something to edit.
    run = run_bench("aqua", policy_folder, tmp_path / "run", "--steps", 3, "--seed", 1)
    printed = capsys.readouterr()
    assert "SAMPLE DATA, not aqua" in printed.err
    assert "accuracy" in printed.out
    assert str(tmp_path / "run" / "summary.json") in printed.out

    summary = run.summary
    check_fields(summary, SUMMARY)
    check_fields(summary["data"], DATA)
    check_fields(summary["train"], TRAIN)
    for row in summary["eval"]:
        check_fields(row, EVAL)
        assert row["n"] == 3
        low, high = row["ci95"]
        assert low <= row["accuracy"] <= high
    assert (summary["bench"], summary["steps"], summary["data"]["source"]) == ("aqua", 3, "sample")
    assert (summary["data"]["split"], summary["data"]["n"]) == ("test", 64)
    assert {row["method"] for row in summary["eval"]} == METHODS

    metrics = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for field in ("executions", "counterfactual_executions", "worker_tokens", "cached_calls"):
        assert summary["train"][field] == sum(row[field] for row in metrics)
    assert summary["train"]["counterfactual_executions"] > 0
    check_executions(json_lines(tmp_path / "run" / "executions.jsonl"), summary)

    assert {"manifest.json", "calls.sqlite", "checkpoints", "policy"} <= {p.name for p in run.path.iterdir()}
    assert run.manifest["data"]["source"] == "sample"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "aqua" in page
    assert page.rstrip().endswith("</html>")


def check_executions(rows, summary):
    phases = [row["phase"] for row in rows]
    assert phases.count("train") == 3 * 2 * 4  # steps x tasks x group
    assert phases.count("counterfactual") == summary["train"]["counterfactual_executions"]
    assert phases.count("eval") == 3 * len(METHODS)
    executed = [row for row in rows if row["phase"] == "train" and row["valid"]]
    assert len(executed) == summary["train"]["executions"]
    for row in rows:
        assert {"task", "spec", "agents", "answer", "correct", "cost"} <= row.keys()
        if row["phase"] != "eval":
            assert isinstance(row["reward"], dict)


def test_equal_seeds_give_equal_runs_and_others_do_not(policy_folder, tmp_path):
    for name, seed in (("one", 7), ("two", 7), ("other", 8)):
        run_bench("multiarith", policy_folder, tmp_path / name, "--steps", 2, "--seed", seed)
    for file in ("metrics.jsonl", "executions.jsonl"):
        one, two, other = ((tmp_path / name / file).read_bytes() for name in ("one", "two", "other"))
        assert one == two
        assert one != other
    weights = [(tmp_path / name / "policy" / "policy.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]


def test_no_steps_only_evaluate(policy_folder, tmp_path, capsys):
    run = run_bench("multiarith", policy_folder, tmp_path / "run", "--steps", 0)
    # The policy has one row: the trained one would be the same.
    assert {row["method"] for row in run.summary["eval"]} == METHODS - {"warmstart"}
    assert "no training: lemon is the policy that --policy names" in capsys.readouterr().err
    assert run.summary["train"]["executions"] == 0
    assert run.summary["train"]["reward_first"] is None
    assert {row["phase"] for row in run.executions} == {"eval"}
    untouched, trained = (
        (folder / "policy.safetensors").read_bytes() for folder in (policy_folder, run.path / "policy")
    )
    assert untouched == trained


def test_the_baselines_that_were_chosen(policy_folder, tmp_path):
    run = run_bench(
        "multiarith", policy_folder, tmp_path / "run", "--steps", 0, "--baselines", "debate,star,random"
    )
    assert [row["method"] for row in run.summary["eval"]] == ["lemon", "star", "random", "debate"]
    (spec,) = {row["spec"] for row in run.executions if row["method"] == "random"}
    assert spec == dump(baselines(seed=0)["random"])
    none = run_bench("aqua", policy_folder, tmp_path / "none", "--steps", 0, "--baselines", "none")
    assert [row["method"] for row in none.summary["eval"]] == ["lemon"]


def test_the_best_fixed_spec_is_searched_with_the_tokens_of_the_training(policy_folder, tmp_path):
    plain = run_bench("multiarith", policy_folder, tmp_path / "plain", "--steps", 2, "--seed", 1)
    run = run_bench("multiarith", policy_folder, tmp_path / "run", "--steps", 2, "--seed", 1, "--best-fixed")
    assert "search" not in plain.summary
    search = run.summary["search"]
    assert (
        search["budget"] == run.summary["train"]["worker_tokens"] == plain.summary["train"]["worker_tokens"]
    )
    assert 0 < search["worker_tokens"] <= search["budget"]
    rows = [row for row in run.executions if row["phase"] == "search"]
    assert len(rows) == search["executions"] > 1
    assert not {row["task"] for row in rows} & {
        row["task"] for row in run.executions if row["phase"] == "eval"
    }
    (spec,) = {e["spec"] for e in run.executions if (e["phase"], e["method"]) == ("eval", "best_fixed")}
    assert spec == search["spec"]
    assert [row["method"] for row in run.summary["eval"]][-1] == "best_fixed"
    # All that a run without the search does is the same.
    assert (tmp_path / "plain" / "metrics.jsonl").read_bytes() == (
        tmp_path / "run" / "metrics.jsonl"
    ).read_bytes()
    others = [e for e in run.executions if e["phase"] != "search" and e["method"] != "best_fixed"]
    assert others == plain.executions

    before = (run.path / "executions.jsonl").read_bytes()
    assert run_main("--resume", run.path, "--fresh") == 0
    assert (run.path / "executions.jsonl").read_bytes() == before
    assert load_run(run.path).summary["search"] == search


def test_a_search_with_a_budget_of_its_own(policy_folder, tmp_path):
    flags = ("--steps", 0, "--baselines", "none", "--best-fixed", "--search-tokens", 2000)
    run = run_bench("aqua", policy_folder, tmp_path / "run", *flags)
    assert run.summary["search"]["budget"] == 2000
    assert run.summary["search"]["worker_tokens"] <= 2000
    assert [row["method"] for row in run.summary["eval"]] == ["lemon", "best_fixed"]


def test_workers_that_fail_everywhere_are_told_of(policy_folder, tmp_path, capsys, monkeypatch):
    """A step of theirs is not counted, and of an evaluation the exit code tells; both can be resumed."""

    async def lost(self, request):
        return Reply(text="", finish="error", error="HTTP 404: no such model")

    run, evaluated = tmp_path / "run", tmp_path / "evaluated"
    argv = ("--bench", "multiarith", "--policy", policy_folder, *SMALL, "--baselines", "cot")
    with monkeypatch.context() as patch:
        patch.setattr(ScriptedBackend, "_answer", lost)
        assert run_main(*argv, "--steps", 1, "--out", run) == 2
        says = capsys.readouterr().err.splitlines()[-1]
        assert says.startswith("error: step 0: workers failed in ")
        assert "HTTP 404: no such model" in says
        assert says.endswith(f"--resume {run}")
        assert run_main(*argv, "--steps", 0, "--out", evaluated) == 1
        out = capsys.readouterr().out
        assert "INFRA_FAILED: 6 of 6 tasks, not counted as wrong; --resume" in out
        assert "HTTP 404: no such model" in out
    for folder in (run, evaluated):
        assert run_main("--resume", folder) == 0
    assert "INFRA_FAILED" not in capsys.readouterr().out


def test_without_counterfactuals_nothing_is_edited(policy_folder, tmp_path):
    run = run_bench("multiarith", policy_folder, tmp_path / "run", "--steps", 2, "--no-counterfactual")
    assert run.summary["train"]["counterfactual_executions"] == 0
    assert {row["phase"] for row in run.executions} == {"train", "eval"}
    assert [row["loss_cf"] for row in run.metrics] == [0.0, 0.0]


def test_fewer_specs_than_the_preset_edits_are_all_edited(policy_folder, tmp_path):
    small = ("--steps", 1, "--tasks-per-step", 1, "--group", 2)
    run = run_bench("multiarith", policy_folder, tmp_path / "run", *small)
    assert run.manifest["config"]["edits_per_step"] == 2


def test_help_explains_every_flag_on_one_line_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        run_script.parse_arguments(["--help"])
    assert end.value.code == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    flags = "bench eval-bench protocol preset workers policy steps tasks-per-step group eval-tasks baselines"
    flags += " best-fixed search-tokens seed out resume replay data tell-prices prices constrained"
    flags += " no-counterfactual fresh accept-isolation"
    flags += " allow-unsandboxed lora-rank lora-targets mesh accumulate remat compute-dtype checkpoint-dir"
    flags += " grace distributed coordinator num-processes process-id"
    assert [line.split()[0] for line in lines] == [f"--{flag}" for flag in flags.split()]
    assert all(re.search(r"\S \(.+\)$", line) for line in lines)

    preset = tomllib.loads((ROOT / "experiments" / "presets" / "default.toml").read_text(encoding="utf-8"))
    shown = {line.split()[0]: line for line in lines}
    for field in ("steps", "tasks_per_step", "eval_tasks"):
        text = shown["--" + field.replace("_", "-")]
        assert str(preset[field]) in text
        assert str(preset["bench"]["aqua"].get(field, preset[field])) in text


def interrupt(argv, number, awaited, env):
    """Start a run, send it the signal once a file is there; (exit code, stdout, stderr)."""
    with start("run", *argv, env=env) as process:
        try:
            deadline = time.monotonic() + SECONDS
            while not awaited.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(number)
            out, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_an_interrupted_run_says_so_and_can_be_continued(
    number, expected, policy_folder, child_env, tmp_path
):
    run = tmp_path / "run"
    argv = ["--bench", "multiarith", "--policy", policy_folder, "--out", run, *SMALL, "--steps", 100_000]
    code, out, err = interrupt(argv, number, run / "metrics.jsonl", child_env)
    assert code == expected, err
    says = {130: "interrupted; ", 75: f"stopped by SIGTERM: continue with --resume {run}"}
    assert err.splitlines()[-1].startswith(says[expected])
    assert "Traceback" not in err + out
    metrics = json_lines(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(len(metrics)))
    if number == signal.SIGTERM:  # the last whole step is saved, whatever checkpoint_every says
        assert max(int(p.name) for p in (run / "checkpoints").iterdir()) == len(metrics)
    assert not (run / "summary.json").exists()
    manifest = load_run(run).manifest
    assert all(manifest["config"][k] == v for k, v in (("steps", 100_000), ("workers", "scripted")))


@pytest.mark.parametrize(("compute_dtype", "precision"), [("float32", "highest"), ("bfloat16", None)])
def test_a_run_in_float32_has_float32_products_on_accelerators(compute_dtype, precision, monkeypatch):
    async def execute():
        return {"precision": jax.config.values["jax_default_matmul_precision"]}

    job = SimpleNamespace(
        config=RunConfig(bench="sample", update=UpdateConfig(compute_dtype=compute_dtype)),
        hosts=Hosts(),
        run=SimpleNamespace(locked=contextlib.nullcontext),
        execute=execute,
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    before = jax.config.values["jax_default_matmul_precision"]
    try:
        assert asyncio.run(run_script._execute(job)) == {"precision": precision}
    finally:
        jax.config.update("jax_default_matmul_precision", before)

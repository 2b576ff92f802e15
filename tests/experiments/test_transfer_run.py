"""Runs on several benches and at told prices, through the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from experiment_helpers import json_lines, run_main

from lemon_jax.errors import LemonError
from lemon_jax.report.export import export_lm_eval
from lemon_jax.report.run_files import load_run

SMALL = ("--tasks-per-step", 2, "--eval-tasks", 3, "--baselines", "vanilla", "--fresh")


def test_trained_on_two_benches_tested_on_two_others(policy_folder, tmp_path, capsys):
    """The data is the sample, made up for each kind of bench."""
    out = tmp_path / "run"
    flags = ("--bench", "multiarith,aqua", "--eval-bench", "aqua,gsm8k", "--policy", policy_folder)
    assert run_main(*flags, *SMALL, "--workers", "scripted", "--steps", 3, "--out", out) == 0
    printed = capsys.readouterr().out
    run = load_run(out)
    methods = ("lemon", "warmstart", "vanilla")
    found = [(row["bench"], row["method"], row["n"]) for row in run.summary["eval"]]
    assert found == [(bench, method, 3) for bench in ("aqua", "gsm8k") for method in methods]
    for bench in ("aqua", "gsm8k"):
        assert f"{bench}: lemon vs vanilla" in printed
        assert f"{bench}: lemon vs vanilla" in (out / "report.html").read_text(encoding="utf-8")
    assert run.summary["bench"] == "multiarith,aqua"
    assert set(run.summary["data"]["benches"]) == {"aqua", "gsm8k"}
    assert set(run.manifest["data"]["benches"]) == {"multiarith", "aqua", "gsm8k"}
    rows = json_lines(out / "executions.jsonl")
    assert {row["task"].split("-")[1] for row in rows if row["phase"] == "train"} == {"number", "choice"}
    summary, executions = (out / "summary.json").read_text(), (out / "executions.jsonl").read_bytes()
    assert run_main("--resume", out) == 0
    with pytest.raises(LemonError, match="sample"):
        export_lm_eval(run, tmp_path / "samples")
    data = dict(run.manifest["data"], source="official")
    with pytest.raises(LemonError, match="a run of several benches"):
        export_lm_eval(replace(run, manifest=run.manifest | {"data": data}), tmp_path / "samples")
    again = json.loads((out / "summary.json").read_text())
    for row in (*again["eval"], *json.loads(summary)["eval"]):
        row.pop("wall_s")
    assert again["eval"] == [{k: v for k, v in row.items() if k != "wall_s"} for row in run.summary["eval"]]
    assert (out / "executions.jsonl").read_bytes() == executions


def test_simulated_workers_at_told_prices(policy_folder, tmp_path, capsys):
    """One training, evaluated at other prices: costs and regret follow them, accuracy does not.

    Whoever evaluates without telling them is told of it.
    """
    preset = tmp_path / "p.toml"
    preset.write_text("steps = 2\nprice_tables = [[1, 3, 10], [1, 1, 1]]\ntell_prices = true\n")
    common = ("--bench", "multiarith", "--policy", policy_folder, "--workers", "simulated", *SMALL)
    run_dir = tmp_path / "trained"
    assert run_main(*common, "--preset", preset, "--prices", "1,3,10", "--out", run_dir) == 0
    assert "prices" in (run_dir / "report.html").read_text(encoding="utf-8")
    lines = json_lines(run_dir / "executions.jsonl")
    assert {tuple(row["prices"]) for row in lines if row["phase"] == "train"} == {(1, 3, 10), (1, 1, 1)}
    rows = {}
    for prices, told in (("1,3,10", ()), ("2,6,20", ("--tell-prices",))):
        out = tmp_path / prices
        flags = ("--policy", run_dir / "policy", "--steps", 0, "--prices", prices, "--out", out, *told)
        capsys.readouterr()
        assert run_main(*common, *flags) == 0
        warned = "warning: the policy was trained with prices told" in "".join(capsys.readouterr())
        assert warned == (not told)
        rows[prices] = {row["method"]: row for row in load_run(out).summary["eval"]}
    cheap, dear = (rows[prices]["vanilla"] for prices in ("1,3,10", "2,6,20"))
    assert (cheap["prices"], dear["prices"]) == ([1, 3, 10], [2, 6, 20])
    assert dear["cost_per_task"] == pytest.approx(2 * cheap["cost_per_task"], abs=0.02)
    assert dear["accuracy"] == cheap["accuracy"]
    assert dear["regret_per_task"] != cheap["regret_per_task"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--bench", "multiarith,gsm"), "bench 'gsm' is unknown"),
        (("--bench", "aqua", "--eval-bench", "all"), "bench 'all' is unknown"),
        (("--bench", "aqua,aqua"), "bench is 'aqua,aqua', expected each bench once"),
        (("--bench", "aqua", "--prices", "1,3"), "prices has (1.0, 3.0), expected three prices"),
        (("--bench", "aqua", "--prices", "1,3,x"), "--prices is '1,3,x', expected small, medium and large"),
    ],
)
def test_faulty_flags(flags, expected, policy_folder, tmp_path, capsys):
    argv = (*flags, "--policy", policy_folder, "--workers", "scripted", "--out", tmp_path / "run")
    assert run_main(*argv) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

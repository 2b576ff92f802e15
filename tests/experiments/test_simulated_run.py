"""A run with simulated workers: regret in its numbers, and the word in every output."""

from __future__ import annotations

import pytest
from experiment_helpers import json_lines, run_main

from lemon_jax.cli import main
from lemon_jax.errors import LemonError
from lemon_jax.report.export import export_lm_eval
from lemon_jax.report.run_files import load_run
from lemon_jax.report.table import SIMULATED_WARNING

SMALL = ("--tasks-per-step", 2, "--eval-tasks", 3, "--baselines", "vanilla,cot")


@pytest.mark.parametrize("bench", ["multiarith", "aqua"])
def test_regret_and_the_warning(bench, policy_folder, tmp_path, capsys):
    out = tmp_path / "run"
    flags = ("--bench", bench, "--policy", policy_folder, "--out", out, *SMALL, "--steps", 2, "--seed", 1)
    assert run_main(*flags, "--workers", "simulated") == 0
    printed = capsys.readouterr()
    assert SIMULATED_WARNING in printed.err
    assert "recorded worker calls" not in printed.err  # none of them can serve
    assert "regret" in printed.err
    assert SIMULATED_WARNING in printed.out
    assert "regret" in printed.out

    run = load_run(out)
    assert run.simulated
    assert run.summary["simulated"] is True
    for row in json_lines(out / "metrics.jsonl"):
        assert row["regret"] >= -1e-9
    for row in run.summary["eval"]:
        assert row["simulated"] is True
        assert row["regret_per_task"] >= 0
    page = (out / "report.html").read_text(encoding="utf-8")
    assert SIMULATED_WARNING in page
    assert "regret per task" in page
    assert "Regret against the best spec" in page
    with pytest.raises(LemonError, match="no language model answered"):
        export_lm_eval(run, tmp_path / "samples")

    (out / "summary.json").unlink()  # as it is while the run goes on
    assert main(["report", str(out)]) == 0
    assert SIMULATED_WARNING in (out / "report.html").read_text(encoding="utf-8")


def test_a_worker_file_of_ones_own_is_simulated_too(tmp_path, capsys):
    workers = tmp_path / "mine.toml"
    levels = ("small", "medium", "large")
    models = "".join(f'[models.{c}]\nbackend = "simulated"\nlevel = "{c}"\n' for c in levels)
    capacities = "".join(f'[capacities.{c}]\nmodel = "{c}"\nprice = 1\n' for c in levels)
    workers.write_text(models + capacities)
    flags = ["--bench", "sample", "--tasks", "5", "--workers", str(workers), "--out", str(tmp_path / "e")]
    assert main(["eval", "cot", *flags]) == 0
    printed = capsys.readouterr()
    assert SIMULATED_WARNING in printed.out
    assert SIMULATED_WARNING in printed.err
    assert load_run(tmp_path / "e").summary["eval"][0]["regret_per_task"] > 0

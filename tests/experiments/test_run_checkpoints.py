"""Where a run's checkpoints lie: never another run's, and never silently nowhere."""

from __future__ import annotations

import json
import shutil

import pytest
from experiment_helpers import contents, json_lines, run_main

FLAGS = ("--bench", "multiarith", "--workers", "scripted", "--fresh", "--baselines", "none")
FLAGS += ("--eval-tasks", 2, "--tasks-per-step", 2)


@pytest.fixture
def elsewhere(policy_folder, tmp_path, monkeypatch):
    """A run with its checkpoints in a folder that was given relative to the working folder."""
    run = tmp_path / "run"
    flags = (*FLAGS, "--policy", policy_folder, "--steps", 2, "--out", run)
    assert run_main(*flags, "--checkpoint-dir", "elsewhere") == 0
    return run, tmp_path / "elsewhere"


def test_a_new_run_does_not_write_among_another_ones_checkpoints(elsewhere, policy_folder, tmp_path, capsys):
    _, folder = elsewhere
    before = contents(folder)
    flags = (*FLAGS, "--policy", policy_folder, "--steps", 1, "--out", tmp_path / "other")
    assert run_main(*flags, "--checkpoint-dir", folder) == 2
    assert f"error: --checkpoint-dir {folder}: holds the checkpoints of another run; choose" in (
        capsys.readouterr().err
    )
    assert contents(folder) == before
    assert not (tmp_path / "other").exists()


def test_they_are_found_from_any_folder_and_where_they_were_moved_to(
    elsewhere, tmp_path, capsys, monkeypatch
):
    run, folder = elsewhere
    assert json.loads((run / "manifest.json").read_text())["checkpoints"] == str(folder)
    lines = (run / "metrics.jsonl").read_bytes()
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "away")
    assert run_main("--resume", run) == 0
    assert "resumed after step 2" in capsys.readouterr().err
    assert run_main("--resume", run, "--checkpoint-dir", "new") == 2
    said = f"new: holds no checkpoint of this run; they are in {folder}: move them there first, or leave out"
    assert said in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == lines
    folder.rename("new")
    assert run_main("--resume", run, "--checkpoint-dir", "new") == 0
    assert "resumed after step 2" in capsys.readouterr().err


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_checkpoints_that_are_gone_are_named_before_anything_is_cut(left, elsewhere, capsys):
    run, folder = elsewhere
    executions = (run / "executions.jsonl").read_bytes()
    if left == "an empty folder":  # as a kill leaves it before the first checkpoint, but not after so many
        row = json_lines(run / "metrics.jsonl")[-1]
        with (run / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row | {"step": step}) + "\n" for step in range(2, 11))
    lines = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(folder)
    if left == "an empty folder":
        folder.mkdir()
    said = f"error: {folder}: no checkpoint there, but {run / 'metrics.jsonl'} has "
    for _ in range(2):  # the first attempt leaves no folder that the second would take for the run's
        assert run_main("--resume", run) == 2
        assert said in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == lines
    assert (run / "executions.jsonl").read_bytes() == executions

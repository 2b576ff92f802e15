"""A run killed with SIGKILL and resumed ends as the run that was never killed."""

from __future__ import annotations

import random
import shutil

import pytest
from experiment_helpers import SECONDS, json_lines, script, start

kill_and_resume = script("kill_and_resume")


@pytest.mark.slow
def test_killed_and_resumed_is_equal(policy_folder, child_env, tmp_path, capsys):
    both = tmp_path / "both"
    argv = ["--workers", "scripted", "--policy", policy_folder, "--out", both]
    argv += ["--steps", 4, "--kills", 2, "--eval-tasks", 4]
    with start("kill_and_resume", *argv, env=child_env) as process:
        out, err = process.communicate(timeout=4 * SECONDS)
    assert process.returncode == 0, out + err
    assert "verdict: equal" in out
    assert sum(line.startswith("kill ") and ": killed while" in line for line in out.splitlines()) == 2

    calm, killed = both / "undisturbed", both / "killed"
    for name in ("metrics.jsonl", "executions.jsonl", "policy/policy.safetensors", "policy/manifest.json"):
        assert (calm / name).read_bytes() == (killed / name).read_bytes()
    # The equality is worth something only if the run had all that can differ: edits, and what they changed.
    metrics = json_lines(calm / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert sum(row["counterfactual_executions"] for row in metrics) > 0
    assert metrics[-1]["kl"] > 0
    assert_notices_differences(calm, killed, tmp_path, capsys)


def test_one_bench_at_a_time(capsys):
    with pytest.raises(SystemExit):
        kill_and_resume.main(["--workers", "scripted", "--bench", "all"])
    assert "--bench: invalid choice: 'all'" in capsys.readouterr().err


def assert_notices_differences(calm, killed, tmp_path, capsys):
    for number, name in enumerate(("metrics.jsonl", "executions.jsonl", "policy/policy.safetensors")):
        changed = tmp_path / f"changed-{number}"
        shutil.copytree(killed, changed)
        with (changed / name).open("ab") as file:
            file.write(b"\n")
        assert not kill_and_resume._compare(calm, changed)
        printed = capsys.readouterr().out
        assert printed.count("DIFFERENT") == 2  # the file's line and the verdict
        assert "verdict: DIFFERENT" in printed


def test_kills_are_planned_over_all_phases_in_order_of_steps():
    plan = kill_and_resume.plan_kills(10, 6, random.Random(0))
    assert plan == kill_and_resume.plan_kills(10, 6, random.Random(0))
    assert plan != kill_and_resume.plan_kills(10, 6, random.Random(1))
    training = plan[:8]
    assert {kill.phase for kill in training} == set(kill_and_resume.TRAINING_PHASES)
    assert [kill.phase for kill in plan[8:]] == ["evaluating"] * 2
    assert [kill.step for kill in training] == sorted(kill.step for kill in training)
    assert all(0 <= kill.step < 6 and 0 <= kill.point < 1 for kill in training)


def test_faults_end_in_one_line(tmp_path, capsys):
    (tmp_path / "taken").write_text("", encoding="utf-8")
    assert kill_and_resume.main(["--workers", "scripted", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: the folder is not empty; choose another --out\n"
    with pytest.raises(SystemExit):
        kill_and_resume.main(["--workers", "scripted", "--kills", "0"])
    assert "--kills: invalid count value: '0'" in capsys.readouterr().err

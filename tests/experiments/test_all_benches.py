"""`--bench all`: six runs, one table; and the parts of a run that only some benches need."""

from __future__ import annotations

import json
import os
import signal

import pytest
from experiment_helpers import json_lines, run_main, run_script

from lemon_jax.bench import SOURCES
from lemon_jax.orchestrator import read_manifest

DATA = os.environ.get("LEMON_DATA")  # the tests around here hide it
FLAGS = ("--workers", "scripted", "--steps", 0, "--eval-tasks", 2, "--baselines", "vanilla", "--fresh")
real_data = pytest.mark.skipif(not DATA, reason="LEMON_DATA names no folder with the files")


def test_the_names_of_the_benches():
    assert set(run_script.BENCHES) == set(SOURCES)


@real_data
def test_all_goes_on_where_it_was_stopped_and_ends_in_one_table(policy_folder, tmp_path, capsys):
    out = tmp_path / "all"
    flags = ("--bench", "all", "--policy", policy_folder, *FLAGS, "--data", DATA, "--out", out)
    first = run_script.BENCHES[0]
    assert (
        run_main("--bench", first, "--policy", policy_folder, *FLAGS, "--data", DATA, "--out", out / first)
        == 0
    )
    stamp = (out / first / "summary.json").stat().st_mtime_ns
    capsys.readouterr()
    assert run_main(*flags) == 0
    printed = capsys.readouterr().out
    assert (out / first / "summary.json").stat().st_mtime_ns == stamp
    table = printed[printed.index("\nall") :].split("runs: ")[0]
    for bench in run_script.BENCHES:
        assert sum(bench in line.split() for line in table.splitlines()) == 2
        rows = json_lines(out / bench / "executions.jsonl")
        assert len(rows) == 2 * 2  # the policy and vanilla, two tasks each
        assert {row["method"] for row in rows} == {"lemon", "vanilla"}
    code = json_lines(out / "humaneval" / "executions.jsonl")
    assert {row["agents"][0]["role"] for row in code if row["method"] == "vanilla"} == {"coder"}


@real_data
def test_all_keeps_its_flags_and_checkpoints_apart_and_says_how_to_go_on(
    tmp_path, capsys, monkeypatch, policy_folder
):
    from lemon_jax.train.hosts import Preempted

    seen = []

    def one_run(args):
        seen.append(args)
        raise Preempted(f"continue with --resume {args.out}")

    monkeypatch.setattr(run_script, "run", one_run)
    out, first = tmp_path / "all", run_script.BENCHES[0]
    flags = (
        "--bench",
        "all",
        "--policy",
        policy_folder,
        "--out",
        out,
        "--accumulate",
        2,
        "--remat",
        "--data",
        DATA,
    )
    for address, folder in (("gs://bucket/run/", f"gs://bucket/run/{first}"), ("here", f"here/{first}")):
        assert run_main(*flags, "--mesh", "data=1", "--checkpoint-dir", address) == 75
        told = f"stopped by SIGTERM: continue with the same command and --out {out}\n"
        assert capsys.readouterr().err.endswith(told)
        (out / first).mkdir(parents=True, exist_ok=True)  # from the second time on it is resumed
        config = run_script.config_of(seen[0])[0].to_dict()
        (out / first / "manifest.json").write_text(json.dumps({"config": config}))
        assert (seen[-1].accumulate, seen[-1].remat, seen[-1].mesh) == (2, True, "data=1")
        assert seen[-1].checkpoint_dir == folder
    assert [args.resume for args in seen] == [None, out / first]

    # With other settings it is another run.
    config["update"] |= {"kl": 0.5}
    (out / first / "manifest.json").write_text(json.dumps({"config": config}))
    assert run_main(*flags, "--seed", 1) == 2
    told = "begun with other settings (seed was 0, now 1, update.kl was 0.5, now 0.03); give the same"
    assert f"error: {first}: {out / first} was {told}" in capsys.readouterr().err
    assert len(seen) == 2
    (out / first / "manifest.json").unlink()

    monkeypatch.setattr(run_script, "run", lambda _: signal.raise_signal(signal.SIGINT))
    assert run_main(*flags) == 130
    assert capsys.readouterr().err.endswith(f"interrupted; continue with the same command and --out {out}\n")


@real_data
def test_a_protocol_without_train_tasks_only_evaluates(policy_folder, tmp_path, capsys):
    flags = (
        "--bench",
        "multiarith",
        "--protocol",
        "lemon",
        "--policy",
        policy_folder,
        "--workers",
        "scripted",
    )
    assert run_main(*flags, "--data", DATA, "--out", tmp_path / "a") == 2
    assert "evaluate a policy with --steps 0" in capsys.readouterr().err
    more = ("--steps", 0, "--eval-tasks", 2, "--baselines", "none")
    assert run_main(*flags, *more, "--data", DATA, "--out", tmp_path / "a") == 0
    assert "lemon" in capsys.readouterr().out


@real_data
def test_all_that_would_stop_all_is_told_before_anything_is_computed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lemon_jax.runtime.tools.isolation.reached", lambda: "rlimits")
    monkeypatch.setattr(run_script, "run", lambda _: pytest.fail("a bench was begun"))
    flags = ("--bench", "all", "--protocol", "lemon", "--data", DATA, "--out", tmp_path / "all")
    assert run_main(*flags) == 2
    told = capsys.readouterr().err
    assert "multiarith: the lemon protocol scores every task of multiarith and leaves none to train" in told
    assert "humaneval: " in told
    assert told.count("\n") == 1
    assert run_main(*flags, "--steps", 0) == 2
    assert capsys.readouterr().err.startswith("error: humaneval: ")
    assert run_main(*flags, "--group", 1) == 2
    assert capsys.readouterr().err.startswith(
        "error: aqua, gsm8k, humaneval, mmlu, multiarith, svamp: group is 1"
    )
    assert not (tmp_path / "all").exists()


@real_data
def test_a_policy_tested_on_its_own_train_tasks_is_told(policy_folder, tmp_path, capsys):
    flags = ("--bench", "multiarith", "--workers", "scripted", "--data", DATA, "--baselines", "none")
    trained = ("--policy", policy_folder, "--steps", 1, "--eval-tasks", 1, "--out", tmp_path / "a")
    assert run_main(*flags, *trained) == 0
    assert "warning" not in capsys.readouterr().err
    policy = ("--policy", tmp_path / "a" / "policy", "--steps", 0, "--eval-tasks", 1)
    assert run_main(*flags, *policy, "--protocol", "lemon", "--out", tmp_path / "b") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "of the 600 test tasks of multiarith are train tasks of the full protocol" in told
    # Another training does not make it forget them.
    again = ("--bench", "svamp", "--workers", "scripted", "--data", DATA, "--baselines", "none")
    first, second = tmp_path / "a" / "policy", tmp_path / "c" / "policy"
    assert run_main(*again, *trained[2:-2], "--policy", first, "--out", tmp_path / "c") == 0
    assert read_manifest(second)["continued_from"] == read_manifest(first)
    capsys.readouterr()
    policy = ("--policy", second, *policy[2:])
    assert run_main(*flags, *policy, "--protocol", "lemon", "--out", tmp_path / "d") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "of the 600 test tasks of multiarith are train tasks of the full protocol" in told


@real_data
def test_code_is_not_run_below_the_accepted_isolation(policy_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lemon_jax.runtime.tools.isolation.reached", lambda: "rlimits")
    flags = (
        "--bench",
        "humaneval",
        "--policy",
        policy_folder,
        *FLAGS,
        "--data",
        DATA,
        "--out",
        tmp_path / "a",
    )
    assert run_main(*flags) == 2
    assert "--accept-isolation rlimits" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()

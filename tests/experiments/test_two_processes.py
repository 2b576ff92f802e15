"""A run in two processes of two devices each, over gloo: equal to the run in one, stopped at any moment."""

from __future__ import annotations

import json
import random
import signal
import time

import numpy as np
import pytest
from experiment_helpers import SECONDS, free_port, json_lines, run_main, start
from safetensors.numpy import load_file

from lemon_jax.runtime import CallStore

STEPS = 6
RUN = ["--workers", "scripted", "--fresh", "--bench", "multiarith", "--tasks-per-step", 2, "--eval-tasks", 2]
RUN += ["--steps", STEPS, "--seed", 1, "--baselines", "vanilla"]
TIMES = ("wall_s",)


class Pair:
    """The two processes of one run."""

    def __init__(self, argv, env, logs, *, folders=(None, None)):
        env = env | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
        joined = ["--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2]
        self.logs = [logs / f"log-{i}" for i in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            with log.open("w", encoding="utf-8") as file:
                argv_i = [*argv, *joined, "--process-id", index]
                self.processes.append(
                    start("run", *argv_i, env=env, stdout=file, stderr=file, cwd=folders[index])
                )

    def wait_for(self, reached):
        """Wait until `reached()`, or until a process has ended."""
        end = time.monotonic() + SECONDS
        while not reached() and all(p.poll() is None for p in self.processes) and time.monotonic() < end:
            time.sleep(0.01)

    def codes(self, signals=()):
        """Exit codes, after sending (process, signal) pairs."""
        try:
            for index, number in signals:
                self.processes[index].send_signal(number)
            return [p.wait(timeout=SECONDS) for p in self.processes]
        finally:
            for p in self.processes:
                p.kill()
                p.wait()

    def text(self):
        return "".join(log.read_text(encoding="utf-8") for log in self.logs)


def lines(run):
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def untimed(value):
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k not in TIMES}
    return [untimed(v) for v in value] if isinstance(value, list) else value


def calls(run):
    store = CallStore(run / "calls.sqlite")
    try:
        return sorted((key, scope, recorded) for key, scope, recorded, _ in store.rows())
    finally:
        store.close()


def assert_equal_runs(found, expected):
    """Everything that workers had a part in is equal; what devices added up in another order, nearly."""
    assert (found / "executions.jsonl").read_bytes() == (expected / "executions.jsonl").read_bytes()
    assert calls(found) == calls(expected)
    one, other = (json.loads((run / "summary.json").read_text()) for run in (found, expected))
    assert untimed(one) == untimed(other)
    assert_equal_metrics(found, expected, steps=STEPS)
    weights, wanted = (load_file(run / "policy" / "policy.safetensors") for run in (found, expected))
    for name, value in wanted.items():
        # A tenth of what Adam moves a parameter by in one step. It divides a gradient by its size, so that
        # one of rounding alone, as of pieces that no spec holds, is a step in any direction: few may differ
        # by one.
        difference = weights[name] - value
        assert np.mean(np.abs(difference) > 2e-5) < 2e-3, name
        np.testing.assert_allclose(difference, 0, atol=2e-4, rtol=0, err_msg=name)
        assert abs(difference.mean()) < 1e-7, name


def assert_equal_metrics(found, expected, *, steps):
    metrics, reference = (json_lines(run / "metrics.jsonl") for run in (found, expected))
    assert [row["step"] for row in metrics] == list(range(steps))
    for row, wanted in zip(metrics, reference[:steps], strict=True):
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            if name == "sampling_gap":  # rounding itself, and the largest of all tokens
                assert max(value, row[name]) < 1e-4
                continue
            near = value if value is None else pytest.approx(value, rel=1e-4, abs=2e-5)
            assert row[name] == near, (row["step"], name)


@pytest.fixture(scope="module")
def straight(policy_folder, child_env, tmp_path_factory):
    """A run in two processes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("straight")
    pair = Pair([*RUN, "--policy", policy_folder, "--out", folder / "run"], child_env, folder)
    assert pair.codes() == [0, 0], pair.text()
    return folder / "run"


@pytest.mark.slow
def test_two_processes_do_what_one_does(straight, policy_folder, tmp_path):
    assert run_main(*RUN, "--policy", policy_folder, "--out", tmp_path / "run") == 0
    assert_equal_runs(straight, tmp_path / "run")
    metrics = json_lines(straight / "metrics.jsonl")
    assert sum(row["counterfactual_executions"] for row in metrics) > 0  # edits too were shared out
    manifest = json.loads((straight / "manifest.json").read_text())
    assert manifest["scale"] == {
        "data": 1, "fsdp": 4, "tensor": 1, "accumulate": 1, "remat": False, "processes": 2,
    }  # fmt: skip
    # Each host asked workers itself, and ends with the calls of both.
    own = CallStore(straight / "calls-p1.sqlite")
    assert sorted(own.replies()) == sorted(key for key, *_ in calls(straight))
    own.close()


@pytest.mark.slow
def test_a_run_on_a_mesh_in_parts_is_the_same_run(straight, policy_folder, tmp_path):
    """All that a flag can change of how a run is computed, on eight devices, for its first steps."""
    flags = ["--steps", 2, "--mesh", "data=2,fsdp=2,tensor=2", "--accumulate", 2, "--remat"]
    flags += ["--checkpoint-dir", tmp_path / "elsewhere"]
    assert run_main(*RUN, *flags, "--policy", policy_folder, "--out", tmp_path / "run") == 0
    assert_equal_metrics(tmp_path / "run", straight, steps=2)
    assert sorted(p.name for p in (tmp_path / "elsewhere").iterdir()) == ["2"]
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_killed_and_preempted_at_random_points_and_resumed_on_fewer_devices(
    straight, policy_folder, child_env, tmp_path, capsys
):
    rng = random.Random(time.time_ns())  # other points each time; what went wrong is in the message
    run, point = tmp_path / "run", rng.random()
    pair = Pair([*RUN, "--policy", policy_folder, "--out", run], child_env, tmp_path)
    pair.wait_for(lambda: lines(run) >= 1)
    time.sleep(0.6 * point)
    codes = pair.codes([(0, signal.SIGKILL), (1, signal.SIGKILL)])
    assert set(codes) <= {-signal.SIGKILL, 0}, (point, pair.text())
    killed_at = lines(run)

    # One process is told to stop; both save the same step and say so, unless it takes too long.
    if killed_at < STEPS:
        pair = Pair(["--resume", run, "--fresh"], child_env, tmp_path)
        before = (run / "metrics.jsonl").stat().st_ino
        pair.wait_for(lambda: (run / "metrics.jsonl").stat().st_ino != before)  # cut back: it has begun
        time.sleep(0.4 * point)
        codes = pair.codes([(rng.randrange(2), signal.SIGTERM)])
        if not (run / "summary.json").exists():  # else it came too late for anything
            assert codes == [75, 75], (point, pair.text())
            assert pair.text().count("continue with --resume ") == 2
    # A mesh of four devices was saved, of two processes; one device of one process goes on.
    assert run_main("--resume", run, "--fresh", "--mesh", "data=1") == 0, (point, capsys.readouterr().err)
    assert_equal_runs(run, straight)


def test_what_fails_in_one_process_ends_all(policy_folder, child_env, tmp_path):
    """The policy's name leads somewhere in the folder of process 0 only."""
    argv = [*RUN, "--policy", policy_folder.name, "--out", tmp_path / "run"]
    pair = Pair(argv, child_env, tmp_path, folders=(policy_folder.parent, tmp_path))
    assert pair.codes() == [2, 2], pair.text()
    first, second = (log.read_text(encoding="utf-8").splitlines()[-1] for log in pair.logs)
    assert second.startswith(f"error: {policy_folder.name}: no such policy folder")
    assert first.startswith(f"error: process 1 of this run failed: {policy_folder.name}: no such policy")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mesh", "fsdp=3"], "mesh data=1,fsdp=3,tensor=1: its sizes are positive and multiply"),
        (["--mesh", "model=8"], "mesh is 'model=8', expected sizes such as data=1,fsdp=8,tensor=1"),
        (["--accumulate", 0], "accumulate must be at least 1"),
        (["--compute-dtype", "float16"], "--compute-dtype is 'float16', expected float32 or bfloat16"),
        (["--num-processes", 2], "--coordinator, --num-processes and --process-id go with --distributed"),
        (["--distributed"], "--distributed: cannot join the run's processes ("),
    ],
)
def test_flags_that_do_not_fit_are_one_line(flags, message, policy_folder, tmp_path, capsys):
    assert run_main(*RUN, *flags, "--policy", policy_folder, "--out", tmp_path / "run") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()

"""A run's folder: one process at a time, and a full disk is one clear line that can be resumed from."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from experiment_helpers import ROOT, child_environment, contents, json_lines, run_main, start

from lemon_jax.backends import Reply
from lemon_jax.cli import main as lemon
from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore
from lemon_jax.train.run_dir import MANIFEST, RunDir

HOLD = """
import sys
from pathlib import Path
from lemon_jax.train.run_dir import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_until_the_first_one_ends(tmp_path):
    run = RunDir.create(tmp_path / "run", {"config": {}})
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(LemonError, match="another process is working on this run"), run.locked():
            pass
        holder.kill()
    with run.locked():  # a kill leaves no lock behind
        assert json.loads((run.path / MANIFEST).read_text()) == {"config": {}}


def test_two_resumes_of_one_run(policy_folder, tmp_path, capsys):
    out = tmp_path / "run"
    flags = ("--workers", "scripted", "--policy", policy_folder, "--steps", 1, "--eval-tasks", 2)
    assert run_main("--bench", "multiarith", *flags, "--out", out) == 0
    with RunDir(out).locked():
        # A lock belongs to an open file: the same process that opens it anew is refused as well.
        assert run_main("--resume", out) == 2
        assert "another process is working on this run" in capsys.readouterr().err
    assert run_main("--resume", out) == 0


def test_a_new_run_that_another_process_took_up_stays(policy_folder, tmp_path, capsys, monkeypatch):
    """Between the manifest and the lock, a second process resumes it."""
    out, create = tmp_path / "run", RunDir.create
    with contextlib.ExitStack() as other:

        def taken_up(path, facts):
            run = create(path, facts)
            other.enter_context(run.locked())
            return run

        monkeypatch.setattr(RunDir, "create", taken_up)
        flags = ("--workers", "scripted", "--policy", policy_folder, "--steps", 1, "--eval-tasks", 2)
        assert run_main("--bench", "multiarith", *flags, "--out", out) == 2
        assert "another process is working on this run" in capsys.readouterr().err
        assert (out / MANIFEST).exists()


def test_an_evaluation_that_is_refused_leaves_the_others_folder_alone(tmp_path, capsys):
    out = tmp_path / "eval"
    argv = [
        "eval",
        "vanilla",
        "--bench",
        "sample",
        "--tasks",
        "2",
        "--workers",
        "scripted",
        "--out",
        str(out),
    ]
    assert lemon(argv) == 0
    for name in ("summary.json", "executions.jsonl", "calls.sqlite"):  # as before the first call
        (out / name).unlink()
    before = contents(out)
    with RunDir(out).locked():
        assert lemon(argv) == 2
    assert "another process is working on this run" in capsys.readouterr().err
    assert contents(out) == before
    assert lemon(argv) == 0


@pytest.mark.parametrize("kib", [40, 100])
def test_a_full_disk(kib, policy_folder, tmp_path):
    """A limit on the size of files stands for it: the calls meet it at 40 KiB, a checkpoint at 100."""
    env = child_environment(tmp_path / "cache", tmp_path / "compiled")
    env.pop("JAX_COMPILATION_CACHE_DIR")
    flags = ("--bench", "multiarith", "--workers", "scripted", "--policy", policy_folder)
    flags += ("--steps", 2, "--eval-tasks", 2, "--out", tmp_path / "run")
    command = [sys.executable, ROOT / "experiments" / "run.py", *flags]
    limited = ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash", *map(str, command)]
    err = subprocess.run(limited, env=env, capture_output=True, text=True, timeout=300, check=False).stderr
    assert err.splitlines()[-1].startswith("error: ")
    assert "make room, then go on: experiments/run.py with --resume" in err.splitlines()[-1]
    assert "Traceback" not in err
    _, err = (resumed := start("run", "--resume", tmp_path / "run", env=env)).communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert len(json_lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_store_that_cannot_grow(tmp_path):
    store = CallStore(tmp_path / "calls.sqlite")
    store._db.execute("pragma max_page_count = 4")
    reply = Reply(text="x" * 20_000, finish="stop", prompt_tokens=1, generated_tokens=1)
    with pytest.raises(LemonError, match=r"calls\.sqlite: database or disk is full; make room"):
        store.put("key", "scope", reply)
    store.close()

"""Checkpoints at gs://: written, listed, kept, restored and skipped as those in a folder are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gcs import FakeGcs

pytest.importorskip("gcsfs", reason='needs the clients of Google Cloud Storage: pip install "lemon-jax[gcs]"')

SCRIPT = Path(__file__).with_name("gcs_script.py")
ADDRESS = "gs://bucket/runs/big/checkpoints"


def run(store: FakeGcs, *argv: object) -> str:
    """What a process prints that has these checkpoints; its clients read their environment once."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, argv)],
        env=plain | {"JAX_PLATFORMS": "cpu"} | store.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout.splitlines()  # the clients may still log at the end of the process
    return done.stdout


def steps(store: FakeGcs) -> list[str]:
    return sorted({name.split("/")[3] for name in store.objects if name.count("/") > 3})


@pytest.mark.slow
def test_checkpoints_in_a_bucket():
    with FakeGcs("bucket") as store:
        run(store, "save", ADDRESS, 1, 2, 3)
        assert steps(store) == ["2", "3"]  # the newest are kept
        run(store, "restored", ADDRESS, 3)

        # Killed while it was written: nothing says that it is whole.
        store.objects.pop("runs/big/checkpoints/3/commit_success.txt")
        assert f"{ADDRESS}/3: a save that did not end" in run(store, "restored", ADDRESS, 2)
        assert steps(store) == ["2"]

        # Damaged: skipped, named, and replaced by the next one.
        run(store, "save", ADDRESS, 5)
        largest = max((n for n in store.objects if "/5/state/" in n), key=lambda n: len(store.objects[n][1]))
        store.put(largest, store.objects[largest][1][:100])
        assert f"{ADDRESS}/5: skipped a damaged checkpoint" in run(store, "restored", ADDRESS, 2)

"""What a manifest says about the workers of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.cli import main
from lemon_jax.train.provenance import engine_facts, worker_facts


def test_a_run_may_go_on_with_another_engine(monkeypatch):
    pool = WorkerPool(worker_config("embedded"))
    monkeypatch.delenv("LEMON_LLAMA_SERVER", raising=False)
    packaged, before = engine_facts(pool), worker_facts(pool)
    monkeypatch.setenv("LEMON_LLAMA_SERVER", "/opt/llama-server")
    assert (packaged, engine_facts(pool)) == ({"engine": "packaged"}, {"engine": "LEMON_LLAMA_SERVER"})
    assert worker_facts(pool) == before  # what a run that goes on is compared by


@pytest.mark.parametrize("program", [None, "/opt/llama-server"])
def test_without_embedded_models_there_is_no_engine(program, tmp_path: Path, monkeypatch):
    if program:
        monkeypatch.setenv("LEMON_LLAMA_SERVER", program)
    argv = ["eval", "cot", "--bench", "sample", "--tasks", "2", "--workers", "scripted"]
    assert main([*argv, "--out", str(tmp_path / "r")]) == 0
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert "engine" not in {*manifest, *manifest["workers"]}

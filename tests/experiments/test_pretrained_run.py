"""The main job and the warm start on a pretrained model."""

from __future__ import annotations

import json

import numpy as np
import pytest
from experiment_helpers import json_lines, run_main, script
from policy_helpers import optax_promotion
from pretrained_policy_helpers import write_hub_model

from lemon_jax.bench import generate
from lemon_jax.model import named_params
from lemon_jax.orchestrator import CHAT_LIMITS, Orchestrator

SMALL = ("--bench", "aqua", "--workers", "scripted", "--tasks-per-step", 1, "--eval-tasks", 2, "--fresh")


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    return write_hub_model(tmp_path_factory.mktemp("hub") / "tiny-qwen2")


def test_a_pretrained_model_is_trained_and_read_again(hub_folder, tmp_path, monkeypatch, capsys):
    """Its specs are constrained to the language: executed and edited, though it knows nothing."""
    monkeypatch.setitem(CHAT_LIMITS, "max_new", 128)  # so that the test is short
    arguments = ("--policy", hub_folder, "--baselines", "vanilla", "--group", 2, "--constrained")
    assert run_main(*SMALL, *arguments, "--steps", 2, "--out", tmp_path / "run") == 0
    assert "accuracy" in capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["method"] for row in summary["eval"]] == ["lemon", "warmstart", "vanilla"]
    rows = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1]
    assert all(np.isfinite(row["loss"]) and row["invalid_rate"] == 0 for row in rows)
    assert sum(row["counterfactual_executions"] for row in rows) > 0

    before, after = Orchestrator.load(hub_folder), Orchestrator.load(tmp_path / "run" / "policy")
    assert after.tokenizer.sha256 == before.tokenizer.sha256
    assert after.prompt_ids("How many?") == before.prompt_ids("How many?")
    assert after.config == before.config
    manifest = json.loads((tmp_path / "run" / "policy" / "manifest.json").read_text())
    assert (manifest["prompt"], manifest["steps"]) == ("chat", 2)
    of_run = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert of_run["chat_template_sha256"] == manifest["chat_template_sha256"] == before.chat.sha256


def test_the_warm_start_begins_from_a_pretrained_model(hub_folder, tmp_path, monkeypatch, capsys):
    sft = script("sft")
    few = generate("number", 4, seed=0)
    monkeypatch.setattr(sft, "SOURCES", {})
    monkeypatch.setattr(sft, "generate", lambda kind, n, seed: few)
    argv = ["--init", str(hub_folder), "--steps", "1", "--batch", "2", "--specs-per-bench", "8"]
    args = sft._arguments([*argv, "--learning-rate", "0.001", "--out", str(tmp_path / "out")])
    with optax_promotion():
        sft._run(args)
    before, after = Orchestrator.load(hub_folder), Orchestrator.load(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["continued_from"] == {"pretrained": "tiny-qwen2"}
    assert manifest["preset"] is None
    assert manifest["final_loss"] == pytest.approx(
        np.log(before.config.vocab_size), rel=0.05
    )  # nats: uniform
    assert after.prompt_ids("How many?") == before.prompt_ids("How many?")
    moved = [
        float(np.abs(np.asarray(new) - np.asarray(named_params(before.decoder)[name])).max())
        for name, new in named_params(after.decoder).items()
    ]
    assert 0 < max(moved) < 0.1

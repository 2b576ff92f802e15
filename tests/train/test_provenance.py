"""What a manifest says about the workers of a run, and a policy's about its training."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.bench import Dataset, Task
from lemon_jax.cli import main
from lemon_jax.train.config import RunConfig
from lemon_jax.train.provenance import (
    engine_facts,
    policy_facts,
    seen_in_training,
    used_otherwise,
    worker_facts,
)


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


PLAIN = RunConfig(bench="aqua")
WITHIN = replace(PLAIN, constrained=True, fixed_choices="role, capacity")


@pytest.mark.parametrize(
    ("trained", "used", "expected"),
    [
        (PLAIN, PLAIN, []),
        (PLAIN, replace(WITHIN, tell_prices=True), []),  # what a training may begin with
        (WITHIN, WITHIN, []),
        (WITHIN, replace(WITHIN, fixed_choices="capacity,role,structure"), []),
        (WITHIN, replace(WITHIN, fixed_choices="capacity"), ["without the choice of role, and this run"]),
        (
            WITHIN,
            PLAIN,
            ['choice of capacity, role, .* give fixed_choices = "capacity,role" and constrained'],
        ),
        (replace(PLAIN, tell_prices=True), replace(PLAIN, tell_prices=True), []),
        (replace(PLAIN, tell_prices=True), PLAIN, ["with prices told, .* give --tell-prices"]),
        (
            replace(WITHIN, tell_prices=True),
            PLAIN,
            ["with prices told", "without the choice of capacity, role"],
        ),
    ],
)
def test_a_policy_that_is_used_otherwise_than_trained_is_told(trained, used, expected):
    facts = json.loads(json.dumps(policy_facts(trained)))
    found = used_otherwise(facts, used)
    assert len(found) == len(expected)
    for text, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, text)
        assert "\n" not in text


@pytest.mark.parametrize("facts", [{}, {"tell_prices": "yes"}, {"fixed_choices": "capacity"}])
def test_a_manifest_that_does_not_say_is_no_reason_to_warn(facts):
    assert used_otherwise(facts, PLAIN) == []


def dataset(protocol, train, test):
    tasks = [Task(id=q, bench="svamp", question=q, gold="1", kind="number") for q in (*train, *test)]
    both = {"train": tuple(tasks[: len(train)]), "test": tuple(tasks[len(train) :])}
    return Dataset(bench="svamp", source="official", sha256="", faults=(), protocol=protocol, **both)


FULL = dataset("full", "abc", "de")
WHOLE = {"svamp": dataset("lemon", "", "abcde")}
TRAINED = {"bench": "multiarith,svamp", "protocol": "full"}
BEGAN = {"bench": "aqua", "protocol": "full"}


@pytest.mark.parametrize(
    ("facts", "tested", "seen"),
    [
        (TRAINED, WHOLE, 3),
        ({"bench": "svamp"}, WHOLE, 3),  # of an older version, which knew one protocol
        ({"data": {"svamp": {"split": "train"}}}, WHOLE, 3),  # a warm start
        # What it was continued from, and what that was.
        (BEGAN | {"continued_from": TRAINED}, WHOLE, 3),
        (BEGAN | {"continued_from": BEGAN | {"continued_from": {"data": {"svamp": {}}}}}, WHOLE, 3),
        (TRAINED | {"continued_from": TRAINED}, WHOLE, 3),
        (BEGAN | {"continued_from": {"pretrained": "qwen"}}, WHOLE, 0),
        (BEGAN | {"continued_from": None}, WHOLE, 0),
        (TRAINED, {"svamp": FULL}, 0),
        ({"bench": "aqua", "protocol": "full"}, WHOLE, 0),
        (TRAINED, {"svamp": dataset("gdesigner", "ab", "de")}, 0),
        (policy_facts(replace(PLAIN, protocol="gdesigner")), WHOLE, 0),  # says no bench
        ({"bench": "svamp", "protocol": "of tomorrow"}, WHOLE, 0),
        ({}, WHOLE, 0),
    ],
)
def test_a_policy_that_is_tested_on_what_it_was_trained_on_is_told(facts, tested, seen):
    loaded = []

    def load(bench, protocol):
        loaded.append((bench, protocol))
        return FULL

    found = seen_in_training(facts, tested, load)
    assert len(found) == (seen > 0)
    if seen:
        assert loaded == [("svamp", "full")]
        assert found[0].startswith(f"{seen} of the 5 test tasks of svamp are train tasks of the full prot")

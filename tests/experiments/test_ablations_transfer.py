"""The transfer experiment from end to end, on made-up data, as small as it goes."""

from __future__ import annotations

import importlib.util
import json
import sys

import jax
import pytest
from experiment_helpers import ROOT

PATH = ROOT / "experiments" / "ablations" / "transfer.py"
sys.path.insert(0, str(PATH.parent))  # as Python does for a script


@pytest.fixture
def transfer():
    spec = importlib.util.spec_from_file_location("experiments_ablations_transfer", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_arm_is_trained_and_tested_everywhere(transfer, policy_folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    flags = ["--policy", policy_folder, "--out", out, "--steps", 1, "--seeds", 1, "--held-out", 1]
    monkeypatch.setattr(sys, "argv", ["transfer.py", *map(str, flags)])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert transfer.main() == 0
    printed = capsys.readouterr().out
    assert "no language model answered" in printed
    found = json.loads((out / "transfer.json").read_text())
    assert found["simulated"] is True
    for title, arms, columns in (("benches", transfer.BENCH_ARMS, 5), ("prices", transfer.PRICE_ARMS, 5)):
        assert list(found["regret"][title]) == list(arms)
        for row in found["regret"][title].values():
            assert len(row) == columns
            assert all(len(values) == 1 and values[0] > -0.1 for values in row.values())
    # The runs trained on what their arms say.
    metrics = {path.parent.name for path in out.rglob("metrics.jsonl")}
    trained = [
        name for arms in (transfer.BENCH_ARMS, transfer.PRICE_ARMS) for name, c in arms.items() if c.steps
    ]
    assert len(metrics) == len(trained) == 5


def test_an_interval_over_seeds(transfer):
    assert transfer.interval([0.1, 0.2, 0.3]) == "0.200 ± 0.248"
    assert transfer.interval([0.1]) == "0.100"

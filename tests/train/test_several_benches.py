"""One policy on the tasks of several benches: their order, and a training that is resumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from policy_helpers import CHOICES, TASKS
from test_trainer import CONFIG, _train

from lemon_jax.bench import Dataset
from lemon_jax.errors import LemonError
from lemon_jax.train import provenance
from lemon_jax.train.config import RunConfig
from lemon_jax.train.presets import check_counts
from lemon_jax.train.rollouts import tasks_of_step

MIXED = (*(replace(t, bench="multiarith") for t in TASKS), *(replace(t, bench="aqua") for t in CHOICES))
BOTH = replace(CONFIG, bench="multiarith,aqua", price_tables=((1.0, 3.0, 10.0), (1.0, 1.0, 1.0)))


def flat(config, steps):
    return [t for s in range(steps) for t in tasks_of_step(MIXED, config, s)]


def test_benches_come_in_turn_however_many_tasks_they_have():
    config = replace(BOTH, tasks_per_step=3, price_tables=())
    tasks = flat(config, 16)
    for end in range(len(tasks)):
        counts = Counter(t.bench for t in tasks[:end])
        assert abs(counts["multiarith"] - counts["aqua"]) <= 1
    # Epochs of each bench: 24 positions each are three of eight tasks, and six of four.
    for bench, size in (("multiarith", 8), ("aqua", 4)):
        ids = [t.id for t in tasks if t.bench == bench]
        for start in range(0, 24, size):
            assert len({*ids[start : start + size]}) == size
    assert len({tuple(t.bench for t in tasks[i : i + 2]) for i in range(0, 48, 2)}) == 2  # in either order
    assert flat(replace(config, seed=1), 16) != tasks


def test_one_bench_has_the_order_that_it_always_had():
    """Frozen, for the runs that are published."""
    config = RunConfig(bench="multiarith", tasks_per_step=4, seed=0)
    ids = [t.id.rpartition("-")[2] for s in range(2) for t in tasks_of_step(TASKS, config, s)]
    assert ids == ["0", "6", "5", "7", "2", "3", "1", "4"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_mixed_training_at_several_prices_resumes_exactly(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("test_trainer.TASKS", MIXED)
    whole, _ = _train(policy, tmp_path / "whole", config=BOTH)
    _train(policy, tmp_path / "cut", config=BOTH, stop_after=1)
    resumed, done = _train(policy, tmp_path / "cut", config=BOTH, resume=True)
    assert done == 1
    assert resumed == whole
    for name in ("metrics.jsonl", "executions.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def dataset(bench, source="official", faults=()):
    tasks = tuple(replace(t, bench=bench) for t in TASKS)
    return Dataset(
        bench=bench, source=source, train=tasks, test=tasks[:3], sha256=bench.upper(), faults=faults
    )


def test_the_manifest_knows_all_data():
    svamp, aqua = dataset("svamp", faults=("odd",)), dataset("aqua", "sample")
    assert provenance.data_facts([svamp]) == {"source": "official", "sha256": "SVAMP", "faults": ["odd"]}
    facts = provenance.data_facts([svamp, aqua])
    assert facts["source"] == "sample"  # one that is made up is enough
    assert facts["faults"] == ["odd"]
    assert facts["benches"]["aqua"] == {"source": "sample", "sha256": "AQUA", "faults": []}
    assert provenance.data_facts([svamp, dataset("gsm8k")])["sha256"] != facts["sha256"]
    assert provenance.tested([svamp, aqua])["n"] == 6
    assert provenance.tested([svamp]) == {"source": "official", "split": "test", "n": 3, "sha256": "SVAMP"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (RunConfig(bench="aqua,svamp,aqua"), "bench is 'aqua,svamp,aqua', expected each bench once"),
        (RunConfig(bench="aqua", eval_bench="svamp,svamp"), "eval-bench is 'svamp,svamp'"),
        (RunConfig(bench="aqua,svamp", best_fixed=True), "best-fixed searches on one bench"),
    ],
)
def test_what_no_run_can_have(config, expected):
    with pytest.raises(LemonError, match=expected):
        check_counts(config)


def test_what_is_trained_and_tested_on():
    config = RunConfig(bench="multiarith, svamp", eval_bench="aqua")
    assert (config.trained, config.tested) == (("multiarith", "svamp"), ("aqua",))
    assert RunConfig(bench="gsm8k").tested == ("gsm8k",)

"""Runs without a choice: an untrained policy writes, and is edited, within the smaller language."""

import json
from dataclasses import replace

import jax
import pytest
from grammar_helpers import fixes
from policy_helpers import TASKS, untrained
from test_trainer import _train

from lemon_jax.runtime.tools import ProgramResult
from lemon_jax.spec import CHOICE_OF, CHOICES, FAMILIES, OPT_IN_FAMILIES, parse
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.run_dir import EXECUTIONS, METRICS

CONFIG = RunConfig(
    bench="multiarith",
    workers="scripted",
    constrained=True,
    steps=2,
    tasks_per_step=2,
    edits_per_step=6,
    edits_per_rollout=2,
    edit_families=",".join((*FAMILIES, *OPT_IN_FAMILIES)),
    checkpoint_every=1,
    update=UpdateConfig(learning_rate=2e-3, temperature=1.0),
)


@pytest.fixture(scope="module")
def policy(tokenizer):
    return untrained(tokenizer, max_new=200, layers=1)


@pytest.mark.parametrize("fixed", [*((name,) for name in CHOICES), CHOICES], ids="-".join)
def test_all_specs_of_an_untrained_policy_are_valid_and_without_the_choice(policy, fixed):
    texts = [t.prompt() for t in TASKS[:4]]
    within = policy.within(fixed)
    sampled = within.write(texts, jax.random.key(1), group=8, constrained=True)
    for rollout in [*sampled, *within.write_greedy(texts, constrained=True)]:
        assert rollout.valid
        assert all(fixes(rollout.parsed.spec, name) for name in fixed)
    assert len({r.text for r in sampled}) > 16
    # The policy that it came from still writes the whole language.
    free = policy.write(texts, jax.random.key(1), group=8, constrained=True)
    assert not all(fixes(r.parsed.spec, name) for r in free for name in fixed)


@pytest.fixture(autouse=True)
def programs(monkeypatch):
    """Programs are not run: an untrained policy asks for many, and each is a process."""

    async def value(program, *, allow_unsandboxed):
        return ProgramResult(status="ok", value="7")

    monkeypatch.setattr("lemon_jax.runtime.executor.run_program", value)


def _rows(folder):
    """What a run logged: its executions and its metrics."""
    texts = [(folder / name).read_text() for name in (EXECUTIONS, METRICS)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def test_a_run_stays_within_and_edits_only_what_it_may_choose(policy, tmp_path):
    config = replace(CONFIG, tasks_per_step=1, fixed_choices="capacity", contrast_samples=2, noise_gate=1.0)
    digest, _ = _train(policy, tmp_path / "run", config=config)
    rows, metrics = _rows(tmp_path / "run")
    assert all(fixes(parse(row["spec"]).spec, "capacity") for row in rows)
    assert all(row["valid"] for row in rows)
    families = {row["edit"]["family"] for row in rows if "edit" in row}
    assert families
    assert {CHOICE_OF[family] for family in families} <= {"role", "structure"}
    assert [m["invalid_rate"] for m in metrics] == [0, 0]
    assert all(m["sampling_gap"] < 1e-5 for m in metrics)
    assert not any("capacity" in name for m in metrics for name in m)
    assert all(m["frac_contrast_gated"] >= 0 for m in metrics)
    # Stopped after a step and taken up again, it is the same run.
    _train(policy, tmp_path / "stopped", config=config, stop_after=1)
    assert _train(policy, tmp_path / "stopped", config=config, resume=True) == (digest, 1)
    assert _rows(tmp_path / "stopped") == [rows, metrics]


def test_a_run_may_have_nothing_left_to_edit(policy, tmp_path):
    config = replace(CONFIG, steps=1, fixed_choices="capacity,role,structure")
    _train(policy, tmp_path / "run", config=config)
    rows, metrics = _rows(tmp_path / "run")
    assert all(fixes(parse(row["spec"]).spec, name) for row in rows for name in CHOICES)
    assert metrics[0]["counterfactual_executions"] == 0
    assert _train(policy, tmp_path / "run", config=config, resume=True)[1] == 1
    assert _rows(tmp_path / "run") == [rows, metrics]

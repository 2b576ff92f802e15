"""The fit of the simulated workers: it finds what made the calls, and reads what a run writes."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from experiment_helpers import run_main, script

from lemon_jax.backends.response_model import EFFECTS, load_parameters, p_right, situation
from lemon_jax.bench import load
from lemon_jax.errors import LemonError

calibrate = script("calibrate")
ROLES = ("math_solver", "equation_writer", "answerer")
LEVELS = ("small", "medium")


def made_up(parameters, tasks, rng):
    """Calls that the response model itself answers, as `Reading` gives them."""
    calls = []
    for task in range(tasks):
        hard = parameters.spread * rng.normal()
        for _ in range(12):
            kinds = tuple(rng.choice(["right", "wrong", "plan"], size=rng.integers(0, 4)))
            place = situation(kinds, (1,) * len(kinds), relevant=bool(rng.random() < 0.5))
            role, level = rng.choice(ROLES), rng.choice(LEVELS)
            p = p_right(parameters, level, role, place, difficulty=hard, options=0)
            calls.append(
                calibrate.Observed(
                    task=str(task),
                    bench="made up",
                    role=role,
                    level=level,
                    place=place,
                    guess=0.0,
                    right=bool(rng.random() < p),
                    tokens=10,
                )
            )
    return calls


def test_the_fit_finds_the_parameters_that_made_the_calls():
    parameters = load_parameters()
    calls = made_up(parameters, 300, np.random.default_rng(0))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fit = calibrate.Fit(calls)
        held = calibrate.Fit(calls, by_hand={"chain": 0.7})
    found = dict(zip(EFFECTS, fit.at["effect"], strict=True))
    for name in ("relevant_duty", "right_input", "wrong_input", "plan", "context"):
        assert found[name] == pytest.approx(parameters.effects[name], abs=0.35), name
    assert found["chain"] == pytest.approx(0.0, abs=1e-3)  # no call has one: the prior's value
    assert fit.spread == pytest.approx(parameters.spread, abs=0.3)
    base = fit.ability("answerer", "small")
    for role in ROLES:
        for level in LEVELS:
            truth = parameters.levels[level].ability
            gap = truth[role] - parameters.levels["small"].ability["answerer"]
            assert fit.ability(role, level) - base == pytest.approx(gap, abs=0.9)
    assert held.at["effect"][EFFECTS.index("chain")] == 0.7


def test_from_a_run_to_a_parameter_file(policy_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "FOLDS", 2)
    run, out = tmp_path / "run", tmp_path / "p.toml"
    flags = ("--policy", policy_folder, "--steps", 0, "--eval-tasks", 8, "--baselines", "vanilla,chain,sc")
    assert run_main("--bench", "multiarith", "--workers", "simulated", *flags, "--out", run) == 0
    capsys.readouterr()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert calibrate.main([str(run), "--set", "plan=0.25", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "response model" in printed
    parameters = load_parameters(out)
    assert parameters.effects["plan"] == 0.25
    assert parameters.tokens_per_word == pytest.approx(load_parameters().tokens_per_word, rel=0.02)
    shipped = load_parameters().levels["medium"].tokens
    assert parameters.levels["medium"].tokens["answerer"] == pytest.approx(shipped["answerer"], abs=2)


AGENT = {"id": "a1", "answer": "7", "generated_tokens": 30, "prompt_tokens": 40, "calls": 3}
SPEC = 'version: 1\nagents:\n  - id: a1\n    name: x\n    role: answerer\n    duty: "Answer."\n'
SPEC += "    capacity: medium\n    depends_on: []\noutput: a1\n"


@pytest.fixture
def run_of(tmp_path):
    def write(name, rows, *, samples=1, **config):
        folder = tmp_path / name
        folder.mkdir()
        settings = {level: {"samples": samples} for level in ("small", "medium", "large")}
        manifest = {"config": {"bench": "multiarith"} | config, "workers": {"settings": settings}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        lines = [json.dumps(row | {"spec": SPEC, "infra_failed": False}, ensure_ascii=False) for row in rows]
        (folder / "executions.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return folder

    return write


def test_runs_tested_on_other_benches_with_any_text_and_samples(run_of):
    multiarith, aqua = (load(bench).test[0].id for bench in ("multiarith", "aqua"))  # of the sample
    rows = [
        {"task": multiarith, "phase": "train", "agents": [AGENT | {"answer": "7\u2028\u0085"}]},
        {"task": aqua, "phase": "eval", "bench": "aqua", "agents": [AGENT]},
    ]
    read = calibrate.Reading()
    read.run(run_of("a", rows, samples=3, eval_bench="aqua"), None)
    assert [call.bench for call in read.calls()] == [load(b).test[0].bench for b in ("multiarith", "aqua")]
    assert read.tokens["answerer", "medium"] == [10, 10]  # of one sample
    with pytest.raises(LemonError, match="have 1, 1, 1 samples, those of the runs before 3, 3, 3; calibrate"):
        read.run(run_of("b", rows[:1]), None)


def test_calls_of_a_bench_that_the_fit_has_none_of_are_predicted():
    calls = made_up(load_parameters(), 20, np.random.default_rng(0))
    other = [replace(call, bench="other") for call in calls[:5]]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fit = calibrate.Fit(calls)
        np.testing.assert_allclose(fit.predict(other), fit.predict(calls[:5]))  # the mean of one bench


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["none"], "none: not a run folder"),
        (["none", "--set", "magic=1"], "expected one of relevant_duty"),
        (["none", "--set", "plan=much"], "expected EFFECT=VALUE"),
    ],
)
def test_faults_in_one_line(flags, message, capsys):
    assert calibrate.main(flags) == 2
    assert message in capsys.readouterr().err

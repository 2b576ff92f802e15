"""The ablation's arms, and what its table makes of curves."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "ablations"
sys.path.insert(0, str(FOLDER))

import arms  # noqa: E402
import lab  # noqa: E402
import landscape  # noqa: E402
import simulated  # noqa: E402
import table  # noqa: E402

from lemon_jax.train.presets import check_counts  # noqa: E402
from lemon_jax.train.run_dir import METRICS, RunDir  # noqa: E402


def curve(values, *, arm="full", seed=0, tokens=100, extra=10):
    points = [
        {"step": i, "worker_tokens": i * tokens, "counterfactual_tokens": i * extra, "value": value}
        for i, value in enumerate(values)
    ]
    return {"arm": arm, "seed": seed, "optimum": 2.0, "points": points}


@pytest.mark.parametrize("arm", arms.ARMS)
def test_every_arm_is_a_run_and_another_one_than_the_full_method(arm):
    config = arms.config_of(arm, lab.BASE, seed=3)
    check_counts(config)
    assert config.seed == 3
    if arm not in ("full", "no-sft"):  # without SFT it is the policy that differs
        assert config != arms.config_of("full", lab.BASE, seed=3)


def test_changes_of_the_base_reach_the_update_too():
    config = lab.base_config("gsm8k", 7, ["group=8", "update.tau=2", "edit_sampling=uniform"])
    assert (config.bench, config.steps, config.group) == ("gsm8k", 7, 8)
    assert (config.update.tau, config.edit_sampling) == (2, "uniform")


def test_arms_without_edits_need_nothing_that_the_base_sets_for_them():
    base = lab.base_config("gsm8k", 7, ["contrast_samples=2", "noise_gate=2", "update.counterfactual=2"])
    for arm in arms.ARMS:
        check_counts(arms.config_of(arm, base, seed=0))
    assert arms.config_of("no-counterfactuals", base, seed=0).contrast_samples == 1
    assert arms.config_of("predicted-alone", base, seed=0).update.counterfactual == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "noise_gate=2"], "full: noise-gate is 2.0 with one sample of a contrast"),
        (["--arms", "full,uniform-edits", "--set", "edits_per_step=0"], "uniform-edits: edit-sampling witho"),
        (["--set", "gruop=2", "--set", "update.tao=1"], "unknown key gruop, did you mean group; unknown key"),
        (["--set", "group=many"], "group is 'many', expected int"),
        (["--policy", "nowhere"], "cannot read the policy's manifest"),
    ],
)
def test_an_arm_that_is_no_run_is_refused(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulated.py", "--out", str(tmp_path / "out"), *flags])
    assert simulated.main() == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_local_folder_does_not_hide_the_shipped_policy_of_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "small").mkdir()  # the working folder
    monkeypatch.setattr(sys, "argv", ["simulated.py", "--out", "out", "--seeds", "0", "--processes", "0"])
    assert simulated.main() == 0
    assert capsys.readouterr().out == "0 runs to do\n"
    shipped = json.loads((FOLDER.parents[1] / "checkpoints" / "small" / "manifest.json").read_text())
    setting = json.loads((tmp_path / "out" / "setting.json").read_text())
    assert setting["policy_sha256"] == shipped["params_sha256"]


def test_a_point_has_all_that_was_spent_before(tmp_path):
    run = RunDir(tmp_path)
    config, policy = SimpleNamespace(constrained=True), SimpleNamespace(with_decoder=lambda _: None)
    trainer = SimpleNamespace(run=run, config=config, policy=policy, decoder=lambda: None, steps_done=0)
    watch = lab.Watch(SimpleNamespace(every=2, value=lambda *_: (1.5, 0.25)), trainer)
    watch.look(0)
    for step in range(5):
        run.append(METRICS, [{"step": step, "worker_tokens": 10**step, "counterfactual_tokens": step}])
        trainer.steps_done += 1
        watch.advance(1, reward=0.0)
    common = {"value": 1.5, "invalid": 0.25}
    assert watch.points == [
        {"step": 0, "worker_tokens": 0, "counterfactual_tokens": 0} | common,
        {"step": 2, "worker_tokens": 11, "counterfactual_tokens": 1} | common,
        {"step": 4, "worker_tokens": 1111, "counterfactual_tokens": 6} | common,
    ]
    assert [list(point) for point in watch.points] == [
        ["step", "worker_tokens", "counterfactual_tokens", "value", "invalid"]
    ] * 3


def test_tokens_until_the_value_lasts():
    # 95 % of 2 is 1.9. The first time it does not last, the second time it does.
    found = table.tokens_to(curve([1.0, 1.9, 1.0, 1.0, 1.9, 1.9, 1.8, 2.0, 2.0, 1.0]))
    assert found == 400
    assert table.tokens_to(curve([1.0, 1.8, 1.89])) == math.inf
    assert table.tokens_to(curve([1.9] * 5)) == 0
    assert table.tokens_to(curve([1.0, 1.9, 1.9, 1.9, 2.0])) == math.inf  # the run ends before it has lasted
    assert table.tokens_to(curve([1.9])) == math.inf


def test_mean_regret_is_the_area_over_the_tokens():
    assert table.average(curve([1.0, 2.0, 2.0])) == pytest.approx(0.125)  # (0.5 + 0) / 2 over half of the run
    uneven = curve([1.0, 1.0, 2.0])
    uneven["points"][2]["worker_tokens"] = 400
    assert table.average(uneven) == pytest.approx((100 * 0.5 + 300 * 0.25) / 400)


def slow(n, **facts):
    """A curve that comes there at the n-th valuation and stays."""
    return curve([1.0] * n + [2.0] * 6, **facts)


def test_ratios_are_paired_by_seed():
    mine = {seed: slow(n, seed=seed) for seed, n in enumerate((1, 2, 3))}
    theirs = {seed: slow(n, seed=seed) for seed, n in enumerate((2, 8))}
    ratio = table.paired(mine, theirs)
    assert (ratio.n, ratio.sign) == (2, "")
    assert ratio.mean == pytest.approx(math.sqrt(0.5 * 0.25))
    assert ratio.low < ratio.mean < ratio.high


def test_a_run_that_never_came_there_bounds_the_ratio():
    never = curve([1.0] * 9)  # 800 tokens
    above = table.paired({0: slow(1), 1: never}, {0: slow(2), 1: slow(2)})
    assert (above.n, above.sign) == (2, "≥")
    assert above.mean == pytest.approx(math.sqrt(0.5 * 4))
    assert str(above).startswith("≥1.41 [")
    below = table.paired({0: slow(2)}, {0: never})
    assert str(below) == "≤0.25 n 1"
    both = table.paired({0: slow(1), 1: never, 2: slow(3)}, {0: never, 1: slow(2), 2: slow(3)})
    assert str(both) == "1.00 n 1"
    assert table.paired({0: never}, {0: never}) is None


def test_the_table_of_a_folder(tmp_path):
    for arm in ("full", "no-counterfactuals"):
        for seed in (0, 1):
            values = [1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]
            extra = 10 if arm == "full" else 0
            text = json.dumps(curve(values, arm=arm, seed=seed, extra=extra))
            (tmp_path / f"{arm}-s{seed}.json").write_text(text)
    done = subprocess.run(
        [sys.executable, FOLDER / "table.py", tmp_path], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["full", "no-counterfactuals"]
    full = [cell.strip() for cell in lines[2].split("|")]
    assert len(lines) == 4  # one version of the code: no note
    assert full[2:7] == ["100.0% ± 0.0%", "8.3% ± 0.0%", "200 (2 of 2)", "1.00 [1.00, 1.00] n 2", "11.1%"]


def test_the_table_at_another_share(tmp_path, monkeypatch, capsys):
    for arm, values in (("full", [1.0] + [1.8] * 6), ("no-counterfactuals", [1.0, 1.0] + [1.8] * 6)):
        (tmp_path / f"{arm}-s0.json").write_text(json.dumps(curve(values, arm=arm)))
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path), "--share", "0.85"])
    assert table.main() == 0
    title, _, full, grpo = capsys.readouterr().out.splitlines()
    assert "tokens to 85%" in title
    assert "100 (1 of 1)" in full
    assert "0.50 n 1" in full
    assert "200 (1 of 1)" in grpo
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path)])
    table.main()
    assert capsys.readouterr().out.count("never") == 2


def test_pairs_until_two_specs_are_told_apart():
    better, worse = (
        landscape.Worth(label=name, rewards=np.array([1.0, 0.6]) - less, right=np.array([0.9, 0.5]))
        for name, less in (("better", 0.0), ("worse", 0.1))
    )
    pairs = worse.pairs(better)
    # The mean difference of so many pairs, half of them of each task, lies two standard errors from 0.
    rng, half = np.random.default_rng(0), round(pairs / 2)
    assert pairs == pytest.approx(4 * 2 * (0.09 + 0.25) / 2 / 0.1**2)
    wins = rng.random((2000, 2, 2, half)) < np.array([0.9, 0.5])[:, None]
    gaps = np.diff(wins.mean(axis=(2, 3)), axis=1)  # of two specs that are right as often
    assert abs(gaps.mean()) < 0.01
    assert 2 * gaps.std() == pytest.approx(0.1, rel=0.05)
    assert better.pairs(better) == math.inf


def test_one_agent_specs_are_ranked_by_their_expected_reward():
    opened = lab.open_lab(lab.base_config("multiarith", 1), "small", held_out=2, every=1, data=None)
    ranked = landscape.worths(opened)
    assert len({worth.label for worth in ranked}) == len(ranked) == len(list(landscape.single_specs()))
    assert all(a.rewards.mean() >= b.rewards.mean() for a, b in itertools.pairwise(ranked))
    assert ranked[0].rewards.mean() <= opened.optimum() + 1e-9  # the search knows these specs too
    shown = landscape.lines("multiarith", opened, 2)
    assert len(shown) == 7
    assert shown[4].startswith(f"| {ranked[0].label}")
    assert shown[5].startswith(f"| {ranked[1].label}")

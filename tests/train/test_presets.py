from dataclasses import replace
from pathlib import Path

import pytest

from lemon_jax.errors import LemonError
from lemon_jax.train.config import RunConfig
from lemon_jax.train.presets import check_counts, load_preset, without_counterfactuals
from lemon_jax.train.rewards import RewardConfig

TABLES = ((1.0, 1.0, 1.0), (1.0, 3.0, 10.0))
SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "presets"


@pytest.fixture
def preset(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("bench", ["aqua", "multiarith"])
@pytest.mark.parametrize("name", ["default", "full", "paper"])
def test_the_shipped_presets(name, bench):
    config = load_preset(SHIPPED / f"{name}.toml", bench)
    check_counts(config)
    assert (config.bench, config.preset, config.group) == (bench, name, 4)
    assert config.reward == load_preset(SHIPPED / "default.toml", bench).reward
    assert RunConfig.from_dict(config.to_dict()) == config


def test_a_bench_table_overrides_for_that_bench_alone(preset):
    path = preset(
        "steps = 7\n[update]\nkl = 1\n[reward]\ntokens = 'plain'\n"
        "[bench.aqua]\nsteps = 3\n[bench.aqua.update]\ntau = 2.5"
    )
    aqua, other = load_preset(path, "aqua"), load_preset(path, "multiarith")
    assert (aqua.steps, aqua.update.tau, aqua.update.kl) == (3, 2.5, 1.0)
    assert (other.steps, other.update.tau, other.reward.tokens) == (
        7,
        RunConfig(bench="x").update.tau,
        "plain",
    )
    assert isinstance(aqua.update.kl, float)  # TOML's 1 is as good as 1.0
    assert aqua.preset == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", "unknown key stepz, did you mean steps"),
        ("[update]\nlearningrate = 1.0", "unknown key update.learningrate, did you mean learning_rate"),
        ("[bench.aqua]\ngruop = 3", "unknown key bench.aqua.gruop, did you mean group"),
        ("[bench.multiarith]\nqqq = 3", "unknown key bench.multiarith.qqq, expected one of"),
        ("[bench.aquaa]\nsteps = 3", "bench.aquaa"),
        ("bench = 'aqua'", "bench must hold tables"),
        ("preset = 'x'", "unknown key preset"),
        ("steps = 3.0", "steps is 3.0, expected int"),
        ("steps = true", "steps is True, expected int"),
        ("steps = '3'", "steps is '3', expected int"),
        ("update = 3", "update must be a table"),
        ("[update]\nkl = 'high'", "update.kl is 'high', expected float"),
        ("[update]\nnormalise_spans = 1", "update.normalise_spans is 1, expected bool"),
        ("[reward]\ntokens = 'words'", "reward.tokens is 'words', expected one of cost, plain"),
        ("workers = 3", "workers is 3, expected str"),
        ("steps = ", "not a TOML file"),
    ],
)
def test_a_fault_is_named_by_file_and_key(preset, text, message):
    path = preset(text)
    with pytest.raises(LemonError) as fault:
        load_preset(path, "aqua")
    assert str(fault.value).startswith(f"{path}: ")
    assert message in str(fault.value)
    assert "\n" not in str(fault.value).strip() or "TOML" in message


def test_all_faults_at_once(preset):
    with pytest.raises(LemonError, match=r"stepz.*group is 'four'.*update\.kll"):
        load_preset(preset("stepz = 1\ngroup = 'four'\n[update]\nkll = 1.0"), "aqua")


def test_no_such_preset_lists_those_there_are():
    with pytest.raises(LemonError, match=r"nope\.toml: no such preset; there are default, full, paper"):
        load_preset(SHIPPED / "nope.toml", "aqua")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edit_families": "lower_capacity,swap_agents"}, "edit-families is 'lower_capacity,swap_agents'"),
        ({"edit_families": "lower_capacity, lower_capacity"}, "each once"),
        ({"steps": -1}, "steps is -1, it must be at least 0"),
        ({"tasks_per_step": 0}, "tasks-per-step is 0, it must be at least 1"),
        ({"group": 1}, "group is 1, it must be at least 2"),
        ({"eval_tasks": 0}, "eval-tasks is 0, it must be at least 1"),
        ({"checkpoint_every": 0}, "checkpoint-every is 0"),
        ({"edits_per_step": -1}, "edits-per-step is -1, it must be at least 0"),
        (
            {"tasks_per_step": 1, "group": 2, "edits_per_step": 3},
            "edits-per-step is 3, a step has only 2 specs",
        ),
        ({"group": 0, "eval_tasks": 0}, "group is 0.*eval-tasks is 0"),
        (
            {"baselines": "vanilla,sot"},
            "baseline 'sot' is unknown, did you mean cot; give all, none, or some",
        ),
        ({"search_candidates": 1}, "search-candidates is 1, it must be at least 2"),
        ({"search_tokens": -1, "best_fixed": True}, "search-tokens is -1, it must be at least 0"),
        ({"search_tokens": 500}, "search-tokens is 500 without best-fixed"),
        ({"best_fixed": True, "steps": 0}, "best-fixed searches with .* steps is 0; give search-tokens"),
    ],
)
def test_numbers_that_no_run_can_have(changes, message):
    with pytest.raises(LemonError, match=message):
        check_counts(replace(RunConfig(bench="aqua"), **changes))


def test_the_least_that_can_run():
    check_counts(replace(RunConfig(bench="aqua"), steps=0, tasks_per_step=1, group=2, edits_per_step=0))


@pytest.mark.parametrize(
    ("changes", "update", "message"),
    [
        (
            {"edits_per_step": 0, "contrast_samples": 2, "noise_gate": 1.0, "edits_per_rollout": 2},
            {},
            "edits-per-rollout, contrast-samples, noise-gate without edits-per-step have no effect",
        ),
        (
            {"edits_per_step": 0, "edit_families": "lower_capacity"},
            {},
            "edit-families without edits-per-step",
        ),
        # Predicted edits are of any family, and are not executed.
        (
            {"edits_per_step": 0, "predicted_edits": 4, "edit_sampling": "uniform"},
            {},
            "edit-sampling without edits-per-step has no effect; give both or neither",
        ),
        ({"edits_per_step": 0, "common_random_numbers": False}, {}, "common-random-numbers without"),
        (
            {"edits_per_step": 0},
            {"tau": 2.0, "counterfactual": 1.0},
            "update.counterfactual, update.tau without edits-per-step or predicted-edits have no effect",
        ),
        (
            {},
            {"counterfactual_form": "gradient", "tau": 2.0},
            "update.tau without counterfactual_form = pref",
        ),
        (
            {},
            {"policy_loss": "truncated", "clip_high": 0.3},
            "update.clip_high without policy_loss = clipped",
        ),
        ({}, {"truncate": 3.0}, "update.truncate without policy_loss = truncated has no effect"),
        # Each ratio is 1 then.
        (
            {"updates_per_step": 1},
            {"clip_low": 0.1, "clip_high": 0.3},
            "update.clip_low, update.clip_high without updates-per-step = 2 or overlap have no effect",
        ),
        (
            {"updates_per_step": 1},
            {"policy_loss": "truncated", "truncate": 3.0},
            "update.truncate without updates-per-step = 2 or overlap has no effect",
        ),
        ({}, {"counterfactual": 0.0}, "update.counterfactual is 0, and nothing would learn from the edits"),
        ({"edits_per_step": 0, "predicted_edits": 4}, {"tau": 0.0}, "update.tau is 0, and nothing would"),
        ({}, {"kl": 0.0, "kl_estimator": "k1"}, "update.kl_estimator without kl has no effect"),
        (
            {"reward": RewardConfig(efficiency=0.0, half_cost=100.0, tokens="plain")},
            {},
            "reward.half_cost, reward.tokens without reward.efficiency have no effect",
        ),
        (
            {"reward": RewardConfig(tokens="plain"), "price_tables": TABLES, "tell_prices": True},
            {},
            "price-tables without reward.tokens = cost and reward.efficiency has no effect",
        ),
        ({"reward": RewardConfig(efficiency=0.0), "price_tables": TABLES}, {}, "price-tables without rew"),
        ({"search_candidates": 8}, {}, "search-candidates without best-fixed has no effect"),
        ({"lora_alpha": 8.0, "lora_targets": "q"}, {}, "lora-targets, lora-alpha without lora-rank have"),
    ],
)
def test_options_that_can_have_no_effect(changes, update, message):
    base = RunConfig(bench="aqua")
    with pytest.raises(LemonError, match=message) as fault:
        check_counts(replace(base, **changes, update=replace(base.update, **update)))
    assert "\n" not in str(fault.value)


def test_the_same_options_with_what_reads_them():
    update = {"tau": 2.0, "counterfactual": 1.0, "clip_high": 0.3, "kl_estimator": "k1"}
    base = RunConfig(bench="aqua")
    config = replace(
        base,
        contrast_samples=2,
        noise_gate=1.0,
        edit_sampling="uniform",
        update=replace(base.update, **update),
    )
    check_counts(config)
    once, bounds = replace(base, updates_per_step=1), replace(base.update, clip_high=0.3)
    check_counts(once)
    check_counts(replace(once, overlap=True, update=bounds))
    check_counts(replace(once, update=replace(bounds, compute_dtype="bfloat16")))  # rounding is large there
    check_counts(replace(base, edits_per_step=0, predicted_edits=4, update=replace(base.update, tau=2.0)))
    check_counts(replace(base, price_tables=TABLES, reward=RewardConfig(half_cost=100.0)))
    check_counts(replace(base, prices=TABLES[0], reward=RewardConfig(tokens="plain", half_cost=100.0)))
    # Without counterfactuals what remains is what they do not read.
    alone = without_counterfactuals(replace(config, predicted_edits=3, group=8))
    check_counts(alone)
    kept = replace(base.update, clip_high=0.3, kl_estimator="k1")
    assert alone == replace(base, edits_per_step=0, group=8, update=kept)


def test_predictions_know_no_prices():
    check_counts(replace(RunConfig(bench="aqua"), predicted_edits=4, price_tables=TABLES[:1]))
    with pytest.raises(LemonError, match="predicted-edits and several price-tables exclude each other"):
        check_counts(replace(RunConfig(bench="aqua"), predicted_edits=4, price_tables=TABLES))


def test_a_search_without_training_needs_its_own_budget():
    check_counts(replace(RunConfig(bench="aqua"), steps=0, best_fixed=True, search_tokens=500))
    check_counts(replace(RunConfig(bench="aqua"), best_fixed=True))


def test_a_manifest_from_before_the_choice_of_baselines_is_todays_default():
    new = ("baselines", "best_fixed", "search_candidates", "search_tokens")
    old = {k: v for k, v in RunConfig(bench="aqua").to_dict().items() if k not in new}
    config = RunConfig.from_dict(old)
    assert config == RunConfig(bench="aqua")
    assert (config.baselines, config.best_fixed) == ("vanilla,cot,sc,chain,complete", False)


def test_a_config_of_another_version_is_a_type_error():
    with pytest.raises(TypeError, match="verbosity"):
        RunConfig.from_dict(RunConfig(bench="aqua").to_dict() | {"verbosity": 3})


def test_equal_configs_have_equal_digests():
    a, b = RunConfig(bench="aqua"), RunConfig(bench="aqua", seed=1)
    assert a.sha256() == RunConfig.from_dict(a.to_dict()).sha256() != b.sha256()

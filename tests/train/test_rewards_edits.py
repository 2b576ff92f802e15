"""Rewards, and the sampler of edits."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from policy_helpers import CHECKED, SOLVER

from lemon_jax.runtime import Usage
from lemon_jax.spec import FAMILIES, OPT_IN_FAMILIES, applicable, dump
from lemon_jax.train.config import RunConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.rewards import Reward, RewardConfig, invalid_reward, masked_reward, reward

CONFIG = RewardConfig(success=1.0, efficiency=0.3, half_cost=100.0, agent=0.02, dependency=0.01, invalid=-0.5)


def test_the_three_terms():
    found = reward(CONFIG, CHECKED, Usage(cost=100.0), correct=True)
    assert found == Reward(success=1.0, efficiency=0.15, structure=-0.03)
    assert found.total == pytest.approx(1.0 + 0.15 - 0.03)


def test_cheaper_smaller_and_right_are_each_better():
    base = reward(CONFIG, CHECKED, Usage(cost=50.0), correct=False).total
    assert reward(CONFIG, CHECKED, Usage(cost=49.0), correct=False).total > base
    assert reward(CONFIG, CHECKED, Usage(cost=50.0), correct=True).total == pytest.approx(base + 1)
    smaller = next(e for e in applicable(dump(CHECKED)) if e.family == "delete_dependency").spec
    assert reward(CONFIG, smaller, Usage(cost=50.0), correct=False).total == pytest.approx(base + 0.01)
    assert reward(CONFIG, SOLVER, Usage(), correct=False).efficiency == 0.3


def test_plain_tokens_count_prompt_and_generated_alike():
    usage = Usage(prompt_tokens=60, prefix_tokens=50, generated_tokens=40, cost=5.0)
    plain = RewardConfig(tokens="plain", half_cost=100.0)
    assert reward(plain, SOLVER, usage, correct=False).efficiency == pytest.approx(0.15)
    assert reward(CONFIG, SOLVER, usage, correct=False).efficiency == pytest.approx(0.3 / 1.05)


def test_invalid_and_masked():
    assert invalid_reward(CONFIG).total == -0.5
    assert math.isnan(masked_reward().total)
    assert masked_reward().to_dict()["total"] is None
    assert invalid_reward(CONFIG).to_dict()["total"] == -0.5


def test_every_family_keeps_its_floor_and_probabilities_sum_to_1():
    sampler = EditSampler(sums=(1.0, 0.0, 0.0), weights=(1.0, 1.0, 1.0), floor=0.1)
    p = sampler.probabilities()
    assert p == pytest.approx(dict(zip(FAMILIES, (0.8, 0.1, 0.1), strict=True)))
    assert sum(sampler.probabilities(FAMILIES[1:]).values()) == pytest.approx(1)
    assert EditSampler(weights=(1.0,) * 3).probabilities() == pytest.approx(dict.fromkeys(FAMILIES, 1 / 3))
    assert EditSampler().probabilities() == pytest.approx(dict.fromkeys(FAMILIES, 1 / 3))
    assert EditSampler(floor=0.9).probabilities() == pytest.approx(dict.fromkeys(FAMILIES, 1 / 3))


def test_the_running_mean_of_contrast_sizes():
    sampler = EditSampler(rate=0.5)
    assert sampler.ema == (1.0, 1.0, 1.0)
    one = sampler.updated([(FAMILIES[0], -0.4)])
    assert one.ema == pytest.approx((0.4, 0.4, 0.4))  # nothing else is known
    after = one.updated([(FAMILIES[2], 0.0), (FAMILIES[0], 0.2)])
    # (0.25 * 0.4 + 0.5 * 0.2) / (0.25 + 0.5), the mean of the others, 0
    assert after.ema == pytest.approx((0.8 / 3, 0.4 / 3, 0.0))
    many = sampler.updated([(FAMILIES[1], 0.3)] * 20 + [(FAMILIES[1], 0.7)])
    assert many.ema[1] == pytest.approx(0.5, abs=1e-5)
    assert sampler == EditSampler(rate=0.5)


def test_families_with_large_contrasts_are_drawn_more_often():
    edits = applicable(dump(CHECKED))
    counts = Counter(e.family for e in edits)
    assert len(counts) == 3
    rng = random.Random(0)
    sampler = EditSampler(sums=(0.1, 0.1, 0.8), weights=(1.0, 1.0, 1.0))
    drawn = Counter(sampler.draw(edits, rng).family for _ in range(2000))
    for family, p in sampler.probabilities().items():
        assert drawn[family] / 2000 == pytest.approx(p, abs=0.04)


def test_nothing_to_draw_from():
    assert EditSampler().draw([], random.Random(0)) is None


def test_opt_in_families_and_even_sampling():
    families = ("lower_capacity", "raise_capacity")
    config = RunConfig(bench="aqua", edit_families=", ".join(families), edit_sampling="uniform")
    sampler = config.edit_sampler.updated([("raise_capacity", 5.0)])
    assert sampler.probabilities() == pytest.approx(dict.fromkeys(families, 0.5))
    adaptive = replace(config, edit_sampling="adaptive").edit_sampler
    seen = adaptive.updated([("lower_capacity", 0.0), ("raise_capacity", 5.0)])
    assert seen.probabilities() == pytest.approx({"lower_capacity": 0.1, "raise_capacity": 0.9})
    assert RunConfig(bench="aqua").edit_sampler == EditSampler()
    many = replace(config, edit_families=",".join((*FAMILIES, *OPT_IN_FAMILIES))).edit_sampler
    assert many.floor * 6 == pytest.approx(0.5)

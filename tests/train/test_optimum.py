"""Exact expected rewards against the real executor, and the search against brute force."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from simulated_helpers import executor_of, simulated_pool, spec_of

from lemon_jax.backends.response_model import relevant_word
from lemon_jax.bench import generate
from lemon_jax.spec import CAPACITIES, ROLES, baselines, dump, parse
from lemon_jax.train import regret as regret_module
from lemon_jax.train.evaluate import execute
from lemon_jax.train.grading import Grader
from lemon_jax.train.optimum import Optimum
from lemon_jax.train.regret import Regret, duties, search_roles
from lemon_jax.train.rewards import RewardConfig, reward_of

NUMBER = generate("number", 6, 0, split="test")
CHOICE = generate("choice", 6, 0, split="test")
SPECS = {
    "one": spec_of("math_solver medium"),
    "tool": spec_of("equation_writer small: {word}"),
    "chain": spec_of("math_solver small", "inspector medium a1", "math_solver large a2"),
    "long chain": spec_of(*(f"math_solver small{f' a{i}' if i else ''}" for i in range(5))),
    "plan": spec_of("mathematical_analyst small", "equation_writer medium a1"),
    "vote of repeats": spec_of(*["math_solver medium"] * 5, "majority_vote small a1,a2,a3,a4,a5"),
    "vote of unlike": spec_of(
        "equation_writer small", "math_solver small: {word}", "answerer large", "majority_vote small a3,a1,a2"
    ),
    "diamond": spec_of(
        "math_solver small", "inspector small a1", "inspector medium a1", "math_solver small a2,a3"
    ),
    "shared input": spec_of(
        "mathematical_analyst medium",
        "equation_writer small a1",
        "math_solver medium a1",
        "inspector small a1,a2,a3",
        "majority_vote small a2,a3,a4",
    ),
    "nearest": spec_of("equation_writer medium", "nearest_option small a1"),
    "computed, then chosen": spec_of(
        "equation_writer small", "math_solver small", "option_chooser small a1,a2"
    ),
    "vote, then read": spec_of(
        "math_solver small", "math_solver small", "majority_vote small a1,a2", "inspector medium a3"
    ),
    "unread": spec_of("math_solver medium", "answerer small"),
    "debate": baselines("small")["debate"],
}


def spec_for(name, task):
    spec = SPECS[name]
    word = relevant_word(task.question)
    return replace(spec, agents=tuple(replace(a, duty=a.duty.format(word=word)) for a in spec.agents))


async def sampled(task, spec, config, seeds):
    """Rewards of one spec on pools of different seeds, through the real executor and grader."""
    parsed = parse(dump(spec))
    assert parsed.strict_ok
    out = []
    for seed in range(seeds):
        pool = simulated_pool([task], seed)
        with executor_of(pool) as executor:
            out.append(reward_of(config, await execute(executor, task, parsed, "test")).total)
    return np.array(out)


def check(task, spec, seeds):
    config = RewardConfig()
    optimum = Optimum(simulated_pool([task]), config)
    exact, p = optimum.expected_reward(spec, task), optimum.p_correct(spec, task)
    rewards = asyncio.run(sampled(task, spec, config, seeds))
    # All but the success term is certain, so every reward is one of two values.
    bare = exact - p
    assert set(np.round(rewards - bare, 9)) <= {0.0, 1.0}
    standard_error = math.sqrt(p * (1 - p) / seeds)
    assert abs(rewards.mean() - exact) < 4 * standard_error + 1e-9, (rewards.mean(), exact)
    return p


@pytest.mark.parametrize("task", [NUMBER[0], CHOICE[0]], ids=["number", "choice"])
@pytest.mark.parametrize("name", SPECS)
def test_expectation_is_the_mean_through_the_executor(name, task):
    p = check(task, spec_for(name, task), seeds=200)
    computed = name in ("tool", "plan") and task.options  # a number is no letter
    nowhere = name == "nearest" and not task.options
    assert (p == 0) == bool(computed or nowhere)


@pytest.mark.parametrize("task", [NUMBER[1], CHOICE[1]], ids=["number", "choice"])
def test_programs_too(task):
    """Fewer, for each runs in the sandbox."""
    check(task, spec_of("programming_expert medium", "math_solver small a1"), seeds=30)


@pytest.mark.parametrize("tokens", ["cost", "plain"])
@pytest.mark.parametrize("task", [NUMBER[2], CHOICE[2]], ids=["number", "choice"])
def test_search_finds_what_brute_force_finds(task, tokens, monkeypatch):
    """Over three roles and two capacities; every spec of the space through `expected_reward`."""
    roles = ["equation_writer", "mathematical_analyst", "answerer"]
    monkeypatch.setattr(regret_module, "search_roles", lambda: roles)
    monkeypatch.setattr(regret_module, "CAPACITIES", ("small", "medium"))
    config = RewardConfig(tokens=tokens, agent=0.0, dependency=0.001, efficiency=0.03)
    optimum = Optimum(simulated_pool([task]), config)
    values = {dump(s): optimum.expected_reward(s, task) for s in space(task, optimum, roles)}
    best = Regret(optimum).best_spec(task)
    assert best.reward == pytest.approx(max(values.values()), abs=1e-9)
    assert values[dump(best.spec)] == pytest.approx(best.reward, abs=1e-12)
    assert len(best.spec.agents) > 1  # free agents: else the shapes would not be tried


def space(task, optimum, roles):
    word = {role: duties(role, task.question, optimum)[1] for role in roles}
    llm = [
        f"{role} {capacity}{{}}: {duty}"
        for role in roles
        for capacity in ("small", "medium")
        for duty in (ROLES[role].default_duty, word[role])
    ]
    any_kind = [*llm, "majority_vote small{}", "nearest_option small{}"]
    named = lambda spec: replace(spec, agents=tuple(replace(a, name="Worker") for a in spec.agents))  # noqa: E731
    for a in llm:
        first = a.format("")
        yield named(spec_of(first))
        for b in any_kind:
            yield named(spec_of(first, b.format(" a1")))
            for c in llm:
                yield named(spec_of(first, c.format(""), b.format(" a1,a2")))
                for d in llm[:1] if b is not llm[0] else llm:
                    vote = (first, c.format(""), d.format(""), "majority_vote small a1,a2,a3")
                    yield named(spec_of(*vote))
            for c in any_kind:
                for reads in ("a2", "a1,a2", "a2,a1"):
                    yield named(spec_of(first, b.format(" a1"), c.format(f" {reads}")))


def test_no_spec_of_the_space_exceeds_its_optimum():
    """Random ones of the whole space, on several tasks."""
    rng = np.random.default_rng(0)
    tasks = [*NUMBER[:3], *CHOICE[:3]]
    optimum = Optimum(simulated_pool(tasks), RewardConfig())
    regret = Regret(optimum)
    shapes = list(itertools.product(["{}", "{} a1"], ["{} a1", "{} a2", "{} a1,a2", "{} a2,a1"]))
    for task in tasks:
        for _ in range(60):
            second, third = shapes[rng.integers(len(shapes))]
            kinds = [f"{rng.choice(search_roles())} {rng.choice(CAPACITIES)}" for _ in range(3)]
            spec = spec_of(kinds[0], second.format(kinds[1]), third.format(kinds[2]))
            assert regret.of(parse(dump(spec)), task) > -1e-9


def test_regret_of_invalid_and_of_the_best():
    task = NUMBER[0]
    regret = Regret(Optimum(simulated_pool([task]), RewardConfig()))
    best = regret.best_spec(task)
    assert regret.of(parse(dump(best.spec)), task) == pytest.approx(0.0, abs=1e-12)
    assert regret.of(parse("nonsense"), task) == pytest.approx(best.reward + 0.5)
    assert regret.of(parse(dump(best.spec)), task, valid=False) == pytest.approx(best.reward + 0.5)


def test_too_many_joint_states_are_unknown_not_a_crash():
    task = CHOICE[0]
    voters = [f"math_solver small: Look at {'x' * i} first." for i in range(1, 13)]
    spec = spec_of(*voters, f"majority_vote small {','.join(f'a{i}' for i in range(1, 13))}")
    assert math.isnan(Regret(Optimum(simulated_pool([task]), RewardConfig())).of(parse(dump(spec)), task))


@pytest.mark.parametrize("protocol", ["full", "gdesigner"])
@pytest.mark.parametrize("task", [NUMBER[3], CHOICE[3]], ids=["number", "choice"])
@pytest.mark.parametrize("role", ["math_solver", "equation_writer", "mathematical_analyst"])
def test_correct_is_what_the_grader_says(role, task, protocol):
    """Under each rule of reading answers, of every reply that some seed gives."""
    grader = Grader.of(protocol)
    optimum = Optimum(simulated_pool([task]), RewardConfig(), grader.extractor)
    p = optimum.p_correct(spec_of(f"{role} small"), task)
    verdicts = []
    for seed in range(100):
        with executor_of(simulated_pool([task], seed)) as executor:
            parsed = parse(dump(spec_of(f"{role} small")))
            verdicts.append(asyncio.run(execute(executor, task, parsed, "test", grader)).grade.correct)
    assert abs(np.mean(verdicts) - p) < 4 * math.sqrt(p * (1 - p) / 100) + 1e-9

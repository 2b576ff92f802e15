"""Prices of tasks: what they change, what they leave alone, and what the policy is told of them."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest
from policy_helpers import CHECKED, TASKS, ScriptedPool, rollout, untrained, workers
from simulated_helpers import simulated_pool, spec_of

from lemon_jax.backends import worker_config
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.spec import dump, parse
from lemon_jax.train.config import RunConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.evaluate import Setting, evaluate
from lemon_jax.train.optimum import Optimum
from lemon_jax.train.presets import check_counts, load_preset
from lemon_jax.train.prices import at_prices, policy_text, random_prices, training_texts, with_price_line
from lemon_jax.train.regret import Regret
from lemon_jax.train.rewards import RewardConfig, reward_of
from lemon_jax.train.rollouts import execution_rows, run_step, tasks_of_step

TABLES = ((1.0, 3.0, 10.0), (1.0, 1.0, 1.0), (2.0, 5.0, 5.0))
CONFIG = RunConfig(bench="multiarith", tasks_per_step=2, group=3, edits_per_step=2)


def priced(config, prices):
    """A worker configuration whose file has these prices."""
    capacities = zip(config.capacities.items(), prices, strict=True)
    return replace(config, capacities={name: replace(c, price=price) for (name, c), price in capacities})


@pytest.mark.parametrize("table", TABLES)
def test_an_execution_costs_what_it_would_with_these_prices_in_the_worker_file(table):
    """The same calls, by the same keys: a store that has answered one answers the other."""
    store = CallStore(None)
    pool, other = ScriptedPool(), ScriptedPool()
    other.config = priced(other.config, table)
    ours = asyncio.run(Executor(Caller(pool, store), read_answer).execute(CHECKED, TASKS[0], prices=table))
    asked = pool.num_calls
    theirs = asyncio.run(Executor(Caller(other, store), read_answer).execute(CHECKED, TASKS[0]))
    assert asked
    assert other.num_calls == 0
    assert [a.usage.cost for a in ours.agents] == pytest.approx([a.usage.cost for a in theirs.agents])
    assert ours.usage.cost == pytest.approx(theirs.usage.cost)
    assert ours.usage.generated_tokens == theirs.usage.generated_tokens
    store.close()


@pytest.mark.parametrize("table", TABLES)
def test_regret_is_that_of_workers_with_these_prices(table):
    task = TASKS[0]
    plain, pool = simulated_pool([task]), simulated_pool([task])
    pool.config = priced(pool.config, table)
    here, there = (Regret(Optimum(p, RewardConfig())) for p in (plain, pool))
    told = replace(task, prices=table)
    ours, theirs = here.best_spec(told), there.best_spec(task)
    assert dump(ours.spec) == dump(theirs.spec)
    assert ours.reward == pytest.approx(theirs.reward, abs=1e-12)
    dear = parse(dump(spec_of("math_solver large", "inspector large a1")))
    assert here.of(dear, told) == pytest.approx(there.of(dear, task), abs=1e-12)


def test_a_task_at_two_prices_has_two_optima():
    task = TASKS[0]
    regret = Regret(Optimum(simulated_pool([task]), RewardConfig()))
    cheap, dear = (replace(task, prices=p) for p in ((0.0, 0.0, 0.0), (50.0, 50.0, 50.0)))
    assert regret.best_spec(cheap).reward > regret.best_spec(dear).reward + 0.05
    assert regret.best_spec(cheap).reward > regret.best_spec(task).reward


def test_price_tables_come_in_turn_and_depend_on_seed_and_position_alone():
    config = replace(CONFIG, price_tables=TABLES, tasks_per_step=3)
    steps = [tasks_of_step(TASKS, config, s) for s in range(8)]
    assert [tasks_of_step(TASKS, config, s) for s in reversed(range(8))] == steps[::-1]
    for tasks in steps:
        assert sorted(t.prices for t in tasks) == sorted(TABLES)
    assert len({tuple(t.prices for t in tasks) for tasks in steps}) > 1
    without = [tasks_of_step(TASKS, replace(config, price_tables=()), s) for s in range(8)]
    assert [[replace(t, prices=None) for t in tasks] for tasks in steps] == without


def test_a_group_and_its_edits_are_rewarded_at_the_prices_of_their_task(tokenizer):
    config = replace(CONFIG, price_tables=TABLES[:2])
    tasks = tasks_of_step(TASKS, config, 0)
    rollouts = [rollout(tokenizer, dump(CHECKED)) for _ in range(6)]
    with workers() as (executor, _, _):
        outcome = asyncio.run(run_step(executor, config, 0, tasks, rollouts, EditSampler()))
    costs = [s.execution.usage.cost for s in outcome.scored]
    assert len({*costs[:3]}) == len({*costs[3:]}) == 1
    with workers() as (executor, _, _):
        for i, task in enumerate(tasks):
            execution = asyncio.run(executor.execute(CHECKED, task, prices=task.prices))
            assert costs[3 * i] == execution.usage.cost
            assert costs[3 * i] != pytest.approx(asyncio.run(executor.execute(CHECKED, task)).usage.cost)
    for c in outcome.contrasts:
        (edited,) = c.samples
        assert edited.scored.task.prices == tasks[c.index // 3].prices
        assert edited.reward == reward_of(config.reward, edited.scored)
    rows = execution_rows(outcome, config, 0)
    assert {tuple(row["prices"]) for row in rows} == {*TABLES[:2]}


def test_an_evaluation_says_its_prices():
    tasks = at_prices(TASKS[:2], TABLES[0], CONFIG, ScriptedPool())
    with workers() as (executor, store, _):
        for prices in (TABLES[0], None):
            setting = Setting(bench="multiarith", split="test", seed=0, prices=prices)
            part = [replace(t, prices=prices) for t in tasks]
            specs = [parse(dump(CHECKED))] * 2
            row, lines = asyncio.run(evaluate(executor, store, "m", part, specs, setting=setting))
            assert row.get("prices") == (list(prices) if prices else None)
            assert [line.get("prices") for line in lines] == [row.get("prices")] * 2


def test_what_the_policy_reads():
    told = replace(CONFIG, tell_prices=True)
    pool = ScriptedPool()
    (task,) = at_prices(TASKS[:1], (), told, pool)
    assert policy_text(task, told) == f"Prices: small 1, medium 3, large 3\n{task.prompt()}"
    assert policy_text(task, CONFIG) == task.prompt() == TASKS[0].prompt()
    assert at_prices(TASKS, (), CONFIG, pool) == TASKS
    (other,) = at_prices(TASKS[:1], TABLES[0], told, pool)
    assert policy_text(other, told).startswith("Prices: small 1, medium 3, large 10\n")
    with pytest.raises(ValueError, match="no prices"):
        policy_text(TASKS[0], told)


def test_all_texts_of_a_training_fit_its_prompt_slots(tokenizer):
    config = replace(CONFIG, tell_prices=True, price_tables=(*TABLES, (1000000.0, 2000000.0, 12345.75)))
    texts = [*training_texts(TASKS, config)]
    assert len(texts) == len(TASKS) * 4
    for step in range(6):
        assert {policy_text(t, config) for t in tasks_of_step(TASKS, config, step)} <= {*texts}
    policy = untrained(tokenizer)
    longest = max(len(policy.prompt_ids(text)) for text in texts)
    assert longest <= policy.prompt_slots(texts)
    assert [*training_texts(TASKS[:2], CONFIG)] == [t.prompt() for t in TASKS[:2]]


def test_a_task_too_long_for_the_policy_keeps_the_line(tokenizer):
    policy = untrained(tokenizer)
    line = with_price_line("", TABLES[0])
    ids = policy.prompt_ids(with_price_line("How many boxes? " * 200, TABLES[0]))
    assert len(ids) == policy.max_prompt
    assert line in tokenizer.decode(ids)


def test_random_tables_never_make_a_higher_capacity_cheaper():
    drawn = {random_prices(random.Random(seed)) for seed in range(200)}
    assert len(drawn) > 30
    assert all(small <= medium <= large for small, medium, large in drawn)


def test_presets_hold_tables_and_a_manifest_gives_them_back(tmp_path):
    preset = tmp_path / "p.toml"
    preset.write_text("tell_prices = true\nprice_tables = [[1, 3, 10], [1, 1, 1]]\nprices = [2, 5.5, 5.5]\n")
    config = load_preset(preset, "multiarith")
    check_counts(config)
    assert config.price_tables == ((1, 3, 10), (1, 1, 1))
    assert config.prices == (2, 5.5, 5.5)
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.sha256() == config.sha256()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price_tables = [[1, 3]]", "price-tables has (1, 3), expected three prices"),
        ("price_tables = [1, 3, 10]", "price-tables has 1, expected three prices"),
        ("price_tables = [[1, 3, -1]]", "price-tables has (1, 3, -1)"),
        ('prices = [1, "a", 2]', "prices has (1, 'a', 2)"),
        ("prices = 3", "prices is 3, expected list"),
        ("tell_prices = 1", "tell_prices is 1, expected bool"),
    ],
)
def test_faulty_tables(text, expected, tmp_path):
    preset = tmp_path / "p.toml"
    preset.write_text(text)
    with pytest.raises(LemonError) as error:
        check_counts(load_preset(preset, "multiarith"))
    assert expected in str(error.value)


def test_the_shipped_files_have_no_table_of_their_own():
    prices = [c.price for c in worker_config("scripted").capacities.values()]
    (task,) = at_prices(TASKS[:1], (), replace(CONFIG, tell_prices=True), ScriptedPool())
    assert task.prices == tuple(prices)

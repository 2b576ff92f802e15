"""Dynamic sampling beside a plain reference, and in the whole loop."""

from __future__ import annotations

import asyncio
import json
import math
import random
from dataclasses import replace

import jax
import numpy as np
import pytest
from policy_helpers import TASKS
from test_trainer import CONFIG, _lines, _train

from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore
from lemon_jax.train.dynamic_sampling import key_of_round, sample_dynamically
from lemon_jax.train.losses import carries_signal, zero_std_fraction
from lemon_jax.train.presets import check_counts
from lemon_jax.train.rewards import Reward
from lemon_jax.train.rollouts import StepOutcome, tasks_of_step
from lemon_jax.train.run_dir import EXECUTIONS, METRICS

SIZE, GROUP = 3, 2


def run_made_up(rewards, rounds):
    """(Executed, what was run: [(edits, specs)]); spec (round, n, g) has the reward rewards[round][n][g]."""
    config = replace(CONFIG, tasks_per_step=SIZE, group=GROUP, edits_per_step=2, dynamic_sampling=rounds)
    ran = []

    def write(tasks, round_):
        assert tasks == tasks_of_step(TASKS, config, 5, round_)
        return [(round_, n, g) for n in range(SIZE) for g in range(GROUP)]

    async def run(chosen, tasks, rollouts):
        ran.append((chosen.edits_per_step, rollouts))
        values = [rewards[r][n][g] for r, n, g in rollouts]
        each = [Reward(success=v, masked=math.isnan(v)) for v in values]
        assert len(tasks) * GROUP == len(rollouts)
        return StepOutcome(
            tasks=tasks,
            rollouts=rollouts,
            scored=list(rollouts),
            rewards=each,
            contrasts=["edited"],
            resampled={},
        )

    return asyncio.run(sample_dynamically(config, 5, TASKS, write, run)), ran


def reference(rewards, rounds):
    """The groups (round, n) of the batch and those left out, one at a time."""
    batch, rest = [], []
    for r in range(rounds + 1):
        for n in range(SIZE - len(batch)):
            known = {x for x in rewards[r][n] if not math.isnan(x)}
            (batch if len(known) > 1 else rest).append((r, n))
        if len(batch) == SIZE:
            break
    fill = SIZE - len(batch)
    return sorted(batch + rest[:fill]), rest[fill:]


@pytest.mark.parametrize("seed", range(40))
def test_against_a_plain_reference(seed):
    rng = random.Random(seed)
    rounds = rng.randrange(4)
    # Two values and masked specs: about half of the groups carry nothing.
    rewards = [
        [[rng.choice([0.0, 1.0, math.nan]) for _ in range(GROUP)] for _ in range(SIZE)] for _ in range(4)
    ]
    executed, ran = run_made_up(rewards, rounds)
    batch, rest = reference(rewards, rounds)

    def specs(groups):
        return [(r, n, g) for r, n in groups for g in range(GROUP)]

    assert executed.batch.rollouts == specs(batch)
    assert executed.everything.rollouts == specs(batch + rest)
    assert executed.everything.scored == executed.everything.rollouts
    assert executed.everything.contrasts == executed.batch.contrasts == ["edited"]
    assert executed.rounds == tuple(r for r, _ in batch + rest)
    # Nothing is edited before the batch is known, and nothing is executed that is not logged.
    assert [edits for edits, _ in ran] == [0] * (len(ran) - 1) + [2]
    assert sorted(s for _, these in ran[:-1] for s in these) == sorted(executed.everything.rollouts)
    signal = [len({x for x in rewards[r][n] if not math.isnan(x)}) > 1 for r, n in batch + rest]
    facts = executed.facts(GROUP)
    assert facts["dynamic_rounds"] == max(executed.rounds) == len(ran) - 2
    assert facts["frac_reward_zero_std"] == pytest.approx(1 - np.mean(signal))
    # Of every first execution, whatever became of it when it was executed again.
    assert facts["rounds_infra_failed"] == sum(
        math.isnan(rewards[r][n][g]) for r, n, g in specs(batch + rest)
    )
    rows = executed.mark([{} for _ in specs(batch + rest)] + [{"edit": 1}], GROUP)
    assert rows[-1] == {"edit": 1}
    assert [row["in_batch"] for row in rows[:-1]] == [True] * SIZE * GROUP + [False] * len(rest) * GROUP
    assert [row["round"] for row in rows[:-1]] == [r for r, _, _ in specs(batch + rest)]


def test_signal_is_two_known_rewards_that_differ():
    rewards = np.array([1, 1, 1, 0, 1, np.nan, np.nan, np.nan, 0.1 + 0.2, 0.3])
    np.testing.assert_array_equal(carries_signal(rewards, 2), [False, True, False, False, True])
    assert zero_std_fraction(rewards, 2) == pytest.approx(3 / 5)


def test_tasks_of_all_rounds_are_each_others_in_no_epoch():
    config = replace(CONFIG, tasks_per_step=2, dynamic_sampling=1)
    # 8 tasks: two steps of two rounds of two.
    seen = [t.id for step in (0, 1) for r in (0, 1) for t in tasks_of_step(TASKS, config, step, r)]
    assert sorted(seen) == sorted(t.id for t in TASKS)
    off = replace(config, dynamic_sampling=0)
    assert seen == [t.id for step in range(4) for t in tasks_of_step(TASKS, off, step)]


def test_keys_of_rounds_differ_from_each_other_and_from_those_of_steps():
    keys = [jax.random.key_data(key_of_round(3, step, r)).tolist() for step in range(4) for r in range(4)]
    inner = [
        jax.random.key_data(jax.random.fold_in(key_of_round(3, step, 0), r)).tolist()
        for step in range(4)
        for r in range(4)
    ]
    assert len({tuple(k) for k in keys + inner}) == 32
    first = jax.random.fold_in(jax.random.key(3), 2)
    np.testing.assert_array_equal(jax.random.key_data(key_of_round(3, 2, 0)), jax.random.key_data(first))


DYNAMIC = replace(CONFIG, dynamic_sampling=2)


@pytest.fixture(scope="module")
def straight(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dynamic") / "run"
    return folder, _train(policy, folder, config=DYNAMIC)[0]


def test_every_execution_is_logged_and_paid_for(straight):
    folder, _ = straight
    metrics = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / EXECUTIONS).read_text().splitlines()]
    assert max(m["dynamic_rounds"] for m in metrics) > 0
    store = CallStore(folder / "calls.sqlite")
    for m in metrics:
        own = [r for r in rows if r["step"] == m["step"] and r["phase"] == "train"]
        groups = [own[i : i + 4] for i in range(0, len(own), 4)]
        assert max(r["round"] for r in own) == m["dynamic_rounds"]
        assert sum(r["in_batch"] for r in own) == DYNAMIC.specs_per_step
        totals = np.array([[r["reward"]["total"] for r in g] for g in groups])
        assert m["frac_reward_zero_std"] == np.mean([len(set(t)) == 1 for t in totals.tolist()])
        assert m["reward"] == pytest.approx(totals.mean(), abs=1e-5)
        assert m["executions"] == sum(r["valid"] for r in own)
        # Of the calls first asked for in this step, whoever asked.
        keys = [key for key, scope, _, _ in store.rows() if scope == f"train:{m['step']}"]
        assert m["worker_tokens"] == store.tokens(keys)
        assert m["counterfactual_tokens"] < m["worker_tokens"]
    store.close()


def test_resumed_equals_never_stopped(policy, straight, tmp_path):
    folder = tmp_path / "run"
    _train(policy, folder, config=DYNAMIC, stop_after=1)
    digest, done = _train(policy, folder, config=DYNAMIC, resume=True, max_concurrency=1)
    assert done == 1
    assert digest == straight[1]
    assert _lines(folder) == _lines(straight[0])


def test_numbers_that_no_run_can_have():
    with pytest.raises(LemonError, match="dynamic-sampling is -1, it must be at least 0"):
        check_counts(replace(CONFIG, dynamic_sampling=-1))
    with pytest.raises(LemonError, match="overlap and dynamic-sampling exclude each other"):
        check_counts(replace(CONFIG, dynamic_sampling=1, overlap=True))

"""The search over fixed specs, on workers whose best spec is known."""

import asyncio
import random
from collections import Counter

import pytest
from policy_helpers import CHOICES, workers

from lemon_jax.bench import generate
from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore
from lemon_jax.runtime.prompts import fixed_prefix
from lemon_jax.spec import ROLES, dump, parse, parse_strict
from lemon_jax.train.evaluate import execute
from lemon_jax.train.grading import Grader
from lemon_jax.train.rewards import RewardConfig, masked_reward, reward
from lemon_jax.train.search import BATCH, draw_candidates, search_fixed

TASKS = generate("number", 24, seed=5)
GOLD = {task.question: task.gold for task in TASKS}
REWARDS = RewardConfig(half_cost=40.0)


def gold_of(text):
    """The gold of the question in a message; anything for the probe that measures a role's prefix."""
    return next(((question, gold) for question, gold in GOLD.items() if question in text), ("", "0"))


def equations_win(request):
    """A worker that writes right equations; whatever else it is asked, it gets wrong."""
    system, user = (message.content for message in request.messages)
    if system.startswith(fixed_prefix("equation_writer")):
        return gold_of(user)[1]
    if system.startswith(fixed_prefix("programming_expert")):
        return "I cannot program."
    return "Answer: 987654"


def half_right(request):
    """Right on about half of the questions, whichever role asks; what differs is cost and luck."""
    system, user = (message.content for message in request.messages)
    question, gold = gold_of(user)
    lucky = random.Random(f"{question}{system}{request.sample_index}").random() < 0.5
    value = gold if lucky else "987654"
    return value if system.startswith(fixed_prefix("equation_writer")) else f"Answer: {value}"


def search(script=half_right, *, tasks=TASKS, store=None, before=None, spent=None, seed=0, **options):
    """(what was found, the calls that reached a backend); `options` of the search and of the workers."""
    names = ("budget", "candidates")
    choice = {"budget": 10**9, "candidates": 8} | {k: options.pop(k) for k in names if k in options}
    with workers(store, script=script, **options) as (executor, own, pool):

        async def run():
            if before:
                await execute(
                    executor, TASKS[before], parse(dump(draw_candidates(TASKS, 8, 0)[0])), "train:0"
                )
            return await search_fixed(
                executor,
                own,
                tasks,
                rewards=REWARDS,
                grader=Grader(),
                samples={"small": 1, "medium": 1, "large": 5},
                seed=seed,
                on_spent=(spent if spent is not None else []).append,
                **choice,
            )

        return asyncio.run(run()), pool.num_calls


def by_round(found):
    """For each round: task -> the candidates that ran on it, in order."""
    rounds: dict[int, dict[str, list[int]]] = {}
    for row in found.rows:
        rounds.setdefault(row["round"], {}).setdefault(row["task"], []).append(row["candidate"])
    return rounds


def unique_tokens(tasks, specs, rows, script):
    """Tokens of the different calls behind these rows, counted one execution after the other."""
    with workers(script=script) as (executor, store, _):
        by_id = {task.id: task for task in tasks}
        keys = set()
        for row in rows:
            scored = asyncio.run(execute(executor, by_id[row["task"]], parse(row["spec"]), "x"))
            keys.update(scored.call_keys())
        return sum(
            (r.prompt_tokens or 0) + (r.generated_tokens or 0)
            for k, r in store.replies().items()
            if k in keys
        )


def test_candidates_are_different_valid_and_speak_of_no_task():
    for tasks in (TASKS, CHOICES):
        specs = draw_candidates(tasks, 30, seed=1)
        assert len({dump(spec) for spec in specs}) == len(specs) == 30
        assert [dump(s) for s in draw_candidates(tasks, 30, seed=1)] == [dump(s) for s in specs]
        assert [dump(s) for s in draw_candidates(tasks, 30, seed=2)] != [dump(s) for s in specs]
        for spec in specs:
            assert parse_strict(dump(spec)) == spec
            for agent in spec.agents:
                role = ROLES[agent.role]
                assert (agent.name, agent.duty) == (role.title, role.default_duty)
    options = {agent.role for spec in draw_candidates(CHOICES, 60, seed=0) for agent in spec.agents}
    assert {"option_chooser", "nearest_option"} <= options
    number = {agent.role for spec in draw_candidates(TASKS, 60, seed=0) for agent in spec.agents}
    assert number.isdisjoint({"option_chooser", "nearest_option"})


def test_an_exhausted_space_gives_what_there_is(monkeypatch):
    three = draw_candidates(TASKS, 3, seed=0)
    monkeypatch.setattr(
        "lemon_jax.train.search.write_spec", lambda question, options, rng, **_: rng.choice(three)
    )
    assert sorted(map(dump, draw_candidates(TASKS, 10, seed=0))) == sorted(map(dump, three))


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_known_best_spec(seed):
    specs = draw_candidates(TASKS, 32, seed)
    cheapest = [
        s for s in specs if [(a.role, a.capacity) for a in s.agents] == [("equation_writer", "small")]
    ]
    assert len(cheapest) == 1  # the best by far: right on every task, with one call of the cheapest worker
    found, _ = search(equations_win, budget=200_000, candidates=32, seed=seed)
    assert found.spec == cheapest[0]
    assert found.reward > 1.0
    assert found.candidates == 32
    assert found.worker_tokens <= 200_000


def test_with_tokens_for_everything_it_is_the_plain_maximum():
    found, _ = search(budget=10**9, candidates=9)
    means = []
    with workers(script=half_right) as (executor, _, _):
        for spec in draw_candidates(TASKS, 9, 0):
            total = 0.0
            for task in TASKS:
                scored = asyncio.run(execute(executor, task, parse(dump(spec)), "oracle"))
                usage = scored.execution.usage
                total += reward(REWARDS, spec, usage, correct=scored.grade.correct).total
            means.append(total / len(TASKS))
    assert found.spec == draw_candidates(TASKS, 9, 0)[means.index(max(means))]
    assert found.reward == pytest.approx(max(means))
    assert (found.tasks, found.executions) == (len(TASKS), 9 * len(TASKS))


@pytest.mark.parametrize("budget", [3_000, 8_000, 20_000, 60_000])
def test_the_budget_is_kept_and_used(budget):
    spent = []
    found, _ = search(budget=budget, candidates=8, spent=spent)
    assert sum(spent) == found.worker_tokens
    # Tasks differ in length by a few words: a forecast can be that much too low, on the last sweep.
    assert 0.4 * budget < found.worker_tokens <= 1.01 * budget
    assert found.worker_tokens == unique_tokens(TASKS, found.spec, found.rows, half_right)
    assert found.facts()["worker_tokens"] == found.worker_tokens
    assert found.facts()["budget"] == budget


def sometimes_long(request):
    """Right on half of the questions; on a third of them after 120 words of talk."""
    question, _ = gold_of(request.messages[1].content)
    talk = "well " * 120 if random.Random(f"long{question}").random() < 1 / 3 else ""
    return talk + half_right(request)


@pytest.mark.parametrize("budget", range(4_000, 24_000, 2_500))
def test_no_sweep_starts_that_could_pass_the_budget(budget):
    """Replayed from the log: what was spent before a sweep and each candidate at its dearest had to fit."""
    spent = []
    found, _ = search(sometimes_long, budget=budget, candidates=4, spent=spent)
    sweeps = [(tasks, ran) for rounds in by_round(found).values() for tasks, ran in rounds.items()]
    first, *later = sweeps
    rows = iter(found.rows)
    dearest: dict[int, int] = {}

    def run(ran):
        for row in (next(rows) for _ in ran):
            tokens = sum(a["prompt_tokens"] + a["generated_tokens"] for a in row["agents"])
            dearest[row["candidate"]] = max(dearest.get(row["candidate"], 0), tokens)

    run(first[1])
    assert later
    for i, (_, ran) in enumerate(later):
        before = sum(spent[: len(spent) - len(later) + i])  # each later sweep is one batch
        assert before + sum(dearest[c] for c in ran) <= budget
        run(ran)


def test_more_tokens_try_more():
    sizes = [search(budget=budget)[0].executions for budget in (3_000, 8_000, 20_000, 60_000)]
    assert sizes == sorted(set(sizes))


def test_each_round_keeps_the_better_half_and_compares_on_equal_tasks():
    found, _ = search(budget=12_000, candidates=8)
    rounds = by_round(found)
    assert [len(next(iter(tasks.values()))) for tasks in rounds.values()] == [8, 4, 2]
    used = [task for tasks in rounds.values() for task in tasks]
    assert len(set(used)) == len(used) == found.tasks
    totals = {i: [] for i in range(8)}
    alive = set(range(8))
    for tasks in rounds.values():
        assert all(set(ran) == alive and len(ran) == len(alive) for ran in tasks.values())
        for row in found.rows:
            if row["task"] in tasks:
                totals[row["candidate"]].append(row["reward"]["total"])
        ranked = sorted(alive, key=lambda i: (-sum(totals[i]) / len(totals[i]), i))
        alive = set(ranked[: len(alive) // 2])
    assert [dump(found.spec)] == [dump(draw_candidates(TASKS, 8, 0)[i]) for i in alive]


def test_a_small_budget_tries_fewer_candidates():
    found, _ = search(budget=700, candidates=16)
    assert 1 <= found.candidates < 16
    assert len({row["candidate"] for row in found.rows}) == found.candidates
    least, _ = search(budget=1, candidates=16)
    assert (least.candidates, least.executions) == (1, 1)
    assert least.spec == draw_candidates(TASKS, 16, 0)[0]


def test_rows_are_lines_of_the_log():
    found, _ = search(budget=8_000)
    assert Counter((r["phase"], r["method"], r["step"]) for r in found.rows) == {
        ("search", "best_fixed", None): found.executions
    }
    for row in found.rows:
        assert row["valid"]
        assert row["spec"] == dump(draw_candidates(TASKS, 8, 0)[row["candidate"]])
        assert row["reward"]["total"] == pytest.approx(
            sum(row["reward"][term] for term in ("success", "efficiency", "structure")), abs=1e-5
        )


def test_it_is_the_same_again_in_any_order_and_from_its_stored_calls(tmp_path):
    found, calls = search(budget=9_000)
    assert calls > 0
    assert search(budget=9_000, max_concurrency=1, delay_s=0.0005)[0] == found
    assert search(budget=9_000, seed=1)[0] != found
    store = CallStore(tmp_path / "calls.sqlite")
    try:
        assert search(budget=9_000, store=store) == (found, calls)
        assert search(budget=9_000, store=store) == (found, 0)
    finally:
        store.close()


def test_calls_that_training_made_count_as_spent():
    """Else a search would be given for nothing what the training paid for."""
    order = list(TASKS)
    random.Random("search-0").shuffle(order)
    first = TASKS.index(order[0])
    found, _ = search(budget=9_000)
    again, _ = search(budget=9_000, before=first)
    assert again == found


def test_failures_of_servers_are_no_rewards():
    found, _ = search(budget=10**9, candidates=6, failures=0.2)
    masked = [row for row in found.rows if row["infra_failed"]]
    assert masked
    assert all(row["reward"] == masked_reward().to_dict() for row in masked)
    best = draw_candidates(TASKS, 6, 0).index(found.spec)
    known = [r["reward"]["total"] for r in found.rows if r["candidate"] == best and not r["infra_failed"]]
    assert found.tasks == len(known) < len(TASKS)
    assert found.reward == pytest.approx(sum(known) / len(known), abs=1e-5)
    with pytest.raises(LemonError, match="all executions failed on a server"):
        search(candidates=4, failures=1.0)


def test_no_budget_and_no_tasks_are_faults():
    with pytest.raises(LemonError, match="no train tasks to search a fixed spec on"):
        search(tasks=())
    with pytest.raises(LemonError, match="search-tokens is 0, it must be positive"):
        search(budget=0)


def test_the_first_sweep_goes_out_in_batches():
    spent = []
    search(budget=10**9, candidates=10, tasks=TASKS[:1], spent=spent)
    assert len(spent) == 1 + -(-9 // BATCH)

"""Simulated workers behind the real prompts, tools, extraction and call store."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest
from simulated_helpers import executor_of, simulated_pool, spec_of

from lemon_jax.backends import Request, WorkerPool, worker_config
from lemon_jax.backends.response_model import (
    difficulty,
    is_relevant,
    load_parameters,
    p_right,
    relevant_word,
    situation,
)
from lemon_jax.backends.simulated import level_in, write_reply
from lemon_jax.bench import Task, generate
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Caller, CallStore, Status, build_messages
from lemon_jax.spec import CAPACITIES, ROLES, dump, parse
from lemon_jax.train.evaluate import execute
from lemon_jax.train.simulation import PLANNERS, is_simulated, seal, simulated_roles, task_text

NUMBER = generate("number", 40, 3, split="test")
CHOICE = generate("choice", 40, 3, split="test")


def run(task, spec, seed=0):
    with executor_of(simulated_pool([task], seed)) as executor:
        return asyncio.run(execute(executor, task, parse(dump(spec)), "test"))


def replies(task, agents, seed=0, index=0):
    """The replies of agents without inputs, by the messages that the runtime writes."""

    async def ask():
        pool = simulated_pool([task], seed)
        caller = Caller(pool, CallStore(None))
        out = []
        for agent in agents:
            request = Request(
                model=pool.capacity(agent.capacity).model,
                messages=build_messages(task, agent, []),
                max_tokens=ROLES[agent.role].max_tokens,
                sample_index=index,
            )
            (call,) = await caller.ask([request])
            out.append(call.reply)
        return out

    return asyncio.run(ask())


def hardest(tasks):
    parameters = load_parameters()
    return max(tasks, key=lambda t: difficulty(parameters, t.bench, t.question))


@pytest.mark.parametrize("task", [hardest(NUMBER), hardest(CHOICE)], ids=["number", "choice"])
@pytest.mark.parametrize("role", [r.name for r in simulated_roles() if r.name != "programming_expert"])
def test_every_role_is_read_by_the_ordinary_tools(task, role):
    """Of many seeds: a planner never has an answer, all others always, and not one alone."""
    found = Counter()
    for seed in range(60):
        scored = run(task, spec_of(f"{role} medium"), seed)
        (agent,) = scored.execution.agents
        assert agent.status is Status.OK
        assert (agent.answer is None) == (role in PLANNERS)
        found[agent.answer] += 1
    assert role in PLANNERS or len(found) > 1


def test_the_sandbox_reads_programs():
    task = next(t for t in NUMBER if "/" not in t.gold)
    answers = {
        run(task, spec_of("programming_expert large"), seed).execution.agents[0].answer for seed in range(12)
    }
    assert task.gold in answers
    assert len(answers) > 1


def test_replies_are_a_pure_function_of_seed_and_request():
    agents = spec_of("math_solver small", "equation_writer medium", "inspector large").agents
    assert replies(NUMBER[1], agents) == replies(NUMBER[1], agents[::-1])[::-1]
    texts = {r.text for seed in range(40) for r in replies(NUMBER[1], agents[:1], seed)}
    assert len(texts) > 1
    again = {r.text for index in range(40) for r in replies(NUMBER[1], agents[:1], index=index)}
    assert len(again) > 1


def test_agents_that_an_edit_leaves_alone_reply_the_same():
    """Common random numbers: the runs share a pool, not a store."""
    task = NUMBER[2]
    before = spec_of("math_solver small", "equation_writer medium", "inspector medium a1,a2")
    after = spec_of("math_solver small", "equation_writer small", "inspector medium a1,a2")
    one, two = (run(task, spec).execution.agents for spec in (before, after))
    assert one[0] == two[0]
    assert one[1].keys != two[1].keys


def test_tokens_do_not_depend_on_what_is_said():
    spec = spec_of("equation_writer small", "math_solver medium a1", "option_chooser large a1,a2")
    for task in (NUMBER[0], CHOICE[0]):
        usages = {run(task, spec, seed).execution.usage for seed in range(40)}
        assert len(usages) == 1


@pytest.mark.parametrize("form", ["text", "plan", "expression", "program"])
def test_a_reply_says_nothing_of_the_task_but_its_answer(form):
    """Two tasks with one answer have one reply; and a plan, which holds none, has one for all."""
    texts = {write_reply(form, said, level=2, words=9) for said in ("39", "40", None)}
    assert len(texts) == (1 if form == "plan" else 3)
    assert all(level_in(text) == 2 for text in texts)
    assert "39" not in write_reply("plan", "39", level=1, words=9)


def test_a_wrong_worker_does_not_hold_the_gold():
    """The leak that must not be: the right value nowhere in replies that mean another."""
    checked = 0
    spec = spec_of("math_solver small", "equation_writer small a1")
    for task in NUMBER[:10]:
        for seed in range(15):
            for agent in run(task, spec, seed).execution.agents:
                if agent.answer != task.gold:
                    said = agent.output.replace("+ 7) - 7", "").replace("(", " ").split()
                    assert task.gold not in said
                    checked += 1
    assert checked > 10


def test_two_tasks_with_one_question():
    """Who sees the options tells them apart; who does not computes nothing, and does not guess whose."""
    one = dataclasses.replace(CHOICE[0], id="x", options=CHOICE[0].options[::-1])
    one = dataclasses.replace(one, gold="ABCDE"[4 - "ABCDE".index(CHOICE[0].gold)])
    with executor_of(simulated_pool([CHOICE[0], one])) as executor:
        spec = spec_of("equation_writer medium", "math_solver large")
        for task in (CHOICE[0], one):
            scored = asyncio.run(execute(executor, task, parse(dump(spec)), "test"))
            assert scored.execution.agents[0].status is Status.NO_ANSWER
            assert scored.execution.agents[1].status is Status.OK


def test_unknown_tasks_and_code_are_refused():
    spec = parse(dump(spec_of("answerer small")))
    with executor_of(simulated_pool(NUMBER[:1])) as executor:
        asyncio.run(execute(executor, NUMBER[0], spec, "test"))
        with pytest.raises(LemonError, match="only the tasks of the run's bench"):
            asyncio.run(execute(executor, NUMBER[1], spec, "test"))
    code = Task(id="h", bench="humaneval", question="def f():", gold="1", kind="code", entry_point="f")
    with pytest.raises(LemonError, match="humaneval: simulated workers answer number and choice tasks"):
        seal([code])
    with pytest.raises(LemonError, match="answer the tasks of a bench only"):
        asyncio.run(WorkerPool(worker_config("simulated")).check())


def test_what_counts_as_simulated():
    assert is_simulated(simulated_pool(NUMBER[:1]))
    assert not is_simulated(WorkerPool(worker_config("scripted")))


def test_relevance_is_checkable_from_the_text():
    question = "How many boxes does Mia need for her muffins?"
    assert is_relevant("Find the number of boxes.", question)
    assert is_relevant("muffin", question)  # by its first four letters
    assert not is_relevant("Solve the problem step by step.", question)
    assert not is_relevant("Find the need", "Find it")
    assert is_relevant(relevant_word(question), question)
    assert relevant_word("2 + 2?") is None


def test_each_effect_has_its_sign():
    parameters = load_parameters()

    def p(kinds=(), levels=None, relevant=False, hard=0.0, options=0):
        place = situation(kinds, levels or (1,) * len(kinds), relevant=relevant)
        return p_right(parameters, "medium", "math_solver", place, difficulty=hard, options=options)

    assert p(relevant=True) > p()
    assert p(("right",)) > p() > p(("wrong",))
    assert p(("right", "right")) > p(("right",))
    assert p(("plan",)) > p() > p(("nothing",))
    assert p(("right", "plan", "plan")) < p(("right", "plan"))  # a needless one
    assert p(("right",), (2,)) < p(("right",), (1,))  # an over-long chain
    assert p(hard=1.0) < p() < p(options=5)
    assert p(hard=100.0, options=5) == pytest.approx(0.2)  # a guess


def test_the_shipped_parameters_fit_the_roles():
    parameters = load_parameters()
    names = {role.name for role in simulated_roles()}
    for level in CAPACITIES:
        config = parameters.levels[level]
        assert set(config.ability) == names
        for role, tokens in config.tokens.items():
            assert tokens <= ROLES[role].max_tokens * config.calls  # nothing is ever cut


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("spread = ", "spread = -", "spread must not be negative"),
        ("[effects]", "[effects]\nmagic = 1", "expected relevant_duty"),
        ("context = ", "context = true #", "effects.context is True, expected a finite number"),
        ("other = ", "others = ", "difficulty.other"),
        ("inspector = ", "inspektor = ", "ability and tokens must name the same roles"),
        ("[levels.large.ability]", "[levels.large.x]", "'ability' is missing"),
    ],
)
def test_faulty_parameter_files(old, new, message, tmp_path):
    from importlib.resources import files

    text = (files("lemon_jax.backends") / "workers" / "simulated_parameters.toml").read_text("utf-8")
    path = tmp_path / "p.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(LemonError, match=message):
        load_parameters(path)
    with pytest.raises(LemonError, match="cannot read the parameters"):
        load_parameters(tmp_path / "none.toml")


def test_the_beginning_of_a_message_is_the_runtimes_own():
    for task in (NUMBER[0], CHOICE[0]):
        for role in ("math_solver", "equation_writer", "programming_expert"):
            (agent,) = spec_of(f"{role} small").agents
            user = build_messages(task, agent, [])[1].content
            assert user.startswith(task_text(task, options=ROLES[role].sees_options))
    assert read_answer(CHOICE[0], write_reply("plan", None, level=1, words=30)) is None
    assert read_answer(NUMBER[0], write_reply("plan", None, level=5, words=30)) is None

"""Executing specs: order, samples, tools, statuses, caching and accounting."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from runtime_helpers import PROBLEM, Worker, agent, caller, duty, reply, run, spec

from lemon_jax.backends import Reply
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Executor, Status, TextProblem, Usage, fixed_prefix
from lemon_jax.runtime.tools import ProgramResult
from lemon_jax.spec import baselines, descendants

DIAMOND = spec(agent("a"), agent("b", "a"), agent("c", "a"), agent("d", "b", "c"))
CHOICE = TextProblem(question="What is 3 + 4?", options=("5", "6", "7", "8"))
DOWN = Reply(text="", finish="error", error="HTTP 503")


def test_agents_start_when_their_dependencies_are_done_and_not_later():
    worker = Worker(delay_s=0.02)
    (execution,) = run(worker, DIAMOND)
    at = {event: worker.events.index(event) for event in worker.events if event[1]}
    assert at["end", "a"] < min(at["start", "b"], at["start", "c"])
    assert max(at["start", "b"], at["start", "c"]) < min(at["end", "b"], at["end", "c"])
    assert max(at["end", "b"], at["end", "c"]) < at["start", "d"]
    assert [run.status for run in execution.agents] == [Status.OK] * 4
    assert (execution.answer_text, execution.infra_failed) == ("Answer: 7", False)


def test_two_executions_share_the_time():
    worker = Worker(delay_s=0.02)

    async def both(executor):
        await asyncio.gather(
            executor.execute(spec(agent("x")), PROBLEM), executor.execute(spec(agent("y")), PROBLEM)
        )

    with caller(worker) as c:
        asyncio.run(both(Executor(c, read_answer)))
    assert [event for event in worker.events if event[1]][:2] == [("start", "x"), ("start", "y")]


def test_inputs_come_in_spec_order_and_only_from_dependencies():
    worker = Worker(lambda request: f"I am {duty(request)}. Answer: 7")
    run(worker, spec(agent("c"), agent("a"), agent("b"), agent("d", "b", "c")))
    (last,) = [call.messages[1].content for call in worker.calls if duty(call) == "d"]
    assert "I am a" not in last
    assert last.index("<<output of c (C) ") < last.index("I am c.") < last.index("<<output of b (B) ")


def test_agents_are_listed_in_spec_order_and_told_of_as_they_finish():
    seen = []
    late = spec(agent("a", "b"), agent("b"), output="a")
    (execution,) = run(Worker(), late, on_agent=lambda agent_run: seen.append(agent_run.id))
    assert seen == ["b", "a"]
    assert [run.id for run in execution.agents] == ["a", "b"]


def test_equal_agents_are_different_samples():
    worker = Worker(lambda request: f"Answer: {[7, 8, 7, 9, 8][request.sample_index]}")
    (execution,) = run(worker, baselines()["sc"])
    samples = [call for call in worker.calls if "Solve" in duty(call)]
    assert [call.sample_index for call in samples] == [0, 1, 2, 3, 4]
    assert [call.temperature for call in samples] == [0.0, 0.7, 0.7, 0.7, 0.7]
    assert len({call.messages for call in samples}) == 1
    assert [run.answer for run in execution.agents] == ["7", "8", "7", "9", "8", "7"]


def test_the_order_of_dependencies_makes_no_other_agent():
    two = spec(agent("a"), agent("b"), agent("c", "a", "b", says="x"), agent("d", "b", "a", says="x"))
    worker = Worker()
    run(worker, two)
    assert {call.sample_index for call in worker.calls if duty(call) == "x"} == {0, 1}


def test_a_large_agent_is_several_samples_and_the_first_of_the_majority():
    texts = ["One. Answer: 8", "Two. Answer: 7.0", "no idea", "Four. Answer: 7", "Five. Answer: 9"]
    worker = Worker(lambda request: texts[request.sample_index])
    (execution,) = run(worker, spec(agent("a", capacity="large")))
    (only,) = execution.agents
    assert (only.answer, only.output, only.usage.calls, len(set(only.keys))) == (
        "7",
        "Two. Answer: 7.0",
        5,
        5,
    )
    assert [call.sample_index for call in worker.calls if duty(call)] == [0, 1, 2, 3, 4]


def test_a_large_agent_without_any_answer_gives_its_first_sample():
    worker = Worker(lambda request: f"no idea {'abcde'[request.sample_index]}")
    (execution,) = run(worker, spec(agent("a", capacity="large")))
    assert (execution.answer_text, execution.agents[0].answer) == ("no idea a", None)


def test_calculator():
    (execution,) = run(Worker(lambda request: " (10 - 3) / 2 \n"), spec(agent("a", role="equation_writer")))
    (only,) = execution.agents
    assert (only.status, only.answer, only.output) == (Status.OK, "3.5", "(10 - 3) / 2\nAnswer: 3.5")
    (execution,) = run(Worker(lambda request: "10 / 0"), spec(agent("a", role="equation_writer")))
    (only,) = execution.agents
    assert (only.status, only.answer, only.output) == (Status.NO_ANSWER, None, "10 / 0")
    assert only.note == "calculator: a division by zero"
    assert execution.answer_text == ""  # no number is dug out of what the calculator refused


PROGRAM = spec(agent("a", role="programming_expert"))


@pytest.mark.parametrize(
    "text",
    [
        "x = 3\nanswer = x + 4",
        "  x = 3\n  answer = x + 4",
        "```python\nx = 3\nanswer = x + 4\n```",
        "x = 3\nx + 4",
    ],
    ids=["plain", "indented", "fenced", "unnamed"],
)
def test_program(text):
    (execution,) = run(Worker(lambda request: text), PROGRAM)
    (only,) = execution.agents
    assert (only.status, only.answer) == (Status.OK, "7")
    assert only.output == f"{text.strip()}\nAnswer: 7"


def test_a_program_that_fails():
    (execution,) = run(Worker(lambda request: "answer = 1 / 0"), PROGRAM)
    (only,) = execution.agents
    assert (only.status, only.answer, only.output) == (Status.NO_ANSWER, None, "answer = 1 / 0")
    assert only.note.startswith("program: ZeroDivisionError")


@pytest.mark.parametrize("allow", [False, True])
def test_the_sandbox_is_left_only_on_request(monkeypatch, allow):
    asked = []

    async def run_program(code, *, allow_unsandboxed):
        asked.append(allow_unsandboxed)
        return ProgramResult(status="ok", value="7")

    monkeypatch.setattr("lemon_jax.runtime.executor.run_program", run_program)
    with caller(Worker()) as c:
        executor = Executor(c, read_answer, allow_unsandboxed=allow)
        asyncio.run(executor.execute(PROGRAM, PROBLEM))
    assert asked == [allow]


def test_nearest_option_uses_the_latest_dependency_that_compares():
    answers = {"a": "6 + 0.9", "b": "5 + 0", "c": "nothing to compute"}
    agents = [agent(name, role="equation_writer") for name in answers]
    tool = agent("s", *answers, role="nearest_option")
    (execution,) = run(
        Worker(lambda request: answers.get(duty(request), "")), spec(*agents, tool), problem=CHOICE
    )
    assert execution.answer_text == "Answer: A"
    assert execution.agents[-1].usage == Usage()
    (execution,) = run(
        Worker(lambda r: "6.9"), spec(agents[0], agent("s", "a", role="nearest_option")), problem=CHOICE
    )
    assert execution.agents[-1].answer == "C"


def test_majority_counts_a_value_for_its_option():
    answers = {"a": "Answer: B", "b": "6.9", "c": "7.1"}
    agents = [agent("a"), agent("b", role="equation_writer"), agent("c", role="equation_writer")]
    voters = spec(*agents, agent("s", "a", "b", "c", role="majority_vote"))
    worker = Worker(lambda request: answers.get(duty(request), ""))
    (execution,) = run(worker, voters, problem=CHOICE)
    assert execution.answer_text == "Answer: C"
    assert not [call for call in worker.calls if duty(call) == "s"]


def test_statuses_of_replies():
    def answer(request):
        texts = {"empty": " \n", "plain": "Answer: 7", "silent": "no idea"}
        if duty(request).startswith("cut"):
            return reply(request, "3 + 4", finish="length")
        return texts.get(duty(request), "")

    agents = [
        *(
            agent("empty"),
            agent("plain"),
            agent("silent"),
            agent("cut"),
            agent("cut2", role="equation_writer"),
        ),
        agent("reader", "empty", says="plain"),
        agent("vote", "empty", "silent", role="majority_vote"),
    ]
    worker = Worker(answer)
    (execution,) = run(worker, spec(*agents))
    found = {run.id: (run.status, run.answer) for run in execution.agents}
    assert found == {
        "empty": (Status.EMPTY, None),
        "plain": (Status.OK, "7"),
        "silent": (Status.OK, None),
        "cut": (Status.TRUNCATED, "4"),
        "cut2": (Status.TRUNCATED, "7"),
        "reader": (Status.OK, "7"),
        "vote": (Status.NO_ANSWER, None),
    }
    assert all(run.note for run in execution.agents if run.status is not Status.OK)
    assert not execution.infra_failed
    assert any("\n(no output)\n" in call.messages[1].content for call in worker.calls)


def test_a_failure_skips_what_depends_on_it_and_nothing_else():
    worker = Worker(lambda request: DOWN if duty(request) == "b" else "Answer: 7")
    after = spec(*DIAMOND.agents, agent("e", "d"), output="e")
    (execution,) = run(worker, after)
    assert [(run.id, run.status.value) for run in execution.agents] == [
        ("a", "OK"),
        ("b", "INFRA_FAILED"),
        ("c", "OK"),
        ("d", "SKIPPED"),
        ("e", "SKIPPED"),
    ]
    assert [run.note for run in execution.agents if run.note] == [
        "HTTP 503",
        "depends on b, which did not finish",
        "depends on d, which did not finish",
    ]
    counts = Counter(run.status for run in execution.agents)
    assert counts[Status.OK] + counts[Status.INFRA_FAILED] + counts[Status.SKIPPED] == len(after.agents)
    assert (execution.infra_failed, execution.answer_text) == (True, "")
    assert sorted(worker.duties) == ["a", "b", "c"]


def test_a_failure_is_asked_again_and_its_siblings_are_not():
    worker = Worker(lambda request: DOWN if duty(request) == "b" else "Answer: 7")
    with caller(worker) as c:
        executor = Executor(c, read_answer)
        first = asyncio.run(executor.execute(DIAMOND, PROBLEM))
        worker.answer = lambda request: "Answer: 7"
        second = asyncio.run(executor.execute(DIAMOND, PROBLEM))
    assert (first.infra_failed, second.infra_failed) == (True, False)
    assert Counter(worker.duties) == {"a": 1, "b": 2, "c": 1, "d": 1}


def test_one_failed_sample_of_a_large_agent_fails_it():
    worker = Worker(lambda request: DOWN if request.sample_index == 3 else "Answer: 7")
    (execution,) = run(worker, spec(agent("a", capacity="large")))
    assert execution.agents[0].status is Status.INFRA_FAILED


def test_an_edited_spec_runs_only_what_the_edit_reaches():
    worker = Worker(lambda request: f"{duty(request)} says so. Answer: 7")
    agents = {a.id: a for a in DIAMOND.agents}
    edited = spec(agents["a"], replace(agents["b"], duty="B!"), agents["c"], agents["d"])
    first, again, other = run(worker, DIAMOND, DIAMOND, edited)
    assert first == again
    assert sorted(worker.duties) == sorted(["a", "b", "c", "d", "B!", "d"])
    changed = {a.id for a, b in zip(first.agents, other.agents, strict=True) if a.keys != b.keys}
    assert changed == descendants(edited, "b")


def test_an_edit_that_changes_no_output_stops_there():
    worker = Worker()
    edited = spec(*(replace(a, duty="A!") if a.id == "a" else a for a in DIAMOND.agents))
    run(worker, DIAMOND, edited)
    assert Counter(worker.duties) == {"a": 1, "b": 1, "c": 1, "d": 1, "A!": 1}


def test_cost_of_one_agent_by_hand():
    worker = Worker(lambda request: "The answer is 7.")
    (execution,) = run(worker, spec(agent("a", capacity="medium")))
    prefix = len(fixed_prefix("math_solver").split()) + 1  # and the "." of the call that measures it
    prompt = len(fixed_prefix("math_solver").split()) + 1 + len(["Question:", "What", "is", "3", "+", "4?"])
    cost = 3.0 * (4 + 0.25 * (prompt - prefix) + 0.025 * prefix)
    expected = Usage(calls=1, prompt_tokens=prompt, prefix_tokens=prefix, generated_tokens=4, cost=cost)
    assert execution.usage == execution.agents[0].usage == expected


def test_tokens_that_a_server_does_not_report_are_counted_as_unknown():
    worker = Worker(lambda request: Reply(text="Answer: 7", finish="stop"))
    (execution,) = run(worker, spec(agent("a")))
    assert execution.usage == Usage(calls=1, unmetered=1)
    (half,) = run(
        Worker(lambda request: Reply(text="Answer: 7", finish="stop", prompt_tokens=5)), spec(agent("a"))
    )
    assert half.usage.unmetered == 1


def test_accounts_are_exact_under_concurrency_and_do_not_depend_on_the_cache():
    problems = [TextProblem(question=f"What is {i} + 4?") for i in range(8)]
    specs = [DIAMOND, baselines()["sc"], spec(agent("e", role="equation_writer", capacity="large"))]

    def answer(request):
        return " ".join(["3 + 4", "+ 1"][: 1 + request.sample_index % 2])

    async def everything(executor):
        jobs = [executor.execute(s, p) for s in specs for p in problems for _ in range(2)]
        return await asyncio.gather(*jobs)

    with caller(Worker(answer, delay_s=0.002)) as c:
        found = asyncio.run(everything(Executor(c, read_answer)))
        rates, capacity = c.pool.config.cost, c.pool.capacity
    expected = [run(Worker(answer), s, problem=p)[0] for s in specs for p in problems for _ in range(2)]
    assert found == expected
    for execution in found:
        for one in execution.agents:
            u = one.usage
            own = rates.generated * u.generated_tokens + rates.fixed_prefix * u.prefix_tokens
            own += rates.prompt * (u.prompt_tokens - u.prefix_tokens)
            assert u.cost == pytest.approx(capacity(one.capacity).price * own)
        total = execution.usage
        for field in ("calls", "prompt_tokens", "prefix_tokens", "generated_tokens"):
            assert getattr(total, field) == sum(getattr(one.usage, field) for one in execution.agents)
        assert total.cost == pytest.approx(sum(one.usage.cost for one in execution.agents))


@pytest.mark.parametrize("at", ["a", "b", "d"])
def test_what_a_backend_raises_reaches_the_caller_itself(at):
    def answer(request):
        if duty(request) == at:
            raise LemonError("models.m: the server does not start")
        return "Answer: 7"

    with pytest.raises(LemonError, match="does not start"):
        run(Worker(answer), DIAMOND)

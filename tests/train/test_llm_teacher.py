import asyncio
from types import SimpleNamespace

import pytest

from lemon_jax.backends import CapacityConfig, Reply, ScriptedBackend
from lemon_jax.bench import Task
from lemon_jax.errors import LemonError
from lemon_jax.spec import ROLES, Agent, Spec, dump, parse_strict
from lemon_jax.train import llm_teacher
from lemon_jax.train.llm_teacher import ask_specs, llm_specs, teacher_messages
from lemon_jax.train.sft import encode_examples

LEVEL = CapacityConfig(model="teacher", price=1.0, max_tokens=2000)
TASKS = [
    Task(id="n1", bench="own", question="How many is 2 and 3?", gold="5", kind="number"),
    Task(id="c1", bench="own", question="What is 2 + 3?", options=("4", "5"), gold="B", kind="choice"),
]
SPEC = Spec(
    agents=(Agent(id="a1", name="Solver", role="math_solver", duty="Add.", capacity="small"),), output="a1"
)
VALID = dump(SPEC)


def ask(script, *, tasks=TASKS, per_task=1, level=LEVEL, **backend):
    lines = []
    teacher = ScriptedBackend(script, **backend)
    specs = asyncio.run(ask_specs(teacher, level, tasks, per_task=per_task, report=lines.append))
    return specs, lines, teacher.calls


def test_valid_replies_are_kept_in_the_order_of_the_tasks():
    specs, lines, calls = ask(lambda _: VALID, per_task=3)
    assert specs == [(task, SPEC) for task in TASKS for _ in range(3)]
    assert lines == ["teacher: 6 specs kept (0 of them repaired), 0 refused, 0 calls failed"]
    assert sorted((c.sample_index, c.temperature) for c in calls) == [
        (0, 0.0), (0, 0.0), (1, 0.8), (1, 0.8), (2, 0.8), (2, 0.8),
    ]  # fmt: skip
    assert {c.max_tokens for c in calls} == {600}


def test_the_capacity_decides_temperature_and_limits():
    level = CapacityConfig(model="m", price=1.0, temperature=0.3, max_tokens=100)
    _, _, calls = ask(lambda _: VALID, per_task=2, level=level)
    assert {c.temperature for c in calls} == {0.0, 0.3}
    assert {(c.model, c.max_tokens) for c in calls} == {("m", 100)}


@pytest.mark.parametrize(
    "reply",
    [
        f"```yaml\n{VALID}```",
        f"Here is the spec:\n```\n{VALID}```\nIt adds.",
        VALID.replace('"Add."', "Add: 2 and 3."),
        VALID.replace("math_solver", "Math_Solver"),
    ],
)
def test_repaired_replies_are_kept_in_canonical_form(reply):
    specs, lines, _ = ask(lambda _: reply, tasks=TASKS[:1])
    assert lines == ["teacher: 1 specs kept (1 of them repaired), 0 refused, 0 calls failed"]
    assert parse_strict(dump(specs[0][1])) == specs[0][1]


BROKEN = [
    "I would use one solver.",
    VALID.replace("math_solver", "wizard"),
    VALID[: len(VALID) // 2],
    VALID.replace("a1", "1.a"),  # executable after repair, but never valid as written
    "",
]


@pytest.mark.parametrize("reply", BROKEN)
def test_broken_replies_are_refused(reply):
    with pytest.raises(LemonError, match=r"no valid spec in 2 replies \(all were refused\)"):
        ask(lambda _: reply)


def test_broken_replies_do_not_cost_the_good_ones():
    replies = [VALID, f"```\n{VALID}```", *BROKEN]
    specs, lines, _ = ask(lambda r: replies[r.sample_index], tasks=TASKS[:1], per_task=len(replies))
    assert [spec for _, spec in specs] == [SPEC, SPEC]
    assert lines == ["teacher: 2 specs kept (1 of them repaired), 5 refused, 0 calls failed"]


def test_a_dead_server_is_not_asked_on(monkeypatch):
    monkeypatch.setattr(llm_teacher, "BATCH", 2)
    teacher = ScriptedBackend(lambda _: VALID, failures=1.0)
    with pytest.raises(LemonError, match="failed with scripted failure"):
        asyncio.run(ask_specs(teacher, LEVEL, TASKS, per_task=5, report=lambda _: None))
    assert len(teacher.calls) == 2


def test_some_failures_are_counted():
    specs, (line,), _ = ask(lambda _: VALID, per_task=30, failures=0.5)
    assert 0 < len(specs) < 60
    assert line.endswith(f"{60 - len(specs)} calls failed")


def test_a_prompt_that_does_not_fit_is_no_reply(monkeypatch):
    async def overflows(self, request):
        return Reply(text="", finish="overflow", error="context overflow: 3000 tokens")

    monkeypatch.setattr(ScriptedBackend, "_answer", overflows)
    with pytest.raises(LemonError, match="the last call failed with context overflow: 3000 tokens"):
        ask(lambda _: VALID)


def test_the_prompt_teaches_the_language():
    system, user = teacher_messages(TASKS[0])
    assert all(f"\n- {name}: " in system.content for name in ROLES)
    example = system.content.split("Example spec:\n")[1]
    assert dump(parse_strict(example)) == example
    assert "no options" in user.content
    assert "B) 5" in teacher_messages(TASKS[1])[1].content
    assert "no options" not in teacher_messages(TASKS[1])[1].content


def test_specs_longer_than_the_policy_writes_are_skipped_on_request():
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()), eos_id=0)
    policy = SimpleNamespace(tokenizer=tokenizer, max_new=4, prompt_ids=tokenizer.encode)
    pairs = [("task", "abc"), ("task", "abcd")]  # the end token counts too
    (example,) = encode_examples(policy, pairs, skip_long=True)
    assert example.completion == (*b"abc", 0)
    with pytest.raises(LemonError, match="has 5 tokens, the policy writes at most 4"):
        encode_examples(policy, pairs)


def test_through_a_worker_file():
    # The shipped test double solves tasks; it does not write specs.
    with pytest.raises(LemonError, match="use --teacher sampler"):
        asyncio.run(llm_specs(TASKS, "scripted", per_task=1, report=lambda _: None))
    with pytest.raises(LemonError, match="cannot read the worker file"):
        asyncio.run(llm_specs(TASKS, "none.toml", per_task=1))


def test_long_jobs_tell_how_far_they_are(monkeypatch):
    monkeypatch.setattr(llm_teacher, "BATCH", 4)
    specs, lines, _ = ask(lambda _: VALID, per_task=3)
    assert len(specs) == 6
    assert lines[0] == "teacher: 4 of 6 replies, 4 specs kept"
    assert len(lines) == 2

"""Made-up problems: training prompts, and what a run without any data set can be tried on.

The same (kind, n, seed, split) gives the same tasks everywhere. A question belongs to one split by its hash,
so that train and test stay apart whatever the seeds.
"""

import hashlib
from fractions import Fraction
from random import Random
from typing import Literal

from lemon_jax.bench.money_problems import MONEY_TEMPLATES
from lemon_jax.bench.problem import Problem
from lemon_jax.bench.quantity_problems import QUANTITY_TEMPLATES
from lemon_jax.bench.story_problems import NUMBER_TEMPLATES
from lemon_jax.bench.task import LETTERS, Kind, Task
from lemon_jax.numbers import format_number

CHOICE_TEMPLATES = (*MONEY_TEMPLATES, *QUANTITY_TEMPLATES)
N_OPTIONS = 5


def generate(kind: Kind, n: int, seed: int, *, split: Literal["train", "test"] = "train") -> tuple[Task, ...]:
    """`n` different tasks, the templates taken in turn; each answer is exact.

    Raises:
        ValueError: more tasks asked for than the templates can make; code tasks, of which there are none.
    """
    if kind == "code":
        raise ValueError("there are no templates of code tasks")
    rng = Random(f"{kind}/{split}/{seed}")
    templates = CHOICE_TEMPLATES if kind == "choice" else NUMBER_TEMPLATES
    tasks: list[Task] = []
    seen: set[str] = set()
    for attempt in range(100 * n + 1000):
        if len(tasks) == n:
            return tuple(tasks)
        made = templates[(len(tasks) + attempt // 40) % len(templates)](rng)
        question = made.question if isinstance(made, Problem) else made[0]
        if question in seen or _split_of(question) != split:
            continue
        task_id = f"sample-{kind}-{split}-{seed}-{len(tasks)}"
        if isinstance(made, Problem):
            drawn = _choice_task(made, task_id, rng)
        else:
            drawn = Task(id=task_id, bench="sample", question=question, gold=str(made[1]), kind="number")
        if drawn:
            seen.add(question)
            tasks.append(drawn)
    if len(tasks) == n:
        return tuple(tasks)
    raise ValueError(f"only {len(tasks)} different {kind} tasks could be made, {n} were asked for")


def _split_of(question: str) -> str:
    return "test" if hashlib.sha256(question.encode()).digest()[0] % 4 == 0 else "train"


def _choice_task(problem: Problem, task_id: str, rng: Random) -> Task | None:
    """Five options that read alike and differ in value; None when the drawn numbers do not allow it."""
    answer = problem.answer
    as_fractions = answer.denominator not in (1, 2, 4, 5, 10, 20, 25, 50, 100) or (
        0 < answer < 1 and "$" not in problem.unit
    )
    wrong: list[Fraction] = []
    near = (
        _near_fractions(answer) if as_fractions and answer < 1 else [answer + d for d in (1, 2, -1, 3, 5, 10)]
    )
    slips = list(problem.slips)
    rng.shuffle(slips)
    for value in (*slips, *near):
        plain = as_fractions or (value * 100).denominator == 1
        if value > 0 and value != answer and value not in wrong and plain:
            wrong.append(value)
    if len(wrong) < N_OPTIONS - 1:
        return None
    values = [answer, *wrong[: N_OPTIONS - 1]]
    rng.shuffle(values)
    money = "$" in problem.unit and any(value.denominator != 1 for value in values)
    texts = tuple(problem.unit.format(_show(value, as_fractions, money)) for value in values)
    gold = LETTERS[values.index(answer)]
    return Task(
        id=task_id, bench="sample", question=problem.question, options=texts, gold=gold, kind="choice"
    )


def _near_fractions(p: Fraction) -> list[Fraction]:
    n, d = p.numerator, p.denominator
    return [Fraction(n + 1, d + 1), Fraction(n, d + 1), Fraction(n, d + 2), Fraction(n + 1, d + 3)]


def _show(value: Fraction, as_fraction: bool, money: bool) -> str:
    if money and not as_fraction:
        return f"{value.numerator * 100 // value.denominator / 100:.2f}"
    return str(value) if as_fraction else format_number(value)

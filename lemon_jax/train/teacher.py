"""The SFT teacher: a sampler of diverse, valid specs that fit their task.

It knows which compositions of roles make sense for a task with or without options, and phrases
duties from what the task is about. It does not know which of them work best: that is what the
policy learns from rewards.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from lemon_jax.spec import ROLES, Agent, Family, Spec

# What a task is about: the first topic whose words occur. Words are matched at word starts.
TOPICS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("probability", ("probab", "chance", "dice", "coin", "random")),
    ("interest", ("interest", "invest", "deposit", "per annum", "loan")),
    ("speed", ("speed", "km/h", "mph", "train", "miles per", "travel", "stream", "upstream")),
    ("work rate", ("complete the work", "finish the", "work together", "pipe", "tank", "days to")),
    ("ratio", ("ratio", "proportion")),
    ("percent", ("percent", "%", "profit", "discount", "loss of")),
    ("age", ("years old", "age of", "ages", "older", "younger")),
    ("average", ("average", "mean of", "median")),
    (
        "geometry",
        ("area", "perimeter", "radius", "triangle", "rectangle", "circle", "square", "angle", "volume"),
    ),
    ("counting", ("how many ways", "arrange", "permut", "combination", "committee", "different")),
    ("divisibility", ("divisible", "remainder", "multiple of", "factor", "integer", "digit", "prime")),
    ("sharing", ("each", "equally", "share", "split", "groups", "packs", "boxes", "bags", "rows")),
    ("money", ("dollar", "$", "cost", "price", "earn", "pay", "rs", "cents")),
    ("remainder", ("left", "remain", "gave", "ate", "lost", "used", "sold")),
    ("totals", ("total", "altogether", "in all", "sum")),
)

# Duties by role. {topic} is the topic's word, {asked} what is asked for, {n} how many numbers there are.
DUTIES: dict[str, tuple[str, ...]] = {
    "answerer": ("Give the final {asked} only.", "Answer the {topic} question at once."),
    "math_solver": (
        "Solve the {topic} problem step by step.",
        "Find the {asked}, one short step a line.",
        "Use all {n} numbers where they matter and find the {asked}.",
        "Work out the {topic} question and state the {asked}.",
    ),
    "mathematical_analyst": (
        "Name the {topic} quantities and how they relate.",
        "Write the relation that gives the {asked}.",
        "Say which of the {n} numbers matter and how.",
    ),
    "equation_writer": (
        "Write one expression for the {asked}.",
        "Write the {topic} expression with the numbers of the question.",
        "Combine the {n} numbers in one expression.",
    ),
    "programming_expert": (
        "Write a short program that computes the {asked}.",
        "Compute the {topic} question in a few lines.",
        "Set up the {n} numbers as variables and compute the {asked}.",
    ),
    "inspector": (
        "Check each step on the {topic} and correct the {asked}.",
        "Recompute the {asked} and correct it if it is wrong.",
        "Check that all {n} numbers are used rightly.",
    ),
    "option_chooser": (
        "Choose the option that matches the {asked}.",
        "Compare the work with the options and choose.",
    ),
    "nearest_option": ("Choose the option nearest to the {asked}.",),
    "majority_vote": ("Take the most frequent {asked}.",),
    "knowledge_expert": (
        "Recall the facts that decide the question and choose.",
        "Name the facts that decide it, then choose.",
        "Rule out the wrong options by what you know.",
    ),
    "critic": (
        "Doubt each claim of the work and decide.",
        "Find the weakest claim of the work and choose anew.",
    ),
    "coder": (
        "Write the function.",
        "Write it as simply as you can.",
        "Write it and mind its examples.",
    ),
    "algorithm_designer": ("Plan the function step by step.", "Name its steps and edge cases."),
    "test_analyst": ("Try the examples of the task on the code.", "Try edge cases on the code."),
    "bug_fixer": ("Mend the code where it is wrong.", "Check the code against its description and mend it."),
}
NAMES: dict[str, tuple[str, ...]] = {
    "answerer": ("Answerer", "Quick answerer"),
    "math_solver": ("Math solver", "{Topic} solver", "Careful solver"),
    "mathematical_analyst": ("Mathematical analyst", "{Topic} analyst"),
    "equation_writer": ("Equation writer", "{Topic} equation writer"),
    "programming_expert": ("Programming expert", "{Topic} programmer"),
    "inspector": ("Inspector", "{Topic} inspector"),
    "option_chooser": ("Option chooser",),
    "nearest_option": ("Nearest option",),
    "majority_vote": ("Majority vote",),
    "knowledge_expert": ("Knowledge expert", "Domain expert"),
    "critic": ("Critic", "Careful critic"),
    "coder": ("Coder", "Careful coder"),
    "algorithm_designer": ("Algorithm designer",),
    "test_analyst": ("Test analyst",),
    "bug_fixer": ("Bug fixer",),
}

# Compositions: agents as (role, parents by index). "solver" stands for any role that solves,
# "computer" for one whose reply a tool evaluates.
Plan = tuple[tuple[str, tuple[int, ...]], ...]
SHARED: tuple[tuple[float, Plan], ...] = (
    (3.0, (("math_solver", ()),)),
    (1.0, (("answerer", ()),)),
    (1.5, (("mathematical_analyst", ()), ("math_solver", (0,)))),
    (2.0, (("solver", ()), ("inspector", (0,)))),
    (1.0, (("mathematical_analyst", ()), ("solver", (0,)), ("inspector", (0, 1)))),
    (1.0, (("solver", ()), ("solver", ()), ("inspector", (0, 1)))),
    (1.5, (("solver", ()), ("solver", ()), ("solver", ()), ("majority_vote", (0, 1, 2)))),
)
NUMBER: tuple[tuple[float, Plan], ...] = (
    (4.0, (("computer", ()),)),
    (2.0, (("mathematical_analyst", ()), ("computer", (0,)))),
    (1.0, (("computer", ()), ("computer", ()), ("majority_vote", (0, 1)))),
)
CHOICE: tuple[tuple[float, Plan], ...] = (
    (1.5, (("option_chooser", ()),)),
    (4.0, (("computer", ()), ("nearest_option", (0,)))),
    (2.0, (("solver", ()), ("option_chooser", (0,)))),
    (1.5, (("mathematical_analyst", ()), ("computer", (0,)), ("nearest_option", (1,)))),
    (1.0, (("computer", ()), ("math_solver", ()), ("option_chooser", (0, 1)))),
)
KNOWLEDGE: tuple[tuple[float, Plan], ...] = (
    (3.0, (("answerer", ()),)),
    (4.0, (("knowledge_expert", ()),)),
    (1.0, (("option_chooser", ()),)),
    (2.0, (("knowledge_expert", ()), ("critic", (0,)))),
    (1.5, (("knowledge_expert", ()), ("option_chooser", (0,)))),
    (1.0, (("knowledge_expert", ()), ("knowledge_expert", ()), ("critic", (0, 1)))),
    (
        1.5,
        (("knowledge_expert", ()), ("knowledge_expert", ()), ("answerer", ()), ("majority_vote", (0, 1, 2))),
    ),
)
CODE: tuple[tuple[float, Plan], ...] = (
    (4.0, (("coder", ()),)),
    (2.0, (("algorithm_designer", ()), ("coder", (0,)))),
    (2.0, (("coder", ()), ("bug_fixer", (0,)))),
    (1.0, (("coder", ()), ("test_analyst", (0,)), ("bug_fixer", (0, 1)))),
    (1.0, (("coder", ()), ("coder", ()), ("bug_fixer", (0, 1)))),
    (1.0, (("algorithm_designer", ()), ("coder", (0,)), ("bug_fixer", (0, 1)))),
)
COMPUTERS = ("equation_writer", "programming_expert")
SOLVERS = (*COMPUTERS, "math_solver")
CAPACITY_WEIGHTS = {"small": 0.5, "medium": 0.4, "large": 0.1}
DEFAULT_DUTY_RATE = 0.3  # how often an agent keeps its base role's duty


def describe(question: str) -> dict[str, str]:
    """The words that duties are phrased with.

    In:  "How many boxes of 5 muffins does Mia need for 20 muffins?"
    Out: {"topic": "sharing", "Topic": "Sharing", "asked": "number of boxes", "n": "2"}
    """
    lower = question.lower()
    topic = next(
        (name for name, words in TOPICS if any(re.search(r"(?<!\w)" + re.escape(w), lower) for w in words)),
        "number",
    )
    asked = "value"
    if found := re.search(r"how many (?:more |of the )?([a-z]{3,14})", lower):
        asked = f"number of {found[1]}"
    elif re.search(r"how much|what (?:is|was) the (?:price|cost)", lower):
        asked = "amount"
    elif found := re.search(r"what (?:is|was|will be|are) the (?:\w+ )?([a-z]{3,14})", lower):
        asked = found[1]
    count = len(re.findall(r"\d[\d,]*(?:\.\d+)?", question))
    return {"topic": topic, "Topic": topic.capitalize(), "asked": asked, "n": str(max(2, min(count, 9)))}


def write_spec(question: str, options: Sequence[str], rng: random.Random, *, family: Family = "math") -> Spec:
    """One spec for a task. Every result is strictly valid, whatever the task says."""
    plans = {"math": SHARED + (CHOICE if options else NUMBER), "knowledge": KNOWLEDGE, "code": CODE}[family]
    (plan,) = rng.choices([p for _, p in plans], weights=[w for w, _ in plans])
    words = describe(question)
    agents = []
    for number, (kind, parents) in enumerate(plan, start=1):
        role = rng.choice({"solver": SOLVERS, "computer": COMPUTERS}.get(kind, (kind,)))
        base = ROLES[role]
        duty = base.default_duty
        if rng.random() > DEFAULT_DUTY_RATE:
            duty = rng.choice(DUTIES[role]).format(**words)
        capacity = "small"  # tools alone have no capacity to choose
        if base.llm:
            (capacity,) = rng.choices(list(CAPACITY_WEIGHTS), weights=list(CAPACITY_WEIGHTS.values()))
        agents.append(
            Agent(
                id=f"a{number}",
                name=rng.choice(NAMES[role]).format(**words),
                role=role,
                duty=duty,
                capacity=capacity,
                depends_on=tuple(f"a{p + 1}" for p in parents),
            )
        )
    return Spec(agents=tuple(agents), output=agents[-1].id)

"""How likely a simulated worker is right: item-response abilities, and what an agent's place changes.

    P(right) = guess + (1 - guess) * sigmoid(ability[level, role] - difficulty(task)
                 + relevant_duty * [duty relevant] + right_input * right inputs - wrong_input * wrong inputs
                 + plan * [a plan among the inputs] - context * needless inputs - chain * levels beyond two)

`guess` is one over the number of options (Birnbaum's three-parameter model), 0 where there are none. Given
its task and inputs, each call is independent of all others. All parameters stand in one file,
`workers/simulated_parameters.toml`; `experiments/calibrate.py` fits them.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

from lemon_jax.backends.worker_keys import LEVELS
from lemon_jax.errors import LemonError

Kind = Literal["right", "wrong", "nothing", "plan"]  # what an input carries
EFFECTS = ("relevant_duty", "right_input", "wrong_input", "plan", "context", "chain")
HARMS = ("wrong_input", "context", "chain")  # these are subtracted
FREE_INPUTS, FREE_LEVELS = 2, 2  # more inputs are needless; deeper chains harm
# Words that a duty may use whatever the task is about.
_GENERAL = frozenset(
    [
        "answer",
        "answers",
        "check",
        "choose",
        "compute",
        "correct",
        "correctly",
        "each",
        "expression",
        "final",
        "find",
        "from",
        "give",
        "given",
        "line",
        "matter",
        "most",
        "name",
        "number",
        "numbers",
        "once",
        "option",
        "problem",
        "program",
        "question",
        "quantities",
        "relation",
        "result",
        "right",
        "short",
        "solve",
        "step",
        "steps",
        "that",
        "their",
        "them",
        "they",
        "this",
        "value",
        "what",
        "when",
        "where",
        "which",
        "with",
        "work",
        "write",
    ]
)
_WORD = re.compile(r"[^\W\d_]{4,}")


@dataclass(frozen=True, kw_only=True)
class Level:
    """One capacity's workers. A reply's tokens are those of all its `calls`, of which one is passed on."""

    ability: dict[str, float]  # by base role, in logits
    tokens: dict[str, float]  # generated tokens of a reply, by base role
    calls: int = 1  # how often the prompt is read


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameter file; `digest` names its content in the identity of the workers."""

    levels: dict[str, Level]
    effects: dict[str, float]
    difficulty: dict[str, float]  # mean by bench, "other" for the rest
    spread: float  # standard deviation of a task's difficulty around that mean
    wrong_shares: tuple[float, ...]  # of the likeliest wrong answers, in their order
    tokens_per_word: float
    digest: str


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a call's text says about its agent's place, as `situation` counts it."""

    relevant: bool = False
    right: int = 0
    wrong: int = 0
    plan: bool = False
    context: int = 0
    chain: int = 0

    def counts(self) -> tuple[int, ...]:
        """How often each of EFFECTS applies, in their order."""
        return int(self.relevant), self.right, self.wrong, int(self.plan), self.context, self.chain


def situation(kinds: Sequence[Kind], levels: Sequence[int], *, relevant: bool) -> Situation:
    """Count the inputs. `levels` are theirs: 1 for an agent without inputs, else one more than its inputs'.

    Needless are inputs beyond two, plans beyond the first, and inputs without an answer or a plan.
    """
    plans = kinds.count("plan")
    return Situation(
        relevant=relevant,
        right=kinds.count("right"),
        wrong=kinds.count("wrong"),
        plan=plans > 0,
        context=max(0, len(kinds) - FREE_INPUTS) + max(0, plans - 1) + kinds.count("nothing"),
        chain=max(0, level_of(levels) - FREE_LEVELS),
    )


def level_of(levels: Sequence[int]) -> int:
    """The place in its chain of an agent whose inputs have these levels."""
    return 1 + max(levels, default=0)


def is_relevant(duty: str, question: str) -> bool:
    """Whether a duty speaks of this task: it names a word of the question, general words aside.

    Words have four letters at least and are compared by their first four.

    In:  "Find the number of boxes.", "How many boxes does Mia need?"    Out: True
    In:  "Solve the problem step by step.", the same                     Out: False
    """
    return not _topic_words(duty).isdisjoint(_topic_words(question))


@lru_cache(maxsize=4096)
def _topic_words(text: str) -> frozenset[str]:
    return frozenset(word[:4] for word in _WORD.findall(text.casefold()) if word not in _GENERAL)


def relevant_word(question: str) -> str | None:
    """The shortest duty that is relevant: a word of the question; None where it has none."""
    words = (word for word in _WORD.findall(question.casefold()) if word not in _GENERAL)
    return next(words, None)


def difficulty(parameters: Parameters, bench: str, question: str) -> float:
    """A task's difficulty in logits: its bench's mean, and a normal deviate that its text's hash draws."""
    mean = parameters.difficulty.get(bench, parameters.difficulty["other"])
    return mean + parameters.spread * NormalDist().inv_cdf(uniform("difficulty", question))


def uniform(*parts: str) -> float:
    """A number in (0, 1) that the texts decide."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return (int.from_bytes(digest[:6], "big") + 0.5) / 2**48


def p_right(
    parameters: Parameters, level: str, role: str, place: Situation, *, difficulty: float, options: int
) -> float:
    """The formula above; `options` is their number, 0 for a task without any.

    Raises LemonError for a role that the parameters do not know.
    """
    ability = parameters.levels[level].ability
    if role not in ability:
        raise LemonError(
            f"simulated workers have no ability for the role {role} at level {level}; they answer number and "
            f"choice tasks by {', '.join(ability)}; use other roles, or add it to the parameter file"
        )
    logit = ability[role] - difficulty
    for name, count in zip(EFFECTS, place.counts(), strict=True):
        effect = parameters.effects[name]
        logit += (-effect if name in HARMS else effect) * count
    guess = 1 / options if options else 0.0
    return guess + (1 - guess) / (1 + math.exp(-max(-500.0, min(500.0, logit))))


def wrong_probabilities(parameters: Parameters, count: int) -> tuple[float, ...]:
    """Shares of `count` wrong answers among the wrong replies; those without a share of their own get 0."""
    shares = parameters.wrong_shares[:count]
    return tuple(share / sum(shares) for share in shares) + (0.0,) * (count - len(shares))


def load_parameters(path: Path | None = None) -> Parameters:
    """The shipped parameter file, or another one. Raises LemonError naming what is wrong in it."""
    where = path or (files("lemon_jax.backends") / "workers" / "simulated_parameters.toml")
    try:
        text = where.read_text(encoding="utf-8")
        return _checked(tomllib.loads(text), hashlib.sha256(text.encode()).hexdigest()[:8])
    except OSError as error:
        raise LemonError(
            f"{where}: cannot read the parameters: {error.strerror}; name another file"
        ) from None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise LemonError(f"{where}: not a parameter file: {what}; compare it with the shipped one") from None


def _checked(data: dict[str, Any], digest: str) -> Parameters:
    parameters = Parameters(
        levels={
            name: Level(
                ability=_numbers(f"levels.{name}.ability", data["levels"][name]["ability"]),
                tokens=_numbers(f"levels.{name}.tokens", data["levels"][name]["tokens"]),
                calls=data["levels"][name]["calls"],
            )
            for name in LEVELS
        },
        effects=_numbers("effects", data["effects"]),
        difficulty=_numbers("difficulty", data["difficulty"]),
        spread=float(data["spread"]),
        wrong_shares=tuple(float(share) for share in data["wrong_shares"]),
        tokens_per_word=float(data["tokens_per_word"]),
        digest=digest,
    )
    if set(parameters.effects) != set(EFFECTS):
        raise ValueError(f"effects has {', '.join(parameters.effects)}, expected {', '.join(EFFECTS)}")
    if "other" not in parameters.difficulty:
        raise KeyError("difficulty.other")
    for name, level in parameters.levels.items():
        if set(level.ability) != set(level.tokens):
            raise ValueError(f"levels.{name}: ability and tokens must name the same roles")
        if min(level.tokens.values(), default=1) < 1 or type(level.calls) is not int or level.calls < 1:
            raise ValueError(f"levels.{name}: calls and all tokens must be at least 1")
    shares = parameters.wrong_shares
    if not shares or min(shares) <= 0 or parameters.spread < 0 or parameters.tokens_per_word <= 0:
        raise ValueError("wrong_shares and tokens_per_word must be positive, spread must not be negative")
    return parameters


def _numbers(where: str, table: dict[str, Any]) -> dict[str, float]:
    for key, value in table.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{where}.{key} is {value!r}, expected a finite number")
    return {key: float(value) for key, value in table.items()}

"""What past executions say of an edit that is not executed: predicted contrasts, which cost no worker token.

A single contrast is mostly luck: with success rates near p each of its two rewards varies by p (1 - p), and
what an edit changes on average is far smaller. But the same change comes back in other tasks. So the rewards
of a task are taken as linear in what its specs are made of, with a level of the task's own,

    R(y, task) = b(task) + theta . phi(y) + noise,      theta ~ N(0, prior^2 I),  noise ~ N(0, noise^2)

and theta is learned from differences within tasks alone: of each rollout to the mean of its group, and of
each original to its edit. With A the sum of x x' over these differences x of phi, and b that of x times their
difference of reward, the posterior is normal (Bishop 2006, eq. 3.50 to 3.54):

    mean = (A + ridge I)^-1 b,    covariance = noise^2 (A + ridge I)^-1,    ridge = noise^2 / prior^2

An edit's predicted contrast is mean . (phi(y) - phi(y')), with the standard error that the covariance gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lemon_jax.spec import CAPACITIES, ROLES, Spec, edges, parse

NOISE, PRIOR = 0.5, 0.3  # of rewards: a success that comes half of the time; what one choice may change

_LLM = tuple(name for name, role in ROLES.items() if role.llm)
# Of any agent: its role, its capacity, a duty of its own; of the output agent again, with what feeds it.
_NAMES = (
    *(f"role/{name}" for name in ROLES),
    *(f"capacity/{level}" for level in CAPACITIES),
    "own_duty",
    "dependencies",
    "agents",
    *(f"output/{name}" for name in ROLES),
    *(f"answers/{name}/{level}" for name in _LLM for level in CAPACITIES),
)
_INDEX = {name: i for i, name in enumerate(_NAMES)}

Vector = NDArray[np.float64]


def features(spec: Spec) -> Vector:
    """phi [F]: counts of what a spec is made of. What answers is the nearest LLM agent before the output
    that is not read by a tool alone: the output agent itself, or for a tool each agent that it reads."""
    x = np.zeros(len(_NAMES))

    def count(name: str, by: float = 1.0) -> None:
        x[_INDEX[name]] += by

    for agent in spec.agents:
        count(f"role/{agent.role}")
        if ROLES[agent.role].llm:
            count(f"capacity/{agent.capacity}")
            count("own_duty", float(agent.duty != ROLES[agent.role].default_duty))
    count("dependencies", edges(spec))
    count("agents", len(spec.agents))
    output = spec.agent(spec.output)
    count(f"output/{output.role}")
    answering = [output] if ROLES[output.role].llm else [spec.agent(i) for i in output.depends_on]
    asked = [agent for agent in answering if ROLES[agent.role].llm]
    for agent in asked:
        count(f"answers/{agent.role}/{agent.capacity}", 1 / len(asked))
    return x


@dataclass
class ContrastModel:
    """The sums A [F, F] and b [F] of the differences seen so far."""

    ridge: float = (NOISE / PRIOR) ** 2
    products: NDArray[np.float64] = field(default_factory=lambda: np.zeros((len(_NAMES), len(_NAMES))))
    targets: Vector = field(default_factory=lambda: np.zeros(len(_NAMES)))

    def learn(self, differences: Iterable[tuple[Vector, float]]) -> None:
        """Add differences of features and of rewards; those with an unknown reward are left out."""
        for x, difference in differences:
            if not math.isnan(difference):
                self.products += np.outer(x, x)
                self.targets += difference * x

    def predict(self, pairs: Sequence[tuple[Spec, Spec]]) -> tuple[Vector, Vector]:
        """Contrast and standard error [N] of each (original, edited) pair."""
        if not pairs:
            return np.zeros(0), np.zeros(0)
        x = np.stack([features(original) - features(edited) for original, edited in pairs])
        posterior = np.linalg.inv(self.products + self.ridge * np.eye(len(_NAMES)))
        variance = NOISE**2 * np.einsum("nf,fg,ng->n", x, posterior, x)
        return x @ (posterior @ self.targets), np.sqrt(np.maximum(variance, 0.0))


def differences_of(
    specs: Sequence[Spec | None],
    rewards: Sequence[float],
    group: int,
    contrasts: Iterable[tuple[Spec, Spec, float]],
) -> list[tuple[Vector, float]]:
    """A step's differences: of the rollouts of each group of `group` to its mean, those without a spec or
    with an unknown reward (NaN) left out; then of each (original, edited, D)."""
    out = []
    for start in range(0, len(specs), group):
        members = range(start, min(start + group, len(specs)))
        known = [(specs[i], rewards[i]) for i in members if not math.isnan(rewards[i])]
        pairs = [(features(spec), reward) for spec, reward in known if spec is not None]
        if len(pairs) > 1:
            x = np.stack([x for x, _ in pairs])
            r = np.array([r for _, r in pairs])
            out += list(zip(x - x.mean(axis=0), (r - r.mean()).tolist(), strict=True))
    out += [(features(original) - features(edited), d) for original, edited, d in contrasts]
    return out


def recall(rows: Iterable[Mapping[str, Any]], group: int) -> ContrastModel:
    """The model that a run had after these lines of its executions.jsonl."""
    model = ContrastModel()
    step: list[Mapping[str, Any]] = []
    for row in rows:
        if step and row.get("step") != step[0].get("step"):
            model.learn(_of_rows(step, group))
            step = []
        step.append(row)
    if step:
        model.learn(_of_rows(step, group))
    return model


def _of_rows(rows: Sequence[Mapping[str, Any]], group: int) -> list[tuple[Vector, float]]:
    raise NotImplementedError

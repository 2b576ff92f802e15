"""What past executions say of an edit that is not executed: predicted contrasts, which cost no worker token.

A single contrast is mostly luck: with success rates near p each of its two rewards varies by p (1 - p), and
what an edit changes on average is far smaller. But the same change comes back in other tasks. So the rewards
of a task are taken as linear in what its specs are made of, with a level of the task's own,

    R(y, task) = b(task) + theta . phi(y) + noise,      theta ~ N(0, prior^2 I),  noise ~ N(0, noise^2)

and theta is learned from differences within tasks alone: of each rollout to the mean of its group, and of
each original to its edit. With A the sum of w x x' over these differences x of phi, and b that of w x times
their difference of reward, the posterior is normal (Bishop 2006, eq. 3.50 to 3.54):

    mean = (A + ridge I)^-1 b,    covariance = noise^2 (A + ridge I)^-1,    ridge = noise^2 / prior^2

Weights w make up for the variance of a difference: 1 for a deviation from the mean of a group, since those
of n specs hold the information of n - 1 independent rewards, and K / 2 for a contrast of K pairs of
executions, whose variance is 2 noise^2 / K. An original in its group and the same one in its contrast are
taken as independent.

An edit's predicted contrast is mean . (phi(y) - phi(y')), with the standard error that the covariance gives.
One within a standard error of 0 is not learned from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lemon_jax.orchestrator import Rollout
from lemon_jax.spec import CAPACITIES, ROLES, Edit, Spec, applicable, edges
from lemon_jax.train.contrasts import Contrast

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

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> ContrastModel:
        """The model that `arrays` came of."""
        return cls(products=np.array(arrays["products"]), targets=np.array(arrays["targets"]))

    def arrays(self) -> dict[str, np.ndarray]:
        """For a checkpoint."""
        return {"products": self.products, "targets": self.targets}

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
    rollouts: Sequence[Rollout], rewards: Sequence[float], group: int, contrasts: Iterable[Contrast]
) -> list[tuple[Vector, float]]:
    """A step's differences, each times the root of its weight: of each rollout to the mean of its group,
    those that are invalid or whose reward is unknown (NaN) left out; then of each original to its edit."""
    out = []
    for start in range(0, len(rollouts), group):
        members = [i for i in range(start, start + group) if rollouts[i].valid and not math.isnan(rewards[i])]
        if len(members) > 1:
            x = np.stack([features(_spec(rollouts[i])) for i in members])
            r = np.array([rewards[i] for i in members])
            out += list(zip(x - x.mean(axis=0), (r - r.mean()).tolist(), strict=True))
    for c in contrasts:
        root = math.sqrt(len(c.differences) / 2)
        x = features(_spec(rollouts[c.index])) - features(c.edit.spec)
        out.append((root * x, root * c.difference))
    return out


def predicted_edits(
    model: ContrastModel,
    rollouts: Sequence[Rollout],
    families: Sequence[str],
    count: int,
    rng: random.Random,
    executed: Iterable[Contrast] = (),
    masked: Container[int] = (),
) -> list[tuple[int, Edit, float]]:
    """At most `count` edits (rollout, edit, predicted contrast) that were not executed and are more than a
    standard error from 0, drawn evenly: of each valid rollout one, then of each another one, and so on.
    None of the rollouts `masked`, whose tokens the update does not count."""
    known = {(c.index, c.edit.text) for c in executed}
    valid = [i for i, rollout in enumerate(rollouts) if rollout.valid and i not in masked]
    made = {i: applicable(rollouts[i].parsed, families) for i in valid}
    found = [(i, edit) for i in valid for edit in made[i] if (i, edit.text) not in known]
    predicted, errors = model.predict([(_spec(rollouts[i]), edit.spec) for i, edit in found])
    waiting: dict[int, list[tuple[int, Edit, float]]] = {}
    for (i, edit), d, error in zip(found, predicted.tolist(), errors.tolist(), strict=True):
        if abs(d) > error:
            waiting.setdefault(i, []).append((i, edit, d))
    order = list(waiting)
    rng.shuffle(order)
    for edits in waiting.values():
        rng.shuffle(edits)
    rounds = max(map(len, waiting.values()), default=0)
    chosen = [waiting[i][n] for n in range(rounds) for i in order if n < len(waiting[i])]
    return chosen[:count]


def prediction_metrics(
    model: ContrastModel, rollouts: Sequence[Rollout], contrasts: Sequence[Contrast]
) -> dict[str, float | None]:
    """How well the model foresaw the executed contrasts it has not learned from yet: the mean square of
    D - prediction, and of D alone, which is the error of a model that predicts 0."""
    known = [c for c in contrasts if not math.isnan(c.difference)]
    predicted, _ = model.predict([(_spec(rollouts[c.index]), c.edit.spec) for c in known])
    d = np.array([c.difference for c in known])
    if not known:
        return {"prediction_error": None, "prediction_error_of_0": None}
    return {
        "prediction_error": float(np.mean((d - predicted) ** 2)),
        "prediction_error_of_0": float(np.mean(d**2)),
    }


def _spec(rollout: Rollout) -> Spec:
    assert rollout.parsed.spec is not None  # only valid ones come here
    return rollout.parsed.spec

"""The reward of a rollout: task success + token-efficiency bonus - graph-structure cost."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lemon_jax.errors import LemonError
from lemon_jax.runtime import Usage
from lemon_jax.spec import Spec, edges
from lemon_jax.train.evaluate import Scored


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Weights; LEMON's own are not published, these are this project's.

    `half_cost` is the cost of a task at which the efficiency bonus is half its maximum; with
    `tokens="plain"` it counts prompt and generated tokens instead, whatever their price.
    """

    success: float = 1.0
    efficiency: float = 0.3
    half_cost: float = 200.0
    agent: float = 0.02  # for each agent after the first
    dependency: float = 0.01
    invalid: float = -0.5  # the whole reward of a spec that is not strictly valid
    tokens: Literal["cost", "plain"] = "cost"


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward and its terms, which add up to it; `total` is NaN for a masked execution."""

    success: float = 0.0
    efficiency: float = 0.0
    structure: float = 0.0
    invalid: float = 0.0
    masked: bool = False

    @property
    def total(self) -> float:
        if self.masked:
            return math.nan
        return self.success + self.efficiency + self.structure + self.invalid

    def to_dict(self) -> dict[str, float | bool | None]:
        """Terms rounded for a log line; a masked total is None, which JSON can hold."""
        terms = {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {"total": None if self.masked else round(self.total, 6)} | terms


def invalid_reward(config: RewardConfig) -> Reward:
    """The penalty branch: a spec that cannot be executed as written."""
    return Reward(invalid=config.invalid)


def masked_reward() -> Reward:
    """An infrastructure failure says nothing about a spec: it is left out, never counted as 0."""
    return Reward(masked=True)


def reward(config: RewardConfig, spec: Spec, usage: Usage, *, correct: bool) -> Reward:
    """R = success + efficiency / (1 + cost / half_cost) - structure, METHOD's sum of three terms."""
    return Reward(
        success=config.success * correct,
        efficiency=efficiency(config, counted(config, usage)),
        structure=structure(config, len(spec.agents), edges(spec)),
    )


def counted(config: RewardConfig, usage: Usage) -> float:
    """What the efficiency term counts: cost, or plain tokens."""
    return usage.cost if config.tokens == "cost" else usage.prompt_tokens + usage.generated_tokens


def efficiency(config: RewardConfig, cost: Any) -> Any:
    """The bonus for what `counted` counts; of a number or of an array of them."""
    return config.efficiency / (1.0 + cost / config.half_cost)


def structure(config: RewardConfig, agents: int, dependencies: int) -> float:
    """The term of a spec's graph, at most 0."""
    return -(config.agent * (agents - 1) + config.dependency * dependencies)


def reward_of(config: RewardConfig, scored: Scored, *, valid: bool = True) -> Reward:
    """The reward of an execution; `valid` is the verdict on its spec as it was written.

    Raises LemonError if it rewards few tokens and the workers' server does not report them.
    """
    if not valid or scored.parsed.spec is None or scored.execution is None:
        return invalid_reward(config)
    if scored.infra_failed:
        return masked_reward()
    if config.efficiency and scored.execution.usage.unmetered:
        # As 0 they would make every spec free, and the dearest ones look as good as the cheapest.
        raise LemonError(
            "a worker's server does not report token counts (`usage` of its replies), which the reward's "
            "efficiency term needs; use a server that does, or set efficiency = 0 under [reward] of a preset"
        )
    return reward(config, scored.parsed.spec, scored.execution.usage, correct=scored.grade.correct)

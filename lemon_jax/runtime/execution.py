"""What executing a spec leaves behind: statuses, outputs, tokens and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from lemon_jax.backends import CostRates


class Status(StrEnum):
    """How one agent ended. INFRA_FAILED and SKIPPED say nothing about the spec, only about servers."""

    OK = "OK"
    EMPTY = "EMPTY"  # the worker replied with nothing, or the prompt did not fit its context
    TRUNCATED = "TRUNCATED"  # the reply hit its token limit
    NO_ANSWER = "NO_ANSWER"  # a tool could make no value of the reply or of the dependencies
    INFRA_FAILED = "INFRA_FAILED"  # the worker could not be reached
    SKIPPED = "SKIPPED"  # a dependency failed or was skipped


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens of worker calls, and their cost."""

    calls: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0  # of the prompt tokens, those of the roles' fixed prefixes
    generated_tokens: int = 0
    cost: float = 0.0
    unmetered: int = 0  # calls whose tokens the server did not report: tokens and cost are too low by theirs

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            prefix_tokens=self.prefix_tokens + other.prefix_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
            cost=self.cost + other.cost,
            unmetered=self.unmetered + other.unmetered,
        )


def call_cost(
    price: float,
    rates: CostRates,
    *,
    prompt_tokens: int,
    prefix_tokens: int,
    generated_tokens: int,
) -> float:
    """Cost of one call, or of several at one price, in units of a generated token at price 1.

    price x (generated + 0.25 x prompt beyond the fixed prefix + 0.025 x fixed prefix), with the
    rates of the worker file; the prefix is cheaper because any server caches it.
    """
    return price * (
        rates.generated * generated_tokens
        + rates.prompt * (prompt_tokens - prefix_tokens)
        + rates.fixed_prefix * prefix_tokens
    )


@dataclass(frozen=True, kw_only=True)
class AgentRun:
    """One agent's part in an execution."""

    id: str
    role: str
    capacity: str
    status: Status
    output: str = ""
    answer: str | None = None
    usage: Usage = Usage()
    note: str = ""  # why a status is not OK
    keys: tuple[str, ...] = ()  # call keys, for the accounting of cached calls
    overflow: bool = False  # EMPTY, and why: the prompt did not fit


@dataclass(frozen=True, kw_only=True)
class Execution:
    """A spec executed on one task; `answer_text` is the output agent's output, "" where that is NO_ANSWER."""

    agents: tuple[AgentRun, ...]
    answer_text: str
    infra_failed: bool

    @property
    def usage(self) -> Usage:
        return sum((a.usage for a in self.agents), Usage())

    def at_prices(self, prices: Mapping[str, float], rates: CostRates) -> Execution:
        """The same tokens at other prices, by capacity."""
        return replace(self, agents=tuple(_at_price(a, prices[a.capacity], rates) for a in self.agents))


def _at_price(run: AgentRun, price: float, rates: CostRates) -> AgentRun:
    usage = run.usage
    cost = call_cost(
        price,
        rates,
        prompt_tokens=usage.prompt_tokens,
        prefix_tokens=usage.prefix_tokens,
        generated_tokens=usage.generated_tokens,
    )
    return replace(run, usage=replace(usage, cost=cost))

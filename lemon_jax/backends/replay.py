"""Recorded calls only: the workers of a replay, none of which can be asked anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from lemon_jax.backends.types import Reply, Request
from lemon_jax.backends.workers import CapacityConfig, CostRates, ModelConfig, WorkerConfig
from lemon_jax.errors import LemonError

_SHOWN = 60  # characters of the request in the message


class MissingCall(LemonError):
    """A run asked for a call that the recording it replays does not hold."""


class ReplayBackend:
    """Stands for the weights whose replies were recorded. The call store answers every recorded call before
    a backend is asked, so whatever comes here is missing."""

    def __init__(self, name: str, identity: str) -> None:
        self._name = name
        self._identity = identity

    @property
    def identity(self) -> str:
        return self._identity

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Raises MissingCall, whatever is asked."""
        request = requests[0]
        text = request.messages[-1].content
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
        raise MissingCall(
            f"a call of {self._name} is not in the recording (sample {request.sample_index}, "
            f"{request.max_tokens} tokens at most, ends with {shown!r}); the replay has left the recorded run"
        )
        yield  # what makes this a generator

    async def aclose(self) -> None: ...


def replay_workers(facts: Mapping[str, Any]) -> WorkerConfig:
    """The worker file of a recorded run, by what its manifest says of them (`provenance.worker_facts`): the
    same capacities, prices and identities, with recordings in place of models.

    Raises LemonError where the manifest says too little.
    """
    try:
        capacities = {level: CapacityConfig(**values) for level, values in facts["settings"].items()}
        models = {
            capacity.model: ModelConfig(
                name=capacity.model, backend="replay", identity=facts["identities"][level]
            )
            for level, capacity in capacities.items()
        }
        cost = CostRates(**facts["cost"])
        return WorkerConfig(source=facts["source"], models=models, capacities=capacities, cost=cost)
    except (KeyError, TypeError, AttributeError) as error:
        raise LemonError(
            f"the manifest says too little of the run's workers ({type(error).__name__}: {error}); it is of "
            "another version of this project, export the run anew"
        ) from error

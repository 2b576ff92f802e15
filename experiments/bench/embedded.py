"""The worker calls of a real training step: as the executor sends them, and one after another.

python experiments/bench/embedded.py
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
from side_by_side import machine, versions

from lemon_jax.backends import Backend, Message, Reply, Request, WorkerPool, worker_config
from lemon_jax.bench import load
from lemon_jax.extraction import read_answer
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.runtime import CallStore, Executor
from lemon_jax.runtime.calls import Caller
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.presets import load_preset
from lemon_jax.train.rollouts import run_step, tasks_of_step

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Heard:
    """A backend that notes what it is asked and passes it on."""

    inner: Backend
    asked: list[Request] = field(default_factory=list)
    generated: int = 0

    @property
    def identity(self) -> str:
        return self.inner.identity

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        self.asked += requests
        async for index, reply in self.inner.generate(requests):
            if reply.error:
                raise RuntimeError(f"a worker call failed: {reply.error}")
            self.generated += reply.generated_tokens or 0
            yield index, reply

    async def aclose(self) -> None:
        await self.inner.aclose()


class HeardPool(WorkerPool):
    """Worker servers, each behind a `Heard`."""

    def backend(self, model: str) -> Backend:
        inner = super().backend(model)
        if not isinstance(inner, Heard):
            self._backends[model] = inner = Heard(inner)
        return inner

    def heard(self) -> list[Heard]:
        return [backend for backend in self._backends.values() if isinstance(backend, Heard)]


async def step_together(bench: str, seed: int) -> tuple[float, list[Request], int]:
    """Seconds of one training step's executions on warm servers, its requests, its generated tokens."""
    config = replace(load_preset(ROOT / "experiments" / "presets" / "default.toml", bench), seed=seed)
    tasks = tasks_of_step(load(bench).train, config, 0)
    policy = Orchestrator.load(ROOT / "checkpoints" / "warmstart")
    rollouts = policy.write(
        [task.prompt() for task in tasks], jax.random.key(seed), group=config.group,
        temperature=config.update.temperature,
    )  # fmt: skip
    pool = HeardPool(worker_config("embedded"))
    async with pool:
        await warm(pool)
        with tempfile.TemporaryDirectory() as folder:
            store = CallStore(Path(folder) / "calls.sqlite")
            executor = Executor(Caller(pool, store), read_answer)
            before = [(heard, heard.generated) for heard in pool.heard()]
            for heard, _ in before:
                heard.asked.clear()
            started = time.perf_counter()
            await run_step(executor, config, 0, tasks, rollouts, EditSampler())
            seconds = time.perf_counter() - started
            store.close()
        asked = [request for heard in pool.heard() for request in heard.asked]
        return seconds, asked, sum(heard.generated - then for heard, then in before)


async def one_after_another(requests: Sequence[Request]) -> tuple[float, int]:
    """Seconds and generated tokens of the same calls, each sent when the one before has come back."""
    pool = HeardPool(worker_config("embedded"))
    async with pool:
        await warm(pool)
        before = sum(heard.generated for heard in pool.heard())
        started = time.perf_counter()
        for request in requests:
            async for _ in pool.backend(request.model).generate([request]):
                pass
        seconds = time.perf_counter() - started
        return seconds, sum(heard.generated for heard in pool.heard()) - before


async def warm(pool: HeardPool) -> None:
    """Start every server with a call that shares nothing with the measured ones."""
    for level in ("small", "medium", "large"):
        model = pool.capacity(level).model
        hello = Request(model=model, messages=(Message(role="user", content="Say yes."),), max_tokens=4)
        async for _ in pool.backend(model).generate([hello]):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bench", default="multiarith")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print(machine())
    print(versions("xllamacpp", "jax"))
    ratios = []
    for seed in range(args.rounds):
        together, requests, tokens = asyncio.run(step_together(args.bench, seed))
        apart, tokens_apart = asyncio.run(one_after_another(requests))
        ratios.append(apart / together)
        print(
            f"step of seed {seed}: {len(requests)} calls; together {together:.1f} s, {tokens / together:.0f} "
            f"tokens/s; one after another {apart:.1f} s, {tokens_apart / apart:.0f} tokens/s; "
            f"{ratios[-1]:.2f} x"
        )
    print(f"together / one after another: {min(ratios):.2f} to {max(ratios):.2f} x (target 2)")


if __name__ == "__main__":
    main()

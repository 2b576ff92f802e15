"""The worker calls of a real training step: as the executor sends them, one after another, and their bound.

python experiments/bench/embedded.py

The bound is what llama.cpp itself needs for the same tokens with all slots full: every token of the prompts
once that is not in another prompt's beginning, at the rate of a long prompt, and every generated token at the
rate of all slots decoding together (what `llama-batched-bench -pps` measures, which the package lacks). CPU
seconds of the servers stand beside seconds: where other work shares the cores, they say more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
from side_by_side import machine, versions

from lemon_jax.backends import (
    Backend,
    EmbeddedBackend,
    Message,
    Reply,
    Request,
    WorkerConfig,
    WorkerPool,
    worker_config,
)
from lemon_jax.backends.slot_prompts import common, prompt_text
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
    counts: list[int] = field(default_factory=list)  # generated tokens, in the order of `asked`

    @property
    def generated(self) -> int:
        return sum(self.counts)

    def clear(self) -> None:
        self.asked.clear()
        self.counts.clear()

    @property
    def identity(self) -> str:
        return self.inner.identity

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        first = len(self.asked)
        self.asked += requests
        self.counts += [0] * len(requests)
        async for index, reply in self.inner.generate(requests):
            if reply.error:
                raise RuntimeError(f"a worker call failed: {reply.error}")
            self.counts[first + index] = reply.generated_tokens or 0
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

    def heard_of(self, model: str) -> Heard:
        backend = self.backend(model)
        assert isinstance(backend, Heard)
        return backend

    def heard(self) -> list[Heard]:
        return [backend for backend in self._backends.values() if isinstance(backend, Heard)]


@dataclass(kw_only=True)
class Run:
    """What some calls took. `cpu_s` is that of the servers."""

    seconds: float
    cpu_s: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s, {self.cpu_s:.1f} CPU s, {self.tokens / self.seconds:.1f} tokens/s"


class Watch:
    """Seconds, CPU seconds of the child processes, and generated tokens since it was made."""

    def __init__(self, pool: HeardPool) -> None:
        self._pool = pool
        self._before = time.perf_counter(), children_cpu_s(), self._generated()

    def _generated(self) -> int:
        return sum(heard.generated for heard in self._pool.heard())

    def read(self) -> Run:
        started, cpu, generated = self._before
        seconds = time.perf_counter() - started
        return Run(seconds=seconds, cpu_s=children_cpu_s() - cpu, tokens=self._generated() - generated)


def children_cpu_s() -> float:
    """CPU seconds that the running child processes have used (Linux)."""
    total = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def step_together(workers: WorkerConfig, bench: str, seed: int) -> tuple[Run, list[Request], list[int]]:
    """One training step's executions on warm servers; its requests, and their generated tokens."""
    config = replace(load_preset(ROOT / "experiments" / "presets" / "default.toml", bench), seed=seed)
    tasks = tasks_of_step(load(bench).train, config, 0)
    policy = Orchestrator.load(ROOT / "checkpoints" / "warmstart")
    rollouts = policy.write(
        [task.prompt() for task in tasks], jax.random.key(seed), group=config.group,
        temperature=config.update.temperature,
    )  # fmt: skip
    pool = HeardPool(workers)
    async with pool:
        await warm(pool)
        with tempfile.TemporaryDirectory() as folder:
            store = CallStore(Path(folder) / "calls.sqlite")
            executor = Executor(Caller(pool, store), read_answer)
            for heard in pool.heard():
                heard.clear()
            watch = Watch(pool)
            await run_step(executor, config, 0, tasks, rollouts, EditSampler())
            run = watch.read()
            store.close()
        asked = [request for heard in pool.heard() for request in heard.asked]
        return run, asked, [count for heard in pool.heard() for count in heard.counts]


async def one_after_another(workers: WorkerConfig, requests: Sequence[Request]) -> Run:
    """The same calls, each sent when the one before has come back."""
    pool = HeardPool(workers)
    async with pool:
        await warm(pool)
        watch = Watch(pool)
        for request in requests:
            async for _ in pool.backend(request.model).generate([request]):
                pass
        return watch.read()


async def bound(workers: WorkerConfig, requests: Sequence[Request], counts: Sequence[int]) -> Run:
    """What the engine needs for these tokens at its own rates with all slots full."""
    seconds = cpu_s = 0.0
    pool = HeardPool(workers)
    async with pool:
        await warm(pool)
        for model in sorted({request.model for request in requests}):
            own = [(r, n) for r, n in zip(requests, counts, strict=True) if r.model == model]
            slots = workers.models[model].slots
            prompt = await rate(pool, model, [filler(0, 500)], 1)
            alone = await rate(pool, model, [filler(slots, 4)], 32)
            decoding = await rate(pool, model, [filler(i, 4) for i in range(slots)], 32)
            prompt_tokens = distinct_characters([r for r, _ in own]) / CHARACTERS
            generated = sum(n for _, n in own)
            seconds += prompt_tokens * prompt[0] + generated * decoding[0]
            cpu_s += prompt_tokens * prompt[1] + generated * decoding[1]
            print(
                f"  {model}: {1 / prompt[0]:.1f} tokens/s of a prompt, {1 / alone[0]:.1f} drawn in one slot, "
                f"{1 / decoding[0]:.1f} in {slots}; {prompt_tokens:.0f} prompt tokens, {generated} drawn"
            )
    return Run(seconds=seconds, cpu_s=cpu_s, tokens=sum(counts))


async def rate(pool: HeardPool, model: str, prompts: list[str], new: int) -> tuple[float, float]:
    """Seconds and CPU seconds a token: of the prompt if one token is drawn, else of those drawn."""
    backend = pool.heard_of(model).inner
    assert isinstance(backend, EmbeddedBackend)
    client = await backend._started()  # beside the queue: the engine alone is measured
    ask = [Request(model=model, messages=(Message(role="user", content=p),), max_tokens=new) for p in prompts]
    watch = Watch(pool)
    replies = await asyncio.gather(*(client.answer(r, {"ignore_eos": True}) for r in ask))
    run = watch.read()
    assert not any(reply.error for reply in replies), replies
    tokens = [(r.prompt_tokens if new == 1 else r.generated_tokens) or 0 for r in replies]
    return run.seconds / sum(tokens), run.cpu_s / sum(tokens)


def filler(seed: int, words: int) -> str:
    """A text that begins like no other."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=3)) for _ in range(words))


CHARACTERS = 3.8  # of a token, in role prompts and questions


def distinct_characters(requests: Sequence[Request]) -> int:
    """Characters of the prompts, a common beginning of several counted once."""
    texts = sorted(prompt_text(request) for request in requests)
    return sum(len(text) - common(text, before) for before, text in zip(["", *texts], texts, strict=False))


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
    parser.add_argument("--threads", type=int, help="of each server (the cores that may be used)")
    args = parser.parse_args()
    print(machine())
    print(versions("xllamacpp", "jax"))
    workers = worker_config("embedded")
    if args.threads:
        models = {name: replace(model, threads=args.threads) for name, model in workers.models.items()}
        workers = replace(workers, models=models)
    ratios, shares = [], []
    for seed in range(args.rounds):
        together, requests, counts = asyncio.run(step_together(workers, args.bench, seed))
        apart = asyncio.run(one_after_another(workers, requests))
        print(f"step of seed {seed}: {len(requests)} calls\n  together: {together}", flush=True)
        print(f"  one after another: {apart}", flush=True)
        least = asyncio.run(bound(workers, requests, counts))
        print(f"  bound: {least}", flush=True)
        ratios.append((apart.seconds / together.seconds, apart.cpu_s / together.cpu_s))
        shares.append((least.seconds / together.seconds, least.cpu_s / together.cpu_s))
    for what, values in (
        ("one after another / together (target 2)", ratios),
        ("bound / together (target 0.80)", shares),
    ):
        seconds, cpu = zip(*values, strict=True)
        print(f"{what}: {min(seconds):.2f} to {max(seconds):.2f}; by CPU s {min(cpu):.2f} to {max(cpu):.2f}")


if __name__ == "__main__":
    main()

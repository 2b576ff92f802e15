"""A tiny policy that has learned to write a few valid specs, and scripted workers around it.

The policy is real throughout: its specs are sampled, scored and trained on by the code under test.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

from lemon_jax.backends import ScriptedBackend, WorkerPool, worker_config
from lemon_jax.bench import generate
from lemon_jax.extraction import read_answer
from lemon_jax.model import PRESETS, Decoder, Tokenizer, train_tokenizer
from lemon_jax.orchestrator import Orchestrator, Rollout
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.spec import Agent, Spec, dump, parse
from lemon_jax.train.sft import SFTConfig, encode_examples, train
from lemon_jax.train.teacher import write_spec

TASKS = generate("number", 8, seed=0)
CHOICES = generate("choice", 4, seed=0)


def agent(agent_id: str, role: str, duty: str, capacity: str, *parents: str) -> Agent:
    return Agent(id=agent_id, name=role, role=role, duty=duty, capacity=capacity, depends_on=parents)


def pair(first: Agent, second: Agent) -> Spec:
    return Spec(agents=(first, second), output="a2")


# What the tiny policy learns to write, each with edits of other kinds; of one length, so that one
# program is compiled.
SOLVER = pair(
    agent("a1", "mathematical_analyst", "Say what matters.", "small"),
    agent("a2", "math_solver", "Solve it.", "medium", "a1"),
)
CHECKED = pair(
    agent("a1", "equation_writer", "Write it.", "small"),
    agent("a2", "inspector", "Check the work and correct the answer.", "large", "a1"),
)
ALONE = pair(
    agent("a1", "equation_writer", "Write it.", "small"),
    agent("a2", "equation_writer", "Write one expression for the calculator.", "medium"),
)
LEARNED = (SOLVER, CHECKED, ALONE)


def teacher_specs(count: int, seed: int = 0) -> list[str]:
    """Canonical specs of the teacher over generated tasks of both kinds."""
    rng = random.Random(seed)
    tasks = [*TASKS, *CHOICES]
    return [dump(write_spec(t.question, t.options, rng)) for t, _ in zip(tasks * count, range(count))]  # noqa: B905


def make_tokenizer() -> Tokenizer:
    texts = [*(t.prompt() for t in [*TASKS, *CHOICES]), *teacher_specs(60), *map(dump, LEARNED * 20)]
    with tempfile.TemporaryDirectory() as folder:
        return train_tokenizer(texts, Path(folder) / "tokenizer.model", 700)


def untrained(tokenizer: Tokenizer, *, seed: int = 0, max_new: int = 112, layers: int = 2) -> Orchestrator:
    config = replace(PRESETS["tiny"], vocab_size=tokenizer.vocab_size, num_layers=layers)
    decoder = Decoder(config, rngs=nnx.Rngs(seed))
    return Orchestrator(decoder, config, tokenizer, max_prompt=64, max_new=max_new)


def learned_policy(tokenizer: Tokenizer, losses: list[float] | None = None) -> Orchestrator:
    """Trained on LEARNED until most of what it samples is valid."""
    policy = untrained(tokenizer)
    pairs = [(t.prompt(), dump(LEARNED[i % 3])) for i, t in enumerate([*TASKS] * 6)]
    config = SFTConfig(steps=180, batch=8, learning_rate=1.5e-2, warmup=5, weight_decay=0.0)
    seen = losses if losses is not None else []
    with optax_promotion():
        return train(policy, encode_examples(policy, pairs), config, lambda step, loss: seen.append(loss))


def optax_promotion():
    """Adam's bias correction raises a float to an integer power, which strict promotion refuses."""
    return jax.numpy_dtype_promotion("standard")


def rollout(tokenizer: Tokenizer, text: str, *, prompt: Sequence[int] = (1, 5, 6), ids=None) -> Rollout:
    """A finished rollout of this text, by its canonical ids or by given ones; log-probabilities made up."""
    token_ids = (*(ids if ids is not None else tokenizer.encode(text)), tokenizer.eos_id)
    decoded = tokenizer.decode(token_ids[:-1])
    return Rollout(
        prompt_ids=tuple(prompt),
        token_ids=token_ids,
        log_probs=(-1.0,) * len(token_ids),
        finished=True,
        text=decoded,
        parsed=parse(decoded),
    )


class ScriptedPool(WorkerPool):
    """The scripted worker file's capacities; `options` go to every backend."""

    def __init__(self, **options) -> None:
        super().__init__(worker_config("scripted"))
        self._options = options
        self.opened: dict[str, ScriptedBackend] = {}

    def backend(self, model: str) -> ScriptedBackend:
        if model not in self.opened:
            self.opened[model] = ScriptedBackend(identity=f"scripted:1:{model}", **self._options)
        return self.opened[model]

    @property
    def num_calls(self) -> int:
        return sum(len(b.calls) for b in self.opened.values())


@contextmanager
def workers(store: CallStore | None = None, **options) -> Iterator[tuple[Executor, CallStore, ScriptedPool]]:
    """An executor on scripted workers, its call store (in memory unless given) and its pool."""
    own = store or CallStore(None)
    pool = ScriptedPool(**options)
    try:
        yield Executor(Caller(pool, own), read_answer), own, pool
    finally:
        if store is None:
            own.close()

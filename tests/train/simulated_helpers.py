"""A simulated pool, its executor, and a short way to write specs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Caller, CallStore, Executor
from lemon_jax.spec import ROLES, Agent, Spec
from lemon_jax.train.simulation import seal


def simulated_pool(tasks, seed=0):
    config = worker_config("simulated")
    models = {name: replace(model, seed=seed) for name, model in config.models.items()}
    return WorkerPool(replace(config, models=models), world=seal(tasks))


@contextmanager
def executor_of(pool):
    store = CallStore(None)
    try:
        yield Executor(Caller(pool, store), read_answer)
    finally:
        store.close()


def spec_of(*agents, output=None):
    """Agents as "role capacity parent,parent": ids are a1, a2, …; a duty follows a colon."""
    made = []
    for number, text in enumerate(agents, start=1):
        head, _, duty = text.partition(": ")
        role, capacity, *parents = head.split()
        made.append(
            Agent(
                id=f"a{number}",
                name=ROLES[role].title,
                role=role,
                duty=duty or ROLES[role].default_duty,
                capacity=capacity,
                depends_on=tuple(parents[0].split(",")) if parents else (),
            )
        )
    return Spec(agents=tuple(made), output=output or made[-1].id)

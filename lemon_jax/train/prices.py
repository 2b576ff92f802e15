"""The prices of a run's tasks, and what the policy is told of them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lemon_jax.backends import WorkerPool
from lemon_jax.bench import Prices, Task
from lemon_jax.spec import CAPACITIES
from lemon_jax.train.config import RunConfig

_DRAWN = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0)


def at_prices(tasks: Iterable[Task], prices: Prices, config: RunConfig, pool: WorkerPool) -> tuple[Task, ...]:
    """The tasks at these prices. Without any (an empty table) they cost what the worker file says, which they
    carry only if the policy is to be told."""
    if not prices and not config.tell_prices:
        return tuple(tasks)
    table = prices or tuple(pool.capacity(level).price for level in CAPACITIES)
    return tuple(replace(task, prices=table) for task in tasks)


def random_prices(rng: random.Random) -> Prices:
    """A table as one may be told: a higher capacity costs as much or more."""
    return tuple(sorted(rng.choice(_DRAWN) for _ in CAPACITIES))


def with_price_line(text: str, prices: Prices) -> str:
    """What a policy reads of a task whose prices it is told. They come first: a text that is too long for the
    policy loses its middle.

    # "Prices: small 1, medium 3, large 10\\nHow many ..."
    """
    told = ", ".join(f"{level} {price:g}" for level, price in zip(CAPACITIES, prices, strict=True))
    return f"Prices: {told}\n{text}"


def policy_text(task: Task, config: RunConfig) -> str:
    """What the policy reads of a task. Raises ValueError for a task without prices that are to be told."""
    if not config.tell_prices:
        return task.prompt()
    if task.prices is None:
        raise ValueError(f"{task.id} has no prices that the policy could be told")
    return with_price_line(task.prompt(), task.prices)


def training_texts(tasks: Sequence[Task], config: RunConfig) -> Iterator[str]:
    """All that the policy may read in training: each task at each table that it may get."""
    tables = config.price_tables if config.tell_prices else ()
    for task in tasks:
        for prices in tables or (task.prices,):
            yield policy_text(replace(task, prices=prices), config)

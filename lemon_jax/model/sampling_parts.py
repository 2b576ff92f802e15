"""Sampling on a CPU in parts that run at the same time.

The products of a decoding step are too small to be split over cores: a batch of 64 rows keeps one core busy.
Two batches of 32 rows keep two. How a batch is split depends on its size alone, never on the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from lemon_jax.model.decoder import Decoder
from lemon_jax.model.sampling import Samples
from lemon_jax.model.sharding import mesh_of

PART_ROWS = 32  # smaller parts cost more by their rows than a second core gains


def count_parts(prompts: int, group: int) -> int:
    """The most parts of equal size with `PART_ROWS` rows or more."""
    return max(
        n for n in range(1, prompts + 1) if prompts % n == 0 and (n == 1 or prompts // n * group >= PART_ROWS)
    )


def sample_in_parts(
    run: Callable[..., Samples],
    decoder: Decoder,
    prompts_NxP: Int[np.ndarray, "prompts slots"],
    prompt_lengths_N: Int[np.ndarray, " prompts"],
    key: Key[Array, ""],
    *rest: Any,
    group: int,
    **static: Any,
) -> Samples:
    """What `run` (`sample` or `sample_constrained`) gives for these prompts, `rest` and `static`.

    Each row draws with the key that it has in the whole batch, so that the parts change nothing but rounding.
    On accelerators and meshes there is one part.
    """
    prompts = len(prompts_NxP)
    whole = jax.default_backend() != "cpu" or mesh_of(decoder) is not None
    parts = 1 if whole else count_parts(prompts, group)
    if parts == 1:
        return run(decoder, prompts_NxP, prompt_lengths_N, key, *rest, group=group, **static)
    size = prompts // parts
    one_compiles = threading.Lock()

    def part(start: int) -> Samples:
        mine = slice(start, start + size)
        with one_compiles:  # the first of them; the call itself returns while the device computes
            samples = run(
                decoder, prompts_NxP[mine], prompt_lengths_N[mine], key, *rest,
                group=group, first_row=start * group, **static,
            )  # fmt: skip
        return jax.device_get(samples)

    # What one thread gives to a CPU device runs in order; what several give, at the same time.
    with ThreadPoolExecutor(parts) as pool:
        each = list(pool.map(part, range(0, prompts, size)))
    return jax.tree.map(lambda *xs: np.concatenate(xs), *each)

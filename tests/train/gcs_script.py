"""Checkpoints at gs://, as test_gcs starts it with the clients led to a server of the test's own."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lemon_jax.model import PRESETS, Decoder
from lemon_jax.train.checkpoint import Checkpoints
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.edit_sampler import EditSampler
from lemon_jax.train.update import init_state

SAMPLER = EditSampler(sums=(0.1, 0.2, 0.3), weights=(0.4, 0.5, 0.6))


def state_of(step: int):
    _, params = nnx.split(Decoder(replace(PRESETS["tiny"], num_layers=1), rngs=nnx.Rngs(0)))
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) + np.asarray(step, x.dtype)), init_state(params, UpdateConfig())
    )


def save(address: str, *steps: int) -> None:
    checkpoints = Checkpoints(address)
    for step in steps:
        checkpoints.save(step, state_of(step), SAMPLER)
    checkpoints.close()


def restored(address: str, expected: int) -> None:
    """The state of step `expected` comes back, every leaf."""
    checkpoints = Checkpoints(address)
    found = checkpoints.restore(state_of(0), EditSampler())
    checkpoints.close()
    assert found is not None
    step, state, sampler, _ = found
    assert (step, sampler.sums, sampler.weights) == (expected, SAMPLER.sums, SAMPLER.weights)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(expected)), strict=True):
        np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s", force=True)
    what, address, *steps = sys.argv[1:]
    {"save": save, "restored": restored}[what](address, *map(int, steps))
    print("done")

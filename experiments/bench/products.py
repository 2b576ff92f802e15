"""How fast a few rows are multiplied with a large matrix, by how it lies, and whether the batch decides bits.

python experiments/bench/products.py

What a decoding step of a worker is made of, in the sizes of Qwen2.5-Coder 1.5B: rows of bfloat16 inputs, sums
in fp32. "in x out" is a matrix whose rows are inputs, as `model.decoder` has it; "out x in" one whose rows
are outputs, as `model.serving` has it and model files do. The last column says whether the rows of a batch
come out with the same bits as in a batch of 32: only then could a step of fewer rows give the same replies.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from side_by_side import in_turn, machine, median, versions

ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 128, 256)
MATRICES = {"gate and up": (1536, 17920), "down": (8960, 1536), "qkv": (1536, 2048)}  # inputs, outputs
LIKE = 32


@jax.jit
def in_by_out(x_NxI: Array, w_IxO: Array) -> Array:
    """x w, a row of w an input."""
    return jnp.einsum("ni,io->no", x_NxI, w_IxO, preferred_element_type=jnp.float32)


@jax.jit
def out_by_in(x_NxI: Array, w_OxI: Array) -> Array:
    """x w^T, a row of w an output."""
    return jnp.einsum("ni,oi->no", x_NxI, w_OxI, preferred_element_type=jnp.float32)


def done(way: Callable[[Array, Array], Array], x: Array, w: Array) -> Array:
    return jax.block_until_ready(way(x, w))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(machine())
    print(versions("jax"))
    rng = np.random.default_rng(0)
    for name, (inputs, outputs) in MATRICES.items():
        w_OxI = jnp.asarray(rng.standard_normal((outputs, inputs)), jnp.bfloat16)
        w_IxO = jnp.asarray(np.ascontiguousarray(np.asarray(w_OxI).T))
        x_NxI = jnp.asarray(rng.standard_normal((max(ROWS), inputs)), jnp.bfloat16)
        like = np.asarray(out_by_in(x_NxI[:LIKE], w_OxI))
        for rows in ROWS:
            x = x_NxI[:rows]
            seconds = in_turn(
                {
                    "in x out": partial(done, in_by_out, x, w_IxO),
                    "out x in": partial(done, out_by_in, x, w_OxI),
                },
                args.rounds,
            )
            slow, fast = (median(seconds[way]) for way in ("in x out", "out x in"))
            work = 2 * rows * inputs * outputs / 1e9
            common = min(rows, LIKE)
            same = np.array_equal(np.asarray(out_by_in(x, w_OxI))[:common], like[:common])
            print(
                f"{name} {inputs} x {outputs}, {rows:3d} rows: in x out {work / slow:3.0f}, "
                f"out x in {work / fast:3.0f} GFLOP/s, {slow / fast:.2f} x; "
                f"bits {'as' if same else 'other than'} in {LIKE} rows",
                flush=True,
            )


if __name__ == "__main__":
    main()

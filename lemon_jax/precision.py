"""Products of float32 numbers that are float32 on accelerators too. Imports JAX."""

from __future__ import annotations

import jax

_NAME = "jax_default_matmul_precision"


def keep_float32() -> None:
    """For the rest of the process: products of float32 inputs are not rounded to bfloat16 or TF32 inside.

    TPUs and GPUs since Ampere do that by default (`jax.lax.Precision`); products of bfloat16 inputs are the
    same either way. For programs that compute in float32, at their start, after processes have joined:
    compiled functions are traced anew where this changes. Nothing is set on CPU, which has one precision,
    nor where the user has chosen one (JAX_DEFAULT_MATMUL_PRECISION).
    """
    if jax.default_backend() != "cpu" and jax.config.values[_NAME] is None:
        jax.config.update(_NAME, "highest")

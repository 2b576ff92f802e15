"""The products of a block with its matrices, and with their low-rank adapters where there are any."""

from __future__ import annotations

import math
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from lemon_jax.model.sharding import constrain, gathered, logical_axes


class LoraParam(nnx.Param):
    """A factor of a low-rank adapter (see `lora`)."""


def project(module: Any, name: str, x: Array, *, inputs: int = 1) -> Array:
    """The product of x [..., *inputs] with module.name [*inputs, *outputs], and what the adapter of that
    parameter adds: [..., *outputs]. `inputs` counts the axes that are summed over.

    The adapter is applied to x, not added to the parameter: its gradient then needs none of the parameter's
    size. On a mesh the parameter is gathered for the product of many tokens; for few, as in decoding, it
    stays where it lies: each device multiplies its part with all rows, and what travels are tokens and sums.
    """
    weight = getattr(module, name)[...]
    outputs = weight.shape[inputs:]
    read = math.prod(weight.shape[:inputs])
    lead = x.shape[: x.ndim - inputs]
    # What passes over the links, either way.
    many = math.prod(lead) * (read + 2 * math.prod(outputs)) > weight.size
    if many:
        weight = gathered(weight, name)
    axes = logical_axes(name, weight.ndim)
    here = x if many else constrain(x, *("time",) * len(lead), *axes[:inputs])
    out = product(here.reshape(-1, read), weight.reshape(read, -1)).reshape(*lead, *outputs)
    if not many:
        if "embed" in axes[inputs:]:  # a device has its part of every row, until the rows are split again
            out = constrain(out, *("time",) * len(lead), *axes[inputs:])
        whole = ("residual" if axis == "embed" else axis for axis in axes[inputs:])
        out = constrain(out, "batch", *("time",) * (len(lead) - 1), *whole)
    first = getattr(module, f"{name}_lora_a", None)
    if first is not None:
        second = getattr(module, f"{name}_lora_b")[...]
        low = x.reshape(-1, read) @ first[...].reshape(read, -1)
        out = out + module.lora_scale * (low @ second.reshape(low.shape[1], -1)).reshape(out.shape)
    return out


@jax.custom_vjp
def product(x_NxI: Float[Array, "rows in"], w_IxO: Float[Array, "in out"]) -> Float[Array, "rows out"]:
    """x @ w, whose gradient in w is computed in the form that each platform computes fastest."""
    return x_NxI @ w_IxO


def _forward(x_NxI: Array, w_IxO: Array) -> tuple[Array, tuple[Array, Array]]:
    return x_NxI @ w_IxO, (x_NxI, w_IxO)


def _backward(kept: tuple[Array, Array], out_NxO: Array) -> tuple[Array, Array]:
    x_NxI, w_IxO = kept
    gradient = jax.lax.platform_dependent(x_NxI, out_NxO, cpu=_transposed_first, default=lambda x, g: x.T @ g)
    return out_NxO @ w_IxO.T, gradient


def _transposed_first(x_NxI: Array, out_NxO: Array) -> Array:
    """x^T g with the narrower of both transposed in memory, after which both lie as a plain product reads
    them. XLA's CPU compiler would transpose the wider one and take a slower product, that of the compact
    policy's gate in 12 ms in place of 4 (1536 x 320 by 1536 x 896, one core)."""
    if x_NxI.shape[1] <= out_NxO.shape[1]:
        return jax.lax.optimization_barrier(x_NxI.T) @ out_NxO
    return jax.lax.optimization_barrier(jax.lax.optimization_barrier(out_NxO.T) @ x_NxI).T


product.defvjp(_forward, _backward)

"""The products of a block with its matrices, and with their low-rank adapters where there are any."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from lemon_jax.model.sharding import gathered


class LoraParam(nnx.Param):
    """A factor of a low-rank adapter (see `lora`)."""


def project(module: Any, name: str, spec: str, x: Array) -> Array:
    """einsum(spec, x, module.name), and what the adapter of that parameter adds.

    The adapter is applied to x, not added to the parameter: its gradient then needs none of the parameter's
    size. On a mesh the parameter is gathered for the product of many tokens; of few, as in decoding, the
    partial sums are added up instead.

        # spec "btd,dhe->bhte", rank axis r:  "btd,dr->btr", then "btr,rhe->bhte"
    """
    (given, weight), result = spec.split("->")[0].split(","), spec.split("->")[1]
    inputs = "".join(axis for axis in weight if axis in given)
    parameter = getattr(module, name)[...]
    read = math.prod(parameter.shape[: len(inputs)])
    tokens, written = x.size // read, parameter.size // read
    if tokens * (read + 2 * written) > parameter.size:  # what passes over the links, either way
        parameter = gathered(parameter, name)
    out = jnp.einsum(spec, x, parameter)
    first = getattr(module, f"{name}_lora_a", None)
    if first is None:
        return out
    kept = "".join(axis for axis in given if axis not in inputs) + "r"
    low = jnp.einsum(f"{given},{inputs}r->{kept}", x, first[...])
    second = getattr(module, f"{name}_lora_b")[...]
    return out + module.lora_scale * jnp.einsum(
        f"{kept},r{weight.removeprefix(inputs)}->{result}", low, second
    )

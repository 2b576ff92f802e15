"""Low-rank adapters: small corrections of a decoder's projections (Hu et al. 2021, arXiv 2106.09685).

A projection W becomes W + alpha / rank * A B with A [*inputs, rank] and B [rank, *outputs]. B starts at 0, so
that the decoder starts as it was. Adapters are variables of their own type beside the parameter
("layers.0.attention.q_lora_a"): what trains them splits a decoder by it, and the rest stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lemon_jax.errors import LemonError
from lemon_jax.model.decoder import Block, Decoder
from lemon_jax.model.projection import LoraParam

# The projections of a block, with the axes of each parameter that its product sums over.
TARGETS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


def add_lora(
    decoder: Decoder, *, rank: int, alpha: float, targets: Sequence[str] = tuple(TARGETS), key: jax.Array
) -> Decoder:
    """The same decoder with adapters of this rank at `targets` of every block; parameters are shared.

    `nnx.split(decoder, LoraParam, ...)` gives the adapters and the rest. Raises `LemonError` for a rank below
    1, unknown targets, and a decoder that has adapters.
    """
    unknown = [name for name in targets if name not in TARGETS]
    if rank < 1 or not 0 < alpha < math.inf or unknown or not targets:
        raise LemonError(
            f"adapters: rank {rank}, alpha {alpha}, targets {', '.join(targets) or 'none'}; expected a rank "
            f"of at least 1, a positive alpha, and some of {', '.join(TARGETS)}"
        )
    if has_lora(decoder):
        raise LemonError("adapters: this decoder has some; merge them first")
    adapted = nnx.merge(*nnx.split(decoder))
    for i, block in enumerate(adapted.layers):
        for name in dict.fromkeys(targets):
            module = _owner(block, name)
            weight = getattr(module, name)[...]
            inputs, outputs = weight.shape[: TARGETS[name]], weight.shape[TARGETS[name] :]
            # Of unit variance per input, as the weights of a fresh projection: the paper's Gaussian.
            own_key = jax.random.fold_in(jax.random.fold_in(key, i), list(TARGETS).index(name))
            first = jax.random.normal(own_key, (*inputs, rank), jnp.float32) / math.sqrt(math.prod(inputs))
            setattr(module, f"{name}_lora_a", LoraParam(first.astype(weight.dtype)))
            setattr(module, f"{name}_lora_b", LoraParam(jnp.zeros((rank, *outputs), weight.dtype)))
            module.lora_scale = alpha / rank
    return adapted


def has_lora(decoder: Decoder) -> bool:
    """Whether a decoder has adapters."""
    return bool(nnx.to_flat_state(nnx.state(decoder, LoraParam)))


def merge_lora(decoder: Decoder) -> Decoder:
    """The decoder without adapters that computes the same: W + alpha / rank * A B in their place.

    Parameters without adapters are shared. The sum is rounded to the parameter's dtype: in bfloat16 a small
    correction may vanish in it, so merge in fp32.
    """
    merged = nnx.merge(*nnx.split(decoder))
    for block in merged.layers:
        for name in TARGETS:
            module = _owner(block, name)
            if not hasattr(module, f"{name}_lora_a"):
                continue
            weight = getattr(module, name)[...]
            first, second = (getattr(module, f"{name}_lora_{which}")[...] for which in "ab")
            rank = second.shape[0]
            # By what NumPy has too: a whole model may be merged on the host that no device could hold.
            change = first.reshape(-1, rank) @ second.reshape(rank, -1)
            setattr(module, name, nnx.Param(weight + module.lora_scale * change.reshape(weight.shape)))
            delattr(module, f"{name}_lora_a")
            delattr(module, f"{name}_lora_b")
        for module in (block.attention, block.mlp):
            if hasattr(module, "lora_scale"):
                del module.lora_scale
    return merged


def _owner(block: Block, name: str) -> Any:
    return block.attention if hasattr(block.attention, name) else block.mlp

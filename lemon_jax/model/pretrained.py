"""Pretrained decoders from the files other tools use: a folder in the hub's layout, or one GGUF file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lemon_jax.errors import LemonError
from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.decoder import Decoder
from lemon_jax.model.families import Place, places
from lemon_jax.model.gguf_weights import GgufSource
from lemon_jax.model.hub_weights import HubSource

_MOST_NAMED = 20  # misfits in one message
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}


# A model's files: `config`, `shapes` of the tensors by their names there, and one parameter after another.
Source = HubSource | GgufSource


def load_pretrained(
    path: str | os.PathLike[str], *, dtype: Literal["float32", "bfloat16"] = "float32"
) -> tuple[Decoder, DecoderConfig]:
    """The decoder of a folder (config.json and safetensors) or of a .gguf file, parameters in `dtype`, scales
    of norms in fp32: Gemma's files hold scale - 1, and in bfloat16 the scale itself would be another one.

    The families are those of `families`. Tensors are read one by one: at most one of them exists twice.
    Raises `LemonError` for files that are damaged, incomplete or of another kind of model.
    """
    source = HubSource(Path(path)) if Path(path).is_dir() else GgufSource(Path(path))
    return read_decoder(source, DTYPES[dtype]), source.config


def read_decoder(source: Source, dtype: np.dtype) -> Decoder:
    """The decoder of a source, after a check that its tensors are those its config asks for."""
    config, wanted = source.config, check_tensors(source)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    filled = []
    for path, leaf in nnx.to_flat_state(state):
        place = wanted[".".join(map(str, path))]
        array = source.read(place, DTYPES["float32"] if place.norm else dtype)
        filled.append((path, leaf.replace(jnp.asarray(array))))
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def check_tensors(source: Source) -> dict[str, Place]:
    """The place of every parameter. Raises `LemonError` for tensors other than its config's."""
    shapes = source.shapes()
    _check_size(source.path, source.config, shapes)
    wanted = places(source.config)
    expected = {source.name(place): place.file_shape for place in wanted.values()}
    faults = [f"{name} is missing" for name in expected if name not in shapes]
    faults += [f"{name!r:.80} is unexpected" for name in sorted(shapes) if name not in expected]
    faults += [
        f"{name} has shape {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if faults:
        named = "; ".join(faults[:_MOST_NAMED]) + ("; …" if len(faults) > _MOST_NAMED else "")
        raise LemonError(
            f"{source.path}: {len(faults)} misfits between tensors and config: {named}; fetch the model again"
        )
    return wanted


def _check_size(path: Path, config: DecoderConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a config too large for its tensors, before a decoder of that size is laid out."""
    heads = max(config.num_heads, config.num_kv_heads) * config.head_dim
    largest = max(config.vocab_size, config.embed_dim, config.mlp_dim, heads)
    found = max((size for shape in shapes.values() for size in shape), default=0)
    if config.num_layers > len(shapes) or largest > found:
        raise LemonError(
            f"{path}: its config has {config.num_layers} layers and sizes up to {largest}, but there are "
            f"{len(shapes)} tensors of sizes up to {found}; fetch the model again"
        )

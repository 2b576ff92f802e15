"""The weights of a decoder as cached serving reads them: projections of one input joined, in a chosen type.

A weight of a product is stored as "float32", or as "bfloat16": then inputs are rounded to bfloat16 too and
products are summed in fp32. Everything else (norms, biases, activations between the products) is fp32.
Its rows are outputs, as in model files: on CPU few rows of bfloat16 inputs are multiplied a third faster so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.decoder import Decoder
from lemon_jax.model.families import places
from lemon_jax.model.gguf_weights import GgufSource
from lemon_jax.model.hub_weights import HubSource
from lemon_jax.model.pretrained import Source, check_tensors

WeightType = Literal["float32", "bfloat16"]
WEIGHT_TYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
# Embedding, head, final norm, and a dictionary for each layer.
ServingWeights = dict[str, Any]
# The parameter of a decoder that has this dotted name, in this type.
_Read = Callable[[str, np.dtype], np.ndarray]


def open_source(path: str | os.PathLike[str]) -> Source:
    """A GGUF file or a folder in the hub's layout, checked against its own config; nothing is read yet.

    Raises `LemonError` for files that are damaged, incomplete or of another kind of model.
    """
    source = HubSource(Path(path)) if Path(path).is_dir() else GgufSource(Path(path))
    check_tensors(source)
    return source


def load_serving_weights(
    source: Source, weights: WeightType = "bfloat16", go_on: Callable[[], None] = lambda: None
) -> ServingWeights:
    """The weights of a source, read tensor by tensor; `go_on` is called before each."""
    wanted = places(source.config)

    def read(name: str, dtype: np.dtype) -> np.ndarray:
        go_on()
        array = source.read(wanted[name], dtype)
        if isinstance(source, GgufSource):
            source.file.let_go()  # the file's own numbers would count to the peak beside the weights
        return array

    return _join(source.config, read, weights)


def serving_weights(decoder: Decoder, weights: WeightType = "float32") -> ServingWeights:
    """The weights of a decoder in memory."""
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(decoder))}
    return _join(decoder.config, lambda name, dtype: np.asarray(flat[name]).astype(dtype), weights)


def _join(config: DecoderConfig, read: _Read, weights: WeightType) -> ServingWeights:
    dtype = WEIGHT_TYPES[weights]

    def vector(name: str) -> jax.Array:
        return jnp.asarray(read(name, WEIGHT_TYPES["float32"]).reshape(-1))

    def matrix(*names: str, inputs: int = 1) -> jax.Array:
        parts = [read(name, dtype) for name in names]
        rows = [part.reshape(int(np.prod(part.shape[:inputs])), -1).T for part in parts]
        return jnp.asarray(np.concatenate(rows) if len(rows) > 1 else np.ascontiguousarray(rows[0]))

    def layer(i: int) -> dict[str, jax.Array]:
        at = f"layers.{i}"
        out = {
            "qkv": matrix(*(f"{at}.attention.{name}" for name in "qkv")),
            "o": matrix(f"{at}.attention.o", inputs=2),
            "gate_up": matrix(f"{at}.mlp.gate", f"{at}.mlp.up"),
            "down": matrix(f"{at}.mlp.down"),
        }
        norms = ["attention_norm", "mlp_norm"]
        norms += ["attention_post_norm", "mlp_post_norm"] if config.post_norms else []
        out |= {name: vector(f"{at}.{name}.scale") for name in norms}
        if config.qkv_bias:
            out["qkv_bias"] = jnp.concatenate([vector(f"{at}.attention.{name}_bias") for name in "qkv"])
        if config.qk_norm:
            out |= {f"{name}_norm": vector(f"{at}.attention.{name}_norm.scale") for name in "qk"}
        return out

    # The largest first: while it is read it exists twice, which nothing else then adds to.
    out: ServingWeights = {"embed": jnp.asarray(read("embed", dtype))}
    if not config.tie_embeddings:
        out["head"] = jnp.asarray(read("head", dtype))
    out["final_norm"] = vector("final_norm.scale")
    out["layers"] = [layer(i) for i in range(config.num_layers)]
    return out

"""Decoder weights as one safetensors file, and the digest that names a set of parameters."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from lemon_jax.errors import LemonError
from lemon_jax.files import replace_file
from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.decoder import Decoder

DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float32": np.dtype(np.float32)}
HEADER_KEY = "lemon_jax"
FILE_DTYPES = {"bfloat16": "BF16", "float32": "F32"}  # as the safetensors header spells them
PACKED = ".xz"  # ending of a weights file that is compressed; without it, it is a safetensors file
_MOST_NAMED = 20  # misfits in one message

Path_ = str | os.PathLike[str]


def named_params(decoder_or_state: Decoder | nnx.State) -> dict[str, Any]:
    """All parameters by dotted name ("layers.0.attention.q"), in name order."""
    state = (
        nnx.state(decoder_or_state, nnx.Param) if isinstance(decoder_or_state, Decoder) else decoder_or_state
    )
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    # An optimiser's or a merged state may hold bare arrays where a module holds Params.
    return {
        name: leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for name, leaf in sorted(flat.items())
    }


def params_sha256(decoder_or_state: Decoder | nnx.State) -> str:
    """SHA-256 over name, dtype, shape and little-endian bytes of every parameter, in name order."""
    digest = hashlib.sha256()
    for name, value in named_params(decoder_or_state).items():
        array = np.asarray(value)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def save_weights(
    path: Path_,
    decoder: Decoder,
    config: DecoderConfig,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write the parameters, rounded to `dtype`, with the config and JSON-able `metadata`.

    Atomic: `path` holds the old file or the whole new one, whenever the process dies.
    """
    arrays = {name: np.asarray(value).astype(DTYPES[dtype]) for name, value in named_params(decoder).items()}
    header = {"config": config.to_dict(), "dtype": dtype, "metadata": dict(metadata or {})}
    # One key: safetensors writes several in random order, and equal weights should be equal files.
    data = safetensors.numpy.save(arrays, metadata={HEADER_KEY: json.dumps(header, sort_keys=True)})
    # A policy is to be shared, whatever the umask.
    replace_file(Path(path), data, durable=True, several_writers=True, mode=0o644)


def pack_weights(path: Path) -> Path:
    """Replace a weights file by one compressed with xz, for folders that are kept under version control:
    about a third smaller in bfloat16. `load_weights` reads both. Returns the new path."""
    # Numbers of two bytes: contexts for even and odd positions (lp, pb) tell exponents from mantissas.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]
    packed = path.with_name(path.name + PACKED)
    packed.write_bytes(lzma.compress(path.read_bytes(), format=lzma.FORMAT_XZ, filters=filters))
    path.unlink()
    return packed


def _unpacked(path: Path) -> bytes:
    try:
        return lzma.decompress(path.read_bytes())
    except (lzma.LZMAError, EOFError) as error:
        raise LemonError(f"{path}: damaged or not an xz file ({error}); fetch it again") from error


def _shown(text: str) -> str:
    """A text of the file as an error prints it: one line, not endless."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:200])


def _open(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What `save_weights` put in the header, and the raw tensors {name: {"dtype", "shape", "data"}}."""
    try:
        data = path.read_bytes() if path.suffix != PACKED else _unpacked(path)
    except OSError as error:
        raise LemonError(f"{path}: cannot read the weights ({error.strerror}); check the path") from error
    try:
        tensors = dict(safetensors.deserialize(data))
        # safetensors gives the metadata of files only; the header is 8 bytes of length, then JSON.
        file_header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (safetensors.SafetensorError, ValueError, RecursionError) as error:
        raise LemonError(
            f"{path}: damaged or not a safetensors file ({_shown(str(error))}; {len(data)} bytes); "
            "fetch or save it again"
        ) from error
    text = (file_header.get("__metadata__") or {}).get(HEADER_KEY)
    try:
        header = json.loads(text or "null")
    except (ValueError, RecursionError):
        header = None
    parts = ("config", "metadata")
    if not isinstance(header, dict) or not all(isinstance(header.get(part), dict) for part in parts):
        raise LemonError(
            f"{path}: the header's {HEADER_KEY!r} is {text!r:.200}, expected JSON with the objects "
            f"{' and '.join(parts)}; the file was not written by save_weights"
        )
    return header, tensors


def read_metadata(path: Path_) -> dict[str, Any]:
    """The `metadata` that was saved with the weights. Raises `LemonError` as `load_weights` does."""
    header, _ = _open(Path(path))
    return header["metadata"]


def _mismatches(
    tensors: Mapping[str, Mapping[str, Any]], expected: Mapping[str, tuple[int, ...]], file_dtype: str
) -> list[str]:
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{_shown(name)} is unexpected" for name in sorted(tensors) if name not in expected]
    for name in sorted(expected.keys() & tensors.keys()):
        shape, found = tuple(tensors[name]["shape"]), tensors[name]["dtype"]
        if shape != expected[name]:
            faults.append(f"{name} has shape {shape}, expected {expected[name]}")
        if found != file_dtype:
            faults.append(f"{name} has dtype {found}, expected {file_dtype}")
    return faults


def _check_sizes(path: Path, config: DecoderConfig, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a config that is too large for its file, before a decoder of that size is laid out."""
    heads = max(config.num_heads, config.num_kv_heads) * config.head_dim
    largest = max(config.vocab_size, config.embed_dim, config.mlp_dim, heads)
    size = sum(len(tensor["data"]) for tensor in tensors.values())
    if config.num_layers > len(tensors) or largest > size:
        raise LemonError(
            f"{path}: its config has {config.num_layers} layers and sizes up to {largest}, too many for its "
            f"{len(tensors)} tensors of {size} bytes; save the weights again or correct the config"
        )


def load_weights(path: Path_) -> tuple[Decoder, DecoderConfig]:
    """The decoder of a file by `save_weights`, with fp32 parameters, and its config.

    Raises one `LemonError` that lists every tensor that is missing, unexpected, or of another shape or
    dtype than the config and the header say; or one that names a file which is damaged.
    """
    path = Path(path)
    header, tensors = _open(path)
    try:
        config = DecoderConfig.from_dict(header["config"])
    except LemonError as error:
        raise LemonError(f"{path}: {error}") from error
    dtype = header.get("dtype")
    if dtype not in DTYPES:
        raise LemonError(f"{path}: the header's 'dtype' is {dtype!r}, expected one of {', '.join(DTYPES)}")

    _check_sizes(path, config, tensors)
    # Shapes without numbers: nothing is initialised only to be overwritten.
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    expected = {name: value.shape for name, value in named_params(abstract).items()}
    faults = _mismatches(tensors, expected, FILE_DTYPES[dtype])
    if faults:
        named = "; ".join(faults[:_MOST_NAMED]) + ("; …" if len(faults) > _MOST_NAMED else "")
        raise LemonError(
            f"{path}: {len(faults)} misfits between tensors and config: {named}; "
            "save the weights again or correct the config"
        )
    graphdef, state = nnx.split(abstract)
    arrays = {
        name: jnp.asarray(
            np.frombuffer(tensors[name]["data"], DTYPES[dtype]).reshape(shape).astype(np.float32)
        )
        for name, shape in expected.items()
    }
    filled = jax.tree_util.tree_map_with_path(lambda key_path, _: arrays[_dotted(key_path)], state)
    return nnx.merge(graphdef, filled), config


def _dotted(key_path: tuple[Any, ...]) -> str:
    """The dotted name of a leaf of an nnx.State; its last key, inside the Param, is no part of it."""
    return ".".join(str(key.key) for key in key_path if isinstance(key, jax.tree_util.DictKey))

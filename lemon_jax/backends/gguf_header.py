"""The first fields of a GGUF file, read as hostile input before a server is asked to load it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lemon_jax.errors import LemonError

# Bytes of each scalar value type of the GGUF specification; 8 is a string, 9 an array.
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_TEXT = 4096, 65536, 65535


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """Format version, number of tensors, and the model family, e.g. "qwen2"."""

    version: int
    tensors: int
    architecture: str


class _Damaged(Exception):
    pass


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header up to `general.architecture`.

    Raises:
        LemonError: the file cannot be read, or is not a GGUF file of version 2 or 3, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except OSError as e:
        raise LemonError(f"{path}: cannot read the model file: {e.strerror}") from None
    except _Damaged as e:
        raise LemonError(
            f"{path}: not a usable GGUF model file: {e}; fetch it again or name another file"
        ) from None


def _read(file: BinaryIO) -> GgufHeader:
    if (magic := file.read(4)) != b"GGUF":
        raise _Damaged(f"expected it to begin with b'GGUF', found {magic!r}")
    version, tensors, keys = struct.unpack("<IQQ", _take(file, 20))
    if version not in (2, 3):
        raise _Damaged(f"expected format version 2 or 3, found {version}")
    if not 0 < tensors <= _MAX_TENSORS or not 0 < keys <= _MAX_KEYS:
        raise _Damaged(f"found {tensors} tensors and {keys} metadata keys")
    for _ in range(keys):
        key, kind = _text(file), _u32(file)
        if key == "general.architecture" and kind == _STRING:
            return GgufHeader(version=version, tensors=tensors, architecture=_text(file))
        _skip(file, kind)
    raise _Damaged("the key general.architecture is missing")


def _take(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) != n:
        raise _Damaged("it ends inside its header")
    return data


def _u32(file: BinaryIO) -> int:
    return int.from_bytes(_take(file, 4), "little")


def _u64(file: BinaryIO) -> int:
    return int.from_bytes(_take(file, 8), "little")


def _text(file: BinaryIO) -> str:
    # Lengths come from the file: without a bound one number would ask for terabytes of memory.
    if (n := _u64(file)) > _MAX_TEXT:
        raise _Damaged(f"a text of {n} bytes in its header")
    return _take(file, n).decode("utf-8", "replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_bounded(_u64(file)), 1)
    elif kind in _SCALAR_BYTES:
        file.seek(_SCALAR_BYTES[kind], 1)
    elif kind == _ARRAY:
        item, count = _u32(file), _bounded(_u64(file))
        if item in _SCALAR_BYTES:
            file.seek(_SCALAR_BYTES[item] * count, 1)
        elif item == _STRING:
            for _ in range(count):
                file.seek(_bounded(_u64(file)), 1)
        else:
            raise _Damaged(f"an array of the unknown type {item}")
    else:
        raise _Damaged(f"a value of the unknown type {kind}")


def _bounded(n: int) -> int:
    if n > 1 << 24:
        raise _Damaged(f"a metadata value of {n} items")
    return n

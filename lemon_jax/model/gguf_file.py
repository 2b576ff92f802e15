"""A GGUF file, read as hostile input: metadata, the list of tensors, and their numbers one tensor at a time.

The gguf package dequantises. Its reader is not used: sizes it believes a file make it loop without end, and
it takes an object for every token of a vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lemon_jax.errors import LemonError

# The codes of struct for the scalar value types of the format.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_DIMS = 4096, 65536, 4
_CHUNK = 1 << 22  # numbers dequantised at a time: the work space stays far below a large tensor


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """`shape` has the slowest axis first, as NumPy: a projection is [outputs, inputs]."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int  # byte in the file
    size: int  # bytes


class GgufFile:
    """`metadata` by key, `tensors` by name. Raises `LemonError` for whatever a sound file does not hold."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            reason = error.strerror if isinstance(error, OSError) else error
            raise LemonError(f"{path}: cannot read the model file ({reason}); check the path") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._parse()

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The numbers of a tensor in `dtype`. Raises `LemonError` for a type the gguf package lacks."""
        tensor = self.tensors[name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        raw = np.frombuffer(self._data, np.uint8, tensor.size, tensor.start).reshape(rows, -1)
        count = int(np.prod(tensor.shape))
        out = np.empty((rows, count // rows), dtype)
        step = max(1, _CHUNK // out.shape[1])
        for start in range(0, rows, step):
            part = raw[start : start + step]
            try:
                # A damaged file may have infinite scales: numbers like any other, and no warning about them.
                with np.errstate(invalid="ignore", over="ignore"):
                    numbers = gguf.quants.dequantize(part, tensor.kind)
            except NotImplementedError as error:
                raise self._fault(f"{name!r:.80} is of the type {tensor.kind.name}, no weight's") from error
            out[start : start + step] = numbers.astype(dtype)
        return out.reshape(tensor.shape)

    def let_go(self) -> None:
        """Give the memory back that holds what was read of the file, until it is read again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on every system
            self._data.madvise(mmap.MADV_DONTNEED)

    def _parse(self) -> None:
        if (magic := bytes(self._data[:4])) != b"GGUF":
            raise self._fault(f"it begins with {magic!r}, expected b'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._fault(f"its format version is {version}, expected 2 or 3")
        tensors, keys = self._scalar("Q"), self._scalar("Q")
        if not 0 < tensors <= _MAX_TENSORS or not 0 < keys <= _MAX_KEYS:
            raise self._fault(f"it has {tensors} tensors and {keys} metadata keys")
        for _ in range(keys):
            key = self._text()
            if key in self.metadata:
                raise self._fault(f"the key {key!r:.80} comes twice")
            self.metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor_entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment > 1 << 20 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment!r:.40}, expected a power of two")
        begin = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in entries:
            self._add(name, shape, kind, begin + offset)

    def _add(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> None:
        try:
            quantisation = gguf.GGMLQuantizationType(kind)
        except ValueError as error:
            raise self._fault(f"{name!r:.80} is of the unknown type {kind}") from error
        numbers, size = gguf.GGML_QUANT_SIZES[quantisation]
        count = 1
        for length in shape:
            count *= length
        if count < 1 or shape[-1] % numbers:
            raise self._fault(f"{name!r:.80} has shape {shape}, whose rows are no blocks of {numbers}")
        size = count // numbers * size
        if start + size > len(self._data):
            raise self._fault(
                f"it ends before {name!r:.80}, at byte {len(self._data)} instead of {start + size}"
            )
        if name in self.tensors:
            raise self._fault(f"the tensor {name!r:.80} comes twice")
        self.tensors[name] = GgufTensor(shape=shape, kind=quantisation, start=start, size=size)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._text(), self._scalar("I")
        if not 0 < dims <= _MAX_DIMS:
            raise self._fault(f"{name!r:.80} has {dims} axes")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._fault(f"a metadata value is of the unknown type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            self._need(8 * count)  # before a list of that length is begun
            return [self._text() for _ in range(count)]
        if item in _SCALARS:
            return list(struct.unpack(f"<{count}{_SCALARS[item]}", self._take(_bytes(item) * count)))
        raise self._fault(f"a metadata array holds the unknown type {item}")

    def _text(self) -> str:
        try:
            return self._take(self._scalar("Q")).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fault("a text in its header is not UTF-8") from error

    def _scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._data[self._at - count : self._at]

    def _need(self, count: int) -> None:
        # Lengths come from the file: none may ask for more than there is.
        if count > len(self._data) - self._at:
            raise self._fault("it ends inside its header")

    def _fault(self, what: str) -> LemonError:
        return LemonError(f"{self.path}: not a usable GGUF model file: {what}; fetch it again")


def _bytes(kind: int) -> int:
    return struct.calcsize(f"<{_SCALARS[kind]}")

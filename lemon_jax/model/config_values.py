"""Typed look-ups in what a foreign model file says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lemon_jax.errors import LemonError


class ConfigValues:
    """The values of one file under their keys; each look-up raises `LemonError` with file, key and value.

    A `default` of None makes the key a required one. null counts as missing, as model files use it.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values = values
        self.source = source

    def fault(self, key: str, expected: str) -> LemonError:
        """The error for a key that holds something else than `expected`."""
        value = self.values.get(key)
        found = "is missing" if value is None else f"is {value!r:.80}"
        return LemonError(f"{self.source}: {key} {found}, expected {expected}; fetch the model again")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key) if self.has(key) else default
        if type(value) is not int or not 0 < value < 2**31:
            raise self.fault(key, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key) if self.has(key) else default
        # NaN and infinities fail the comparison too; bool is an int to Python.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise self.fault(key, "a positive, finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key) if self.has(key) else default
        if not isinstance(value, bool):
            raise self.fault(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key) if self.has(key) else default
        if not isinstance(value, str):
            raise self.fault(key, "a text")
        return value

    def part(self, key: str) -> ConfigValues | None:
        """The object under `key`, or None."""
        if not self.has(key):
            return None
        if not isinstance(self.values[key], Mapping):
            raise self.fault(key, "an object")
        return ConfigValues(self.values[key], f"{self.source}: {key}")

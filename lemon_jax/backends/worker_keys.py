"""The keys of a worker file: types, ranges, and where each may stand."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from lemon_jax.backends.model_files import PRESETS
from lemon_jax.backends.redaction import is_variable_name, redact
from lemon_jax.backends.wire import PARAMETERS
from lemon_jax.errors import LemonError

LEVELS = ("small", "medium", "large")
BACKENDS = ("openai", "embedded", "jax", "scripted", "simulated")
WEIGHTS = ("bfloat16", "float32")
_MOST_NAMED = 20  # faults in one message
_LONGEST_NAME = 80
_MOST_SERVERS = 256  # of one model


@dataclass(frozen=True, kw_only=True)
class _Key:
    expected: str
    fits: Callable[[Any], bool]
    required: bool = False
    secret: bool = False  # an unfit value may be a key by mistake, and is not shown


def _text(required: bool = False) -> _Key:
    return _Key(
        expected="a text",
        # A control character is a slip of the keyboard, and no file system takes a NUL.
        fits=lambda v: isinstance(v, str) and bool(v.strip()) and v.isprintable(),
        required=required,
    )


def _integer(low: int, high: int) -> _Key:
    return _Key(
        expected=f"an integer from {low} to {high}",
        fits=lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high,
    )


def _number(high: float = 1e12, required: bool = False) -> _Key:
    return _Key(
        expected=f"a number from 0 to {high:g}",
        fits=lambda v: isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= high,
        required=required,
    )


def _is_address(value: Any) -> bool:
    """Whether it is an HTTP address to which a path can be added.

    One with a user, a password or a query is refused: keys have their own place.
    """
    try:
        url = httpx.URL(value)
    except (httpx.InvalidURL, TypeError):
        return False
    plain = not (url.userinfo or url.query or url.fragment)
    return url.scheme in ("http", "https") and bool(url.host) and plain


def _are_addresses(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= _MOST_SERVERS
        and all(_is_address(url) for url in value)
        and len({url.rstrip("/") for url in value}) == len(value)
    )


ADDRESS = 'an address such as "http://localhost:8000/v1", without user or query'
_URL = _Key(expected=ADDRESS, fits=_is_address)
_URLS = _Key(
    expected=f'a list of 1 to {_MOST_SERVERS} different addresses such as "http://host-0:8000/v1"',
    fits=_are_addresses,
)
_VARIABLE = _Key(
    expected="the name of an environment variable; the key itself has no place in a file",
    fits=lambda v: isinstance(v, str) and is_variable_name(v),
    secret=True,
)
_PRESET = _Key(expected=f"one of {', '.join(PRESETS)}", fits=lambda v: isinstance(v, str) and v in PRESETS)
_PARAMETER = " or ".join(PARAMETERS)


def _is_body(value: Any) -> bool:
    """Whether it is a table that JSON can hold: no date, no infinity; without what makes a call."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not {"model", "messages", "stream"} & value.keys()


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {*PARAMETERS}
        and all(isinstance(name, str) and re.fullmatch(r"\w{1,64}", name) for name in value.values())
        and len({*value.values()} - {*PARAMETERS, "model", "messages", "stream"}) == len(value)
    )


_BODY = _Key(
    expected="a table of request fields other than model, messages and stream, with values that JSON has",
    fits=_is_body,
    secret=True,
)
_NAMES = _Key(
    expected=f'a table with other names of {_PARAMETER}, such as {{ max_tokens = "max_completion_tokens" }}',
    fits=_are_names,
)
_OMITTED = _Key(
    expected=f"a list of {_PARAMETER}",
    fits=lambda v: isinstance(v, list) and all(isinstance(name, str) and name in PARAMETERS for name in v),
)
_FLAG = _Key(expected="true or false", fits=lambda v: isinstance(v, bool))
_ANY = _Key(expected="", fits=lambda v: True)

_KEYS: dict[str, dict[str, _Key]] = {
    "openai": {
        "backend": _ANY,
        "base_url": _URL,
        "base_urls": _URLS,
        "model": _text(required=True),
        "api_key_env": _VARIABLE,
        "identity": _text(),
        "slots": _integer(1, 1024),
        "rename": _NAMES,
        "omit": _OMITTED,
        "extra_body": _BODY,
    },
    "embedded": {
        "backend": _ANY,
        "path": _text(),
        "preset": _PRESET,
        "slots": _integer(1, 64),
        "context": _integer(256, 131072),
        "threads": _integer(1, 512),
        "deterministic": _FLAG,
    },
    "jax": {
        "backend": _ANY,
        "path": _text(),
        "preset": _PRESET,
        "slots": _integer(1, 512),
        "context": _integer(256, 131072),
        "weights": _Key(
            expected=f"one of {', '.join(WEIGHTS)}", fits=lambda v: isinstance(v, str) and v in WEIGHTS
        ),
    },
    "scripted": {"backend": _ANY},
    "simulated": {
        "backend": _ANY,
        "level": _Key(
            expected=f"one of {', '.join(LEVELS)}",
            fits=lambda v: isinstance(v, str) and v in LEVELS,
            required=True,
        ),
        "parameters": _text(),
        "seed": _integer(0, 2**32 - 1),
    },
    "capacity": {
        "model": _text(required=True),
        "price": _number(required=True),
        "samples": _integer(1, 64),
        "temperature": _number(2.0),
        "max_tokens": _integer(1, 131072),
    },
    "cost": {"generated": _number(), "prompt": _number(), "fixed_prefix": _number()},
}


def shown(value: Any, limit: int = 40) -> str:
    """A value as an error names it: `repr`, cut, and without what looks like a key or a password."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a table of thousands of levels
        return f"a very large {'number' if isinstance(value, int) else 'table'}"
    return redact(text, limit=limit)


class Faults:
    """Collects what is wrong, so that one reading of the file reports everything."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def count(self) -> int:
        """Faults so far."""
        return len(self._texts)

    def add(self, text: str) -> None:
        """Note one fault: key, what was found, what was expected."""
        # Names come from the file: what would break the line, or the terminal, is shown as a mark.
        self._texts.append("".join(c if c.isprintable() else "\ufffd" for c in text))

    def unknown(self, where: str, table: dict[str, Any], allowed: Iterable[str], scope: str = "") -> None:
        """Note every key of `table` that is not allowed there."""
        for key in table:
            if key not in set(allowed):
                name = f"{where}.{key[:_LONGEST_NAME]}" if where else key[:_LONGEST_NAME]
                self.add(
                    f"{name}: unknown key{scope}, expected {', '.join(allowed)}{self.close(key, allowed)}"
                )

    def close(self, word: str, known: Iterable[str]) -> str:
        """A hint for a misspelt word, or nothing."""
        near = difflib.get_close_matches(word, list(known), n=1)
        return f" (did you mean {near[0]}?)" if near else ""

    def tables(self, key: str, data: dict[str, Any]) -> dict[str, Any]:
        """The sub-tables of `[key]`; noted as a fault where there are none."""
        value = data.get(key)
        if isinstance(value, dict) and value:
            return value
        self.add(f"{key}: expected tables [{key}.NAME], found {'nothing' if not value else shown(value)}")
        return {}

    def raise_any(self, source: str) -> None:
        """Raise LemonError with all faults, if there are any."""
        if self._texts:
            more = len(self._texts) - _MOST_NAMED
            rest = [f"and {more} more faults"] if more > 0 else []
            raise LemonError(f"{source}: " + "; ".join(self._texts[:_MOST_NAMED] + rest))


def check_table(where: str, table: Any, kind: str, faults: Faults) -> dict[str, Any]:
    """The sound values of one table; unknown, missing and unfit keys are noted in `faults`."""
    keys = _KEYS[kind]
    if not isinstance(table, dict):
        faults.add(f"{where}: expected a table, found {shown(table)}")
        return {}
    scope = f' for backend = "{kind}"' if kind in BACKENDS else ""
    faults.unknown(where, table, keys, scope)
    for name, key in keys.items():
        if key.required and name not in table:
            faults.add(f"{where}.{name}: missing, expected {key.expected}")
    sound = {}
    for name, value in table.items():
        if name not in keys:
            continue
        if keys[name].fits(value):
            sound[name] = value
        else:
            # An address may hold a password.
            found = "something else" if keys[name].secret else shown(value, 80)
            faults.add(f"{where}.{name}: found {found}, expected {keys[name].expected}")
    return sound

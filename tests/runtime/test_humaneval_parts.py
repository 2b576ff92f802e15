"""The codec between the two processes of a check, and the shaping of completions, each by itself."""

from __future__ import annotations

import collections
import enum
import math
import textwrap
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lemon_jax.runtime.tools import completion
from lemon_jax.runtime.tools.programs import extract_completion
from lemon_jax.runtime.tools.wire import MAX_BYTES, MAX_DEPTH, WireError, decode, encode

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.fractions(),
    lambda children: st.tuples(children, children) | st.frozensets(children, max_size=3),
    max_leaves=6,
)
PLAIN = st.recursive(
    HASHABLE | st.complex_numbers() | st.decimals(allow_nan=False) | st.builds(range, st.integers(-9, 9)),
    lambda children: st.lists(children) | st.tuples(children) | st.dictionaries(HASHABLE, children),
    max_leaves=12,
)


def shape(value: object) -> object:
    """The value with every type spelled out, comparable where NaN is not."""
    if isinstance(value, (list, tuple)):
        return type(value), [shape(v) for v in value]
    if isinstance(value, dict):
        return type(value), [(shape(k), shape(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(shape(v)) for v in value)
    return type(value), repr(value)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert shape(decode(encode(value))) == shape(value)


def test_text_with_half_a_surrogate_and_bytearrays_travel() -> None:
    for value in ("\ud800é", bytearray(b"x"), -(2**70), 1 << 4096, -0.0, math.inf, range(5, 0, -2)):
        assert shape(decode(encode(value))) == shape(value)


class Lying(int):
    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = int.__hash__

    def bit_length(self) -> int:
        return 1


def test_subclasses_arrive_as_what_they_are_made_of() -> None:
    colour = enum.IntEnum("colour", ["RED"])
    point = collections.namedtuple("point", "x y")
    for value, plain in (
        (Lying(300), 300),
        (colour.RED, 1),
        (point(1, 2), (1, 2)),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
    ):
        assert shape(decode(encode(value))) == shape(plain)


def test_what_can_be_iterated_arrives_as_an_iterator() -> None:
    for value in ({1: 2}.keys(), (i for i in (1,)), collections.deque([1]), map(int, "1")):
        found = decode(encode(value))
        assert type(found) is type(iter([]))
        assert list(found) == [1]


@pytest.mark.parametrize("value", [object(), len, int, SimpleNamespace(x=1), [1, {2: print}]])
def test_other_objects_do_not_travel(value: object) -> None:
    with pytest.raises(WireError, match="no plain value"):
        encode(value)


def endless():
    while True:
        yield 0


def test_nothing_grows_without_bound() -> None:
    cyclic: list = []
    cyclic.append(cyclic)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    shared: list = [0] * 10
    for _ in range(40):
        shared = [shared] * 10
    for value, reason in (
        (cyclic, "deep"),
        (deep, "deep"),
        (shared, "bytes"),
        ("x" * (MAX_BYTES + 1), "bytes"),
        (1 << (8 * MAX_BYTES), "bytes"),
        ([0] * MAX_BYTES, "bytes"),
        (endless(), "items"),
    ):
        with pytest.raises(WireError, match=reason):
            encode(value)
    deepest: list = []
    for _ in range(MAX_DEPTH - 1):
        deepest = [deepest]
    assert decode(encode(deepest)) == deepest
    with pytest.raises(WireError, match="deep"):
        encode([deepest])
    with pytest.raises(WireError, match="deep"):
        decode(b"l\0\0\0\1" + encode(deepest))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    with suppress(WireError):
        decode(data)


@settings(max_examples=100, deadline=None)
@given(PLAIN, st.data())
def test_damaged_bytes_are_a_value_or_a_wire_error(value: object, data: st.DataObject) -> None:
    raw = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        decode(bytes(raw))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"i",
        b"NN",
        b"l\xff\xff\xff\xff",
        b"d\0\0\0\1N",
        b"d\0\0\0\2l\0\0\0\0N",
        b"Q\0\0\0\2" + encode(1) + encode(0),
        b"r\0\0\0\1N",
        b"s\0\0\0\1\xff",
        b"f\0\0\0\1x",
        b"D\0\0\0\1x",
    ],
)
def test_bytes_of_no_value(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def run(prompt: str, text: str) -> object:
    """f(3) of the module that a completion makes."""
    names: dict = {}
    for source in completion.sources(prompt, "f", extract_completion(text, "f")):
        exec(compile(source, "<completion>", "exec"), names)
    return names["f"](3)


BODIES = (
    "return x * 2",
    "y = x\nreturn y * 2",
    "for _ in range(2):\n    x = x + x\n    return x",
    "def g(y):\n    return y * 2\nreturn g(x)",
    "if x:\n    pass\n\n# done\nreturn x * 2",
    "try:\n    return x * 2\nfinally:\n    pass",
)
PROMPTS = (
    'def f(x):\n    """double"""\n',
    'import math\n\ndef f(x):\n  """double"""\n',
    "def f(x):\n    # double\n",
    'def f(x):\n    """double"""',
    'class A:\n    pass\n\n\n@(lambda g: g)\ndef f(x):\n    """double"""\n    ',
)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_found_whatever_happened_to_its_margin(prompt: str, body: str) -> None:
    indented = textwrap.indent(body, "  " if '  """' in prompt and '    """' not in prompt else "    ")
    for text in (indented, body, indented.strip(), f"```python\n{indented}\n```", f"```\n{body}\n```"):
        assert run(prompt, text) == 6, text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("body", BODIES)
def test_a_whole_function_is_found(prompt: str, body: str) -> None:
    whole = "def f(x):\n" + textwrap.indent(body, "    ")
    for text in (whole, f"```python\n{whole}\n```", textwrap.indent(whole, "  "), f"import math\n{whole}"):
        assert run(prompt, text) == 6, text


def test_the_prelude_is_what_stands_before_the_function() -> None:
    assert completion.prelude(PROMPTS[0], "f") == ""
    assert completion.prelude(PROMPTS[1], "f") == "import math\n\n"
    assert completion.prelude(PROMPTS[4], "f") == "class A:\n    pass\n\n\n"
    assert completion.prelude("no python at all", "f") == ""


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=" \t\nab'", max_size=60))
def test_dedent_is_textwraps(text: str) -> None:
    assert completion.dedent(text) == textwrap.dedent(text)

"""Worker files and GGUF headers as hostile input: read, or refused in one line, whatever the bytes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
from fuzz_targets import TARGETS, check_gguf, check_workers

from lemon_jax.backends import load_worker_file, parse_worker_file
from lemon_jax.backends.worker_keys import _KEYS
from lemon_jax.backends.workers import MAX_BYTES
from lemon_jax.errors import LemonError

CAPACITIES = "".join(f'[capacities.{c}]\nmodel = "m"\nprice = 1\n' for c in ("small", "medium", "large"))
EXAMPLES = settings(deadline=None, max_examples=80, derandomize=True)
WORDS = st.sampled_from(
    ["", " ", "\n", '"', "'", "=", "[", "]", "{", "}", ",", ".", "#", "\\", "\x00", "\u2028", "m"]
)


def mutated(seeds, data, pieces):
    """A seed, or two spliced, with pieces put in and taken out."""
    whole = data.draw(st.sampled_from(seeds))
    other = data.draw(st.sampled_from(seeds))
    cut = data.draw(st.integers(0, len(whole)))
    whole = whole[:cut] + data.draw(st.sampled_from([whole[cut:], other]))
    for _ in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(whole)))
        whole = whole[:at] + data.draw(pieces) + whole[at + data.draw(st.integers(0, 4)) :]
    return whole


@EXAMPLES
@given(st.data())
def test_any_worker_file(data):
    pieces = WORDS.map(str.encode) | st.binary(max_size=3)
    check_workers(
        data.draw(st.binary(max_size=100))
        if data.draw(st.booleans())
        else mutated(TARGETS["workers"].seeds(), data, pieces)
    )


VALUES = st.sampled_from(
    [
        *(
            "1",
            "-1",
            "0",
            "1.5",
            "nan",
            "inf",
            "1e400",
            "true",
            '""',
            '"m"',
            '" "',
            "[]",
            "{}",
            "[[1]]",
            "1979-05-27",
        ),
        *(
            '"http://h/v1"',
            '"http://h:99999/v1"',
            '"http://[::1"',
            '"http://\\u0000/"',
            '"~/x"',
            '"~nobody-here/x"',
        ),
        *(
            '"a\\u0000b"',
            '"a\\nb"',
            "0x" + "f" * 5000,
            "9" * 5000,
            "9" * 400,
            '"' + "x" * 5000 + '"',
            "07:32:00",
        ),
        *(
            '"openai"',
            '"embedded"',
            '"scripted"',
            '"qwen2.5-coder-0.5b"',
            '"MY_KEY"',
            "1_000",
            '"\\U0001F9EE"',
        ),
    ]
)


@EXAMPLES
@given(st.data())
def test_any_value_of_any_key(data):
    lines = []
    for table in ("models.m", "capacities.small", "capacities.medium", "capacities.large", "cost"):
        kind = data.draw(st.sampled_from(["openai", "embedded", "scripted"]))
        keys = list(_KEYS[kind if table == "models.m" else "cost" if table == "cost" else "capacity"])
        lines.append(f"[{table}]")
        if table == "models.m":
            lines.append(f'backend = "{kind}"')
            keys.remove("backend")
        lines += [
            f"{key} = {data.draw(VALUES)}"
            for key in data.draw(st.lists(st.sampled_from([*keys, "other"]), unique=True))
        ]
    check_workers("\n".join(lines).encode())


MODEL = '[models.m]\nbackend = "embedded"\npath = "x"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = " + "[" * 50_000, "not valid TOML: "),
        ("x = " + "{a = " * 50_000, "not valid TOML: "),
        ("price = " + "9" * 5000, "not valid TOML: "),
        (MODEL.replace('"x"', '"~nobody-here/x"') + CAPACITIES, "models.m.path: found '~nobody-here/x': "),
        (MODEL.replace('"x"', '"a\\u0000b"') + CAPACITIES, "models.m.path: found 'a\\x00b', expected a text"),
        (
            MODEL.replace('"embedded"', "0x" + "f" * 5000) + CAPACITIES,
            "models.m.backend: found a very large number",
        ),
        (
            MODEL + CAPACITIES.replace("price = 1", "price = 0x" + "f" * 5000, 1),
            "price: found a very large number",
        ),
        (
            MODEL + CAPACITIES.replace("price = 1", f"price = {'9' * 400}", 1),
            "expected a number from 0 to 1e+12",
        ),
        (
            MODEL + CAPACITIES.replace("price = 1", "price" + ".a" * 3000 + " = 1", 1),
            "found a very large table",
        ),
        (MODEL + '"odd\\nkey\\u001b[2J" = 1\n' + CAPACITIES, "models.m.odd\ufffdkey\ufffd[2J: unknown key"),
        (MODEL + "".join(f"k{i} = 1\n" for i in range(500)) + CAPACITIES, "and 480 more faults"),
        (MODEL + "k" * 100_000 + " = 1\n" + CAPACITIES, f"models.m.{'k' * 80}: unknown key"),
    ],
    ids=lambda value: value[:40],
)
def test_what_once_escaped_as_another_exception(text, expected):
    check_workers(text.encode())
    with pytest.raises(LemonError) as e:
        parse_worker_file(text, source="w.toml", folder=Path())
    assert expected in str(e.value)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    path = tmp_path / "w.toml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(LemonError, match=rf"w\.toml: larger than {MAX_BYTES} bytes"):
        load_worker_file(path)
    path.write_bytes(
        b"#" * (MAX_BYTES - len(MODEL) - len(CAPACITIES) - 1) + f"\n{MODEL}{CAPACITIES}".encode()
    )
    start = time.process_time()
    assert load_worker_file(path).models["m"].path == tmp_path / "x"
    assert time.process_time() - start < 5


@EXAMPLES
@given(st.data())
def test_any_gguf_header(data):
    numbers = st.sampled_from([0, 1, 8, 9, 99, 255, 65536, 2**24, 2**31, 2**32 - 1, 2**62, 2**64 - 1])
    pieces = st.binary(max_size=3) | numbers.map(lambda n: n.to_bytes(8, "little"))
    check_gguf(
        data.draw(st.binary(max_size=100))
        if data.draw(st.booleans())
        else mutated(TARGETS["gguf"].seeds(), data, pieces)
    )

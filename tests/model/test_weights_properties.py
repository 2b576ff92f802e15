"""A weights file as hostile input: loaded, or refused in one line, whatever its bytes say."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
from fuzz_targets import TARGETS, check_safetensors

from lemon_jax.errors import LemonError
from lemon_jax.model import DecoderConfig, load_weights

SEEDS = TARGETS["safetensors"].seeds()
SIZE = int.from_bytes(SEEDS[0][:8], "little")
HEADER, DATA = json.loads(SEEDS[0][8 : 8 + SIZE]), SEEDS[0][8 + SIZE :]
OURS = json.loads(HEADER["__metadata__"]["lemon_jax"])
EXAMPLES = settings(deadline=None, max_examples=60, derandomize=True)


def file(header, data=DATA):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def ours(**changes):
    """The file with another header of this project's own."""
    return file(HEADER | {"__metadata__": {"lemon_jax": json.dumps(OURS | changes)}})


def test_the_seed_is_a_sound_file(tmp_path):
    (tmp_path / "w").write_bytes(file(HEADER))
    assert load_weights(tmp_path / "w")[1].num_layers == 1
    for seed in SEEDS:
        check_safetensors(seed)


@EXAMPLES
@given(st.data())
def test_any_bytes(data):
    whole = data.draw(st.sampled_from(SEEDS))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(whole)))
        whole = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + data.draw(st.integers(0, 3)) :]
    check_safetensors(whole)


SIZES = st.sampled_from([-1, 0, 1, 2, 3, 8, 10**6, 10**9, 10**18, 10**40, 1.5, True, None, "2", [2]])


@EXAMPLES
@given(st.dictionaries(st.sampled_from([*OURS["config"], "other"]), SIZES, min_size=1, max_size=3))
def test_any_config(changes):
    check_safetensors(ours(config=OURS["config"] | changes))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ours(config=OURS["config"] | {"num_layers": 10**9}), "too many for its"),
        (ours(config=OURS["config"] | {"vocab_size": 10**15}), "too many for its"),
        (ours(config=OURS["config"] | {"head_dim": 10**40}), "too many for its"),
        (
            ours(config=OURS["config"] | {"norm_eps": float("nan")}),
            "norm_eps is nan; it must be positive and finite",
        ),
        (ours(config=OURS["config"] | {"rope_theta": float("inf")}), "rope_theta is inf"),
        (file(HEADER | {"__metadata__": {"lemon_jax": "[" * 100_000}}), "expected JSON with the objects"),
        (file({k: v for k, v in HEADER.items() if k != "__metadata__"}), "the header's 'lemon_jax' is None"),
        (file(HEADER | {"__metadata__": None}), "w: "),
        (file(HEADER | {"a\nb": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}), "a\ufffdb"),
        (
            file(HEADER | {"a\nb": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
            "a\ufffdb is unexpected",
        ),
        (
            file(
                {f"t{i}": HEADER["embed"] | {"shape": [0], "data_offsets": [0, 0]} for i in range(500)}
                | HEADER
            ),
            "; …",
        ),
        (struct.pack("<Q", 2**62) + SEEDS[0][8:], "damaged or not a safetensors file"),
    ],
    ids=[
        "layers",
        "vocabulary",
        "heads",
        "nan",
        "inf",
        "nested",
        "no metadata",
        "null",
        "odd name",
        "odd tensor",
        "many",
        "length",
    ],
)
def test_what_a_hostile_header_may_say(data, expected, tmp_path):
    start = time.process_time()
    check_safetensors(data)
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(LemonError) as e:
        load_weights(tmp_path / "w")
    assert expected in str(e.value)
    assert len(str(e.value)) < 2000
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
def test_a_config_is_finite(value):
    with pytest.raises(LemonError, match=r"norm_eps is .*; it must be positive and finite"):
        DecoderConfig(**OURS["config"] | {"norm_eps": value})

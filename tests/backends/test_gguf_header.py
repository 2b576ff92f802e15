from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from lemon_jax.backends import GgufHeader, read_gguf_header
from lemon_jax.errors import LemonError


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def head(tensors=291, keys=2, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("qwen2")
BEFORE = {
    "scalar": text("a") + struct.pack("<IQ", 10, 5),
    "string": text("a") + struct.pack("<I", 8) + text("value"),
    "array": text("a") + struct.pack("<IIQ", 9, 5, 3) + bytes(12),
    "strings": text("a") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yy"),
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_reads_past_other_keys(tmp_path, before):
    path = tmp_path / "m.gguf"
    path.write_bytes(head() + before + ARCHITECTURE)
    assert read_gguf_header(path) == GgufHeader(version=3, tensors=291, architecture="qwen2")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "begin with"),
        (b"<html>not found</html>", "begin with"),
        (head(version=1), "version"),
        (head(tensors=2**60), "tensors"),
        (head(keys=2**60), "keys"),
        (head(), "ends inside"),
        (head() + struct.pack("<Q", 2**62), "text of"),
        (head() + text("a") + struct.pack("<I", 99), "unknown type"),
        (head() + text("a") + struct.pack("<IIQ", 9, 5, 2**50), "items"),
        (head(keys=1) + BEFORE["scalar"], "missing"),
    ],
)
def test_damaged_files_are_named(tmp_path, data, why):
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(LemonError, match=why) as e:
        read_gguf_header(path)
    assert "broken.gguf" in str(e.value)


def test_missing_file(tmp_path):
    with pytest.raises(LemonError, match="cannot read the model file"):
        read_gguf_header(tmp_path / "none.gguf")


@pytest.mark.skipif("LEMON_TEST_GGUF" not in os.environ, reason="LEMON_TEST_GGUF names no GGUF file")
def test_a_real_file():
    assert read_gguf_header(Path(os.environ["LEMON_TEST_GGUF"])).architecture

"""Weights survive a round trip, and a file that does not fit says everything that is wrong."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from model_helpers import TINY, random_decoder

from lemon_jax.errors import LemonError
from lemon_jax.model import load_weights, named_params, params_sha256, read_metadata, save_weights

UNTIED = dataclasses.replace(TINY, tie_embeddings=False, qkv_bias=True)


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(UNTIED)


def raw_file(decoder, change=lambda arrays: None, header=None):
    """The bytes of a weights file with something changed."""
    arrays = {name: np.asarray(value) for name, value in named_params(decoder).items()}
    change(arrays)
    whole = {"config": UNTIED.to_dict(), "dtype": "float32", "metadata": {}}
    text = header if isinstance(header, str) else json.dumps(whole | (header or {}))
    return safetensors.numpy.save(arrays, metadata={"lemon_jax": text})


def test_float32_is_exact(decoder, tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, decoder, UNTIED, "float32", {"step": 3, "tokenizer": "abc"})
    loaded, config = load_weights(path)
    assert config == UNTIED
    assert params_sha256(loaded) == params_sha256(decoder)
    assert read_metadata(path) == {"step": 3, "tokenizer": "abc"}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file is left


def test_bfloat16_rounds_once(decoder, tmp_path):
    path = tmp_path / "w.safetensors"
    save_weights(path, decoder, UNTIED)
    loaded, _ = load_weights(path)
    for name, value in named_params(decoder).items():
        restored = named_params(loaded)[name]
        assert restored.dtype == jnp.float32
        assert (restored == value.astype(jnp.bfloat16).astype(jnp.float32)).all()
    first = path.read_bytes()
    save_weights(path, loaded, UNTIED)
    assert path.read_bytes() == first


def test_digest_is_of_the_parameters_alone(decoder):
    assert params_sha256(decoder) == params_sha256(nnx.state(decoder, nnx.Param))
    changed = jax.tree.map(lambda x: x, decoder)
    changed.layers[1].mlp.up[...] = changed.layers[1].mlp.up[...].at[0, 0].add(1e-3)
    assert params_sha256(changed) != params_sha256(decoder)


def test_every_mismatch_is_in_one_error(decoder, tmp_path):
    def spoil(arrays):
        del arrays["final_norm.scale"]
        arrays["layers.7.mlp.up"] = np.zeros((2, 2), np.float32)
        arrays["embed"] = arrays["embed"][:5]
        arrays["head"] = arrays["head"].astype(np.float16)

    path = tmp_path / "w.safetensors"
    path.write_bytes(raw_file(decoder, change=spoil))
    with pytest.raises(LemonError) as caught:
        load_weights(path)
    message = str(caught.value)
    for part in [
        f"{path}: 4 misfits",
        "final_norm.scale is missing",
        "layers.7.mlp.up is unexpected",
        "embed has shape (5, 32), expected (512, 32)",
        "head has dtype F16, expected F32",
    ]:
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("keep", [0, 4, 200, -10])
def test_a_damaged_file_is_named(decoder, tmp_path, keep):
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw_file(decoder)[:keep])
    with pytest.raises(LemonError, match=r"w\.safetensors: damaged or not a safetensors file"):
        load_weights(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{", "the header's 'lemon_jax' is '{', expected JSON"),
        ({"config": [1]}, "expected JSON with the objects config and metadata"),
        ({"metadata": None}, "expected JSON with the objects config and metadata"),
        ({"config": {"vocab_size": 5}}, "decoder config: missing key"),
        ({"dtype": "float16"}, "header's 'dtype' is 'float16', expected one of bfloat16, float32"),
    ],
)
def test_a_header_that_does_not_fit_is_named(decoder, tmp_path, header, message):
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw_file(decoder, header=header))
    with pytest.raises(LemonError, match=rf"w\.safetensors: .*{message}"):
        load_weights(path)


def test_a_foreign_or_absent_file_is_named(tmp_path):
    path = tmp_path / "foreign.safetensors"
    path.write_bytes(safetensors.numpy.save({"x": np.zeros(2, np.float32)}))
    with pytest.raises(LemonError, match=r"foreign\.safetensors: the header's 'lemon_jax' is None"):
        load_weights(path)
    with pytest.raises(LemonError, match=r"none\.safetensors: cannot read the weights"):
        load_weights(tmp_path / "none.safetensors")


def test_a_failed_save_keeps_the_old_file(decoder, tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_weights(path, decoder, UNTIED)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]

"""GGUF files, written with the gguf package: the logits of the dequantised model; and hostile files."""

import math
import struct

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_files import gguf_writer
from gguf_helpers import QUANTISED, SCALES, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import full_logits
from pretrained_helpers import VOCAB, reference_logits, reference_model

from lemon_jax.errors import LemonError
from lemon_jax.model import gguf_file, load_pretrained, named_params
from lemon_jax.model.gguf_file import GgufFile
from lemon_jax.model.serving_weights import open_source

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 20)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Six layers, as the family's pattern is not in the file: the sixth reads all.
CHANGES = {
    "gemma3": {
        "num_hidden_layers": 6, "sliding_window_pattern": 6, "query_pre_attn_scalar": 16,
        "intermediate_size": 64,
    },
    "llama3": {"rope_parameters": LLAMA3, "head_dim": 32, "hidden_size": 128, "intermediate_size": 64},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "F32"), ("llama3", "Q8_0"), ("qwen2", "F16"), ("qwen3", "Q8_0"), ("gemma3", "Q4_0")],
)
def test_logits_equal_those_of_the_dequantised_model(name, kind, tmp_path):
    model = reference_model(name, **({"intermediate_size": 64} | CHANGES.get(name, {})))
    write_gguf(tmp_path / "model.gguf", model, kind)
    decoder, config = load_pretrained(tmp_path / "model.gguf")
    assert config.tie_embeddings == model.config.tie_word_embeddings
    expected = reference_logits(model, TOKENS)
    assert np.ptp(expected) > 5
    atol = 1e-5 * np.ptp(expected)
    np.testing.assert_allclose(full_logits(decoder, TOKENS), expected, atol=max(atol, 1e-4))


@pytest.mark.parametrize("kind", [*QUANTISED, *SCALES])
def test_every_quantisation(kind, tmp_path, monkeypatch):
    """Parameters equal what the gguf package makes of the whole tensor, also in parts of a few rows."""
    monkeypatch.setattr(gguf_file, "_CHUNK", 256 * 10)
    model = reference_model("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=256, scale=0.1)
    write_gguf(tmp_path / "model.gguf", model, kind)
    params = named_params(load_pretrained(tmp_path / "model.gguf")[0])
    layer = model.model.layers[0]
    expected = {
        "embed": model.model.embed_tokens.weight,
        "head": model.lm_head.weight,
        "layers.0.attention.q": layer.self_attn.q_proj.weight.T,
        "layers.0.attention.k": layer.self_attn.k_proj.weight.T,
        "layers.0.attention.o": layer.self_attn.o_proj.weight.T,
        "layers.0.mlp.down": layer.mlp.down_proj.weight.T,
    }
    for name, value in expected.items():
        actual = np.asarray(params[name])
        assert (actual == value.detach().numpy().reshape(actual.shape)).all(), name
        assert np.isfinite(actual).all()
        assert actual.std() > 1e-3
    low = named_params(load_pretrained(tmp_path / "model.gguf", dtype="bfloat16")[0])
    assert (low["layers.0.mlp.up"] == params["layers.0.mlp.up"].astype(jnp.bfloat16)).all()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "model.gguf"
    write_gguf(path, reference_model("qwen2", num_hidden_layers=1, intermediate_size=32), "Q8_0")
    return path.read_bytes()


def load(data, tmp_path):
    path = tmp_path / "spoiled.gguf"
    path.write_bytes(data)
    return load_pretrained(path)


def test_truncated_files(sound, tmp_path):
    for length in (0, 3, 4, 20, 60, 300, 2000, len(sound) // 2, len(sound) - 40):
        with pytest.raises(LemonError, match=r"spoiled.gguf: (not a usable GGUF|cannot read)"):
            load(sound[:length], tmp_path)


def header(*entries, tensors=1, version=3, keys=None):
    count = len(entries) if keys is None else keys
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + b"".join(entries)


def text(value):
    return struct.pack("<Q", len(value)) + value


HUGE = 2**63
ARCH = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(40), "it begins with b'GGML'"),
        (header(version=1), "format version is 1"),
        (header(tensors=0, keys=1), "0 tensors"),
        (header(keys=HUGE), f"{HUGE} metadata keys"),
        (header(struct.pack("<Q", HUGE)), "ends inside its header"),
        (header(text(b"\xff\xfe")), "not UTF-8"),
        (header(text(b"a") + struct.pack("<I", 13)), "unknown type 13"),
        # The two that a reader which trusts the file never comes back from.
        (header(text(b"a") + struct.pack("<IIQ", 9, 0, HUGE)), "ends inside its header"),
        (header(text(b"a") + struct.pack("<IIQ", 9, 8, HUGE)), "ends inside its header"),
        (header(text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "array holds the unknown type 9"),
        (header(ARCH, ARCH), "comes twice"),
        (header(ARCH, text(b"t") + struct.pack("<I", 5), keys=1), "has 5 axes"),
        (
            header(ARCH, text(b"t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0), keys=1),
            "ends before 't'",
        ),
        (header(ARCH, text(b"t") + struct.pack("<IQIQ", 1, 32, 99, 0), keys=1), "unknown type 99"),
        (header(ARCH, text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0), keys=1), "no blocks of 32"),
        (header(ARCH, text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), keys=1), "no blocks of 1"),
        (header(ARCH, text(b"t") + struct.pack("<IQIQ", 1, 1, 0, HUGE), keys=1), "ends before"),
        (
            header(ARCH, text(b"general.alignment") + struct.pack("<II", 4, 0),
                   text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0), keys=2),
            "general.alignment is 0",
        ),
        (header(ARCH, text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0), keys=1) + bytes(64), "token_embd"),
    ],
)  # fmt: skip
def test_hostile_headers(data, message, tmp_path):
    with pytest.raises(LemonError, match=message):
        load(data, tmp_path)


def write_small(path, tensors=(), drop=(), **changes):
    """The smallest llama file, changed."""
    architecture = changes.pop("architecture", "llama")
    keys = {
        "block_count": 1, "embedding_length": 4, "feed_forward_length": 4, "attention.head_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
    } | changes  # fmt: skip
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}.weight": (4, 4) for name in names}
    shapes |= {"token_embd.weight": (7, 4), "output_norm.weight": (4,)}
    shapes |= {"blk.0.attn_norm.weight": (4,), "blk.0.ffn_norm.weight": (4,)} | dict(tensors)
    with gguf_writer(path, architecture) as writer:
        for key, value in keys.items():
            add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}.get(type(value))
            (add or writer.add_array)(f"llama.{key}", value)
        for name, shape in shapes.items():
            if name not in drop:
                writer.add_tensor(name, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba', expected one of llama"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, "layer_norm_rms_epsilon is nan"),
        ({"rope.freq_base": math.inf}, "freq_base is inf"),
        ({"block_count": 10**9}, "1000000000 layers"),
        ({"block_count": 2}, r"blk.1.attn_norm.weight is missing"),
        ({"attention.head_count": 0}, "head_count is 0"),
        ({"attention.head_count": "2"}, "head_count is '2'"),
        ({"attention.head_count_kv": [1, 1]}, "head_count_kv is"),
        ({"attention.key_length": 3}, "head_dim 3 is odd"),
        ({"rope.dimension_count": 2}, "rope.dimension_count is 2"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
        ({"drop": ("blk.0.ffn_up.weight",)}, "blk.0.ffn_up.weight is missing"),
        ({"drop": ("token_embd.weight",)}, "token_embd.weight is missing"),
        (
            {"tensors": {"blk.0.ffn_up.weight": (4, 5)}},
            r"ffn_up.weight has shape \(4, 5\), expected",
        ),
        ({"tensors": {"blk.0.ffn_gate_exps.weight": (2, 4)}}, "'blk.0.ffn_gate_exps.weight' is unexpected"),
        ({"tensors": {"blk.0.attn_q.bias": (4,)}}, "'blk.0.attn_q.bias' is unexpected"),
        ({"tensors": {"rope_freqs.weight": (2,)}}, "rope_freqs.weight is not what Llama 3.1"),
    ],
)
def test_files_that_are_no_such_decoder(changes, message, tmp_path):
    write_small(tmp_path / "model.gguf")
    write_small(tmp_path / "other.gguf", **changes)
    for read in (load_pretrained, open_source):  # for a policy, and for a worker
        read(tmp_path / "model.gguf")
        with pytest.raises(LemonError, match=message):
            read(tmp_path / "other.gguf")


def test_a_type_that_is_no_weight(sound, tmp_path):
    with gguf_writer(tmp_path / "x.gguf", "llama") as writer:
        writer.add_tensor("t", np.ones(3, np.float64))
    with pytest.raises(LemonError, match="'t' is of the type F64"):
        GgufFile(tmp_path / "x.gguf").read("t", np.dtype(np.float32))


def test_scales_that_are_not_finite_are_read_without_a_warning(tmp_path):
    block = np.frombuffer(np.array(np.inf, np.float16).tobytes() + bytes(32), np.uint8)  # inf * 0
    with gguf_writer(tmp_path / "x.gguf", "llama") as writer:
        writer.add_tensor("t", block[None], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    assert np.isnan(GgufFile(tmp_path / "x.gguf").read("t", np.dtype(np.float32))).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2900), st.integers(0, 255)), min_size=1, max_size=3))
def test_flipped_bytes_of_the_header_give_a_model_or_an_error(tmp_path_factory, sound, flips):
    data = bytearray(sound)
    for at, value in flips:
        data[at] = value
    folder = tmp_path_factory.mktemp("flipped")
    try:
        decoder, config = load(bytes(data), folder)
    except LemonError:
        return
    assert named_params(decoder)["embed"].shape == (config.vocab_size, config.embed_dim)

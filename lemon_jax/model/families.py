"""The pretrained families one decoder stands for, and where each of its parameters lies in their files.

| family | what sets it apart |
|---|---|
| llama | (Llama 2 to 3.2, SmolLM2) nothing: it is also what a decoder trained from scratch is saved as |
| qwen2 | (Qwen2, Qwen2.5) biases of queries, keys and values |
| qwen3 | norms of queries and keys |
| gemma3 | those norms, two more norms a block, scaled embeddings, gelu, sliding windows |

Files hold a projection as a matrix [outputs, inputs]; a parameter here has its input axes first, and heads as
an axis of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lemon_jax.errors import LemonError
from lemon_jax.model.config import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """`gguf` is its `general.architecture`; `architecture` its class in transformers and vLLM."""

    name: str
    model_type: str
    architecture: str
    gguf: str
    hub_norm_offset: float = 0.0  # hub files of Gemma store scale - 1; GGUF files store the scale
    gguf_interleaved: bool = False  # GGUF rows of queries and keys are ordered for interleaved rotation


FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="llama",
            model_type="llama",
            architecture="LlamaForCausalLM",
            gguf="llama",
            gguf_interleaved=True,
        ),
        Family(name="qwen2", model_type="qwen2", architecture="Qwen2ForCausalLM", gguf="qwen2"),
        Family(name="qwen3", model_type="qwen3", architecture="Qwen3ForCausalLM", gguf="qwen3"),
        Family(
            name="gemma3",
            model_type="gemma3_text",
            architecture="Gemma3ForCausalLM",
            gguf="gemma3",
            hub_norm_offset=1.0,
        ),
    )
}


def family_of(config: DecoderConfig) -> Family:
    """The family that computes what this config does. Raises `LemonError` where none of them does."""
    gemma = (config.post_norms, config.scale_embeddings, config.activation == "gelu_tanh")
    traits = (config.qkv_bias, config.qk_norm, *gemma)
    names = {
        (False, False, False, False, False): "llama",
        (True, False, False, False, False): "qwen2",
        (False, True, False, False, False): "qwen3",
        (False, True, True, True, True): "gemma3",
    }
    name = names.get(traits)
    only_gemma = config.query_pre_attn_scalar is not None or config.rope_local_theta is not None
    if name is None or (only_gemma and name != "gemma3") or (config.sliding_layers and name == "llama"):
        raise LemonError(
            "decoder config: qkv_bias, qk_norm, post_norms, scale_embeddings, activation and sliding_layers "
            f"fit none of the families {', '.join(FAMILIES)}; such a decoder has no place in other tools"
        )
    return FAMILIES[name]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter lies in a file, and its shape here. A projection sums over its `inputs` leading axes;
    a vector has none, and a table (None) is stored as it is here."""

    hub: str
    gguf: str
    shape: tuple[int, ...]
    inputs: int | None = 0
    norm: bool = False
    rotated_heads: int = 0  # of queries and keys, whose rows may be interleaved

    @property
    def file_shape(self) -> tuple[int, ...]:
        if self.inputs is None:
            return self.shape
        outputs = math.prod(self.shape[self.inputs :])
        return (outputs, math.prod(self.shape[: self.inputs])) if self.inputs else (outputs,)


def to_parameter(array: np.ndarray, place: Place) -> np.ndarray:
    """The parameter of a file's array."""
    return (array.T if place.inputs else array).reshape(place.shape)


def to_file(parameter: np.ndarray, place: Place) -> np.ndarray:
    """The inverse of `to_parameter`."""
    if not place.inputs:
        return parameter.reshape(place.file_shape)
    return np.ascontiguousarray(parameter.reshape(place.file_shape[::-1]).T)


def split_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection, ordered for rotating halves, from those for rotating pairs.

    # pairs (0 1) (2 3)  rows of a head: a0 b0 a1 b1  ->  a0 a1 b0 b1
    """
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def places(config: DecoderConfig) -> dict[str, Place]:
    """Every parameter of a decoder by its dotted name, and where its family's files hold it."""
    dim, vocab = config.embed_dim, config.vocab_size
    out = {
        "embed": Place(
            hub="model.embed_tokens.weight", gguf="token_embd.weight", shape=(vocab, dim), inputs=None
        ),
        "final_norm.scale": Place(
            hub="model.norm.weight", gguf="output_norm.weight", shape=(dim,), norm=True
        ),
    }
    if not config.tie_embeddings:
        out["head"] = Place(hub="lm_head.weight", gguf="output.weight", shape=(vocab, dim), inputs=None)
    for i in range(config.num_layers):
        layer = _attention(config) | _mlp(config) | _norms(config)
        for name, (hub, gguf, shape, rest) in layer.items():
            out[f"layers.{i}.{name}"] = Place(
                hub=f"model.layers.{i}.{hub}", gguf=f"blk.{i}.{gguf}", shape=shape, **rest
            )
    return out


_Row = tuple[str, str, tuple[int, ...], dict[str, Any]]


def _attention(config: DecoderConfig) -> dict[str, _Row]:
    dim, size = config.embed_dim, config.head_dim
    out: dict[str, _Row] = {}
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        rest = {"rotated_heads": heads if name != "v" else 0}
        hub, gguf = f"self_attn.{name}_proj", f"attn_{name}"
        out[f"attention.{name}"] = (
            f"{hub}.weight", f"{gguf}.weight", (dim, heads, size), rest | {"inputs": 1},
        )  # fmt: skip
        if config.qkv_bias:
            out[f"attention.{name}_bias"] = (f"{hub}.bias", f"{gguf}.bias", (heads, size), rest)
        if config.qk_norm and name != "v":
            norm = (f"self_attn.{name}_norm.weight", f"attn_{name}_norm.weight", (size,), {"norm": True})
            out[f"attention.{name}_norm.scale"] = norm
    shape = (config.num_heads, size, dim)
    out["attention.o"] = ("self_attn.o_proj.weight", "attn_output.weight", shape, {"inputs": 2})
    return out


def _mlp(config: DecoderConfig) -> dict[str, _Row]:
    into, back = (config.embed_dim, config.mlp_dim), (config.mlp_dim, config.embed_dim)
    return {
        f"mlp.{name}": (f"mlp.{name}_proj.weight", f"ffn_{name}.weight", shape, {"inputs": 1})
        for name, shape in (("gate", into), ("up", into), ("down", back))
    }


def _norms(config: DecoderConfig) -> dict[str, _Row]:
    # Gemma's name for the norm after attention is the others' for the one before the MLP.
    before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    names = {
        "attention_norm": ("input_layernorm", "attn_norm"),
        "mlp_norm": (before_mlp, "ffn_norm"),
    }
    if config.post_norms:
        names["attention_post_norm"] = ("post_attention_layernorm", "post_attention_norm")
        names["mlp_post_norm"] = ("post_feedforward_layernorm", "post_ffw_norm")
    return {
        f"{name}.scale": (f"{hub}.weight", f"{gguf}.weight", (config.embed_dim,), {"norm": True})
        for name, (hub, gguf) in names.items()
    }

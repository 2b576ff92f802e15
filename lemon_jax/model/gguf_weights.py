"""A GGUF file as a source of a pretrained decoder: its metadata as a config, its tensors as parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lemon_jax.errors import LemonError
from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.config_values import ConfigValues
from lemon_jax.model.families import FAMILIES, Place, split_halves, to_parameter
from lemon_jax.model.gguf_file import GgufFile
from lemon_jax.model.rope import frequency_divisors

_FREQUENCIES = "rope_freqs.weight"  # Llama 3.1: what each rotary frequency is divided by
_GEMMA_PATTERN = 6  # every sixth layer reads all, which most files leave to the reader to know
_GEMMA_27B_LAYERS = 62  # the one size whose scores are scaled by embed_dim / num_heads


class GgufSource:
    """The source that `pretrained` reads; see there. Quantised tensors are dequantised when read."""

    def __init__(self, path: Path):
        self.path = path
        self.file = GgufFile(path)
        architecture = self.file.metadata.get("general.architecture")
        family = next((f for f in FAMILIES.values() if f.gguf == architecture), None)
        if family is None:
            known = ", ".join(f.gguf for f in FAMILIES.values())
            raise LemonError(
                f"{path}: general.architecture is {architecture!r:.80}, expected one of {known}; "
                "use a model of these families"
            )
        self._family = family
        self.config = self._config()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: t.shape for name, t in self.file.tensors.items() if name != _FREQUENCIES}

    def name(self, place: Place) -> str:
        return place.gguf

    def read(self, place: Place, dtype: np.dtype) -> np.ndarray:
        array = self.file.read(place.gguf, dtype)
        if self._family.gguf_interleaved and place.rotated_heads:
            array = split_halves(array, place.rotated_heads)
        return to_parameter(array, place)

    def _config(self) -> DecoderConfig:
        source = str(self.path)
        prefix = f"{self._family.gguf}."
        own = {k.removeprefix(prefix): v for k, v in self.file.metadata.items() if k.startswith(prefix)}
        keys = ConfigValues(own, f"{source}: {self._family.gguf}")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise LemonError(f"{source}: the matrix token_embd.weight is missing; fetch the model again")
        dim, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
        fields: dict[str, Any] = {
            "vocab_size": embedding.shape[0],
            "embed_dim": dim,
            "num_layers": keys.integer("block_count"),
            "num_heads": heads,
            "num_kv_heads": keys.integer("attention.head_count_kv", heads),
            "head_dim": keys.integer("attention.key_length", dim // heads),
            "mlp_dim": keys.integer("feed_forward_length"),
            "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
            "tie_embeddings": "output.weight" not in self.file.tensors,
        }
        fields |= self._rope(keys, fields["head_dim"])
        if self._family.name == "gemma3":
            fields |= _gemma(keys, fields)
        try:
            config = DecoderConfig(
                qkv_bias=self._family.name == "qwen2",
                qk_norm=self._family.name in ("qwen3", "gemma3"),
                **fields,
            )
        except LemonError as error:
            raise LemonError(f"{source}: {error}") from error
        return self._llama3(config) if _FREQUENCIES in self.file.tensors else config

    def _rope(self, keys: ConfigValues, head_dim: int) -> dict[str, Any]:
        default = 1e6 if self._family.name == "gemma3" else 1e4
        if keys.integer("rope.dimension_count", head_dim) != head_dim:
            raise keys.fault("rope.dimension_count", f"{head_dim}: all of a head is rotated here")
        out: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", default)}
        kind = keys.text("rope.scaling.type", "none")
        if kind not in ("none", "linear"):
            raise keys.fault("rope.scaling.type", "none or linear")
        if kind == "linear":
            out |= {"rope_scaling": "linear", "rope_factor": keys.number("rope.scaling.factor")}
        return out

    def _llama3(self, config: DecoderConfig) -> DecoderConfig:
        """The config whose divisors are those of the file, which holds them instead of their formula."""
        found = self.file.read(_FREQUENCIES, np.dtype(np.float32)).reshape(-1)
        factor = float(found.max())
        if 1 < factor < 1e6:
            out = replace(config, rope_scaling="llama3", rope_factor=factor)
            expected = frequency_divisors(out)
            if expected is not None and found.shape == expected.shape and np.allclose(found, expected, 1e-3):
                return out
        raise LemonError(
            f"{self.path}: {_FREQUENCIES} is not what Llama 3.1 and 3.2 divide their rotary frequencies by; "
            "use one of those models"
        )


def _gemma(keys: ConfigValues, fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, dim, heads = fields["num_layers"], fields["embed_dim"], fields["num_heads"]
    if layers > 10_000:
        raise keys.fault("block_count", "at most 10000")
    out: dict[str, Any] = {
        "activation": "gelu_tanh",
        "post_norms": True,
        "scale_embeddings": True,
        "rope_local_theta": keys.number("rope.freq_base_swa", 1e4),
        "sliding_window": keys.integer("attention.sliding_window"),
    }
    pattern = keys.integer("attention.sliding_window_pattern", _GEMMA_PATTERN)
    out["sliding_layers"] = tuple(i for i in range(layers) if (i + 1) % pattern)
    large = layers == _GEMMA_27B_LAYERS
    out["query_pre_attn_scalar"] = float(dim // heads if large else fields["head_dim"])
    return out

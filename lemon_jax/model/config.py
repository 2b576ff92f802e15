"""The static shape of a decoder, and the presets that are trained from scratch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lemon_jax.errors import LemonError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything about a decoder that is not a parameter; hashable, so it may be a static argument.

    Raises `LemonError` for sizes that fit no decoder.
    """

    vocab_size: int
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # fewer than num_heads: grouped-query attention
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and not 0 < value < math.inf:
                raise LemonError(f"decoder config: {field.name} is {value}; it must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise LemonError(
                f"decoder config: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}; every key/value head serves the same number of heads"
            )
        if self.head_dim % 2:
            raise LemonError(f"decoder config: head_dim {self.head_dim} is odd; rotary positions need pairs")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` gives the config back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """The config with these values. Raises `LemonError` for unknown, missing or mistyped keys."""
        known = {field.name: field for field in fields(cls)}
        required = {name for name, field in known.items() if field.type == "int"}
        faults = [f"unknown key {name!r:.40}" for name in sorted(set(values) - set(known))]
        faults += [f"missing key {name!r}" for name in sorted(required - set(values))]
        sound: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                continue
            kind = str(known[name].type)
            if kind == "float" and type(value) is int and abs(value) < 2**53:
                value = float(value)  # some write 10000.0 as 10000 into JSON
            if type(value).__name__ != kind:  # not isinstance: bool is an int to Python
                faults.append(f"{name} is {value!r:.40}, expected {kind}")
            sound[name] = value
        if faults:
            raise LemonError(f"decoder config: {'; '.join(faults)}; expected the keys {', '.join(known)}")
        return cls(**sound)


PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(
        vocab_size=512, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
    ),
    # 9.2 M parameters: in bfloat16 the weights stay below 19 MiB.
    "compact": DecoderConfig(
        vocab_size=8000, embed_dim=320, num_layers=6, num_heads=10, num_kv_heads=2, head_dim=32, mlp_dim=896
    ),
}

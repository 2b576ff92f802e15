"""The static shape of a decoder, and the presets that are trained from scratch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any

from lemon_jax.errors import LemonError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything about a decoder that is not a parameter; hashable, so it may be a static argument.

    The first eleven fields are those of the presets; the others make it a decoder of another family (see
    `families`). Raises `LemonError` for values that fit no decoder.
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
    activation: str = "silu"  # of the MLP's gate; or "gelu_tanh"
    qk_norm: bool = False  # RMSNorm of each head's queries and keys, before the rotation
    post_norms: bool = False  # two more norms a block, of what attention and MLP add to the residual stream
    scale_embeddings: bool = False  # by sqrt(embed_dim), in the dtype of the activations
    query_pre_attn_scalar: float | None = None  # scores are divided by its root; None: head_dim
    sliding_layers: tuple[int, ...] = ()  # layers whose queries read the last `sliding_window` tokens only
    sliding_window: int | None = None  # tokens, the query's own among them
    rope_local_theta: float | None = None  # of sliding layers, never scaled; None: as the other layers
    rope_scaling: str = "none"  # of the rotary frequencies; or "linear" or "llama3" (see `rope`)
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0  # llama3 only, as the next two
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192  # tokens

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) in (int, float) and not 0 < value < math.inf:
                raise LemonError(f"decoder config: {field.name} is {value}; it must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise LemonError(
                f"decoder config: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}; every key/value head serves the same number of heads"
            )
        if self.head_dim % 2:
            raise LemonError(f"decoder config: head_dim {self.head_dim} is odd; rotary positions need pairs")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise LemonError(
                    f"decoder config: {name} is {value!r:.40}, expected one of {', '.join(choices)}"
                )
        if self.sliding_layers and self.sliding_window is None:
            raise LemonError("decoder config: sliding_layers needs a sliding_window, the tokens they read")
        if not all(0 <= layer < self.num_layers for layer in self.sliding_layers):
            raise LemonError(
                f"decoder config: sliding_layers {self.sliding_layers!s:.60} names layers outside "
                f"0..{self.num_layers - 1}"
            )
        if self.rope_scaling == "llama3" and self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise LemonError(
                f"decoder config: rope_high_freq_factor {self.rope_high_freq_factor} must exceed "
                f"rope_low_freq_factor {self.rope_low_freq_factor}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without those that are the default; `from_dict` gives the config back.

        A default that is left out keeps what older versions wrote and read: they know the first eleven keys.
        """
        first = [field.name for field in fields(self)][:_ALWAYS_WRITTEN]
        default = {field.name: field.default for field in fields(self)}
        return {k: v for k, v in asdict(self).items() if k in first or v != default[k]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """The config with these values. Raises `LemonError` for unknown, missing or mistyped keys."""
        known = {field.name: field for field in fields(cls)}
        required = {name for name, field in known.items() if field.default is MISSING}
        faults = [f"unknown key {name!r:.40}" for name in sorted(set(values) - set(known))]
        faults += [f"missing key {name!r}" for name in sorted(required - set(values))]
        sound: dict[str, Any] = {}
        for name in sorted(set(values) & set(known)):
            try:
                sound[name] = _typed(known[name], values[name])
            except TypeError:
                faults.append(f"{name} is {values[name]!r:.40}, expected {known[name].type}")
        if faults:
            raise LemonError(f"decoder config: {'; '.join(faults)}; expected the keys {', '.join(known)}")
        return cls(**sound)


_ALWAYS_WRITTEN = 11
CHOICES = {"activation": ("silu", "gelu_tanh"), "rope_scaling": ("none", "linear", "llama3")}


def _typed(field: Field[Any], value: Any) -> Any:
    """A value of JSON as the field's type has it. Raises TypeError where it has not."""
    kind = str(field.type)
    if kind.endswith(" | None"):
        if value is None:
            return None
        kind = kind.removesuffix(" | None")
    if kind == "tuple[int, ...]" and isinstance(value, (list, tuple)):
        if all(type(item) is int for item in value):
            return tuple(value)
    elif kind == "float" and type(value) is int and abs(value) < 2**53:
        return float(value)  # some write 10000.0 as 10000 into JSON
    elif type(value).__name__ == kind:  # not isinstance: bool is an int to Python
        return value
    raise TypeError


PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(
        vocab_size=512, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64
    ),
    # 1.2 M parameters with 3,000 pieces: for experiments of hundreds of runs.
    "small": DecoderConfig(
        vocab_size=3000, embed_dim=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384
    ),
    # 9.2 M parameters: in bfloat16 the weights stay below 19 MiB.
    "compact": DecoderConfig(
        vocab_size=8000, embed_dim=320, num_layers=6, num_heads=10, num_kv_heads=2, head_dim=32, mlp_dim=896
    ),
}

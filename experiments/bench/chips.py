"""TPU chips and the shapes of published policies: facts that ahead-of-time proofs rest on.

Chips: Google Cloud's pages "TPU v5e", "TPU v5p" and "TPU v6e" (docs.cloud.google.com/tpu/docs), read on
2026-11-30. The inter-chip bandwidth there counts both directions of a chip's links; half of it can arrive.
Policies: `config.json` of the model repositories named; Qwen2.5 pads its vocabulary to 152,064 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lemon_jax.model import PRESETS, DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One TPU chip."""

    hbm: float  # bytes
    flops: float  # a second, bfloat16
    hbm_bandwidth: float  # bytes a second
    ici_bandwidth: float  # bytes a second, both directions together


CHIPS = {
    "v5e": Chip(hbm=16 * 2**30, flops=197e12, hbm_bandwidth=819e9, ici_bandwidth=400e9),
    "v5p": Chip(hbm=95 * 2**30, flops=459e12, hbm_bandwidth=2765e9, ici_bandwidth=1200e9),
    "v6e": Chip(hbm=32 * 2**30, flops=918e12, hbm_bandwidth=1638e9, ici_bandwidth=800e9),
}

_QWEN: dict[str, Any] = {
    "vocab_size": 152064,
    "head_dim": 128,
    "rope_theta": 1e6,
    "qkv_bias": True,
    "tie_embeddings": False,
}
POLICIES: dict[str, DecoderConfig] = {
    **PRESETS,
    # Qwen/Qwen2.5-7B-Instruct: 7.6e9 parameters
    "qwen2.5-7b": DecoderConfig(
        embed_dim=3584, num_layers=28, num_heads=28, num_kv_heads=4, mlp_dim=18944, **_QWEN
    ),
    # Qwen/Qwen2.5-32B-Instruct: 32.8e9 parameters
    "qwen2.5-32b": DecoderConfig(
        embed_dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, mlp_dim=27648, **_QWEN
    ),
}

"""Rotary positions: the frequencies of a config, and the rotation."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lemon_jax.model.config import DecoderConfig


def frequency_divisors(config: DecoderConfig) -> np.ndarray | None:
    """What each of the head_dim / 2 frequencies is divided by; None where the config scales none.

    "linear" divides all by `rope_factor` (Chen et al. 2023, arXiv 2306.15595). "llama3" (Llama 3.1) divides
    those whose wavelength exceeds original_context / low_freq_factor by `rope_factor`, leaves those below
    original_context / high_freq_factor, and interpolates the frequency in between.
    """
    half = config.head_dim // 2
    if config.rope_scaling == "none":
        return None
    if config.rope_scaling == "linear":
        return np.full(half, config.rope_factor, np.float32)
    wavelength = 2 * math.pi * config.rope_theta ** (np.arange(half) / half)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = np.clip((config.rope_original_context / wavelength - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / config.rope_factor + kept)).astype(np.float32)


def rotary_angles(
    positions_BxT: Int[Array, "batch time"], config: DecoderConfig, *, local: bool = False
) -> tuple[Float[Array, "batch time half"], Float[Array, "batch time half"]]:
    """(cos, sin) of position * frequency, fp32; with `local` as sliding layers have them."""
    half = config.head_dim // 2
    own = config.rope_local_theta if local else None
    frequencies = (own or config.rope_theta) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    divisors = None if own else frequency_divisors(config)
    if divisors is not None:
        frequencies = frequencies / divisors
    angles = positions_BxT.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BxTxHxE: Array, cos_BxTxE: Array, sin_BxTxE: Array) -> Array:
    """Rotary embedding in the half-split form (Su et al. 2021, arXiv 2104.09864; pairs as in GPT-NeoX).

    Dimension i is paired with i + E/2 and turned by position * theta ** (-2i / E).
    """
    x1, x2 = jnp.split(x_BxTxHxE.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BxTxE[:, :, None], sin_BxTxE[:, :, None]
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BxTxHxE.dtype)

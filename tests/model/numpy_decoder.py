"""The decoder once more in plain NumPy, float64, one head and one position at a time: the oracle.

It shares no code with the package and reads parameters by name.
"""

import numpy as np


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2) + eps) * scale


def rotate(x, position, theta):
    """Turn each pair (x[i], x[i + half]) by position * theta ** (-2 i / len(x))."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def attention(params, prefix, config, x_TxD):
    heads_per_kv = config.num_heads // config.num_kv_heads

    def project(name, head, t):
        y = x_TxD[t] @ params[f"{prefix}.{name}"][:, head, :]
        return y + params[f"{prefix}.{name}_bias"][head] if config.qkv_bias else y

    out = np.zeros_like(x_TxD)
    for h in range(config.num_heads):
        kv = h // heads_per_kv
        for t in range(len(x_TxD)):
            q = rotate(project("q", h, t), t, config.rope_theta)
            scores = np.array(
                [q @ rotate(project("k", kv, s), s, config.rope_theta) for s in range(t + 1)]
            ) / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed = sum(weights[s] * project("v", kv, s) for s in range(t + 1))
            out[t] += mixed @ params[f"{prefix}.o"][h]
    return out


def logits(params, config, tokens):
    """Logits [T, V] of one unpadded sequence. `params`: {dotted name: array}."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    x = params["embed"][np.asarray(tokens)]
    for i in range(config.num_layers):
        prefix = f"layers.{i}"
        normed = np.stack([rms_norm(r, params[f"{prefix}.attention_norm.scale"], config.norm_eps) for r in x])
        x = x + attention(params, f"{prefix}.attention", config, normed)
        normed = np.stack([rms_norm(r, params[f"{prefix}.mlp_norm.scale"], config.norm_eps) for r in x])
        gate = normed @ params[f"{prefix}.mlp.gate"]
        up = normed @ params[f"{prefix}.mlp.up"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ params[f"{prefix}.mlp.down"]
    x = np.stack([rms_norm(r, params["final_norm.scale"], config.norm_eps) for r in x])
    head = params["embed"] if config.tie_embeddings else params["head"]
    return x @ head.T

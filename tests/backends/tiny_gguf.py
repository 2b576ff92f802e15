"""A GGUF chat model of a few thousand random weights, whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf_files import write_qwen2

from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.families import places

CONFIG = DecoderConfig(
    vocab_size=260, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=64,
    qkv_bias=True, tie_embeddings=False,
)  # fmt: skip
SYMBOLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's, which opens its reply with thoughts unless it is told that they are over.
NO_THOUGHTS = "<think>\n\n</think>\n\n"
THINKING_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}" + NO_THOUGHTS + "{% endif %}"
    "{% endif %}"
)


def write_tiny_gguf(path: Path, seed: int = 0, template: str = TEMPLATE) -> Path:
    rng = np.random.default_rng(seed)
    params = {}
    for name, place in places(CONFIG).items():
        if place.norm:
            parameter = 1 + 0.2 * rng.normal(size=place.shape)
        else:
            parameter = (1.0 if name in ("embed", "head") else 0.3) * rng.normal(size=place.shape)
        params[name] = parameter.astype(np.float32)
    # GPT-2's spelling of bytes, one merge (a file without merges is no byte-pair tokenizer), and symbols.
    tokenizer = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [*_byte_letters(), "ab", *SYMBOLS],
        "token_type": [1] * 257 + [3] * 3,
        "merges": ["a b"],
        "eos_token_id": 259,
    }
    write_qwen2(path, CONFIG, params, tokenizer=tokenizer, template=template, context=4096)
    return path


def _byte_letters() -> list[str]:
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]

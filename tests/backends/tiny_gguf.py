"""A GGUF chat model of a few thousand random weights, whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.families import places, to_file

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


def write_tiny_gguf(path: Path, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(CONFIG.num_layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(CONFIG.embed_dim)
    writer.add_feed_forward_length(CONFIG.mlp_dim)
    writer.add_head_count(CONFIG.num_heads)
    writer.add_head_count_kv(CONFIG.num_kv_heads)
    writer.add_layer_norm_rms_eps(CONFIG.norm_eps)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    # GPT-2's spelling of bytes, one merge (a file without merges is no byte-pair tokenizer), and symbols.
    letters = [*_byte_letters(), "ab", *SYMBOLS]
    writer.add_token_list(letters)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(259)
    writer.add_chat_template(TEMPLATE)
    for name, place in places(CONFIG).items():
        if place.norm:
            parameter = 1 + 0.2 * rng.normal(size=place.shape)
        else:
            parameter = (1.0 if name in ("embed", "head") else 0.3) * rng.normal(size=place.shape)
        writer.add_tensor(place.gguf, to_file(parameter.astype(np.float32), place))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_letters() -> list[str]:
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]

"""GGUF files, written with the gguf package as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.families import places, to_file


@contextmanager
def gguf_writer(path: Path, architecture: str) -> Iterator[gguf.GGUFWriter]:
    """What keys and tensors are added to; the file is written at the end of the block."""
    writer = gguf.GGUFWriter(path, architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(
    writer: gguf.GGUFWriter,
    *,
    layers: int,
    context: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    norm_eps: float,
    rope_theta: float,
) -> None:
    """The keys that every decoder has."""
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(norm_eps)
    writer.add_rope_freq_base(rope_theta)


def write_qwen2(
    path: Path,
    config: DecoderConfig,
    params: Mapping[str, np.ndarray],
    *,
    tokenizer: Mapping[str, Any],
    template: str | None,
    context: int,
) -> None:
    """A decoder of the Qwen2 family, whose rows the converter keeps as they are; `tokenizer` holds the
    `tokenizer.ggml.*` values."""
    with gguf_writer(path, "qwen2") as writer:
        add_shape(
            writer,
            layers=config.num_layers,
            context=context,
            width=config.embed_dim,
            mlp=config.mlp_dim,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
        )
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        for name, value in tokenizer.items():
            add[type(value)](f"tokenizer.ggml.{name}", value)
        if template is not None:
            writer.add_chat_template(template)
        for name, place in places(config).items():
            writer.add_tensor(place.gguf, to_file(params[name], place))

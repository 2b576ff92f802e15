"""A decoder written in the hub's layout, for transformers, vLLM and whatever else reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from lemon_jax.errors import LemonError
from lemon_jax.model.chat_template import ChatTemplate
from lemon_jax.model.config import DecoderConfig
from lemon_jax.model.decoder import Decoder
from lemon_jax.model.families import Place, family_of, places, to_file
from lemon_jax.model.hub_config import config_json
from lemon_jax.model.hub_tokenizer import TOKENIZER_JSON
from lemon_jax.model.hub_weights import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from lemon_jax.model.pretrained_text import TEMPLATE_FILE
from lemon_jax.model.sentencepiece_json import begin_step, tokenizer_json
from lemon_jax.model.text_tokenizer import TextTokenizer
from lemon_jax.model.tokenizer import Tokenizer
from lemon_jax.model.weights import DTYPES, named_params

MAX_SHARD_BYTES = 2 << 30  # what is held in memory beside the decoder while it is written


def save_pretrained(
    folder: str | os.PathLike[str],
    decoder: Decoder,
    config: DecoderConfig,
    tokenizer: TextTokenizer | None = None,
    *,
    max_positions: int,
    chat_template: ChatTemplate | None = None,
    dtype: Literal["bfloat16", "float32"] = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, the parameters in `dtype`, and what reads the tokenizer, into an empty folder.

    `max_positions` is the longest sequence in tokens that the model is meant for. `load_pretrained` and
    transformers' `from_pretrained` read the folder; its tokenizer gives the ids of `tokenizer`, bos put first
    where that has one, except for texts with "▁" (U+2581). It reads control symbols in a text as such only
    with a `chat_template`, whose texts hold them and whose `symbols` it knows. Raises `LemonError`, before
    anything is written, for a decoder of none of the `families`, for a tokenizer that cannot be written, and
    for a folder that holds files.
    """
    folder = Path(folder)
    values = config_json(config, max_positions=max_positions)
    values["torch_dtype"] = values["dtype"] = dtype  # the old key and the new one
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LemonError(f"{folder}: expected a folder that is empty or not there yet; name another one")
    tree = tokenizer_json(tokenizer) if isinstance(tokenizer, Tokenizer) else None
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, decoder, config, np.dtype(DTYPES[dtype]), max_shard_bytes)
    if tokenizer is not None:
        ids = _token_ids(tokenizer)
        values |= ids
        _write_json(folder / "generation_config.json", ids)
        tokenizer.save(folder)
        tree = tree or _with_bos(folder / TOKENIZER_JSON, tokenizer.bos_id)
        if tree is not None:
            _write_json(folder / TOKENIZER_JSON, tree)
        _write_tokenizer_config(folder, tokenizer, max_positions, chat_template)
    _write_json(folder / CONFIG_FILE, values)


def _write_weights(
    folder: Path, decoder: Decoder, config: DecoderConfig, dtype: np.dtype, max_shard_bytes: int
) -> None:
    wanted, params = places(config), named_params(decoder)
    shards = list(_shards(wanted, dtype.itemsize, max_shard_bytes))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(names) > 1 else [WEIGHTS_FILE]
    offset = np.float32(family_of(config).hub_norm_offset)
    for file, shard in zip(names, shards, strict=True):
        arrays = {}
        for name in shard:
            array = np.asarray(params[name])
            if wanted[name].norm and offset:
                array = array.astype(np.float32) - offset
            arrays[wanted[name].hub] = to_file(array.astype(dtype), wanted[name])
        safetensors.numpy.save_file(arrays, folder / file, metadata={"format": "pt"})
    if len(names) > 1:
        where = {wanted[name].hub: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = dtype.itemsize * sum(int(np.prod(place.shape)) for place in wanted.values())
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": where})


def _shards(wanted: dict[str, Place], itemsize: int, limit: int) -> Iterator[list[str]]:
    """Parameter names, in groups of at most `limit` bytes or of one parameter."""
    group: list[str] = []
    size = 0
    for name, place in wanted.items():
        own = itemsize * int(np.prod(place.shape))
        if group and size + own > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += own
    yield group


def _token_ids(tokenizer: TextTokenizer) -> dict[str, Any]:
    ends = list(tokenizer.eos_ids)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": tokenizer.pad_id,
    }


def _with_bos(path: Path, bos_id: int | None) -> dict[str, Any] | None:
    """A tokenizer.json with the step that puts bos before every text; None where the file is right as it is.
    Those of GGUF files have none, and a folder may name it in tokenizer_config.json alone."""
    tree = json.loads(path.read_text(encoding="utf-8"))
    step = tree.get("post_processor")
    steps = [] if step is None else step["processors"] if step["type"] == "Sequence" else [step]
    templates = [step for step in steps if step["type"] == "TemplateProcessing"]
    ids = tree["model"]["vocab"] | {token["content"]: token["id"] for token in tree.get("added_tokens") or []}
    bos = next((text for text, i in ids.items() if i == bos_id), None)
    if bos is None or bos_id is None or any("SpecialToken" in step["single"][0] for step in templates):
        return None
    first = begin_step(bos_id, bos)
    tree["post_processor"] = {"type": "Sequence", "processors": [*steps, first]} if steps else first
    return tree


def _write_tokenizer_config(
    folder: Path, tokenizer: TextTokenizer, max_positions: int, chat_template: ChatTemplate | None
) -> None:
    controls = tokenizer.control_symbols()
    texts = {i: text for text, i in controls.items()}
    named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    values: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; others rebuild it by a family's rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        # A task that spells a control symbol must not end its own prompt. A chat cannot do without.
        "split_special_tokens": chat_template is None,
    }
    if chat_template is not None:
        (folder / TEMPLATE_FILE).write_bytes(chat_template.source.encode())
        # One that is no control symbol would be added as a token that the model has no row for.
        values |= {key: text for key, text in chat_template.symbols.items() if text in controls}
    values |= {key: texts[i] for key, i in named.items() if i is not None and i in texts}
    _write_json(folder / "tokenizer_config.json", values)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""Small byte-pair tokenizers of the kinds that hub folders hold, trained here."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from text_samples import samples
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lemon_jax.model.hub_tokenizer import HubTokenizer
from lemon_jax.model.text_tokenizer import TokenIds

QWEN_SPLIT = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
KINDS = ("qwen", "gpt-2", "smollm", "gemma", "llama-2")


@cache
def tokenizer_json(kind: str, size: int = 600, texts: tuple[str, ...] = ()) -> str:
    """The text of a tokenizer.json as the library writes it, trained on `texts` or on samples."""
    fallback = kind in ("gemma", "llama-2")
    tokenizer = Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>" if fallback else None))
    special = [f"<0x{b:02X}>" for b in range(256)] if fallback else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "qwen")
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    elif kind == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    elif kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    tokenizer.decoder = (
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        if fallback
        else decoders.ByteLevel()
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*(["<unk>"] if fallback else []), *special],
        initial_alphabet=[] if fallback else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        limit_alphabet=150 if fallback else 256,
    )
    tokenizer.train_from_iterator(texts or samples(120, seed=1), trainer)
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = []  # byte pieces are no symbols; they were special only for the trainer
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CONTROLS])
    return tokenizer.to_str()


def token_ids(source: str, *, extra: int = 7) -> TokenIds:
    """Ids of `tokenizer_json`, for a model with `extra` rows that no piece has."""
    tokenizer = Tokenizer.from_str(source)
    end, _, turn = map(tokenizer.token_to_id, CONTROLS)
    size = tokenizer.get_vocab_size() + extra
    return TokenIds(vocab_size=size, pad_id=end, bos_id=None, eos_ids=(turn, end))


def hub_tokenizer(kind: str) -> HubTokenizer:
    source = tokenizer_json(kind)
    return HubTokenizer(source, token_ids(source))


def write_tokenizer(folder: Path, source: str, template: str | None = None) -> None:
    """The tokenizer's files of a hub folder."""
    end, _, turn = map(Tokenizer.from_str(source).token_to_id, CONTROLS)
    (folder / "tokenizer.json").write_text(source, encoding="utf-8")
    # Some files name a symbol by its text, others by an object that holds it.
    pad = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True, "normalized": False}
    config: dict[str, Any] = {"eos_token": "<|endoftext|>", "pad_token": pad}
    config |= {"bos_token": None, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn, end]}))


def gguf_values(
    kind: str, pre: str, *, tree: dict[str, Any] | None = None, rows: int | None = None
) -> dict[str, Any]:
    """The `tokenizer.ggml.*` values that llama.cpp's converter makes of `hub_tokenizer(kind)`, or of another
    tokenizer.json for a model with `rows` tokens."""
    tree = tree or json.loads(tokenizer_json(kind))
    texts = {i: text for text, i in tree["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, 1)
    for token in tree["added_tokens"]:
        texts[token["id"]], kinds[token["id"]] = token["content"], 3 if token["special"] else 4
    ids = {text: i for i, text in texts.items()}
    count = rows or len(texts) + 7
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [texts.get(i, f"[PAD{i}]") for i in range(count)],
        "token_type": [kinds.get(i, 5) for i in range(count)],
        "merges": [" ".join(merge) for merge in tree["model"]["merges"]],
        "eos_token_id": ids[CONTROLS[2]],
        "padding_token_id": ids[CONTROLS[0]],
        "bos_token_id": ids[CONTROLS[0]],
        "add_bos_token": False,
    }

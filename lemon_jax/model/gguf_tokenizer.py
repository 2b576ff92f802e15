"""The tokenizer that a GGUF file describes: byte-level BPE from its merges, SentencePiece from its scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lemon_jax.errors import LemonError
from lemon_jax.model.hub_tokenizer import HubTokenizer
from lemon_jax.model.sentencepiece_proto import CONTROL, UNUSED, USER_DEFINED, from_pieces
from lemon_jax.model.text_tokenizer import TextTokenizer, TokenIds
from lemon_jax.model.tokenizer import Tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = {"type": "Digits", "individual_digits": True}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


# How each family cuts a text before byte pairs are merged, by the file's name for it.
_PRE_TOKENIZERS = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [_DIGITS, _byte_level(use_regex=True)],
    "starcoder": [_DIGITS, _byte_level(use_regex=True)],
    "refact": [_DIGITS, _byte_level(use_regex=True)],
    "qwen2": _split(_LLAMA3.replace("{1,3}", "")),
    "deepseek-r1-qwen": _split(_LLAMA3.replace("{1,3}", "")),
    "llama-bpe": _split(_LLAMA3),
}
# Families whose whole words are taken as they are, before any merge.
_WHOLE_WORDS = ("llama-bpe",)
# Families of byte pairs whose texts begin with bos where the file does not say.
_BEGIN_WITH_BOS = ("llama-bpe",)
# What ends a turn or a text in the families known, where the file names only one of several.
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<EOT>", "_<EOT>"),
    # With llama.cpp so do those of code models that stand between files, or fill a gap.
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|file_sep|>"),
    *("<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<reponame>", "<REPO>"),
)


def gguf_tokenizer(fields: Mapping[str, Any]) -> TextTokenizer:
    """The tokenizer of these `tokenizer.ggml.*` values, by key without that prefix.

    As llama.cpp reads them: there is no Unicode normalisation. Raises `LemonError` for missing values, and
    for a model or pre-tokenizer that is not known here, which it names.
    """
    kinds = {"gpt2": _from_merges, "llama": _from_scores}
    model = fields.get("model")
    if not isinstance(model, str) or model not in kinds:
        raise LemonError(f"tokenizer model {model!r:.40} is unknown, expected one of {', '.join(kinds)}")
    tokens, types = _array(fields, "tokens", str), _array(fields, "token_type", int)
    if len(types) != len(tokens):
        raise LemonError(f"{len(tokens)} tokens have {len(types)} types; fetch the model file again")
    controls = {t: i for i, t in enumerate(tokens) if types[i] == CONTROL}
    ends = [named_id(fields, name) for name in ("eos", "eot", "eom")]
    ends += [controls[text] for text in _ENDS if text in controls]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    # Where the file does not say, SentencePiece models begin their texts with bos.
    begins = fields.get("add_bos_token", model == "llama" or fields.get("pre") in _BEGIN_WITH_BOS)
    pad_id = named_id(fields, "padding")
    ids = TokenIds(
        vocab_size=len(tokens),
        pad_id=next(iter(eos_ids), 0) if pad_id is None else pad_id,
        bos_id=named_id(fields, "bos") if begins else None,
        eos_ids=eos_ids,
    )
    return kinds[model](fields, tokens, types, ids)


def _from_merges(
    fields: Mapping[str, Any], tokens: list[str], types: list[int], ids: TokenIds
) -> TextTokenizer:
    pre = fields.get("pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise LemonError(
            f"pre-tokenizer {pre!r:.40} is unknown, expected one of {', '.join(_PRE_TOKENIZERS)}; use "
            "another model, or a hub folder of this one"
        )
    vocab = {t: i for i, t in enumerate(tokens) if types[i] != UNUSED}
    if len(vocab) != len(tokens) - types.count(UNUSED):
        raise LemonError("two tokens have the same text; fetch the model file again")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tree = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, "special": types[i] == CONTROL} | flags
            for t, i in vocab.items()
            if types[i] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": _byte_level(use_regex=False),
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [merge.split(" ", 1) for merge in _array(fields, "merges", str)],
            "ignore_merges": pre in _WHOLE_WORDS,
        },
    }
    return HubTokenizer(json.dumps(tree, ensure_ascii=False), ids, name="tokenizer")


def _from_scores(
    fields: Mapping[str, Any], tokens: list[str], types: list[int], ids: TokenIds
) -> TextTokenizer:
    proto = from_pieces(
        tokens,
        _array(fields, "scores", float),
        types,
        unk_id=named_id(fields, "unknown") or 0,
        add_dummy_prefix=bool(fields.get("add_space_prefix", True)),
    )
    return Tokenizer(proto, ids)


def named_id(fields: Mapping[str, Any], name: str) -> int | None:
    """What the file names as its "bos", "eos", ... token. Raises `LemonError` for an id of no token."""
    value, size = fields.get(f"{name}_token_id"), len(fields["tokens"])
    if value is not None and (type(value) is not int or not 0 <= value < size):
        raise LemonError(
            f"tokenizer.ggml.{name}_token_id is {value!r:.40}, expected a whole number below {size}; "
            "fetch the model file again"
        )
    return value


def _array(fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list) or not value or not all(type(item) is kind for item in value):
        raise LemonError(
            f"tokenizer.ggml.{key} is {type(value).__name__}, expected a list of {kind.__name__}; "
            "fetch the model file again"
        )
    return value

"""A SentencePiece BPE model in the format of the `tokenizers` library, which most tools read."""

from __future__ import annotations

from typing import Any

import sentencepiece

from lemon_jax.errors import LemonError
from lemon_jax.model.sentencepiece_proto import user_defined
from lemon_jax.model.text_tokenizer import SPACE_MARK
from lemon_jax.model.tokenizer import Tokenizer

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
_PROBE = "ﬁ  x "  # what normalisations other than a first space would change


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json with the same ids for every text without "▁" (U+2581), bos put first.

    SentencePiece joins the neighbours whose piece has the best score; the library joins by the first rule of
    a list. So every split of a piece into two pieces is a rule, in order of the whole piece's score. Pieces
    of a user's own are found before any joining, and never joined: they are added tokens. Raises `LemonError`
    for a model that chooses its pieces otherwise, that normalises texts, or that has pieces of a user's own
    and begins texts with a space, which the library would put before every text between such pieces.
    """
    model = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.proto)
    own = user_defined(tokenizer.proto)
    texts = [model.id_to_piece(i) for i in range(model.vocab_size())]
    controls = [i for i in range(len(texts)) if model.is_control(i) or model.is_unknown(i)]
    skipped = {*controls, *own, *(i for i in range(len(texts)) if model.is_byte(i) or model.is_unused(i))}
    scores = {text: model.get_score(i) for i, text in enumerate(texts) if i not in skipped}
    spaced = model.normalize("x").startswith(SPACE_MARK)
    if model.normalize(_PROBE) != (SPACE_MARK if spaced else "") + _PROBE.replace(" ", SPACE_MARK):
        raise LemonError("tokenizer: it normalises texts, which this format is not written with")
    if spaced and own:
        raise LemonError(
            f"tokenizer: it begins texts with a space and has {len(own)} pieces of a user's own "
            f"({texts[min(own)]!r:.60}), which this format is not written with"
        )
    if len(set(scores.values())) < len(scores):
        raise LemonError("tokenizer: its scores are no order of merges; only BPE models can be written")
    rules = [
        [text[:i], text[i:]]
        for text in sorted(scores, key=lambda text: -scores[text])
        for i in range(1, len(text))
        if text[:i] in scores and text[i:] in scores
    ]
    bos_id = tokenizer.bos_id
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    prefix: dict[str, Any] = {"type": "Prepend", "prepend": SPACE_MARK}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            # A user's own are found after the spaces are marked, as SentencePiece does.
            {"id": i, "content": texts[i], "special": i not in own, "normalized": i in own} | flags
            for i in sorted([*controls, *own])
        ],
        "normalizer": {"type": "Sequence", "normalizers": [prefix, _SPACES]} if spaced else _SPACES,
        "pre_tokenizer": None,
        "post_processor": None if bos_id is None else begin_step(bos_id, texts[bos_id]),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": texts[model.unk_id()],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {text: i for i, text in enumerate(texts)},
            "merges": rules,
        },
    }


def begin_step(bos_id: int, bos: str) -> dict[str, Any]:
    """The post-processor that puts the symbol `bos` before every text, or pair of texts."""
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }

"""Byte-pair tokenizers in the format of the `tokenizers` library: the tokenizer.json of a hub folder."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from lemon_jax.errors import LemonError
from lemon_jax.model.text_tokenizer import (
    IDS_FILE,
    SPACE_MARK,
    TokenIds,
    checked_ids,
    piece_offsets,
    text_of,
)

TOKENIZER_JSON = "tokenizer.json"
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
# What changes the text before it is cut. The model's prompts go through it, exact texts do not.
_LOSSY = ("NFC", "NFD", "NFKC", "NFKD", "Prepend")
_CUTS = ("Split", "Digits", "ByteLevel", "Metaspace")


class HubTokenizer:
    """A byte-pair tokenizer, byte-level (Qwen, Llama 3, SmolLM2) or with byte fallback (Gemma, Llama 2).

    `source` is the text of a tokenizer.json; `name` stands in error messages. Control symbols that the model
    has no rows for are left out: Gemma 3 without eyes keeps the image's. Raises `LemonError` for a damaged
    file, for another kind of tokenizer, which it names, and for one that cannot represent every text.
    """

    file = TOKENIZER_JSON

    def __init__(self, source: str, ids: TokenIds, *, name: str = TOKENIZER_JSON) -> None:
        self._name = name
        try:
            self._source, tree = _with_rows(source, ids.vocab_size)
            model = tree["model"]
            vocab: dict[str, int] = model["vocab"]
            added: list[dict[str, Any]] = tree.get("added_tokens") or []
            if model.get("type", "BPE") != "BPE" or not isinstance(vocab, dict):
                raise LemonError(f"{name}: a tokenizer of type {model.get('type')!r:.40}, expected BPE")
            self._byte_level = any(s.get("type") == "ByteLevel" for s in _steps(tree.get("pre_tokenizer")))
            if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
                raise LemonError(f"{name}: its pieces carry a prefix or suffix, so texts cannot be exact")
            # A saved one may cut or fill every text as in its last batch, or leave merges out at random.
            tree |= {"truncation": None, "padding": None, "model": model | {"dropout": None}}
            # No normalisation may make a control symbol of a text that spells none.
            tree["added_tokens"] = [t | {"normalized": False} if t.get("special") else t for t in added]
            self._own = self._built(tree)
            self._plain_tree = tree | self._exact_steps(tree)
            self._controls = {t["content"]: int(t["id"]) for t in added if t.get("special")}
            self._pieces = self._piece_bytes(vocab, added, ids.vocab_size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LemonError(
                f"{name}: not a usable tokenizer.json ({type(error).__name__}: {error!s:.99}); fetch it again"
            ) from error
        single = _byte_pieces(byte_level=self._byte_level)
        self._unknown_bytes = frozenset(b for b, piece in enumerate(single) if piece not in vocab)
        plain = self._unknown_bytes.intersection([*b"\t\n", *range(0x20, 0x7F)])
        if plain or (self._unknown_bytes and not self._byte_level):
            raise LemonError(
                f"{name}: no token for {len(self._unknown_bytes)} of the 256 bytes; use another model"
            )
        self._space_mark_ids = [] if self._byte_level else [vocab[single[b]] for b in SPACE_MARK.encode()]
        self._name_ids(ids)

    def _name_ids(self, ids: TokenIds) -> None:
        self.vocab_size: int = ids.vocab_size
        self.pad_id: int = ids.pad_id
        self.bos_id: int | None = ids.bos_id
        self.eos_ids: tuple[int, ...] = ids.eos_ids
        self.eos_id: int = ids.eos_ids[0]
        self._ids = ids
        self.sha256 = hashlib.sha256((self._source + ids.to_json()).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; `decode(encode(text)) == text` for all valid Unicode, also in the middle of a text.

        Text that spells a control symbol gives ordinary ids. Raises UnicodeEncodeError for lone surrogates,
        and LemonError for a character that the tokenizer has no bytes for: SmolLM2 lacks a few rare ones.
        """
        if unknown := self._unknown_bytes.intersection(text.encode()):  # encode() refuses surrogates
            bad = next(c for c in text if unknown.intersection(c.encode()))
            raise LemonError(
                f"{self._name}: the tokenizer cannot spell {bad!r} (U+{ord(bad):04X}); leave it out"
            )
        if self._byte_level:
            return self._plain.encode(text, add_special_tokens=False).ids
        # A space is written as this character, so the character itself is spelled in bytes.
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE_MARK)):
            ids += self._space_mark_ids if i else []
            ids += self._plain.encode(part, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids as the model's own tokenizer gives them: control symbols are read as such; no bos is added."""
        text.encode()
        return self._own.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, sampled ones too: control ids vanish, stray bytes become U+FFFD."""
        return text_of([self._pieces[i] for i in checked_ids(ids, self.vocab_size)])

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """For every id the [start, end) characters of `decode(ids)` that it stands for.

        Ids that form one character together all get that character. Control ids get an empty range, but
        between the bytes of a character that character.
        """
        return piece_offsets([self._pieces[i] for i in checked_ids(ids, self.vocab_size)])

    def control_symbols(self) -> dict[str, int]:
        """The id of every control symbol by its text."""
        return self._controls

    def token_bytes(self) -> list[bytes | None]:
        """What each id adds to a text that is decoded as a whole; None for ids that are no text."""
        return [piece or None for piece in self._pieces]

    def with_first_end(self, end: int) -> HubTokenizer:
        """The same tokenizer with `end` as the first of `eos_ids`."""
        other = copy.copy(self)
        other._name_ids(self._ids.ending(end))
        return other

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, byte for byte as it was read unless a symbol was left out, and the ids."""
        (folder / TOKENIZER_JSON).write_text(self._source, encoding="utf-8", newline="")
        (folder / IDS_FILE).write_text(self._ids.to_json(), encoding="utf-8")

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # Built when first used: a large vocabulary takes a second, and an evaluation encodes prompts alone.
        plain = self._built(self._plain_tree)
        plain.encode_special_tokens = True
        return plain

    def _built(self, tree: dict[str, Any]) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_str(json.dumps(tree))
        except Exception as error:  # the library raises bare Exceptions
            raise LemonError(
                f"{self._name}: the tokenizers library does not read it ({error!s:.120}); fetch it again"
            ) from error

    def _exact_steps(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The steps before the model, without those that change the text; unknown steps are refused."""
        cuts = []
        for step in _steps(tree.get("pre_tokenizer")):
            if step.get("type") not in _CUTS or step.get("behavior") == "Removed":
                raise self._unknown("pre-tokenizer", step)
            step = step | {"add_prefix_space": False} if step["type"] == "ByteLevel" else step
            cuts.append(step | {"prepend_scheme": "never"} if step["type"] == "Metaspace" else step)
        kept = []
        for step in _steps(tree.get("normalizer")):
            if step != _SPACES and step.get("type") not in _LOSSY:
                raise self._unknown("normalizer", step)
            kept += [step] if step == _SPACES else []
        spaces_marked = bool(kept) or any(s["type"] == "Metaspace" for s in cuts)
        if not self._byte_level and not (tree["model"].get("byte_fallback") and spaces_marked):
            raise LemonError(
                f"{self._name}: neither a byte-level tokenizer nor one with spaces as {SPACE_MARK!r} and "
                "byte fallback; it cannot represent every text, so use another model"
            )
        # Flags that eat the spaces beside a symbol, or overlook it inside a word.
        flags = {"lstrip": False, "rstrip": False, "single_word": False}
        return {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts} if cuts else None,
            "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
            "post_processor": None,
            "added_tokens": [token | flags for token in tree.get("added_tokens") or []],
        }

    def _unknown(self, what: str, step: dict[str, Any]) -> LemonError:
        return LemonError(
            f"{self._name}: unknown {what} {json.dumps(step)[:100]}; known are "
            f"{', '.join(_CUTS if what == 'pre-tokenizer' else _LOSSY)}: use another model, or teach "
            "lemon_jax/model/hub_tokenizer.py this one"
        )

    def _piece_bytes(
        self, vocab: dict[str, int], added: list[dict[str, Any]], vocab_size: int
    ) -> list[bytes]:
        """The UTF-8 bytes that each id spells; control symbols and ids without a piece spell none."""
        out = [b""] * vocab_size
        largest = max([*vocab.values(), *(token["id"] for token in added)])
        if min(vocab.values()) < 0 or largest >= vocab_size:
            raise LemonError(
                f"{self._name}: has token ids up to {largest}, the model {vocab_size} tokens; take model and "
                "tokenizer from one folder"
            )
        spell = _byte_level_bytes if self._byte_level else _fallback_bytes
        for piece, i in vocab.items():
            out[i] = spell(piece)
        for token in added:
            i, text = token["id"], token["content"]
            if self._own.token_to_id(text) != i:
                raise LemonError(
                    f"{self._name}: added token {text!r:.60} has another id than {i}; fetch it again"
                )
            text = text if self._byte_level else text.replace(SPACE_MARK, " ")
            out[i] = b"" if token.get("special") else text.encode()
        return out


def _with_rows(source: str, rows: int) -> tuple[str, dict[str, Any]]:
    """The text of a tokenizer.json and its tree, without added control symbols of ids from `rows` on."""
    tree = json.loads(source)
    added = tree.get("added_tokens") or []
    kept = [token for token in added if not token.get("special") or token["id"] < rows]
    if len(kept) == len(added):
        return source, tree
    tree["added_tokens"] = kept
    return json.dumps(tree, ensure_ascii=False), tree


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer, nested sequences laid out."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for inner in step.get("normalizers") or step.get("pretokenizers") or []:
        yield from _steps(inner)


def _byte_pieces(*, byte_level: bool) -> list[str]:
    """The piece that stands for each byte.

    GPT-2's byte-level tokenizers (Radford et al. 2019) write printable bytes as themselves, and the others,
    in order, as the characters from U+0100 on.
    """
    if not byte_level:
        return [f"<0x{byte:02X}>" for byte in range(256)]
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTES = {piece: byte for byte, piece in enumerate(_byte_pieces(byte_level=True))}


# Characters that stand for no byte become one that Latin-1 lacks.
_TO_LATIN_1 = str.maketrans(
    {chr(c): "\u0400" for c in range(256)} | {piece: chr(byte) for piece, byte in _BYTES.items()}
)


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return piece.translate(_TO_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()  # as the library decodes: a piece with any other character is plain text


def _fallback_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(SPACE_MARK, " ").encode()

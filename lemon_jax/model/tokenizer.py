"""The SentencePiece tokenizer: exact round trips, and the characters that every sampled id stands for."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import sentencepiece

from lemon_jax.errors import LemonError
from lemon_jax.model.text_tokenizer import IDS_FILE, SPACE_MARK, TokenIds, checked_ids, symbol_pattern

TOKENIZER_FILE = "tokenizer.model"

MAX_TEXT_BYTES = 1 << 24  # the trainer silently drops longer texts; its default is 4192


class Tokenizer:
    """Text to ids and back.

    `source` is a model file or the bytes of one. `ids` are those of a pretrained model; without them pad,
    bos and eos are the model file's own. Raises `LemonError` if it cannot be read, is no SentencePiece model,
    or cannot represent every text.
    """

    file = TOKENIZER_FILE

    def __init__(self, source: str | os.PathLike[str] | bytes, ids: TokenIds | None = None) -> None:
        name = "tokenizer bytes" if isinstance(source, bytes) else os.fspath(source)
        try:
            self.proto = source if isinstance(source, bytes) else Path(source).read_bytes()
            # A pretrained model may begin every text with a space. A part of a text must not.
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.proto)
            pieces: int = self._processor.vocab_size()
            self._own = self._processor
            if ids is not None:
                from lemon_jax.model.sentencepiece_proto import exact  # needs protobuf, for such models alone

                self._processor = sentencepiece.SentencePieceProcessor(model_proto=exact(self.proto))
        except OSError as error:
            raise LemonError(
                f"{name}: cannot read the tokenizer ({error.strerror}); check the path"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise LemonError(
                f"{name}: not a SentencePiece model ({len(self.proto)} bytes); "
                "restore the file or train it again"
            ) from error
        self.unk_id: int = self._processor.unk_id()
        self._ids = ids
        self._pieces = pieces
        byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        own = [self._processor.pad_id(), self._processor.bos_id(), self._processor.eos_id()]
        if (ids is None and min(own) < 0) or not all(map(self._processor.is_byte, byte_ids)):
            raise LemonError(
                f"{name}: the tokenizer lacks byte fallback or one of the pad, bos and eos ids; "
                "train one with train_tokenizer"
            )
        if ids is None:
            ids = TokenIds(vocab_size=pieces, pad_id=own[0], bos_id=own[1], eos_ids=(own[2],))
        if ids.vocab_size < pieces:
            raise LemonError(
                f"{name}: the tokenizer has {pieces} pieces, the model {ids.vocab_size}; take both from one "
                "folder"
            )
        self._space_mark_ids = byte_ids
        self._name(ids)

    def _name(self, ids: TokenIds) -> None:
        self.vocab_size: int = ids.vocab_size
        self.pad_id: int = ids.pad_id
        self.bos_id: int | None = ids.bos_id
        self.eos_ids: tuple[int, ...] = ids.eos_ids
        self.eos_id: int = ids.eos_ids[0]
        self.sha256 = hashlib.sha256(
            self.proto + (self._ids.to_json() if self._ids else "").encode()
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without bos or eos. `decode(encode(text)) == text` for all valid Unicode.

        Text that spells a control symbol ("</s>") gives ordinary ids. Raises UnicodeEncodeError for
        lone surrogates. The other way round is no identity: never re-encode what was sampled.
        """
        return self._encode(self._processor, text)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of `text` as the model was taught to read it: control symbols are read as such, and what
        stands between them begins with a space where the model's texts do."""
        symbols = self.control_symbols()
        ids: list[int] = []
        position = 0
        for match in self._control_pattern.finditer(text):
            ids += self._encode(self._own, text[position : match.start()])
            ids.append(symbols[match[0]])
            position = match.end()
        return ids + self._encode(self._own, text[position:])

    def _encode(self, processor: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
        text.encode()  # the check for surrogates
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE_MARK)):
            ids += self._space_mark_ids if i else []
            ids += processor.encode(part)
        return ids

    def control_symbols(self) -> dict[str, int]:
        """The id of every control symbol by its text."""
        return self._controls

    @cached_property
    def _controls(self) -> dict[str, int]:
        of = self._processor
        return {of.id_to_piece(i): i for i in range(self._pieces) if of.is_control(i)}

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return symbol_pattern(self._controls)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, sampled ones too: control ids vanish, stray bytes become U+FFFD."""
        return self._processor.decode(self._checked(ids))

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """For every id the [start, end) characters of `decode(ids)` that it stands for.

        Byte pieces that form one character together all get that character. Control ids get an
        empty range.
        """
        ids = self._checked(ids)
        spans = [
            (start, end)
            for start, end in self._processor.decode(ids, return_type="offset_mapping")["offsets"]
        ]
        # The library gives the character to its last byte only: "€" -> (0, 0), (0, 0), (0, 1).
        for i in range(len(ids) - 2, -1, -1):
            start, end = spans[i]
            if start == end and self._processor.is_byte(ids[i]) and spans[i + 1][0] == start:
                spans[i] = spans[i + 1]
        return spans

    def token_bytes(self) -> list[bytes | None]:
        """What each id adds to a text that is decoded as a whole; None for ids that are no text."""
        spelled: list[bytes | None] = []
        of = self._processor
        for i, piece in enumerate(map(of.id_to_piece, range(self._pieces))):
            if of.is_byte(i):
                spelled.append(bytes([int(piece[3:5], 16)]))  # <0x41>
            elif of.is_control(i) or of.is_unknown(i) or of.is_unused(i):
                spelled.append(None)
            else:
                spelled.append(piece.replace(SPACE_MARK, " ").encode())
        return spelled + [None] * (self.vocab_size - self._pieces)

    def with_first_end(self, end: int) -> Tokenizer:
        """The same tokenizer with `end` as the first of `eos_ids`; the file does not say so, `save` does."""
        other = copy.copy(self)
        own = TokenIds(
            vocab_size=self.vocab_size, pad_id=self.pad_id, bos_id=self.bos_id, eos_ids=self.eos_ids
        )
        other._ids = own.ending(end)
        other._name(other._ids)
        return other

    def save(self, folder: Path) -> None:
        """Write the model file, and the ids where they are not its own."""
        (folder / TOKENIZER_FILE).write_bytes(self.proto)
        if self._ids is not None:
            (folder / IDS_FILE).write_text(self._ids.to_json(), encoding="utf-8")

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Ids that the library knows. One that no piece has spells nothing, as control ids do."""
        checked = checked_ids(ids, self.vocab_size)
        if max(checked, default=0) < self._pieces:
            return checked
        silent = next(iter(self._controls.values()))
        return [i if i < self._pieces else silent for i in checked]


def sentencepiece_ids(path: Path) -> dict[str, int]:
    """The id of every piece of a model file. Raises `LemonError` for a file that is none."""
    try:
        of = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    except (OSError, RuntimeError, ValueError) as error:
        raise LemonError(f"{path}: not a SentencePiece model; fetch it again") from error
    return {of.id_to_piece(i): i for i in range(of.vocab_size())}


def covering_tokens(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """The smallest token range [first, last_exclusive) that covers the characters [start, end).

    An empty span (start == end) gives an empty range: before the first token that reaches beyond it.
    Raises ValueError if the tokens do not cover the span.

        # tokens   "de" "pends" "_on"   offsets (0, 2), (2, 7), (7, 10)
        # span     "end" = [3, 6)       -> (1, 2)
    """
    text_end = max((token_end for _, token_end in offsets), default=0)
    if not 0 <= start <= end <= text_end:
        raise ValueError(f"the tokens cover characters [0, {text_end}), the span is [{start}, {end})")
    first = next((i for i, (_, token_end) in enumerate(offsets) if token_end > start), len(offsets))
    if start == end:
        return first, first
    last = max(
        i for i, (token_start, token_end) in enumerate(offsets) if token_start < end and token_end > start
    )
    return first, last + 1


def train_tokenizer(
    texts: Iterable[str],
    path: str | os.PathLike[str],
    vocab_size: int,
    *,
    model_type: Literal["bpe", "unigram"] = "bpe",
) -> Tokenizer:
    """Train on `texts`, write the model to `path`, and return it. The same texts give the same bytes.

    Ids: pad 0, bos 1, eos 2, unk 3, then 256 bytes, then the learned pieces; `vocab_size` is an upper
    bound, reached when the texts offer that many pieces: size the decoder by the result's `vocab_size`.
    Byte-pair encoding writes specs in about a tenth fewer tokens than the unigram model does. Raises
    `LemonError` if SentencePiece cannot train with these texts and size.
    """
    buffer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # An iterator, because a training file is cut at newlines, which specs are full of.
            sentence_iterator=iter(texts),
            model_writer=buffer,
            model_type=model_type,
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            # Exact text: no leading space, no collapsed spaces, no Unicode folding, no unknown character.
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            byte_fallback=True,
            allow_whitespace_only_pieces=True,  # indentation
            split_digits=True,
            max_sentence_length=MAX_TEXT_BYTES,
            num_threads=1,  # the pieces' scores are sums whose order would depend on the threads
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise LemonError(
            f"{os.fspath(path)}: cannot train a {model_type} tokenizer of {vocab_size} pieces "
            f"({reason}); give more text or another size"
        ) from error
    tokenizer = Tokenizer(buffer.getvalue())
    Path(path).write_bytes(tokenizer.proto)
    return tokenizer

"""The SentencePiece tokenizer: exact round trips, and the characters that every sampled id stands for."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import sentencepiece

from lemon_jax.errors import LemonError

# SentencePiece writes a space as this character, so it reads the character itself back as a space.
SPACE_MARK = "\u2581"
MAX_TEXT_BYTES = 1 << 24  # the trainer silently drops longer texts; its default is 4192


class Tokenizer:
    """Text to ids and back.

    `source` is a model file or the bytes of one. Raises `LemonError` if it cannot be read, is no
    SentencePiece model, or cannot represent every text.
    """

    def __init__(self, source: str | os.PathLike[str] | bytes) -> None:
        name = "tokenizer bytes" if isinstance(source, bytes) else os.fspath(source)
        try:
            self.proto = source if isinstance(source, bytes) else Path(source).read_bytes()
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=self.proto)
            self.vocab_size: int = self._processor.vocab_size()
        except OSError as error:
            raise LemonError(
                f"{name}: cannot read the tokenizer ({error.strerror}); check the path"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise LemonError(
                f"{name}: not a SentencePiece model ({len(self.proto)} bytes); "
                "restore the file or train it again"
            ) from error
        self.pad_id: int = self._processor.pad_id()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self.unk_id: int = self._processor.unk_id()
        self.sha256 = hashlib.sha256(self.proto).hexdigest()
        byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        if min(self.pad_id, self.bos_id, self.eos_id) < 0 or not all(map(self._processor.is_byte, byte_ids)):
            raise LemonError(
                f"{name}: the tokenizer lacks byte fallback or one of the pad, bos and eos ids; "
                "train one with train_tokenizer"
            )
        self._space_mark_ids = byte_ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without bos or eos. `decode(encode(text)) == text` for all valid Unicode.

        Text that spells a control symbol ("</s>") gives ordinary ids. Raises UnicodeEncodeError for
        lone surrogates. The other way round is no identity: never re-encode what was sampled.
        """
        text.encode()  # the check for surrogates
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE_MARK)):
            ids += self._space_mark_ids if i else []
            ids += self._processor.encode(part)
        return ids

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
        for i, piece in enumerate(map(self._processor.id_to_piece, range(self.vocab_size))):
            if self._processor.is_byte(i):
                spelled.append(bytes([int(piece[3:5], 16)]))  # <0x41>
            elif any(
                kind(i)
                for kind in (
                    self._processor.is_control,
                    self._processor.is_unknown,
                    self._processor.is_unused,
                )
            ):
                spelled.append(None)
            else:
                spelled.append(piece.replace(SPACE_MARK, " ").encode())
        return spelled

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Python ints (the library takes no NumPy ones). Raises ValueError for an id that is none."""
        checked = [int(i) for i in ids]
        for i in checked:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"token id {i} lies outside the vocabulary of {self.vocab_size}")
        return checked


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

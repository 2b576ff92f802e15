"""What the project needs of any tokenizer, and the text and offsets of pieces that are bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from lemon_jax.errors import LemonError

IDS_FILE = "tokenizer_ids.json"
# SentencePiece writes a space as this character, so it reads the character itself back as a space.
SPACE_MARK = "\u2581"


@runtime_checkable
class TextTokenizer(Protocol):
    """Text to ids and back; `Tokenizer` (SentencePiece) and `HubTokenizer` (tokenizer.json) are two.

    Attributes:
        vocab_size: rows of the model's embedding; ids that no piece has spell nothing.
        bos_id: the id that every text begins with; None where the model has none.
        eos_ids: each of them ends a completion.
        eos_id: the first of them, which the policy is taught to write.
        sha256: names all that decides ids and texts.
        file: the name of the file that `save` writes it to.
    """

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    eos_id: int
    sha256: str
    file: str

    def encode(self, text: str) -> list[int]:
        """Ids with `decode(encode(text)) == text` for all valid Unicode, also in the middle of a text.

        Control symbols are spelled as ordinary text. Raises UnicodeEncodeError for lone surrogates.
        """

    def encode_prompt(self, text: str) -> list[int]:
        """Ids as the model's own tokenizer gives them, control symbols read as such; no bos is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids: control ids vanish, stray bytes become U+FFFD."""

    def offsets(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """For every id the [start, end) characters of `decode(ids)` that it stands for."""

    def token_bytes(self) -> list[bytes | None]:
        """What each id adds to a text that is decoded as a whole; None for ids that are no text."""

    def control_symbols(self) -> dict[str, int]:
        """The id of every control symbol by its text."""

    def with_first_end(self, end: int) -> TextTokenizer:
        """The same tokenizer with `end` as the first of `eos_ids`."""

    def save(self, folder: Path) -> None:
        """Write the files that `load_tokenizer` reads."""


@dataclass(frozen=True, kw_only=True)
class TokenIds:
    """The ids that a tokenizer's own file leaves open. Raises `LemonError` for ids outside the vocabulary."""

    vocab_size: int
    pad_id: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise LemonError("tokenizer: no id ends a text; name eos_token_id in generation_config.json")
        named = [self.pad_id, *self.eos_ids, *([] if self.bos_id is None else [self.bos_id])]
        bad = [i for i in named if not 0 <= i < self.vocab_size]
        if bad:
            raise LemonError(
                f"tokenizer: pad, bos and eos ids {named} name {bad}, the vocabulary has {self.vocab_size}; "
                "take model and tokenizer from one folder"
            )

    def ending(self, end: int) -> TokenIds:
        """With `end` as the first of `eos_ids`."""
        return replace(self, eos_ids=(end, *(i for i in self.eos_ids if i != end)))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> TokenIds:
        """The ids in a file by `to_json`. Raises `LemonError` for a file that holds others or none."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if sorted(facts) != ["bos_id", "eos_ids", "pad_id", "vocab_size"]:
                raise ValueError(f"keys {sorted(facts)}")
            facts["eos_ids"] = tuple(facts["eos_ids"])
            numbers = [facts["vocab_size"], facts["pad_id"], *facts["eos_ids"]]
            numbers += [] if facts["bos_id"] is None else [facts["bos_id"]]
            if any(type(number) is not int for number in numbers):
                raise ValueError(f"found {numbers!s:.60}")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise LemonError(
                f"{path}: expected vocab_size, pad_id, bos_id and eos_ids ({error}); restore the folder"
            ) from error
        return cls(**facts)


def symbol_pattern(symbols: Iterable[str]) -> re.Pattern[str]:
    """Finds each of the symbols, the longest where several begin."""
    longest_first = sorted((symbol for symbol in symbols if symbol), key=len, reverse=True)
    if not longest_first:
        return re.compile("(?!)")
    # Few characters begin one, and thousands of alternatives are slow to try at every character.
    first = "".join(sorted({re.escape(symbol[0]) for symbol in longest_first}))
    return re.compile(f"(?=[{first}])(?:{'|'.join(map(re.escape, longest_first))})")


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Python ints (libraries take no NumPy ones). Raises ValueError for an id that is none."""
    checked = [int(i) for i in ids]
    for i in checked:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token id {i} lies outside the vocabulary of {vocab_size}")
    return checked


def text_of(pieces: Sequence[bytes]) -> str:
    """What pieces of UTF-8 spell together; bytes that form no character become U+FFFD."""
    return b"".join(pieces).decode("utf-8", "replace")


def piece_offsets(pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """For every piece the [start, end) characters of `text_of(pieces)` that hold one of its bytes.

    Pieces that form one character together all get it. An empty piece gets an empty range, but inside
    a character that character, so that ranges stay in order.

        # In:  b"a\\xe2", b"\\x82", b"", b"\\xacb"   ("a€b")
        # Out: (0, 2), (1, 2), (1, 2), (1, 3)
    """
    starts, inside = _characters(b"".join(pieces))
    spans = []
    position = 0
    for piece in pieces:
        end = position + len(piece)
        if piece:
            spans.append((starts[position], starts[end - 1] + 1))
        elif inside[position]:
            spans.append((starts[position], starts[position] + 1))
        else:
            spans.append((starts[position], starts[position]))
        position = end
    return spans


def _characters(data: bytes) -> tuple[list[int], list[bool]]:
    """For every byte, and for the end, the index of its character and whether it continues one."""
    index: list[int] = []
    inside: list[bool] = []

    def add(size: int) -> None:
        index.extend([count] * size)
        inside.extend([False] + [True] * (size - 1))

    position = count = 0
    while position < len(data):
        try:
            sound, bad = data[position:].decode("utf-8"), 0
        except UnicodeDecodeError as error:
            # The very bytes that decoding with "replace" makes one U+FFFD of.
            sound, bad = data[position : position + error.start].decode("utf-8"), error.end - error.start
        for character in sound:
            add(len(character.encode("utf-8")))
            count += 1
        if bad:
            add(bad)
            count += 1
        position += len(sound.encode("utf-8")) + bad
    return [*index, count], [*inside, False]

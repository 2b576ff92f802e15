"""Tokenizer and chat template of a pretrained model, from a folder in the hub's layout or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lemon_jax.errors import LemonError
from lemon_jax.model.chat_template import ChatTemplate
from lemon_jax.model.gguf_file import GgufFile
from lemon_jax.model.gguf_tokenizer import gguf_tokenizer, named_id
from lemon_jax.model.hub_tokenizer import TOKENIZER_JSON, HubTokenizer
from lemon_jax.model.hub_weights import read_json
from lemon_jax.model.text_tokenizer import IDS_FILE, TextTokenizer, TokenIds
from lemon_jax.model.tokenizer import TOKENIZER_FILE, Tokenizer, sentencepiece_ids

TEXT_FILES = (TOKENIZER_FILE, TOKENIZER_JSON, IDS_FILE)  # what tokenizers save
TEMPLATE_FILE = "chat_template.jinja"
SYMBOLS = ("bos_token", "eos_token", "pad_token", "unk_token")  # what templates call by name
# Some templates tell the model the date. A run must not depend on the day that it is run or resumed on.
TODAY = datetime(2024, 7, 26)
_ANSWER = "a6f2answer"  # a reply that no template holds by itself


@dataclass(frozen=True, kw_only=True)
class PretrainedText:
    """`template` is None for a model that was not taught to chat."""

    tokenizer: TextTokenizer
    template: ChatTemplate | None


def load_pretrained_text(path: Path, vocab_size: int) -> PretrainedText:
    """The text side of the model that `load_pretrained(path)` gives; `vocab_size` is that decoder's.

    The first end-of-text id is the one that the template writes behind a reply. Raises `LemonError` for files
    that are missing, damaged or of an unknown kind.
    """
    return _from_folder(path, vocab_size) if path.is_dir() else _from_gguf(path)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """What a tokenizer's `save` wrote. Raises `LemonError` naming what is missing or damaged."""
    ids = TokenIds.read(folder / IDS_FILE) if (folder / IDS_FILE).exists() else None
    if ids is None or not (folder / TOKENIZER_JSON).exists():
        return Tokenizer(folder / TOKENIZER_FILE, ids)
    return HubTokenizer(_text(folder / TOKENIZER_JSON), ids, name=str(folder / TOKENIZER_JSON))


def _from_gguf(path: Path) -> PretrainedText:
    metadata = GgufFile(path).metadata
    prefix = "tokenizer.ggml."
    fields = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        tokenizer = gguf_tokenizer(fields)
        names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        ids = {symbol: named_id(fields, name) for symbol, name in names.items()}
        symbols = {symbol: fields["tokens"][i] for symbol, i in ids.items() if i is not None}
        source = metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise LemonError(f"tokenizer.chat_template is {type(source).__name__}, expected a text")
        template = ChatTemplate(source, symbols, today=TODAY) if source else None
        return PretrainedText(tokenizer=_ending(tokenizer, template), template=template)
    except LemonError as error:
        raise LemonError(f"{path}: {error}") from error


def _from_folder(folder: Path, vocab_size: int) -> PretrainedText:
    facts = _json(folder / "tokenizer_config.json")
    symbols = {name: text for name in SYMBOLS if (text := _symbol(facts.get(name))) is not None}
    try:
        source = _template_source(folder, facts)
        template = ChatTemplate(source, symbols, today=TODAY) if source is not None else None
    except LemonError as error:
        raise LemonError(f"{folder}: {error}") from error
    if (folder / TOKENIZER_JSON).exists():
        text, name = _text(folder / TOKENIZER_JSON), str(folder / TOKENIZER_JSON)
        vocabulary, begins = _vocabulary(read_json(folder / TOKENIZER_JSON), name)
        begins = begins or facts.get("add_bos_token") is True
        ids = _token_ids(folder, symbols, vocab_size, vocabulary, begins)
        tokenizer: TextTokenizer = HubTokenizer(text, ids, name=name)
    elif (folder / TOKENIZER_FILE).exists():
        pieces = sentencepiece_ids(folder / TOKENIZER_FILE)
        ids = _token_ids(folder, symbols, vocab_size, pieces, facts.get("add_bos_token", True) is True)
        tokenizer = Tokenizer(folder / TOKENIZER_FILE, ids)
    else:
        raise LemonError(
            f"{folder}: has neither {TOKENIZER_JSON} nor {TOKENIZER_FILE}; fetch the model again"
        )
    return PretrainedText(tokenizer=_ending(tokenizer, template), template=template)


def _ending(tokenizer: TextTokenizer, template: ChatTemplate | None) -> TextTokenizer:
    """The tokenizer with the control symbol first that the template writes behind a reply."""
    if template is None:
        return tokenizer
    chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
    try:
        after = template.render(chat, add_generation_prompt=False).partition(_ANSWER)[2].lstrip()
    except LemonError:
        return tokenizer
    matching = [symbol for symbol in tokenizer.control_symbols() if after.startswith(symbol)]
    if not matching:
        return tokenizer
    end = tokenizer.control_symbols()[max(matching, key=len)]
    return tokenizer.with_first_end(end)


def _token_ids(
    folder: Path,
    symbols: Mapping[str, str],
    vocab_size: int,
    vocabulary: Mapping[str, int],
    begins: bool,
) -> TokenIds:
    """What the folder's files say of special ids, of those that say most first."""
    ends = [vocabulary.get(symbols.get("eos_token", ""))]
    pads = [vocabulary.get(symbols.get("pad_token", ""))]
    for name in ("generation_config.json", "config.json"):
        values = _json(folder / name)
        eos = values.get("eos_token_id")
        ends += eos if isinstance(eos, list) else [eos]
        pads.append(values.get("pad_token_id"))
    # A list of a larger model's ids may name some that this one lacks.
    known = [i for i in ends if type(i) is int and 0 <= i < vocab_size]
    pad_id = next((i for i in [*pads, *known] if type(i) is int and 0 <= i < vocab_size), 0)
    try:
        return TokenIds(
            vocab_size=vocab_size,
            pad_id=pad_id,
            bos_id=vocabulary.get(symbols.get("bos_token", "")) if begins else None,
            eos_ids=tuple(dict.fromkeys(known)),
        )
    except LemonError as error:
        raise LemonError(f"{folder}: {error}") from error


def _vocabulary(tree: Mapping[str, Any], name: str) -> tuple[dict[str, int], bool]:
    """The id of every token of a tokenizer.json, and whether it puts bos before every text."""
    try:
        added = {token["content"]: token["id"] for token in tree.get("added_tokens") or []}
        step = tree.get("post_processor") or {}
        templates = [s for s in step.get("processors") or [step] if s.get("type") == "TemplateProcessing"]
        begins = any("SpecialToken" in template["single"][0] for template in templates)
        return dict(tree["model"]["vocab"]) | added, begins
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise LemonError(f"{name}: not a usable tokenizer.json ({error!s:.80}); fetch it again") from error


def _template_source(folder: Path, facts: Mapping[str, Any]) -> str | None:
    if (folder / TEMPLATE_FILE).exists():
        return _text(folder / TEMPLATE_FILE)
    source = facts.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise LemonError(f"tokenizer_config.json: chat_template is {type(source).__name__}, expected a text")
    return source


def _json(path: Path) -> dict[str, Any]:
    """The object of a file that need not be there."""
    return read_json(path) if path.exists() else {}


def _symbol(value: Any) -> str | None:
    """A special token as the files write it: its text, or an object that holds it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LemonError(f"{path}: cannot read the text file ({reason}); fetch it again") from error

"""The spec language over a tokenizer's vocabulary: compiled once, then read from the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from platformdirs import user_cache_path

from lemon_jax.model import Automaton, TextTokenizer, compile_automaton
from lemon_jax.model.automaton import AUTOMATON_VERSION
from lemon_jax.spec.grammar import byte_grammar, language_key


def spec_automaton(tokenizer: TextTokenizer, *, cache: Path | None = None) -> Automaton:
    """The automaton of canonical specs over this tokenizer's tokens, in NumPy arrays.

    Compiling takes seconds, so the result is kept in `cache` (`$LEMON_CACHE/automata`, or in the user's cache
    folder) under a digest of tokenizer and language. A cache that cannot be read or written is done without.
    """
    folder = cache or _automata_cache()
    key = json.dumps([AUTOMATON_VERSION, language_key(), tokenizer.sha256])
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    if (kept := _read(path)) is not None:
        return kept
    grammar = byte_grammar()
    automaton = compile_automaton(
        grammar.next_Sx257,
        grammar.bound_S,
        grammar.need_S,
        grammar.start,
        token_bytes=tokenizer.token_bytes(),
        eos_id=tokenizer.eos_id,
        encode=tokenizer.encode,
    )
    _write(path, automaton)
    return automaton


def _automata_cache() -> Path:
    root = os.environ.get("LEMON_CACHE")
    return (Path(root).expanduser() if root else user_cache_path("lemon_jax")) / "automata"


def _read(path: Path) -> Automaton | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Automaton(**{name: arrays[name] for name in Automaton._fields})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(path: Path, automaton: Automaton) -> None:
    """Whole or not at all: another process may read meanwhile."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            np.savez_compressed(file, **automaton._asdict())
        os.replace(file.name, path)
    except OSError:
        return

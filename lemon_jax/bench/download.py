"""Fetch one file whose SHA-256 is known: streamed, resumed after a cut, put in place only when right."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import httpx
from filelock import FileLock

from lemon_jax.errors import LemonError

Progress = Callable[[str, int, int | None], None]  # (file name, bytes so far, bytes in all or None)

_ATTEMPTS = 3


class Unreachable(Exception):
    """The file could not be got (no network, timeout, HTTP error); nothing is wrong with what was got."""


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(
    url: str, target: Path, sha256: str, *, on_progress: Progress | None = None, timeout_s: float = 20.0
) -> None:
    """Bring `url` to `target`. A cut connection is resumed, in this call or a later one, from `target`.part.

    Raises:
        Unreachable: network or HTTP error after three attempts.
        LemonError: the whole file arrived and has another digest; it is deleted, never used.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with FileLock(target.with_name(target.name + ".lock")):  # two runs that start together
        if target.exists() and sha256_of(target) == sha256:
            return
        resumed = part.exists()
        _stream_with_retries(url, part, on_progress, timeout_s)
        if resumed and sha256_of(part) != sha256:
            part.unlink()  # the old beginning may belong to another version of the file
            _stream_with_retries(url, part, on_progress, timeout_s)
        found = sha256_of(part)
        if found != sha256:
            part.unlink()
            raise LemonError(
                f"{url}: SHA-256 is {found}, expected {sha256}; the download was discarded. "
                "Try again, or pass a folder with the original files (--data DIR)"
            )
        part.replace(target)


def _stream_with_retries(url: str, part: Path, on_progress: Progress | None, timeout_s: float) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _stream(url, part, on_progress, timeout_s)
        except httpx.HTTPStatusError as error:
            raise Unreachable(f"{url}: HTTP {error.response.status_code}") from error
        except httpx.ConnectError as error:
            raise Unreachable(f"{url}: {error}") from error
        except httpx.HTTPError as error:
            if attempt == _ATTEMPTS:
                raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error
    return None


def _stream(url: str, part: Path, on_progress: Progress | None, timeout_s: float) -> None:
    have = part.stat().st_size if part.exists() else 0
    # Without "identity" a server may compress, and a byte range would then count compressed bytes.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with httpx.stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
        if response.status_code == 416:  # nothing is left to send: the digest decides whether it is whole
            return
        response.raise_for_status()
        resumes = response.status_code == 206 and response.headers.get("content-range", "").startswith(
            f"bytes {have}-"
        )
        length = response.headers.get("content-length")
        done = have if resumes else 0
        total = done + int(length) if length else None
        with part.open("ab" if resumes else "wb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                done += len(chunk)
                if on_progress:
                    on_progress(part.name.removesuffix(".part"), done, total)

"""Fetch files whose SHA-256 is known: streamed, resumed after a cut, put in place only when right."""

import hashlib
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from filelock import FileLock

from lemon_jax.errors import LemonError
from lemon_jax.files import PART, replace_file

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
    part = target.with_name(target.name + PART)
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


@dataclass(frozen=True, kw_only=True)
class Member:
    """A file of a tar archive: its name in there, where it goes, its digest."""

    name: str
    target: Path
    sha256: str


def fetch_members(
    url: str,
    folder: Path,
    members: Sequence[Member],
    *,
    on_progress: Progress | None = None,
    timeout_s: float = 20.0,
) -> None:
    """Bring files out of the tar archive at `url` to their places; the archive itself is not kept.

    It is downloaded to `folder`, resumed after a cut. Its own digest need not be known: each file is checked
    before it is put in place.

    Raises:
        Unreachable: network or HTTP error after three attempts.
        LemonError: what arrived is no such archive, lacks a file, or holds one with another digest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{url.rpartition('/')[2]}{PART}"
    with FileLock(part.with_suffix(".lock")):
        members = [m for m in members if not m.target.exists() or sha256_of(m.target) != m.sha256]
        if not members:  # another run has brought them meanwhile
            return
        resumed = part.exists()
        _stream_with_retries(url, part, on_progress, timeout_s)
        try:
            _extract(url, part, members)
        except LemonError:
            part.unlink()
            if not resumed:
                raise
            _stream_with_retries(url, part, on_progress, timeout_s)  # its beginning was of another version
            _extract(url, part, members)
        part.unlink()


def _extract(url: str, archive: Path, members: Sequence[Member]) -> None:
    advice = "the download was discarded. Try again, or pass a folder with the original files (--data DIR)"
    try:
        with tarfile.open(archive) as tar:
            for member in members:
                file = tar.extractfile(member.name)
                if file is None:
                    raise KeyError(member.name)
                content = file.read()
                found = hashlib.sha256(content).hexdigest()
                if found != member.sha256:
                    raise LemonError(
                        f"{url}: SHA-256 of {member.name} is {found}, expected {member.sha256}; {advice}"
                    )
                member.target.parent.mkdir(parents=True, exist_ok=True)
                replace_file(member.target, content)
    except (tarfile.TarError, EOFError) as error:
        raise LemonError(f"{url}: not a tar archive ({error}); {advice}") from error
    except KeyError as error:
        raise LemonError(f"{url}: holds no file {error}; {advice}") from error


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
                    on_progress(part.name.removesuffix(PART), done, total)

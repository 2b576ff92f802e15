"""Write a file as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path
from typing import Literal

PART = ".part"  # the ending of a file while it is written
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # a file system without hard links


def replace_file(
    path: Path,
    content: bytes | str,
    *,
    durable: bool = False,
    several_writers: bool = False,
    mode: int | None = None,
) -> None:
    """Write `content`, a text in UTF-8, to `path`, which at any time holds the old file or the whole new one.

    Beside it stands "<name>.part" meanwhile, which only a kill leaves there and the next writing replaces.

    Args:
        durable: The content is on the disk before it takes the name, so that after a loss of power too the
            file is whole.
        several_writers: Another process may write the same file now: the name beside it is
            "<name>.<random>.part", and what a kill leaves stays.
        mode: Permissions such as 0o644, whatever the umask; None: as the umask has them.

    Raises:
        OSError: it cannot be written; the old file is as it was.
    """
    own = f".{secrets.token_hex(4)}" if several_writers else ""
    part = path.with_name(f"{path.name}{own}{PART}")
    try:
        _write(part, content, durable=durable)
        if mode is not None:
            os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def create_file(path: Path, content: str) -> None:
    """Write a new file, durably: of several processes that do so at the same time one alone succeeds.

    Beside it stands "<name>.<random>.part" meanwhile, which only a kill leaves there.

    Raises:
        FileExistsError: there is one, which is as it was.
        OSError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        _write(part, content, durable=True)
        os.link(part, path)  # unlike a rename it replaces nothing
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _write(path, content, durable=True, mode="xb")  # a kill may leave half of it
    finally:
        part.unlink(missing_ok=True)


def _write(path: Path, content: bytes | str, *, durable: bool, mode: Literal["wb", "xb"] = "wb") -> None:
    with path.open(mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())

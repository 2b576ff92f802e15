"""The one exception whose message is meant for the person at the terminal."""

import errno

EXIT_FAULT = 2  # of a program that ends with a LemonError
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: the disk, or a share of it, is full


class LemonError(Exception):
    """A fault the user can mend: the message names the file or key, what was found, what to do.

    The command line prints it as one line and exits with code 2; anything else is a bug and
    keeps its traceback.
    """


def fault_line(error: BaseException) -> str | None:
    """What to tell the person at the terminal of a fault they can mend, or of a full disk; None: a bug."""
    if isinstance(error, LemonError):
        return str(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; make room and go on with --resume"
    return None

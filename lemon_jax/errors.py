"""The one exception whose message is meant for the person at the terminal."""

import errno

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: the disk, or a share of it, is full


class LemonError(Exception):
    """A fault the user can mend: the message names the file or key, what was found, what to do.

    The command line prints it as one line and exits with code 2; anything else is a bug and
    keeps its traceback.
    """

"""The one exception whose message is meant for the person at the terminal."""


class LemonError(Exception):
    """A fault the user can mend: the message names the file or key, what was found, what to do.

    The command line prints it as one line and exits with code 2; anything else is a bug and
    keeps its traceback.
    """

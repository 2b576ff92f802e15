"""The two sides of a HumanEval check, each in a sandboxed process of its own.

The candidate's process executes the completion and answers calls. The test's process executes the test,
whose `candidate` sends each call through a pipe and gets plain values back (`wire.py`). It alone holds the
nonce that a pass needs, and the assertions; nothing of either is in the memory of the candidate's process.

Sent to fresh interpreters together with the modules it imports, which have no other there; `candidate` and
`test` are the roles that `sandbox_child.boxed_process` calls.
"""

import builtins
import os
import sys

from lemon_jax.runtime.tools.completion import prelude, sources
from lemon_jax.runtime.tools.wire import MAX_BYTES, WireError, decode, encode

_ERRORS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


def candidate(job, say):
    """Load the completion, then answer calls until the test's process hangs up."""
    say.close()  # nothing this process could say is evidence of anything
    calls, replies = job["calls"], job["replies"]
    function, status, text = load(job)
    send(replies, encode((status, text)))
    while status == "ready":
        frame = receive(calls)
        if frame is None:
            break
        number, args, kwargs = decode(frame)
        send(replies, answer(number, function, args, kwargs))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            continue


def load(job):
    """(the entry point or None, "ready" | "missing" | "failed" | "memory", reason)."""
    # A module of its own, not __main__: what it guards by `if __name__ == "__main__"` is not asked for.
    module = sys.modules["candidate"] = type(sys)("candidate")
    try:
        for source in sources(job["prompt"], job["entry_point"], job["completion"]):
            exec(compile(source, "<candidate>", "exec"), vars(module))
    except MemoryError:
        return None, "memory", "memory, while it was loaded"
    except BaseException as error:
        return None, "failed", described(error)
    function = vars(module).get(job["entry_point"])
    if not callable(function):
        return None, "missing", f"no function {job['entry_point']} at the outermost level"
    return function, "ready", ""


def answer(number, function, args, kwargs):
    """The reply to one call, in bytes."""
    try:
        return encode((number, "value", function(*args, **kwargs)))
    except WireError as error:
        return encode((number, "unfit", str(error)))
    except BaseException as error:
        kind = next((k for k in type(error).__mro__ if k.__module__ == "builtins"), Exception)
        text = described(error)
        if kind is type(error):  # the test's side names it again
            text = text.removeprefix(kind.__name__).removeprefix(":").strip()
        return encode((number, "error", kind.__name__, text))


def described(error):
    """One bounded line about an exception that may have been made to resist it."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    except BaseException:
        return "an exception that cannot be printed"


class LostError(BaseException):
    """The candidate's process ended or sent nonsense: no test can go on, or catch this as an answer."""


class Link:
    """The `candidate` that a test calls."""

    def __init__(self, calls, replies):
        self.calls, self.replies = calls, replies
        self.number = 0
        self.lost: tuple = ()  # (kind, reason) once there will be no more replies
        self.fault = ""  # what the test asked for and cannot have
        self.memory = False

    def hello(self):
        found = self._receive()
        if len(found) != 2 or not all(isinstance(part, str) for part in found):
            self._lose("foul", "a first message that is none")
        return found[0], " ".join(found[1].split())[:300]

    def __call__(self, *args, **kwargs):
        self.number += 1
        try:
            frame = encode((self.number, args, kwargs))
        except WireError as error:
            self.fault = f"the test hands over {error}"
            raise TypeError(self.fault) from None
        try:
            send(self.calls, frame)
        except OSError:
            self._lose("lost", "")
        found = self._receive()
        number, kind = found[:2] if len(found) > 2 else (0, "")
        if number != self.number:
            self._lose("foul", "a reply to no call")
        if kind == "value":
            return found[2]
        if kind == "unfit":
            raise TypeError(f"the candidate returned {found[2]}")
        if kind == "error" and len(found) == 4:
            raise self._error(str(found[2]), str(found[3]))
        return self._lose("foul", "a reply that is none")

    def _error(self, name, text):
        """The candidate's exception, for tests that expect one: of its nearest built-in kind."""
        self.memory = self.memory or name == "MemoryError"
        try:
            return _ERRORS[name](text)
        except (KeyError, TypeError):  # SystemExit, which may not end the test; UnicodeDecodeError wants more
            return RuntimeError(f"{name}: {text}")

    def _receive(self):
        try:
            frame = receive(self.replies)
            found = () if frame is None else decode(frame)
        except WireError as error:
            self._lose("foul", str(error))
        if frame is None:
            self._lose("lost", "")
        return found if type(found) is tuple else ()

    def _lose(self, kind, text):
        self.lost = (kind, text)
        raise LostError(text)


def test(job, say):
    """Run the test. Only here, after its last assertion, is "passed" said."""
    say("verdict", *verdict(job, Link(job["calls"], job["replies"])))


def verdict(job, link):
    """(kind, reason); kind is "passed", "failed", "missing", "memory", "lost", "foul" or "test_error"."""
    names: dict = {"__name__": "test", "__builtins__": builtins, job["entry_point"]: link}
    try:
        # The prompt's helpers come from the prompt: a test may call them, and the candidate may not choose.
        exec(compile(prelude(job["prompt"], job["entry_point"]), "<prompt>", "exec"), names)
        body = compile(job["test"], "<test>", "exec")
        status, text = link.hello()
        if status != "ready":
            return (status if status in ("missing", "memory") else "failed"), text
        exec(body, names)
        check = names["check"]
    except BaseException as error:
        return link.lost or ("test_error", f"the test does not load: {described(error)}")
    try:
        check(link)
    except BaseException as error:
        if link.fault:
            return "test_error", link.fault
        kind = "memory" if link.memory else "failed"
        return link.lost or (kind, f"{described(error)}{where(error, job['test'])}")
    if link.number == 0:
        return "test_error", "the test never calls the candidate"
    return link.lost or ("passed", "")


def where(error, source):
    """The line of the test that an exception came through, for the reader of a failure."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at: {source.splitlines()[line - 1].strip()[:200]}" if line else ""


def send(fd, frame):
    data = len(frame).to_bytes(4, "big") + frame
    while data:
        data = data[os.write(fd, data) :]


def receive(fd):
    """The next frame; None where the other side has hung up. WireError on one that is too long."""
    size = read_exactly(fd, 4)
    if size is None:
        return None
    length = int.from_bytes(size, "big")
    if length > MAX_BYTES:
        raise WireError(f"a message of more than {MAX_BYTES} bytes")
    return read_exactly(fd, length)


def read_exactly(fd, size):
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, min(size - len(data), 65_536))
        if not part:
            return None
        data += part
    return bytes(data)

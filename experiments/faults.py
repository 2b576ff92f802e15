"""What becomes of a worker call, for each kind of fault that a server can have.

    python experiments/faults.py

A local server misbehaves in one way after another while the client of OpenAI-compatible servers calls it,
with short waits. Prints a table: the fault, what the server did, how many calls it received, what came of it,
and the seconds it took. Exit code 0: all as expected; 1: something was not. No network, no model; 20 seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
import time
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

from lemon_jax.backends import Message, OpenAIBackend, Reply, Request

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "backends"))
from fault_server import chat, serving

FIRST_WAIT_S = 0.02  # of the backoff; 0.5 s in a run
REQUEST = Request(model="m", messages=(Message(role="user", content="What is 3 + 4?"),), max_tokens=32)
LONG = replace(REQUEST, messages=(Message(role="user", content="word " * 4000),))
ANSWER = chat("Answer: 7", usage=(12, 3))
PAST = "Sun, 06 Nov 1994 08:49:37 GMT"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault. `steps` are the server's replies in order, the last one for all that follow.

    `outcome` is "answer", "no text" or the kind of the failure, with "warned" where a warning is logged;
    `seconds` bounds how long it may take, from and to.
    """

    name: str
    did: str
    steps: tuple[Any, ...]
    calls: int
    outcome: str
    seconds: tuple[float, float] = (0.0, 5.0)
    timeout_s: float = 10.0
    request: Request = REQUEST


def _transient(name: str, did: str, step: Any) -> list[Case]:
    """A fault that passes, and the same one when it stays."""
    kind = {"reset": "connection broke"}.get(name) or f"HTTP {step[0]}"
    passes = Case(name=name, did=f"{did}; then a reply", steps=(step, ANSWER), calls=2, outcome="answer")
    return [passes, replace(passes, name="", did=f"{did}, always", steps=(step,), calls=5, outcome=kind)]


def _wait(asked: str, headers: dict[str, str], seconds: tuple[float, float] = (0.0, 1.0)) -> Case:
    steps = ((429, b"slow down", headers), ANSWER)
    return Case(
        name="429", did=f"asks to wait: {asked}", steps=steps, calls=2, outcome="answer", seconds=seconds
    )


def _overflow(server: str, did: str, step: Any, request: Request = REQUEST) -> Case:
    name = f"overflow, {server}"
    return Case(name=name, did=did, steps=(step,), calls=1, outcome="context overflow", request=request)


def _error(text: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": text, **more}}


def _in_two_seconds(state: Any, body: Any) -> tuple[int, bytes, dict[str, str]]:
    return 429, b"slow down", {"Retry-After": formatdate(time.time() + 2, usegmt=True)}


def cases() -> list[Case]:
    """All faults, in the order of the table."""
    late = (*chat("late"), {"X-Delay": "1.4"})
    slower = (*chat("second"), {"X-Delay": "2.5"})
    return [
        Case(name="none", did="replies", steps=(ANSWER,), calls=1, outcome="answer"),
        _wait("0.5 s", {"Retry-After": "0.5"}, (0.5, 1.5)),
        _wait("1 s", {"Retry-After": "1"}, (1.0, 2.0)),
        Case(
            name="429",
            did="asks to wait: until a date 2 s ahead",
            steps=(_in_two_seconds, ANSWER),
            calls=2,
            outcome="answer",
            seconds=(0.9, 3.0),  # a date has whole seconds
        ),
        _wait("400 ms, retry-after-ms", {"Retry-After-Ms": "400", "Retry-After": "1"}, (0.4, 1.0)),
        _wait("until a date that is past", {"Retry-After": PAST}),
        _wait("0 s", {"Retry-After": "0"}),
        _wait("-3 s", {"Retry-After": "-3"}),
        _wait("soon", {"Retry-After": "soon"}),
        _wait("nothing", {}),
        *(
            Case(
                name="429",
                did=f"asks to wait: {asked} s, longer than it may take",
                steps=((429, b"slow down", {"Retry-After": asked}),),
                calls=1,
                outcome="HTTP 429",
                seconds=(0.0, 1.0),
            )
            for asked in ("3600", "1e12")
        ),
        Case(
            name="429, no quota",
            did="says insufficient_quota",
            steps=((429, _error("quota", code="insufficient_quota")),),
            calls=1,
            outcome="HTTP 429",
        ),
        *_transient("500", "says 500", (500, b"oops")),
        *_transient("502", "an HTML page with 502", (502, b"<html>bad gateway</html>")),
        *_transient("503", "is loading its model", (503, _error("loading model"))),
        *_transient("408", "says 408", (408, b"")),
        *_transient("reset", "resets the connection", "reset"),
        *(
            Case(name=f"{s}", did=f"says {s}", steps=((s, _error("no")),), calls=1, outcome=f"HTTP {s}")
            for s in (400, 401, 404)
        ),
        Case(name="refused", did="nobody listens", steps=(), calls=0, outcome="cannot connect"),
        Case(
            name="half a body",
            did="ends 50 bytes too soon, once",
            steps=((*ANSWER, {"X-Cut": "1"}), ANSWER),
            calls=2,
            outcome="answer",
        ),
        Case(
            name="half a body",
            did="ends 50 bytes too soon, always",
            steps=((*ANSWER, {"X-Cut": "1"}),),
            calls=5,
            outcome="connection broke",
        ),
        _shape("HTML with 200", "an HTML page", b"<html>hello</html>", 5, "malformed reply"),
        _shape("half JSON with 200", "JSON cut off", b'{"choices": [{"mess', 5, "malformed reply"),
        _shape("empty choices", "an empty list", {"choices": []}, 2, "empty response"),
        _shape("no choices", "no such key", {"id": "x"}, 2, "empty response"),
        _shape("no message", "a choice without one", {"choices": [{}]}, 5, "malformed reply"),
        _shape("error with 200", "an error object", _error("try later"), 5, "server error"),
        _shape("a stream", "server-sent events", b'data: {"choices": []}\n\n', 1, "streamed reply"),
        Case(
            name="content filter",
            did="refuses the content",
            steps=(chat(None, finish="content_filter", refusal="no"),),
            calls=1,
            outcome="content filter",
        ),
        Case(
            name="no usage", did="no token counts", steps=(chat("7", usage=None),), calls=1, outcome="answer"
        ),
        Case(name="null content", did="content: null", steps=(chat(None),), calls=1, outcome="no text"),
        Case(
            name="reasoning alone",
            did="reasoning_content, no content",
            steps=(chat(None, finish="length", reasoning_content="hm"),),
            calls=1,
            outcome="no text, warned",
        ),
        _overflow(
            "llama.cpp",
            "400 exceed_context_size_error",
            (400, _error("too long", type="exceed_context_size_error", n_prompt_tokens=7030, n_ctx=2048)),
        ),
        _overflow("llama.cpp", "500", (500, _error("the request exceeds the available context size"))),
        Case(
            name="cache full",
            did="llama.cpp's 500, then a reply",
            steps=((500, _error("Context size has been exceeded.")), ANSWER),
            calls=2,
            outcome="answer",
        ),
        _overflow("LM Studio", "200 without a token", chat("", usage=(5000, 0)), LONG),
        Case(
            name="overflow, Ollama",
            did="cuts the prompt in silence",
            steps=(chat("7", usage=(2048, 1)),),
            calls=1,
            outcome="answer, warned",
            request=LONG,
        ),
        _overflow(
            "vLLM",
            "400 context_length_exceeded",
            (400, _error("This model's maximum context length is 4096", code="context_length_exceeded")),
        ),
        Case(
            name="slow drip",
            did="a byte every 50 ms, never done",
            steps=("drip",),
            calls=2,
            outcome="timeout",
            seconds=(1.0, 2.0),
            timeout_s=1.0,
        ),
        Case(
            name="silence",
            did="says nothing",
            steps=((*ANSWER, {"X-Delay": "3"}),),
            calls=2,
            outcome="timeout",
            seconds=(1.0, 2.0),
            timeout_s=1.0,
        ),
        Case(name="no end", did="a body without end", steps=("endless",), calls=2, outcome="malformed reply"),
        Case(
            name="late, and first",
            did="replies while a second call waits",
            steps=(late, slower),
            calls=2,
            outcome="answer: late",
            seconds=(1.4, 2.0),
            timeout_s=2.0,
        ),
        Case(
            name="late, and second",
            did="replies to the second call before",
            steps=(late, chat("second")),
            calls=2,
            outcome="answer: second",
            seconds=(1.0, 1.4),
            timeout_s=2.0,
        ),
    ]


def _shape(name: str, did: str, body: Any, calls: int, kind: str) -> Case:
    return Case(name=name, did=did, steps=((200, body),), calls=calls, outcome=kind)


def run(case: Case) -> tuple[int, str, float]:
    """Calls that reached the server, the outcome, and the seconds until it was known."""
    warnings = _Warnings()
    logging.getLogger("lemon_jax").addHandler(warnings)
    try:
        if case.steps:
            with serving(steps=list(case.steps)) as (url, state):
                reply, seconds = asyncio.run(_call(url, case))
                calls = len(state["bodies"])
        else:
            with socket.socket() as free:  # bound but not listening: connections are refused
                free.bind(("127.0.0.1", 0))
                reply, seconds = asyncio.run(_call(f"http://127.0.0.1:{free.getsockname()[1]}", case))
            calls = 0
    finally:
        logging.getLogger("lemon_jax").removeHandler(warnings)
    return calls, _outcome(reply, case) + (", warned" if warnings.count else ""), seconds


class _Warnings(logging.Handler):
    """Counts warnings, and keeps them off the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


async def _call(url: str, case: Case) -> tuple[Reply, float]:
    backend = OpenAIBackend(f"{url}/v1", "m", timeout_s=case.timeout_s, first_wait_s=FIRST_WAIT_S)
    start = time.monotonic()
    try:
        (reply,) = [reply async for _, reply in backend.generate([case.request])]
        return reply, time.monotonic() - start
    finally:
        await backend.aclose()


def _outcome(reply: Reply, case: Case) -> str:
    if reply.error is not None:
        return reply.error.partition(":")[0]
    if not reply.text:
        return "no text"
    return f"answer: {reply.text}" if case.outcome.startswith("answer:") else "answer"


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    form = "{:20} {:48} {:>5}  {:17} {:>7}  {}"
    print(form.format("fault", "what the server did", "calls", "outcome", "seconds", "expected"))
    wrong = 0
    for case in cases():
        calls, outcome, seconds = run(case)
        low, high = case.seconds
        as_expected = (calls, outcome) == (case.calls, case.outcome) and low <= seconds <= high
        wrong += not as_expected
        note = "yes" if as_expected else f"NO: {case.calls} calls, {case.outcome}, {low:g} to {high:g} s"
        print(form.format(case.name, case.did, calls, outcome, f"{seconds:.2f}", note), flush=True)
    print(f"\n{len(cases())} faults, {wrong or 'none'} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

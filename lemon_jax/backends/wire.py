"""The OpenAI chat dialect as it really arrives: request bodies, replies, and their many faults."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

from lemon_jax.backends.types import Finish, Reply, Request

# llama.cpp, LM Studio, Ollama, OpenAI or vLLM, SGLang, Anthropic, Gemini and TGI, in this order.
_OVERFLOW = re.compile(
    r"exceed_context_size_error|exceeds? the available context size|context size has been exceeded"
    r"|tokens when context the overflows|context length of only"
    r"|exceeds? (?:the )?(?:maximum )?(?:model'?s )?context (?:length|window)|input length exceeds"
    r"|context_length_exceeded|context length exceeded|maximum context length"
    r"|longer than the model'?s context length|prompt is too long"
    r"|input token count.{0,40}exceeds the maximum number of tokens"
    r"|`inputs` tokens \+ `max_new_tokens` must be",
    re.IGNORECASE,
)
# llama.cpp says this with 5xx while its slots fill the cache that they share: load, not this prompt alone.
_SHARED_FULL = re.compile("context size has been exceeded", re.IGNORECASE)
# How these say how long the prompt is, how much it asks for with its reply, and how much there is room for.
_PROMPT_SIZE = re.compile(
    r"(?:n_prompt_tokens\W{1,4}|resulted in |request \(|keep the first |request has |the input \("
    r"|prompt is too long: |prompt contains at least )(\d{1,9})"
    r"|(\d{1,9})(?= in the messages| tokens from the input messages)",
    re.IGNORECASE,
)
_WHOLE_SIZE = re.compile(r"(?:requested|total of(?: at least)?) (\d{1,9}) tokens", re.IGNORECASE)
_CONTEXT_SIZE = re.compile(
    r"(?:n_ctx\W{1,4}|maximum context length (?:is|of) |context length of only |available context size \("
    r"|model'?s context length \(|tokens > )(\d{1,9})",
    re.IGNORECASE,
)
# Of errors that come as 5xx or 200: the server, or who stands in front of it, has too much to do.
_OVERLOADED = re.compile(
    r"overloaded|too many requests|rate.?limit|no slot available|at capacity", re.IGNORECASE
)
_OVERLOAD_STATUSES = (429, 503, 529)
OVERFLOW = "context overflow"  # the kind of fault of a prompt that does not fit
# The beginnings of errors of a call that a server takes at no time, however well it is.
REFUSED = re.compile(f"HTTP 4(?!08|29)|{OVERFLOW}|content filter")
# What a request says of the reply that is wanted.
PARAMETERS = ("max_tokens", "temperature", "seed", "stop")
# A prompt shorter than this fits every server's default context, so it is never judged as cut.
_LONG_PROMPT_TOKENS = 512
_MOST_TOKENS = 10**9  # of one call; a count beyond it is no count
# Why a reply ended before its end, as other dialects than OpenAI's say it.
_CUT = ("length", "max_tokens", "model_length")
_BROKEN_OFF = ("abort", "aborted", "cancelled", "canceled")
UNREACHABLE, BROKE = OF_CONNECTION = "cannot connect", "connection broke"  # kinds of faults
MANY = 1_000_000  # retries of a fault that only the client's own limit ends


@dataclass(kw_only=True, eq=False)  # not frozen: the interpreter sets tracebacks on exceptions
class Fault(Exception):
    """A failed attempt: its class, what was seen, and whether another attempt may help."""

    kind: str
    detail: str
    retries: int  # how often this kind may be tried again
    wait_s: float | None = None  # the least to wait before that, as the server asks
    overload: bool = False  # whether fewer calls at once may help
    server: int = 0  # which of several had it
    prompt_tokens: int | None = None  # of a prompt that does not fit, as the server counts them


def seed_of(request: Request) -> int:
    """A 31-bit sampling seed: the head of the SHA-256 of the request, sample index included."""
    # asdict would copy every field first: a tenth of a call's time.
    fields = vars(request) | {"messages": [vars(message) for message in request.messages]}
    text = json.dumps(fields, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def chat_body(
    request: Request,
    model: str,
    extra_body: Mapping[str, Any],
    rename: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """The JSON body of POST /chat/completions; `extra_body` wins over the standard keys.

    `rename` holds a server's own names of the PARAMETERS; None leaves one out, for a server that refuses it.
    Replies are never streamed: a whole one carries its usage and cannot end half-way unnoticed.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature if request.sample_index else 0.0,  # index 0 is greedy
        "seed": seed_of(request),
    }
    if request.stop:
        body["stop"] = list(request.stop)
    if rename:
        names = {key: rename.get(key, key) for key in body}
        body = {name: body[key] for key, name in names.items() if name is not None}
    return {**body, **extra_body, "stream": False}


def prompt_estimate(request: Request) -> int:
    """A low estimate of the prompt's tokens, four characters to the token."""
    return sum(len(m.content) for m in request.messages) // 4


def retry_after_s(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that a reply asks to wait, or None where it says nothing of use; `now` is Unix time.

    Of `retry-after-ms` (milliseconds, hosted servers) and Retry-After (RFC 9110 10.2.3: seconds or a
    date), the finer one counts. A time that has passed, zero, or a number that is none asks for nothing.
    """
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        try:
            seconds = float(value) * unit
        except ValueError:
            seconds = _date(value) - now
        if 0 < seconds < math.inf:
            return seconds
    return None


def _date(value: str) -> float:
    """Unix time of an HTTP date, or NaN."""
    try:
        date = parsedate_to_datetime(value)
        # A date without its zone is GMT like any other (RFC 9110 5.6.7), not this machine's time.
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return math.nan


def overflow_fault(text: str) -> Fault | None:
    """The fault of a reply that says the prompt does not fit, or None."""
    if not _OVERFLOW.search(text):
        return None
    prompt, whole, context = (size.search(text) for size in (_PROMPT_SIZE, _WHOLE_SIZE, _CONTEXT_SIZE))
    tokens = int(prompt[1] or prompt[2]) if prompt else None
    asked = int(whole[1]) if whole else tokens
    if asked and context:
        text = f"{asked} tokens where the context holds {context[1]}"
    return Fault(kind=OVERFLOW, detail=text, retries=0, prompt_tokens=tokens or None)


def overflow_reply(error: str, prompt_tokens: int | None, seconds: float) -> Reply:
    """What a call comes to whose prompt does not fit."""
    return Reply(
        text="",
        finish="overflow",
        prompt_tokens=prompt_tokens,
        generated_tokens=0,
        seconds=seconds,
        error=error,
    )


def check_status(status: int, text: str, wait_s: float | None) -> None:
    """Raise the Fault of a reply whose HTTP status is not 200."""
    if status == 200:
        return
    shared_full = status >= 500 and bool(_SHARED_FULL.search(text))
    if not shared_full and (fault := overflow_fault(text)):
        raise fault
    transient = status in (408, 429) or status >= 500
    # A quota that is used up says 429 too, but no wait within a request's time refills it.
    hopeless = not transient or "insufficient_quota" in text
    raise Fault(
        kind=f"HTTP {status}",
        detail=text,
        retries=0 if hopeless else MANY,
        wait_s=wait_s,
        overload=shared_full
        or status in _OVERLOAD_STATUSES
        or (status >= 500 and bool(_OVERLOADED.search(text))),
    )


def parse_json(text: str) -> Any:
    """The JSON value of `text`, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_reply(text: str, request: Request, seconds: float) -> Reply:
    """The reply in the body of a 200 answer.

    Raises:
        Fault: the body is no reply (HTML, half a document), has no choices, reports an error
            or a content filter, or shows that the prompt did not fit.
    """
    parsed = parse_json(text)
    if not isinstance(parsed, dict):
        if text.lstrip().startswith(("data:", "event:", "id:", ":")):  # the fields of server-sent events
            raise Fault(kind="streamed reply", detail=f"stream=false was asked for: {text}", retries=0)
        raise Fault(kind="malformed reply", detail=text, retries=MANY)
    choices = parsed.get("choices")
    if parsed.get("error"):
        raise overflow_fault(text) or _server_error(text)
    if not isinstance(choices, list) or not choices:
        # Without choices the body is all the server's own words, and no reply that speaks of contexts.
        raise overflow_fault(text) or Fault(kind="empty response", detail=text, retries=1)
    choice = choices[0] if isinstance(choices[0], dict) else {}
    message, reason = choice.get("message"), choice.get("finish_reason")
    if choice.get("error") or reason == "error":  # a router's way to pass on what its provider said
        raise overflow_fault(text) or _server_error(text)
    reason = reason.lower() if isinstance(reason, str) else reason
    if reason in _BROKEN_OFF:
        raise _server_error(text)
    if not isinstance(message, dict):
        raise Fault(kind="malformed reply", detail=text, retries=MANY)
    if reason == "content_filter":
        raise Fault(kind="content filter", detail=str(message.get("refusal") or text), retries=0)
    content = _content(message.get("content"))
    usage = parsed.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    # No prompt has 0 tokens.
    prompt_tokens, generated = (
        _count(usage.get("prompt_tokens")) or None,
        _count(usage.get("completion_tokens")),
    )
    long_prompt = prompt_estimate(request) >= _LONG_PROMPT_TOKENS
    if not content and generated == 0 and long_prompt:
        # LM Studio answers an overlong prompt with 200 and no text at all.
        detail = "status 200 without a single token"
        raise Fault(kind=OVERFLOW, detail=detail, retries=0, prompt_tokens=prompt_tokens)
    if content and generated == 0:  # some say 0 where they do not count
        generated = None
    finish: Finish = "length" if reason in _CUT else "stop"
    return Reply(
        text=content, finish=finish, prompt_tokens=prompt_tokens, generated_tokens=generated, seconds=seconds
    )


def _server_error(text: str) -> Fault:
    return Fault(kind="server error", detail=text, retries=MANY, overload=bool(_OVERLOADED.search(text)))


def only_reasoned(text: str) -> bool:
    """Whether a reply without content holds the worker's reasoning, in a field of its own."""
    parsed = parse_json(text)
    try:
        message = parsed["choices"][0]["message"]
    except (TypeError, KeyError, IndexError):
        return False
    return not _content(message.get("content")) and any(
        _content(message.get(key)) for key in ("reasoning_content", "reasoning")
    )


def was_cut(request: Request, reply: Reply) -> bool:
    """Whether the server seems to have dropped part of the prompt without saying so.

    True when it counted fewer than 0.7 of the estimated tokens of a long prompt.
    """
    estimate = prompt_estimate(request)
    return (
        reply.prompt_tokens is not None
        and estimate >= _LONG_PROMPT_TOKENS
        and reply.prompt_tokens < 0.7 * estimate
    )


def _content(content: Any) -> str:
    if isinstance(content, list):  # some servers send typed parts
        content = "".join(str(p.get("text") or "") for p in content if isinstance(p, dict))
    # A lone surrogate could be neither stored nor sent on.
    return content.encode("utf-8", "replace").decode() if isinstance(content, str) else ""


def _count(value: Any) -> int | None:
    """A number of tokens, or None where the server says nothing that could be one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_TOKENS:
        return None
    return value

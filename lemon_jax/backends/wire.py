"""The OpenAI chat dialect as it really arrives: request bodies, replies, and their many faults."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from lemon_jax.backends.types import Finish, Reply, Request

# llama.cpp, LM Studio, Ollama, and OpenAI or vLLM, in this order.
_OVERFLOW = re.compile(
    r"exceed_context_size_error|exceeds? the available context size|context size has been exceeded"
    r"|tokens when context the overflows|context length of only"
    r"|exceeds? (?:the )?(?:maximum )?(?:model'?s )?context (?:length|window)|input length exceeds"
    r"|context_length_exceeded|maximum context length",
    re.IGNORECASE,
)
_SECRET = re.compile(r"(?i)\bbearer\s+\S+|\bsk-[\w-]{8,}|(?<=://)[^/\s@]+@")
# A prompt shorter than this fits every server's default context, so it is never judged as cut.
_LONG_PROMPT_TOKENS = 512
MANY = 1_000_000  # retries of a fault that only the client's own limit ends


@dataclass(kw_only=True, eq=False)  # not frozen: the interpreter sets tracebacks on exceptions
class Fault(Exception):
    """A failed attempt: its class, what was seen, and whether another attempt may help."""

    kind: str
    detail: str
    retries: int  # how often this kind may be tried again
    wait_s: float | None = None  # the server's own Retry-After


def seed_of(request: Request) -> int:
    """A 31-bit sampling seed: the head of the SHA-256 of the request, sample index included."""
    text = json.dumps(asdict(request), sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def chat_body(request: Request, model: str, extra_body: dict[str, Any]) -> dict[str, Any]:
    """The JSON body of POST /chat/completions; `extra_body` wins over the standard keys."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": m.role, "content": m.content} for m in request.messages],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature if request.sample_index else 0.0,  # index 0 is greedy
        "seed": seed_of(request),
    }
    if request.stop:
        body["stop"] = list(request.stop)
    return body | extra_body


def redact(text: str, api_key: str | None, limit: int = 200) -> str:
    """One line of at most `limit` characters without the key or anything that looks like one."""
    if api_key:
        text = text.replace(api_key, "[redacted]")
    # Cut only after redacting: half a key at the end would be beyond recognition, not beyond use.
    return " ".join(_SECRET.sub("[redacted]", text).split())[:limit]


def prompt_estimate(request: Request) -> int:
    """A low estimate of the prompt's tokens, four characters to the token."""
    return sum(len(m.content) for m in request.messages) // 4


def retry_after_s(value: str | None, now: float) -> float | None:
    """Seconds to wait from a Retry-After header (RFC 9110 10.2.3), or None; `now` is Unix time."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def overflow_fault(text: str, parsed: Any) -> Fault | None:
    """The fault of a reply that says the prompt does not fit, or None."""
    if not _OVERFLOW.search(text):
        return None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    sizes = error if isinstance(error, dict) else {}
    n_prompt, n_ctx = sizes.get("n_prompt_tokens"), sizes.get("n_ctx")
    if isinstance(n_prompt, int) and isinstance(n_ctx, int):
        text = f"prompt of {n_prompt} tokens, context of {n_ctx}"
    return Fault(kind="context overflow", detail=text, retries=0)


def check_status(status: int, text: str, wait_s: float | None) -> None:
    """Raise the Fault of a reply whose HTTP status is not 200."""
    if status == 200:
        return
    if fault := overflow_fault(text, parse_json(text)):
        raise fault
    transient = status in (408, 429) or status >= 500
    raise Fault(kind=f"HTTP {status}", detail=text, retries=MANY if transient else 0, wait_s=wait_s)


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
        raise Fault(kind="malformed reply", detail=text, retries=MANY)
    choices = parsed.get("choices")
    if parsed.get("error"):
        raise overflow_fault(text, parsed) or Fault(kind="server error", detail=text, retries=MANY)
    if not isinstance(choices, list) or not choices:
        raise Fault(kind="empty response", detail=text, retries=1)
    choice = choices[0] if isinstance(choices[0], dict) else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        raise Fault(kind="malformed reply", detail=text, retries=MANY)
    reason = choice.get("finish_reason")
    if reason == "content_filter":
        raise Fault(kind="content filter", detail=str(message.get("refusal") or text), retries=0)
    content = _content(message.get("content"))
    usage = parsed.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    prompt_tokens, generated = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    long_prompt = prompt_estimate(request) >= _LONG_PROMPT_TOKENS
    if not content and generated == 0 and long_prompt:
        # LM Studio answers an overlong prompt with 200 and no text at all.
        raise Fault(kind="context overflow", detail="status 200 without a single token", retries=0)
    finish: Finish = "length" if reason == "length" else "stop"
    return Reply(
        text=content, finish=finish, prompt_tokens=prompt_tokens, generated_tokens=generated, seconds=seconds
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
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

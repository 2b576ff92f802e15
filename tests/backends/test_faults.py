"""Servers at their worst: long waits, prompts they cannot hold, bodies that never end, late replies."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import replace
from email.utils import formatdate

import pytest
from fault_server import chat
from test_openai_backend import LONG, REQUEST, ask

from lemon_jax.backends import OpenAIBackend
from lemon_jax.backends.wire import overflow_fault, retry_after_s

NOW = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the example of RFC 9110


def timed(steps, requests=(REQUEST,), **options):
    start = time.monotonic()
    replies, state = ask(steps, requests, **options)
    return replies, state, time.monotonic() - start


# Retry-After


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": " 2.5 "}, 2.5),
        ({"retry-after": "Sun, 06 Nov 1994 08:50:07 GMT"}, 30.0),
        ({"retry-after": "Sunday, 06-Nov-94 08:50:07 GMT"}, 30.0),  # the two obsolete forms
        ({"retry-after": "Sun Nov  6 08:50:07 1994"}, 30.0),
        ({"retry-after": "Sun, 06 Nov 1994 09:50:07 +0100"}, 30.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:07 GMT"}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": "1e12"}, 1e12),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Sun, 99 Nov 1994 99:99:99 GMT"}, None),
        ({"retry-after": "Sun, 06 Nov 999999999999 08:49:37 GMT"}, None),
        ({"retry-after": "1" * 400}, None),
        ({}, None),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after-ms": "never", "retry-after": "2"}, 2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Auckland"])
def test_retry_after_forms(headers, seconds, zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert retry_after_s(headers, NOW) == (None if seconds is None else pytest.approx(seconds))
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{"Retry-After": "0.4"}, {"Retry-After-Ms": "400"}], ids=str)
def test_the_wait_that_a_server_asks_for(status, headers):
    (reply,), state, seconds = timed([(status, b"slow down", headers), chat("5")])
    assert (reply.text, len(state["bodies"])) == ("5", 2)
    assert 0.4 <= seconds < 5


def test_a_wait_until_a_date():
    (reply,), _, seconds = timed(
        [(429, b"", {"Retry-After": formatdate(time.time() + 2, usegmt=True)}), chat("5")]
    )
    assert reply.text == "5"
    assert 0.9 <= seconds < 5  # a date has whole seconds


@pytest.mark.parametrize("asked", ["Sun, 06 Nov 1994 08:49:37 GMT", "0", "-1", "soon", "nan", None])
def test_a_wait_of_no_use_is_replaced_by_backoff(asked):
    refusal = (429, b"slow down", {} if asked is None else {"Retry-After": asked})
    (reply,), state, seconds = timed([refusal, refusal, chat("5")])
    assert (reply.text, len(state["bodies"])) == ("5", 3)
    assert seconds < 2


@pytest.mark.parametrize("asked", ["3600", "1e12"])
def test_a_wait_beyond_the_deadline_fails_at_once(asked):
    (reply,), state, seconds = timed([(429, b"slow down", {"Retry-After": asked})], timeout_s=5.0)
    assert reply.error == f"HTTP 429: the server asks to wait {float(asked):g} s: slow down"
    assert len(state["bodies"]) == 1
    assert seconds < 2


def test_a_quota_that_is_used_up_is_not_asked_again():
    body = {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}
    (reply,), state, _ = timed([(429, body)])
    assert reply.error.startswith("HTTP 429: ")
    assert len(state["bodies"]) == 1


def test_backoff_grows_and_repeats():
    backend = OpenAIBackend("http://127.0.0.1:9/v1", "m")
    fault = overflow_fault("maximum context length")
    waits = [backend._wait_s(REQUEST, attempt, fault) for attempt in range(12)]
    assert waits == [backend._wait_s(REQUEST, attempt, fault) for attempt in range(12)]
    assert all(0.5 * 2**i <= wait * 2 <= 3 * 0.5 * 2**i for i, wait in enumerate(waits[:6]))
    assert max(waits) <= 45
    assert waits[0] != backend._wait_s(LONG, 0, fault)
    asyncio.run(backend.aclose())


# Context overflow: llama.cpp (two ages), LM Studio, Ollama, OpenAI, vLLM

OVERFLOWS = {
    "llama.cpp 400": (
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size, try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 7030,
                "n_ctx": 2048,
            }
        },
        (7030, 2048),
    ),
    "llama.cpp sentence": (
        400,
        {"error": {"message": "request (7030 tokens) exceeds the available context size (2048 tokens)"}},
        (7030, 2048),
    ),
    "llama.cpp 500": (
        500,
        {"error": {"message": "the request exceeds the available context size. try increasing it"}},
        None,
    ),
    "LM Studio": (
        200,
        {
            "error": "Trying to keep the first 111490 tokens when context the overflows. However, the model "
            "is loaded with context length of only 4096 tokens"
        },
        (111490, 4096),
    ),
    "Ollama": (400, {"error": {"message": "input length exceeds the context length"}}, None),
    "OpenAI": (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 4097 tokens. However, your messages "
                "resulted in 5012 tokens.",
                "code": "context_length_exceeded",
            }
        },
        (5012, 4097),
    ),
    "vLLM": (
        400,
        {
            "object": "error",
            "message": "This model's maximum context length is 4096 tokens. However, you requested 4500 "
            "tokens (4000 in the messages, 500 in the completion).",
            "code": 400,
        },
        (4500, 4096),
    ),
    "SGLang": (
        400,
        {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."},
        (5000, 4096),
    ),
    "vLLM, of 2026": (
        400,
        {
            "message": "This model's maximum context length is 4096 tokens. However, you requested 500 "
            "output tokens and your prompt contains at least 3597 input tokens, for a total of at least 4097 "
            "tokens."
        },
        (4097, 4096),
    ),
    "SGLang, with the reply": (
        400,
        {
            "message": "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
            "requested a total of 4500 tokens: 4000 tokens from the input messages and 500 tokens for the "
            "completion."
        },
        (4500, 4096),
    ),
    "Anthropic": (
        400,
        {"error": {"message": "prompt is too long: 213000 tokens > 200000 maximum"}},
        (213000, 200000),
    ),
    "Gemini": (
        400,
        {
            "error": {
                "message": "The input token count (9000) exceeds the maximum number of tokens allowed (8192)."
            }
        },
        None,
    ),
    "TGI": (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"}, None),
    "200 with an error": (200, {"error": "context length exceeded"}, None),
    "200 without choices": (
        200,
        {"object": "error", "message": "This model's maximum context length is 4096 tokens."},
        None,
    ),
    "request has": (
        400,
        {"error": {"message": "request has 5000 tokens: exceeds the available context size (4096)"}},
        (5000, 4096),
    ),
    "code alone": (400, {"error": {"code": "context_length_exceeded"}}, None),
}
# Of those whose size is not the prompt's alone.
OF_THE_PROMPT = {"vLLM": 4000, "vLLM, of 2026": 3597, "SGLang, with the reply": 4000}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_context_overflow_is_told_apart_and_not_retried(name):
    status, body, sizes = OVERFLOWS[name]
    (reply,), state, _ = timed([(status, body), chat("5")])
    assert (reply.finish, reply.text, reply.generated_tokens) == ("overflow", "", 0)
    assert reply.prompt_tokens == OF_THE_PROMPT.get(name, sizes and sizes[0])
    if sizes:
        assert reply.error == "context overflow: {} tokens where the context holds {}".format(*sizes)
    else:
        assert reply.error.startswith("context overflow: ")
    assert len(state["bodies"]) == 1


def test_overflow_as_200_without_any_token():
    (reply,), state, _ = timed([chat("", usage=(5000, 0))], [LONG])
    assert reply.error == "context overflow: status 200 without a single token"
    assert (reply.finish, reply.prompt_tokens) == ("overflow", 5000)
    assert len(state["bodies"]) == 1
    (short,), _, _ = timed([chat("", usage=(5, 0))])
    assert (short.finish, short.text) == ("stop", "")


def test_a_cache_that_other_calls_fill_is_an_overload_and_tried_again():
    full = 500, {"error": {"message": "Context size has been exceeded.", "type": "server_error"}}
    (reply,), state, _ = timed([full, chat("5")])
    assert (reply.finish, reply.text, len(state["bodies"])) == ("stop", "5", 2)
    (reply,), state, _ = timed([full])
    assert (reply.finish, len(state["bodies"])) == ("error", 5)
    assert reply.error.startswith("HTTP 500: ")


def test_words_of_overflow_in_a_reply_are_just_words():
    text = "It exceeds the available context size of 5 apples."
    (reply,), _, _ = timed([chat(text)])
    assert (reply.finish, reply.text) == ("stop", text)


# Bodies


@pytest.mark.parametrize("step", ["drip", (200, b"", {"X-Delay": "3"})], ids=["drip", "silence"])
def test_the_deadline_holds_whatever_the_server_does(step):
    (reply,), _, seconds = timed([step], timeout_s=0.6)
    assert reply.error.startswith("timeout: no reply in 0.6 s")
    assert 0.6 <= seconds < 2
    assert 0.5 < reply.seconds < 2


def test_a_body_without_end_is_cut_off():
    (reply,), state, seconds = timed(["endless", chat("5")])
    assert (reply.text, len(state["bodies"])) == ("5", 2)
    (reply,), _, seconds = timed(["endless"])
    assert reply.error == "malformed reply: more than 16777216 bytes"
    assert seconds < 20


@pytest.mark.parametrize(
    "head",
    [
        {"Content-Type": "application/json; charset=base64"},
        {"Content-Type": "text/html; charset=nonsense"},
        {"Content-Encoding": "br-x"},
        {"X-Note": "\xe9"},
    ],
    ids=str,
)
def test_odd_headers_are_no_fault(head):
    (reply,), _, _ = timed([(*chat("é 5"), head)])
    assert reply.text == "é 5"


def test_a_byte_order_mark_is_no_fault():
    status, body = chat("5")
    (reply,), _, _ = timed([(status, b"\xef\xbb\xbf" + json.dumps(body).encode())])
    assert reply.text == "5"


def test_a_body_that_is_not_what_its_encoding_says():
    (reply,), state, _ = timed([(200, b"not gzip", {"Content-Encoding": "gzip"}), chat("5")])
    assert (reply.text, len(state["bodies"])) == ("5", 2)


# Replies


def test_streaming_is_never_asked_for():
    (reply,), state, _ = timed([chat("5")], extra_body={"stream": True})
    assert reply.text == "5"
    assert [body["stream"] for body in state["bodies"]] == [False]


@pytest.mark.parametrize("begin", ["", ": keep-alive\n\n", "id: 1\n", "\n\n", "event: message\n"])
def test_a_stream_all_the_same_is_named(begin):
    chunk = begin + 'data: {"choices": [{"delta": {"content": "5"}}]}\n\ndata: [DONE]\n\n'
    (reply,), state, _ = timed([(200, chunk.encode(), {"Content-Type": "text/event-stream"})])
    assert reply.error.startswith("streamed reply: stream=false was asked for: ")
    assert len(state["bodies"]) == 1


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_reasoning_alone_is_no_answer_and_is_warned_of_once(field, finish, caplog):
    step = chat(None, finish=finish, usage=(7, 64), **{field: "2 + 3 is 5. Answer: 5"})
    with caplog.at_level(logging.WARNING):
        replies, _, _ = timed([step], [replace(REQUEST, sample_index=i) for i in range(3)])
    assert {(r.text, r.finish, r.generated_tokens) for r in replies} == {("", finish, 64)}
    (record,) = caplog.records
    assert "reasoning and no answer" in record.message
    assert "max_tokens" in record.message


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS", "model_length"])
def test_a_reply_that_was_cut_says_so_in_every_dialect(reason):
    (reply,), _, _ = timed([chat("half", finish=reason)])
    assert (reply.text, reply.finish) == ("half", "length")


@pytest.mark.parametrize("reason", ["abort", "cancelled"])
def test_a_reply_that_was_broken_off_is_asked_for_again(reason):
    (reply,), state, _ = timed([chat("ha", finish=reason), chat("whole")])
    assert (reply.text, reply.finish, len(state["bodies"])) == ("whole", "stop", 2)


def test_an_empty_reply_without_reasoning_is_not_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        timed([chat("")])
        timed([chat("5", reasoning_content="2 + 3")])
    assert not caplog.records


@pytest.mark.parametrize(
    "choice",
    [
        {"finish_reason": "error", "message": {"content": ""}},
        {"error": {"message": "provider is overloaded"}, "message": {"content": "half"}},
    ],
)
def test_a_routers_error_within_a_choice_is_retried(choice):
    (reply,), state, _ = timed([(200, {"choices": [choice]}), chat("5")])
    assert (reply.text, len(state["bodies"])) == ("5", 2)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {},
        {"prompt_tokens": None},
        {"prompt_tokens": -1, "completion_tokens": 2.5},
        {"prompt_tokens": True},
        {"prompt_tokens": 10**400, "completion_tokens": 10**10},
        {"prompt_tokens": 0, "completion_tokens": 0},
    ],
)
def test_usage_that_says_nothing_is_unknown(usage):
    status, body = chat("5")
    (reply,), _, _ = timed([(status, body | {"usage": usage})])
    assert (reply.text, reply.prompt_tokens, reply.generated_tokens) == ("5", None, None)


@pytest.mark.parametrize(
    "choices",
    [[None], ["5"], [[]], {"0": {}}, "none", [{"message": "5"}], [{"message": None}], [{"text": "5"}]],
)
def test_choices_of_another_shape_are_no_reply(choices):
    (reply,), _, _ = timed([(200, {"choices": choices})])
    assert reply.error.split(":")[0] in ("malformed reply", "empty response")

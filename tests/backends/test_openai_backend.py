"""Requests, replies and retries of the client of OpenAI-compatible servers; more faults in test_faults.py."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fault_server import chat, serving

from lemon_jax.backends import Message, OpenAIBackend, Request
from lemon_jax.backends.wire import seed_of

KEY = "sk-test-0123456789abcdef"
REQUEST = Request(model="m", messages=(Message(role="user", content="2+3?"),), max_tokens=8, stop=("\n",))
LONG = replace(REQUEST, messages=(Message(role="user", content="word " * 2000),))


def ask(steps, requests=(REQUEST,), **options):
    async def run(url):
        backend = OpenAIBackend(url + "/v1", "served", KEY, first_wait_s=0.01, **options)
        try:
            return {i: reply async for i, reply in backend.generate(requests)}
        finally:
            await backend.aclose()

    with serving(steps=list(steps)) as (url, state):
        replies = asyncio.run(run(url))
    return [replies[i] for i in range(len(requests))], state


def test_body_and_reply():
    (reply,), state = ask([chat("5")], extra_body={"cache_prompt": True})
    assert (reply.text, reply.finish, reply.prompt_tokens, reply.generated_tokens) == ("5", "stop", 7, 2)
    assert state["bodies"][0] == {
        "model": "served",
        "messages": [{"role": "user", "content": "2+3?"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "seed": seed_of(REQUEST),
        "stop": ["\n"],
        "cache_prompt": True,
        "stream": False,
    }
    assert state["headers"][0]["Authorization"] == f"Bearer {KEY}"


def test_sample_index_changes_seed_and_temperature():
    samples = [replace(REQUEST, temperature=0.7, sample_index=i) for i in range(3)]
    _, state = ask([chat()], samples)
    by_seed = {b["seed"]: b["temperature"] for b in state["bodies"]}
    assert by_seed == {seed_of(samples[0]): 0.0, seed_of(samples[1]): 0.7, seed_of(samples[2]): 0.7}
    assert all(0 <= seed < 2**31 for seed in by_seed)


@pytest.mark.parametrize(
    "step",
    [
        (500, b"oops"),
        (502, b"<html>bad gateway</html>"),
        (503, {"error": {"message": "loading model"}}),
        (408, b""),
        "reset",
        (200, b"<html>hello</html>"),
        (200, b'{"choices": [', {"X-Cut": "1"}),
        (200, {"error": {"message": "try later"}}),
        (200, {"choices": [{"finish_reason": "stop"}]}),
        (200, {"choices": []}),
        (200, {"id": "no choices at all"}),
    ],
)
def test_transient_faults_are_retried(step):
    (reply,), state = ask([step, chat("5")])
    assert (reply.finish, reply.text, len(state["bodies"])) == ("stop", "5", 2)


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_client_errors_are_not_retried_and_hide_the_key(status):
    (reply,), state = ask([(status, {"error": {"message": f"bad key {KEY} given, Bearer abc"}})])
    assert len(state["bodies"]) == 1
    assert reply.finish == "error"
    assert reply.error.startswith(f"HTTP {status}: ")
    assert KEY not in reply.error
    assert "abc" not in reply.error


def test_half_a_key_at_the_cut_is_hidden_too():
    (reply,), _ = ask([(400, ("x" * 190 + KEY).encode())])
    assert "sk-" not in reply.error


def test_attempts_end():
    (reply,), state = ask([(503, b"busy")])
    assert reply.error == "HTTP 503: busy"
    assert len(state["bodies"]) == 5


def test_empty_choices_are_retried_once():
    (reply,), state = ask([(200, {"choices": []})])
    assert reply.error.startswith("empty response")
    assert len(state["bodies"]) == 2


def test_connection_refused():
    async def run():
        backend = OpenAIBackend("http://127.0.0.1:9/v1", "m", first_wait_s=0.01)
        replies = [reply async for _, reply in backend.generate([REQUEST])]
        await backend.aclose()
        return replies

    (reply,) = asyncio.run(run())
    assert reply.error.startswith("cannot connect: ")


def test_silent_truncation_is_warned_of_once(caplog):
    with caplog.at_level(logging.WARNING):
        ask([chat(usage=(1000, 3))], [LONG, LONG])
        assert [("num_ctx" in r.message) for r in caplog.records] == [True]
        caplog.clear()
        ask([chat(usage=(2010, 3))], [LONG])
        assert not caplog.records


def test_reply_shapes():
    steps = [
        chat(None),
        chat(None, reasoning_content="thinking", finish="length"),
        chat("a\ud800b", usage=None),
        chat([{"type": "text", "text": "parts"}]),
        chat(None, finish="content_filter", refusal="no"),
    ]
    for step, expected in zip(
        steps,
        [("", "stop"), ("", "length"), ("a?b", "stop"), ("parts", "stop"), ("", "error")],
        strict=True,
    ):
        (reply,), _ = ask([step])
        assert (reply.text, reply.finish) == expected
    assert reply.error == "content filter: no"
    (reply,), _ = ask([chat("x", usage=None)])
    assert (reply.prompt_tokens, reply.generated_tokens) == (None, None)


def test_many_requests_each_index_once_and_bounded():
    requests = [replace(REQUEST, sample_index=i) for i in range(40)]
    replies, state = ask([chat("5", usage=(7, 2))], requests, max_concurrency=4)
    assert len(state["bodies"]) == 40
    assert sum(r.generated_tokens for r in replies) == 80


def test_identity_hides_the_password_and_tells_extras_apart():
    names = set()
    for extra in (None, {"top_k": 5}):
        backend = OpenAIBackend("http://user:secret@host:8000/v1", "m", extra_body=extra)
        assert "secret" not in backend.identity
        names.add(backend.identity)
        asyncio.run(backend.aclose())
    assert len(names) == 2

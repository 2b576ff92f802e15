"""A key reaches the server it is meant for, and nothing else: no log, store, error text or file."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from fault_server import chat, serving
from test_openai_backend import REQUEST

from lemon_jax.backends import OpenAIBackend, WorkerPool, parse_worker_file
from lemon_jax.backends.redaction import redact, secret_forms
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.runtime import Caller, CallStore, Executor, TextProblem
from lemon_jax.spec import baselines

KEY = "lm_A7/x+9q\"Zt'0Kd%4"  # with characters that JSON and URLs write otherwise
CAPACITIES = "".join(f'[capacities.{c}]\nmodel = "m"\nprice = 1\n' for c in ("small", "medium", "large"))


def forms(key=KEY):
    return {
        "plain": key,
        "json": json.dumps(key)[1:-1],
        "url": quote(key, safe=""),
        "url, lower case": re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), quote(key, safe="")),
        "header in base64": base64.b64encode(f"Bearer {key}".encode()).decode(),
        "base64": base64.b64encode(key.encode()).decode(),
        "header": f"Authorization: Bearer {key}",
        "spread": json.dumps({"a": [key, {"b": f"x{key}y"}]}),
    }


def echo(status, form):
    """A server that sends the header it was given back, within a text."""

    def step(state, body):
        key = state["headers"][-1]["Authorization"].removeprefix("Bearer ")
        text = f"Answer: 7. You sent {forms(key)[form]}!"
        return chat(text) if status == 200 else (status, text.encode())

    return step


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("status", [200, 401, 503])
def test_an_echoing_server_brings_the_key_nowhere(status, form, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("LEMON_TEST_KEY", KEY)
    path = tmp_path / "calls.sqlite"

    async def run(url):
        text = f'[models.m]\nbackend = "openai"\nbase_url = "{url}/v1"\nmodel = "x"\n'
        text += f'api_key_env = "LEMON_TEST_KEY"\n{CAPACITIES}'
        store = CallStore(path)
        try:
            async with WorkerPool(parse_worker_file(text, source="w.toml", folder=Path())) as pool:
                pool.backend("m")._first_wait_s = 0.001
                executor = Executor(Caller(pool, store), read_answer)
                return await executor.execute(baselines()["vanilla"], TextProblem(question="3 + 4?"))
        finally:
            store._db.execute("pragma wal_checkpoint(truncate)")
            store.close()

    with caplog.at_level(logging.DEBUG), serving(steps=[echo(status, form)]) as (url, state):
        execution = asyncio.run(run(url))
    assert {headers["Authorization"] for headers in state["headers"]} == {f"Bearer {KEY}"}
    assert execution.infra_failed == (status != 200)
    seen = {"execution": repr(execution), "log": caplog.text, "store": path.read_bytes().decode("latin-1")}
    for where, text in seen.items():
        assert not [name for name, secret in forms().items() if secret in text], where
        assert KEY[4:10] not in text, where
    if status == 200:
        assert execution.answer_text.startswith("Answer: 7. You sent")
        assert "[redacted]" in execution.answer_text
    else:
        assert f"HTTP {status}: Answer: 7. You sent" in execution.agents[0].note


def test_credentials_in_a_url_reach_no_error(caplog):
    async def ask(url):
        backend = OpenAIBackend(url.replace("//", "//someone:pa55-w0rd@") + "/v1", "m", first_wait_s=0.001)
        try:
            (reply,) = [reply async for _, reply in backend.generate([REQUEST])]
            return reply, backend.identity
        finally:
            await backend.aclose()

    def step(state, body):
        sent = state["headers"][-1]["Authorization"].removeprefix("Basic ")
        return 401, f"no {sent}, that is {base64.b64decode(sent).decode()}".encode()

    with caplog.at_level(logging.DEBUG), serving(steps=[step]) as (url, _):
        reply, identity = asyncio.run(ask(url))
        assert reply.error == "HTTP 401: no [redacted], that is [redacted]"
    refused, _ = asyncio.run(ask("http://127.0.0.1:9"))
    assert refused.error.startswith("cannot connect: ")
    for text in (reply.error, refused.error, identity):
        assert "pa55" not in text
        assert base64.b64encode(b"someone:pa55-w0rd").decode() not in text


def worker_file(url="http://h/v1", extra=""):
    return f'[models.m]\nbackend = "openai"\nbase_url = "{url}"\nmodel = "x"\n{extra}\n{CAPACITIES}'


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (worker_file("http://user:hunter2@h/v1"), "hunter2"),
        (worker_file("http://h/v1?api_key=hunter2"), "hunter2"),
        (worker_file("https://h/v1?x=1&access_token=hunter2&y=2"), "hunter2"),
        (worker_file(extra='api_key = "hunter2"'), "hunter2"),
        (worker_file(extra='api_key_env = "sk-hunter2hunter2"'), "hunter2"),
        (worker_file(extra='api_key_env = "hf_hunter2hunter2hunter2"'), "hunter2"),
        (worker_file(extra='api_key_env = "hunter2 hunter2"'), "hunter2"),
        (worker_file(extra='api_key_env = ["hunter2"]'), "hunter2"),
    ],
)
def test_a_key_in_the_worker_file_is_refused_and_not_shown(text, secret):
    with pytest.raises(LemonError) as e:
        parse_worker_file(text, source="w.toml", folder=Path())
    assert secret not in str(e.value)
    assert "models.m." in str(e.value)


@pytest.mark.parametrize("name", ["MY_KEY", "my_key", "OPENAI_API_KEY_2", "_K", "key1"])
def test_names_of_variables_are_names(name):
    config = parse_worker_file(worker_file(extra=f'api_key_env = "{name}"'), source="w.toml", folder=Path())
    assert config.models["m"].api_key_env == name


@pytest.mark.parametrize("key", ["hunter2\nhunter2", "hunter2 hunter2", "schlüssel-hunter2", "hunter2\x7f"])
def test_a_key_that_no_header_can_carry_is_named_and_not_shown(key, monkeypatch):
    monkeypatch.setenv("LEMON_TEST_KEY", key)

    async def use(check):
        text = worker_file(extra='api_key_env = "LEMON_TEST_KEY"')
        async with WorkerPool(parse_worker_file(text, source="w.toml", folder=Path())) as pool:
            await pool.check() if check else pool.backend("m")

    for check in (False, True):
        with pytest.raises(LemonError, match="LEMON_TEST_KEY holds no key: expected printable ASCII") as e:
            asyncio.run(use(check))
        assert "hunter2" not in str(e.value)


def test_words_that_are_no_keys_stay_in_replies():
    async def ask(url):
        backend = OpenAIBackend(url + "/v1", "m", api_key="EMPTY")
        try:
            (reply,) = [reply async for _, reply in backend.generate([REQUEST])]
            return reply
        finally:
            await backend.aclose()

    with serving(steps=[chat("The box is EMPTY. Bearer of news: sk-etch-book-1")]) as (url, _):
        assert asyncio.run(ask(url)).text == "The box is EMPTY. Bearer of news: sk-etch-book-1"


def test_redact():
    assert redact("a\n b\tBearer xyz c") == "a b [redacted] c"
    assert redact("http://u:p@h/ and sk-0123456789") == "http://[redacted]h/ and [redacted]"
    assert redact("GET /v1?api_key=abc&n=1 or ?Token=x") == "GET /v1?[redacted]&n=1 or ?[redacted]"
    assert redact("x" * 300) == "x" * 200
    for other in (
        "gsk_abcdefgh1",
        "hf_abcdefgh12",
        "AIzaSyA-1234567",
        "AKIAABCDEFGH",
        "eyJhbGciOi.eyJzdWIi.x-y",
    ):
        assert redact(f"provider key {other} is wrong") == "provider key [redacted] is wrong"
    assert redact("abcdef abc", secret_forms(["abc", "abcdef"])) == "[redacted] [redacted]"
    assert secret_forms(["", ""]) == ()

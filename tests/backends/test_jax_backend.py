"""Workers on JAX, from a worker file to replies, with a tiny model in a real GGUF file."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_gguf import CONFIG, NO_THOUGHTS, THINKING_TEMPLATE, write_tiny_gguf

from lemon_jax import compiled as compiled_module
from lemon_jax.backends import ExclusiveGate, Message, Request, WorkerPool, jax_backend, parse_worker_file
from lemon_jax.backends.jax_backend import JaxBackend
from lemon_jax.backends.jax_model import chat_ids, load_jax_model
from lemon_jax.errors import LemonError
from lemon_jax.model import load_pretrained
from lemon_jax.model.chat_template import ChatTemplate
from lemon_jax.model.families import places
from lemon_jax.model.pretrained_text import load_pretrained_text

WORKERS = """
[models.tiny]
backend = "jax"
path = "tiny.gguf"
slots = 3
context = 256
weights = "float32"

[capacities.small]
model = "tiny"
price = 1.0
max_tokens = 20
[capacities.medium]
model = "tiny"
price = 1.0
max_tokens = 20
[capacities.large]
model = "tiny"
price = 1.0
max_tokens = 20
"""
DURATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_tiny_gguf(folder / "tiny.gguf")
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def compiled():
    """Counts the programs that are compiled."""
    seen = []

    def count(event, duration, **_):
        if event == DURATION:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield seen
    jax.monitoring.unregister_event_duration_listener(count)


def pool(folder, **changes):
    text = WORKERS
    for key, value in changes.items():
        text = text.replace(f"{key} = {'3' if key == 'slots' else '256'}", f"{key} = {value}")
    return WorkerPool(parse_worker_file(text, source="test", folder=folder))


def request(text, **fields):
    system = Message(role="system", content="You add numbers. " * 8)  # two pages and a half of bytes
    return Request(
        model="tiny", messages=(system, Message(role="user", content=text)), **({"max_tokens": 12} | fields)
    )


async def answers(backend, requests):
    return {i: reply async for i, reply in backend.generate(requests)}


def core(reply):
    return reply.text, reply.finish, reply.prompt_tokens, reply.generated_tokens, reply.error


def mixture(count=14):
    rng = random.Random(0)
    return [
        request(
            "".join(chr(rng.randrange(32, 1000)) for _ in range(rng.randrange(1, 60))),
            max_tokens=rng.randrange(1, 20),
            stop=rng.choice([(), ("e",), (" ", "\n")]),
            temperature=rng.choice([0.0, 0.7, 1.5]),
            sample_index=i % 3,
        )
        for i in range(count)
    ]


def test_a_reply_is_the_same_alone_and_in_any_mixture_and_nothing_is_compiled_again(folder, compiled):
    requests = mixture()

    async def main():
        async with pool(folder) as workers:
            backend = workers.backend("tiny")
            assert backend.identity.startswith("jax:")
            assert backend.identity.endswith(":float32")
            alone = [core((await answers(backend, [r]))[0]) for r in requests[:1]]
            programs = len(compiled)
            assert programs
            alone += [core((await answers(backend, [r]))[0]) for r in requests[1:]]
            for seed in range(2):
                order = random.Random(seed).sample(range(len(requests)), len(requests))
                replies = await answers(backend, [requests[i] for i in order])
                assert [core(replies[order.index(i)]) for i in range(len(requests))] == alone
            assert len(compiled) == programs

        async with pool(folder) as workers:  # nothing of earlier prompts is known here
            replies = await answers(workers.backend("tiny"), requests)
            assert [core(replies[i]) for i in range(len(requests))] == alone
        assert len({text for text, *_ in alone}) > len(requests) // 2

    asyncio.run(main())


def test_replies_are_those_of_the_plain_decoder(folder):
    """Token by token with the whole sequence each time, the tokenizer and template of the model's own."""
    decoder, config = load_pretrained(folder / "tiny.gguf")
    text = load_pretrained_text(folder / "tiny.gguf", config.vocab_size)
    slots, mask = jnp.arange(256)[None], jnp.tril(jnp.ones((1, 256, 256), bool))
    logits = jax.jit(lambda ids: decoder.logits(decoder(ids, slots, mask)[0])[0])
    requests = [request(f"{i} and {i * i}") for i in range(4)]

    async def main():
        async with pool(folder) as workers:
            return await answers(workers.backend("tiny"), requests)

    for i, reply in asyncio.run(main()).items():
        chat = [{"role": m.role, "content": m.content} for m in requests[i].messages]
        prompt = text.tokenizer.encode_prompt(text.template.render(chat))
        ids, finish = list(prompt), "length"
        while len(ids) < len(prompt) + 12:
            padded = np.zeros((1, 256), np.int32)
            padded[0, : len(ids)] = ids
            ids.append(int(np.argmax(logits(jnp.asarray(padded))[len(ids) - 1])))
            if ids[-1] in text.tokenizer.eos_ids:
                finish = "stop"
                break
        drawn = ids[len(prompt) :]
        decode = text.tokenizer.decode
        # Bytes that begin a character without ending it are cut with what was cut.
        spelt = decode(drawn[:-1]) if finish == "stop" else decode(drawn).rstrip("\ufffd")
        assert core(reply) == (spelt, finish, len(prompt), len(drawn), None)


def test_a_chat_is_written_for_a_reply_at_once_also_where_no_system_message_may_be(folder):
    tokenizer = load_pretrained_text(folder / "tiny.gguf", 260).tokenizer
    messages = [Message(role="system", content="Add."), Message(role="user", content="2+3=?")]
    turns = ("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+3=?", "<|im_start|>user\nAdd.\n\n2+3=?")
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    for before, turn in zip(("", refusing), turns, strict=True):
        text = f"{turn}<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHTS}"
        template = ChatTemplate(before + THINKING_TEMPLATE)
        assert chat_ids(tokenizer, template, messages) == tokenizer.encode_prompt(text)


def test_a_prompt_longer_than_the_context_fails_as_it_does_at_a_server(folder):
    async def main():
        async with pool(folder) as workers:
            backend = workers.backend("tiny")
            return await answers(backend, [request("x" * 200), request("fits", max_tokens=500)])

    replies = asyncio.run(main())
    assert replies[0].finish == "overflow"
    assert replies[0].prompt_tokens >= 256
    assert replies[0].error.startswith("context overflow: ")
    assert replies[0].error.endswith("tokens where the context holds 256")
    # What fits is answered up to the end of the context, like a reply that is cut.
    assert replies[1].finish in ("length", "stop")
    assert replies[1].prompt_tokens + replies[1].generated_tokens <= 256


def test_cancelled_requests_give_their_slots_to_others(folder):
    async def main():
        async with pool(folder, slots=1) as workers:
            backend = workers.backend("tiny")
            await answers(backend, [request("warm", max_tokens=1)])
            engine = (await backend._model()).engine
            decode, may_step, waiting, steps = engine.decode, threading.Event(), threading.Event(), []

            def decode_when_told(*args):
                waiting.set()
                may_step.wait()
                steps.append(1)
                return decode(*args)

            engine.decode = decode_when_told
            task = asyncio.create_task(
                answers(backend, [request(f"long {i}", max_tokens=60) for i in range(5)])
            )
            await asyncio.to_thread(waiting.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            last = asyncio.create_task(answers(backend, [request("after", max_tokens=3)]))
            await asyncio.sleep(0.01)
            may_step.set()
            replies = await last
            assert replies[0].error is None
            assert len(steps) <= 4  # the step that was waited for, and those of the last request

            # Closing with a request in flight ends it too.
            may_step.clear()
            waiting.clear()
            task = asyncio.create_task(answers(backend, [request("open", max_tokens=60)]))
            await asyncio.to_thread(waiting.wait)
            closing = asyncio.create_task(backend.aclose())
            await asyncio.sleep(0.01)
            may_step.set()
            await closing
            assert not backend._thread.is_alive()
            assert (await task)[0].error == "LemonError: the worker pool was closed"
            with pytest.raises(LemonError, match="closed"):
                await answers(backend, [request("late")])

    asyncio.run(main())


@pytest.mark.parametrize("obeys", [True, False])
def test_closing_while_the_model_loads_does_not_wait_for_it(obeys, monkeypatch, caplog):
    monkeypatch.setattr(jax_backend, "_LONGEST_STOP_S", 30.0 if obeys else 0.1)
    loads, let_go = threading.Event(), threading.Event()

    def load(path, go_on):
        loads.set()
        while not let_go.wait(0.01):
            if obeys:
                go_on()
        raise LemonError("loaded to the end")

    async def main():
        backend = JaxBackend("tiny", lambda progress: None, load, "jax:0", ExclusiveGate())
        asked = [asyncio.create_task(answers(backend, [request(text)])) for text in "ab"]
        await asyncio.to_thread(loads.wait)
        asked[0].cancel()
        begin = time.monotonic()
        await backend.aclose()
        assert time.monotonic() - begin < 10
        assert backend._thread.is_alive() is not obeys
        let_go.set()
        with pytest.raises(LemonError, match="pool was closed" if obeys else "to the end"):
            await asked[1]
        with pytest.raises(LemonError, match="pool is closed"):
            await answers(backend, [request("late")])

    asyncio.run(main())
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_loading_may_end_before_each_of_its_parts(folder):
    def parts_until(end):
        parts = []

        def go_on():
            if len(parts) == end:
                raise LemonError("closed")
            parts.append(1)

        load_jax_model(folder / "tiny.gguf", slots=2, context=256, weights="float32", go_on=go_on)
        return len(parts)

    parts = parts_until(None)
    assert parts == 1 + len(places(CONFIG)) + 2  # the file, the tensors, two programs
    for end in (0, 1, parts - 1):
        with pytest.raises(LemonError, match="closed"):
            parts_until(end)


def test_a_file_that_is_no_model_is_one_clear_error(folder, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes((folder / "tiny.gguf").read_bytes()[:3000])

    async def main():
        async with pool(tmp_path) as workers:
            for _ in range(2):
                with pytest.raises(LemonError, match=r"tiny\.gguf"):
                    await answers(workers.backend("tiny"), [request("a"), request("b")])

    asyncio.run(main())


def test_a_step_that_fails_is_an_error_of_every_open_request(folder):
    async def main():
        async with pool(folder) as workers:
            backend = workers.backend("tiny")
            await answers(backend, [request("warm", max_tokens=1)])
            model = await backend._model()

            def fail(*_):
                raise RuntimeError("out of memory")

            model.engine.decode = fail
            for _ in range(2):
                replies = await answers(backend, [request("a"), request("b")])
                assert [reply.finish for reply in replies.values()] == ["error"] * 2
                assert {reply.error for reply in replies.values()} == {"RuntimeError: out of memory"}

    asyncio.run(main())


def test_compiled_steps_are_read_from_disk_the_next_time(folder, tmp_path, monkeypatch):
    hits = []
    monkeypatch.setattr(compiled_module, "LEAST_COMPILE_S", 0.0)

    def count(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(count)
    try:
        for round_ in range(2):
            jax.clear_caches()
            load_jax_model(folder / "tiny.gguf", slots=2, context=256, weights="float32")
            assert len(hits) >= 2 * round_
            assert jax.config.values["jax_compilation_cache_dir"] is None  # the process's own is as it was
    finally:
        jax.monitoring.unregister_event_listener(count)
    assert list((tmp_path / "cache" / "compiled").glob("*/jit_decode-*"))


def test_the_pool_knows_jax_workers_without_importing_jax():
    code = (
        "import sys; from lemon_jax.backends import WorkerPool, worker_config\n"
        "pool = WorkerPool(worker_config('jax'))\n"
        "assert pool.identity('small') == 'jax:1d9614638d18024d:bfloat16', pool.identity('small')\n"
        "assert 'jax' not in sys.modules and 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

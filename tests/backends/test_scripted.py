from __future__ import annotations

import asyncio
from dataclasses import replace

from lemon_jax.backends import Message, Request, ScriptedBackend, pseudo_worker

QUESTION = "Sam has 12 boxes with 6 pens each. How many pens are there?"


def request(system, user=QUESTION, model="scripted-large", **more):
    messages = (Message(role="system", content=system), Message(role="user", content=user))
    return Request(model=model, messages=messages, max_tokens=50, **more)


def collect(backend, requests):
    async def run():
        found = {i: reply async for i, reply in backend.generate(requests)}
        return [found[i] for i in range(len(requests))]

    return asyncio.run(run())


def test_replies_are_a_function_of_the_request():
    requests = [request("Solve.", sample_index=i) for i in range(30)]
    first, second = (collect(ScriptedBackend(), requests) for _ in range(2))
    assert first == second
    assert len({reply.text for reply in first}) > 1


def test_forms():
    assert set(pseudo_worker(request("Question: … Expression: …"))) <= set("0123456789+-*/ ")
    assert pseudo_worker(request("Write Python; end with answer = …")).startswith("answer = ")
    assert "Answer: " in pseudo_worker(request("Solve step by step."))
    options = QUESTION + "\nA) 18\nB) 72\nC) 6\nD) 2"
    assert pseudo_worker(request("Choose.", options))[-1] in "ABCD"


def test_larger_models_are_right_more_often():
    right = {}
    for model in ("scripted-small", "scripted-medium", "scripted-large"):
        texts = [pseudo_worker(request(f"Solve {i}.", model=model)) for i in range(200)]
        right[model] = sum(text.endswith("Answer: 72") for text in texts)
    assert right["scripted-small"] < right["scripted-medium"] < right["scripted-large"]


def test_tokens_stop_and_length():
    backend = ScriptedBackend(lambda r: "one two three\nfour")
    stopped, cut = collect(backend, [request("s", stop=("\n",)), replace(request("s", "u"), max_tokens=2)])
    assert (stopped.text, stopped.finish, stopped.generated_tokens) == ("one two three", "stop", 3)
    assert (cut.text, cut.finish, cut.prompt_tokens, cut.generated_tokens) == ("one two", "length", 2, 2)


def test_failures_are_a_fixed_fraction():
    requests = [request("s", sample_index=i) for i in range(400)]
    failed = [r.finish == "error" for r in collect(ScriptedBackend(failures=0.25), requests)]
    assert 60 < sum(failed) < 140
    assert failed == [r.finish == "error" for r in collect(ScriptedBackend(failures=0.25), requests)]


def test_stopping_early_cancels_the_rest():
    async def run():
        backend = ScriptedBackend(delay_s=0.01, max_concurrency=2)
        stream = backend.generate([request("s", sample_index=i) for i in range(100)])
        async for _ in stream:
            break
        await stream.aclose()
        return len(backend.calls)

    assert asyncio.run(run()) < 10

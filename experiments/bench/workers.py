"""Workers on JAX against the llama.cpp server, on the same model file: generated tokens a second, and memory.

    python experiments/bench/workers.py     # both models: 20 minutes for the server's setting, then 45
    python experiments/bench/workers.py --preset qwen2.5-coder-0.5b --settings 16 --rounds 1

64 requests are asked at once, greedily: prompts of 60 to 700 tokens, half of them beginning with one role's
prompt, and 16 to 200 new tokens. The server's setting is the one that is fastest on 24 such requests with an
eighth of the new tokens; then that one and JAX take turns, three rounds. Every run has a process of its own,
so that nothing of the last one is cached. Counted from the first request to the last reply, without start and
warm-up, which are shown beside it. CPU seconds and peak memory are those of the process that computes, the
memory with the files it maps; where the machine does other work too, CPU seconds say more than seconds.

Afterwards some of the requests are asked again, each alone: on JAX every reply must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from lemon_jax.backends import (
    PRESETS,
    Backend,
    EmbeddedBackend,
    ExclusiveGate,
    Message,
    OpenAIBackend,
    Request,
    WorkerPool,
    parse_worker_file,
    resolve_model,
)
from lemon_jax.backends.llama_server import KEY_VARIABLE, _params, die_with
from lemon_jax.bench.sample import generate
from lemon_jax.runtime.prompts import fixed_prefix

CONTEXT = 1024  # tokens of a request: 700 of prompt and 200 new ones fit
CHARACTERS = 3.2  # of a token, in these texts
ALONE = 3  # requests that are asked again, each alone
# What is tried of the llama.cpp server; the rest is as `embedded` has it.
# "shared" is the `embedded` backend itself, which lets slots read common beginnings from files.
SETTINGS: dict[str, dict[str, Any]] = {
    "8": {"slots": 8},
    "16": {"slots": 16},
    "32": {"slots": 32},
    "16-one-thread": {"slots": 16, "threads": 1},
    "16-plain-attention": {"slots": 16, "flash_attn_type": "DISABLED"},
    "16-shared": {"slots": 16},
}


def requests(count: int, seed: int, divisor: int = 1) -> list[Request]:
    """The mixture, the new tokens divided. Every other one begins with the prompt of `equation_writer`."""
    rng = random.Random(seed)
    tasks = iter(generate("number", max(12 * count, 200), seed))
    out = []
    for index in range(count):
        shared = index % 2 == 0
        system = fixed_prefix("equation_writer") if shared else "You are a patient tutor. "
        system += "Explain every step of the solution at length, in full sentences."
        low = max(60, int(len(system) / CHARACTERS) + 40)
        length = rng.randrange(low, 700) * CHARACTERS - len(system)
        question = ""
        while len(question) < length:
            question += f"{next(tasks).question}\n"
        question = question[: max(int(length), 40)]
        messages = (Message(role="system", content=system), Message(role="user", content=question))
        out.append(Request(model="m", messages=messages, max_tokens=rng.randrange(16, 201) // divisor))
    return out


async def ask(backend: Backend, wanted: list[Request], engine: Callable[[], int]) -> dict[str, Any]:
    """Seconds and tokens of answering all, asked at once, after one that starts the process `engine()`."""
    first = Request(model="m", messages=(Message(role="user", content="Hello"),), max_tokens=2)
    start = time.perf_counter()
    async for _, reply in backend.generate([first]):
        assert reply.error is None, reply.error
    pid = engine()
    start_s, started, cpu_started = time.perf_counter() - start, time.perf_counter(), cpu_s(pid)
    replies = {index: reply async for index, reply in backend.generate(wanted)}
    seconds, cpu_used = time.perf_counter() - started, cpu_s(pid) - cpu_started
    faults = [reply.error for reply in replies.values() if reply.error]
    assert not faults, faults
    again = range(0, len(wanted), -(-len(wanted) // ALONE))
    started = time.perf_counter()
    alone = {i: reply for i in again async for _, reply in backend.generate([wanted[i]])}
    alone_s = time.perf_counter() - started
    return {
        "start_s": start_s,
        "seconds": seconds,
        "cpu_s": cpu_used,
        "prompt_tokens": sum(reply.prompt_tokens or 0 for reply in replies.values()),
        "generated_tokens": sum(reply.generated_tokens or 0 for reply in replies.values()),
        "peak_mb": peak_mb(pid),
        "alone_tokens_s": sum(reply.generated_tokens or 0 for reply in alone.values()) / alone_s,
        "same_alone": [alone[i].text == replies[i].text for i in again],
    }


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb(pid: int) -> float:
    """The most memory a process has held, in MB (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


async def run_jax(options: Namespace) -> dict[str, Any]:
    """In a process of its own: the engine is in it."""
    model = f'[models.m]\nbackend = "jax"\npath = "{options.model}"\nslots = {options.slots}\n'
    model += f'context = {CONTEXT}\nweights = "{options.weights}"\n'
    levels = [f'[capacities.{level}]\nmodel = "m"\nprice = 1\n' for level in ("small", "medium", "large")]
    config = parse_worker_file(model + "".join(levels), source="bench", folder=Path())
    async with WorkerPool(config) as pool:
        result = await ask(pool.backend("m"), mixture(options), os.getpid)
        assert all(result["same_alone"]), "a reply depends on what else is in the batch"
        return result


def mixture(options: Namespace) -> list[Request]:
    return requests(options.requests, options.seed, options.divisor)


def server_pid(backend: EmbeddedBackend) -> int:
    assert backend._server is not None  # it has answered
    return backend._server.pid


async def run_embedded(options: Namespace, model: Path, slots: int) -> dict[str, Any]:
    """The `embedded` backend."""
    backend = EmbeddedBackend("m", lambda _: model, "m", ExclusiveGate(), slots=slots, context=CONTEXT)
    try:
        return await ask(backend, mixture(options), lambda: server_pid(backend))
    finally:
        await backend.aclose()


def run_llama(options: Namespace, model: Path, setting: str) -> dict[str, Any]:
    """A server in a child process, asked from this one."""
    if setting.endswith("shared"):
        return asyncio.run(run_embedded(options, model, SETTINGS[setting]["slots"]))
    key = secrets.token_hex(16)
    command = [
        sys.executable,
        __file__,
        "--serve",
        setting,
        "--model",
        str(model),
        "--parent",
        str(os.getpid()),
    ]
    started = time.perf_counter()
    environment = os.environ | {KEY_VARIABLE: key}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            loaded_s = time.perf_counter() - started

            async def asked() -> dict[str, Any]:
                backend = OpenAIBackend(
                    f"{address}/v1", "m", key, max_concurrency=options.requests, timeout_s=7200.0
                )
                try:
                    return await ask(backend, mixture(options), lambda: server.pid)
                finally:
                    await backend.aclose()

            result = asyncio.run(asked())
            result["start_s"] += loaded_s
            return result
        finally:
            server.kill()


def serve(options: Namespace) -> None:
    """The child process of `run_llama`: writes its address and serves until it is killed."""
    die_with(options.parent)
    import xllamacpp

    setting = dict(SETTINGS[options.serve])
    slots, threads = setting.pop("slots"), setting.pop("threads", len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        sizes = Namespace(
            model=str(options.model), slots=slots, ctx=CONTEXT, threads=threads, address_file=address
        )
        params = _params(xllamacpp.CommonParams(), sizes)
    params.cache_ram_mib = 1024  # nobody else keeps the prompts of a slot that is needed for another
    for name, value in setting.items():
        if name == "flash_attn_type":
            value = getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{value}")
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


def compare(options: Namespace, preset: str) -> None:
    """Choose the server's setting, run it and JAX in turn, and print a row for each."""
    console = Console(soft_wrap=True, width=120)  # the table is wider than a log is taken to be
    model = resolve_model(PRESETS[preset], lambda *_: None)
    servers = [f"llama.cpp {setting}" for setting in options.settings]
    if len(servers) > 1:
        small = Namespace(**vars(options) | {"requests": min(options.requests, 24), "divisor": 8})
        speed = {name: rate(run(small, preset, model, name)) for name in servers}
        servers = [max(servers, key=lambda name: speed[name])]
        print(f"{preset}: {servers[0]} is the fastest of {len(speed)} settings on a small load", flush=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for name in (f"jax {options.weights}", *servers):
            results.setdefault(name, []).append(run(options, preset, model, name))
    console.print(_table(preset, results))


def run(options: Namespace, preset: str, model: Path, name: str) -> dict[str, Any]:
    """One run of one engine; prints a line for the log."""
    if name.startswith("jax"):
        command = [sys.executable, __file__, "--engine", "--model", str(model)]
        for key in ("slots", "weights", "requests", "seed", "divisor"):
            command += [f"--{key}", str(getattr(options, key))]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
    else:
        result = run_llama(options, model, name.removeprefix("llama.cpp "))
    sizes = {"requests": options.requests, "divisor": options.divisor}
    print(json.dumps({"preset": preset, "engine": name} | sizes | result), flush=True)
    return result


def rate(result: dict[str, Any]) -> float:
    return result["generated_tokens"] / result["seconds"]


def _table(preset: str, results: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table("engine", title=f"{preset}: medians of {len(next(iter(results.values())))} (range)")
    columns = (
        "tok/s",
        "times the server",
        "s",
        "CPU s",
        "generated",
        "prompt",
        "start s",
        "peak MB",
        "alone tok/s",
    )
    for column in columns:
        table.add_column(column, justify="right")
    speed = {name: [rate(result) for result in runs] for name, runs in results.items()}
    best = max((median(speed[name]) for name in results if name.startswith("llama")), default=float("nan"))
    for name, runs in results.items():
        keys = (
            "seconds",
            "cpu_s",
            "generated_tokens",
            "prompt_tokens",
            "start_s",
            "peak_mb",
            "alone_tokens_s",
        )
        numbers = [f"{median([result[key] for result in runs]):.0f}" for key in keys]
        spread = f"{median(speed[name]):.1f} ({min(speed[name]):.1f} to {max(speed[name]):.1f})"
        table.add_row(name, spread, f"{median(speed[name]) / best:.2f}", *numbers)
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", action="append", choices=list(PRESETS), help="default: both")
    parser.add_argument(
        "--settings", action="append", choices=list(SETTINGS), help="of the server; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=32, help="of the engine on JAX")
    parser.add_argument("--weights", default="bfloat16", choices=["bfloat16", "float32"])
    # For the child processes.
    parser.add_argument("--divisor", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=list(SETTINGS), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.settings = options.settings or list(SETTINGS)
    if options.serve:
        serve(options)
    elif options.engine:
        print(json.dumps(asyncio.run(run_jax(options))))
    else:
        for preset in options.preset or PRESETS:
            compare(options, preset)
    return 0


if __name__ == "__main__":
    sys.exit(main())

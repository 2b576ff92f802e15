"""Real small models on a llama.cpp server that the run itself starts, watches and stops."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from lemon_jax.backends.concurrency import answer_all
from lemon_jax.backends.gate import ExclusiveGate
from lemon_jax.backends.gguf_header import read_gguf_header
from lemon_jax.backends.llama_server import KEY_VARIABLE, PROGRAM_VARIABLE, STATES
from lemon_jax.backends.model_files import Progress
from lemon_jax.backends.openai import OpenAIBackend
from lemon_jax.backends.server_folder import ServerFolder
from lemon_jax.backends.slot_prompts import Prefill, SlotPrompts, Waiting, prompt_text
from lemon_jax.backends.types import Reply, Request
from lemon_jax.backends.wire import REFUSED
from lemon_jax.errors import LemonError

_NO_THOUGHTS = {"enable_thinking": False}  # as `ChatTemplate.ask` says it, which workers on JAX go through
_STARTS = 3  # a server that keeps dying is reported instead of being started forever


class EmbeddedServer:
    """One llama.cpp server in a child process, from `start` until `stop`.

    `context` is in tokens of one slot; `threads` defaults to the cores this process may use.
    """

    def __init__(
        self,
        model: Path,
        *,
        slots: int,
        context: int,
        threads: int | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self._model = model
        self._slots = slots
        self._context = context
        self._threads = threads or _usable_cores()
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: ServerFolder | None = None
        self.api_key = secrets.token_hex(16)
        self.base_url = ""

    @property
    def alive(self) -> bool:
        """Whether the child process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The child process. Raises LemonError where there is none."""
        if self._process is None:
            raise LemonError(f"{self._model}: no llama.cpp server was started")
        return self._process.pid

    async def __aenter__(self) -> EmbeddedServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    async def start(self) -> None:
        """Start the child and wait until it answers.

        Raises:
            LemonError: the model file is damaged, the engine is missing, or the server does not come up.
        """
        read_gguf_header(self._model)
        check_engine()
        self._scratch = ServerFolder()
        folder = self._scratch.path
        try:
            self._process = self._spawn(folder)
            atexit.register(self.stop)
            await self._wait_healthy(folder)
        except BaseException as e:
            # The log is what explains a failed start, so it outlives it.
            self.stop(keep_log=isinstance(e, LemonError))
            raise

    def stop(self, keep_log: bool = False) -> None:
        """End the child; safe to call at any time and more than once."""
        atexit.unregister(self.stop)
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._scratch is not None:
            self._scratch.close(keep=keep_log)
        self._scratch = None

    @property
    def _folder(self) -> Path | None:
        return None if self._scratch is None else self._scratch.path

    async def save(self, slot: int, name: str) -> int:
        """Write the state of an idle slot to a file of this name; its bytes, 0 where that failed."""
        folder = self._folder
        if folder is None or not await self._slot_action(slot, "save", name):
            return 0
        try:
            return (folder / STATES / name).stat().st_size
        except OSError:
            return 0

    async def restore(self, slot: int, name: str) -> bool:
        """Read a state that was saved into an idle slot."""
        return await self._slot_action(slot, "restore", name)

    def remove(self, name: str) -> None:
        """Free the space of a state that was saved."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # gone with the folder, or never written
                (self._folder / STATES / name).unlink()

    async def _slot_action(self, slot: int, action: str, name: str) -> bool:
        """Whether the server did it. What fails here costs time, not replies: the slot computes anew."""
        address = f"{self.base_url.removesuffix('/v1')}/slots/{slot}?action={action}"
        key = {"Authorization": f"Bearer {self.api_key}"}
        try:
            # The server comes to it between two batches, and a batch of long prompts takes a while.
            async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
                response = await client.post(address, headers=key, json={"filename": name})
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    def _spawn(self, folder: Path) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "lemon_jax.backends.llama_server", "--model", str(self._model)),
            *("--address-file", str(folder / "address"), "--parent", str(os.getpid())),
            *("--slots", str(self._slots), "--ctx", str(self._context), "--threads", str(self._threads)),
        ]
        with (folder / "server.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {KEY_VARIABLE: self.api_key},
                # Ctrl-C is for this process, which then stops the child in order.
                start_new_session=True,
            )

    async def _wait_healthy(self, folder: Path) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            while time.monotonic() < deadline:
                if not self.alive:
                    raise LemonError(self._failure(folder, "the llama.cpp server ended while loading"))
                if (folder / "address").exists():
                    address = (folder / "address").read_text()
                    try:
                        if await self._is_ready(client, address):
                            self.base_url = address + "/v1"
                            return
                    except httpx.HTTPError:
                        pass
                await asyncio.sleep(0.1)
        raise LemonError(
            self._failure(folder, f"the llama.cpp server did not answer in {self._start_timeout_s:g} s")
        )

    async def _is_ready(self, client: httpx.AsyncClient, address: str) -> bool:
        """Whether this server has loaded its model, and no other one has its port: it wants this key."""
        if (await client.get(address + "/health")).status_code != 200:
            return False
        # llama.cpp answers /health and /v1/models without a key, /props only with it.
        keys: tuple[dict[str, str], ...] = ({}, {"Authorization": f"Bearer {self.api_key}"})
        statuses = [(await client.get(address + "/props", headers=key)).status_code for key in keys]
        return statuses == [401, 200]

    def _failure(self, folder: Path, what: str) -> str:
        log = folder / "server.log"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = f" ({lines[-1].strip()[:200]})" if lines else ""
        return f"{self._model}: {what}{last}; see {log}; is the file damaged, or the memory too small?"


class EmbeddedBackend:
    """A worker model on its own `EmbeddedServer`, which starts at the first request.

    `locate` returns the model file, downloading it if need be; it runs in a thread. With
    `deterministic` a reply never depends on other requests: one slot, no reuse of cached prompts.
    """

    def __init__(
        self,
        name: str,
        locate: Callable[[Progress], Path],
        identity: str,
        gate: ExclusiveGate,
        *,
        slots: int = 8,
        context: int = 2048,
        threads: int | None = None,
        deterministic: bool = False,
        on_progress: Progress | None = None,
    ) -> None:
        self.identity = identity
        self._name = name
        self._locate = locate
        self._gate = gate
        self._slots = 1 if deterministic else slots
        self._context = context
        self._threads = threads
        self._deterministic = deterministic
        self._on_progress = on_progress
        self._limit = asyncio.Semaphore(self._slots)
        self._starting = asyncio.Lock()
        self._server: EmbeddedServer | None = None
        self._client: OpenAIBackend | None = None
        self._prompts: SlotPrompts | None = None
        self._waiting = Waiting()
        self._retired: list[OpenAIBackend] = []
        self._starts = 0
        self._closed = False
        self._failed: LemonError | None = None

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Reply]]:
        """Yield `(index, reply)` as replies arrive.

        Raises:
            LemonError: the model cannot be had or the server cannot be started.
        """
        return answer_all(requests, self._answer, self._limit)

    async def aclose(self) -> None:
        """Stop the server."""
        self._closed = True
        self._retire()
        for client in self._retired:
            await client.aclose()
        self._retired.clear()

    async def _answer(self, request: Request) -> Reply:
        text = prompt_text(request)
        ticket = self._waiting.add(text)
        try:
            # Loading and warming up a model computes too, so it belongs inside the turn.
            async with self._gate.turn(self._name):
                client = await self._started()
                if self._prompts is None:
                    return await client.answer(request)

                async def prefill(slot: int) -> Prefill:
                    reply = await client.answer(replace(request, max_tokens=1), {"id_slot": slot})
                    if reply.error is None:
                        return "done"
                    return "refused" if REFUSED.match(reply.error) else "failed"

                async with self._prompts.slot_for(text, ticket, prefill) as slot:
                    return await client.answer(request, {"id_slot": slot})
        finally:
            self._waiting.leave(ticket)

    async def _started(self) -> OpenAIBackend:
        async with self._starting:
            if self._failed is not None:
                raise self._failed  # one clear failure, not one download attempt a request
            if self._closed:
                raise LemonError(f"models.{self._name}: the worker pool is closed")
            if self._client is None or self._server is None or not self._server.alive:
                try:
                    await self._start()
                except LemonError as e:
                    self._failed = e
                    raise
            assert self._client is not None
            return self._client

    async def _start(self) -> None:
        if self._starts == _STARTS:
            raise LemonError(
                f"models.{self._name}: the llama.cpp server died {_STARTS} times; use fewer slots?"
            )
        self._starts += 1
        self._retire()
        path = await self._find()
        server = EmbeddedServer(path, slots=self._slots, context=self._context, threads=self._threads)
        await server.start()
        self._server = server
        self._client = OpenAIBackend(
            server.base_url,
            self._name,
            server.api_key,
            self.identity,
            self._slots,
            extra_body={"cache_prompt": not self._deterministic, "chat_template_kwargs": _NO_THOUGHTS},
        )
        self._prompts = None if self._deterministic else SlotPrompts(server, self._slots, self._waiting)

    def _retire(self) -> None:
        if self._client is not None:
            # Requests to a server that died still hold its client; it is closed at the end.
            self._retired.append(self._client)
        if self._server is not None:
            self._server.stop()
        self._client = self._server = None

    async def _find(self) -> Path:
        """Run `locate` in a thread that ends soon after this task is cancelled."""
        cancelled = threading.Event()

        def progress(done: int, total: int, what: str) -> None:
            if cancelled.is_set():
                raise LemonError("the download was stopped")
            if self._on_progress:
                self._on_progress(done, total, f"{self._name}: {what}")

        try:
            return await asyncio.to_thread(self._locate, progress)
        except asyncio.CancelledError:
            cancelled.set()
            raise


def check_engine() -> None:
    """Find out whether there is a llama.cpp to start: the program that the user names, or the package.

    Raises:
        LemonError: the program cannot be run, or none is named and the package is not installed.
    """
    if program := os.environ.get(PROGRAM_VARIABLE, ""):
        if not (os.path.isfile(program) and os.access(program, os.X_OK)):
            raise LemonError(
                f"{PROGRAM_VARIABLE}: {program} is no program that can be run; name the llama-server of a "
                "llama.cpp that was built here, or unset the variable"
            )
    elif importlib.util.find_spec("xllamacpp") is None:
        raise LemonError(
            "the package xllamacpp is not installed; run `pip install xllamacpp`, name your own llama-server "
            f'in {PROGRAM_VARIABLE}, or use backend = "openai" in the worker file'
        )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

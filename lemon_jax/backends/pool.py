"""The backends of one worker file, opened when first used and closed together."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from lemon_jax.backends.download import resolve_model
from lemon_jax.backends.embedded import EmbeddedBackend, check_engine
from lemon_jax.backends.gate import ExclusiveGate
from lemon_jax.backends.gguf_header import read_gguf_header
from lemon_jax.backends.model_files import PRESETS, Progress, file_digest
from lemon_jax.backends.openai import OpenAIBackend, extras_of
from lemon_jax.backends.redaction import redact, secret_forms
from lemon_jax.backends.replay import ReplayBackend
from lemon_jax.backends.response_model import load_parameters
from lemon_jax.backends.scripted import ScriptedBackend
from lemon_jax.backends.server import is_local
from lemon_jax.backends.simulated import SimulatedBackend, World
from lemon_jax.backends.types import Backend, Message, Request
from lemon_jax.backends.wire import REFUSED, parse_json
from lemon_jax.backends.workers import CapacityConfig, ModelConfig, WorkerConfig
from lemon_jax.errors import LemonError

if TYPE_CHECKING:
    from lemon_jax.backends.engine_thread import ServedModel

log = logging.getLogger(__name__)
Locate = Callable[[Progress], Path]


class WorkerPool:
    """Async context manager over the backends that a worker file names.

    All models of a pool that run on this machine, embedded or on JAX, share one gate: they never compute at
    the same time. Simulated models can answer once the pool has a `world`: the tasks of the run.
    """

    def __init__(
        self, config: WorkerConfig, on_progress: Progress | None = None, *, world: World | None = None
    ) -> None:
        self.config = config
        self.world = world
        self._on_progress = on_progress
        self._gate = ExclusiveGate()
        self._backends: dict[str, Backend] = {}

    async def __aenter__(self) -> WorkerPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every backend, even if closing one fails."""
        failure: Exception | None = None
        while self._backends:
            _, backend = self._backends.popitem()
            try:
                await backend.aclose()
            except Exception as e:
                failure = e
        if failure is not None:
            raise failure

    def backend(self, model: str) -> Backend:
        """The backend of `[models.<model>]`.

        Raises:
            LemonError: its key's environment variable is not set, or its file cannot be read.
        """
        if model not in self._backends:
            self._backends[model] = self._open(self.config.models[model])
        return self._backends[model]

    def capacity(self, level: str) -> CapacityConfig:
        """The model, price, samples and limits of "small", "medium" or "large"."""
        return self.config.capacities[level]

    def identity(self, level: str) -> str:
        """The identity of the weights that answer at this capacity."""
        return self.backend(self.capacity(level).model).identity

    async def check(self) -> None:
        """Find out before a run whether its workers can be reached; downloads and starts nothing.

        Raises:
            LemonError: a server is unreachable or refuses the key or the model, a local file is unusable,
                or the embedded engine is not installed or cannot be run, simulated models have no tasks or
                no parameters.
        """
        for name in dict.fromkeys(c.model for c in self.config.capacities.values()):
            model = self.config.models[name]
            if model.backend == "openai":
                await self._check_servers(model)
            elif model.backend == "simulated":
                self.backend(name)  # reads its parameters
            elif model.backend in ("embedded", "jax"):
                if model.backend == "embedded":
                    self._check_engine(name)
                if model.path is not None:
                    read_gguf_header(model.path)

    def _check_engine(self, name: str) -> None:
        try:
            check_engine()
        except LemonError as e:
            raise LemonError(f"{self.config.source}: models.{name}: {e}") from None

    def _open(self, model: ModelConfig) -> Backend:
        if model.backend == "scripted":
            return ScriptedBackend(identity=f"scripted:1:{model.name}")
        if model.backend == "replay":
            return ReplayBackend(model.name, model.identity or "")
        if model.backend == "simulated":
            if self.world is None:
                raise LemonError(
                    f"{self.config.source}: models.{model.name}: simulated workers answer the tasks of a "
                    "bench only; use lemon eval or experiments/run.py, or other workers"
                )
            parameters = load_parameters(model.parameters)
            return SimulatedBackend(model.level, parameters, self.world, seed=model.seed)
        if model.backend == "openai":
            return self._open_openai(model, model.base_urls)
        locate, digest = self._model_file(model)
        open_it = self._open_jax if model.backend == "jax" else self._open_embedded
        return open_it(model, locate, digest)

    def _open_openai(
        self, model: ModelConfig, urls: Sequence[str], timeout_s: float = 300.0
    ) -> OpenAIBackend:
        # The same weights reply otherwise to other requests.
        identity = model.identity and model.identity + extras_of(model.extra_body, model.rename)
        return OpenAIBackend(
            urls,
            model.model,
            self._api_key(model),
            identity=identity,
            max_concurrency=model.slots,
            timeout_s=timeout_s,
            extra_body=model.extra_body,
            rename=model.rename,
        )

    def _open_embedded(self, model: ModelConfig, locate: Locate, digest: str) -> Backend:
        return EmbeddedBackend(
            model.name,
            locate,
            f"gguf:{digest[:16]}",
            self._gate,
            slots=model.slots,
            context=model.context,
            threads=model.threads,
            deterministic=model.deterministic,
            on_progress=self._on_progress,
        )

    def _open_jax(self, model: ModelConfig, locate: Locate, digest: str) -> Backend:
        from lemon_jax.backends.jax_backend import JaxBackend  # imports NumPy, which other runs do without

        def load(path: Path, go_on: Callable[[], None]) -> ServedModel:
            from lemon_jax.backends.jax_model import load_jax_model  # importing JAX takes seconds

            return load_jax_model(
                path, slots=model.slots, context=model.context, weights=model.weights, go_on=go_on
            )

        return JaxBackend(
            model.name,
            locate,
            load,
            f"jax:{digest[:16]}:{model.weights}",
            self._gate,
            slots=model.slots,
            on_progress=self._on_progress,
        )

    def _model_file(self, model: ModelConfig) -> tuple[Locate, str]:
        """What finds the file of a local model, and the file's digest."""
        if model.preset is not None:
            preset = PRESETS[model.preset]
            return partial(resolve_model, preset), preset.sha256
        path = model.path
        assert path is not None  # the worker file's check: path or preset
        try:
            return (lambda progress: path), file_digest(path)
        except OSError as e:
            raise LemonError(
                f"{self.config.source}: models.{model.name}.path: cannot read {path}: {e.strerror}"
            ) from None

    def _api_key(self, model: ModelConfig) -> str | None:
        if model.api_key_env is None:
            return None
        key = os.environ.get(model.api_key_env, "").strip()
        where = f"{self.config.source}: models.{model.name}.api_key_env: the environment variable "
        if not key:
            raise LemonError(f"{where}{model.api_key_env} is not set")
        if not (key.isascii() and key.isprintable()) or " " in key:
            # The key itself stays out of the message.
            raise LemonError(
                f"{where}{model.api_key_env} holds no key: expected printable ASCII without spaces; "
                "set it anew"
            )
        return key

    async def _check_servers(self, model: ModelConfig) -> None:
        """Ask every server of a model once. Those that are not there are named; one that is will do."""
        where = f"{self.config.source}: models.{model.name}.base_url: "
        key = self._api_key(model)
        checks = [_fault_of_server(url, key, model.api_key_env) for url in model.base_urls]
        faults = dict(zip(model.base_urls, await asyncio.gather(*checks), strict=True))
        if refused := [f"{url}: {fault}" for url, (fault, forever, _) in faults.items() if forever]:
            raise LemonError(where + "; ".join(refused))
        away = [f"{url}: {fault}" for url, (fault, *_) in faults.items() if fault]
        if len(away) == len(faults):
            raise LemonError(where + "; ".join(away))
        for text in away:
            log.warning("%s%s; the run begins without it", where, text)
        unlisted = {url: ids for url, (fault, _, ids) in faults.items() if not fault and ids}
        await asyncio.gather(*(self._check_model(model, url, ids) for url, ids in unlisted.items()))

    async def _check_model(self, model: ModelConfig, url: str, listed: list[str]) -> None:
        """Of a model that a server does not list, a short chat says whether it knows it by an alias."""
        if model.model in listed:
            return
        backend = self._open_openai(model, [url], timeout_s=60.0)
        try:
            hello = Request(model=model.model, messages=(Message(role="user", content="Hi"),), max_tokens=16)
            reply = await backend.answer(hello)
        finally:
            await backend.aclose()
        error = reply.error or ""
        if error.startswith("HTTP 4") and REFUSED.match(error):
            names = redact(", ".join(listed), secret_forms([self._api_key(model) or ""]), limit=300)
            raise LemonError(
                f"{self.config.source}: models.{model.name}.model: {url} refuses {model.model} "
                f"({error}); it lists {names}"
            )


async def _fault_of_server(url: str, key: str | None, key_name: str | None) -> tuple[str, bool, list[str]]:
    """What is wrong with a server, or "", whether waiting will not mend it, and the models it lists."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=10.0, trust_env=not is_local(url)) as client:
            response = await client.get(url.rstrip("/") + "/models", headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        fault = f"cannot reach the server ({type(e).__name__}); start it or correct the address"
        return fault, False, []
    if response.status_code in (401, 403):
        named = f"the key in {key_name}" if key else "requests without a key; set api_key_env"
        return f"the server refuses {named} (HTTP {response.status_code})", True, []
    if response.status_code >= 500:
        return f"the server is not ready (HTTP {response.status_code})", False, []
    # Any other reply comes from something that listens; not every server lists its models.
    return "", False, _listed(response.text)


def _listed(text: str) -> list[str]:
    """The ids in a server's list of models; none where it is no such list."""
    found = parse_json(text)
    rows = found.get("data") if isinstance(found, dict) else None
    ids = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [name for name in ids if isinstance(name, str)]

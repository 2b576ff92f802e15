"""The worker file (TOML): which model answers at which capacity, at which price.

A server behind `backend = "openai"` does not tell which weights it serves, so its calls are keyed by
its address and its name of the model. `identity` replaces that name: a recording or a call store made
with the same weights elsewhere then serves these calls too. Embedded models use
"gguf:" and the first 16 hex digits of the file's SHA-256, such as "gguf:1d9614638d18024d";
models of the backend "jax" use "jax:", these digits and the type of the weights.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from lemon_jax.backends.redaction import redact
from lemon_jax.backends.worker_keys import ADDRESS, BACKENDS, LEVELS, Faults, check_table, shown
from lemon_jax.errors import LemonError

# "replay" stands in no worker file: a replay makes its workers of a manifest.
BackendName = Literal["openai", "embedded", "jax", "scripted", "simulated", "replay"]
WeightType = Literal["bfloat16", "float32"]
SHIPPED = ("embedded", "jax", "scripted", "simulated")
MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One `[models.NAME]` table. Keys that the backend does not use keep their defaults."""

    name: str
    backend: BackendName
    base_urls: tuple[str, ...] = ()  # servers of the same weights; a file may give one as `base_url`
    model: str = ""  # the server's name of the model
    api_key_env: str | None = None  # the environment variable that holds the key, never the key
    identity: str | None = None  # which weights the server serves; None: its address and `model`
    # A server's own names of request parameters, None: it is sent none; and what else it is sent.
    rename: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)
    path: Path | None = None  # a local GGUF file; relative to the worker file
    preset: str | None = None
    slots: int = 8  # requests served at once; of `openai`, by each server
    context: int = 2048  # tokens of one slot
    threads: int | None = None  # None: the cores this process may use
    weights: WeightType = "bfloat16"  # type of the weights of a model on JAX
    deterministic: bool = False  # one slot and no prompt cache: no reply depends on another
    level: str = ""  # which level of the parameters a simulated model has
    parameters: Path | None = None  # of a simulated model; None: the shipped ones
    seed: int = 0  # of a simulated model's replies


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """One `[capacities.LEVEL]` table."""

    model: str
    price: float  # cost units for a generated token
    samples: int = 1
    temperature: float = 0.0  # of the samples after the first, which is greedy
    max_tokens: int = 512


@dataclass(frozen=True, kw_only=True)
class CostRates:
    """Weights of the three kinds of tokens in the cost of a call, before its price."""

    generated: float = 1.0
    prompt: float = 0.25
    fixed_prefix: float = 0.025  # prompt tokens of the role's fixed prefix, which servers cache


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """A checked worker file; `source` is its path or the name of a shipped one."""

    source: str
    models: dict[str, ModelConfig]
    capacities: dict[str, CapacityConfig]
    cost: CostRates


def worker_config(name_or_path: str) -> WorkerConfig:
    """The shipped worker file "embedded", "jax", "scripted" or "simulated", or the one at a path.

    Raises:
        LemonError: no such file, or its faults, all in one message.
    """
    if name_or_path in SHIPPED:
        text = (files("lemon_jax.backends") / "workers" / f"{name_or_path}.toml").read_text("utf-8")
        return parse_worker_file(text, source=name_or_path, folder=Path())
    return load_worker_file(Path(name_or_path))


def load_worker_file(path: Path) -> WorkerConfig:
    """Read and check a worker file. Raises: as `worker_config`."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise LemonError(f"{path}: larger than {MAX_BYTES} bytes, no worker file is; name another file")
        text = data.decode("utf-8")
    except OSError as e:
        raise LemonError(
            f"{path}: cannot read the worker file: {e.strerror}; "
            f"give a TOML file or one of {', '.join(SHIPPED)}"
        ) from None
    except UnicodeDecodeError as e:
        raise LemonError(f"{path}: not UTF-8 text at byte {e.start}; save the file as UTF-8") from None
    return parse_worker_file(text, source=str(path), folder=path.parent)


def parse_worker_file(text: str, *, source: str, folder: Path) -> WorkerConfig:
    """Check the text of a worker file; relative model paths start at `folder`.

    Raises:
        LemonError: every fault with its key, what was found and what was expected.
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # TOMLDecodeError is a ValueError; so is a number too long
        why = "nested too deeply" if isinstance(e, RecursionError) else redact(str(e))
        raise LemonError(f"{source}: not valid TOML: {why}") from None
    faults = Faults()
    faults.unknown("", data, ("models", "capacities", "cost"))
    tables = faults.tables("models", data)
    models = {
        name: model
        for name, table in tables.items()
        if (model := _model(name, table, folder, faults)) is not None
    }
    # A capacity may name a faulty model: that model's own fault is enough.
    capacities = _capacities(data, tables, models, faults)
    cost = check_table("cost", data.get("cost", {}), "cost", faults)
    faults.raise_any(source)
    return WorkerConfig(source=source, models=models, capacities=capacities, cost=CostRates(**cost))


def _model(name: str, table: Any, folder: Path, faults: Faults) -> ModelConfig | None:
    where = f"models.{name}"
    backend = table.get("backend") if isinstance(table, dict) else None
    if not isinstance(backend, str) or backend not in BACKENDS:
        faults.add(f"{where}.backend: found {shown(backend)}, expected one of {', '.join(BACKENDS)}")
        return None
    values = check_table(where, table, backend, faults)
    if backend in ("embedded", "jax") and ("path" in table) == ("preset" in table):
        faults.add(f"{where}: expected either path (a local GGUF file) or preset")
    if values.get("deterministic") and values.setdefault("slots", 1) != 1:
        faults.add(f"{where}.slots: found {values['slots']}, expected 1 with deterministic = true")
    for key in ("path", "parameters"):
        if key in values:
            try:
                values[key] = folder / Path(values[key]).expanduser()
            except RuntimeError as e:  # "~somebody/" of somebody unknown
                faults.add(f"{where}.{key}: found {shown(values.pop(key))}: {e}; expected a file")
    if backend == "openai":
        if ("base_url" in table) == ("base_urls" in table):
            faults.add(f"{where}.base_url: missing, expected {ADDRESS}, or base_urls, a list of such")
        one = values.pop("base_url", None)
        values["base_urls"] = (one,) if one else tuple(values.get("base_urls", ()))
        omitted = values.pop("omit", [])
        if both := [name for name in omitted if name in values.get("rename", {})]:
            faults.add(f"{where}.omit: found {shown(both)}, which rename has too; expected one of the two")
        values["rename"] = values.get("rename", {}) | dict.fromkeys(omitted)
        values.setdefault("slots", 16)  # a server for many users, not this machine's cores
    if backend == "jax":
        values.setdefault("slots", 32)  # a step of 32 slots takes little longer than one of 8
    return ModelConfig(**({"name": name} | values))


def _capacities(
    data: dict[str, Any], named: dict[str, Any], models: dict[str, ModelConfig], faults: Faults
) -> dict[str, CapacityConfig]:
    tables = faults.tables("capacities", data)
    faults.unknown("capacities", tables, LEVELS)
    capacities: dict[str, CapacityConfig] = {}
    for level in LEVELS:
        where = f"capacities.{level}"
        if level not in tables:
            faults.add(f"{where}: missing; all of {', '.join(LEVELS)} are needed")
            continue
        before = faults.count
        values = check_table(where, tables[level], "capacity", faults)
        name = values.get("model")
        if name is not None and name not in named:
            hint = faults.close(name, named)
            faults.add(f"{where}.model: found {shown(name)}, expected a name under [models]{hint}")
        if values.get("samples", 1) > 1 and values.get("temperature", 0.0) == 0.0:
            faults.add(f"{where}.temperature: expected above 0 with samples > 1: equal samples only cost")
        model = models.get(str(name))
        if model and model.backend in ("embedded", "jax") and values.get("max_tokens", 512) >= model.context:
            faults.add(
                f"{where}.max_tokens: expected below models.{name}.context = {model.context}, "
                "which also holds the prompt"
            )
        if model and model.backend == "simulated":
            _check_simulated(level, tables[level], model, capacities, models, faults)
        if faults.count == before:
            capacities[level] = CapacityConfig(**values)
    kinds = {models[capacity.model].backend for capacity in capacities.values() if capacity.model in models}
    if "simulated" in kinds and len(kinds) > 1:
        faults.add(f"capacities: found models of {' and '.join(sorted(kinds))}; simulated ones stand alone")
    return capacities


def _check_simulated(
    level: str,
    table: dict[str, Any],
    model: ModelConfig,
    earlier: dict[str, CapacityConfig],
    models: dict[str, ModelConfig],
    faults: Faults,
) -> None:
    """Note what has no effect on simulated workers, and levels that two capacities would share."""
    for key in ("samples", "temperature", "max_tokens"):
        if key in table:
            faults.add(f"capacities.{level}.{key}: has no effect on a simulated model; leave it out")
    for other, capacity in earlier.items():
        # Their replies would be one and the same draw.
        if models[capacity.model].level == model.level:
            faults.add(
                f"capacities.{level}.model: has the level {model.level}, as capacities.{other} has; "
                "expected one of its own"
            )

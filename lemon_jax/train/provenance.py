"""What a run was made of, as its manifest says it; nothing here imports JAX."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from lemon_jax import __version__
from lemon_jax.backends import PROGRAM_VARIABLE, WorkerPool
from lemon_jax.bench import Dataset
from lemon_jax.bench.sources import Protocol
from lemon_jax.train.config import RunConfig

SPLIT = "test"  # what is evaluated on


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of this package, of Python, and of `packages`."""
    out = {"lemon_jax": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            out[name] = "not installed"
    return out


def processor() -> str:
    """The family of the processor and its widest vectors, by which compiled arithmetic differs in its last
    bits; for example "x86_64 AuthenticAMD family 26, avx512"."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.split("\n"))
    }
    if "vendor_id" not in facts:  # not an x86
        return f"{platform.machine()} {platform.processor()}".strip()
    flags = facts.get("flags", "").split()
    widest = next((name for name in ("avx512f", "avx2", "avx") if name in flags), "sse")
    family = facts.get("cpu family", "unknown")
    return f"{platform.machine()} {facts['vendor_id']} family {family}, {widest.removesuffix('f')}"


def git_sha() -> str | None:
    """The commit that this code is checked out at; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None


def data_facts(datasets: Sequence[Dataset]) -> dict[str, Any]:
    """The files that a run read, and what is wrong in them; of several benches also for each of them."""
    each = {d.bench: {"source": d.source, "sha256": d.sha256, "faults": list(d.faults)} for d in datasets}
    return _joint(datasets, each) | {"faults": [fault for d in datasets for fault in d.faults]}


def tested(datasets: Sequence[Dataset]) -> dict[str, Any]:
    """What the evaluations of a summary are out of; of several benches also for each of them."""
    each = {d.bench: {"source": d.source, "n": len(d.test), "sha256": d.sha256} for d in datasets}
    return _joint(datasets, each) | {"split": SPLIT, "n": sum(len(d.test) for d in datasets)}


def _joint(datasets: Sequence[Dataset], each: dict[str, Any]) -> dict[str, Any]:
    """Source and digest of all: one bench's own; several are official if all of them are, and their digest
    covers theirs."""
    if len(datasets) == 1:
        return {"source": datasets[0].source, "sha256": datasets[0].sha256}
    digests = "".join(f"{d.sha256}  {d.bench}\n" for d in datasets)
    return {
        "source": "official" if all(d.source == "official" for d in datasets) else "sample",
        "sha256": hashlib.sha256(digests.encode()).hexdigest(),
        "benches": each,
    }


def policy_facts(config: RunConfig) -> dict[str, Any]:
    """What the manifest of a trained policy says for those who use it; see `used_otherwise` and
    `seen_in_training`."""
    fixed = {"fixed_choices": sorted(config.fixed)} if config.fixed else {}
    told = {"tell_prices": True} if config.tell_prices else {}
    return {"protocol": config.protocol, "constrained": config.constrained} | fixed | told


def used_otherwise(facts: Mapping[str, Any], config: RunConfig) -> list[str]:
    """In what a run uses a policy otherwise than it was trained, a line each, by its manifest.

    A run is its configuration alone, so the policy's manifest changes nothing of it.
    """
    found = []
    if facts.get("tell_prices") is True and not config.tell_prices:
        found.append("the policy was trained with prices told, and this run tells none; give --tell-prices")
    fixed = facts.get("fixed_choices")
    if isinstance(fixed, list) and (free := sorted({*map(str, fixed)} - config.fixed)):
        found.append(
            f"the policy was trained without the choice of {', '.join(free)}, and this run leaves that to "
            f'it; give fixed_choices = "{",".join(map(str, fixed))}" and constrained = true in a preset'
        )
    return found


def seen_in_training(
    facts: Mapping[str, Any], tested: Mapping[str, Dataset], load: Callable[[str, str], Dataset]
) -> list[str]:
    """Of which test tasks a policy has seen the questions in its training, or in that of a policy it was
    continued from: a line a bench and protocol, by its manifest.

    Splits differ by protocol: a policy trained under one may be tested on its own train tasks under another.

    Args:
        facts: the policy's manifest, of a trained policy or of a warm start; "full" is the protocol of one
            that does not say.
        load: the sets of a bench under a protocol.
    """
    trained: dict[str, set[str]] = {}  # benches, by protocol
    policy: Any = facts
    while isinstance(policy, Mapping):
        data, bench = policy.get("data"), policy.get("bench")
        names = set(data) if isinstance(data, dict) else set(str(bench).split(",")) if bench else set()
        trained.setdefault(str(policy.get("protocol", "full")), set()).update(names)
        policy = policy.get("continued_from")
    found = []
    for name, dataset in tested.items():
        for protocol, names in trained.items():
            if protocol not in get_args(Protocol) or protocol == dataset.protocol or name not in names:
                continue
            questions = {task.question for task in load(name, protocol).train}
            if seen := sum(task.question in questions for task in dataset.test):
                found.append(
                    f"{seen:,} of the {len(dataset.test):,} test tasks of {name} are train tasks of the "
                    f"{protocol} protocol, under which the policy was trained: they are no held-out ones"
                )
    return found


def worker_facts(pool: WorkerPool) -> dict[str, Any]:
    """The worker file, the weights behind each capacity, and what decides requests and costs."""
    capacities = pool.config.capacities
    return {
        "source": pool.config.source,
        "capacities": {level: capacity.model for level, capacity in capacities.items()},
        "identities": {level: pool.identity(level) for level in capacities},
        # Prices and samples decide rewards and requests as much as the weights do.
        "settings": {level: asdict(capacity) for level, capacity in capacities.items()},
        "cost": asdict(pool.config.cost),
    }


def engine_facts(pool: WorkerPool) -> dict[str, str]:
    """What computed embedded models when a run began; nothing where it has none.

    A key of the manifest's own: a run may go on with another engine, whose replies have the same keys.
    The version of the packaged engine is among `versions`.
    """
    models = {pool.config.models[capacity.model] for capacity in pool.config.capacities.values()}
    if not any(model.backend == "embedded" for model in models):
        return {}
    return {"engine": PROGRAM_VARIABLE if os.environ.get(PROGRAM_VARIABLE) else "packaged"}


def made_of(datasets: Sequence[Dataset], pool: WorkerPool, packages: Iterable[str]) -> dict[str, Any]:
    """What every manifest says beside its configuration: code, libraries, machine, data and workers."""
    return {
        "git_sha": git_sha(),
        "versions": versions(packages),
        "platform": platform.platform(),
        "processor": processor(),
        "data": data_facts(datasets),
        "workers": worker_facts(pool),
        **engine_facts(pool),
    }

"""The scripts of `experiments/`, run in this process or as a person runs them."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "experiments"))  # as Python does for a script: some share a module
SECONDS = 600  # far above what a child takes, so that a hanging one fails instead of blocking


def script(name: str) -> ModuleType:
    """`experiments/<name>.py` as a module."""
    path = ROOT / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"experiments_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


run_script = script("run")


def run_main(*argv: object) -> int:
    """main() of experiments/run.py, as it runs outside the tests' stricter JAX."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run_script.main([str(a) for a in argv])


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def offline(cache: Path) -> dict[str, str]:
    """Environment of a machine without data and network: every download is refused at once."""
    return {
        "LEMON_CACHE": str(cache),
        "LEMON_DATA_URL": f"http://127.0.0.1:{free_port()}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


def child_environment(cache: Path, compiled: Path) -> dict[str, str]:
    """`offline`, for a child with JAX as a user has it; programs compiled once are kept in `compiled`."""
    strict = ("JAX_", "XLA_", "LEMON_")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(strict)}
    return (
        plain
        | offline(cache)
        | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    )


def start(name: str, *argv: object, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    """`python experiments/<name>.py argv` in a process of its own."""
    command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *map(str, argv)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, **pipes | options)


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; every line must end and be an object."""
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    rows = [json.loads(line) for line in text[:-1].split("\n")]
    assert all(isinstance(row, dict) for row in rows)
    return rows


def contents(folder: Path, *, without: str = "cache") -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder (None), but for the one named `without`."""
    found = {}
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if relative.parts[0] != without:
            found[str(relative)] = path.read_bytes() if path.is_file() else None
    return found

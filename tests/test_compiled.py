"""Compiled programs on disk, after a process that was killed while it wrote one."""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from lemon_jax import compiled


def test_a_program_without_its_time_of_use_does_not_stop_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "LEAST_COMPILE_S", 0.0)
    with compiled.compilation_cache_on_disk():
        folder = Path(jax.config.values["jax_compilation_cache_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "left-cache").write_bytes(b"half a program")

    with warnings.catch_warnings(), compiled.compilation_cache_on_disk():
        warnings.simplefilter("error")
        jax.jit(lambda x: jnp.cumsum(x) * 3)(jnp.ones(7)).block_until_ready()

    assert (folder / "left-atime").stat().st_size == 8
    assert len(list(folder.glob("jit_*-cache"))) >= 1

"""Real GGUF files for tests, where this machine has them: in `LEMON_TEST_MODELS` or in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest

NAMES = {
    "qwen": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "smollm": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma": "gemma-3-270m-q4_k_m.gguf",
}


def real_model(name: str) -> Path:
    """The file of `NAMES[name]`; skips the test where there is none."""
    cache = Path(os.environ.get("LEMON_CACHE") or platformdirs.user_cache_dir("lemon_jax")) / "models"
    for folder in (Path(os.environ.get("LEMON_TEST_MODELS", cache)), cache):
        if (folder / NAMES[name]).is_file():
            return folder / NAMES[name]
    pytest.skip(f"no {NAMES[name]} in {cache} or LEMON_TEST_MODELS")

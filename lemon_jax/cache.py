"""Where this project keeps what it has fetched or compiled."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder(name: str) -> Path:
    """`$LEMON_CACHE/<name>`, or in the user's cache folder."""
    root = os.environ.get("LEMON_CACHE")
    return (Path(root).expanduser() if root else user_cache_path("lemon_jax")) / name

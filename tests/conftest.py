"""JAX as strict as it can be, before anything imports it; and array types checked at run time.

Only the environment is set here: tests of the parts that do not use JAX must not pay for importing it.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

install_import_hook("lemon_jax.model", "beartype.beartype")

# XLA maps memory for every program that it compiled, and at the kernel's limit of mappings (65,530 unless set
# otherwise) the next compilation is a segmentation fault.
MOST_MAPPINGS = 20_000


@pytest.fixture(autouse=True, scope="module")
def compiled_programs_make_room() -> Iterator[None]:
    """Drop the programs of the modules before, where there are very many."""
    yield
    maps, jax = Path("/proc/self/maps"), sys.modules.get("jax")
    if jax is not None and maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()

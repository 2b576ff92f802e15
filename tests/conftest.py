"""JAX as strict as it can be, before anything imports it; and array types checked at run time.

Only the environment is set here: tests of the parts that do not use JAX must not pay for importing it.
"""

import os

from jaxtyping import install_import_hook

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

install_import_hook("lemon_jax.model", "beartype.beartype")

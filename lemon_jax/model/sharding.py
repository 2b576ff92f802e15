"""Where arrays lie on a mesh (data, fsdp, tensor): one table of logical axes for all of them.

Rows of a batch are split over data and fsdp; parameters, their gradients and the optimiser's moments over
fsdp (each device gathers a layer when it needs it: Rajbhandari et al. 2020, ZeRO stage 3, arXiv 1910.02054)
and, by heads, hidden units and vocabulary, over tensor (Shoeybi et al. 2019, arXiv 1909.08053).

    # mesh (data 1, fsdp 4, tensor 2), layers.0.attention.q [3584, 28, 128]
    # In: ("embed", "heads", "head_dim")   Out: PartitionSpec("fsdp", "tensor", None)

Without a mesh nothing here has an effect: one device computes as if this module did not exist.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lemon_jax.errors import LemonError

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> the mesh axes that split it; an axis that is not here is never split.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

# Parameter -> the logical axes it reads from and those it writes to. A low-rank adapter of it is
# [*in, rank] (name_lora_a) and [rank, *out] (name_lora_b).
PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "embed": (("vocab",), ("embed",)),
    "head": (("vocab",), ("embed",)),
    "q": (("embed",), ("heads", "head_dim")),
    "k": (("embed",), ("kv_heads", "head_dim")),
    "v": (("embed",), ("kv_heads", "head_dim")),
    "o": (("heads", "head_dim"), ("embed",)),
    "q_bias": ((), ("heads", "head_dim")),
    "k_bias": ((), ("kv_heads", "head_dim")),
    "v_bias": ((), ("kv_heads", "head_dim")),
    "gate": (("embed",), ("mlp",)),
    "up": (("embed",), ("mlp",)),
    "down": (("mlp",), ("embed",)),
}
KV_CACHE = ("batch", "kv_heads", "slots", "head_dim")  # keys and values of a layer


def logical_axes(name: str, ndim: int) -> tuple[str, ...]:
    """The logical axes of a parameter by its dotted name ("layers.0.attention.q"), of its gradient, or of a
    moment of the optimiser, whose name ends like its parameter's.

    Vectors and scalars that the table does not hold (norms, counters) are not split. Raises LemonError for
    a larger array that it does not hold: unsplit, it would quietly cost every device its whole size.
    """
    last = name.removesuffix(".value").rpartition(".")[2]
    base, adapter, which = last.partition("_lora_")
    if base in PARAMETERS and (which in ("a", "b") or not adapter):
        inputs, outputs = PARAMETERS[base]
        axes = {"": (*inputs, *outputs), "a": (*inputs, "rank"), "b": ("rank", *outputs)}[which]
        if len(axes) == ndim:
            return axes
    if ndim < 2:
        return ("unsplit",) * ndim
    raise LemonError(
        f"parameter {name} with {ndim} axes is not in the table of lemon_jax/model/sharding.py; add its axes"
    )


def spec_of(axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """The partition of an array with these logical axes. `sizes` are those of the mesh (`Mesh.shape`).

    An axis that its devices do not divide stays whole: 4 key/value heads on a tensor axis of 8 lie on all.
    """
    parts: list[str | tuple[str, ...] | None] = []
    for axis, length in zip(axes, shape, strict=True):
        over = tuple(name for name in RULES.get(axis, ()) if sizes.get(name, 1) > 1)
        whole = not over or length % math.prod(sizes[name] for name in over)
        parts.append(None if whole else over[0] if len(over) == 1 else over)
    return PartitionSpec(*parts)


def param_spec(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """The partition of a parameter by its dotted name; `sizes` as in `spec_of`."""
    return spec_of(logical_axes(name, len(shape)), shape, sizes)


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for each leaf of parameters, gradients, an optimiser's state, or a tree of these;
    leaves need a shape only, so that `jax.eval_shape`'s will do."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, param_spec(_dotted(path), leaf.shape, mesh.shape)), tree
    )


def _dotted(path: tuple[Any, ...]) -> str:
    keys = (next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)) for k in path)
    return ".".join(map(str, keys))


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of these sizes over all devices, or over `devices`. Raises LemonError where they do not fit."""
    shape = (data, fsdp, tensor)
    there = list(jax.devices() if devices is None else devices)
    if min(shape) < 1 or math.prod(shape) != len(there):
        sizes = ",".join(f"{name}={size}" for name, size in zip(MESH_AXES, shape, strict=True))
        raise LemonError(
            f"mesh {sizes}: its sizes are positive and multiply to the number of devices, "
            f"which is {len(there)}; change --mesh"
        )
    # Flax modules and the compiler's propagation want Auto axes; make_mesh would make Explicit ones.
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=there)


def place(tree: Any, mesh: Mesh) -> Any:
    """Parameters or an optimiser's state, each host holding all of it, split over the mesh."""

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        # From the host, piece by piece: no device ever holds a whole array that it will not keep.
        whole = np.asarray(leaf)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])

    return jax.tree.map(put, tree, tree_shardings(tree, mesh))


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that the arrays of a tree are split over; None on a single device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def using(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it, `constrain` means the mesh that the arrays of this tree lie on."""
    mesh = mesh_of(tree)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def on_one_device() -> bool:
    """Whether a function is being traced outside of `using`, or for a mesh of one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.empty or mesh.size == 1)


def loops_over_layers() -> bool:
    """Whether scoring and update run the layers as a loop: on every mesh but that of several processes on
    CPUs. There a loop's collectives and later ones may start in another order on each process, and then all
    wait for each other."""
    return not on_one_device() and not (jax.process_count() > 1 and jax.default_backend() == "cpu")


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """The same array, split as its logical axes say, inside a jit-compiled function; see `using`.

    Unlike a parameter's, an activation's batch may be split unevenly: the compiler pads it.
    """
    if on_one_device():
        return x
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    if "batch" in axes:
        at = axes.index("batch")
        rounded = tuple(0 if i == at else n for i, n in enumerate(x.shape))  # 0 is a multiple of all
        return jax.lax.with_sharding_constraint(x, spec_of(axes, rounded, sizes))
    return jax.lax.with_sharding_constraint(x, spec_of(axes, x.shape, sizes))


def batch_shards() -> int:
    """Into how many parts the mesh splits a batch, inside a jit-compiled function; see `using`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(dict(mesh.shape).get(axis, 1) for axis in RULES["batch"])


def constrain_tree(tree: Any, *, stacked: bool = False) -> Any:
    """Parameters, gradients or an optimiser's state, kept split as the table says; see `using`. If `stacked`,
    an axis of layers comes before the others, and is not split."""
    if on_one_device():
        return tree
    sizes = dict(jax.sharding.get_abstract_mesh().shape)

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        spec = param_spec(_dotted(path), leaf.shape[stacked:], sizes)
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(None, *spec) if stacked else spec)

    return jax.tree_util.tree_map_with_path(one, tree)


def gathered(parameter: jax.Array, name: str) -> jax.Array:
    """A parameter, whole but for what the tensor axis splits, for a product with it; its gradient is split as
    the parameter is. Inside a jit-compiled function; see `using`.

    Said outright, because the compiler would else pass the pieces around while it multiplies, in as many
    small products as there are devices.
    """
    return parameter if on_one_device() else _gathered(parameter, name)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(parameter: jax.Array, name: str) -> jax.Array:
    sizes = dict(jax.sharding.get_abstract_mesh().shape) | {"fsdp": 1}
    return jax.lax.with_sharding_constraint(parameter, param_spec(name, parameter.shape, sizes))


def _scattered(name: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return (jax.lax.with_sharding_constraint(gradient, param_spec(name, gradient.shape, sizes)),)


_gathered.defvjp(lambda parameter, name: (_gathered(parameter, name), None), _scattered)


def on_host() -> contextlib.AbstractContextManager[Any]:
    """Within it new arrays lie in the host's memory, until `place` splits what no device could hold."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        return contextlib.nullcontext()


def fetch(tree: Any) -> Any:
    """The whole arrays as NumPy on this host, one after the other, wherever their parts lie.

    With many hosts all of them must call it.
    """

    def one(leaf: Any) -> np.ndarray:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return np.asarray(leaf)
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))

    return jax.tree.map(one, tree)

"""The programs of a training step on arrays that do not exist: shapes, where they lie, and FLOPs."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from hlo import dimensions
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lemon_jax.model import Decoder, DecoderConfig, completion_log_probs, sample
from lemon_jax.model.sharding import tree_shardings
from lemon_jax.model.stages import stage_ends
from lemon_jax.train.batch import UpdateBatch
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.update import SCORING_CHUNK, TrainState, cast, optimizer, update

PROGRAMS = ("sample", "score", "update")
EOS = (1,)  # any id will do


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step: `tasks` x `group` rollouts and `edits` edited specs of prompt + completion slots."""

    config: DecoderConfig
    tasks: int
    group: int
    edits: int
    prompt: int
    completion: int
    accumulate: int = 1
    remat: bool = True
    compute_dtype: Any = "bfloat16"

    @property
    def update_config(self) -> UpdateConfig:
        return UpdateConfig(compute_dtype=self.compute_dtype)

    @property
    def rollouts(self) -> int:
        return self.tasks * self.group

    def rows(self, program: str) -> int:
        """Rows that pass through the policy at once."""
        return -(-(self.rollouts + self.edits) // self.accumulate) if program == "update" else self.rollouts


def _abstract(tree: Any, mesh: Mesh | None) -> Any:
    """Shapes instead of arrays, placed as the table of logical axes says."""
    if mesh is None:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, tree_shardings(tree, mesh)
    )


def _array(mesh: Mesh | None, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())  # as arrays from the host are
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _update_batch(work: Workload, mesh: Mesh | None) -> UpdateBatch:
    rows, edits = -(-work.rollouts // work.accumulate), -(-work.edits // work.accumulate)
    sizes = {"B": rows, "K": edits, "P": work.prompt, "C": work.completion}
    floats = {"old_log_probs_BxC", "advantages_B", "contrast_K", "weight_K"}

    def field(name: str) -> jax.ShapeDtypeStruct:
        shape = tuple(sizes[axis] for axis in name.rpartition("_")[2].split("x"))
        shape = (work.accumulate, *shape) if work.accumulate > 1 else shape
        dtype = bool if name == "kept_B" else jnp.float32 if name in floats else jnp.int32
        return _array(mesh, shape, dtype)

    return UpdateBatch(**{name: field(name) for name in UpdateBatch._fields})


def _call(program: str, work: Workload, mesh: Mesh | None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A jit-compiled function with its abstract arguments and its static ones."""
    config = work.update_config
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(work.config, rngs=nnx.Rngs(0))))
    params = _abstract(params, mesh)
    computing = _abstract(jax.eval_shape(partial(cast, config=config), params), mesh)
    array = partial(_array, mesh)
    if program == "sample":
        key = jax.eval_shape(lambda: jax.random.key(0))
        prompts = array((work.tasks, work.prompt), jnp.int32), array((work.tasks,), jnp.int32)
        limits = {"group": work.group, "max_new": work.completion, "temperature": 0.7, "eos_ids": EOS}
        return sample, (nnx.merge(graph, computing), *prompts, key), limits
    if program == "score":
        score = partial(completion_log_probs, temperature=config.temperature, chunk=SCORING_CHUNK)
        rows, slots = work.rollouts, {"P": work.prompt, "C": work.completion}
        texts = [(array((rows, slots[s]), jnp.int32), array((rows,), jnp.int32)) for s in "PC"]
        return jax.jit(score), (nnx.merge(graph, computing), *texts[0], *texts[1]), {}
    moments = _abstract(jax.eval_shape(optimizer(config).init, params), mesh)
    state = TrainState(params=params, opt_state=moments)
    static = {"graph": graph, "config": config, "remat": work.remat}
    return update, (state, computing, _update_batch(work, mesh)), static


def lower(program: str, work: Workload, mesh: Mesh) -> Any:
    """One of PROGRAMS as the run calls it, lowered for the chips of the mesh."""
    function, arrays, static = _call(program, work, mesh)
    with jax.set_mesh(mesh):
        return function.lower(*arrays, **static)


def executed_flops(program: str, work: Workload, mesh: Mesh | None = None) -> float:
    """FLOPs of all matrix products that the program executes, on all chips of the mesh together,
    recomputation and padding included.

    Counted in its jaxpr, before it is split; loops by their length, those of sampling by the steps that they
    run where no row ends before its last slot.
    """
    function, arrays, static = _call(program, work, mesh)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return _flops(function.trace(*arrays, **static).jaxpr.jaxpr, work)


def stage_steps(work: Workload, slots: int) -> int:
    """The most steps of sampling with a cache of so many slots, prompt included: a step for each slot that
    this stage adds, but for the first token, which the prefill draws (`lemon_jax.model.stages`)."""
    ends = stage_ends(work.completion)
    stage = ends.index(slots - work.prompt)
    return ends[stage] - (ends[stage - 1] if stage else 1)


def open_trips(work: Workload, shape: str) -> float:
    """The most trips of a compiled loop without a constant bound, by the shape of what it carries: a stage of
    sampling on a mesh, where rows stay together. Unknown, nan, of any other."""
    ends = stage_ends(work.completion)
    slots = [sizes[2] for sizes in dimensions(shape) if len(sizes) == 4]
    return stage_steps(work, slots[0]) if slots and slots[0] - work.prompt in ends else math.nan


def _most_trips(loop: Any, work: Workload) -> int:
    """Of a `while` loop of sampling: a stage's steps, or the groups that one device takes its rows in."""
    batch, _, slots, _ = _cache_shape(loop)
    groups = [eqn for eqn in loop.params["body_jaxpr"].jaxpr.eqns if eqn.primitive.name == "while"]
    return -(-batch // _cache_shape(groups[0])[0]) if groups else stage_steps(work, slots)


def _cache_shape(loop: Any) -> tuple[int, ...]:
    """[B, K, S, E], as of nothing else that sampling carries through its loops."""
    return next(var.aval.shape for var in loop.outvars if len(var.aval.shape) == 4)


def _flops(jaxpr: Any, work: Workload) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "while":
            times = _most_trips(eqn, work)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * depth * math.prod(eqn.outvars[0].aval.shape)
        inner = [
            _flops(getattr(value, "jaxpr", value), work)
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
            if _is_jaxpr(value)
        ]
        # Of alternatives one runs: attention has its form for CPUs and, with all scores, that for the others.
        total += max(inner, default=0.0) if eqn.primitive.name == "cond" else times * sum(inner)
    return total


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")


def model_flops(program: str, work: Workload) -> float:
    """FLOPs that the mathematics asks for: 2 for each weight and token forward, twice that backward, and
    attention over all slots (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), in decoding over those
    written so far; the head for completion tokens alone."""
    c, slots = work.config, work.prompt + work.completion
    width = c.num_heads * c.head_dim
    layer = 2 * c.embed_dim * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.mlp_dim)
    head = 2 * c.vocab_size * c.embed_dim

    def attention(queries: float, keys: float) -> float:
        return 4 * width * queries * keys

    row = c.num_layers * (slots * layer + attention(slots, slots)) + work.completion * head
    if program == "score":
        return work.rollouts * row
    if program == "update":
        return 3 * (work.rollouts + work.edits) * row + work.rollouts * row  # and the reference
    prefill = c.num_layers * (work.prompt * layer + attention(work.prompt, work.prompt))
    written = work.prompt + work.completion / 2  # the mean of its steps
    decode = c.num_layers * (layer + attention(1, written)) + head
    return work.tasks * prefill + work.rollouts * (head + (work.completion - 1) * decode)

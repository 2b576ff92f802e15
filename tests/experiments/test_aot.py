"""Ahead-of-time proofs: what is counted in compiled programs, against slow counts; one real topology."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments" / "bench"))
import aot_programs
import hlo

from lemon_jax.model import PRESETS
from lemon_jax.model.sharding import make_mesh

PROGRAM = Path(hlo.__file__).with_name("aot.py")
TINY = aot_programs.Workload(config=PRESETS["tiny"], tasks=2, group=4, edits=8, prompt=32, completion=64)
needs_compiler = pytest.mark.skipif(
    not os.environ.get("LEMON_LIBTPU") and importlib.util.find_spec("libtpu") is None,
    reason="needs the TPU compiler, libtpu (docs/aot.md)",
)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules want it
        yield


def compiled_loop(trips):
    """A matrix split over 4 devices, gathered once for each trip of a loop."""
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    split, whole = (NamedSharding(mesh, PartitionSpec(axes)) for axes in ("fsdp", None))

    def step(x, _):
        gathered = jax.lax.with_sharding_constraint(x * 1.5, whole)
        return jax.lax.with_sharding_constraint(jnp.sin(gathered) @ gathered, split), None

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)
    return jax.jit(lambda x: jax.lax.scan(step, x, None, length=trips)[0]).lower(shape).compile().as_text()


@pytest.mark.parametrize("trips", [3, 7])
def test_collectives_of_a_loop_count_once_a_trip(trips):
    counted = hlo.traffic(compiled_loop(trips), 4)
    assert counted.received == {"all-gather": trips * 64 * 64 * 4 * 3 / 4}
    assert counted.memory > trips * 64 * 64 * 4


TEXT = """HloModule m
%cond (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%open (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %done = pred[] custom-call(%p)
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%p, %r)
}
%overlap.1 (a: bf16[4,16]) -> bf16[16,16] {
  %a = bf16[4,16]{1,0} parameter(0)
  ROOT %g.1 = bf16[16,16]{1,0} all-gather(%a), channel_id=2, replica_groups=mesh['x'=4,'y'=2] {'x'}
}
%overlap.2 (a: bf16[4,16]) -> bf16[16,16] {
  %a = bf16[4,16]{1,0} parameter(0)
  ROOT %g.2 = bf16[16,16]{1,0} all-gather(%a), channel_id=2, replica_groups=mesh['x'=4,'y'=2] {'x'}
}
ENTRY %main (a: bf16[4,16], x: (s32[], f32[8])) -> f32[2] {
  %a = bf16[4,16]{1,0} parameter(0)
  %x = (s32[], f32[8]{0}) parameter(1)
  %w = (s32[], f32[8]{0}) while(%x), condition=%cond, body=%body
  %v = (s32[], f32[8]{0}) while(%w), condition=%open, body=%body
  %f.1 = bf16[16,16]{1,0} fusion(%a), kind=kCustom, calls=%overlap.1
  %f.2 = bf16[16,16]{1,0} fusion(%a), kind=kCustom, calls=%overlap.2
  %c = (bf16[4,16]{1,0}, bf16[4,16]{1,0}, u32[]) collective-permute-start(%a), channel_id=3
  ROOT %s = f32[2]{0} reduce-scatter(%y), channel_id=4, replica_groups=[2,4]<=[8], to_apply=%add
}
"""


def test_a_counter_may_grow_by_more_than_one():
    counted = TEXT.replace("tuple(%p, %r)", "tuple(%next, %r)").replace(
        "  %r = f32[8]", "  %two = s32[] constant(2)\n  %next = s32[] add(%i, %two)\n  %r = f32[8]"
    )
    received = hlo.traffic(counted, 8, open_trips=lambda shape: 9).received
    assert received["all-reduce"] == (3 + 9) * 2 * 32 * 1 / 2


def test_kinds_groups_and_loops():
    received = hlo.traffic(TEXT, 8, open_trips=lambda shape: 9).received
    assert received == {
        "all-reduce": (5 + 9) * 2 * 32 * 1 / 2,  # pairs
        "all-gather": 512 * 3 / 4,  # one collective, overlapped with two fusions
        "collective-permute": 128,
        "reduce-scatter": 3 * 8,
    }


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[2,3]{1,0:T(8,128)(2,1)}", 12),
        ("(s32[4]{0}, pred[8]{0}, f8e4m3fn[16]{0})", 16 + 8 + 16),
        ("token[]", 0),
    ],
)
def test_size_of_a_shape(shape, size):
    assert hlo.size_of(shape) == size


def test_arrays_on_chip_are_no_memory_traffic():
    assert hlo.size_of("(f32[4]{0:T(128)S(1)}, f32[2]{0})", main_memory=True) == 8


FUSIONS = """HloModule m
%slice (p: f32[8,16], i: s32[]) -> f32[1,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[8,16]{1,0} bitcast(%p)
  ROOT %d = f32[1,16]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,16}
}
%update (p: f32[8,16], u: f32[1,16], i: s32[]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %u = f32[1,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[8,16]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}
%async_collective_fusion.1 (p: f32[16], g: bf16[16,16]) -> (f32[16], bf16[16,16]) {
  %p = f32[16]{0} parameter(0)
  %g = bf16[16,16]{1,0} parameter(1)
  %n = f32[16]{0} negate(%p)
  ROOT %t = (f32[16]{0}, bf16[16,16]{1,0}) tuple(%n, %g)
}
%rows (p: f32[8,16], i: s32[2]) -> f32[2,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %i = s32[2]{0} parameter(1)
  ROOT %g = f32[2,16]{1,0} gather(%p, %i), offset_dims={1}, slice_sizes={1,16}
}
ENTRY %main (stack: f32[8,16], x: f32[16], g: bf16[16,16], i: s32[]) -> f32[8,16] {
  %stack = f32[8,16]{1,0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %g = bf16[16,16]{1,0} parameter(2)
  %i = s32[] parameter(3)
  LINE
}
"""


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("ROOT %f = f32[1,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%slice", 64 + 4 + 64),
        ("ROOT %f = f32[2,16]{1,0} fusion(%stack, %i), kind=kLoop, calls=%rows", 128 + 4 + 128),
        ("ROOT %f = f32[8,16]{1,0} fusion(%stack, %x, %i), kind=kLoop, calls=%update", 64 + 4 + 64),
        # The buffer of a collective under way is handed through.
        (
            "ROOT %f = (f32[16]{0}, bf16[16,16]{1,0}) fusion(%x, %g), kind=kLoop, "
            "output_to_operand_aliasing={{1}: (1, {})}, calls=%async_collective_fusion.1",
            64 + 64,
        ),
    ],
)
def test_a_fusion_moves_what_it_reads_and_writes(line, moved):
    assert hlo.traffic(FUSIONS.replace("LINE", line), 4).memory == moved


def test_flops_of_programs_are_those_of_the_formula():
    """The formula, with what the program does beyond it."""
    head = 2 * TINY.config.vocab_size * TINY.config.embed_dim * TINY.completion
    rows = TINY.rollouts + TINY.edits
    score = aot_programs.model_flops("score", TINY)
    assert aot_programs.executed_flops("score", TINY) == score
    # The backward pass computes the logits anew.
    update = aot_programs.model_flops("update", TINY)
    without = aot_programs.Workload(**(vars(TINY) | {"remat": False}))
    assert aot_programs.executed_flops("update", without) == update + rows * head
    # With remat all of a block too, but for its last product, which no gradient needs.
    c = TINY.config
    down = c.num_layers * (TINY.prompt + TINY.completion) * 2 * c.embed_dim * c.mlp_dim
    forward = rows * (score / TINY.rollouts - head - down)
    assert aot_programs.executed_flops("update", TINY) == update + rows * head + forward


@pytest.mark.parametrize("program", ["score", "update"])
def test_flops_are_the_same_on_a_mesh(program):
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    assert aot_programs.executed_flops(program, TINY, mesh) == aot_programs.executed_flops(program, TINY)


def test_flops_are_those_that_xla_counts_without_loops():
    one = aot_programs.Workload(**(vars(TINY) | {"completion": 32}))  # one chunk of logits
    function, arrays, static = aot_programs._call("score", one, None)
    counted = function.lower(*arrays, **static).compile().cost_analysis()["flops"]
    # XLA adds the arithmetic between the products, which in so small a decoder is a sixth of all.
    assert 1.0 < counted / aot_programs.executed_flops("score", one) < 1.25


@pytest.mark.parametrize(
    ("fsdp", "tasks", "chunks"), [(1, 2, 4), (2, 2, 2), (4, 2, 1), (4, 16, 4), (4, 4, 2)]
)
def test_a_mesh_adds_up_the_heads_gradient_for_fewer_chunks(fsdp, tasks, chunks):
    """Of 64 steps on one device; on a mesh of 512 tokens a device, and of no more logits than one holds.
    There the layers are a loop too."""
    long = aot_programs.Workload(**(vars(TINY) | {"completion": 256, "tasks": tasks}))
    mesh = make_mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    function, arrays, static = aot_programs._call("score", long, mesh)
    with jax.set_mesh(mesh):
        jaxpr = function.trace(*arrays, **static).jaxpr.jaxpr
    # One device's scoring, which has a gradient of its own, is a call in the program.
    own = [e.params["call_jaxpr"].jaxpr for e in jaxpr.eqns if e.primitive.name == "custom_vjp_call"]
    eqns = [eqn for part in (jaxpr, *own) for eqn in part.eqns]
    loops = [eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan"]
    assert loops == [long.config.num_layers] * (fsdp > 1) + [chunks]


@pytest.mark.parametrize(
    ("fsdp", "rows"),
    [(2, [20, 20, 20]), (None, [20, 2 * 10, 3 * 8])],  # one device takes its rows in groups, of 8 or more
)
def test_each_stage_of_sampling_runs_its_own_steps(fsdp, rows):
    """By hand: 63, 64 and 72 steps with caches of 64, 128 and 200 completion slots after the prompts'."""
    work = aot_programs.Workload(**(vars(TINY) | {"group": 10, "completion": 200}))
    mesh = None if fsdp is None else make_mesh(fsdp=fsdp, devices=jax.devices()[:fsdp])
    c = work.config
    head = 2 * c.embed_dim * c.vocab_size
    projections = 2 * c.head_dim * (c.num_heads + c.num_kv_heads)  # q and o, k and v
    layer = 2 * c.embed_dim * (projections + 3 * c.mlp_dim)
    each_slot = 4 * c.num_heads * c.head_dim
    by_hand = 2 * 32 * c.num_layers * (layer + 32 * each_slot) + 20 * head  # the prompts, the first tokens
    for steps, slots, taken in zip((63, 64, 72), (64, 128, 200), rows, strict=True):
        by_hand += steps * taken * (head + c.num_layers * (layer + (32 + slots) * each_slot))
    assert aot_programs.executed_flops("sample", work, mesh) == by_hand
    # In the compiled program the loops are told apart by their caches.
    loops = [
        f"(s32[4]{{0}}, f32[16,200]{{1,0}}, bf16[4,2,{32 + slots},8]{{2,3,1,0:T(8,128)(2,1)}})"
        for slots in (64, 128, 200)
    ]
    assert [aot_programs.open_trips(work, loop) for loop in loops] == [63, 64, 72]
    assert math.isnan(aot_programs.open_trips(work, "(s32[], f32[8,2,96]{2,1,0})"))
    # The mathematics reads no slots that are still empty.
    assert 0.85 < aot_programs.model_flops("sample", work) / by_hand < 1


def aot(*arguments):
    command = [sys.executable, str(PROGRAM), "--policy", "tiny", *arguments]
    # Without the tests' stricter JAX.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ)


@needs_compiler
def test_the_update_compiles_for_a_tpu_slice():
    done = aot("--topology", "v5e:2x2", "--prompt", "32", "--completion", "32", "--programs", "update")
    assert done.returncode == 0, done.stderr
    assert "tiny on v5e:2x2 (4 chips, fsdp=4)" in done.stdout
    assert "collectives: all-gather" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "v9:2x2"], "expected one of v5e, v5p, v6e"),
        (["--topology", "v5e:two"], "expected sizes such as v5e:4x4"),
    ],
)
def test_faults_are_named(arguments, said):
    done = aot(*arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr

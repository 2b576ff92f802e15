"""Does a training step fit a TPU slice, and how fast can it be at best? Compiled here, without the TPU.

    python experiments/bench/aot.py --topology v5e:4x4 --policy qwen2.5-7b --mesh fsdp=16 --tasks 2 --group 8

Compiles the programs that a run executes (sampling, scoring, the update) for every chip of the topology with
the TPU compiler (libtpu, see docs/aot.md), which fails where one does not fit. Prints for each: bytes a chip,
bytes that arrive over the chip's links, FLOPs, and the roofline: no step is faster than its arithmetic at the
chip's peak, its memory traffic, or its communication, whichever is longest.

`--layers 2 4` compiles shallow copies and extrapolates to the policy's depth: minutes instead of an hour.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# Before JAX: no TPU is looked for, and the compiler's library keeps to itself. It writes the text of each
# program to a folder, since JAX 0.10.2 cannot read all that it makes for v5p.
os.environ.update(
    {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",  # no chip is opened, so nobody has to wait for another
        "JAX_PLATFORMS": "cpu",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={(TEXTS := tempfile.TemporaryDirectory(prefix='aot-')).name} "
        "--xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false --xla_jf_dump_llo_pass_label_regex=^none$",
    }
)
# Beside JAX, libtpu has every program look for a TPU; it may lie in a folder of its own instead.
if library := os.environ.get("LEMON_LIBTPU"):
    os.environ["TPU_LIBRARY_PATH"] = library

import jax
from aot_programs import PROGRAMS, Workload, executed_flops, lower, model_flops, open_trips
from chips import CHIPS, POLICIES, Chip
from hlo import Traffic, traffic
from jax.experimental import topologies
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from lemon_jax.errors import LemonError
from lemon_jax.model.sharding import make_mesh
from lemon_jax.train.config import ScaleConfig

GB = 1e9
DOUBLINGS = 5  # of the batch, at most


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One compiled program, per chip."""

    arguments: float  # bytes that stay: parameters, optimiser, reference
    temporaries: float  # bytes at the worst moment of the program
    received: float  # bytes over the links
    moved: float  # bytes between the chip and its memory, an estimate
    flops: float  # executed, recomputation included
    model_flops: float  # what the mathematics asks for
    compile_s: float
    kinds: tuple[tuple[str, float], ...]  # `received` by kind of collective

    @property
    def memory(self) -> float:
        return self.arguments + self.temporaries


def topology_mesh(name: str, scale: ScaleConfig) -> Mesh:
    """A mesh over the chips of a topology such as "v5e:4x4".

    Raises:
        LemonError: libtpu is not installed, or knows no such topology.
    """
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        advice = "give one such as v5e:4x4, v5p:2x2x2 or v6e:4x4"
        if "not installed" in reason:
            advice = "install the TPU compiler (docs/aot.md)"
        raise LemonError(f"--topology {name}: {reason:.200}; {advice}") from error
    return make_mesh(data=scale.data, fsdp=scale.fsdp, tensor=scale.tensor, devices=devices)


def measure(program: str, work: Workload, mesh: Mesh, keep: Path | None = None) -> Measured:
    """Compile one program of the workload; its text goes to the folder `keep`.

    Raises `jax.errors.JaxRuntimeError` where it does not fit.
    """
    start = time.perf_counter()
    compiled = lower(program, work, mesh).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    print(
        f"# {program}, {work.config.num_layers} layers: compiled in {seconds:.0f} s; a chip holds "
        f"{memory.argument_size_in_bytes / GB:.3f} GB of arguments, "
        f"{memory.temp_size_in_bytes / GB:.3f} GB of temporaries and "
        f"{memory.generated_code_size_in_bytes / GB:.3f} GB of code",
        flush=True,
    )
    text = _text()
    if keep is not None and text is not None:
        (keep / f"{program}-{work.config.num_layers}-layers-{work.rollouts}-rollouts.txt").write_text(text)
    moved = Traffic(received={"unknown": math.nan}, memory=math.nan)
    if text is not None:
        moved = traffic(text, mesh.size, open_trips=partial(open_trips, work))
    return Measured(
        arguments=memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        received=moved.collective,
        moved=moved.memory,
        flops=executed_flops(program, work, mesh) / mesh.size,
        model_flops=model_flops(program, work) / mesh.size,
        compile_s=seconds,
        kinds=tuple(sorted(moved.received.items())),
    )


def _text() -> str | None:
    """The text of the program compiled last; None, said on stderr, where the compiler wrote none."""
    files = sorted(Path(TEXTS.name).glob("*-hlo.txt"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        print("the compiler wrote no text of the program, so traffic is unknown", file=sys.stderr)
        return None
    text = files[-1].read_text(encoding="utf-8")
    for file in Path(TEXTS.name).iterdir():
        file.unlink()
    return text


def at_depth(
    program: str, work: Workload, mesh: Mesh, depths: Sequence[int], keep: Path | None = None
) -> Measured:
    """Measured at the policy's own depth, or extrapolated from two shallower ones: all but the head, the
    embedding and what happens once grows by the same amount with every layer."""
    if not depths:
        return measure(program, work, mesh, keep)
    full = work.config.num_layers
    low, high = sorted(depths)
    shallow = [replace(work, config=replace(work.config, num_layers=n)) for n in (low, high)]
    at = [measure(program, one, mesh, keep) for one in shallow]

    def line(a: float, b: float) -> float:
        return a + (b - a) / (high - low) * (full - low)

    kinds = [dict(m.kinds) for m in at]
    values = {
        name: line(getattr(at[0], name), getattr(at[1], name))
        for name in ("arguments", "temporaries", "received", "moved")
    }
    return Measured(
        **values,
        flops=executed_flops(program, work, mesh) / mesh.size,
        model_flops=model_flops(program, work) / mesh.size,
        compile_s=sum(m.compile_s for m in at),
        kinds=tuple((kind, line(kinds[0].get(kind, 0.0), kinds[1][kind])) for kind in sorted(kinds[1])),
    )


def bounds(m: Measured, chip: Chip) -> dict[str, float]:
    """The least seconds that arithmetic, memory and links need; without those that are unknown."""
    least = {
        "arithmetic": m.flops / chip.flops,
        "memory": m.moved / chip.hbm_bandwidth,
        "links": m.received / (chip.ici_bandwidth / 2),
    }
    return {name: seconds for name, seconds in least.items() if not math.isnan(seconds)}


def largest_batch(program: str, work: Workload, mesh: Mesh, console: Console) -> str:
    """The most rows that compiled, of the workload's (which do), twice, four times as many and so on.

    Not extrapolated: the worst moment of a program moves with the batch, so that memory is no line in it.
    """
    rows = work.rows(program)
    for _ in range(DOUBLINGS):
        work = replace(work, tasks=2 * work.tasks, edits=2 * work.edits)
        try:
            measure(program, work, mesh)
        except jax.errors.JaxRuntimeError as error:
            console.print(f"# {program}, {work.rows(program)} rows: does not compile: {str(error)[:400]}")
            return f"{rows}, not {work.rows(program)}"
        rows = work.rows(program)
    return f">= {rows}"


def report(console: Console, results: dict[str, tuple[Measured, str]], chip: Chip) -> None:
    """The tables."""
    head = ("program", "arguments", "temporaries", "of chip", "links", "TFLOP", "model TFLOP", "bound ms")
    table = Table(*head, "MFU bound", "rows that fit", "compile s", box=None)
    for program, (m, fits) in results.items():
        least = bounds(m, chip)
        by = max(least, key=lambda name: least[name])
        table.add_row(
            program,
            f"{m.arguments / GB:.2f} GB",
            f"{m.temporaries / GB:.2f} GB",
            f"{m.memory / chip.hbm:.0%}",
            _gigabytes(m.received),
            f"{m.flops / 1e12:.1f}",
            f"{m.model_flops / 1e12:.1f}",
            f"{1000 * least[by]:.0f} ({by})",
            f"{m.model_flops / chip.flops / least[by]:.0%}",
            fits,
            f"{m.compile_s:.0f}",
        )
    console.print(table)
    for program, (m, _) in results.items():
        parts = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in bounds(m, chip).items())
        kinds = (
            ", ".join(f"{kind} {_gigabytes(size)}" for kind, size in m.kinds if not math.isnan(size))
            or "none known"
        )
        console.print(f"{program}: {parts}; memory traffic {_gigabytes(m.moved)}; collectives: {kinds}")


def _gigabytes(size: float) -> str:
    return "unknown" if math.isnan(size) else f"{size / GB:.1f} GB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--topology", required=True, help="such as v5e:4x4, v5p:2x2x2 or v6e:8x8")
    add("--policy", default="qwen2.5-7b", choices=POLICIES, help="shape of the policy (qwen2.5-7b)")
    add("--mesh", metavar="SIZES", help="such as fsdp=8,tensor=2 (fsdp over all chips)")
    add("--tasks", type=int, default=2, help="tasks of a step (2)")
    add("--group", type=int, default=8, help="specs of a task (8)")
    add("--edits", type=int, help="counterfactual edits of a step (one a spec)")
    add("--prompt", type=int, default=256, help="prompt slots (256)")
    add("--completion", type=int, default=768, help="completion slots (768)")
    add("--accumulate", type=int, default=1, help="parts of an update's rollouts (1)")
    add("--no-remat", action="store_true", help="keep all activations for the backward pass")
    add("--compute-dtype", default="bfloat16", choices=["bfloat16", "float32"], help="(bfloat16)")
    add("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS, help="which (all)")
    add("--layers", type=int, nargs=2, metavar="N", help="compile these two depths and extrapolate")
    add("--batch", action="store_true", help="compile twice the tasks and more, until they do not fit")
    add("--keep", type=Path, metavar="DIR", help="a folder for the compiled programs' text")
    return parser


def run(args: argparse.Namespace) -> None:
    """Compile and print. Raises LemonError for a topology or a mesh that does not exist."""
    if args.batch and args.layers:
        raise LemonError("--batch tries what fits, with all layers; leave out --layers")
    family = args.topology.partition(":")[0]
    if family not in CHIPS:
        raise LemonError(f"--topology {args.topology}: expected one of {', '.join(CHIPS)}, then :AxB")
    mesh_text = args.mesh or f"fsdp={_chips(args.topology)}"
    mesh = topology_mesh(args.topology, ScaleConfig.of({}, mesh_text, {}))
    work = Workload(
        config=POLICIES[args.policy],
        tasks=args.tasks,
        group=args.group,
        edits=args.tasks * args.group if args.edits is None else args.edits,
        prompt=args.prompt,
        completion=args.completion,
        accumulate=args.accumulate,
        remat=not args.no_remat,
        compute_dtype=args.compute_dtype,
    )
    if args.compute_dtype == "float32":  # as `keep_float32` has it where there are chips
        jax.config.update("jax_default_matmul_precision", "highest")
    console = Console(soft_wrap=True, width=200)
    console.print(
        f"{args.policy} on {args.topology} ({mesh.size} chips, {mesh_text}): "
        f"{work.tasks} tasks x {work.group} specs, {work.edits} edits, "
        f"{work.prompt} + {work.completion} slots, accumulate {work.accumulate}, remat {work.remat}, "
        f"{work.compute_dtype}; jax {jax.__version__}"
        + (f"; extrapolated from {args.layers[0]} and {args.layers[1]} layers" if args.layers else "")
    )
    results: dict[str, tuple[Measured, str]] = {}
    for program in args.programs:
        m = at_depth(program, work, mesh, args.layers or (), args.keep)
        fits = "-"
        if args.batch:
            fits = largest_batch(program, work, mesh, console)
        results[program] = (m, fits)
    report(console, results, CHIPS[family])


def _chips(topology: str) -> int:
    sizes = topology.partition(":")[2].split("x")
    if not all(size.isdigit() for size in sizes):
        raise LemonError(f"--topology {topology}: expected sizes such as v5e:4x4")
    return math.prod(map(int, sizes))


def main(argv: list[str] | None = None) -> int:
    try:
        run(_parser().parse_args(argv))
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        print(f"does not compile: {str(error)[:2000]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The flags of the main job, and what they make of a preset or of the run that is resumed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemon_jax.train.config import RunConfig, ScaleConfig

PRESETS = Path(__file__).resolve().parent / "presets"
BENCHES = ("aqua", "gsm8k", "humaneval", "mmlu", "multiarith", "svamp")  # bench.SOURCES, not yet imported
COMPUTE_DTYPES = ("float32", "bfloat16")  # UpdateConfig's, not yet imported


def parse_arguments(argv: list[str] | None = None, description: str | None = None) -> argparse.Namespace:
    """The flags; `description` heads the help."""
    parser = argparse.ArgumentParser(
        description=description,
        # Wide enough for the longest flag, so that each is explained on its own line.
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--bench", metavar="NAME", help=f"{', '.join(BENCHES)}; A,B: mixed; all: in turn (required)")
    add("--eval-bench", metavar="NAMES", help="benches to test on (the trained ones)")
    add("--protocol", metavar="NAME", help="full, lemon or gdesigner: task sets, reading of answers (full)")
    add("--preset", default=None, metavar="NAME", help="default, full, paper, or a TOML file (default)")
    add(
        "--workers",
        default=None,
        metavar="WORKERS",
        help="embedded, jax, simulated, scripted, or a worker FILE.toml (embedded)",
    )
    add(
        "--policy",
        metavar="POLICY",
        help="policy: folder, name in checkpoints/, hub folder or .gguf (warmstart)",
    )
    add("--steps", type=int, metavar="N", help="steps; 0 evaluates only (default preset: 15, aqua 12)")
    add("--tasks-per-step", type=int, metavar="N", help="tasks a step (default preset: 4, aqua 2)")
    add("--group", type=int, metavar="N", help="specs a task (4)")
    add("--eval-tasks", type=int, metavar="N", help="held-out tasks (default preset: 100, aqua 40)")
    add("--baselines", metavar="NAMES", help="NAME[,NAME...], all or none (vanilla,cot,sc,chain,complete)")
    add("--best-fixed", action="store_true", help="also search and evaluate the best fixed spec (off)")
    add("--search-tokens", type=int, metavar="N", help="worker tokens of that search (as the training used)")
    add("--seed", type=int, metavar="N", help="seed of tasks, sampling and edits (0)")
    add("--out", type=Path, metavar="RUN_DIR", help="run directory (runs/<bench>-<preset>-s<seed>-<time>)")
    add("--resume", type=Path, default=None, metavar="RUN_DIR", help="continue a run that was stopped (off)")
    add("--replay", type=Path, metavar="FOLDER", help="repeat a shipped run from its recorded calls (off)")
    add("--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA, cache, download)")
    add("--tell-prices", action="store_true", help="the policy reads the capacities' prices (off)")
    add("--prices", metavar="S,M,L", help="prices of the evaluation (the worker file's)")
    add("--constrained", action="store_true", help="write valid specs only: docs/grammar.md (off)")
    add("--no-counterfactual", action="store_true", help="train by GRPO alone (off)")
    add("--fresh", action="store_true", help="ignore the shipped recordings of worker calls (off)")
    add("--accept-isolation", metavar="LEVEL", help="lowest for an answer's code (namespaces+seccomp)")
    add("--allow-unsandboxed", action="store_true", help="run programs without an isolating kernel (off)")
    add("--lora-rank", type=int, metavar="N", help="train low-rank adapters of rank N alone (0: all weights)")
    add("--lora-targets", metavar="NAMES", help="matrices that have adapters (q,k,v,o,gate,up,down)")
    add("--mesh", metavar="SIZES", help="devices, such as data=1,fsdp=8,tensor=1 (one; distributed: fsdp)")
    add("--accumulate", type=int, metavar="N", help="parts an update goes through the policy in (1)")
    add("--remat", action="store_true", help="recompute activations: less memory, more time (off)")
    add("--compute-dtype", metavar="DTYPE", help="float32, or bfloat16 with float32 weights (float32)")
    add("--checkpoint-dir", metavar="DIR", help="folder or gs:// address of them (RUN_DIR/checkpoints)")
    add("--grace", type=float, default=20.0, metavar="SECONDS", help="for a step's end after SIGTERM (20)")
    add("--distributed", action="store_true", help="one process of several, on many hosts (off)")
    add("--coordinator", metavar="HOST:PORT", help="of process 0 (found on TPU, Slurm, MPI, Kubernetes)")
    add("--num-processes", type=int, metavar="N", help="processes in all (found, as the coordinator)")
    add("--process-id", type=int, metavar="I", help="of this process, from 0 (found, as the coordinator)")
    return parser.parse_args(argv)


def config_of(args: argparse.Namespace) -> tuple[RunConfig, ScaleConfig, dict[str, Any] | None]:
    """What the run computes and how, and the manifest of the run that is resumed."""
    from lemon_jax.errors import LemonError
    from lemon_jax.train.config import RunConfig
    from lemon_jax.train.presets import check_counts, load_preset, without_counterfactuals
    from lemon_jax.train.run_dir import RunDir

    if not args.grace > 0:
        raise LemonError(f"--grace is {args.grace:g}, it must be above 0")
    names = ["workers", "policy", "steps", "tasks_per_step", "group", "eval_tasks", "seed"]
    names += ["baselines", "search_tokens", "protocol", "accept_isolation", "lora_rank", "lora_targets"]
    names += ["eval_bench"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    given |= {"best_fixed": True} if args.best_fixed else {}
    given |= {"constrained": True} if args.constrained else {}
    given |= {"tell_prices": True} if args.tell_prices else {}
    given |= {"prices": prices_of(args.prices)} if args.prices is not None else {}
    folder, flag = (args.resume, "--resume") if args.replay is None else (args.replay, "--replay")
    if folder is not None:
        given |= {"resume": True} if args.resume and args.replay else {}
        given |= {"out": True} if args.resume and args.out is not None else {}
        given |= {"fresh": True} if args.replay and args.fresh else {}
        given |= {k: getattr(args, k) for k in ("bench", "preset") if getattr(args, k) is not None}
        given |= {"no_counterfactual": True} if args.no_counterfactual else {}
        given |= {"compute_dtype": True} if args.compute_dtype is not None else {}
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise LemonError(f"{flag} takes all settings from the run's manifest; leave out {flags}")
        _, earlier = RunDir.open(folder)
        try:
            return RunConfig.from_dict(earlier["config"]), _scale(args, earlier.get("scale", {})), earlier
        except TypeError as error:
            raise LemonError(
                f"{folder / 'manifest.json'}: written by another version of this project ({error}); "
                f"{flag[2:]} it with that version"
            ) from error
    if args.bench is None:
        raise LemonError("--bench is missing; give --bench aqua, or another one, or all")
    name = args.preset or "default"
    preset = Path(name) if name.endswith(".toml") else PRESETS / f"{name}.toml"
    config = replace(load_preset(preset, args.bench), **given)
    if args.no_counterfactual:
        config = without_counterfactuals(config)
    elif "tasks_per_step" in given or "group" in given:
        # Fewer specs than the preset means to edit: every one of them is edited.
        most = max(config.specs_per_step * config.edits_per_rollout, 0)
        config = replace(config, edits_per_step=min(config.edits_per_step, most))
    if args.compute_dtype is not None:
        if args.compute_dtype not in COMPUTE_DTYPES:
            raise LemonError(
                f"--compute-dtype is {args.compute_dtype!r}, expected {' or '.join(COMPUTE_DTYPES)}"
            )
        config = replace(config, update=replace(config.update, compute_dtype=args.compute_dtype))
    check_counts(config)
    return config, _scale(args, {}), None


def prices_of(text: str) -> tuple[float, ...]:
    """A table of prices as a flag gives it; `check_counts` judges how many they are, and of what size.

    Raises LemonError for what are no numbers.
    """
    from lemon_jax.errors import LemonError

    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise LemonError(f"--prices is {text!r}, expected small, medium and large, such as 1,3,10") from None


def _scale(args: argparse.Namespace, earlier: dict[str, Any]) -> ScaleConfig:
    """How the run is computed: as the flags say, else as before, else on one device."""
    import jax

    from lemon_jax.train.config import ScaleConfig

    mesh = args.mesh
    if mesh is None and args.distributed and not earlier:
        mesh = f"fsdp={jax.device_count()}"
    given = {"accumulate": args.accumulate, "remat": args.remat or None}
    return ScaleConfig.of(earlier, mesh, given)

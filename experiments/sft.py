"""Train the tokenizer and the warm-started policy that `checkpoints/warmstart` ships.

    python experiments/sft.py --data DIR --steps 700 --batch 16 --out checkpoints/warmstart

About 25 minutes on 2 cores. Prompts are from the train splits of the benches, and problems this project
generates; specs come from the teacher, by default the sampler of lemon_jax/train/teacher.py.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx
from shipped import policy_origin

from lemon_jax.bench import SOURCES, Task, generate, load
from lemon_jax.errors import LemonError
from lemon_jax.model import PRESETS, Decoder, params_sha256, train_tokenizer
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.precision import keep_float32
from lemon_jax.spec import dump
from lemon_jax.train.llm_teacher import llm_specs
from lemon_jax.train.prices import random_prices, with_price_line
from lemon_jax.train.sft import SFTConfig, encode_examples, train
from lemon_jax.train.teacher import write_spec

TASKS = 420  # at most so many of a bench's train split, drawn with the seed
GENERATED = 420  # own problems of each kind, so that the policy does not only know benches


def main() -> int:
    args = _arguments()
    keep_float32()
    try:
        _run(args)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the benchmark files (default: as run.py)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("checkpoints/warmstart"), help="policy folder to write"
    )
    parser.add_argument(
        "--policy", choices=sorted(PRESETS), default="compact", help="decoder preset (compact)"
    )
    parser.add_argument("--steps", type=int, default=SFTConfig.steps, help=f"updates ({SFTConfig.steps})")
    parser.add_argument(
        "--batch", type=int, default=SFTConfig.batch, help=f"specs an update ({SFTConfig.batch})"
    )
    parser.add_argument(
        "--specs-per-bench",
        type=int,
        default=2520,
        help="teacher's specs for each bench and kind of problem, shared by its tasks (2520)",
    )
    parser.add_argument(
        "--init",
        type=Path,
        default=None,
        help="policy folder, hub folder or .gguf file to continue from, with its tokenizer (none)",
    )
    parser.add_argument(
        "--tell-prices",
        action="store_true",
        help="begin every other prompt with random prices, as run.py --tell-prices does with theirs (off)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=SFTConfig.learning_rate,
        help=f"peak learning rate ({SFTConfig.learning_rate})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of teacher, weights and order (0)")
    parser.add_argument(
        "--teacher",
        default="sampler",
        help="'sampler', or a worker file (or 'embedded') whose large capacity writes the specs (sampler)",
    )
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> None:
    start = time.monotonic()
    datasets = [load(bench, data_dir=args.data) for bench in SOURCES]
    for dataset in datasets:
        if dataset.banner:
            print(dataset.banner)
    rng = random.Random(f"tasks-{args.seed}")
    sources: list[Sequence[Task]] = [rng.sample(d.train, min(TASKS, len(d.train))) for d in datasets]
    sources += [generate("choice", GENERATED, args.seed), generate("number", GENERATED, args.seed)]
    tasks = [task for source in sources for task in source]
    pairs = _pairs(sources, args)
    print(f"{len(tasks)} tasks, {len(pairs)} specs")

    policy = Orchestrator.load(args.init) if args.init else _new_policy(args, tasks, pairs)
    sft = SFTConfig(steps=args.steps, batch=args.batch, seed=args.seed, learning_rate=args.learning_rate)
    losses: list[float] = []

    def on_step(step: int, loss: float) -> None:
        losses.append(loss)
        if step % 20 == 0 or step == args.steps - 1:
            spent = time.monotonic() - start
            print(f"step {step + 1:4d}/{args.steps}  loss {loss:.4f} nats/token  {spent:6.0f} s", flush=True)

    # An LLM's specs may be of any length; the sampler's must fit, or it is at fault.
    examples = encode_examples(policy, pairs, skip_long=args.teacher != "sampler")
    if len(examples) < len(pairs):
        print(f"{len(pairs) - len(examples)} specs skipped: longer than {policy.max_new} tokens")
    policy = train(policy, examples, sft, on_step)
    manifest = {
        "kind": "warm start",
        "command": _command(args),
        "preset": None if args.init else args.policy,
        "continued_from": policy_origin(args.init) if args.init else None,
        "seed": args.seed,
        "steps": args.steps,
        "batch": args.batch,
        "teacher": Path(args.teacher).name,
        "data": {d.bench: {"source": d.source, "split": "train", "sha256": d.sha256} for d in datasets},
        "final_loss": round(sum(losses[-20:]) / max(len(losses[-20:]), 1), 4),
        "jax": jax.__version__,
    }
    policy.save(args.out, manifest)
    # What is shipped is the rounded policy, so its digest is that of the file read back.
    manifest |= {
        "params_sha256": params_sha256(Orchestrator.load(args.out).decoder),
        "minutes": round((time.monotonic() - start) / 60, 1),
    }
    policy.save(args.out, manifest)
    print(f"{args.out}: policy written; python experiments/validity.py --policy {args.out} examines it")


def _command(args: argparse.Namespace) -> str:
    """How to do it again: the command line, with names in place of this machine's folders."""
    words = ["python experiments/sft.py"]
    for name in ("policy", "steps", "batch", "specs_per_bench", "learning_rate", "seed"):
        words.append(f"--{name.replace('_', '-')} {getattr(args, name)}")
    if args.init:
        words.append(f"--init {args.init.resolve().name}")
    words += ["--tell-prices"] if args.tell_prices else []
    return " ".join([*words, f"--teacher {Path(args.teacher).name}"])


def _new_policy(args: argparse.Namespace, tasks: list[Task], pairs: list[tuple[str, str]]) -> Orchestrator:
    """A random decoder of the preset, with a tokenizer trained on these tasks and specs."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [t.prompt() for t in tasks] + [spec for _, spec in pairs]
        texts += [with_price_line("", random_prices(random.Random(args.seed)))] if args.tell_prices else []
        tokenizer = train_tokenizer(texts, Path(folder) / "tokenizer.model", PRESETS[args.policy].vocab_size)
    config = replace(PRESETS[args.policy], vocab_size=tokenizer.vocab_size)
    decoder = Decoder(config, rngs=nnx.Rngs(args.seed))
    return Orchestrator(decoder, config, tokenizer, max_prompt=192, max_new=256)


def _pairs(sources: Sequence[Sequence[Task]], args: argparse.Namespace) -> list[tuple[str, str]]:
    """(task text, spec text): of each source about as many, whether it has 40 tasks or 420."""
    rng = random.Random(f"teacher-{args.seed}")
    prices = random.Random(f"prices-{args.seed}")
    pairs = []
    for tasks in sources:
        per_task = math.ceil(args.specs_per_bench / len(tasks))
        if args.teacher == "sampler":
            specs = [
                (t, write_spec(t.question, t.options, rng, family=t.family))
                for t in tasks
                for _ in range(per_task)
            ]
        else:
            specs = asyncio.run(llm_specs(tasks, args.teacher, per_task=per_task))
        texts = [task.prompt() for task, _ in specs]
        if args.tell_prices:  # not all, so that the policy writes specs without the line too
            texts[::2] = [with_price_line(text, random_prices(prices)) for text in texts[::2]]
        pairs += [(text, dump(spec)) for text, (_, spec) in zip(texts, specs, strict=True)]
    return pairs


if __name__ == "__main__":
    sys.exit(main())

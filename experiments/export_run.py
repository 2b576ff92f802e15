"""Export a finished run as checkpoints/<bench>, from where anyone replays it without a worker model.

    python experiments/export_run.py runs/multiarith-default-s0-...
    python experiments/run.py --replay checkpoints/multiarith

Written are the run's manifest, metrics and summary, the specs of its executions with what came of them, its
worker calls, and the trained policy in bfloat16. Calls hold keys (hashes) and replies, not the text of a
task, of which a coder's reply often repeats signature, docstring and examples. Calls of an earlier export
that this run did not ask for go to checkpoints/recordings, where they still serve other runs of the bench;
no call is stored twice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from replay import kept
from shipped import CALLS, CHECKPOINTS, EXECUTIONS, POLICY, TRAINED, other_calls, recorded_calls, write_rows

from lemon_jax.errors import LemonError
from lemon_jax.model import pack_weights, params_sha256
from lemon_jax.orchestrator import WEIGHTS_FILE, Orchestrator, read_manifest
from lemon_jax.runtime import CallStore, write_recording
from lemon_jax.train.run_dir import EXECUTIONS as ALL_EXECUTIONS
from lemon_jax.train.run_dir import MANIFEST, METRICS, SUMMARY, RunDir

MIB = 1 << 20
MOST, MOST_IN_ALL = 20 * MIB, 100 * MIB


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a finished run of experiments/run.py")
    parser.add_argument(
        "--out", type=Path, default=CHECKPOINTS, help="folder of replayable runs (checkpoints)"
    )
    args = parser.parse_args(argv)
    try:
        run, manifest = RunDir.open(args.run)
        check(run, manifest, args.out)
        folder = export(run, manifest, args.out)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{folder}: {_size(folder) / MIB:.1f} MiB; {args.out} in all {_size(args.out) / MIB:.1f} MiB")
    print(f"python experiments/run.py --replay {folder}")
    if _size(folder) > MOST or _size(args.out) > MOST_IN_ALL:
        print("error: more than 20 MiB, or 100 in all; export a smaller run", file=sys.stderr)
        return 1
    return 0


def check(run: RunDir, manifest: dict[str, Any], out: Path) -> None:
    """Raises LemonError for a run that nobody could replay from what is exported."""
    config = manifest["config"]
    if not (run.path / SUMMARY).exists():
        raise LemonError(f"{run.path}: the run has not ended; go on with --resume {run.path}")
    results = run.read_json(SUMMARY)
    if results.get("simulated"):
        raise LemonError(
            f"{run.path}: simulated workers repeat without a recording; export a run of real ones"
        )
    # Of all phases; with dynamic sampling also those that were executed again, and then did not fail.
    failed = sum(row["infra_failed"] for row in run.read(ALL_EXECUTIONS))
    failed += sum(row.get("rounds_infra_failed", 0) for row in run.read(METRICS))
    if failed:
        raise LemonError(
            f"{run.path}: {failed} executions failed on a server, which no recording repeats; export its "
            "calls by export_recording.py, then run it again: only calls that failed are asked anew"
        )
    if config["eval_bench"] or "," in config["bench"]:
        raise LemonError(
            f"{run.path}: a run of several benches has no folder of its own; export a run of one bench"
        )
    if any(row.get("unmetered_calls") for row in results["eval"]):
        raise LemonError(
            f"{run.path}: its server did not count tokens, which a replay would have to ask it for again; "
            "export a run whose workers count theirs"
        )
    start = out / config["policy"]
    if Path(config["policy"]).is_absolute() or (out / config["bench"]).resolve() in start.resolve().parents:
        raise LemonError(
            f"{run.path}: it began with the policy {config['policy']}, which is this machine's own or would "
            f"be replaced; a replay begins with the name of another policy in {out}"
        )
    inside = start.is_dir() and out.resolve() in start.resolve().parents
    digest = read_manifest(start).get("params_sha256") if inside else None
    if digest != manifest["policy_sha256"]:
        raise LemonError(
            f"{run.path}: it began with the policy {config['policy']}, which {out} does not hold as it was; "
            "a replay begins with a policy that is shipped"
        )


def export(run: RunDir, manifest: dict[str, Any], out: Path) -> Path:
    """Write the replayable run; returns its folder."""
    bench = manifest["config"]["bench"]
    folder = out / bench
    known = recorded_calls(bench, out)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    store = CallStore(run.calls)
    own = store.replies()
    store.close()
    write_recording(folder / CALLS, own)
    others, path = {key: reply for key, reply in known.items() if key not in own}, other_calls(out, bench)
    if others:
        path.parent.mkdir(exist_ok=True)
        write_recording(path, others)
    else:
        path.unlink(missing_ok=True)
    for name in (MANIFEST, METRICS, SUMMARY):
        if (run.path / name).exists():  # a run of no steps has no metrics
            shutil.copyfile(run.path / name, folder / name)
    write_rows(folder / EXECUTIONS, [kept(row) for row in run.read(ALL_EXECUTIONS)])
    _export_policy(run.policy, folder / POLICY)
    return folder


def _export_policy(trained: Path, folder: Path) -> None:
    """The trained policy, rounded to bfloat16 and compressed; its manifest keeps the digest of what was
    trained beside that of what is shipped."""
    facts = read_manifest(trained)
    exact = facts.pop("params_sha256")
    Orchestrator.load(trained).save(folder, facts | {TRAINED: exact})
    shipped = Orchestrator.load(folder)
    path = folder / MANIFEST
    text = json.dumps(read_manifest(folder) | {"params_sha256": params_sha256(shipped.decoder)}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    pack_weights(folder / WEIGHTS_FILE)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())

"""What lies in `checkpoints/`: policies, recorded worker calls, and runs that can be replayed."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lemon_jax.backends import Reply

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"
# A replayable run, checkpoints/<bench>/, holds manifest, metrics and summary as its run directory did, and:
CALLS = "calls.jsonl.xz"  # the calls of this run
EXECUTIONS = "executions.jsonl.xz"  # of each execution what a replay is compared by
POLICY = "policy"
TRAINED = "trained_params_sha256"  # in the policy's manifest: of the parameters before they were rounded


def shipped_folder(name: str | Path, folder: Path = CHECKPOINTS) -> Path:
    """A folder in `checkpoints/`, by its name there, or any other one."""
    shipped = folder / name
    return shipped if shipped.is_dir() else Path(name)


def policy_origin(policy: Path, folder: Path = CHECKPOINTS) -> dict[str, Any]:
    """What a policy that a run begins with is: its manifest, or the name of a pretrained model.

    A trained policy that does not say what it was continued from takes that from the manifest of its run,
    where this began with a policy in `checkpoints/`.
    """
    from lemon_jax.orchestrator import MANIFEST_FILE, read_manifest

    if not (policy / MANIFEST_FILE).exists():
        return {"pretrained": policy.resolve().name}
    facts, run = read_manifest(policy), policy.resolve().parent
    if facts.get("kind") != "trained" or "continued_from" in facts or not (run / MANIFEST_FILE).exists():
        return facts
    start = read_manifest(run).get("policy_sha256")
    for path in sorted(folder.glob(f"*/{MANIFEST_FILE}")):
        shipped = read_manifest(path.parent)
        if start is not None and shipped.get("params_sha256") == start:
            return facts | {"continued_from": shipped}
    return facts


def other_calls(folder: Path, bench: str) -> Path:
    """Recorded calls of a bench that the replayable run of it did not ask for."""
    return folder / "recordings" / f"{bench}.jsonl.xz"


def recorded_calls(bench: str, folder: Path = CHECKPOINTS) -> dict[str, Reply]:
    """All recorded calls of a bench. Raises LemonError for a damaged file."""
    from lemon_jax.runtime import read_recording

    found: dict[str, Reply] = {}
    for path in (other_calls(folder, bench), folder / bench / CALLS):
        if path.exists():
            found |= read_recording(path)
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """JSON lines, compressed with xz."""
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `write_rows`. Raises LemonError where the file is missing or damaged."""
    from lemon_jax.errors import LemonError

    try:
        # Not splitlines(): JSON leaves U+2028 and its like in a text as they are.
        return [json.loads(line) for line in lzma.decompress(path.read_bytes()).decode().split("\n")[:-1]]
    except (OSError, lzma.LZMAError, EOFError, ValueError) as error:
        raise LemonError(f"{path}: not readable ({error}); restore the folder") from error

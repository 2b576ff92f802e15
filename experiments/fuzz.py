"""Feed the readers of untrusted input what nobody would write, guided by the coverage of their code.

    python experiments/fuzz.py --target all --minutes 60
    python experiments/fuzz.py --target spec --reproduce runs/fuzz/spec/crash-0123abcd

Targets: spec (a policy's text), extract (a worker's reply), workers (a worker file), gguf and safetensors
(model files); what each reader promises stands in experiments/fuzz_targets.py. A finding is a broken promise,
an exception, an input that takes more than a second of CPU time, or memory that grows by more than 256 MiB.
It is kept as a file beside the corpus, which grows from run to run. Prints the inputs, the coverage and the
findings of each target. Needs the package atheris (Linux, Python 3.11 to 3.13).
Exit code 0: nothing found; 1: something was; 2: a flag is wrong, or the package is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuzz_targets import Target

HANG_S = 1.0  # CPU time of one input
STUCK_S = 15  # wall time after which an input that does not end is cut off
GROWTH_MIB = 256
MOST_FINDINGS = 5  # of one target in one run: what is found once is found again and again


@dataclass
class Result:
    """What came of one target."""

    inputs: int = 0
    coverage: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.child:
        _child(args.target, args.out, args.minutes * 60)
        return 0  # atheris ends the process before
    from fuzz_targets import TARGETS

    if args.target not in (*TARGETS, "all"):
        print(f"error: --target {args.target}: expected all, {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    if args.reproduce:
        if args.target == "all":
            print("error: --reproduce reads the input of one target: name it with --target", file=sys.stderr)
            return 2
        _warmed_up(TARGETS[args.target])
        bounded(TARGETS[args.target].check)(args.reproduce.read_bytes())
        print("nothing found")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("error: the package atheris is not installed; run `pip install atheris`", file=sys.stderr)
        return 2
    names = list(TARGETS) if args.target == "all" else [args.target]
    form = "{:12} {:>12} {:>10} {:>9} {:>9}"
    print(form.format("target", "inputs", "per second", "coverage", "findings"), flush=True)
    found = 0
    for name in names:
        result = _fuzz(name, args.out / name, args.minutes * 60 / len(names))
        rate = result.inputs / max(result.seconds, 1e-9)
        counts = (f"{result.inputs:,}", f"{rate:,.0f}", result.coverage, len(result.findings))
        print(form.format(name, *counts), flush=True)
        for text in result.findings:
            print(f"  {text}", flush=True)
        found += len(result.findings)
    return 1 if found else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--target", required=True, metavar="NAME", help="spec, extract, workers, gguf, safetensors or all")
    add("--minutes", type=float, default=5.0, metavar="M", help="in all, shared by the targets (5)")
    add("--out", type=Path, default=Path("runs/fuzz"), metavar="DIR", help="corpora and findings (runs/fuzz)")
    add("--reproduce", type=Path, metavar="FILE", help="read this one input, without atheris (off)")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _fuzz(name: str, folder: Path, seconds: float) -> Result:
    """Run one target for some seconds, started anew after each finding."""
    from fuzz_targets import TARGETS

    for part in ("corpus", "seeds"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for seed in TARGETS[name].seeds():
        (folder / "seeds" / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    (folder / "words").write_text("".join(f"{_escaped(word)}\n" for word in TARGETS[name].words))
    result = Result()
    began = time.monotonic()
    for _ in range(MOST_FINDINGS):
        left = seconds - (time.monotonic() - began)
        if left <= 1:
            break
        log = folder / "log"
        with log.open("wb") as output:
            command = [sys.executable, str(Path(__file__).resolve()), "--child", "--target", name]
            command += ["--minutes", str(left / 60), "--out", str(folder)]
            code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
        text = log.read_text(encoding="utf-8", errors="replace")
        result.inputs += max((int(n) for n in re.findall(r"(?m)^#(\d+)\s", text)), default=0)
        result.coverage = max([result.coverage, *(int(n) for n in re.findall(r"\bcov: (\d+)", text))])
        if code == 0:
            break
        kept = re.findall(r"Test unit written to (.+)", text)
        finding = f"{', '.join(kept) or f'exit code {code}'}: {_reason(text)}"
        if finding not in result.findings:
            result.findings.append(finding)
        if not re.search(r"(?m)^#\d+\s", text):
            break  # it did not start: it will not the next time
    result.seconds = time.monotonic() - began
    return result


def _escaped(word: str) -> str:
    """A line of libFuzzer's dictionary."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word.encode()) + '"'


def _reason(log: str) -> str:
    """The exception, and the last line of the project's own on its way; or what libFuzzer says."""
    lines = log.splitlines()
    start = next((i for i, line in enumerate(lines) if "Uncaught Python exception" in line), None)
    if start is None:
        return next((line for line in lines if "ERROR: libFuzzer" in line), (lines or ["no output"])[-1])
    places = [line.strip() for line in lines[start:] if line.startswith("  File ")]
    named = next(
        (line for line in lines[start + 1 :] if re.match(r"[\w.]+(Error|Exception|Finding)\b", line)), ""
    )
    return f"{named[:200]} ({places[-1] if places else 'no trace'})"


class SlowFinding(Exception):
    """An input took too long."""


class GrowthFinding(Exception):
    """An input took too much memory."""


def _child(name: str, folder: Path, seconds: float) -> None:
    """Fuzz in this process until the time is over or something is found."""
    import atheris

    # The modules are named in the file that imports them: it is read without running it.
    modules = _modules(name)
    with atheris.instrument_imports(include=list(modules)):
        from fuzz_targets import TARGETS

        for module in modules:
            importlib.import_module(module)
    target = TARGETS[name]
    _warmed_up(target)
    base_mib = _peak_mib()
    options = [
        f"-max_total_time={max(1, round(seconds))}",
        f"-timeout={STUCK_S}",
        f"-rss_limit_mb={round(base_mib) + GROWTH_MIB + 64}",
        f"-max_len={target.longest}",
        f"-artifact_prefix={folder}{os.sep}",
        "-print_final_stats=1",
        *([f"-dict={folder / 'words'}"] if target.words else []),
    ]
    atheris.Setup(
        [sys.argv[0], *options, str(folder / "corpus"), str(folder / "seeds")], bounded(target.check)
    )
    atheris.Fuzz()


def _warmed_up(target: Target) -> None:
    """Read its seeds: what is imported or compiled once is no growth, and takes its time once."""
    for seed in target.seeds():
        target.check(seed)


def bounded(check: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """`check`, which also raises where an input takes too much time, or memory beyond what was in use."""
    base_mib = _peak_mib()

    def one(data: bytes) -> None:
        start = time.process_time()
        check(data)
        if (took := time.process_time() - start) > HANG_S:
            raise SlowFinding(f"{len(data)} bytes took {took:.1f} s")
        if (grown := _peak_mib() - base_mib) > GROWTH_MIB:
            raise GrowthFinding(f"memory has grown by {grown:.0f} MiB")

    return one


def _modules(name: str) -> tuple[str, ...]:
    """The modules of a target, from a process of its own: here they must be imported instrumented."""
    code = f"import fuzz_targets; print(*fuzz_targets.TARGETS[{name!r}].modules)"
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    return tuple(done.stdout.split())


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())

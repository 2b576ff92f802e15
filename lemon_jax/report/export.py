"""Evaluations in other tools' formats: lm-evaluation-harness sample files, human-eval completions.

Both are written from the lines of executions.jsonl with phase "eval"; an execution that a server failure took
out has no counterpart in either format and is left out, not counted as wrong. Task texts are not in a run
directory: they are read from the benchmark files, and must be those that the run was made with.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ..bench import Dataset, Task, load
from ..errors import LemonError
from ..runtime.tools import completion, extract_completion
from .comparison import check_method
from .run_files import RunFiles, mapping, plain
from .table import SIMULATED_WARNING

FORMATS = ("lm-eval", "human-eval")
_HUMAN_EVAL = "humaneval"  # the bench
_MARGIN = "    "  # of a body in HumanEval's prompts
_METRICS = {"choice": "acc", "number": "exact_match"}  # as the harness names them for such tasks
_INVALID = "[invalid]"  # what the harness's filters put where a reply holds no answer


@dataclass(frozen=True, kw_only=True)
class Exported:
    """One file that was written; `left_out` are executions that failed on a server."""

    path: Path
    rows: int
    left_out: int


def export_lm_eval(
    run: RunFiles, out: Path, method: str | None = None, *, data_dir: Path | None = None
) -> list[Exported]:
    """Write OUT/METHOD/samples_BENCH_DATE.jsonl, as the harness writes OUT/MODEL/samples_TASK_DATE.jsonl.

    Without `method`, one file for each method of the run. DATE is when the evaluation was written.

    Raises:
        LemonError: the run has no such evaluation, or was made with other data or simulated workers; the data
            cannot be found; a file cannot be written.
    """
    methods = [method] if method else list(dict.fromkeys(str(e.get("method")) for e in _evaluated(run)))
    _check_real(run)
    for name in methods or [""]:
        check_method(run.executions, name)
    dataset = _dataset(run, data_dir)
    places = {task.id: (doc_id, task) for doc_id, task in enumerate(dataset.test)}
    date = datetime.fromtimestamp((run.path / "executions.jsonl").stat().st_mtime)
    written = []
    for name in methods:
        rows, left_out = _rows_of(run, name)
        if unknown := [task for task in rows if task not in places]:
            raise LemonError(
                f"{run.path / 'executions.jsonl'}: task {plain(unknown[0])} is not in the test split of "
                f"{dataset.bench}; restore the run folder"
            )
        samples = [
            lm_eval_sample(*places[task], row, extractor=_extractor(run, name)) for task, row in rows.items()
        ]
        samples.sort(key=lambda sample: sample["doc_id"])
        # A colon is no character of a file name everywhere; the harness replaces it too.
        file = f"samples_{dataset.bench}_{date.isoformat().replace(':', '-')}.jsonl"
        path = out / (re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "method") / file
        written.append(_write(path, samples, left_out))
    return written


def lm_eval_sample(doc_id: int, task: Task, row: Mapping[str, Any], *, extractor: str) -> dict[str, Any]:
    """One line of a sample file, with the fields and in the order of lm-evaluation-harness 0.4.

    There `evaluator.evaluate` makes them and `EvaluationTracker.save_results_samples` rewrites `arguments`.
    The prompt is the task as the orchestrator reads it; the response is what the output agent said.
    """
    metric = _METRICS.get(task.kind, "pass@1")
    prompt = task.prompt()
    doc = {
        "id": task.id,
        "question": task.question,
        "options": list(task.options),
        "gold": task.gold,
        "kind": task.kind,
    }
    answer = row.get("answer")
    return {
        "doc_id": doc_id,
        "doc": doc,
        "target": task.gold,
        "arguments": {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": []}}},
        "resps": [[row["output"]]],
        "filtered_resps": [_INVALID if answer is None else str(answer)],
        "filter": extractor,
        "metrics": [metric],
        "doc_hash": _sha256(json.dumps(doc, indent=2, ensure_ascii=False)),
        "prompt_hash": _sha256(prompt),
        "target_hash": _sha256(task.gold),
        metric: float(row.get("correct") is True),
    }


def export_human_eval(run: RunFiles, out: Path, method: str, *, data_dir: Path | None = None) -> Exported:
    """Write the completions of one method as `evaluate_functional_correctness` reads them.

    Raises:
        LemonError: the run is of another bench, has no such evaluation or was made with other data; the data
            cannot be found; the file cannot be written.
    """
    bench = mapping(run.manifest.get("config")).get("bench")
    if bench != _HUMAN_EVAL:
        raise LemonError(
            f"{run.path}: human-eval reads completions of HumanEval, this run's bench is {plain(bench)}; "
            "use --format lm-eval"
        )
    _check_real(run)
    check_method(run.executions, method)
    tasks = {task.id: task for task in _dataset(run, data_dir).test}
    rows, left_out = _rows_of(run, method)
    samples = []
    for task_id, row in rows.items():
        number, task = re.search(r"\d+$", task_id), tasks.get(task_id)
        if number is None or task is None:
            raise LemonError(
                f"{run.path / 'executions.jsonl'}: task {plain(task_id)} is no test problem of HumanEval; "
                "restore the run folder"
            )
        text = human_eval_completion(row["output"], task.entry_point)
        samples.append({"task_id": f"HumanEval/{number[0]}", "completion": text})
    samples.sort(key=lambda sample: int(sample["task_id"].rpartition("/")[2]))
    return _write(out, samples, left_out)


def human_eval_completion(output: str, entry_point: str) -> str:
    """The code of a reply, as it was graded, as text that may stand behind HumanEval's prompt: a function
    without a body.

    A whole function stands behind a line break and defines the function anew. A body has the prompt's margin,
    which a reply may have lost: `return x` and `y = x\\n    return y` are bodies too.
    """
    code = extract_completion(output, entry_point)
    flat = completion.dedent(code)
    if _defines(flat, entry_point):
        return f"\n{flat}"
    bodies = (code, *completion.mended(code, flat, _MARGIN))
    return next((body for body in bodies if _goes_on(body)), code)


def _defines(module: str, name: str) -> bool:
    """Whether the text binds the name at its outermost level, and is no function's body."""
    nodes = _parsed(module)
    bound = {target.id for node in nodes if isinstance(node, ast.Assign) for target in node.targets
             if isinstance(target, ast.Name)}  # fmt: skip
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return name in bound and not any(isinstance(node, ast.Return) for node in nodes)


def _goes_on(body: str) -> bool:
    """Whether it adds something to a function that has begun."""
    nodes = _parsed(f"def f():\n{_MARGIN}0\n{body}")
    return bool(nodes) and len(getattr(nodes[0], "body", ())) > 1


def _parsed(text: str) -> list[ast.stmt]:
    """Its statements; none where it is no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts that are not ours
            return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _check_real(run: RunFiles) -> None:
    """Raise LemonError for simulated workers: neither format has a place that says so."""
    if run.simulated:
        raise LemonError(
            f"{run.path}: {SIMULATED_WARNING}, and a file for other tools could not say so; "
            "export a run of other workers"
        )


def _evaluated(run: RunFiles) -> Iterable[dict[str, Any]]:
    return (e for e in run.executions if e.get("phase") == "eval")


def _rows_of(run: RunFiles, method: str) -> tuple[dict[str, dict[str, Any]], int]:
    """Task id to the last evaluation of it, and how many were left out because a server failed."""
    rows = {str(e.get("task")): e for e in _evaluated(run) if str(e.get("method")) == method}
    known = {task: e for task, e in rows.items() if e.get("infra_failed") is not True}
    for task, row in known.items():
        if not isinstance(row.get("output"), str):
            raise LemonError(
                f"{run.path / 'executions.jsonl'}: {plain(method)} on {plain(task)} has no key 'output', "
                "as in older runs; experiments/run.py --resume evaluates it anew from the run's own calls"
            )
    return known, len(rows) - len(known)


def _extractor(run: RunFiles, method: str) -> str:
    rows = run.summary.get("eval") or []
    return next(
        (str(row["extractor"]) for row in rows if row.get("method") == method and "extractor" in row), "none"
    )


def _dataset(run: RunFiles, data_dir: Path | None) -> Dataset:
    """The run's bench, if the files at hand are those that the run was made with."""
    config = mapping(run.manifest.get("config"))
    bench, protocol = str(config.get("bench")), str(config.get("protocol", "full"))
    data = mapping(run.manifest.get("data"))
    if data.get("source") == "sample":
        raise LemonError(
            f"{run.path}: the run was made on the built-in sample, which no other tool knows; "
            "run again with the official files"
        )
    if "benches" in data:
        raise LemonError(
            f"{run.path}: a run of several benches, and an export is of one; evaluate its policy on each "
            "alone: experiments/run.py --bench NAME --steps 0 --policy RUN/policy"
        )
    dataset = load(bench, protocol=protocol, data_dir=data_dir)
    if dataset.sha256 != data.get("sha256"):
        raise LemonError(
            f"{run.path / 'manifest.json'}: data.sha256 is {plain(data.get('sha256'))}, that of the "
            f"{dataset.source} files found is {dataset.sha256}; name the run's data folder with --data"
        )
    return dataset


def _write(path: Path, samples: list[dict[str, Any]], left_out: int) -> Exported:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        path.write_bytes(text.encode("utf-8", "replace"))  # a lone surrogate in a reply is no reason to stop
    except OSError as error:
        raise LemonError(
            f"{path}: cannot be written: {error.strerror or error}; choose another --out"
        ) from None
    return Exported(path=path, rows=len(samples), left_out=left_out)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

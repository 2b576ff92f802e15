"""`lemon run`: one spec on one task, each agent shown as it finishes."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from lemon_jax.backends import WorkerConfig, WorkerPool, worker_config
from lemon_jax.errors import LemonError
from lemon_jax.extraction import read_answer
from lemon_jax.runtime.calls import Caller
from lemon_jax.runtime.execution import AgentRun, Execution, Status, Usage
from lemon_jax.runtime.executor import Executor
from lemon_jax.runtime.prompts import LETTERS, TextProblem
from lemon_jax.runtime.show_progress import ShowProgress
from lemon_jax.runtime.store import CallStore
from lemon_jax.spec import Spec, format_issue, parse
from lemon_jax.spec.cli import READ_LIMIT, read_text

# A worker's reply is untrusted: no escape sequence of its own reaches the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STYLES = {Status.OK: "green", Status.INFRA_FAILED: "red", Status.SKIPPED: "red"}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Register `run`; it sets `func(args) -> exit code`."""
    run = subparsers.add_parser("run", help="run a spec on one task", description=run_spec.__doc__)
    run.add_argument("spec", metavar="SPEC", help="a YAML file, or - for standard input")
    run.add_argument("--task", required=True, metavar="TEXT", help="the task, or - for standard input")
    run.add_argument(
        "--options", nargs="+", default=[], metavar="TEXT", help="option texts, without their letters"
    )
    run.add_argument(
        "--workers",
        default="embedded",
        metavar="NAME|FILE",
        help="embedded (small models on this machine, the default), jax (the same in this process), scripted "
        "(no model, for dry runs) or a TOML worker file",
    )
    run.add_argument(
        "--store", type=Path, metavar="FILE", help="keep worker calls in this SQLite file, and reuse them"
    )
    run.add_argument(
        "--allow-unsandboxed",
        action="store_true",
        help="run workers' programs with your own rights where this machine cannot isolate them",
    )
    run.set_defaults(func=run_spec)


def run_spec(args: argparse.Namespace) -> int:
    """Run a spec on one task. Exit code 0: it ran; 1: the spec is invalid, or a worker could not be
    reached; 2: something else to mend, in one line."""
    if args.spec == args.task == "-":
        raise LemonError("--task -: SPEC is read from standard input already; give one of them as a file")
    spec = read_spec(args.spec)
    if spec is None:
        return 1
    problem = _problem(args.task, args.options)
    config = worker_config(args.workers)
    store = CallStore(args.store)
    try:
        return asyncio.run(_run(spec, problem, config, store, args.allow_unsandboxed))
    finally:
        store.close()


async def _run(
    spec: Spec, problem: TextProblem, config: WorkerConfig, store: CallStore, allow_unsandboxed: bool
) -> int:
    with ShowProgress() as progress:
        async with WorkerPool(config, on_progress=progress) as pool:
            await pool.check()
            report = _Report(spec, problem, progress)
            executor = Executor(Caller(pool, store), read_answer, allow_unsandboxed=allow_unsandboxed)
            execution = await executor.execute(spec, problem, on_agent=report.agent)
    report.totals(execution)
    return 1 if execution.infra_failed else 0


def read_spec(file: str) -> Spec | None:
    """The spec, repaired if need be; None, with its issues on stderr, where that is impossible."""
    name = "<stdin>" if file == "-" else file
    parsed = parse(read_text(file, name, READ_LIMIT))
    for issue in parsed.issues:
        print(format_issue(issue, name), file=sys.stderr)
    if parsed.spec is None:
        print(f"{name}: cannot be repaired", file=sys.stderr)
    for repair in parsed.repairs:
        print(f"{name}: repaired: {repair}", file=sys.stderr)
    return parsed.spec


def _problem(task: str, options: list[str]) -> TextProblem:
    question = read_text("-", "--task -") if task == "-" else task
    if not question.strip():
        raise LemonError("--task: found nothing; give the text of a task")
    if len(options) > len(LETTERS):
        raise LemonError(f"--options: found {len(options)}, expected at most {len(LETTERS)}")
    for text in (question, *options):
        if not text.isprintable() and any("\ud800" <= c <= "\udfff" for c in text):
            raise LemonError("--task and --options: expected UTF-8 text; check the terminal's locale")
    return TextProblem(question=question, options=tuple(options))


class _Report:
    """Prints agents as they finish, then the answer and the totals, on stdout."""

    def __init__(self, spec: Spec, problem: TextProblem, progress: ShowProgress):
        self._spec = spec
        self._problem = problem
        self._progress = progress
        self._out = Console(highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self._finished: dict[str, float] = {}

    def agent(self, run: AgentRun) -> None:
        """Print one agent. Its seconds run from the last of its dependencies to its end."""
        agent, now = self._spec.agent(run.id), time.monotonic()
        ready = max((self._finished[parent] for parent in agent.depends_on), default=self._started)
        self._finished[run.id] = now
        name = " ".join(agent.name.split())
        status = (run.status.value, _STYLES.get(run.status, "yellow"))
        lines = [Text.assemble((f"{run.id} {name}", "bold"), f" ({run.role}, {run.capacity}): ", status)]
        if run.note:
            lines[0].append(f", {_printable(run.note)}")
        lines += [Text(f"  {line}", style="dim") for line in _printable(run.output).splitlines()]
        if run.answer is not None:
            lines.append(Text.assemble("  answer ", (self._answer(run.answer), "bold")))
        lines.append(Text(f"  {_spent(run.usage, now - ready)}"))
        self._print(*lines)

    def totals(self, execution: Execution) -> None:
        """Print the final answer, read off the output agent's text as a bench would read it."""
        answer = read_answer(self._problem, execution.answer_text)
        lost = [run for run in execution.agents if run.status in (Status.INFRA_FAILED, Status.SKIPPED)]
        spent = _spent(execution.usage, time.monotonic() - self._started)
        lines = [Text(f"total: {len(execution.agents)} agents, {spent}")]
        if lost:
            failed = sum(run.status is Status.INFRA_FAILED for run in lost)
            counts = f"{failed} failed, {len(lost) - failed} skipped"
            note = f"Run failed: {counts}, {len(execution.agents) - len(lost)} completed"
            lines.insert(0, Text(note, style="bold red"))
        if answer is not None:
            lines.insert(0, Text.assemble("Answer: ", (self._answer(answer), "bold")))
        elif not lost:
            lines.insert(0, Text("No answer found in the last output", style="yellow"))
        self._print(Text(), *lines)

    def _answer(self, answer: str) -> str:
        """A letter with the text of its option; anything else as it is."""
        index = LETTERS.find(answer) if len(answer) == 1 else -1
        options = self._problem.options
        return _printable(f"{answer}) {options[index]}" if 0 <= index < len(options) else answer)

    def _print(self, *lines: Text) -> None:
        self._progress.make_way()
        for line in lines:
            self._out.print(line)


def _spent(usage: Usage, seconds: float) -> str:
    calls = f"{usage.calls} call{'s' * (usage.calls != 1)}"
    prompt = f"{usage.prompt_tokens} prompt tokens ({usage.prefix_tokens} of them fixed prefix)"
    if usage.unmetered:
        return f"{calls}, tokens and cost n/a (the server reports none), {seconds:.1f} s"
    return f"{calls}, {prompt}, {usage.generated_tokens} generated, cost {usage.cost:.1f}, {seconds:.1f} s"


def _printable(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)

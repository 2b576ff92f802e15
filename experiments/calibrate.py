"""Fit the simulated workers' parameters to calls that real workers answered, and test them on other tasks.

python experiments/run.py --bench multiarith --out runs/multiarith     # and other benches, from recordings
python experiments/calibrate.py runs/multiarith runs/aqua --out my_parameters.toml

Every agent's call whose answer can be judged is one observation, equal calls one together. The fit maximises
the likelihood of `backends/response_model.py` with a normal effect of each task integrated out
(Gauss-Hermite), under normal priors that draw what few calls speak of towards the sums of its role and level.
Effects are kept at 0 or above, the side that the model means; what they would be without that is printed too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import ChainMap, Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
from response_fit import ROLE_NAMES, Fit, Observed

from lemon_jax.backends.response_model import EFFECTS, Kind, is_relevant, level_of, situation
from lemon_jax.bench import Task, load
from lemon_jax.errors import LemonError
from lemon_jax.numbers import parse_number
from lemon_jax.runtime import build_messages, repeat_indices
from lemon_jax.runtime.tools import nearest_option
from lemon_jax.spec import CAPACITIES, ROLES, Spec, order, parse
from lemon_jax.spec.code_roles import CODE_ROLES
from lemon_jax.train.config import RunConfig
from lemon_jax.train.simulation import PLANNERS

FOLDS = 5
# Made for code: no call of theirs on other tasks is recorded. By hand: hardly ever right, half their tokens.
CODE_NAMES = [role.name for role in CODE_ROLES]
CODE_ABILITY, CODE_SHARE = -5.0, 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="EFFECT=VALUE",
        help="give an effect that the calls do not show a value by hand; all else is fitted with it",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="parameter file to write (none)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of benchmark files (LEMON_DATA)")
    args = parser.parse_args(argv)
    try:
        with jax.enable_x64(True):
            return calibrate(args)
    except LemonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def calibrate(args: argparse.Namespace) -> int:
    """Read the runs, print the tables, write the file."""
    by_hand = _by_hand(args.set)
    read = Reading()
    for run in args.runs:
        read.run(run, args.data)
    calls = read.calls()
    if len({c.task for c in calls}) < FOLDS:
        raise LemonError(f"the runs hold judged calls on fewer than {FOLDS} tasks; name larger ones")
    report_calls(calls)
    report_held_out(calls, by_hand)
    fit = Fit(calls, by_hand=by_hand)
    report_effects(fit, Fit(calls), Fit(calls, bounded=False))
    text = parameter_file(fit, read, by_hand)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
        print(f"parameters: {args.out}")
    return 0


def _by_hand(texts: list[str]) -> dict[str, float]:
    """In: ["chain=0.3"]  Out: {"chain": 0.3}. Raises LemonError for another name or no number."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise LemonError(f"--set {text}: expected EFFECT=VALUE with a number") from None
        if name not in EFFECTS or not 0 <= found[name] < 10:
            raise LemonError(f"--set {text}: expected one of {', '.join(EFFECTS)}, from 0 to 10")
    return found


class Reading:
    """Collects the judged calls of run folders."""

    def __init__(self) -> None:
        self._calls: list[Observed] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._words: list[tuple[int, int]] = []  # prompt tokens and words of calls without inputs
        self._tasks: dict[tuple[str, str], dict[str, Task]] = {}  # by bench and protocol
        self.samples: dict[str, int] = {}  # of the workers' capacities, by level
        self.tokens: dict[tuple[str, str], list[float]] = defaultdict(
            list
        )  # of one sample, by role and level
        self.wrong: dict[str, Counter[str]] = defaultdict(Counter)

    def calls(self) -> list[Observed]:
        return self._calls

    def tokens_per_word(self) -> float:
        """Least squares through the origin."""
        return sum(t * w for t, w in self._words) / sum(w * w for _, w in self._words)

    def run(self, folder: Path, data: Path | None) -> None:
        """Read `executions.jsonl`. Raises LemonError where the folder is no run, or its workers' capacities
        ask other numbers of samples than an earlier run's."""
        try:
            manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
            config = RunConfig.from_dict(manifest["config"])
            samples = {level: manifest["workers"]["settings"][level]["samples"] for level in CAPACITIES}
            # Not splitlines(): JSON leaves U+2028 and its like in a text as they are.
            lines = (folder / "executions.jsonl").read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LemonError(
                f"{folder}: not a run folder ({error}); name one of experiments/run.py"
            ) from None
        if (self.samples or samples) != samples:
            raise LemonError(
                f"{folder}: its capacities have {_numbers(samples)} samples, those of the runs before "
                f"{_numbers(self.samples)}; calibrate on runs of one worker file"
            )
        self.samples = samples
        trained = self._tasks_of(config.trained, config.protocol, data)
        for line in filter(None, lines):
            row = json.loads(line)
            spec = parse(row["spec"]).spec
            if spec is not None and row["agents"] and not row["infra_failed"]:
                bench = row.get("bench")  # of an evaluation
                tasks = self._tasks_of((bench,), config.protocol, data) if bench else trained
                self._execution(tasks[row["task"]], spec, {a["id"]: a for a in row["agents"]})

    def _tasks_of(self, benches: Sequence[str], protocol: str, data: Path | None) -> Mapping[str, Task]:
        for bench in benches:
            if (bench, protocol) not in self._tasks:
                dataset = load(bench, protocol=protocol, data_dir=data)
                self._tasks[bench, protocol] = {t.id: t for t in (*dataset.train, *dataset.test)}
        return ChainMap(*(self._tasks[bench, protocol] for bench in benches))

    def _execution(self, task: Task, spec: Spec, rows: dict[str, Any]) -> None:
        if any(ROLES[a.role].llm and a.role not in ROLE_NAMES for a in spec.agents):
            return
        places = repeat_indices(spec)
        levels: dict[str, int] = {}
        for agent_id in order(spec):
            agent = spec.agent(agent_id)
            parents = [a for a in spec.agents if a.id in agent.depends_on]
            before = [levels[p.id] for p in parents]
            levels[agent_id] = level_of(before) if ROLES[agent.role].llm else 1
            row = rows[agent_id]
            if not ROLES[agent.role].llm:
                continue
            inputs = tuple((p.id, p.name, p.role, rows[p.id]["answer"]) for p in parents)
            key = (task.id, agent.role, agent.capacity, agent.duty, inputs, places[agent_id])
            if key in self._seen:
                continue
            self._seen.add(key)
            self.tokens[agent.role, agent.capacity].append(
                max(1, row["generated_tokens"]) / self.samples[agent.capacity]
            )
            if not parents and self.samples[agent.capacity] == row["calls"] == 1:
                words = sum(len(m.content.split()) for m in build_messages(task, agent, []))
                self._words.append((row["prompt_tokens"], words))
            if agent.role in PLANNERS:
                continue
            kinds = [_kind(task, p.role, rows[p.id]["answer"]) for p in parents]
            right = _is_right(task, row["answer"])
            call = Observed(
                task=task.id,
                bench=task.bench,
                role=agent.role,
                level=agent.capacity,
                place=situation(kinds, before, relevant=is_relevant(agent.duty, task.question)),
                guess=1 / len(task.options) if task.options else 0.0,
                right=right,
                tokens=row["generated_tokens"],
            )
            self._calls.append(call)
            if row["answer"] is not None and not right:
                self.wrong[task.id][_meant(task, row["answer"])] += 1


def _numbers(samples: Mapping[str, int]) -> str:
    return ", ".join(map(str, samples.values()))


def _meant(task: Task, answer: str) -> str:
    """A letter on a choice task, else a number's canonical text."""
    if task.options:
        return nearest_option(answer, task.options) or ""
    number = parse_number(answer)
    return answer if number is None else str(number)


def _is_right(task: Task, answer: str | None) -> bool:
    if answer is None:
        return False
    gold = task.gold if task.options else str(Fraction(task.gold))
    return _meant(task, answer) == gold


def _kind(task: Task, role: str, answer: str | None) -> Kind:
    if role in PLANNERS:
        return "plan"
    if answer is None:
        return "nothing"
    return "right" if _is_right(task, answer) else "wrong"


def report_calls(calls: list[Observed]) -> None:
    print(f"{len(calls)} different judged calls on {len({c.task for c in calls})} tasks")
    cells = defaultdict(list)
    for c in calls:
        cells[c.bench, c.level, c.role].append(c)
    print(f"{'bench':<12}{'level':<8}{'role':<22}{'calls':>6}{'right':>7}{'tokens':>8}")
    for (bench, level, role), found in sorted(cells.items()):
        right, tokens = np.mean([c.right for c in found]), np.mean([c.tokens for c in found])
        print(f"{bench:<12}{level:<8}{role:<22}{len(found):>6}{right:>7.2f}{tokens:>8.0f}")


def report_held_out(calls: list[Observed], by_hand: Mapping[str, float]) -> None:
    """Five folds, split by task; a table of log-loss and Brier score against base rates."""
    tasks = sorted({c.task for c in calls})
    np.random.default_rng(0).shuffle(tasks)
    fold = {task: i % FOLDS for i, task in enumerate(tasks)}
    predictions: dict[str, list[float]] = defaultdict(list)
    truth: list[bool] = []
    benches: list[str] = []
    for k in range(FOLDS):
        train = [c for c in calls if fold[c.task] != k]
        test = [c for c in calls if fold[c.task] == k]
        truth += [c.right for c in test]
        benches += [c.bench for c in test]
        predictions["overall rate"] += list(_rates(train, test, lambda c: ()))
        predictions["rate of bench"] += list(_rates(train, test, lambda c: (c.bench,)))
        predictions["rate of bench, level, role"] += list(
            _rates(train, test, lambda c: (c.bench, c.level, c.role))
        )
        predictions["response model"] += list(Fit(train).predict(test))
        if by_hand:
            predictions["as written, with --set"] += list(Fit(train, by_hand=by_hand).predict(test))
    print(f"\nheld-out calls ({FOLDS} folds, split by task)")
    print(f"{'calls of':<12}{'prediction':<28}{'n':>6}{'log-loss':>10}{'Brier':>8}")
    for bench in ("all", *sorted(set(benches))):
        chosen = np.array([bench in ("all", b) for b in benches])
        y = np.array(truth, dtype=float)[chosen]
        for name, values in predictions.items():
            p = np.clip(np.array(values)[chosen], 1e-6, 1 - 1e-6)
            loss = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
            print(f"{bench:<12}{name:<28}{len(y):>6}{loss:>10.4f}{np.mean((p - y) ** 2):>8.4f}")


def _rates(train: list[Observed], test: list[Observed], cell: Any) -> list[float]:
    """Rates of the training calls' cells, each with one call at the overall rate added."""
    overall = float(np.mean([c.right for c in train]))
    found = defaultdict(list)
    for c in train:
        found[cell(c)].append(c.right)
    return [(sum(found[cell(c)]) + overall) / (len(found[cell(c)]) + 1) for c in test]


def report_effects(fit: Fit, fitted: Fit, free: Fit) -> None:
    print(f"\n{'effect':<16}{'written':>10}{'fitted >= 0':>13}{'free':>8}   (logits; harms are subtracted)")
    columns = (f.at["effect"] for f in (fit, fitted, free))
    for name, *values in zip(EFFECTS, *columns, strict=True):
        print(f"{name:<16}{values[0]:>10.3f}{values[1]:>13.3f}{values[2]:>8.3f}")
    print(f"spread of task difficulty {fit.spread:.3f}")


def parameter_file(fit: Fit, read: Reading, by_hand: Mapping[str, float]) -> str:
    """The fitted parameters as the backend reads them."""
    calls = read.calls()
    samples, tokens = read.samples, _tokens(read.tokens, read.samples)
    lines = [
        "# Parameters of the simulated workers; lemon_jax/backends/response_model.py has the formula.",
        f"# Written by experiments/calibrate.py from {len(calls)} judged calls of the embedded workers on",
        f"# {len({c.task for c in calls})} tasks; experiments/LOG.md says how well they predict other calls.",
        "",
        f"tokens_per_word = {read.tokens_per_word():.3f}  # of prompts and replies",
        f"spread = {fit.spread:.3f}  # standard deviation of task difficulty within a bench, in logits",
        f"wrong_shares = {_wrong_shares(read.wrong)}  # of a task's wrong answers, the likeliest first",
        "",
        "[effects]  # in logits; wrong_input, context and chain are subtracted",
        *(
            f"{name} = {value:.3f}" + ("  # set by hand: the calls do not show it" if name in by_hand else "")
            for name, value in zip(EFFECTS, fit.at["effect"], strict=True)
        ),
        "",
        "[difficulty]  # mean by bench, in logits",
        *(f"{bench} = {value:.3f}" for bench, value in zip(fit.benches, fit.at["bench"], strict=True)),
        f"other = {float(np.mean(fit.at['bench'])):.3f}",
    ]
    for level in CAPACITIES:
        lines += [
            "",
            f"[levels.{level}]",
            f"calls = {samples[level]}  # how often a call reads its prompt",
            "",
        ]
        lines += [f"[levels.{level}.ability]  # logits at difficulty 0"]
        lines += [f"{role} = {fit.ability(role, level):.3f}" for role in ROLE_NAMES]
        lines += [f"{role} = {CODE_ABILITY}  # set by hand: made for code" for role in CODE_NAMES]
        lines += ["", f"[levels.{level}.tokens]  # generated tokens of a call"]
        lines += [f"{role} = {tokens[role, level]}" for role in ROLE_NAMES]
        code = [(n, round(CODE_SHARE * ROLES[n].max_tokens * samples[level])) for n in CODE_NAMES]
        lines += [f"{role} = {count}  # set by hand" for role, count in code]
    return "\n".join(lines) + "\n"


def _tokens(
    found: Mapping[tuple[str, str], list[float]], samples: Mapping[str, int]
) -> dict[tuple[str, str], int]:
    """Mean tokens of all samples by role and level: where few calls speak, role and level multiply (ridge on
    logarithms)."""
    n_roles, n = len(ROLE_NAMES), len(ROLE_NAMES) + len(CAPACITIES)
    rows, targets, weights = [], [], []
    for (role, level), values in found.items():
        row = np.zeros(n)
        row[ROLE_NAMES.index(role)] = row[n_roles + CAPACITIES.index(level)] = 1
        rows.append(row)
        targets.append(np.log(np.mean(values)))
        weights.append(len(values))
    x, y, w = np.array(rows), np.array(targets), np.array(weights, dtype=float)
    centre = float(np.average(y, weights=w))
    effects = np.linalg.solve(x.T @ (w[:, None] * x) + np.eye(n), x.T @ (w * (y - centre)))
    out = {}
    for r, role in enumerate(ROLE_NAMES):
        for c, level in enumerate(CAPACITIES):
            values = found.get((role, level), [])
            guess = np.exp(centre + effects[r] + effects[n_roles + c])
            mean = (sum(values) + 5 * guess) / (len(values) + 5)
            one = min(max(1.0, mean), ROLES[role].max_tokens)
            out[role, level] = max(1, round(one * samples[level]))
    return out


def _wrong_shares(wrong: dict[str, Counter[str]]) -> list[float]:
    """Mean shares of the three likeliest wrong answers of tasks with eight wrong replies or more."""
    shares = [
        [count / counts.total() for _, count in counts.most_common(3)]
        for counts in wrong.values()
        if counts.total() >= 8 and len(counts) >= 3
    ]
    mean = np.mean(shares, axis=0) if shares else np.array([0.5, 0.3, 0.2])
    return [round(float(v), 3) for v in mean / mean.sum()]


if __name__ == "__main__":
    sys.exit(main())

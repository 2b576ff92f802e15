"""The results of a run as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from .run_files import mapping, number, objects, plain

SAMPLE_WARNING = "built-in sample: these are not AQuA results"
SIMULATED_WARNING = "simulated workers: no language model answered"
WIDE = 110  # columns from which each row names its own setting; below, the title speaks for all
_DASH = "-"
_SETTING = ("bench", "split", "seed", "extractor", "protocol", "prices")
_TEXTS = ("method", "setting", "accuracy")  # columns that are not numbers

Row = Mapping[str, Any]


def results_table(summary: Mapping[str, Any], *, wide: bool = False) -> Table:
    """The evaluation of a summary.json, one row per method; best accuracy and lowest cost of each bench are
    bold.

    Fits 80 columns, or WIDE ones with the setting in each row. Values that are missing or not finite
    show as "-".
    """
    rows = objects(summary.get("eval"))
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        title=Text(title_line(summary), style="bold"),
        title_justify="left",
        caption=_caption(summary),
        caption_justify="left",
    )
    strong = {"accuracy": best(rows, "accuracy", max), "cost_per_task": best(rows, "cost_per_task", min)}
    columns = _columns(rows, setting_keys(rows, every=wide))
    for header, key, _ in columns:
        table.add_column(
            Text(header),
            justify="left" if key in _TEXTS else "right",
            overflow="fold",
        )
    for i, row in enumerate(rows):
        marked = {key for key, marks in strong.items() if marks[i]}
        table.add_row(*(Text(cell(row), style="bold" if key in marked else "") for _, key, cell in columns))
    return table


def title_line(summary: Mapping[str, Any]) -> str:
    """Bench, split, number of tasks, seed and source of the data, and how answers were read, in one line.

    # "aqua, test split, n 254, seed 0, official data, extractor lemon, protocol full"
    """
    data = mapping(summary.get("data"))
    n, seed = number(data.get("n")), summary.get("seed")
    rows = objects(summary.get("eval"))
    tested = {str(row["bench"]) for row in rows if row.get("bench")}  # perhaps not what it was trained on
    parts = [
        plain((tested.pop() if len(tested) == 1 else summary.get("bench")) or "unnamed bench"),
        f"{plain(data['split'])} split" if data.get("split") else "",
        f"n {n:,.0f}" if n is not None else "",
        f"seed {plain(seed)}" if seed is not None else "",
        "simulated workers" if is_simulated(summary) else "",
        f"{plain(data['source'])} data" if data.get("source") else "",
    ]
    for key in ("extractor", "protocol", "prices"):
        values = {_said(row[key]) for row in rows if row.get(key)}
        parts.append(f"{key} {values.pop()}" if len(values) == 1 else "")
    return ", ".join(part for part in parts if part)


def setting_keys(rows: list[dict[str, Any]], *, every: bool) -> list[str]:
    """Which of bench, split, seed, extractor, protocol and prices the rows must name.

    `every`: all that a row has; else those in which the rows differ, which no title can say for all.
    """
    found = []
    for key in _SETTING:
        values = {_said(row.get(key, _DASH)) for row in rows}
        if len(values) > 1 or (every and values - {_DASH}):
            found.append(key)
    return found


def warnings(summary: Mapping[str, Any]) -> list[str]:
    """What a reader must know before quoting a number of this run."""
    found = []
    if mapping(summary.get("data")).get("source") == "sample":
        found.append(SAMPLE_WARNING)
    if is_simulated(summary):
        found.append(SIMULATED_WARNING)
    if unmetered := sum(number(row.get("unmetered_calls")) or 0 for row in objects(summary.get("eval"))):
        found.append(f"{unmetered:,.0f} calls came without token counts: tokens and cost are not known")
    if long := [
        f"{plain(row.get('method', _DASH))} {count:,.0f}"
        for row in objects(summary.get("eval"))
        if (count := number(row.get("context_overflows")))
    ]:
        found.append(f"tasks with a prompt that did not fit its worker's context: {', '.join(long)}")
    return found


def is_simulated(summary: Mapping[str, Any]) -> bool:
    """Whether a summary's workers are simulated, those of a worker file of one's own too."""
    return summary.get("workers") == "simulated" or summary.get("simulated") is True


def calls_line(summary: Mapping[str, Any]) -> str:
    """Which workers replied, and whether live or from a recording; "" if the run does not say.

    # "embedded workers; calls 300 from a recording, 20 live, 512 from this run's cache in training"
    """
    train, calls = mapping(summary.get("train")), mapping(summary.get("calls"))
    parts = []
    for value, words in (
        (calls.get("recorded"), "from a recording"),
        (calls.get("live", train.get("live_calls")), "live"),
        (train.get("cached_calls"), "from this run's cache in training"),
    ):
        count = number(value)
        if count is not None:
            parts.append(f"{count:,.0f} {words}")
    workers = f"{plain(summary['workers'])} workers" if summary.get("workers") else ""
    replies = f"calls {', '.join(parts)}" if parts else ""
    return "; ".join(text for text in (workers, replies) if text)


def accuracy_text(row: Row) -> str:
    """Accuracy with its 95 % interval in percent.

    # In: {"accuracy": 0.42, "ci95": [0.29, 0.56]}   Out: "42.0 % [29, 56]"
    """
    accuracy = number(row.get("accuracy"))
    if accuracy is None:
        return _DASH
    bounds = interval(row)
    return f"{100 * accuracy:4.1f} %" + (f" [{100 * bounds[0]:.0f}, {100 * bounds[1]:.0f}]" if bounds else "")


def interval(row: Row) -> tuple[float, float] | None:
    """The 95 % interval of a row, as fractions; None if it has none."""
    ci95 = row.get("ci95")
    if not isinstance(ci95, list) or len(ci95) != 2:
        return None
    low, high = number(ci95[0]), number(ci95[1])
    return None if low is None or high is None else (low, high)


def best(rows: list[dict[str, Any]], key: str, choose: Callable[..., float]) -> list[bool]:
    """Whether each row has the largest or smallest finite value of a column among the rows of its bench; none
    has where only one row has a value: numbers of different benches are not compared.

    # In: (bench a, 0.4), (a, 0.3), (b, 0.9), (b, None); max   Out: True, False, False, False
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        if (value := number(row.get(key))) is not None:
            values.setdefault(str(row.get("bench")), []).append(value)
    top = {bench: choose(found) for bench, found in values.items() if len(found) > 1}
    return [top.get(str(row.get("bench")), math.nan) == number(row.get(key)) for row in rows]


def shown_faults(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(header, key) of the fault columns that are not zero everywhere."""
    faults = (("no answer", "no_answer"), ("infra failed", "infra_failed"))
    return [(header, key) for header, key in faults if any(number(row.get(key)) for row in rows)]


def _columns(rows: list[dict[str, Any]], setting: list[str]) -> list[tuple[str, str, Callable[[Row], str]]]:
    columns: list[tuple[str, str, Callable[[Row], str]]] = [
        ("method", "method", lambda row: plain(row.get("method", _DASH))),
        *([_setting_column(setting)] if setting else []),
        ("accuracy [95 %]", "accuracy", accuracy_text),
        ("n", "n", _count("n")),
        ("prompt\ntokens", "prompt_tokens_per_task", _count("prompt_tokens_per_task")),
        ("generated\ntokens", "generated_tokens_per_task", _count("generated_tokens_per_task")),
        ("cost\n/ task", "cost_per_task", _count("cost_per_task")),
    ]
    for header, key in shown_faults(rows):
        columns.append((header.replace(" ", "\n"), key, _count(key)))
    if has_regret(rows):
        columns.append(("regret\n/ task", "regret_per_task", regret_text))
    return [*columns, ("wall\ns", "wall_s", _count("wall_s"))]


def has_regret(rows: list[dict[str, Any]]) -> bool:
    """Whether the best spec was known to any of these evaluations."""
    return any(number(row.get("regret_per_task")) is not None for row in rows)


def regret_text(row: Row) -> str:
    """By how much the best spec of a task is expected to have the higher reward, to three places."""
    value = number(row.get("regret_per_task"))
    return _DASH if value is None else f"{value:.3f}"


def _setting_column(keys: list[str]) -> tuple[str, str, Callable[[Row], str]]:
    """One column for all: as five they would not fit, and their header says what is what.

    # header "bench split seed\\nextractor protocol", cell "aqua test 0 lemon full"
    """
    header = " ".join(keys[:3]) + ("\n" if len(keys) > 3 else "") + " ".join(keys[3:])
    return header, "setting", lambda row: " ".join(_said(row.get(key, _DASH)) for key in keys)


def _said(value: object) -> str:
    """A setting in a cell; prices are a list, and stand as the flag gives them.

    # In: [1.0, 3.0, 10.0]   Out: "1,3,10"
    """
    numbers = value if isinstance(value, list) else []
    return ",".join(plain(x).removesuffix(".0") for x in numbers) or plain(value)


def _count(key: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = number(row.get(key))
        if value is None:
            return _DASH
        return f"{value:.1f}" if 0 < abs(value) < 10 and value != int(value) else f"{value:,.0f}"

    return cell


def _caption(summary: Mapping[str, Any]) -> Text:
    caption = Text()
    if calls := calls_line(summary):
        caption.append(calls, style="dim")
    for warning in warnings(summary):
        caption.append("\n" if caption else "")
        caption.append(f"*** {warning} ***", style="bold black on yellow")
    return caption

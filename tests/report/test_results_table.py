import io
import re

import pytest
from report_helpers import make_run
from rich.console import Console

from lemon_jax.report import comparison_lines, load_run, results_table
from lemon_jax.report.comparison import p_text

ROWS = [
    {
        "method": "lemon",
        "n": 50,
        "accuracy": 0.42,
        "ci95": [0.29, 0.56],
        "prompt_tokens_per_task": 1210.5,
        "generated_tokens_per_task": 98.1,
        "cost_per_task": 312.0,
        "no_answer": 1,
        "infra_failed": 0,
        "wall_s": 61.0,
    },
    {
        "method": "self-consistency",
        "n": 50,
        "accuracy": 0.3,
        "ci95": None,
        "cost_per_task": 1512.0,
        "wall_s": 6.25,
    },
]


def render(summary, width=80, terminal=False):
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else None
    )
    console.print(results_table(summary))
    return out.getvalue()


def summary(**more):
    data = {"source": "official", "split": "test", "n": 50}
    return {"bench": "aqua", "seed": 0, "workers": "embedded", "data": data, "eval": ROWS} | more


@pytest.mark.parametrize("width", [80, 120])
def test_a_row_is_a_line(width):
    lines = render(summary(), width).splitlines()
    assert lines[0].startswith("aqua, test split, n 50, seed 0, official data")
    assert all(len(line) <= width for line in lines)
    row = next(line for line in lines if line.startswith("lemon"))
    assert row.split() == ["lemon", "42.0", "%", "[29,", "56]", "50", "1,210", "98", "312", "1", "61"]
    other = next(line for line in lines if line.startswith("self-consistency"))
    assert other.split() == ["self-consistency", "30.0", "%", "50", "-", "-", "1,512", "-", "6.2"]


def test_fault_columns_show_only_when_there_was_a_fault():
    text = render(summary())
    assert "answer" in text
    assert "infra" not in text


def test_best_accuracy_and_lowest_cost_are_bold():
    text = render(summary(), terminal=True)
    assert "\x1b[1m42.0 % [29, 56]" in text
    assert re.search(r"\x1b\[1m +312", text)
    assert not re.search(r"\x1b\[1m *1,512", text)


def test_where_the_replies_came_from():
    text = render(summary(train={"recorded_calls": 300, "cached_calls": 512, "live_calls": 1200}), 120)
    assert "300 from a recording, 1,200 live, 512 from" in " ".join(text.split())


def test_the_sample_is_loud():
    assert "built-in sample: these are not AQuA results" in render(summary(data={"source": "sample"}))
    assert "built-in sample" not in render(summary())
    assert "no language model answered" in render(summary(workers="simulated"))


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"eval": []},
        {"eval": [{}], "data": None, "train": None},
        {"eval": [{"method": "[red]x\x1b[2J", "accuracy": float("nan"), "ci95": [None, 1], "n": "many"}]},
        {"eval": "no", "data": 3, "bench": ["[/]"]},
    ],
)
def test_odd_summaries_still_make_a_table(odd):
    text = render(odd, terminal=False)
    assert "\x1b" not in text


def test_markup_in_a_name_is_text():
    assert "[red]x" in render({"eval": [{"method": "[red]x"}]})


def evaluated(method, answers, cost=10.0):
    return [
        {
            "phase": "eval",
            "method": method,
            "task": f"t{i}",
            "correct": correct,
            "agents": [{"cost": cost, "status": "OK"}, {"cost": None}],
        }
        for i, correct in enumerate(answers)
    ]


def test_comparison_is_paired_and_exact():
    ours = evaluated("lemon", [True] * 6 + [False] * 4, cost=15.0)
    lines = comparison_lines(ours + evaluated("vanilla", [False] * 10))
    assert len(lines) == 1
    assert " ".join(lines[0].split()) == "lemon vs vanilla +60.0 points p 0.031 cost x1.50 n 10"
    noise = comparison_lines(ours + evaluated("cot", [True] * 5 + [False] * 5))[0]
    assert "+10.0 points  p 1.00   inside the noise" in noise
    assert len(noise) < 80


def test_tasks_without_a_verdict_are_left_out():
    failed = evaluated("vanilla", [False, None, True])
    failed[0]["agents"][0]["status"] = "INFRA_FAILED"
    lines = comparison_lines(evaluated("lemon", [True, True, True]) + failed + [{"phase": "train"}, {}])
    assert lines[0].split()[-1] == "1"
    assert comparison_lines(evaluated("vanilla", [True])) == []
    assert comparison_lines([]) == []


def test_nothing_is_divided_by_a_cost_of_zero():
    lines = comparison_lines(evaluated("lemon", [True]) + evaluated("vote", [True], cost=0.0))
    assert "cost" not in lines[0]


def test_lines_of_a_run(tmp_path):
    lines = comparison_lines(load_run(make_run(tmp_path)).executions)
    assert [line.split()[2] for line in lines] == ["vanilla", "cot"]


def test_p_values():
    assert [p_text(p) for p in (0.0312, 0.73, 0.0002, 1.0)] == ["0.031", "0.73", "<0.001", "1.00"]

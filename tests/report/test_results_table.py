import io
import json
import random
import re

import pytest
from report_helpers import make_run
from rich.console import Console

from lemon_jax.bench import mcnemar_exact, paired_bootstrap
from lemon_jax.errors import LemonError
from lemon_jax.report import compare, comparison_lines, load_run, results_table
from lemon_jax.report.cli import print_results
from lemon_jax.report.comparison import check_method, p_text
from lemon_jax.report.results import results_section
from lemon_jax.report.table import WIDE, warnings

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


SETTING = {"bench": "aqua", "split": "test", "seed": 0, "extractor": "lemon", "protocol": "full"}


def with_setting(**more):
    return summary(eval=[row | SETTING | more for row in ROWS])


def render(summary, width=80, terminal=False, wide=False):
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=terminal, color_system="standard" if terminal else None
    )
    console.print(results_table(summary, wide=wide))
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


def test_a_wide_row_says_what_it_was_measured_on():
    lines = render(with_setting(), WIDE, wide=True).splitlines()
    row = next(line for line in lines if line.startswith("lemon"))
    assert "lemon             aqua test 0 lemon full  42.0 % [29, 56]" in row
    assert all(len(line) <= WIDE for line in lines)
    heads = " ".join(lines[1:3]).split()
    assert [h for h in heads if h in SETTING] == list(SETTING)


def test_a_narrow_table_says_it_in_the_title_unless_rows_differ():
    lines = render(with_setting(), 100).splitlines()
    shared = "aqua, test split, n 50, seed 0, official data, extractor lemon, protocol full"
    assert lines[0].rstrip() == shared
    assert not set(SETTING) & set(" ".join(lines[1:3]).split())
    mixed = with_setting()
    mixed["eval"][1]["extractor"] = "strict"
    lines = render(mixed, 100).splitlines()
    assert lines[0].rstrip() == shared.replace(" extractor lemon,", "")
    assert [word for word in " ".join(lines[1:3]).split() if word in SETTING] == ["extractor"]
    assert next(line for line in lines if line.startswith("self-consistency")).split()[1] == "strict"


def test_the_title_names_what_was_tested_and_not_what_was_trained_on():
    lines = render(with_setting() | {"bench": "gsm8k"}, 100).splitlines()
    assert lines[0].startswith("aqua, test split")


def test_everything_fits_the_wide_table():
    """The widest values there are: what gives way is the setting, which wraps between words."""
    long = SETTING | {"bench": "multiarith"}
    rows = [
        ROWS[0] | long | {"method": "best_fixed", "accuracy": 1.0, "ci95": [0.97, 1.0], "n": 14042},
        ROWS[0] | long | {"method": "warmstart", "no_answer": 120, "infra_failed": 31, "wall_s": 12345.0},
    ]
    lines = render(summary(eval=rows), WIDE, wide=True).splitlines()
    assert all(len(line) <= WIDE for line in lines)
    text = "\n".join(lines)
    for cell in ("best_fixed", "100.0 % [97, 100]", "14,042", "multiarith test 0", "lemon full", "12,345"):
        assert cell in text


def test_a_file_is_as_wide_as_the_wide_table_and_a_terminal_as_itself(capsys):
    print_results(with_setting(), [])
    assert "aqua test 0 lemon full" in capsys.readouterr().out
    out = io.StringIO()
    print_results(with_setting(), [], Console(file=out, width=90))
    assert all(len(line) <= 90 for line in out.getvalue().splitlines())
    assert "protocol full" in out.getvalue().splitlines()[0]


def test_fault_columns_show_only_when_there_was_a_fault():
    text = render(summary())
    assert "answer" in text
    assert "infra" not in text


def test_prompts_that_did_not_fit_are_told_of_below_the_table():
    rows = [ROWS[0], ROWS[1] | {"method": "tree", "context_overflows": 31}]
    rows.append(ROWS[1] | {"method": "complete", "context_overflows": 1204})
    said = "tasks with a prompt that did not fit its worker's context: tree 31, complete 1,204"
    assert said in " ".join(render(summary(eval=rows)).split())
    assert warnings(summary()) == []


def test_best_accuracy_and_lowest_cost_are_bold():
    text = render(summary(), terminal=True)
    assert "\x1b[1m42.0 % [29, 56]" in text
    assert re.search(r"\x1b\[1m +312", text)
    assert not re.search(r"\x1b\[1m *1,512", text)


def test_a_method_whose_every_execution_failed_has_no_result_and_is_not_the_cheapest(tmp_path):
    """The row that `evaluate` makes of it."""
    unknown = dict.fromkeys(("accuracy", "prompt_tokens_per_task", "generated_tokens_per_task"))
    lost = ROWS[1] | unknown | {"cost_per_task": None, "ci95": [0.0, 1.0]}
    lost |= {"method": "sc", "infra_failed": 50}
    rows = summary(eval=[ROWS[0], ROWS[1] | {"method": "cot"}, lost])
    text = render(rows, terminal=True)
    assert re.search(r"\x1b\[1m +312", text)
    line = next(x for x in render(rows).splitlines() if x.startswith("sc "))
    assert line.split() == ["sc", "-", "50", "-", "-", "-", "-", "50", "6.2"]
    (tmp_path / "summary.json").write_text(json.dumps(rows))
    html = results_section(load_run(tmp_path))
    assert re.findall(r'class="(?:n )?best">([0-9.]+)', html) == ["42.0", "312"]


def several_benches():
    """Rows in which the best of one bench are behind those of the other, and a bench with one row."""
    numbers = [("a", 0.41, 11.0), ("a", 0.42, 12.0), ("b", 0.83, 103.0), ("b", 0.84, 102.0), ("c", 0.95, 1.0)]
    return summary(
        eval=[
            {"bench": bench, "method": f"m{i}", "n": 50, "accuracy": accuracy, "cost_per_task": cost}
            for i, (bench, accuracy, cost) in enumerate(numbers)
        ]
    )


def test_the_best_are_those_of_each_bench(tmp_path):
    text = render(several_benches(), width=WIDE, terminal=True)
    assert re.findall(r"\x1b\[1m *([0-9.]+)", text) == ["11", "42.0", "84.0", "102"]
    (tmp_path / "summary.json").write_text(json.dumps(several_benches()))
    (tmp_path / "manifest.json").write_text("{}")
    html = results_section(load_run(tmp_path))
    assert re.findall(r'class="(?:n )?best">([0-9.]+)', html) == ["11", "42.0", "84.0", "102"]
    assert "best accuracy, lowest cost of each bench." in html


def test_where_the_replies_came_from():
    text = render(summary(calls={"recorded": 300, "live": 1200}, train={"cached_calls": 512}), 120)
    assert "300 from a recording, 1,200 live, 512 from" in " ".join(text.split())
    assert "calls 7 live" in render(summary(train={"live_calls": 7}), 120)  # lemon eval has no more


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
            "agents": [{"cost": cost, "status": "OK"}, {}],
        }
        for i, correct in enumerate(answers)
    ]


def test_comparison_is_paired_and_exact():
    ours = evaluated("lemon", [True] * 6 + [False] * 4, cost=15.0)
    lines = comparison_lines(ours + evaluated("vanilla", [False] * 10))
    assert len(lines) == 1
    # Six wins of ten: the bootstrap draws binomial(10, 0.6), whose 2.5 % and 97.5 % points are 3 and 9.
    assert (
        " ".join(lines[0].split()) == "lemon vs vanilla +60.0 points [+30.0, +90.0] p 0.031 cost x1.50 n 10"
    )
    noise = comparison_lines(ours + evaluated("cot", [True] * 5 + [False] * 5))[0]
    assert "+10.0 points [ +0.0, +30.0]  p 1.00   inside the noise" in noise
    assert len(noise) < 110


def test_the_exact_test_decides_what_is_noise():
    # Five wins of fifty without a loss: the interval leaves 0 out, the exact test does not.
    (few,) = compare(evaluated("lemon", [True] * 5 + [False] * 45) + evaluated("cot", [False] * 50))
    assert few.interval[0] > 0
    assert few.p == mcnemar_exact(5, 0) == 0.0625
    assert few.inside_noise
    # What it calls a difference, the interval never contradicts.
    for n in (10, 40, 200):
        for b, c in ((x, y) for x in range(min(n, 20) + 1) for y in range(x) if x + y <= n):
            assert mcnemar_exact(b, c) >= 0.05 or paired_bootstrap(b, c, n)[0] > 0, (b, c, n)
    (more,) = compare(evaluated("lemon", [True] * 9 + [False] * 41) + evaluated("cot", [False] * 50))
    assert not more.inside_noise
    (same,) = compare(evaluated("lemon", [True] * 9) + evaluated("cot", [True] * 9))
    assert (same.difference, same.interval, same.p, same.inside_noise) == (0.0, (0.0, 0.0), 1.0, True)


def test_any_method_can_be_the_reference():
    rows = evaluated("lemon", [True] * 9) + evaluated("cot", [False] * 9) + evaluated("sc", [True] * 9)
    lines = comparison_lines(rows, "cot")
    assert [line.split()[:4] for line in lines] == [
        ["cot", "vs", "lemon", "-100.0"],
        ["cot", "vs", "sc", "-100.0"],
    ]
    check_method(rows, "cot")
    with pytest.raises(LemonError, match=r"no method 'tree' .* evaluated were: lemon, cot, sc"):
        check_method([*rows, {"phase": "train", "method": "tree"}], "tree")


def paired_by_hand(ours, other):
    """The pairs, counted task by task with everything spelled out."""
    b = c = n = 0
    for one in ours:
        for two in other:
            if one["task"] != two["task"] or one["infra_failed"] or two["infra_failed"]:
                continue
            n += 1
            b += one["correct"] and not two["correct"]
            c += two["correct"] and not one["correct"]
    return b, c, n


@pytest.mark.parametrize("seed", range(5))
def test_masked_tasks_of_either_method_drop_out_of_the_pair(seed):
    rng = random.Random(seed)
    rows = {}
    for method in ("lemon", "cot"):
        rows[method] = evaluated(method, [rng.random() < 0.5 for _ in range(40)])
        for row in rows[method]:
            row["infra_failed"] = rng.random() < 0.2
        rng.shuffle(rows[method])
    (found,) = compare(rows["lemon"] + rows["cot"])
    expected = paired_by_hand(rows["lemon"], rows["cot"])
    assert (found.only_ours, found.only_other, found.n) == expected
    assert 0 < found.n < 40


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


def test_regret_has_a_column_where_it_is_known():
    assert "regret" not in render(summary())
    rows = [ROWS[0] | {"regret_per_task": 0.0513}, ROWS[1]]
    text = render(summary(eval=rows, simulated=True, workers="mine.toml"))
    assert "regret" in text
    assert "0.051" in text
    assert "simulated workers" in text.splitlines()[0]
    assert "no language model answered" in text

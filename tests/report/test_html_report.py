import json
import re
from html.parser import HTMLParser

import pytest
from report_helpers import FAMILIES, make_run, write_lines, write_object

from lemon_jax.cli import main
from lemon_jax.errors import LemonError
from lemon_jax.report import write_report
from lemon_jax.report.svg import Series, compact, line_chart, percent, ticks

EVIL = "</pre><script>alert(1)</script>\"'><img src=x onerror=alert(1)>\x00\x1b[2J\ud800\u202e${x}&amp;"
VOID = {"meta"}


class Checker(HTMLParser):
    """Fails on tags that do not nest; collects tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.stack, self.tags, self.attributes, self.text = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    assert checker.tags.isdisjoint({"script", "img", "link", "iframe", "object"})
    assert not [name for name, _ in checker.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"\b(nan|inf|None)\b", re.sub(r"<style>.*?</style>", "", page, flags=re.S))
    return page, " ".join("".join(checker.text).split())


def test_a_finished_run_has_every_section(tmp_path):
    path = write_report(make_run(tmp_path / "my-run", steps=20))
    assert path == tmp_path / "my-run" / "report.html"
    page, text = read(path)
    for words in ("my-run", "Results", "lemon vs vanilla", "Training", "Reward", "Entropy", "lower capacity"):
        assert words in text
    for words in (
        "What the specs use",
        "steps 1 to 4",
        "steps 17 to 20",
        "Specs of the last step (20)",
        "train.lr",
    ):
        assert words in text
    assert page.count("<svg") > 12
    assert page.count("<article>") == 3
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("kept", ["manifest.json", "metrics.jsonl", "executions.jsonl", "summary.json"])
def test_any_one_file_makes_a_report(tmp_path, kept):
    make_run(tmp_path)
    for path in tmp_path.iterdir():
        if path.name != kept:
            path.unlink()
    _, text = read(write_report(tmp_path))
    assert ("Training" in text) == (kept == "metrics.jsonl")
    assert ("Run facts" in text) == (kept == "manifest.json")
    assert ("What the specs use" in text) == (kept == "executions.jsonl")


def evil(value):
    """The same data with every text, and every key that is free, made hostile."""
    if isinstance(value, dict):
        return {key: evil(item) for key, item in value.items()} | {EVIL: EVIL}
    if isinstance(value, list):
        return [*map(evil, value), EVIL]
    return EVIL if isinstance(value, str) else value


def test_hostile_texts_stay_text(tmp_path):
    make_run(tmp_path, steps=2)
    for name in ("manifest.json", "metrics.jsonl", "executions.jsonl"):
        rows = [evil(json.loads(line)) for line in (tmp_path / name).read_text().splitlines()]
        for row in rows:
            row.update({k: v for k, v in (("phase", "train"), ("step", 2)) if k in row})
            row |= {f"edit_prob/{EVIL}": 0.5, "errors": [EVIL], "valid": False, "spec": EVIL}
        write_lines(tmp_path / name, rows) if name.endswith("l") else write_object(tmp_path / name, rows[0])
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary |= {"bench": EVIL, "policy": EVIL, "workers": EVIL, "seed": EVIL}
    summary["eval"][1]["method"] = EVIL
    write_object(tmp_path / "summary.json", summary)
    page, text = read(write_report(tmp_path))
    assert "<script" not in page
    assert "alert(1)" in text
    assert not {"\x00", "\x1b", "\u202e"} & set(page)


def test_missing_and_null_values(tmp_path):
    rows = [
        {"step": 1, "reward": float("nan"), "kl": None},
        {},
        {"step": 9, "reward": 1.0, "accuracy": "high"},
    ]
    write_lines(
        tmp_path / "metrics.jsonl", [*rows, {"step": 10, "kl": float("inf"), f"contrast/{FAMILIES[0]}": None}]
    )
    odd = [{}, {"phase": "train", "step": 3}, {"phase": "train", "step": None, "agents": None, "reward": 5}]
    odd += [{"phase": "train", "step": 4, "spec": "x", "agents": [None, {}], "reward": {"total": None}}]
    odd += [{"phase": "eval", "method": None, "task": {"id": 1}, "correct": True}]
    write_lines(tmp_path / "executions.jsonl", odd)
    write_object(tmp_path / "summary.json", {"eval": [{"method": "lemon", "accuracy": None}], "train": {}})
    _, text = read(write_report(tmp_path))
    assert "Reward" in text
    assert "KL" not in text
    assert "not graded" in text


def test_empty_metrics(tmp_path):
    write_object(tmp_path / "manifest.json", {"seed": 1})
    (tmp_path / "metrics.jsonl").write_text("\n\n")
    page, text = read(write_report(tmp_path))
    assert "the run has not finished" in text
    assert "<svg" not in page


def test_the_sample_is_loud(tmp_path):
    make_run(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary["data"]["source"] = "sample"
    write_object(tmp_path / "summary.json", summary)
    assert "built-in sample: these are not AQuA results" in read(write_report(tmp_path))[1]


def test_the_command_prints_the_table_and_the_path(tmp_path, capsys):
    make_run(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "lemon vs cot" in out
    assert out.splitlines()[-1] == f"report: {tmp_path / 'report.html'}"
    (tmp_path / "summary.json").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "no results yet" in capsys.readouterr().out


def test_each_result_row_and_comparison_is_complete(tmp_path):
    make_run(tmp_path)
    page, text = read(write_report(tmp_path))
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)</th>", page)
    assert heads[:7] == [
        "method",
        "bench",
        "split",
        "seed",
        "extractor",
        "protocol",
        "accuracy, 95 % interval",
    ]
    row = re.search(r'<tr class=ours><th scope="row">lemon</th>(.*?)</tr>', page)
    cells = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row[1])]
    assert cells[:5] == ["aqua", "test", "0", "lemon", "full"]
    assert "inside the noise" in text
    assert re.search(r"lemon vs vanilla[+-]\d+\.\d points\[ *[+-]\d+\.\d, *[+-]\d+\.\d\]", text)
    assert "paired bootstrap, 10,000 resamples" in text


def test_another_reference(tmp_path, capsys):
    make_run(tmp_path)
    assert main(["report", str(tmp_path), "--reference", "cot"]) == 0
    assert "cot vs vanilla" in capsys.readouterr().out
    _, text = read(tmp_path / "report.html")
    assert "cot vs lemon" in text
    assert "lemon vs" not in text.partition("Results")[2]
    assert "only cot right" in text
    assert main(["report", str(tmp_path), "--reference", "tree"]) == 2
    assert "no method 'tree'" in capsys.readouterr().err


def test_the_command_names_a_damaged_file(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{\n{}\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "metrics.jsonl:1" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_a_fault(tmp_path):
    make_run(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(LemonError, match=r"report\.html: cannot be written"):
        write_report(tmp_path)


def test_ticks_are_round_and_cover():
    assert ticks(0.93, 1.37) == [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]
    for low, high in ((0, 0), (5, 5), (-1e-9, 1e-9), (1e300, 1.1e300), (0, 254), (1.0, 1.0 + 1e-15), (-3, 7)):
        found = ticks(low, high)
        assert found[0] <= low
        assert found[-1] >= high
        assert 2 <= len(found) <= 8


def test_short_numbers():
    numbers = (0.00312, 1.314, 3412, 81234, 2.1e6, 0, 1e300, -0.5)
    assert [compact(v) for v in numbers] == [
        "0.00312",
        "1.31",
        "3,412",
        "81.2k",
        "2.1M",
        "0",
        "1.0e+300",
        "-0.5",
    ]
    assert [percent(v) for v in (0.5, 0.025, 1)] == ["50 %", "2.5 %", "100 %"]


def test_charts_of_few_and_of_many_points():
    assert line_chart([], label="x") == ""
    assert line_chart([Series(name="a", points=[(1, None)])], label="x") == ""
    assert "h0" in line_chart([Series(name="a", points=[(1, 2.0)])], label="x")
    many = line_chart([Series(name="a", points=[(i, float(i % 7)) for i in range(20_000)])], label="x")
    assert len(many) < 60_000

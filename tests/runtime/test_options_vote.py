from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lemon_jax.runtime.tools.options import nearest, nearest_option
from lemon_jax.runtime.tools.vote import majority

PRICES = ["A)$61", "B)$65", "C)$67.40", "D)$70", "E)$78.20"]
SURDS = ["A)5(√3 + 1)", "B)6(√3 + √2)", "C)7(√3 – 1)", "D)8(√3 – 2)", "E)None of these"]


@pytest.mark.parametrize(
    ("value", "options", "letter"),
    [
        ("78.2", PRICES, "E"),
        ("$66", PRICES, "B"),
        ("1000", PRICES, "E"),
        ("67.399999", PRICES, "C"),
        ("13.66", SURDS, "A"),
        ("5(√3+1)", SURDS, "A"),
        ("none of these", SURDS, "E"),
        ("0.7071", ["1/2", "1/√2", "√2"], "B"),
        ("6.28", ["π", "2π", "3 pi"], "B"),
        ("0.25", ["A)20%", "B)25%", "C)30%"], "B"),
        ("25", ["A)20%", "B)25%", "C)30%"], "B"),
        ("25%", ["A)0.2", "B)0.25", "C)0.3"], "B"),
        ("0.75", ["A)2:3", "B)3:4", "C)4:3"], "B"),
        ("3/4", ["A)0.7", "B)0.75"], "B"),
        ("1200", ["A)1,100", "B)1,200 m"], "B"),
        ("4000", ["Rs. 3,000", "Rs. 4,000"], "B"),
        ("-5", ["A)5", "B)-5"], "B"),
        ("0", ["A)1", "B)0"], "B"),
        ("15", ["A)10", "B)20"], "A"),  # a tie goes to the first
        ("10", ["A)5", "B)19"], "A"),
        ("36", ["A)36", "B)36"], "A"),
        ("C", PRICES, "C"),
        ("d", PRICES, "D"),
        ("(B)", PRICES, "B"),
        ("Answer: C", PRICES, "C"),
        ("Answer: **C**", PRICES, "C"),
        ("The answer is (D).", PRICES, "D"),
        ("B) 3/4", ["A)1/2", "B)3/4"], "B"),
        ("F", PRICES, None),
        ("", PRICES, None),
        ("no idea", PRICES, None),
        ("12", ["A)yes", "B)no"], None),
        ("12", [], None),
    ],
)
def test_nearest_option(value: str, options: list[str], letter: str | None) -> None:
    assert nearest_option(value, options) == letter


def test_distance_is_relative_to_the_value() -> None:
    assert nearest("50", ["A)40", "B)100"]) == ("A", pytest.approx(0.2))
    assert nearest("40", ["A)40", "B)100"]) == ("A", 0.0)
    assert nearest("nothing", ["A)40"]) is None


@pytest.mark.parametrize(
    "text", ["√" * 400 + "2", "9^9^9^9", "√-1 π", "1/0", "(" * 400, "1e999", "10^10^10 π"]
)
def test_hostile_option_texts_are_skipped(text: str) -> None:
    assert nearest_option("3", [text, "3"]) == "B"


@pytest.mark.skipif("LEMON_DATA" not in os.environ, reason="LEMON_DATA names no folder with the benchmarks")
def test_every_comparable_aqua_option_is_nearest_to_itself() -> None:
    lines = (Path(os.environ["LEMON_DATA"]) / "aqua" / "test.json").read_text(encoding="utf-8").splitlines()
    found = same = 0
    for item in map(json.loads, lines):
        for index, option in enumerate(item["options"]):
            result = nearest(option.partition(")")[2], item["options"])
            if result is not None:
                found += 1
                same += result == (chr(65 + index), 0.0)
    assert found > 1_100
    assert same / found > 0.97  # the rest are duplicate options of one item


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["39", "40", "39.0"], "39"),
        (["1,000", "1000", "7"], "1,000"),
        (["$5", "6", "6", "5.00", "5"], "$5"),
        (["b", "A", "B"], "b"),
        (["7", "8"], "7"),
        (["8", "7", "7", "8"], "8"),
        ([None, "", "  ", "3", None], "3"),
        ([None, None], None),
        ([], None),
        (["None of these", "none  of these", "4"], "None of these"),
        ([" 12 "], "12"),
    ],
)
def test_majority(answers: list[str | None], winner: str | None) -> None:
    assert majority(answers) == winner


def test_numbers_beyond_every_float_are_no_crash():
    huge = "9" * 320
    assert nearest_option(huge, ["1", "2"]) is None
    assert nearest_option("3", ["1", huge]) == "A"

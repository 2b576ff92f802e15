"""What holds of every text, by hypothesis: the promises of experiments/fuzz_targets.py, and bounded time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cpu_time import at_most
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
from fuzz_targets import check_spec, check_spec_text

from lemon_jax.spec import MAX_BYTES, Agent, Spec, dump, parse
from lemon_jax.spec.reader import MAX_NODES

PIECES = st.sampled_from(
    [
        *(
            "",
            " ",
            "\n",
            "\t",
            "\r\n",
            ":",
            ": ",
            "- ",
            "#",
            " #",
            "&a ",
            "*a",
            "!x ",
            "| ",
            ">-\n",
            "? ",
            "%",
        ),
        *(
            "[",
            "]",
            "{",
            "}",
            ",",
            '"',
            "'",
            "\\",
            "`",
            "```",
            "```\n",
            "```yaml\n",
            "~~~",
            "---\n",
            "...\n",
            "<<: ",
        ),
        *(
            "\u00a0",
            "\u2003",
            "\u201c",
            "\u201d",
            "\ufeff",
            "\u2028",
            "\x85",
            "\u0301",
            "\U0001f9ee",
            "\\ud83d\\ude00",
        ),
        *(
            "a1",
            "1a",
            "A1",
            "Small",
            "MATH_SOLVER",
            "no",
            "0x1f",
            "1e3",
            "~",
            "null",
            "version",
            "agents:\n",
            "output",
        ),
    ]
)
TOKENS = st.lists(PIECES | st.text(max_size=3), max_size=60).map("".join)


@given(st.text(max_size=300) | TOKENS)
def test_any_text(text):
    check_spec_text(text)


@given(st.binary(max_size=200))
def test_any_bytes(data):
    check_spec(data)


@given(st.data())
def test_a_spec_with_pieces_put_in_and_taken_out(specs, data):
    text = dump(data.draw(specs))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(PIECES) + text[at + data.draw(st.integers(0, 4)) :]
    check_spec_text(text)


@given(st.data())
def test_a_spec_whose_lines_are_moved_repeated_and_lost(specs, data):
    lines = dump(data.draw(specs)).splitlines(keepends=True)
    order = data.draw(st.lists(st.integers(0, len(lines) - 1), max_size=2 * len(lines)))
    check_spec_text("".join(lines[i] for i in order))


@given(st.data())
def test_a_spec_in_other_words(specs, data):
    """Loosely written as a model might: quotes left out, case changed, prose and fences around it."""
    text = dump(data.draw(specs))
    for old, new in data.draw(
        st.lists(
            st.sampled_from(
                [('"', ""), ("small", "Small"), ("math", "Math"), ("  ", "\t"), ("[", ""), (": ", ":\u00a0")]
            ),
            max_size=4,
        )
    ):
        text = text.replace(old, new, data.draw(st.integers(1, 20)))
    before, after = data.draw(st.sampled_from([("", ""), ("Sure:\n```yaml\n", "```\nDone."), ("```\n", "")]))
    check_spec_text(before + text + after)


FAULT = "- duty: a: b\n"
AGENT = """\
  - id: a{}
    name: x
    role: math_solver
    duty: a: b
    capacity: small
    depends_on: []
"""
HEAVY = {
    "a fault a line": FAULT * 1300,
    "many items, then faults": "- a\n" * 3000 + FAULT * 200,
    "a wide flow list, then faults": f"- [{'a,' * 6800}a]\n{FAULT * 200}",
    "flow maps, then faults": "- {a: b}\n" * 1500 + FAULT * 200,
    "nearly too many values, then faults": f"- [{'a,' * (MAX_NODES - 500)}a]\n{FAULT * 200}",
    "agents with faults": "version: 1\nagents:\n"
    + "".join(AGENT.format(i) for i in range(16))
    + "output: a1\n",
    "odd spaces": "- a:\u00a0b\n" * 1200,
    "tabs": "- a\n" * 100 + "\t- a\n" * 2500,
    "surrogates": 'a: ["\\ud83d\\ude00", ' * 800,
    "fences": "```\n" * 4000,
    "one long fence": "`" * 16000,
    "brackets": "[" * 16000,
    "quotes": "'\"" * 8000,
    "spaces": " " * 16000 + ":",
    "a long word": "version: " + "a" * 16000,
    "keys": "version: 1\n" + "".join(f"k{i}: 1\n" for i in range(1600)),
    "dependencies": f"version: 1\nagents:\n  - {{id: a, depends_on: [{'b,' * 7000}b]}}\n",
    "cycles": "version: 1\nagents:\n"
    + "".join(f"  - {{id: a{i}, depends_on: [a{(i + 1) % 16}, a{(i + 7) % 16}]}}\n" for i in range(16)),
    "directives": "%YAML 1.1\n" * 1600,
    "documents": "---\n" * 4000,
    "anchors": "&a " * 5000,
    "explicit keys": "? " * 8000,
    "comments": "#\n" * 8000,
    "spaces behind a fence": "```" + " " * 16000 + "`",
    "tabs behind a fence": "```x" + "\t" * 16000 + "`",
    "tildes": "~" * 16000 + "`",
    "lines of spaces behind fences": ("```" + " " * 1000 + "`\n") * 16,
    "dashes before a fence": "@\n" + "\n-" * 7000 + "\n```\nx",
    "braces before a fence": "@\n" + "{" * 16000 + "\n```\nx",
    "empty lines behind a fence": "@\n```\n" + "\n" * 16000,
    "empty lines behind a key": "@\nversion" + "\n" * 16000 + "```\nx",
    "spaces within a text": "duty: a: b" + " " * 16000 + "c",
    "spaces before a text": "duty:" + " " * 16000 + "a: b",
    "spaces behind an indicator": "duty: a: b |" + " " * 8000 + "#" + " " * 7000 + "c",
    "spaces behind an anchor": "duty: &a" + " " * 16000 + "b",
    "spaces behind a dash": "-" + " " * 16000 + "duty: a: b",
    "odd spaces behind a word": "a" + "\u00a0" * 5000 + "b: c: d",
}


@pytest.mark.parametrize("text", HEAVY.values(), ids=HEAVY)
def test_the_time_for_any_text_is_bounded(text):
    with at_most(1.0):
        check_spec_text(text[:MAX_BYTES])


@given(st.lists(st.tuples(PIECES, st.integers(1, 3000)), min_size=1, max_size=4), st.booleans())
def test_the_time_for_repeated_pieces_is_bounded(parts, faults):
    text = "".join(piece * times for piece, times in parts)[: MAX_BYTES // 2]
    with at_most(1.0):
        parse((text + "\n" + FAULT * 500 if faults else text)[: MAX_BYTES // 2])


def test_the_largest_spec_is_far_below_the_limit_of_values():
    agents = [
        Agent(
            id=f"a{i}",
            name="n",
            role="math_solver",
            duty="d",
            capacity="small",
            depends_on=tuple(f"a{j}" for j in range(i)),
        )
        for i in range(16)
    ]
    text = dump(Spec(agents=tuple(agents), output="a15"))
    check_spec_text(text)
    assert parse(text).strict_ok
    (issue,) = parse(text + "".join(f"k{i}: v\n" for i in range(MAX_NODES // 2))).issues
    assert (issue.code, issue.message) == ("E_LIMIT", f"more than {MAX_NODES} keys and values")

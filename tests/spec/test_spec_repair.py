"""The repaired verdict: what is mended, under which name, and what is refused."""

from __future__ import annotations

import json

import pytest

from lemon_jax.spec import dump, parse, parse_strict
from lemon_jax.spec.errors import Fault, Finding
from lemon_jax.spec.repair import Splice, diagnose, original_index


def same(parsed, text: str) -> bool:
    """The repaired spec is the one of this strict text, and its spans point into its canonical text."""
    assert not parsed.strict_ok
    assert parsed.text == dump(parsed.spec)
    for path, (start, end) in parsed.spans.items():
        if path[-1] == "capacity":
            assert parsed.text[start:end] == parsed.spec.agents[path[1]].capacity
    return parsed.spec == parse_strict(text)


def test_prose_and_fence(example):
    parsed = parse(f"Two helpers suffice.\n```yaml\n{example}```\nGood luck!")
    assert same(parsed, example)
    assert parsed.repairs == ("strip_prose", "strip_fence")
    assert [(i.code, i.line, i.col) for i in parsed.issues] == [("E_FENCE", 2, 1)]


def test_fence_alone(example):
    for text in (f"```yaml\n{example}```", f"~~~~\n{example}~~~~\n", f"  ```\n{example}  ```\r\n"):
        parsed = parse(text)
        assert same(parsed, example)
        assert parsed.repairs == ("strip_fence",)


def test_two_fenced_blocks_are_ambiguous(example):
    parsed = parse(f"```yaml\n{example}```\nor\n```yaml\n{example}```\n")
    assert parsed.spec is None
    assert [i.code for i in parsed.issues] == ["E_AMBIGUOUS"]
    assert parsed.issues[0].line == 19
    assert [i.code for i in parse(f"{example}```\n{example}").issues] == ["E_AMBIGUOUS"]


def test_a_spec_outside_the_fence_is_ambiguous(example):
    other = example.replace("medium", "large")
    bare_json = json.dumps({"version": 1, "agents": [], "output": "s"})
    indented = "  " + example.replace("\n", "\n  ").rstrip(" ")
    for bare in (
        example,
        "\ufeff" + example,
        bare_json + "\n",
        json.dumps({"agents": []}, indent=2) + "\n",
        indented,
    ):
        parsed = parse(f"{bare}```yaml\n{other}```\n")
        assert parsed.spec is None
        assert "E_AMBIGUOUS" in [i.code for i in parsed.issues]
    for text in (f"```yaml\n{other}```\n{example}", f"```\n{other}```\nor\n{bare_json}"):
        assert [i.code for i in parse(text).issues] == ["E_AMBIGUOUS"]
        assert parse(text).spec is None


@pytest.mark.parametrize(
    "prose", ["Note: version: 2", "- agents: two", "Agents: two", "a version: 1", "agents"]
)
def test_prose_about_a_spec_is_not_a_spec(example, prose):
    assert same(parse(f"{prose}\n```yaml\n{example}```\n"), example)
    assert same(parse(f"```yaml\n{example}```\n{prose}\n"), example)


FENCED_DUTIES = """\
version: 1
output: s
agents:
- id: s
  name: Solver: careful
  role: math_solver
  duty: |
   Write
   ```yaml
   version: 1
   agents:
   - {id: x, name: N, role: math_solver, duty: D, capacity: small, depends_on: []}
   output: x
   ```
  capacity: small
  depends_on: []
- id: t
  name: Reader
  role: math_solver
  duty: Read.
  capacity: small
  depends_on: [s]
"""


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "left open"])
@pytest.mark.parametrize("twice", [True, False], ids=["two fences", "one fence"])
@pytest.mark.parametrize(
    ("strict", "faulty"),
    [
        ('"Solver: careful"', "Solver: careful"),
        ("Reader", "Reader: careful"),
        ("  role", "\trole"),
        ("id: s", "id:\u00a0s"),
    ],
)
def test_a_fence_in_a_duty_is_never_taken_for_the_spec(strict, faulty, closed, twice):
    text = FENCED_DUTIES.replace("Solver: careful", '"Solver: careful"')
    text = text if closed else text.replace("   ```\n", "")
    text = text.replace("duty: Read.", "duty: |\n   Read\n   ```\n   x\n   ```") if twice else text
    if "Reader:" in faulty:
        expected = parse_strict(text.replace("Reader", '"Reader: careful"'))
    else:
        expected = parse_strict(text)
    parsed = parse(text.replace(strict, faulty))
    assert not parsed.strict_ok
    assert parsed.spec == expected
    assert not {"strip_fence", "strip_prose"} & set(parsed.repairs)


@pytest.mark.parametrize("fault", ['name: "half', "name: &x |", "nonsense"])
def test_a_fault_behind_a_fence_in_a_duty_does_not_drop_agents(fault):
    text = FENCED_DUTIES.replace("Solver: careful", "Solver").replace("   ```\n", "")
    text = text.replace("name: Reader", fault)
    assert parse(text).spec is None


def test_a_byte_order_mark_before_a_fence(example):
    parsed = parse(f"\ufeff```yaml\n{example}```")
    assert same(parsed, example)
    assert parsed.repairs == ("strip_fence",)


def test_an_opener_without_closer_takes_the_rest(example):
    assert same(parse(f"```yaml\n{example}"), example)
    assert same(parse(f"Here it is\n```\n{example}"), example)
    cut = parse("```yaml\nagents:\n  - id: s")
    assert cut.spec is None
    found = {(i.code, i.path[-1] if i.path else "") for i in cut.issues}
    assert {("E_FENCE", ""), ("E_MISSING", "capacity"), ("E_MISSING", "output")} <= found


def test_a_lone_closer_takes_what_is_before(example):
    assert same(parse(f"{example}```"), example)
    parsed = parse(f"{example}```\nGood luck!")
    assert same(parsed, example)
    assert parsed.repairs == ("strip_prose", "strip_fence")


def test_a_fence_inside_a_duty_is_text(document, agent):
    text = document(agent(duty="|\n      Write\n      ```python\n      x\n      ```"))
    assert parse(text).strict_ok
    assert same(parse(f"```yaml\n{text}```"), text)


def test_faults_behind_a_fence_keep_their_place(example):
    parsed = parse(f"Here:\n\n```yaml\n{example.replace('medium', 'Medium')}```")
    assert [(i.code, i.line, i.col) for i in parsed.issues] == [("E_FENCE", 3, 1), ("E_ENUM", 16, 15)]
    assert parsed.repairs == ("strip_prose", "strip_fence", "fold_case")


def test_tabs(document, agent):
    text = document(agent("s", duty='"a\tb"', name="x\ty"))
    tabbed = text.replace("\n    ", "\n\t\t").replace("\n  - ", "\n\t- ")
    parsed = parse(tabbed)
    assert same(parsed, text)
    assert parsed.repairs == ("tabs_to_spaces",)
    assert (parsed.spec.agents[0].duty, parsed.spec.agents[0].name) == ("a\tb", "x\ty")
    assert {i.code for i in parsed.issues} == {"E_TAB"}
    assert (parsed.issues[0].line, parsed.issues[0].col) == (3, 1)
    cut = parse("agents:\n\t- id: s").issues
    assert [(i.line, i.col) for i in cut if i.code == "E_TAB"] == [(2, 1)]


@pytest.mark.parametrize(("dash", "inner"), [("\t-\t", "\t\t"), ("  -\t", "    "), ("\t-\t\t", "\t\t\t")])
def test_a_tab_behind_a_dash(document, agent, dash, inner):
    text = document(agent("s"), agent("t", depends_on="[s]"), output="t")
    parsed = parse(text.replace("\n    ", "\n" + inner).replace("\n  - ", "\n" + dash))
    assert same(parsed, text)
    assert parsed.repairs == ("tabs_to_spaces",)


def test_tabs_in_a_literal_duty_are_untouched(document, agent):
    text = document(agent("s", duty="|\n      if x:\n      \treturn"))
    parsed = parse(text.replace("    capacity", "\t\tcapacity"))
    assert parsed.spec.agents[0].duty == "if x:\n\treturn\n"


def test_colon_in_a_plain_duty(document, agent):
    parsed = parse(document(agent(duty="Check: is 3+4 = 7?")))
    (issue,) = parsed.issues
    assert (issue.code, issue.path, issue.line, issue.col) == ("E_SYNTAX", ("duty",), 6, 16)
    assert issue.hint == "quote the value or use |"
    assert parsed.spec.agents[0].duty == "Check: is 3+4 = 7?"
    assert parsed.repairs == ("quote_text",)


INDICATORS = [
    "*carry* digits",
    "%share of 40",
    "@s verifies",
    "`x` is unknown",
    "{n} apples",
    "!careful",
    "&note short",
]


@pytest.mark.parametrize(
    "duty",
    [*INDICATORS, "[x] y: z", "{n}", "[check]", "> 5 apples", "! really", "? [a", "{open", "- a: b: c"],
)
@pytest.mark.parametrize("field", ["duty", "name"])
def test_a_leading_indicator_is_never_altered_in_silence(document, agent, duty, field):
    parsed = parse(document(agent(**{field: duty})))
    assert not parsed.strict_ok
    assert parsed.issues[0].code in {"E_SYNTAX", "E_ANCHOR", "E_TAG", "E_SHAPE"}
    assert parsed.issues[0].line in {4, 5, 6, 7, 8}
    if parsed.spec is not None:
        assert getattr(parsed.spec.agents[0], field) == duty
        assert parsed.repairs == ("quote_text",)


@pytest.mark.parametrize("duty", [*INDICATORS, "[x] y: z", "{n}", "> 5 apples", "! really"])
def test_leading_indicators_are_repaired(document, agent, duty):
    assert parse(document(agent(duty=duty))).spec.agents[0].duty == duty


CUT = [
    "Multiply the price by the # of shirts",
    "Add #3\t# then 4",
    "the  # of shirts, twice",
    "[check] # of shirts",
    "{n} # of shirts",
    "Add #",
]


@pytest.mark.parametrize("duty", CUT)
def test_a_number_sign_does_not_cut_a_duty_off_in_silence(document, agent, duty):
    parsed = parse(document(agent(duty=duty)))
    cut = [i for i in parsed.issues if "comment" in i.message]
    assert [(i.code, i.path, i.line) for i in cut] == [("E_SYNTAX", ("agents", 0, "duty"), 6)]
    assert document(agent(duty=duty)).split("\n")[5][cut[0].col - 1] == "#"
    assert cut[0].hint == "quote the value"
    assert parsed.repairs == ("quote_text",)
    assert parsed.spec.agents[0].duty == duty


def test_a_number_sign_cuts_names_and_last_lines_too(document, agent):
    parsed = parse(document(agent(name="Analyst # 1")))
    assert (parsed.spec.agents[0].name, parsed.repairs) == ("Analyst # 1", ("quote_text",))
    parsed = parse(document(agent(duty="Add\n      the # of shirts\r")))
    assert (parsed.spec.agents[0].duty, parsed.repairs) == ("Add the # of shirts", ("quote_text",))


@pytest.mark.parametrize("duty", ['"a"#b', "'a'#b"])
def test_a_number_sign_right_behind_a_quote_is_refused(document, agent, duty):
    parsed = parse(document(agent(duty=duty)))
    assert [i.code for i in parsed.issues] == ["E_SYNTAX"]
    assert parsed.spec is None


def test_within_braces_the_rest_of_the_line_is_not_guessed_at():
    text = """\
version: 1
agents:
  - {id: s, name: N, role: math_solver, capacity: small, depends_on: [], duty: the # of x, y
    }
output: s
"""
    parsed = parse(text)
    assert [i.code for i in parsed.issues] == ["E_SYNTAX"]
    assert parsed.spec is None


def test_seven_faults_in_one_pass(document, agent):
    text = document(*(agent(f"s{i}", duty=duty) for i, duty in enumerate(INDICATORS)), output="s0")
    parsed = parse(text)
    assert [i.line for i in parsed.issues] == [6 + 6 * k for k in range(7)]
    assert [a.duty for a in parsed.spec.agents] == INDICATORS


@pytest.mark.parametrize("duty", ['&d "Add."', "*d", '"half', "&d |\n      Add."])
def test_real_references_and_broken_quotes_are_not_guessed_at(document, agent, duty):
    assert parse(document(agent(duty=duty))).spec is None


def test_smart_quotes(document, agent):
    text = document(
        agent("“s”", capacity="“small”", duty="“Add.”"), agent("t", depends_on="[“s”]"), output="t"
    )
    parsed = parse(text)
    assert {i.code for i in parsed.issues} == {"E_CHAR"}
    first = parsed.issues[0]
    assert (first.line, first.col, first.path) == (3, 9, ("agents", 0, "id"))
    assert "U+201C" in first.message
    assert parsed.repairs == ("normalise_characters",)
    assert (parsed.spec.agents[0].id, parsed.spec.agents[0].capacity) == ("s", "small")
    assert parsed.spec.agents[1].depends_on == ("s",)
    assert parsed.spec.agents[0].duty == "“Add.”"


def test_no_break_spaces(document, agent):
    text = document(agent("s", duty="a\xa0b", name="“n”"))
    parsed = parse(text.replace("\n  ", "\n\xa0\xa0").replace("\n\xa0\xa0  ", "\n\xa0\xa0\xa0\xa0"))
    assert same(parsed, text)
    assert parsed.repairs == ("normalise_characters",)
    assert parsed.spec.agents[0].duty == "a\xa0b"
    assert (parsed.issues[0].code, parsed.issues[0].line, parsed.issues[0].col) == ("E_CHAR", 3, 1)
    assert "U+00A0" in parsed.issues[0].message
    assert same(parse(text.replace("id: s", "id:\xa0s")), text)
    assert same(parse(text.replace("- id", "-\xa0id")), text)
    assert same(parse(text.replace("capacity: ", "capacity: \xa0")), text)


def test_json_with_ascii_escapes():
    fields = {
        "id": "s",
        "name": "🧮",
        "role": "math_solver",
        "duty": "a 🧮 b",
        "capacity": "small",
        "depends_on": [],
    }
    parsed = parse(json.dumps({"version": 1, "agents": [fields], "output": "s"}))
    assert (parsed.spec.agents[0].name, parsed.spec.agents[0].duty) == ("🧮", "a 🧮 b")
    assert parsed.repairs == ("join_surrogates",)
    assert [i.code for i in parsed.issues] == ["E_CHAR", "E_CHAR"]


def test_forward_references_are_reordered(document, agent):
    text = document(
        agent("a", depends_on="[b]"), agent("c"), agent("b"), agent("d", depends_on="[a, c]"), output="d"
    )
    parsed = parse(text)
    assert [a.id for a in parsed.spec.agents] == ["c", "b", "a", "d"]
    assert parsed.repairs == ("reorder",)
    assert parse(dump(parsed.spec)).strict_ok


def test_case_is_folded_only_leniently(document, agent):
    parsed = parse(document(agent(capacity="Large", role="Math_Solver")))
    assert (parsed.spec.agents[0].capacity, parsed.spec.agents[0].role) == ("large", "math_solver")
    assert parsed.repairs == ("fold_case",)
    assert parse(document(agent(capacity="xl"))).spec is None
    assert parse(document(agent(capacity="small/medium"))).spec is None


def test_a_dependency_without_its_brackets(document, agent):
    parsed = parse(document(agent("a", depends_on=""), agent("b", depends_on="a"), output="b"))
    assert [a.depends_on for a in parsed.spec.agents] == [(), ("a",)]
    assert parsed.repairs == ("list_dependencies",)
    assert {i.code for i in parsed.issues} == {"E_SHAPE"}


def test_original_index_walks_back_through_splices():
    text = "xx\nabc: d"
    splices = [Splice(0, 3, ""), Splice(5, 1, '"d"')]
    fixed = 'abc: "d" z'
    assert [original_index(fixed.index(c), splices) for c in "abcz"] == [3, 4, 5, text.index("d") + 2]


def test_a_limit_is_never_repaired():
    finding = Finding(code="E_LIMIT", index=0, message="too deep")
    assert diagnose("duty: [", Fault(finding)) == (finding, None)

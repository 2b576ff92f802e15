"""The strict verdict: codes, positions, limits, and that all faults come in one pass."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lemon_jax.errors import LemonError
from lemon_jax.spec import dump, format_issue, parse, parse_strict, reader


def codes(text: str) -> list[str]:
    return [issue.code for issue in parse(text).issues]


def only(text: str):
    parsed = parse(text)
    assert len(parsed.issues) == 1, [format_issue(i, "f") for i in parsed.issues]
    return parsed.issues[0]


def test_the_example_is_valid_and_every_field_has_its_span(example):
    parsed = parse(example)
    assert parsed.strict_ok
    assert not parsed.issues
    assert not parsed.repairs
    assert parsed.text == example
    source = {path: example[start:end] for path, (start, end) in parsed.spans.items()}
    assert source["agents", 0, "name"] == "Ratio analyst"
    assert source["agents", 1, "duty"] == '"Check the equation, compute the value, choose the option."'
    assert source["agents", 1, "depends_on"] == "[a1]"
    assert source["agents", 1, "depends_on", 0] == "a1"
    assert source["version",] == "1"
    assert source["output",] == "a2"


def test_a_normal_spec_parses_in_two_milliseconds(example):
    fastest = min(_seconds(parse, example) for _ in range(20))
    assert fastest < 0.002


def _seconds(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def test_issue_line():
    text = "version: 2\nagents: []\noutput: x\n"
    assert [format_issue(issue, "plan.yaml") for issue in parse(text).issues] == [
        "plan.yaml:1:10: E_VERSION version: version '2' is unknown (write version: 1)",
        "plan.yaml:2:9: E_EMPTY agents: there are no agents (write at least one)",
        "plan.yaml:3:9: E_OUTPUT output: no agent has the id 'x'",
    ]


def test_parse_strict_lists_every_issue(document, agent):
    with pytest.raises(LemonError, match=r"E_ENUM.*\n.*E_OUTPUT"):
        parse_strict(document(agent("a", capacity="huge"), output="b"))


@pytest.mark.parametrize("word", ["no", "on", "y", "null", "true", "_1"])
def test_ids_that_yaml_would_convert_stay_text(document, agent, word):
    text = document(agent(word), agent("z", depends_on=f"[{word}]"), output=word)
    spec = parse_strict(text)
    assert spec.agents[0].id == word
    assert spec.agents[1].depends_on == (word,)
    assert spec.output == word


@pytest.mark.parametrize("word", ["1", "01", "1e3", "0x1f", "1:30", "2024-01-01", "1.0", "é"])
def test_ids_out_of_format(document, agent, word):
    parsed = parse(document(agent(word), agent("z", depends_on=f"[{word}]"), output=word))
    assert [(i.code, i.path, i.line, i.col) for i in parsed.issues] == [
        ("E_ID_FORMAT", ("agents", 0, "id"), 3, 9)
    ]
    assert parsed.spec.agents[0].id == parsed.spec.agents[1].depends_on[0] == parsed.spec.output == word
    assert parsed.repairs == ("keep_id",)


def test_1_and_01_stay_different(document, agent):
    parsed = parse(document(agent("1"), agent("01"), output="01"))
    assert [a.id for a in parsed.spec.agents] == ["1", "01"]


def test_duplicate_id_cites_the_first_and_is_not_merged(document, agent):
    issue = only(document(agent("s"), agent("s")))
    assert (issue.code, issue.path, issue.line, issue.col) == ("E_DUP_ID", ("agents", 1, "id"), 9, 9)
    assert "line 3" in issue.message
    assert parse(document(agent("s"), agent("s"))).spec is None


def test_ids_are_compared_by_nfc(document, agent):
    assert "E_DUP_ID" in codes(document(agent("\u00e9"), agent("e\u0301"), output="\u00e9"))


@pytest.mark.parametrize(
    ("graph", "cycle"),
    [
        ({"a": "a"}, "a -> a"),
        ({"a": "b", "b": "a"}, "a -> b -> a"),
        ({"a": "b", "b": "c", "c": "a"}, "a -> b -> c -> a"),
        ({"d": "", "a": "b", "b": "c", "c": "a"}, "a -> b -> c -> a"),
    ],
)
def test_cycles_are_errors_wherever_they_are(document, agent, graph, cycle):
    text = document(*(agent(i, depends_on=f"[{dep}]") for i, dep in graph.items()), output=next(iter(graph)))
    issue = only(text)
    assert issue.code == "E_CYCLE"
    assert issue.message.endswith(cycle)
    assert parse(text).spec is None


def test_forward_reference(document, agent):
    issue = only(document(agent("a", depends_on="[b]"), agent("b"), output="a"))
    assert (issue.code, issue.path, issue.line, issue.col) == (
        "E_DEP_FORWARD",
        ("agents", 0, "depends_on", 0),
        8,
        18,
    )


def test_unknown_and_repeated_dependencies(document, agent):
    text = document(agent("solver"), agent("b", depends_on="[solvr, solver, solver]"), output="b")
    found = {issue.code: issue for issue in parse(text).issues}
    assert set(found) == {"E_DEP_UNKNOWN", "E_DUP_DEP"}
    assert found["E_DEP_UNKNOWN"].hint == "did you mean solver?"


def test_a_tool_needs_something_to_work_on(document, agent):
    assert only(document(agent("s", role="majority_vote"))).code == "E_NO_INPUT"
    assert parse(document(agent("a"), agent("s", role="majority_vote", depends_on="[a]"))).strict_ok


def test_an_agent_that_nobody_uses_is_allowed(document, agent):
    assert parse(document(agent("idle"), agent("s"))).strict_ok


def test_shapes(agent):
    as_map = "version: 1\nagents: {s: {name: x}}\noutput: s\n"
    issue = parse(as_map).issues[0]
    assert (issue.code, issue.line, issue.col) == ("E_SHAPE", 2, 9)
    assert "- id:" in issue.hint
    root = only("- id: s\n")
    assert (root.code, root.path) == ("E_SHAPE", ())
    assert "agents:" in root.hint
    assert codes("just words") == ["E_SHAPE"]
    assert codes("") == codes("---\n") == codes("# nothing\n") == ["E_EMPTY"]


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_valid_with_its_trailing_comma_too(indent):
    fields = {
        "id": "s",
        "name": "N/A",
        "role": "math_solver",
        "duty": 'say "é"\n',
        "capacity": "small",
        "depends_on": [],
    }
    text = json.dumps({"version": 1, "agents": [fields], "output": "s"}, indent=indent)
    assert parse_strict(text).agents[0].duty == 'say "é"\n'
    assert parse(text.replace('"s"}', '"s",}').replace("]", "],", 1).replace("],,", "],")).strict_ok


def test_enumerations_list_their_values(document, agent):
    for capacity in ("Large", "xl", "small/medium"):
        issue = only(document(agent(capacity=capacity)))
        assert (issue.code, issue.path, issue.line, issue.col) == ("E_ENUM", ("agents", 0, "capacity"), 7, 15)
        assert "small, medium, large" in issue.hint
    issue = only(document(agent(role="math_solvr")))
    assert issue.code == "E_ENUM"
    assert "did you mean math_solver?" in issue.hint


def test_a_misspelt_key_is_unknown_and_missing_in_one_pass(document, agent):
    first, second = parse(document(agent().replace("capacity", "capactiy"))).issues
    found = {issue.code: issue for issue in (first, second)}
    assert found["E_UNKNOWN_KEY"].hint == "did you mean capacity?"
    assert found["E_MISSING"].path == ("agents", 0, "capacity")


def test_repeated_key(document, agent):
    issue = only(document(agent() + "    duty: Again.\n"))
    assert (issue.code, issue.line) == ("E_DUP_KEY", 9)
    assert "line 6" in issue.message


@pytest.mark.parametrize("loader", [reader.LOADER, yaml.SafeLoader])
def test_limits_come_before_any_object(monkeypatch, loader):
    monkeypatch.setattr(reader, "LOADER", loader)
    start = time.perf_counter()
    assert codes("[" * 3000) == ["E_LIMIT"]
    assert codes("{a: " * 3000) == ["E_LIMIT"]
    assert codes("- id: s\n" * 5000) == ["E_LIMIT"]
    assert codes("version: 1\nagents: [" + "{}," * 17 + "]\noutput: s\n")[0] == "E_LIMIT"
    assert codes("duty: " + "x" * 2_000_000) == ["E_LIMIT"]
    assert time.perf_counter() - start < 1.0


def test_a_huge_id_is_a_limit(document, agent):
    assert codes(document(agent("i" * 10_000), agent("s"))) == ["E_LIMIT"]


def test_the_size_limit_counts_bytes(document, agent):
    fits = document(agent(duty='"' + "x" * 16_000 + '"'))
    assert parse(fits).strict_ok
    assert codes(fits.replace("x" * 16_000, "é" * 8_300)) == ["E_LIMIT"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("&d Add.", "E_ANCHOR"),
        ("*d", "E_ALIAS"),
        ("!!str Add.", "E_TAG"),
        ("! Add.", "E_TAG"),
        ("!careful", "E_TAG"),
    ],
)
def test_references_and_tags(document, agent, value, code):
    issue = only(document(agent(duty=value)))
    assert (issue.code, issue.line, issue.col) == (code, 6, 11)


def test_merge_keys_directives_and_second_documents(document, agent):
    assert "E_MERGE" in codes(document(agent(**{"<<": "{name: x}"})))
    assert codes("%YAML 1.1\n---\n" + document(agent())) == ["E_DIRECTIVE"]
    assert parse("---\n" + document(agent())).strict_ok
    second = only(document(agent()) + "---\nx: 1\n")
    assert (second.code, second.line, second.col) == ("E_DOCUMENTS", 10, 1)


@pytest.mark.parametrize("char", ["\x07", "\x00", "\ud800", "\x85", "\u2028", "\ufeff", "\uffff"])
def test_characters_that_are_refused(document, agent, char):
    text = document(agent(duty=f'"a{char}b"'))
    issue = only(text)
    assert (issue.code, issue.line, issue.col) == ("E_CHAR", 6, 13)
    assert f"U+{ord(char):04X}" in issue.message
    assert parse(text).spec is None


def test_escapes_do_not_smuggle_control_characters(document, agent):
    assert only(document(agent(duty='"a\\0b"'))).code == "E_CHAR"
    assert parse(document(agent(duty='"a\\u2028b\\tc"'))).strict_ok


@pytest.mark.parametrize("text", ["🧮 求解者", "e\u0301\u0323 n\u0303", "שלום, עולם", "x\u00a0y “z”"])
def test_text_of_any_script_round_trips(document, agent, text):
    spec = parse_strict("\ufeff" + document(agent(name=text, duty=f'"{text}"')))
    assert (spec.agents[0].name, spec.agents[0].duty) == (text, text)
    assert parse_strict(dump(spec)) == spec


def test_spans_are_right_behind_wide_characters_and_a_byte_order_mark(document, agent):
    for bom in ("", "\ufeff"):
        text = bom + document(agent(name="🧮 é", duty="|\n      求解\n\n", capacity="medium")).replace(
            "\n", "\r\n"
        )
        parsed = parse(text)
        assert parsed.strict_ok
        start, end = parsed.spans["agents", 0, "capacity"]
        assert text[start:end] == "medium"
        start, end = parsed.spans["agents", 0, "duty"]
        assert text[start:end] == "|\r\n      求解"


@pytest.mark.parametrize(
    "value",
    [
        *('""', "", '"  "', '"\\u200b"', '"\u00a0"', "|\n"),
        *(
            "\u2800",
            "\u3164",
            "\u115f",
            "\u1160",
            "\uffa0",
            "\ufe0f",
            "\U000e0100",
            "\u034f",
            '"\u3164 \u2800"',
        ),
    ],
)
@pytest.mark.parametrize("field", ["name", "duty"])
def test_empty_text(document, agent, field, value):
    issue = only(document(agent(**{field: value})))
    assert (issue.code, issue.path) == ("E_EMPTY", ("agents", 0, field))


@pytest.mark.parametrize("char", ["\u3164", "\u2800", "\ufe0f", "\u115f", "\u034f"])
def test_an_id_with_a_character_that_shows_nothing_is_refused(document, agent, char):
    parsed = parse(document(agent("s"), agent("s" + char)))
    assert [i.code for i in parsed.issues] == ["E_ID_FORMAT"]
    assert parsed.spec is None
    assert codes(document(agent(char), agent("s"))) == ["E_EMPTY"]


@pytest.mark.parametrize(
    "comment",
    [
        ("name: Solver", "name: Solver  # a name"),
        ("name: Solver", 'name: "Solver" # a name'),
        ("duty: Add.", 'duty: "Add." # a duty'),
        ("duty: Add.", "duty: 'Add.'   # a duty"),
        ("duty: Add.", "duty: | # a duty\n      Add."),
        ("duty: Add.", "duty: Add.\n    # a line of its own"),
        ("capacity: small", "capacity: small # | medium"),
        ("id: s", "id: s # id"),
        ("duty: Add.", 'duty: "Add #3 and #"'),
    ],
)
def test_comments(document, agent, comment):
    old, new = comment
    text = document(agent("s")).replace(old, new)
    spec = parse_strict(text).agents[0]
    assert (spec.id, spec.name, spec.capacity) == ("s", "Solver", "small")
    assert spec.duty.strip() in ("Add.", "Add #3 and #")


def test_yaml_inside_a_literal_duty_stays_text(document, agent):
    spec = parse_strict(document(agent(duty="|\n      Do this:\n      - id: x\n        capacity: large")))
    assert spec.agents[0].duty == "Do this:\n- id: x\n  capacity: large\n"
    assert len(spec.agents) == 1
    assert parse_strict(dump(spec)) == spec


@given(st.data())
def test_both_parsers_of_pyyaml_give_the_same_tree(specs, data):
    text = dump(data.draw(specs)).replace("depends_on: [", "depends_on:   [ ")
    fast = parse(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "LOADER", yaml.SafeLoader)
        assert parse(text) == fast


@given(st.text(max_size=200) | st.text("-:[]{}&*!|>'\"#%@`, \n\tidagents01\xa0“~", max_size=200))
def test_no_text_raises(text):
    parsed = parse(text)
    assert parsed.strict_ok or parsed.issues


@given(st.data())
def test_a_damaged_spec_has_two_consistent_verdicts(specs, data):
    text = dump(data.draw(specs))
    at = data.draw(st.integers(0, len(text)))
    piece = data.draw(
        st.sampled_from(["", ":", ": ", "\t", "\xa0", "“", "```\n", "\n", "-", "&", "*", "[", "}", '"', "#"])
    )
    text = text[:at] + piece + text[at + data.draw(st.integers(0, 3)) :]
    parsed = parse(text)
    assert parsed.strict_ok == (not parsed.issues)
    if parsed.spec is not None and not parsed.strict_ok:
        assert parsed.repairs
        assert parsed.text == dump(parsed.spec)
        again = parse(parsed.text)
        assert again.spec == parsed.spec
        # Only an id out of format survives as a fault of the canonical text.
        assert {issue.code for issue in again.issues} <= {"E_ID_FORMAT"}
    assert all(1 <= issue.line <= text.count("\n") + 1 and issue.col >= 1 for issue in parsed.issues)

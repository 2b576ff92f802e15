"""The tables of faults and of kills, and that they notice when something is not as it should be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from experiment_helpers import ROOT, script

from lemon_jax.backends import Message, Request
from lemon_jax.backends.wire import chat_body
from lemon_jax.runtime import call_key

faults = script("faults")
ten_kills = script("ten_kills")

# Those that do not wait: what they wait for is told by tests/backends/test_faults.py in less time.
QUICK = [case for case in faults.cases() if case.seconds[0] == 0]


@pytest.mark.parametrize("case", QUICK, ids=[f"{c.name}, {c.did}" for c in QUICK])
def test_faults(case):
    calls, outcome, _ = faults.run(case)
    assert (calls, outcome) == (case.calls, case.outcome)


def test_the_table_says_what_is_not_as_expected(monkeypatch, capsys):
    good = QUICK[0]
    monkeypatch.setattr(faults, "cases", lambda: [good])
    assert faults.main([]) == 0
    assert "1 faults, none not as expected" in capsys.readouterr().out
    for wrong in ({"calls": 2}, {"outcome": "timeout"}, {"seconds": (5.0, 9.0)}):
        monkeypatch.setattr(faults, "cases", lambda wrong=wrong: [good, replace(good, **wrong)])
        assert faults.main([]) == 1
        assert "2 faults, 1 not as expected" in capsys.readouterr().out


def test_two_kills(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments = ["--tasks", "20", "--kills", "2", "--bench", "sample", "--out", str(tmp_path / "runs")]
    assert ten_kills.main(arguments) == 0
    out = capsys.readouterr().out
    assert "verdict: all hold" in out
    assert "made again although their reply was stored at a kill: 0" in out
    assert out.count("kill ") >= 2
    assert ten_kills.main(arguments) == 2  # not over an earlier one


def body(index: int, text: str = "x"):
    message = Message(role="user", content=text)
    request = Request(
        model=ten_kills.MODEL,
        messages=(message,),
        max_tokens=5,
        stop=("\n",),
        temperature=0.7 if index else 0.0,
        sample_index=index,
    )
    return json.loads(json.dumps(chat_body(request, "any", {}))), call_key(ten_kills.IDENTITY, request)


@pytest.mark.parametrize("index", [0, 1, 4, 63])
def test_a_call_is_recognised_by_what_the_server_got(index):
    sent, key = body(index)
    assert ten_kills.key_of(sent) == key


@pytest.mark.parametrize(
    ("calls", "stored", "good", "line"),
    [
        (["a", "b", "|", "c"], "ab", True, "stored at a kill: 0"),
        (["a", "b", "|", "b", "c"], "a", True, "their reply was stored: 1"),
        (["a", "b", "|", "b", "c"], "ab", False, "stored at a kill: 1"),
        (["a", "b!", "|", "b", "c"], "ab", False, "stored at a kill: 1"),  # even if the first was a fault
        (["a", "a", "|", "b"], "", False, "without a kill between: 1"),
        (["a", "|", "b", "b"], "", False, "without a kill between: 1"),
        (["a!", "a", "|", "b!", "b"], "a", True, "stored at a kill: 0"),
    ],
)
def test_repeated_calls_are_noticed(calls, stored, good, line, tmp_path, capsys):
    log = ten_kills.Log(tmp_path / "log")
    keys = {}
    for name in "abc":
        log.bodies[name], keys[name] = body(0, name)
    for call in (c for c in calls if c != "|"):
        log.calls.append((call[0], "HTTP 500" if call.endswith("!") else ten_kills.ANSWERED))
    kill = ten_kills.Kill(calls=calls.index("|"), stored=frozenset(keys[name] for name in stored))
    assert ten_kills._print_repeats(log, 0, 0, [kill]) == good
    assert line in capsys.readouterr().out


def test_a_log_is_read_by_whole_lines(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"request": "a", "outcome": "answered", "body": {}}\n{"request": "b", ')
    log = ten_kills.Log(path).update()
    assert (log.calls, log.answered) == ([("a", "answered")], 1)
    with path.open("a") as file:
        file.write('"outcome": "reset"}\n')
    assert log.update().calls[1:] == [("b", "reset")]

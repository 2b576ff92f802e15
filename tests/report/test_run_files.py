import pytest
from report_helpers import make_run, write_lines, write_object

from lemon_jax.errors import LemonError
from lemon_jax.report import load_run
from lemon_jax.report.run_files import mean, number, plain


def test_reads_a_finished_run(tmp_path):
    run = load_run(make_run(tmp_path / "r", steps=3))
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert run.summary["bench"] == "aqua"
    assert len(run.executions) == 3 * 4 + 3 * 6
    assert run.notes == ()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": \n{"step": 3}\n', r"metrics\.jsonl:2: not JSON at column"),
        ("metrics.jsonl", "[1]\n{}\n", r"metrics\.jsonl:1: found list, expected a JSON object"),
        ("executions.jsonl", '{"a": 1' + "0" * 5000 + "}\n", r"executions\.jsonl:1: not readable"),
        ("executions.jsonl", '{"a": ' + "[" * 200_000 + "\n", r"executions\.jsonl:1: "),
        ("summary.json", '{\n "eval": [\n}', r"summary\.json:3: not JSON"),
        ("summary.json", '{"eval": {}}', r"summary\.json: key 'eval': found dict, expected a list"),
        ("summary.json", '{"eval": [3]}', r"summary\.json: key 'eval', entry 1: found 3"),
        ("manifest.json", "", r"manifest\.json:1: not JSON"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, file, text, message):
    make_run(tmp_path, steps=1)
    (tmp_path / file).write_text(text, encoding="utf-8")
    with pytest.raises(LemonError, match=message) as caught:
        load_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_a_fault_with_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"a": "\xff"}\n')
    with pytest.raises(LemonError, match=r"metrics\.jsonl:2: not readable"):
        load_run(tmp_path)


def test_half_a_last_line_is_left_out_and_said(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "rew', encoding="utf-8")
    run = load_run(tmp_path)
    assert len(run.metrics) == 1
    assert run.notes == ("metrics.jsonl: line 2 is cut off and was left out (the run was still writing)",)


def test_a_step_written_again_replaces_the_first(tmp_path):
    rows = [{"step": 2, "reward": 1}, {"step": 1}, {"step": 2, "reward": 5}, {"reward": 0}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    assert [(r["step"], r.get("reward")) for r in load_run(tmp_path).metrics] == [(1, None), (2, 5), (3, 0)]


def test_no_run_is_a_fault(tmp_path):
    with pytest.raises(LemonError, match="no such directory"):
        load_run(tmp_path / "absent")
    with pytest.raises(LemonError, match="no run found"):
        load_run(tmp_path)
    write_object(tmp_path / "manifest.json", {})
    with pytest.raises(LemonError, match="no run found"):
        load_run(tmp_path)


def test_numbers_and_text():
    assert [number(v) for v in (1, 2.5, True, None, "3", float("nan"), float("inf"), 10**400)] == [
        1.0,
        2.5,
        *[None] * 6,
    ]
    assert mean([1, None, float("nan"), 3]) == 2
    assert mean([]) is None
    assert plain("a\x1b[31m\u202eb\ud800\n\u00a0é") == "a�[31m�b?\n\u00a0é"

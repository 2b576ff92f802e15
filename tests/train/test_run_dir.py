import fcntl
import os

import pytest

from lemon_jax.backends import Reply
from lemon_jax.errors import LemonError
from lemon_jax.runtime import CallStore
from lemon_jax.train.run_dir import EXECUTIONS, MANIFEST, METRICS, TIMINGS, OtherHost, RunDir

FACTS = {"config": {"bench": "aqua"}}


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "run", FACTS)


def test_a_new_run_and_the_same_run_again(run):
    again, manifest = RunDir.open(run.path)
    assert manifest == FACTS
    assert again.path == run.path
    assert [p.name for p in run.path.iterdir()] == [MANIFEST]


def test_a_folder_that_holds_something_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LemonError, match=f"{tmp_path}: the folder is not empty; choose another --out"):
        RunDir.create(tmp_path, FACTS)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_only_a_run_can_be_resumed(run):
    with pytest.raises(LemonError, match=f"continue that run with --resume {run.path}, or choose another"):
        RunDir.create(run.path, FACTS)


def test_a_kill_while_the_manifest_was_written_leaves_a_new_folder(tmp_path):
    left = f"{MANIFEST}.00000000.part"
    (tmp_path / left).write_text('{"con')
    run = RunDir.create(tmp_path, FACTS)
    assert sorted(p.name for p in run.path.iterdir()) == [MANIFEST, left]


def test_of_runs_that_begin_in_one_folder_together_one_has_it(tmp_path, monkeypatch):
    """The second begins after the first has found the folder empty, and before its manifest is there."""
    link = os.link

    def overtaken(part, path):
        monkeypatch.setattr(os, "link", link)
        RunDir.create(tmp_path, FACTS | {"number": 2})
        link(part, path)

    monkeypatch.setattr(os, "link", overtaken)
    with pytest.raises(LemonError, match=f"not empty; continue that run with --resume {tmp_path}"):
        RunDir.create(tmp_path, FACTS | {"number": 1})
    assert RunDir.open(tmp_path)[1]["number"] == 2
    assert [p.name for p in tmp_path.iterdir()] == [MANIFEST]


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_lock_on_a_manifest_that_was_removed_is_none(run, monkeypatch, begun_anew):
    flock = fcntl.flock

    def late(file, how):
        run.discard_unused()
        if begun_anew:
            RunDir.create(run.path, FACTS)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(LemonError, match="another process is working on this run"), run.locked():
        pass


def test_lines_are_replaced_as_a_whole(run):
    run.append(EXECUTIONS, [{"n": 1}])
    run.write_lines(EXECUTIONS, [{"n": 2}, {"n": 3}])
    assert run.read(EXECUTIONS) == [{"n": 2}, {"n": 3}]
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.write_lines(EXECUTIONS, [{"n": float("nan")}])
    assert run.read(EXECUTIONS) == [{"n": 2}, {"n": 3}]


def test_a_path_where_no_folder_can_be(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "run"):
        with pytest.raises(LemonError, match="cannot write the run there"):
            RunDir.create(path, FACTS)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"config": {}}', '{"config": 3}'])
def test_no_run_to_resume(tmp_path, text):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(LemonError, match=r"manifest\.json: no run to resume there"):
        RunDir.open(tmp_path)


def test_lines_are_appended_whole(run):
    run.append(METRICS, [{"step": 0}, {"step": 1, "text": "é\u2028\n"}])
    run.append(METRICS, [])
    run.append(METRICS, [{"step": 2}])
    assert run.read(METRICS) == [{"step": 0}, {"step": 1, "text": "é\u2028\n"}, {"step": 2}]
    assert run.read(EXECUTIONS) == []
    with pytest.raises(ValueError, match="JSON"):
        run.append(METRICS, [{"step": 3}, {"step": float("nan")}])
    assert len(run.read(METRICS)) == 3


@pytest.mark.parametrize("tail", [b'{"step": 2', b"{", b'{"text": "\xc3'])
def test_a_last_line_that_a_kill_cut_short_is_not_there(run, tail):
    run.append(METRICS, [{"step": 0}, {"step": 1}])
    with (run.path / METRICS).open("ab") as file:
        file.write(tail)
    assert run.read(METRICS) == [{"step": 0}, {"step": 1}]
    run.cut_back(2)
    run.append(METRICS, [{"step": 2}])
    assert run.read(METRICS) == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize("damage", ['{"step": 1', "junk", '{"step": NaNN}'])
def test_a_damaged_line_in_the_middle_is_named(run, damage):
    (run.path / METRICS).write_text(f'{{"step": 0}}\n{damage}\n{{"step": 2}}\n')
    with pytest.raises(LemonError, match=r"metrics\.jsonl:2: not a line of JSON"):
        run.read(METRICS)
    with pytest.raises(LemonError, match=r"metrics\.jsonl:2"):
        run.cut_back(1)
    assert "2}" in (run.path / METRICS).read_text()  # nothing was thrown away


@pytest.mark.parametrize("line", ["3", "[]", "null", "{}", '{"step": "one"}'])
def test_a_line_that_is_no_step_is_named_when_cut_back(run, line):
    (run.path / METRICS).write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(LemonError, match=r"metrics\.jsonl:2"):
        run.cut_back(1)


def test_cut_back_keeps_the_first_steps_and_no_evaluation(run):
    run.append(METRICS, [{"step": s} for s in range(4)])
    run.append(TIMINGS, [{"step": s} for s in range(4)])
    rows = [{"phase": p, "step": s} for s in range(4) for p in ("train", "counterfactual")]
    run.append(EXECUTIONS, [*rows, {"phase": "search", "step": None}, {"phase": "eval", "step": None}])
    run.cut_back(2)
    assert run.read(METRICS) == run.read(TIMINGS) == [{"step": 0}, {"step": 1}]
    assert run.read(EXECUTIONS) == rows[:4]
    assert not list(run.path.glob("*.part"))
    run.cut_back(0)
    assert run.read(EXECUTIONS) == []


def test_json_files_are_replaced_whole(run):
    run.write_json("summary.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        run.write_json("summary.json", {"a": float("inf")})
    assert (run.path / "summary.json").read_text() == '{\n  "a": 1\n}\n'
    assert not list(run.path.glob("*.part"))


def test_another_host_writes_its_own_calls_and_nothing_else(run, tmp_path):
    run.append(METRICS, [{"step": 0}])
    before = {p.name: p.read_bytes() for p in run.path.iterdir()}
    other = OtherHost(run.path, 3, new=True)
    other.append(METRICS, [{"step": 1}])
    other.write_json(MANIFEST, {})
    other.cut_back(0)
    assert other.read(METRICS) == []
    with other.locked(), run.locked():  # the first host's lock is the run's
        pass
    assert {p.name: p.read_bytes() for p in run.path.iterdir()} == before

    store = CallStore(other.calls)
    assert other.calls.name == "calls-p3.sqlite"
    other.discard_unused()
    assert not other.calls.exists()
    store.close()
    store = CallStore(other.calls)
    store.put("key", "scope", Reply(text="x", finish="stop"))
    store.close()
    other.discard_unused()
    assert OtherHost(run.path, 3, new=False).calls.exists()
    with pytest.raises(LemonError, match=r"calls-p3\.sqlite: left by another run; remove it, or choose"):
        OtherHost(run.path, 3, new=True)
    alone = OtherHost(tmp_path / "local", 1, new=True)  # where hosts share no folder
    alone.discard_unused()
    assert not alone.path.exists()

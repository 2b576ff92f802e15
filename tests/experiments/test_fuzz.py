"""The fuzzing driver: what counts as a finding, and how it is told."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from experiment_helpers import ROOT, script

fuzz = script("fuzz")
needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed"
)


def test_time_and_memory_are_bounded(monkeypatch):
    times, peaks = iter([0.0, 0.4, 1.0, 2.2]), iter([100.0, 300.0, 100.0])
    monkeypatch.setattr(fuzz.time, "process_time", lambda: next(times))
    monkeypatch.setattr(fuzz, "_peak_mib", lambda: next(peaks))
    seen = []
    one = fuzz.bounded(seen.append)
    one(b"quick")
    with pytest.raises(fuzz.SlowFinding, match=r"4 bytes took 1\.2 s"):
        one(b"slow")
    assert seen == [b"quick", b"slow"]
    times, peaks = iter([0.0, 0.0]), iter([100.0, 357.0])
    one = fuzz.bounded(seen.append)
    with pytest.raises(fuzz.GrowthFinding, match="grown by 257 MiB"):
        one(b"")


def test_a_real_peak_is_seen():
    def hold(data):
        bytearray(len(data) << 20)[:: 1 << 12]

    one = fuzz.bounded(hold)
    one(bytes(8))
    with pytest.raises(fuzz.GrowthFinding):
        one(bytes(fuzz.GROWTH_MIB + 64))


LOG = """\
#3\tINITED cov: 42 ft: 50 corp: 2/3b exec/s: 0 rss: 45Mb
 === Uncaught Python exception: ===
ValueError: a bad thing
Traceback (most recent call last):
  File "/x/fuzz.py", line 9, in one
  File "/x/spec/parse.py", line 12, in parse
ValueError: a bad thing
artifact_prefix='x/'; Test unit written to x/crash-0123
"""


def test_a_finding_is_told_by_its_exception_and_place():
    assert fuzz._reason(LOG) == 'ValueError: a bad thing (File "/x/spec/parse.py", line 12, in parse)'
    assert (
        fuzz._reason("x\n==9== ERROR: libFuzzer: out-of-memory\ny") == "==9== ERROR: libFuzzer: out-of-memory"
    )
    assert fuzz._reason("") == "no output"
    assert fuzz._escaped('a"\n\u00a0') == '"\\x61\\x22\\x0a\\xc2\\xa0"'


@pytest.mark.parametrize("name", ["spec", "extract", "workers", "gguf", "gguf_model", "safetensors"])
def test_seeds_hold_what_is_promised(name):
    from fuzz_targets import TARGETS

    seeds = TARGETS[name].seeds()
    assert len(seeds) >= 3
    for seed in seeds:
        TARGETS[name].check(seed)


def test_a_broken_promise_is_noticed(monkeypatch):
    import fuzz_targets

    others = ("safetensors", "gguf_model")
    seeds = {name: target.seeds() for name, target in fuzz_targets.TARGETS.items() if name not in others}
    # A reader that is wrong in one way each; some seed must show it.
    wrong = {
        "spec": ("dump", lambda spec: "version: 1\n"),
        "extract": ("extract_choice", lambda text, n: fuzz_targets.extract_number("7")),
        "workers": ("load_worker_file", lambda path: 1 / 0),
        "gguf": ("read_gguf_header", lambda path: path.read_bytes()[99]),
    }
    for name, (function, broken) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(fuzz_targets, function, broken)
            with pytest.raises((AssertionError, ZeroDivisionError, IndexError)):
                list(map(fuzz_targets.TARGETS[name].check, seeds[name]))


def test_one_input_is_reproduced(tmp_path, capsys):
    (tmp_path / "input").write_bytes(b"version: 1\nagents: [")
    assert fuzz.main(["--target", "spec", "--reproduce", str(tmp_path / "input")]) == 0
    assert capsys.readouterr().out == "nothing found\n"


def test_a_slow_input_is_reproduced_as_slow(tmp_path, monkeypatch):
    (tmp_path / "input").write_bytes(b"version: 1")
    monkeypatch.setattr(fuzz, "HANG_S", -1.0)
    with pytest.raises(fuzz.SlowFinding):
        fuzz.main(["--target", "extract", "--reproduce", str(tmp_path / "input")])


def test_an_input_is_reproduced_with_one_target(tmp_path, capsys):
    assert fuzz.main(["--target", "all", "--reproduce", str(tmp_path / "input")]) == 2
    assert "error: --reproduce reads the input of one target" in capsys.readouterr().err


@pytest.mark.parametrize(("log", "starts"), [(LOG, fuzz.MOST_FINDINGS), ("no module named atheris\n", 1)])
def test_a_finding_made_before_does_not_end_a_target(log, starts, tmp_path, monkeypatch):
    """The file of the same finding is there already; only what did not start is not started again."""
    ran = []

    def child(command, *, stdout, **_):
        ran.append(command)
        stdout.write(log.encode())
        return subprocess.CompletedProcess(command, 77)

    monkeypatch.setattr(fuzz.subprocess, "run", child)
    for _ in range(2):
        ran.clear()
        result = fuzz._fuzz("extract", tmp_path, 60)
        assert len(ran) == starts
        (finding,) = result.findings
        assert ("x/crash-0123: ValueError" in finding) == (starts > 1)


def test_what_is_missing_is_named(monkeypatch, capsys):
    assert fuzz.main(["--target", "html"]) == 2
    assert "error: --target html: expected all, spec, extract" in capsys.readouterr().err
    monkeypatch.setattr(fuzz.importlib.util, "find_spec", lambda name: None)
    assert fuzz.main(["--target", "gguf"]) == 2
    assert "atheris is not installed; run `pip install atheris`" in capsys.readouterr().err


@needs_atheris
def test_a_few_seconds_of_it(tmp_path):
    command = [sys.executable, str(ROOT / "experiments" / "fuzz.py"), "--target", "gguf"]
    command += ["--minutes", "0.05", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    name, inputs, _, coverage, findings = done.stdout.splitlines()[1].split()
    assert (name, findings) == ("gguf", "0")
    assert int(inputs.replace(",", "")) > 100
    assert int(coverage) > 10

"""`lemon data`: what is printed, exit codes, what reaches the network, and a light start."""

import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lemon_jax.bench import PROTOCOLS, SOURCES
from lemon_jax.cli import main

real_data = pytest.mark.skipif(
    not os.environ.get("LEMON_DATA"), reason="LEMON_DATA names no folder with the files"
)


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("LEMON_DATA", raising=False)
    monkeypatch.setenv("LEMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LEMON_DATA_URL", "http://127.0.0.1:9")  # nobody answers
    return tmp_path / "cache" / "data"


@pytest.mark.usefixtures("no_folder")
def test_list_has_a_line_for_each_bench_and_protocol(capsys):
    assert main(["data", "list"]) == 0
    place, head, *lines = capsys.readouterr().out.splitlines()
    assert place.endswith("cache/data (cache)")
    assert head.split() == ["bench", "kind", "protocol", "train", "test", "files", "licence", "note"]
    assert [tuple(line.split()[::2][:2]) for line in lines] == [(b, p) for b in SOURCES for p in PROTOCOLS]
    mmlu = next(line for line in lines if line.startswith("mmlu") and "lemon" in line)
    assert mmlu.split()[:7] == ["mmlu", "choice", "lemon", "285", "1531", "missing", "MIT"]
    svamp = next(line for line in lines if line.startswith("svamp") and "lemon" in line)
    assert "for evaluation only" in svamp


@real_data
def test_list_tells_official_files_from_others(capsys, tmp_path):
    source = Path(os.environ["LEMON_DATA"])
    shutil.copytree(source / "aqua", tmp_path / "aqua")
    shutil.copytree(source / "svamp", tmp_path / "svamp")
    (tmp_path / "aqua" / "dev.json").unlink()
    (tmp_path / "svamp" / "SVAMP.json").chmod(0o600)
    (tmp_path / "svamp" / "SVAMP.json").write_text("[]")
    assert main(["data", "list", "--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"files: {tmp_path} (named by --data)"
    states = {tuple(line.split()[::2][:2]): line for line in lines[2:]}
    assert " 1 of 2 " in states["aqua", "full"]
    assert " official " in states["aqua", "gdesigner"]  # which reads test.json alone
    assert " wrong " in states["svamp", "full"]
    assert " missing " in states["mmlu", "full"]


@real_data
def test_check_reports_counts_and_a_line_a_fault(capsys):
    assert main(["data", "check"]) == 0
    out = capsys.readouterr().out
    assert "aqua: 2 official files, " in out
    assert "  full: 280 train, 14042 test\n" in out
    assert "  lemon: 0 train, 1000 test (for evaluation only" in out
    assert "  fault: test: 7 items have two options with the same text (aqua-test-117, " in out
    assert "  fault: test: 2 golds are negative (gsm8k-test-489, gsm8k-test-1113)\n" in out
    assert "  fault: 1000 golds are written as floats" in out
    assert "  fault: multiarith-59 repeats multiarith-49; it was taken out of train [gdesigner]\n" in out
    assert main(["data", "check", "humaneval", "--data", os.environ["LEMON_DATA"]]) == 0
    assert capsys.readouterr().out.startswith("humaneval: 1 official file, ")


@real_data
def test_check_of_a_damaged_folder_names_each_bench_and_fails(capsys, tmp_path):
    shutil.copytree(Path(os.environ["LEMON_DATA"]) / "svamp", tmp_path / "svamp")
    assert main(["data", "check", "svamp", "--data", str(tmp_path)]) == 0
    capsys.readouterr()
    (tmp_path / "svamp" / "SVAMP.json").chmod(0o600)
    with (tmp_path / "svamp" / "SVAMP.json").open("a") as file:
        file.write("\n")
    assert main(["data", "check", "--data", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    errors = captured.err.splitlines()
    assert captured.out == ""
    assert [line.split(": ")[1] for line in errors] == list(SOURCES)
    assert "SHA-256 is" in next(line for line in errors if line.startswith("error: svamp"))
    assert "no such file" in next(line for line in errors if line.startswith("error: gsm8k"))


def test_check_of_an_empty_cache_says_what_to_run(capsys, no_folder):
    assert main(["data", "check", "gsm8k"]) == 2
    assert capsys.readouterr().err == f"error: gsm8k: not in {no_folder}; run `lemon data fetch gsm8k`\n"


def test_fetch_out_of_reach_names_the_address(capsys, no_folder):
    assert main(["data", "fetch", "svamp"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: svamp: http://127.0.0.1:9/arkilpatel/SVAMP/main/SVAMP.json: ")
    assert error.endswith("name their folder (--data DIR or LEMON_DATA)\n")
    assert error.count("\n") == 1


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def official():
    """The folder of official files; asked for before `no_folder` hides it."""
    return Path(os.environ["LEMON_DATA"])


@pytest.fixture
def mirror(official, no_folder, monkeypatch, tmp_path):
    """A server with the files of two benches under the paths of a mirror; the value is the cache it fills."""
    for bench in ("gsm8k", "humaneval"):
        for file in SOURCES[bench].files:
            (tmp_path / "mirror" / file.url).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "mirror" / file.url).symlink_to(official / file.path)
    handler = partial(QuietHandler, directory=tmp_path / "mirror")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        monkeypatch.setenv("LEMON_DATA_URL", f"http://127.0.0.1:{httpd.server_address[1]}")
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield no_folder
        httpd.shutdown()
        thread.join()


@real_data
def test_fetch_from_a_mirror_then_check(capsys, mirror):
    assert main(["data", "fetch", "gsm8k"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"gsm8k: 2 official files in {mirror / 'gsm8k'}\n"
    assert captured.err.splitlines()[-1] == "test.jsonl: 0.7 of 0.7 MB"
    assert main(["data", "check", "gsm8k"]) == 0
    capsys.readouterr()
    # The mirror lacks the others: what it has is fetched all the same, and one line names each failure.
    assert main(["data", "fetch", "all"]) == 2
    captured = capsys.readouterr()
    assert [line.split(":")[0] for line in captured.out.splitlines()] == ["gsm8k", "humaneval"]
    error = captured.err.splitlines()[-1]
    assert error.startswith("error: aqua: http")
    assert "; mmlu: http" in error
    assert "/mmlu/dev/abstract_algebra_dev.csv: HTTP 404" in error


@real_data
def test_fetch_says_that_a_named_folder_hides_the_cache(capsys, mirror, monkeypatch):
    monkeypatch.setenv("LEMON_DATA", "/elsewhere")
    assert main(["data", "fetch", "humaneval"]) == 0
    assert capsys.readouterr().out == (
        f"humaneval: 1 official file in {mirror / 'humaneval'}\n"
        "LEMON_DATA is set: runs read /elsewhere, not the cache\n"
    )


def test_unknown_bench_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["data", "check", "gsm"])
    assert stopped.value.code == 2
    assert "invalid choice: 'gsm'" in capsys.readouterr().err


def test_data_commands_start_without_jax_and_the_runtime():
    code = (
        "import sys; from lemon_jax.cli import main; main(['data', 'list']); "
        "heavy = {'jax', 'numpy', 'flax', 'lemon_jax.runtime', 'lemon_jax.backends'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

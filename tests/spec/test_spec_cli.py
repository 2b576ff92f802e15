"""`lemon spec`: what is printed where, exit codes, and a light start."""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys

import pytest

from lemon_jax.cli import main
from lemon_jax.errors import LemonError
from lemon_jax.spec import cli, dump, json_schema, parse_strict


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    args = parser.parse_args(["spec", *words])
    return args.func(args)


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes) -> str:
        path = tmp_path / "plan.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def test_ok(write, example, capsys):
    path = write(example)
    assert run("check", path) == 0
    assert capsys.readouterr().out == f"{path}: ok, 2 agents, 1 dependency, output a2\n"


def test_issues_one_a_line(write, document, agent, capsys):
    path = write(document(agent(capacity="xl", role="cook")))
    assert run("check", path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[:2] for line in lines] == [
        [f"{path}:5:11:", "E_ENUM"],
        [f"{path}:7:15:", "E_ENUM"],
    ]


def test_standard_input(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(example.encode())))
    assert run("check", "-") == 0
    assert capsys.readouterr().out.startswith("<stdin>: ok, 2 agents")


def test_repair(write, example, capsys):
    path = write(f"```yaml\n{example}```\n")
    assert run("check", path) == 1
    capsys.readouterr()
    assert run("check", path, "--repair") == 0
    out, err = capsys.readouterr()
    assert out == dump(parse_strict(example))
    assert f"{path}: repaired: strip_fence" in err
    assert "E_FENCE" in err


def test_what_cannot_be_repaired(write, document, agent, capsys):
    path = write(document(agent(capacity="xl")))
    assert run("check", path, "--repair") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "E_ENUM" in err
    assert "cannot be repaired" in err


def test_a_large_file_is_a_limit_even_if_the_cut_splits_a_character(write, capsys):
    for content in ("x" * 2_000_000, "é" * 10_000, "xé" + "é" * 10_000):
        assert run("check", write(content)) == 1
        assert "E_LIMIT" in capsys.readouterr().out


def test_files_that_cannot_be_read(write, tmp_path):
    with pytest.raises(LemonError, match="No such file"):
        run("check", str(tmp_path / "none.yaml"))
    with pytest.raises(LemonError, match=r"byte 5 \(0xff\) is not UTF-8; save the file as UTF-8"):
        run("check", write(b"abcd\xff"))


def test_schema(capsys):
    assert run("schema") == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


def test_main_prints_one_line_and_returns_2(tmp_path, capsys):
    path = tmp_path / "none.yaml"
    assert main(["spec", "check", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: cannot be read: No such file")


def test_checking_a_spec_loads_neither_jax_nor_httpx(write, example):
    program = (
        "import sys; from lemon_jax.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'jax', 'httpx', 'numpy', 'flax'} & set(sys.modules)), code)"
    )
    command = [sys.executable, "-c", program, "spec", "check", write(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"

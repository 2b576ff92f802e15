"""Every fault of a user's input: one line that names it, exit code 2, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from experiment_helpers import contents, free_port, run_main, run_script

from lemon_jax.backends import WorkerPool, worker_config
from lemon_jax.bench import load
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.runtime import read_recording, write_recording
from lemon_jax.train.job import manifest
from lemon_jax.train.presets import load_preset
from lemon_jax.train.run_dir import RunDir

WORKERS = """
[models.m]
{model}
[capacities.small]
model = "m"
price = 1
[capacities.medium]
model = "m"
price = 1
[capacities.large]
model = "m"
price = {price}
"""
SCRIPTED = 'backend = "scripted"'


@pytest.fixture
def refused(policy_folder, tmp_path, capsys):
    """Run with these flags on top of sound ones; the error line, after all that must hold of any refusal."""

    def run(*flags, out=None):
        flags = [str(flag) for flag in flags]
        sound = {"--bench": "multiarith", "--workers": "scripted", "--policy": str(policy_folder)}
        if "--resume" not in flags:
            sound["--out"] = str(out or tmp_path / "run")
            flags = [x for flag, value in sound.items() if flag not in flags for x in (flag, value)] + flags
        before = contents(tmp_path)
        assert run_main(*flags) == 2
        printed = capsys.readouterr()
        assert contents(tmp_path) == before
        assert printed.out == ""
        assert "Traceback" not in printed.err
        lines = printed.err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
        return lines[-1]

    return run


def worker_file(folder, model=SCRIPTED, price="3"):
    path = folder / "workers.toml"
    path.write_text(WORKERS.format(model=model, price=price), encoding="utf-8")
    return path


# The data


def test_missing_data_folder(refused, tmp_path):
    line = refused("--data", tmp_path / "nowhere")
    assert f"{tmp_path}/nowhere/multiarith/MultiArith.json: no such file" in line
    assert "--data" in line


@pytest.mark.parametrize("named_by", ["--data", "LEMON_DATA"])
def test_a_changed_byte_in_a_data_file(named_by, refused, tmp_path, monkeypatch):
    target = tmp_path / "data" / "multiarith" / "MultiArith.json"
    target.parent.mkdir(parents=True)
    target.write_bytes(flipped(real_data()))
    monkeypatch.setenv("LEMON_DATA", str(tmp_path / "data"))
    line = refused(*(["--data", tmp_path / "data"] if named_by == "--data" else []))
    assert f"{target}: SHA-256 is " in line
    assert f"folder named by {named_by}" in line
    assert "replace it" in line


def real_data() -> bytes:
    """The official file where there is one; its digest rejects any other content alike."""
    path = Path(REAL_DATA or "nowhere") / "multiarith" / "MultiArith.json"
    return path.read_bytes() if path.is_file() else b'[{"sQuestion": "1 + 1?", "lSolutions": [2.0]}]'


REAL_DATA = os.environ.get("LEMON_DATA")


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


# The policy


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("policy.safetensors", None, "cannot read the weights"),
        ("policy.safetensors", lambda data: data[:1000], "damaged"),
        ("policy.safetensors", lambda data: data[:-4000], "damaged"),
        ("policy.safetensors", flipped, "params_sha256"),
        ("tokenizer.model", None, "cannot read the tokenizer"),
        ("tokenizer.model", lambda data: b"no model", "not a SentencePiece model"),
        ("tokenizer.model", lambda data: data + data[-20:], ""),
        ("manifest.json", None, "manifest"),
        ("manifest.json", lambda data: data[:-30], "manifest"),
        ("manifest.json", lambda data: b"[]", "expected a JSON object"),
        ("manifest.json", lambda data: b'{"max_prompt": "many"}', "max_prompt is 'many'"),
        ("manifest.json", lambda data: b'{"max_new": 0}', "max_new is 0"),
        ("manifest.json", lambda data: b'{"params_sha256": 5}', "params_sha256"),
    ],
)
def test_damaged_policy(name, change, expected, refused, policy_folder, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(policy_folder, folder)
    data = (folder / name).read_bytes()
    (folder / name).unlink() if change is None else (folder / name).write_bytes(change(data))
    line = refused("--policy", folder)
    assert f"{folder}/" in line
    assert expected in line
    assert any(word in line for word in ("restore", "check the path", "again", "train"))


def test_missing_policy(refused, tmp_path):
    assert f"{tmp_path}/nowhere: no such policy folder; train one" in refused(
        "--policy", tmp_path / "nowhere"
    )


# Flags and presets


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--bench", "gsm"), "bench 'gsm' is unknown, expected one of: aqua, multiarith"),
        (("--preset", "huge"), "huge.toml: no such preset; there are default, full, paper"),
        (("--steps", "-1"), "steps is -1, it must be at least 0"),
        (("--tasks-per-step", "0"), "tasks-per-step is 0, it must be at least 1"),
        (("--tasks-per-step", "-3"), "tasks-per-step is -3, it must be at least 1"),
        (("--group", "1"), "group is 1, it must be at least 2"),
        (("--eval-tasks", "0"), "eval-tasks is 0, it must be at least 1"),
        (("--seed", "-1"), "seed is -1, it must be from 0"),
        (("--baselines", "cot,tre"), "baseline 'tre' is unknown, did you mean tree; give all, none, or some"),
        (("--search-tokens", "9"), "search-tokens is 9 without best-fixed; give both or neither"),
        (("--best-fixed", "--steps", "0"), "and steps is 0; give search-tokens"),
    ],
)
def test_flags(flags, expected, refused):
    assert expected in refused(*flags)


def test_no_bench(capsys):
    assert run_main("--workers", "scripted") == 2
    assert capsys.readouterr().err == "error: --bench is missing; give --bench aqua, or another one, or all\n"


def test_preset_file(refused, tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text('step = 3\ngroup = "four"\nedits_per_step = 99\n', encoding="utf-8")
    line = refused("--preset", preset)
    assert f"{preset}: unknown key step, did you mean steps; group is 'four', expected int" in line
    preset.write_text("tasks_per_step = 2\nedits_per_step = 99\n", encoding="utf-8")
    assert "edits-per-step is 99, a step has only 8 specs to edit" in refused("--preset", preset)


# The workers


@pytest.mark.parametrize(
    ("model", "price", "expected"),
    [
        ('backend = "scripted"\nslot = 3', "3", "models.m.slot: unknown key"),
        ('backend = "scripted"', '"three"', "capacities.large.price: found 'three', expected a number"),
        ('backend = "vllm"', "3", "models.m.backend: found 'vllm', expected one of"),
        ("backend = ", "3", "not valid TOML"),
        ('backend = "openai"\nmodel = "x"', "3", "models.m.base_url: missing"),
        ('backend = "embedded"\npreset = "gpt"', "3", "models.m.preset: found 'gpt', expected one of"),
    ],
)
def test_worker_file(model, price, expected, refused, tmp_path):
    path = worker_file(tmp_path, model, price)
    line = refused("--workers", path)
    assert f"{path}: " in line
    assert expected in line


def test_missing_worker_file(refused, tmp_path):
    line = refused("--workers", tmp_path / "none.toml")
    assert f"{tmp_path}/none.toml: cannot read the worker file" in line
    assert "embedded, jax, scripted" in line


def test_unreachable_server(refused, tmp_path):
    url = f"http://127.0.0.1:{free_port()}/v1"
    path = worker_file(tmp_path, f'backend = "openai"\nmodel = "x"\nbase_url = "{url}"')
    line = refused("--workers", path)
    assert f"{path}: models.m.base_url: {url}: cannot reach the server" in line
    assert "start it or correct the address" in line


needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed"
)


@needs_engine
@pytest.mark.parametrize("content", [b"garbage", b"GGUF" + bytes(100), None])
def test_damaged_gguf(content, refused, tmp_path):
    if content is not None:
        (tmp_path / "model.gguf").write_bytes(content)
    path = worker_file(tmp_path, 'backend = "embedded"\npath = "model.gguf"')
    line = refused("--workers", path)
    assert f"{tmp_path}/model.gguf: " in line
    assert "cannot read" in line if content is None else "not a usable GGUF model file" in line


@needs_engine
def test_gguf_that_is_damaged_behind_its_header(refused, tmp_path):
    """It is noticed only when the server loads it, after the run directory was made."""
    key = b"general.architecture"
    header = struct.pack("<IQQ", 3, 5, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 8)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + header + struct.pack("<Q", 5) + b"qwen2" + bytes(500))
    path = worker_file(tmp_path, 'backend = "embedded"\npath = "model.gguf"')
    line = refused("--workers", path, "--steps", 0, "--eval-tasks", 1)
    assert f"{tmp_path}/model.gguf: the llama.cpp server ended while loading" in line


@pytest.mark.parametrize("damage", [flipped, lambda data: data[:-20], lambda data: b"no recording"])
def test_damaged_recording(damage, refused, tmp_path, monkeypatch):
    path = tmp_path / "recordings" / "multiarith.jsonl.xz"
    path.parent.mkdir()
    write_recording(path, {})
    assert read_recording(path) == {}
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(run_script, "CHECKPOINTS", tmp_path)
    line = refused()
    assert f"{path}: not a readable call recording" in line
    assert "--fresh" in line


# The run directory


def test_folder_that_is_not_empty(refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine", encoding="utf-8")
    line = refused()
    assert f"{tmp_path}/run: the folder is not empty" in line
    assert "choose another --out" in line


def test_place_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for out in (tmp_path / "file" / "run", tmp_path / "file"):
        assert f"{out}: cannot write the run there" in refused(out=out)


@pytest.fixture
def started(policy_folder, tmp_path):
    """A run that was stopped before its first step, with a policy and a worker file of its own."""
    shutil.copytree(policy_folder, tmp_path / "policy")
    workers = worker_file(tmp_path)
    preset = (Path(run_script.__file__).parent / "presets") / "default.toml"
    config = replace(load_preset(preset, "multiarith"), workers=str(workers), policy=str(tmp_path / "policy"))
    policy, pool = Orchestrator.load(tmp_path / "policy"), WorkerPool(worker_config(str(workers)))
    datasets = {"multiarith": load("multiarith")}
    return RunDir.create(tmp_path / "run", manifest(config, datasets, policy, pool)).path


def test_resuming_what_is_no_run(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "nowhere", tmp_path / "empty"):
        assert f"{folder}/manifest.json: no run to resume there" in refused("--resume", folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"config": {"bench": "multiarith", "colour": 1}}'])
def test_resuming_with_a_damaged_manifest(text, refused, started):
    (started / "manifest.json").write_text(text, encoding="utf-8")
    assert f"{started}/manifest.json: " in refused("--resume", started)


@pytest.mark.parametrize(
    "flags",
    [
        ("--steps", 9),
        ("--bench", "aqua"),
        ("--preset", "full"),
        ("--out", "x"),
        ("--no-counterfactual",),
        ("--baselines", "none"),
        ("--best-fixed",),
        ("--search-tokens", 5),
    ],
)
def test_resuming_with_other_settings(flags, refused, started):
    line = refused("--resume", started, *flags)
    assert f"leave out {flags[0]}" in line


def test_resuming_with_another_policy(refused, started, tmp_path):
    folder = tmp_path / "policy"
    policy = Orchestrator.load(folder)
    embed = policy.decoder.embed
    embed.set_value(embed.get_value() * 2)
    policy.save(folder, {"kind": "test"}, dtype="float32")
    line = refused("--resume", started)
    assert "cannot resume: policy_sha256 differ" in line
    assert "start a new run" in line


def test_resuming_with_other_prices(refused, started, tmp_path):
    worker_file(tmp_path, price="4")
    assert "cannot resume: workers differ" in refused("--resume", started)


def test_resuming_without_the_data_it_was_started_with(refused, started):
    path = started / "manifest.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    facts["data"] |= {"source": "official", "sha256": "0" * 64}
    path.write_text(json.dumps(facts), encoding="utf-8")
    assert "cannot resume: data differ" in refused("--resume", started)

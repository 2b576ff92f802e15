"""A short run, exported and replayed from its recorded calls alone; and what is said where that fails."""

from __future__ import annotations

import json
import shutil

import pytest
from experiment_helpers import ROOT, contents, json_lines, run_main, run_script, script

from lemon_jax.backends import Reply, ScriptedBackend
from lemon_jax.model import params_sha256
from lemon_jax.orchestrator import Orchestrator, read_manifest
from lemon_jax.runtime import read_recording, write_recording

export_run, export_recording, replay, shipped = map(
    script, ("export_run", "export_recording", "replay", "shipped")
)
SMALL = ("--workers", "scripted", "--policy", "tiny", "--tasks-per-step", 2, "--eval-tasks", 2, "--seed", 1)


@pytest.fixture
def checkpoints(policy_folder, tmp_path, monkeypatch):
    """A folder such as `checkpoints`, with the policy that the runs begin with."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(policy_folder, folder / "tiny")
    monkeypatch.setattr(run_script, "CHECKPOINTS", folder)
    return folder


@pytest.fixture
def exported(checkpoints, tmp_path):
    """A run of two steps as it is exported."""
    assert run_main("--bench", "multiarith", *SMALL, "--steps", 2, "--out", tmp_path / "run") == 0
    assert export_run.main([str(tmp_path / "run"), "--out", str(checkpoints)]) == 0
    return checkpoints / "multiarith"


@pytest.fixture
def no_worker(monkeypatch):
    """Every call that reaches a worker fails the test."""

    async def asked(self, requests):
        pytest.fail("a worker was asked")
        yield

    monkeypatch.setattr(ScriptedBackend, "generate", asked)


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_replay_asks_nobody_and_is_equal_bit_for_bit(exported, no_worker, tmp_path, capsys):
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 0
    printed = capsys.readouterr().out
    assert "versions and processor: as recorded\nverdict: equal, bit for bit\n" in printed
    assert printed.count(" equal") == 7 + 1
    assert "not compared" not in printed
    # Not only what is compared: nothing at all differs but where the calls came from.
    first, again = (tmp_path / name / "executions.jsonl" for name in ("run", "again"))
    assert first.read_bytes() == again.read_bytes()
    calls = json.loads((tmp_path / "again" / "summary.json").read_text())["calls"]
    assert calls == {"recorded": len(read_recording(exported / "calls.jsonl.xz")), "live": 0}
    assert run_main("--replay", "multiarith", "--out", tmp_path / "named") == 0  # by its name in checkpoints/


def test_what_is_exported(exported, tmp_path):
    names = {"manifest.json", "metrics.jsonl", "summary.json", "calls.jsonl.xz", "executions.jsonl.xz"}
    policy = {f"policy/{name}" for name in ("manifest.json", "policy.safetensors.xz", "tokenizer.model")}
    assert contents(exported).keys() == names | policy | {"policy"}
    rows = shipped.read_rows(exported / "executions.jsonl.xz")
    assert {row["phase"] for row in rows} == {"train", "counterfactual", "eval"}
    assert not any({"gold", "output"} & row.keys() for row in rows)  # texts of the benchmark, and replies
    trained, rounded = Orchestrator.load(tmp_path / "run" / "policy"), Orchestrator.load(exported / "policy")
    facts = read_manifest(exported / "policy")
    assert facts["trained_params_sha256"] == params_sha256(trained.decoder)
    assert facts["params_sha256"] == params_sha256(rounded.decoder) != facts["trained_params_sha256"]


def test_a_call_that_is_missing_is_never_asked(exported, no_worker, tmp_path, capsys):
    path = exported / "calls.jsonl.xz"
    calls = read_recording(path)
    used = max(key for key, reply in calls.items() if (reply.generated_tokens or 0) > 1)  # no measurement
    del calls[used]
    write_recording(path, calls)
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 1
    out, err = capsys.readouterr()
    assert "is not in the recording" in err.splitlines()[-1]
    assert out.splitlines()[-1] == "verdict: DIFFERENT"


def test_a_measurement_that_its_server_refused_is_not_missed(checkpoints, tmp_path, monkeypatch, capsys):
    answer = ScriptedBackend._answer

    async def refuse(self, request):
        if request.max_tokens == 1:
            return Reply(text="", finish="error", error="HTTP 400: the prompt is too short")
        return await answer(self, request)

    monkeypatch.setattr(ScriptedBackend, "_answer", refuse)
    few = ("--steps", 0, "--baselines", "cot", "--out", tmp_path / "run")
    assert run_main("--bench", "multiarith", *SMALL, *few) == 0
    rows = json.loads((tmp_path / "run" / "summary.json").read_text())["eval"]
    assert {(row["prefix_tokens_per_task"], row["infra_failed"]) for row in rows} == {(0.0, 0)}
    assert export_run.main([str(tmp_path / "run"), "--out", str(checkpoints)]) == 0
    assert run_main("--replay", "multiarith", "--out", tmp_path / "again") == 0
    assert "verdict: equal, bit for bit" in capsys.readouterr().out


def test_a_measurement_that_is_lost_makes_other_costs(exported, tmp_path, capsys):
    path = exported / "calls.jsonl.xz"
    calls = read_recording(path)
    write_recording(path, {k: r for k, r in calls.items() if (r.generated_tokens or 0) > 1})
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "verdict: DIFFERENT"
    assert "is not in the recording" not in err


@pytest.mark.parametrize(
    ("change_it", "says"),
    [
        (
            lambda m, s, p: m[1].update(loss=m[1]["loss"] + 1),
            "metrics.jsonl, first difference: line 2 (step 1), loss: ",
        ),
        (lambda m, s, p: m[0].pop("entropy"), "line 1 (step 0), entropy: 'nothing' and "),
        (lambda m, s, p: m.pop(), "line 2: 'nothing' and {"),
        (
            lambda m, s, p: s["eval"][1].update(accuracy=7.0),
            "results, first difference: line 2 (method warmstart), accuracy: 7.0",
        ),
        (
            lambda m, s, p: s["train"].update(worker_tokens=7),
            "totals of training and search, first difference: line 1 (phase train), worker_tokens: 7 and ",
        ),
        (
            lambda m, s, p: p.update(trained_params_sha256="0"),
            "parameters, SHA-256, first difference: 0 and ",
        ),
    ],
)
def test_what_differs_is_named_with_both_values(change_it, says, exported, tmp_path, capsys):
    paths = [exported / name for name in ("metrics.jsonl", "summary.json", "policy/manifest.json")]
    metrics = [json.loads(line) for line in paths[0].read_text().splitlines()]
    summary, policy = (json.loads(path.read_text()) for path in paths[1:])
    change_it(metrics, summary, policy)
    for path, text in zip(
        paths, ["\n".join(map(json.dumps, metrics)), *map(json.dumps, (summary, policy))], strict=True
    ):
        path.write_text(text + "\n")
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 1
    out = capsys.readouterr().out
    assert says in out
    assert out.splitlines()[-1] == "verdict: DIFFERENT"


def test_a_spec_that_differs_is_shown_by_its_first_other_line(exported, tmp_path, capsys):
    path = exported / "executions.jsonl.xz"
    rows = shipped.read_rows(path)
    rows[3]["spec"] = rows[3]["spec"] + "\nmore"
    rows[5]["spec"] = "version: 1\nagents: []"
    shipped.write_rows(path, rows)
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 1
    out = capsys.readouterr().out
    assert "specs as written, first difference: line 4 (phase train, method lemon, step 0" in out


def test_what_is_not_exported_of_an_execution_is_compared_by_its_digest(exported, tmp_path, capsys):
    """An agent's status, say: the line of the run differs in it alone."""
    path, lines = exported / "executions.jsonl.xz", json_lines(tmp_path / "run" / "executions.jsonl")
    rows = shipped.read_rows(path)
    agent = lines[-1]["agents"][0]
    agent["status"], agent["generated_tokens"] = "TRUNCATED", agent["generated_tokens"] + 1
    rows[-1] = replay.kept(lines[-1])
    shipped.write_rows(path, rows)
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 1
    out = capsys.readouterr().out
    assert f"agents, tokens, faults, first difference: line {len(rows)} (phase eval, method complete" in out
    assert out.count("first difference") == 1


def test_an_export_of_an_earlier_version_has_no_digests_and_the_replay_says_so(exported, tmp_path, capsys):
    path = exported / "executions.jsonl.xz"
    rows = shipped.read_rows(path)
    assert all(row.pop(replay.DIGEST) for row in rows)
    shipped.write_rows(path, rows)
    summary = json.loads((exported / "summary.json").read_text())
    del summary["train"]["invalid_rate"]  # nor all of today's totals
    (exported / "summary.json").write_text(json.dumps(summary))
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 0
    out = capsys.readouterr().out
    assert "not compared: agents, tokens, faults; this export is from before" in out
    assert "verdict: equal, bit for bit" in out


def test_on_another_processor_floats_may_differ_a_little_and_specs_may_not(exported, tmp_path, capsys):
    metrics, policy = exported / "metrics.jsonl", exported / "policy" / "manifest.json"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[1]["kl"] += 1e-5
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    change(policy, '"trained_params_sha256": "', '"trained_params_sha256": "0')
    assert run_main("--replay", exported, "--out", tmp_path / "same") == 1  # nothing excuses it here
    change(exported / "manifest.json", '"processor": "', '"processor": "sparc ')
    assert run_main("--replay", exported, "--out", tmp_path / "near") == 0
    out = capsys.readouterr().out
    assert "versions and processor: processor was sparc " in out
    assert "verdict: equal up to rounding" in out
    assert "parameters' digest differs" in out
    calls = exported / "executions.jsonl.xz"
    executions = shipped.read_rows(calls)
    executions[0]["reward"]["total"] += 1e-5
    shipped.write_rows(calls, executions)
    assert run_main("--replay", exported, "--out", tmp_path / "far") == 1


def test_the_run_must_find_what_it_was_made_of(exported, policy_folder, tmp_path, capsys):
    change(exported / "manifest.json", '"policy_sha256": "', '"policy_sha256": "0')
    assert run_main("--replay", exported, "--out", tmp_path / "again") == 2
    assert "cannot replay: policy_sha256 differ" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_settings_come_from_the_manifest_alone(exported, capsys):
    assert run_main("--replay", exported, "--steps", 3, "--fresh", "--resume", exported) == 2
    assert (
        "--replay takes all settings from the run's manifest; leave out --steps, --resume, --out, --fresh"
        in (capsys.readouterr().err)
    )


def test_no_call_is_stored_twice_and_none_is_lost(exported, checkpoints, tmp_path):
    """Exported again after another run, what only the first one asked stays recorded."""
    first = read_recording(exported / "calls.jsonl.xz")
    assert not (checkpoints / "recordings").exists()
    other = ("--steps", 1, "--seed", 2)
    assert run_main("--bench", "multiarith", *SMALL, *other, "--out", tmp_path / "short") == 0
    assert json.loads((tmp_path / "short" / "summary.json").read_text())["calls"]["recorded"] > 0
    assert export_run.main([str(tmp_path / "short"), "--out", str(checkpoints)]) == 0
    own = read_recording(exported / "calls.jsonl.xz")
    others = read_recording(checkpoints / "recordings" / "multiarith.jsonl.xz")
    assert not own.keys() & others.keys()
    assert {k: r.text for k, r in first.items()} == {
        k: r.text for k, r in (own | others).items() if k in first
    }
    assert export_run.main([str(tmp_path / "run"), "--out", str(checkpoints)]) == 0
    again = read_recording(checkpoints / "recordings" / "multiarith.jsonl.xz")
    assert again.keys() == own.keys() - first.keys()


@pytest.mark.parametrize("begun", [["--fresh"], []], ids=["fresh", "served"])
def test_a_run_resumed_is_served_by_recordings_as_it_began(begun, exported, tmp_path):
    run = tmp_path / "live"
    assert run_main("--bench", "multiarith", *SMALL, "--steps", 2, *begun, "--out", run) == 0
    assert json.loads((run / "manifest.json").read_text()).get("fresh", False) == bool(begun)
    for flags, served in (([], not begun), (["--fresh"], False)):
        (run / "calls.sqlite").unlink()  # what the evaluation asks, it asks again
        assert run_main("--resume", run, *flags) == 0
        calls = json.loads((run / "summary.json").read_text())["calls"]
        assert (calls["recorded"] > 0, calls["live"] > 0) == (served, not served)


@pytest.mark.parametrize("fault", ["unfinished", "failed", "failed search", "failed round", "foreign"])
def test_what_nobody_could_replay_is_not_exported(fault, exported, checkpoints, tmp_path, capsys):
    run, before = tmp_path / "run", contents(checkpoints)
    says = {
        "unfinished": "the run has not ended",
        "failed": "1 executions failed",
        "failed search": "1 executions failed",
        "failed round": "2 executions failed",
        "foreign": "began with the",
    }
    if fault == "unfinished":
        (run / "summary.json").unlink()
    elif fault == "failed":
        change(run / "executions.jsonl", '"infra_failed": false', '"infra_failed": true')
    elif fault == "failed search":
        with (run / "executions.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": "search", "infra_failed": True}) + "\n")
    elif fault == "failed round":
        change(run / "metrics.jsonl", '"infra_failed": 0', '"infra_failed": 0, "rounds_infra_failed": 2')
    else:
        change(run / "manifest.json", '"policy": "tiny"', '"policy": "/home/me/other"')
    assert export_run.main([str(run), "--out", str(checkpoints)]) == 2
    assert says[fault] in capsys.readouterr().err
    assert contents(checkpoints) == before


@pytest.mark.parametrize(
    "folder",
    [f for f in sorted((ROOT / "checkpoints").iterdir()) if (f / "calls.jsonl.xz").exists()],
    ids=str,
)
def test_the_shipped_runs_are_whole(folder):
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    config, rows = manifest["config"], shipped.read_rows(folder / "executions.jsonl.xz")
    assert config["bench"] == folder.name
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == config["steps"]
    specs = config["steps"] * config["tasks_per_step"] * config["group"]
    assert sum(row["phase"] == "train" for row in rows) >= specs
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert sum(row["phase"] == "eval" for row in rows) == sum(row["n"] for row in summary["eval"])
    start = read_manifest(ROOT / "checkpoints" / config["policy"])
    assert start["params_sha256"] == manifest["policy_sha256"]
    assert shipped.policy_origin(folder / "policy")["continued_from"] == start
    Orchestrator.load(folder / "policy")  # checks the digests of its manifest
    recording = read_recording(folder / "calls.jsonl.xz")
    assert len(recording) == sum(summary["calls"].values())
    others = ROOT / "checkpoints" / "recordings" / f"{folder.name}.jsonl.xz"
    assert not others.exists() or not recording.keys() & read_recording(others).keys()

"""The whole loop in process: a small policy that samples real specs, scripted workers, real checkpoints."""

import asyncio
import gc
import json
import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from policy_helpers import TASKS, optax_promotion, workers

from lemon_jax.backends import Reply, ScriptedBackend
from lemon_jax.errors import LemonError
from lemon_jax.model import params_sha256
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.runtime import CallStore
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.hosts import is_of_all
from lemon_jax.train.rollouts import WorkersFailed
from lemon_jax.train.run_dir import EXECUTIONS, METRICS, TIMINGS, RunDir
from lemon_jax.train.trainer import Trainer

# Orbax leaves a coroutine that failed on a damaged file to the garbage collector, which complains
# whenever it happens to run.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def collect_what_damaged_files_left():
    yield
    gc.collect()


CONFIG = RunConfig(
    bench="multiarith",
    workers="scripted",
    steps=3,
    tasks_per_step=2,
    group=4,
    edits_per_step=2,
    checkpoint_every=1,
    update=UpdateConfig(learning_rate=2e-3, warmup=1),
)


class Progress:
    def __init__(self, stop_after: int | None = None) -> None:
        self.facts: list[dict] = []
        self.stop_after = stop_after

    def advance(self, n: int = 1, **facts) -> None:
        self.facts.append(facts)
        if len(self.facts) == self.stop_after:
            raise KeyboardInterrupt


def _trainer(policy, folder, executor, store, config=CONFIG) -> Trainer:
    run = RunDir.open(folder)[0] if folder.exists() else RunDir.create(folder, {"config": config.to_dict()})
    return Trainer(config=config, policy=policy, tasks=TASKS, executor=executor, store=store, run=run)


def _train(policy, folder, *, config=CONFIG, resume=False, stop_after=None, **options):
    """(SHA-256 of the parameters, steps done before) after training in `folder`."""
    folder.mkdir(exist_ok=True)
    if not (folder / "manifest.json").exists():
        RunDir.create(folder, {"config": config.to_dict()})
    store = CallStore(folder / "calls.sqlite")
    with workers(store, **options) as (executor, _, _), optax_promotion():
        trainer = _trainer(policy, folder, executor, store, config)
        try:
            done = trainer.resume() if resume else 0
            if stop_after is None:
                asyncio.run(trainer.train(Progress()))
            else:
                with pytest.raises(KeyboardInterrupt):
                    asyncio.run(trainer.train(Progress(stop_after)))
            return params_sha256(trainer.decoder()), done
        finally:
            trainer.close()
            store.close()


def _lines(folder):
    return (folder / METRICS).read_text(), (folder / EXECUTIONS).read_text()


@pytest.fixture(scope="module")
def straight(policy, tmp_path_factory):
    """A run never interrupted: (its folder, the SHA-256 of its parameters)."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    digest, _ = _train(policy, folder)
    return folder, digest


def test_a_run_trains_and_logs_what_it_did(policy, straight):
    folder, digest = straight
    assert digest != params_sha256(policy.decoder)
    metrics = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / EXECUTIONS).read_text().splitlines()]
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert max(m["sampling_gap"] for m in metrics) < 1e-4
    assert 0 < np.mean([m["invalid_rate"] for m in metrics]) < 1  # this policy writes both
    assert sum(m["counterfactual_executions"] for m in metrics) >= 3
    assert any(m["loss_cf"] != 0 for m in metrics)
    assert any(m["grad_norm"] > 0 for m in metrics)
    for m in metrics:
        own = [r for r in rows if r["step"] == m["step"]]
        assert sum(r["phase"] == "train" for r in own) == CONFIG.specs_per_step
        assert sum(r["phase"] == "counterfactual" for r in own) == m["counterfactual_executions"]
        rewards = [r["reward"]["total"] for r in own if r["phase"] == "train"]
        assert m["reward"] == pytest.approx(np.mean(rewards), abs=1e-5)
    assert len((folder / TIMINGS).read_text().splitlines()) == 3


@pytest.mark.parametrize("done", [1, 2])
def test_stopped_and_resumed_equals_never_stopped(policy, straight, tmp_path, done):
    folder = tmp_path / "run"
    _train(policy, folder, stop_after=done)
    digest, resumed_after = _train(policy, folder, resume=True, max_concurrency=1)
    assert resumed_after == done
    assert digest == straight[1]
    assert _lines(folder) == _lines(straight[0])


def test_killed_behind_the_last_checkpoint_repeats_the_lost_step(policy, straight, tmp_path):
    """Logs and calls of a step reach the disk before its checkpoint, so a kill can leave them ahead."""
    folder = tmp_path / "run"
    late = replace(CONFIG, checkpoint_every=2)
    _train(policy, folder, config=late)
    newest = max((folder / "checkpoints").iterdir(), key=lambda p: p.name)
    assert newest.name == "3"
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with (folder / EXECUTIONS).open("a") as file:
        file.write('{"phase": "eval", "step": null}\n{"phase": "tr')
    digest, done = _train(policy, folder, config=late, resume=True)
    assert done == 2
    assert digest == straight[1]
    assert _lines(folder) == _lines(straight[0])


def test_a_run_without_a_readable_checkpoint_starts_from_nothing_or_says_so(
    policy, straight, tmp_path, caplog
):
    folder = tmp_path / "run"
    never_saved = replace(CONFIG, checkpoint_every=9)
    _train(policy, folder, config=never_saved, stop_after=1)
    digest, done = _train(policy, folder, config=never_saved, resume=True)
    assert done == 0
    assert digest == straight[1]
    assert _lines(folder) == _lines(straight[0])
    for file in (folder / "checkpoints").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with caplog.at_level(logging.WARNING), pytest.raises(LemonError, match="checkpoints are damaged"):
        _train(policy, folder, config=never_saved, resume=True)


def test_a_step_that_workers_fail_is_no_step_and_is_repeated(policy, straight, tmp_path):
    folder = tmp_path / "run"
    says = rf"step 0: workers failed in (\d) of \1 .* 'scripted failure' .* continue with --resume {folder}$"
    with pytest.raises(WorkersFailed, match=says) as error:
        _train(policy, folder, failures=1.0)
    assert is_of_all(error.value)  # every process of a run has the same outcomes
    assert not (folder / METRICS).exists()
    assert not (folder / EXECUTIONS).exists()
    digest, done = _train(policy, folder, resume=True)
    assert done == 0
    assert digest == straight[1]
    assert _lines(folder) == _lines(straight[0])


def test_rounds_that_workers_fail_are_no_step(policy, tmp_path):
    with pytest.raises(WorkersFailed, match="step 0: workers failed"):
        _train(policy, tmp_path / "run", config=replace(CONFIG, dynamic_sampling=1), failures=1.0)


def test_an_outage_keeps_the_steps_before_it(policy, straight, tmp_path, monkeypatch):
    """Whatever checkpoint_every says, and though a few calls of the step were answered."""
    folder, late = tmp_path / "run", replace(CONFIG, checkpoint_every=9)

    class Outage(Progress):
        def advance(self, n=1, **facts):
            super().advance(n, **facts)
            if len(self.facts) == 2:
                monkeypatch.setattr(ScriptedBackend, "_answer", lost)

    async def lost(self, request):
        return Reply(text="", finish="error", error="cannot connect: gone")

    store = CallStore(None)
    with workers(store) as (executor, _, _), optax_promotion():
        trainer = _trainer(policy, folder, executor, store, late)
        with pytest.raises(WorkersFailed, match=r"step 2: .*'cannot connect: gone'"):
            asyncio.run(trainer.train(Outage()))
        trainer.close()
    store.close()
    monkeypatch.undo()
    digest, done = _train(policy, folder, config=late, resume=True)
    assert done == 2
    assert digest == straight[1]


def test_a_few_failures_are_masked_and_shown(policy, tmp_path):
    folder, progress = tmp_path / "run", Progress()
    store = CallStore(None)
    with workers(store, failures=0.1) as (executor, _, _), optax_promotion():
        trainer = _trainer(policy, folder, executor, store)
        asyncio.run(trainer.train(progress))
        trainer.close()
    store.close()
    failed = [json.loads(line)["infra_failed"] for line in (folder / METRICS).read_text().splitlines()]
    assert len(failed) == CONFIG.steps
    assert any(failed)
    assert [facts.get("infra_failed", 0) for facts in progress.facts] == failed


def test_without_counterfactuals(policy, tmp_path):
    folder = tmp_path / "run"
    _train(policy, folder, config=replace(CONFIG, steps=1, edits_per_step=0))
    (metrics,) = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert metrics["counterfactual_executions"] == 0
    assert metrics["loss_cf"] == 0


def test_the_trained_policy_is_written_exactly(policy, straight, tmp_path):
    folder = straight[0]
    with workers() as (executor, store, _):
        trainer = _trainer(policy, folder, executor, store)
        trainer.resume()
        trainer.save_policy({"kind": "trained"})
        trainer.close()
    loaded = Orchestrator.load(folder / "policy")
    assert params_sha256(loaded.decoder) == straight[1]
    texts = [t.prompt() for t in TASKS[:2]]
    key = jax.random.key(0)
    assert loaded.write(texts, key, group=1) == policy.write(texts, key, group=1, decoder=loaded.decoder)


def test_a_loss_that_is_not_finite_names_its_step(policy, tmp_path):
    graph, params = nnx.split(policy.decoder)
    broken = nnx.merge(graph, jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params))
    diverged = Orchestrator(
        broken, policy.config, policy.tokenizer, max_prompt=policy.max_prompt, max_new=policy.max_new
    )
    with pytest.raises(LemonError, match=r"step 0: .*not finite, .*lower update\.learning_rate") as error:
        _train(diverged, tmp_path / "run")
    assert is_of_all(error.value)  # every process of a run computes it
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))

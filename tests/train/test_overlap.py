"""The next step's executions beside an update: what is sampled when, and what a kill loses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import jax
import pytest
from policy_helpers import TASKS, untrained, workers
from test_trainer import CONFIG, Progress, _lines, _train, _trainer

from lemon_jax.backends import Reply, ScriptedBackend
from lemon_jax.errors import LemonError
from lemon_jax.model import params_sha256
from lemon_jax.runtime import CallStore
from lemon_jax.train import trainer as trainer_module
from lemon_jax.train.ahead import pack, unpack
from lemon_jax.train.hosts import Hosts, Preempted
from lemon_jax.train.rollouts import WorkersFailed
from lemon_jax.train.run_dir import METRICS

OVERLAP = replace(CONFIG, overlap=True, steps=4)


@pytest.fixture(autouse=True)
def lax_promotion_in_every_thread():
    """`optax_promotion` holds in one thread only, and here the update is in another."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", before)


@pytest.fixture(scope="module")
def straight(policy, tmp_path_factory):
    """A run never interrupted: (its folder, the SHA-256 of its parameters)."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    folder = tmp_path_factory.mktemp("overlap") / "run"
    digest, _ = _train(policy, folder, config=OVERLAP)
    jax.config.update("jax_numpy_dtype_promotion", before)
    return folder, digest


def test_rollouts_come_back_as_they_were(tokenizer):
    policy = untrained(tokenizer)
    texts = [t.prompt() for t in TASKS[:2]]
    rollouts = policy.write(texts, jax.random.key(0), group=3, temperature=1.0)
    packed = pack(rollouts, 6, policy.max_new)
    assert unpack(packed, policy, texts, 3) == rollouts
    assert {name: array.shape for name, array in packed.items()} == {
        name: array.shape for name, array in pack([], 6, policy.max_new).items()
    }
    assert unpack(pack([], 6, policy.max_new), policy, texts, 3) is None


def test_each_step_is_sampled_by_the_policy_of_one_update_before(policy, straight, tmp_path, monkeypatch):
    """Beside a plain loop that keeps the parameters of each step and overlaps nothing."""
    digests, sampled_by = [], []
    original = trainer_module.Trainer._write

    def write(self, step, tasks, round_):
        sampled_by.append(params_sha256(self.decoder()))
        return original(self, step, tasks, round_)

    monkeypatch.setattr(trainer_module.Trainer, "_write", write)
    store = CallStore(None)
    with workers(store) as (executor, _, _):
        trainer = _trainer(policy, tmp_path / "run", executor, store, OVERLAP)
        digests.append(params_sha256(trainer.decoder()))

        class Watch(Progress):
            def advance(self, n=1, **facts):
                digests.append(params_sha256(trainer.decoder()))

        asyncio.run(trainer.train(Watch()))
        trainer.close()
    store.close()
    # Step 0 and step 1 by the first policy, then always by the one before the last update.
    assert sampled_by == [digests[0], *digests[: OVERLAP.steps - 1]]
    assert len(set(digests)) == OVERLAP.steps + 1
    assert digests[-1] == straight[1]


def test_the_importance_ratio_is_of_the_policy_that_sampled(straight):
    """`sampling_gap` is the largest log-ratio: rounding on policy, and behind an update more than that."""
    metrics = [json.loads(line) for line in (straight[0] / METRICS).read_text().splitlines()]
    assert metrics[0]["sampling_gap"] < 1e-4
    assert min(m["sampling_gap"] for m in metrics[1:]) > 1e-3


@pytest.mark.parametrize("done", [1, 2, 3])
def test_stopped_and_resumed_equals_never_stopped(policy, straight, tmp_path, done):
    folder = tmp_path / "run"
    _train(policy, folder, config=OVERLAP, stop_after=done)
    digest, resumed_after = _train(policy, folder, config=OVERLAP, resume=True, max_concurrency=1)
    assert resumed_after == done
    assert digest == straight[1]
    assert _lines(folder) == _lines(straight[0])


def test_a_sigterm_keeps_the_specs_under_way(policy, straight, tmp_path):
    """Between two checkpoints: the whole step is saved, and the specs that the next one began with."""
    folder, config = tmp_path / "run", replace(OVERLAP, checkpoint_every=9)
    store, hosts = CallStore(None), Hosts()
    with workers(store, delay_s=0.2) as (executor, _, _):
        trainer = _trainer(policy, folder, executor, store, config)
        trainer.hosts = hosts

        class Stop(Progress):
            def advance(self, n=1, **facts):
                super().advance(n, **facts)
                if len(self.facts) == 2:
                    asyncio.get_running_loop().call_soon(hosts.stop)

        with pytest.raises(Preempted):
            asyncio.run(trainer.train(Stop()))
        trainer.close()
    store.close()
    digest, done = _train(policy, folder, config=config, resume=True)
    assert done == 2
    assert digest == straight[1]
    assert _lines(folder)[1] == _lines(straight[0])[1]


def test_an_outage_keeps_the_specs_under_way(policy, straight, tmp_path, monkeypatch):
    folder, config = tmp_path / "run", replace(OVERLAP, checkpoint_every=9)
    begin = trainer_module.Trainer._begin

    async def lost(self, request):
        return Reply(text="", finish="error", error="cannot connect: gone")

    def begun(self, step):
        if step == 2:
            monkeypatch.setattr(ScriptedBackend, "_answer", lost)
        return begin(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.Trainer, "_begin", begun)
        with pytest.raises(WorkersFailed, match="step 2: "):
            _train(policy, folder, config=config)
    monkeypatch.undo()
    digest, done = _train(policy, folder, config=config, resume=True)
    assert done == 2
    assert digest == straight[1]
    assert _lines(folder)[1] == _lines(straight[0])[1]


def test_a_stop_beside_an_update_waits_for_no_other_update(policy, straight, tmp_path, monkeypatch):
    """The next step's executions are done before the update is."""
    folder, config = tmp_path / "run", replace(OVERLAP, checkpoint_every=9)
    hosts, updated = Hosts(), []
    update = trainer_module.Trainer._update

    def slow(self, outcome, step):
        updated.append(step)
        values = update(self, outcome, step)
        if step == 1:
            time.sleep(0.5)  # the executions end
            self.hosts.stop()
        return values

    monkeypatch.setattr(trainer_module.Trainer, "_update", slow)
    store = CallStore(None)
    with workers(store) as (executor, _, _):
        trainer = _trainer(policy, folder, executor, store, config)
        trainer.hosts = hosts
        with pytest.raises(Preempted):
            asyncio.run(trainer.train(Progress()))
        trainer.close()
    store.close()
    assert updated == [0, 1]
    digest, done = _train(policy, folder, config=config, resume=True)
    assert done == 2
    assert digest == straight[1]


def test_workers_are_asked_while_the_update_computes(policy, tmp_path, monkeypatch):
    """The update waits until a worker is asked for the step after it; without overlap, for ever."""
    asked, waited = threading.Event(), []
    begin, update = trainer_module.Trainer._begin, trainer_module.Trainer._update
    generate = ScriptedBackend.generate

    def begun(self, step):
        asked.clear()
        return begin(self, step)

    async def noted(self, requests):
        asked.set()
        async for reply in generate(self, requests):
            yield reply

    def waiting(self, outcome, step):
        if step + 1 < OVERLAP.steps:  # beside the last update there is nothing
            waited.append(asked.wait(60))
        return update(self, outcome, step)

    monkeypatch.setattr(trainer_module.Trainer, "_begin", begun)
    monkeypatch.setattr(trainer_module.Trainer, "_update", waiting)
    monkeypatch.setattr(ScriptedBackend, "generate", noted)
    _train(policy, tmp_path / "run", config=OVERLAP)
    assert waited == [True] * (OVERLAP.steps - 1)


def test_a_failing_update_leaves_no_execution_behind(policy, tmp_path, monkeypatch):
    def update(self, outcome, step):
        raise LemonError("no")

    monkeypatch.setattr(trainer_module.Trainer, "_update", update)
    with pytest.raises(LemonError, match="no"):
        _train(policy, tmp_path / "run", config=OVERLAP, delay_s=0.5)


def test_nobody_gathers_while_another_thread_computes():
    """Two threads in collectives would meet those of another host in another order."""
    hosts, order = Hosts(count=2), []
    hosts.gather = lambda value: order.append("gathered") or [value]

    async def both():
        async def work():
            order.append("worked")

        def compute():
            time.sleep(0.3)
            order.append("computed")

        computing = asyncio.create_task(hosts.beside(compute))
        await asyncio.sleep(0)
        await asyncio.gather(computing, hosts.run(work))

    asyncio.run(both())
    assert order == ["worked", "computed", "gathered"]

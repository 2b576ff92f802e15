"""Training of low-rank adapters alone: what is saved, what is resumed, what the trained policy is."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from policy_helpers import TASKS, optax_promotion, workers

from lemon_jax.errors import LemonError
from lemon_jax.model import named_params, params_sha256
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.runtime import CallStore
from lemon_jax.train.checkpoint import _leaves
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.presets import check_counts
from lemon_jax.train.run_dir import METRICS, RunDir
from lemon_jax.train.trainer import Trainer

CONFIG = RunConfig(
    bench="multiarith",
    workers="scripted",
    steps=2,
    tasks_per_step=2,
    group=4,
    edits_per_step=2,
    checkpoint_every=1,
    lora_rank=2,
    lora_targets="q,o,down",
    update=UpdateConfig(learning_rate=2e-2, warmup=0, kl=0.1),
)


class Progress:
    def advance(self, n: int = 1, **facts) -> None:
        pass


class Training:
    """A trainer in `folder`, with what it needs, closed at the end."""

    def __init__(self, policy, folder, config=CONFIG):
        folder.mkdir(exist_ok=True)
        fresh = not (folder / "manifest.json").exists()
        run = RunDir.create(folder, {"config": config.to_dict()}) if fresh else RunDir.open(folder)[0]
        self._store = CallStore(folder / "calls.sqlite")
        self._workers = workers(self._store)
        executor, _, _ = self._workers.__enter__()
        self.trainer = Trainer(
            config=config, policy=policy, tasks=TASKS, executor=executor, store=self._store, run=run
        )

    def __enter__(self):
        return self.trainer

    def __exit__(self, *_):
        self.trainer.close()
        self._workers.__exit__(None, None, None)
        self._store.close()


@pytest.fixture(scope="module")
def straight(policy, tmp_path_factory):
    """A run of two steps: (its folder, the SHA-256 of decoder with adapters, the saved policy)."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    with Training(policy, folder) as trainer, optax_promotion():
        asyncio.run(trainer.train(Progress()))
        digest = params_sha256(trainer.decoder())
        in_memory = trainer.save_policy({})
        texts = [task.prompt() for task in TASKS[:2]]
        written = in_memory.write_greedy(texts, prompt_slots=64)
    return folder, digest, written


def test_only_adapters_are_trained_and_saved(policy, straight):
    folder, digest, _ = straight
    assert digest != params_sha256(policy.decoder)
    metrics = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the policy as it came
    assert metrics[1]["kl"] > 1e-6
    assert max(m["sampling_gap"] for m in metrics) < 1e-4
    with Training(policy, folder) as trainer:
        leaves = _leaves(trainer._checkpoints._checkpointer.metadata(2).metadata)
    state = [name for name in leaves if name.startswith(("params.", "opt_state."))]
    moments = [name for name in state if "mu." in name]
    assert len(moments) == 2 * 3 * policy.config.num_layers  # two factors of three projections a block
    counters = [name for name in state if name.endswith("count")]
    assert all("_lora_" in name for name in set(state) - set(counters))
    largest = max(np.prod(shape) for shape, _ in leaves.values())
    assert largest < policy.config.vocab_size * policy.config.embed_dim


def test_stopped_and_resumed_equals_never_stopped(policy, straight, tmp_path):
    folder = tmp_path / "run"
    with Training(policy, folder, replace(CONFIG, steps=1)) as trainer, optax_promotion():
        asyncio.run(trainer.train(Progress()))
    with Training(policy, folder) as trainer, optax_promotion():
        assert trainer.resume() == 1
        asyncio.run(trainer.train(Progress()))
        assert params_sha256(trainer.decoder()) == straight[1]
    assert (folder / METRICS).read_text() == (straight[0] / METRICS).read_text()


def test_the_saved_policy_is_an_ordinary_one_with_the_adapters_merged(policy, straight):
    folder, _, written = straight
    saved = Orchestrator.load(folder / "policy")
    before, after = named_params(policy.decoder), named_params(saved.decoder)
    assert set(before) == set(after)
    changed = {name for name in before if (np.asarray(before[name]) != np.asarray(after[name])).any()}
    assert changed == {
        f"layers.{i}.{name}"
        for i in range(policy.config.num_layers)
        for name in ("attention.q", "attention.o", "mlp.down")
    }
    texts = [task.prompt() for task in TASKS[:2]]
    again = saved.write_greedy(texts, prompt_slots=64)
    assert [r.token_ids for r in again] == [r.token_ids for r in written]


def test_another_rank_cannot_go_on(policy, straight):
    other = replace(CONFIG, lora_rank=3)
    with (
        Training(policy, straight[0], other) as trainer,
        pytest.raises(LemonError, match=r"q_lora_a\.value has shape \(32, 2\), expected \(32, 3\)"),
    ):
        trainer.resume()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_rank": -1}, "lora-rank is -1"),
        ({"lora_targets": "q,x"}, "lora-targets has 'x', expected some of q, k, v, o, gate, up, down"),
        ({"lora_alpha": 0.0}, "lora_alpha is 0"),
        ({"lora_rank": 0}, "lora-targets without lora-rank"),
    ],
)
def test_settings_that_no_run_can_have(change, message):
    check_counts(CONFIG)
    with pytest.raises(LemonError, match=message):
        check_counts(replace(CONFIG, **change))

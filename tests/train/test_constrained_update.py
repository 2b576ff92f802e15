"""A constrained policy from writing to update: all specs valid, one support on both sides."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy_grpo
import pytest
from flax import nnx
from policy_helpers import TASKS, optax_promotion, untrained
from test_trainer import _train

import lemon_jax.spec_automaton as kept
from lemon_jax.errors import LemonError
from lemon_jax.model import Walk, completion_log_probs, trace
from lemon_jax.orchestrator import Orchestrator
from lemon_jax.spec import applicable
from lemon_jax.train.batch import make_batch, span_tokens
from lemon_jax.train.config import RunConfig, UpdateConfig
from lemon_jax.train.losses import group_advantages
from lemon_jax.train.run_dir import METRICS
from lemon_jax.train.update import init_state, total_loss, update

MAX_NEW = 120


@pytest.fixture(scope="module")
def policy(tokenizer):
    return untrained(tokenizer, max_new=MAX_NEW, layers=1)


@pytest.fixture(scope="module")
def rollouts(policy):
    texts = [t.prompt() for t in TASKS[:2]]
    return policy.write(texts, jax.random.key(4), group=8, prompt_slots=policy.max_prompt, constrained=True)


@pytest.fixture(scope="module")
def edits(policy, rollouts):
    """Every edit that has a span."""
    found = []
    for i, rollout in enumerate(rollouts):
        for edit in applicable(rollout.parsed):
            span = span_tokens(policy.tokenizer, rollout, edit, policy.spell)
            if span is not None:
                found.append((i, edit, span))
    return found


@pytest.fixture(scope="module")
def batch(policy, rollouts, edits):
    rewards = np.random.default_rng(0).normal(size=16)
    chosen = edits[:: max(1, len(edits) // 4)][:4]
    return make_batch(
        rollouts,
        group_advantages(rewards, 8),
        [False] * 15 + [True],
        [(i, span, (-1.0) ** n) for n, (i, _, span) in enumerate(chosen)],
        num_edits=4,
        prompt_slots=policy.max_prompt,
        pad_id=policy.tokenizer.pad_id,
    )


def test_an_untrained_policy_writes_only_valid_specs(policy, rollouts):
    assert all(r.valid for r in rollouts)
    assert len({r.text for r in rollouts}) == 16
    greedy = policy.write_greedy([t.prompt() for t in TASKS[:3]], constrained=True)
    assert all(r.valid for r in greedy)


def test_edited_spans_are_texts_that_could_have_been_sampled(policy, rollouts, edits):
    assert {edit.family for _, edit, _ in edits} >= {"restore_duty", "lower_capacity"}
    prefix = len(policy.automaton.prefix_F)
    for i, edit, span in edits:
        row = [*rollouts[i].token_ids[: span.first], *span.edited_ids]
        assert edit.text.startswith(policy.tokenizer.decode(row))
        assert edit.edited_span[1] <= len(policy.tokenizer.decode(row))
        assert Walk.begin(policy.automaton, MAX_NEW).follow(row[prefix:]) is not None


def test_an_edit_that_max_new_leaves_no_tokens_for_has_no_span(policy, rollouts, edits):
    # Most samples of an untrained policy end at the very last token, so longer duties have no room.
    none = 0
    for rollout in rollouts:
        for edit in applicable(rollout.parsed):
            if span_tokens(policy.tokenizer, rollout, edit, policy.spell) is None:
                assert edit.family == "restore_duty"
                assert len(edit.text) > len(rollout.text)
                none += 1
    assert none > 0


def test_the_update_counts_only_tokens_that_were_drawn(policy, batch):
    graph, params = nnx.split(policy.decoder)
    config = UpdateConfig(temperature=1.0, kl=0.1, learning_rate=3e-3, warmup=0)
    copied = jax.tree.map(lambda x: x + 0, params)
    with optax_promotion():
        state, first = update(
            init_state(copied, config), params, batch, policy.constraint, graph=graph, config=config
        )
        moved = nnx.merge(graph, state.params)
        loss, second = jax.jit(total_loss, static_argnames="config")(
            moved, policy.decoder, batch, config=config, constraint=policy.constraint
        )
    assert float(first["sampling_gap"]) < 1e-5
    assert float(first["kl"]) == pytest.approx(0, abs=1e-6)
    assert all(np.isfinite(float(x)) for x in first.values())
    # Against plain loops over the host's walk and the scored tokens.
    rows = (
        np.concatenate([batch.prompts_BxP, batch.prompts_BxP[batch.source_K]]),
        np.concatenate([batch.prompt_lengths_B, batch.prompt_lengths_B[batch.source_K]]),
        np.concatenate([batch.completions_BxC, batch.edited_completions_KxC]),
        np.concatenate([batch.lengths_B, batch.edited_lengths_K]),
    )

    @jax.jit
    def score(decoder):
        found = trace(policy.constraint, jnp.asarray(rows[2]), jnp.asarray(rows[3]))
        return completion_log_probs(decoder, *map(jnp.asarray, rows), trace=found)[0], found

    new, found = score(moved)
    old, _ = score(policy.decoder)
    new, old, free = np.asarray(new, float), np.asarray(old, float), np.asarray(found.free_BxC)
    inside = np.arange(free.shape[1])[None] < np.asarray(rows[3])[:, None]
    assert (np.asarray(found.known_BxC) == inside).all()
    assert (free & ~inside).sum() == 0
    mask = free[:16] & batch.kept_B[:, None]
    expected, _, _ = numpy_grpo.grpo(
        new[:16], batch.old_log_probs_BxC.astype(float), batch.advantages_B, mask, config.clip_low
    )
    kl, _ = numpy_grpo.kl(new[:16], old[:16], mask)

    def mean(row, first, last):
        return np.mean([new[row, t] for t in range(first, last) if free[row, t]] or [0.0])

    s = [mean(batch.source_K[k], batch.first_K[k], batch.last_K[k]) for k in range(4)]
    z = [mean(16 + k, batch.first_K[k], batch.edited_lengths_K[k]) for k in range(4)]
    spans, _, _ = numpy_grpo.counterfactual(s, z, batch.contrast_K, batch.weight_K, config.tau)
    spans *= (np.asarray(batch.weight_K) > 0).sum() / mask.sum()
    assert float(second["loss_grpo"]) == pytest.approx(expected, abs=1e-5)
    assert float(second["kl"]) == pytest.approx(kl, abs=1e-5)
    assert float(second["loss_cf"]) == pytest.approx(spans, abs=1e-5)
    assert float(loss) == pytest.approx(expected + config.kl * kl + config.counterfactual * spans, abs=1e-5)


def test_a_constrained_run_has_no_invalid_spec(policy, tmp_path):
    config = RunConfig(
        bench="multiarith",
        workers="scripted",
        constrained=True,
        steps=2,
        tasks_per_step=2,
        edits_per_step=2,
        checkpoint_every=2,
        update=UpdateConfig(learning_rate=2e-3, temperature=1.0),
    )
    _train(policy, tmp_path / "run", config=config)
    metrics = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert [m["invalid_rate"] for m in metrics] == [0, 0]
    assert all(m["sampling_gap"] < 1e-5 for m in metrics)
    assert all(m["grad_norm"] > 0 for m in metrics)
    assert all(0 <= m["spans_beyond_max_new"] <= 2 for m in metrics)
    assert RunConfig.from_dict(config.to_dict()) == config


def test_the_automaton_is_compiled_once(tokenizer, tmp_path, monkeypatch):
    first = kept.spec_automaton(tokenizer, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(kept, "compile_automaton", None)
        again = kept.spec_automaton(tokenizer, cache=tmp_path)
    for name in first._fields:
        assert getattr(first, name).dtype == getattr(again, name).dtype
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    # A damaged one is compiled anew, an unwritable folder is no reason to stop.
    path.write_bytes(path.read_bytes()[:1000])
    np.testing.assert_array_equal(kept.spec_automaton(tokenizer, cache=tmp_path).class_V, first.class_V)
    assert path.stat().st_size > 1000
    (tmp_path / "file").write_text("")
    np.testing.assert_array_equal(kept.spec_automaton(tokenizer, cache=tmp_path / "file").row_S, first.row_S)


def test_too_few_tokens_for_any_spec_are_named(policy):
    small = Orchestrator(policy.decoder, policy.config, policy.tokenizer, max_prompt=64, max_new=32)
    with pytest.raises(LemonError, match=r"max_new is 32, the shortest spec has \d+ tokens"):
        small.write([TASKS[0].prompt()], jax.random.key(0), group=1, constrained=True)
    assert replace(RunConfig(bench="aqua"), constrained=True).sha256() != RunConfig(bench="aqua").sha256()

"""Edits in tokens, the arrays of an update, and the update itself."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy_grpo
import pytest
from flax import nnx
from policy_helpers import LEARNED, TASKS, optax_promotion, rollout, teacher_specs

from lemon_jax.model import completion_log_probs, params_sha256
from lemon_jax.spec import applicable, dump
from lemon_jax.train.batch import COMPLETION_BUCKET, make_batch, span_tokens
from lemon_jax.train.config import UpdateConfig
from lemon_jax.train.losses import group_advantages
from lemon_jax.train.update import init_state, total_loss, update


def _check(tokenizer, written, edit):
    """All that span_tokens promises about one edit of one rollout."""
    span = span_tokens(tokenizer, written, edit)
    offsets = tokenizer.offsets(written.token_ids)
    assert 0 <= span.first < span.last < len(written.token_ids)
    left, right = offsets[span.first][0], offsets[span.last - 1][1]
    assert left < edit.span[1] <= right
    # Smallest: one token less at the end would not cover the field; at the beginning the two spans differ.
    assert offsets[span.last - 1][0] < edit.span[1]
    assert written.text[:left] == edit.text[:left]
    one_is_short = 1 in (len(span.edited_ids), span.last - span.first)
    assert one_is_short or written.token_ids[span.first] != span.edited_ids[0]
    row = [*written.token_ids[: span.first], *span.edited_ids]
    grown = len(edit.text) - len(written.text)
    assert tokenizer.decode(row) == edit.text[: right + grown]
    assert edit.text[right + grown :] == written.text[right:]


def test_every_edit_of_many_specs_continues_the_sampled_prefix(tokenizer):
    families = set()
    for text in teacher_specs(60, seed=1):
        written = rollout(tokenizer, text)
        for edit in applicable(written.parsed):
            _check(tokenizer, written, edit)
            families.add(edit.family)
    assert families == {"delete_dependency", "restore_duty", "lower_capacity"}


def test_what_both_spans_begin_with_belongs_to_neither(tokenizer):
    """Under the mean over spans of 7 and 4 tokens the common `[`, `a`, `1` would get -1/7 + 1/4 each."""
    found = 0
    for text in teacher_specs(60, seed=1):
        written = rollout(tokenizer, text)
        for edit in applicable(written.parsed):
            old, new = text[slice(*edit.span)], edit.text[slice(*edit.edited_span)]
            if edit.family == "delete_dependency" and new.startswith("[a") and old.startswith(new[:-1]):
                span = span_tokens(tokenizer, written, edit)
                # Of `[a1, a2]` and `[a1]` only `, a2]` and `]` are left, with what their tokens hold beyond.
                kept = tokenizer.decode(written.token_ids[: span.first])
                assert kept.endswith(new[:-1]), (old, new, kept[-12:])
                found += 1
    assert found > 3


def test_ids_that_no_encoder_would_give_are_kept_as_sampled(tokenizer):
    rng = random.Random(0)
    for text in teacher_specs(12, seed=2):
        # Stretches of the text character by character, others as the encoder would.
        cuts = sorted(rng.sample(range(1, len(text)), 8))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = []
        for i, part in enumerate(parts):
            for piece in part if i % 2 else [part]:
                ids += tokenizer.encode(piece)
        assert tokenizer.decode(ids) == text
        assert ids != tokenizer.encode(text)
        written = rollout(tokenizer, text, ids=ids)
        for edit in applicable(written.parsed):
            _check(tokenizer, written, edit)


def test_characters_of_several_bytes_inside_and_beside_the_field(tokenizer):
    text = dump(LEARNED[0]).replace("Solve it.", "Löse → 数 ✓").replace("Say what matters.", "€")
    written = rollout(tokenizer, text)
    edits = applicable(written.parsed)
    assert {e.family for e in edits} == {"delete_dependency", "restore_duty", "lower_capacity"}
    for edit in edits:
        _check(tokenizer, written, edit)


def _batch(tokenizer, texts, contrasts, *, num_edits, masked=None, advantages=None):
    rollouts = [rollout(tokenizer, t, prompt=(1, *range(5, 7 + i))) for i, t in enumerate(texts)]
    edits = [
        (i, span_tokens(tokenizer, rollouts[i], applicable(rollouts[i].parsed)[0]), d)
        for i, d in contrasts.items()
    ]
    batch = make_batch(
        rollouts,
        np.zeros(len(texts)) if advantages is None else advantages,
        masked or [False] * len(texts),
        edits,
        num_edits=num_edits,
        prompt_slots=32,
        pad_id=tokenizer.pad_id,
    )
    return rollouts, edits, batch


def test_the_arrays_of_an_update(tokenizer):
    texts = [dump(s) for s in LEARNED]
    rollouts, edits, batch = _batch(
        tokenizer, texts, {2: 0.5, 0: -0.25}, num_edits=4, masked=[False, True, False]
    )
    slots = batch.completions_BxC.shape[1]
    assert slots % COMPLETION_BUCKET == 0
    assert batch.prompts_BxP.shape == (3, 32)
    assert batch.edited_completions_KxC.shape == (4, slots)
    assert batch.old_log_probs_BxC.shape == (3, slots)
    for i, r in enumerate(rollouts):
        assert tuple(batch.completions_BxC[i, : batch.lengths_B[i]]) == r.token_ids
        assert tuple(batch.prompts_BxP[i, : batch.prompt_lengths_B[i]]) == r.prompt_ids
        assert (batch.old_log_probs_BxC[i, batch.lengths_B[i] :] == 0).all()
    assert batch.kept_B.tolist() == [True, False, True]
    assert batch.source_K.tolist() == [2, 0, 0, 0]
    assert batch.contrast_K.tolist() == [0.5, -0.25, 0, 0]
    assert batch.weight_K.tolist() == [1, 1, 0, 0]
    for k, (i, span, _) in enumerate(edits):
        row = batch.edited_completions_KxC[k, : batch.edited_lengths_K[k]]
        assert tuple(row) == (*rollouts[i].token_ids[: span.first], *span.edited_ids)
        assert (batch.first_K[k], batch.last_K[k]) == (span.first, span.last)


def test_a_batch_without_edits(tokenizer):
    _, _, batch = _batch(tokenizer, [dump(LEARNED[0])] * 2, {}, num_edits=0)
    assert batch.edited_completions_KxC.shape == (0, batch.completions_BxC.shape[1])
    assert batch.weight_K.shape == (0,)
    assert batch.weight_K.dtype == np.float32


def _score(policy, rollouts, temperature):
    steps = max(len(r.token_ids) for r in rollouts)
    slots = max(len(r.prompt_ids) for r in rollouts)
    args = []
    for rows, width in (([r.prompt_ids for r in rollouts], slots), ([r.token_ids for r in rollouts], steps)):
        args.append(np.array([[*row, *([0] * (width - len(row)))] for row in rows], np.int32))
        args.append(np.array([len(row) for row in rows], np.int32))
    found, _ = jax.jit(completion_log_probs, static_argnames="temperature")(
        policy.decoder, *args, temperature=temperature
    )
    return [np.asarray(found[i, : len(r.token_ids)]) for i, r in enumerate(rollouts)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_is_1_where_the_parameters_are_those_that_sampled(policy, temperature):
    rollouts = policy.write(
        [t.prompt() for t in TASKS[:3]], jax.random.key(1), group=2, temperature=temperature
    )
    for written, again in zip(rollouts, _score(policy, rollouts, temperature), strict=True):
        np.testing.assert_allclose(np.exp(again - np.array(written.log_probs)), 1.0, atol=5e-5)


@pytest.fixture(scope="module")
def sampled(policy):
    """Real rollouts of two tasks, with rewards of which one is masked, and edits of the valid ones."""
    slots = policy.prompt_slots([t.prompt() for t in TASKS])
    rollouts = policy.write([t.prompt() for t in TASKS[:2]], jax.random.key(4), group=4, prompt_slots=slots)
    rewards = np.array([1.2, 0.3, float("nan"), -0.5, 0.1, 1.3, 1.3, 0.2])
    valid = [i for i, r in enumerate(rollouts) if r.valid and i != 2]
    edits = [
        (i, span_tokens(policy.tokenizer, rollouts[i], applicable(rollouts[i].parsed)[-1]), d)
        for i, d in zip(valid[:2], (0.6, -0.3), strict=True)
    ]
    return rollouts, make_batch(
        rollouts,
        group_advantages(rewards, 4),
        np.isnan(rewards),
        edits,
        num_edits=3,
        prompt_slots=slots,
        pad_id=policy.tokenizer.pad_id,
    )


def _parts(policy):
    graph, params = nnx.split(policy.decoder)
    return graph, params, jax.tree.map(lambda x: x + 0, params)


def test_the_first_update_has_no_sampling_gap_and_later_losses_equal_the_reference(policy, sampled):
    _, batch = sampled
    config = UpdateConfig(learning_rate=3e-3, warmup=0, kl=0.1, temperature=1.0)
    graph, reference, params = _parts(policy)
    before = params_sha256(policy.decoder)
    with optax_promotion():
        state, first = update(init_state(params, config), reference, batch, graph=graph, config=config)
        moved = jax.tree.map(lambda x: x + 0, state.params)
        _, second = update(state, reference, batch, graph=graph, config=config)
    assert float(first["sampling_gap"]) < 1e-4
    assert float(first["kl"]) == pytest.approx(0, abs=1e-6)
    assert float(first["clip_fraction"]) == 0
    assert all(np.isfinite(float(v)) for v in [*first.values(), *second.values()])
    assert params_sha256(policy.decoder) == before  # the reference outlives the donated state

    # The second update is off-policy: its terms against plain loops over the scored tokens.
    rows = (
        np.concatenate([batch.prompts_BxP, batch.prompts_BxP[batch.source_K]]),
        np.concatenate([batch.prompt_lengths_B, batch.prompt_lengths_B[batch.source_K]]),
        np.concatenate([batch.completions_BxC, batch.edited_completions_KxC]),
        np.concatenate([batch.lengths_B, batch.edited_lengths_K]),
    )
    score = jax.jit(lambda d: completion_log_probs(d, *map(jnp.asarray, rows))[0])
    new = np.asarray(score(nnx.merge(graph, moved)), float)
    ref = np.asarray(score(policy.decoder), float)
    steps = new.shape[1]
    mask = (np.arange(steps)[None] < batch.lengths_B[:, None]) & batch.kept_B[:, None]
    expected, _, share = numpy_grpo.grpo(
        new[:8], batch.old_log_probs_BxC.astype(float), batch.advantages_B, mask, config.clip_low
    )
    kl, _ = numpy_grpo.kl(new[:8], ref[:8], mask)
    s = [
        numpy_grpo.span_score(new[batch.source_K[k]], batch.first_K[k], batch.last_K[k], True)
        for k in range(3)
    ]
    z = [
        numpy_grpo.span_score(new[8 + k], batch.first_K[k], batch.edited_lengths_K[k], True) for k in range(3)
    ]
    spans, _, _ = numpy_grpo.counterfactual(s, z, batch.contrast_K, batch.weight_K, config.tau)
    assert kl > 0
    assert share > 0
    assert float(second["clip_fraction"]) == pytest.approx(share, abs=2 / mask.sum())
    assert float(second["loss_grpo"]) == pytest.approx(expected, abs=1e-5)
    assert float(second["kl"]) == pytest.approx(kl, abs=1e-5)
    spans *= (np.asarray(batch.weight_K) > 0).sum() / mask.sum()
    assert float(second["loss_cf"]) == pytest.approx(spans, abs=1e-5)
    total = expected + config.kl * kl + config.counterfactual * spans
    assert float(second["loss"]) == pytest.approx(total, abs=1e-5)


def test_a_batch_in_which_everything_failed_changes_nothing(policy, sampled):
    _, batch = sampled
    nothing = batch._replace(
        kept_B=np.zeros_like(batch.kept_B),
        advantages_B=np.zeros_like(batch.advantages_B),
        weight_K=np.zeros_like(batch.weight_K),
        contrast_K=np.full_like(batch.contrast_K, np.nan),
    )
    config = UpdateConfig(learning_rate=3e-3, warmup=0, kl=0.1, temperature=1.0)  # as above: compiled once
    graph, reference, params = _parts(policy)
    with optax_promotion():
        state, metrics = update(init_state(params, config), reference, nothing, graph=graph, config=config)
    assert float(metrics["loss"]) == 0
    assert float(metrics["grad_norm"]) == 0
    assert params_sha256(state.params) == params_sha256(reference)


def test_grpo_leaves_edited_rows_alone_and_the_credit_leaves_masked_rollouts_alone(policy, sampled):
    """Whatever stands in an absent edit's row, and whatever a masked rollout's reward was, nothing moves."""
    _, batch = sampled
    config = UpdateConfig(kl=0.1, temperature=1.0)
    junk = batch.edited_completions_KxC.copy()
    junk[2] = 7  # the third edit is absent
    old = batch.old_log_probs_BxC.copy()
    old[2] = -50.0  # rollout 2 is masked
    other = batch._replace(edited_completions_KxC=junk, old_log_probs_BxC=old)
    loss = jax.jit(lambda b: total_loss(policy.decoder, policy.decoder, b, config)[0])
    assert float(loss(batch)) == pytest.approx(float(loss(other)), abs=1e-7)
    assert jnp.isfinite(loss(batch))


OPTIONS = [
    {"policy_loss": "truncated", "truncate": 1.01},
    {"clip_high": 0.01},
    {"aggregation": "sequence"},
    {"aggregation": "constant"},
    {"kl_estimator": "k1"},
    {"kl_estimator": "k2"},
    {"kl": 0.0},
    {"counterfactual_form": "gradient"},
]


def test_every_option_of_the_update_changes_it(sampled, monkeypatch):
    """On made-up scores, where ratios and KL are not trivial; what each option is, test_losses tells."""
    _, batch = sampled
    rng = np.random.default_rng(0)
    rows = len(batch.lengths_B) + len(batch.source_K)
    scores = {name: jnp.asarray(-rng.uniform(0, 3, (rows, batch.completions_BxC.shape[1]))) for name in "pr"}

    def score(name, prompts, *_, **__):
        return scores[name][: len(prompts)].astype(jnp.float32), jnp.ones_like(scores[name][: len(prompts)])

    monkeypatch.setattr("lemon_jax.train.update.completion_log_probs", score)
    plain = UpdateConfig(kl=0.1)
    batch = batch._replace(old_log_probs_BxC=batch.old_log_probs_BxC * 0 - 1.5)
    found = [
        float(total_loss("p", "r", batch, replace(plain, **options))[0])  # type: ignore[arg-type]
        for options in [{}, *OPTIONS]
    ]
    assert np.isfinite(found).all()
    assert len({round(value, 5) for value in found}) == len(found), found

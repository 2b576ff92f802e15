"""On a mesh of 8 (fake) devices, and in parts, sampling and updates are those of one device."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from policy_helpers import LEARNED, TASKS, optax_promotion, rollout, untrained

from lemon_jax.errors import LemonError
from lemon_jax.model import PRESETS, Decoder, completion_log_probs
from lemon_jax.model.lora import add_lora
from lemon_jax.model.sharding import fetch, make_mesh, mesh_of, place, using
from lemon_jax.spec import applicable, dump
from lemon_jax.train.batch import make_batch, micro_batches, span_tokens
from lemon_jax.train.config import ScaleConfig, UpdateConfig
from lemon_jax.train.losses import group_advantages
from lemon_jax.train.update import TrainState, cast, init_state, update

CONFIG = UpdateConfig(learning_rate=3e-3, warmup=0, kl=0.1, temperature=1.0)
SHAPES = [(1, 8, 1), (2, 2, 2)]  # eight rollouts; four heads on two places, two key/value heads


@pytest.fixture(scope="module")
def policy(tokenizer):
    return untrained(tokenizer, layers=1)


@pytest.fixture(scope="module")
def batch(policy):
    """Rollouts that the policy might have sampled, one of them masked, and edits of two."""
    rng = np.random.default_rng(0)
    texts = [dump(LEARNED[i % 3]) for i in range(8)]
    rollouts = [rollout(policy.tokenizer, t, prompt=(1, *range(5, 7 + i))) for i, t in enumerate(texts)]
    likely = -np.log(policy.config.vocab_size)
    rollouts = [replace(r, log_probs=tuple(likely + rng.normal(0, 0.2, len(r.token_ids)))) for r in rollouts]
    rewards = np.array([1.2, 0.3, float("nan"), -0.5, 0.1, 1.3, 1.3, 0.2])
    edits = [
        (i, span_tokens(policy.tokenizer, rollouts[i], applicable(rollouts[i].parsed)[-1]), d)
        for i, d in ((0, 0.6), (5, -0.3))
    ]
    return make_batch(
        rollouts,
        group_advantages(rewards, 4),
        np.isnan(rewards),
        edits,
        num_edits=3,
        prompt_slots=32,
        pad_id=policy.tokenizer.pad_id,
    )


def _updated(
    policy, batch, *, config=CONFIG, mesh=None, constrained=False, remat=False
) -> tuple[TrainState, dict]:
    """The state after an update on the batch, on the host, and its metrics."""
    graph, start = nnx.split(policy.decoder)
    if mesh is not None:
        start = place(start, mesh)
    state = init_state(jax.tree.map(lambda x: x.copy(), start), config)
    constraint = policy.constraint if constrained else None
    static = {"graph": graph, "config": config, "remat": remat}
    with optax_promotion(), using(start):
        state, metrics = update(state, cast(start, config), batch, constraint, **static)
    assert mesh_of(state) == mesh
    return fetch(state), {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def alone(policy, batch):
    return _updated(policy, batch)


def _flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def assert_same_update(found, expected):
    """Of the gradient (Adam's first moment after one step) the residual is rounding: 1e-5 of it, and
    of no direction; of metrics a hundred-thousandth."""
    gradient, other = (_flat(state.opt_state[1][0].mu) for state, _ in (expected, found))
    residual = other - gradient
    scale = np.sqrt(np.mean(gradient**2))
    assert scale > 1e-5
    assert np.sqrt(np.mean(residual**2)) < 1e-5 * scale
    # Of n independent errors the mean is their deviation / sqrt(n); rounding to float32 is not independent.
    assert abs(residual.mean()) < 10 * residual.std() / np.sqrt(residual.size)
    for name, value in expected[1].items():
        assert found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    # Adam moves a parameter by its gradient's sign, however small: only where it is no rounding.
    moved = np.abs(_flat(expected[0].params) - _flat(found[0].params))
    assert moved[np.abs(gradient) > 0.01 * scale].max() < 0.01 * CONFIG.learning_rate


@pytest.mark.parametrize("shape", SHAPES)
def test_any_mesh_gives_the_update_of_one_device(policy, batch, alone, shape):
    data, fsdp, tensor = shape
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor)
    assert_same_update(_updated(policy, batch, mesh=mesh), alone)


def test_eight_parts_of_one_with_remat_are_one_part_of_eight(policy, batch, alone):
    assert_same_update(_updated(policy, micro_batches(batch, 8), remat=True), alone)


def test_accumulation_divides_by_the_whole_step_whatever_is_counted(policy, batch):
    """Specs in place of tokens, of these only the free ones, and 8 rollouts in 3 parts of unequal sizes."""
    config = replace(CONFIG, aggregation="sequence")
    whole = _updated(policy, batch, config=config, constrained=True)
    parts = _updated(policy, micro_batches(batch, 3), config=config, constrained=True)
    assert_same_update(parts, whole)


def test_micro_batches_keep_every_rollout_and_edit_once(batch):
    for parts in (2, 3, 8):
        micro = micro_batches(batch, parts)
        assert micro.completions_BxC.shape[:2] == (parts, -(-8 // parts))
        assert micro.weight_K.shape == (parts, -(-3 // parts))
        rows = [
            (tuple(row[:length]), kept)
            for part in range(parts)
            for row, length, kept in zip(
                micro.completions_BxC[part], micro.lengths_B[part], micro.kept_B[part], strict=True
            )
            if length
        ]
        originals = zip(batch.completions_BxC, batch.lengths_B, batch.kept_B, strict=True)
        assert sorted(rows) == sorted((tuple(row[:length]), kept) for row, length, kept in originals)
        for part, k in zip(*np.nonzero(micro.weight_K), strict=True):
            (original,) = np.flatnonzero(batch.contrast_K == micro.contrast_K[part, k])
            source = micro.source_K[part, k]
            np.testing.assert_array_equal(
                micro.completions_BxC[part, source], batch.completions_BxC[batch.source_K[original]]
            )
        assert micro.weight_K.sum() == batch.weight_K.sum()
        assert micro.prompt_lengths_B.min() >= 1


def _write(policy, decoder=None):
    texts = [t.prompt() for t in TASKS[:2]]
    return policy.write(texts, jax.random.key(4), group=4, prompt_slots=64, decoder=decoder)


def test_a_mesh_writes_the_specs_of_one_device(policy):
    """Two prompts of four specs on eight devices: each row draws by its own key."""
    rollouts = _write(policy)
    graph, params = nnx.split(policy.decoder)
    found = _write(policy, nnx.merge(graph, place(params, make_mesh(data=2, fsdp=2, tensor=2))))
    assert [r.token_ids for r in found] == [r.token_ids for r in rollouts]
    for one, other in zip(found, rollouts, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_loop_are_those_one_after_the_other(remat):
    """On a mesh; one of the three layers sees a window, and each has its own adapters."""
    config = replace(
        PRESETS["tiny"], num_layers=3, sliding_layers=(1,), sliding_window=4, rope_local_theta=50.0
    )
    decoder = add_lora(Decoder(config, rngs=nnx.Rngs(0)), rank=2, alpha=4.0, key=jax.random.key(1))
    graph, params = nnx.split(decoder)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    rng = np.random.default_rng(0)
    tokens = [jnp.asarray(rng.integers(0, config.vocab_size, (8, slots))) for slots in (8, 16)]
    lengths = [jnp.asarray(rng.integers(1, slots + 1, 8)) for slots in (8, 16)]

    @jax.jit
    def score(params):
        given = (tokens[0], lengths[0], tokens[1], lengths[1])
        return jnp.mean(completion_log_probs(nnx.merge(graph, params), *given, remat=remat)[0])

    value, gradient = jax.value_and_grad(score)(params)
    split = place(params, make_mesh(data=2, fsdp=2, tensor=2))
    with using(split):
        assert "scan" in str(jax.make_jaxpr(score)(split))
        found, other = jax.value_and_grad(score)(split)
    assert float(found) == pytest.approx(float(value), rel=1e-5)
    for a, b in zip(jax.tree.leaves(fetch(other)), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_bfloat16_computes_in_it_and_keeps_float32(policy, batch, alone):
    config = replace(CONFIG, compute_dtype="bfloat16")
    graph, params = nnx.split(policy.decoder)
    decoder = nnx.merge(graph, cast(params, config))
    assert decoder.embed[...].dtype == jnp.bfloat16
    assert decoder.final_norm.scale[...].dtype == jnp.float32
    state, metrics = _updated(policy, batch, config=config)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {np.dtype("float32"), np.dtype("int32")}
    gradient, exact = _flat(state.opt_state[1][0].mu), _flat(alone[0].opt_state[1][0].mu)
    cosine = gradient @ exact / np.sqrt((gradient @ gradient) * (exact @ exact))
    assert 0.99 < cosine < 1 - 1e-9
    assert metrics["loss"] == pytest.approx(alone[1]["loss"], rel=0.1, abs=0.02)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)  # there the layers of both dtypes are stacked
    assert _updated(policy, batch, config=config, mesh=mesh, remat=True)[1]["loss"] == pytest.approx(
        metrics["loss"], rel=0.1, abs=0.02
    )


def test_sizes_below_one_are_refused():
    with pytest.raises(LemonError, match="fsdp, accumulate must be at least 1"):
        ScaleConfig(fsdp=0, accumulate=0)

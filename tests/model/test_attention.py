"""The forms of attention agree with their definition, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lemon_jax.model.attention import BLOCK, attend, attend_at_once, attend_by_jax, attend_in_blocks
from lemon_jax.model.layout import attention_mask, window_mask

HEADS, KV_HEADS, HEAD_DIM, PROMPT = 6, 2, 8, 40


def inputs(time: int, window: int | None = None):
    rng = np.random.default_rng(time)

    def normal(heads: int):
        return jnp.asarray(rng.standard_normal((3, heads, time, HEAD_DIM)), jnp.float32)

    mask = attention_mask(jnp.asarray([1, 17, PROMPT]), jnp.arange(time), PROMPT, time)
    mask = mask if window is None else window_mask(mask, window)
    return normal(HEADS), normal(KV_HEADS), normal(KV_HEADS), mask


def numpy_attention(q, k, v, mask, divisor):
    """Row by row, head by head; a row that sees nothing stays NaN."""
    q, k, v, mask = (np.asarray(x, np.float64) for x in (q, k, v, mask))
    out = np.full(q.shape, np.nan)
    for b, h, t in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen):
            head = h // (HEADS // KV_HEADS)
            scores = k[b, head, seen] @ q[b, h, t] / divisor
            weights = np.exp(scores - scores.max())
            out[b, h, t] = weights @ v[b, head, seen] / weights.sum()
    return out


@pytest.mark.parametrize("form", [attend_at_once, attend_in_blocks, attend_by_jax])
@pytest.mark.parametrize(("time", "window"), [(2 * BLOCK, None), (BLOCK + 9, None), (2 * BLOCK + 1, 11)])
def test_each_form_is_softmax_attention(form, time, window):
    given = inputs(time, window)
    expected = numpy_attention(*given, 2.5)
    seen = ~np.isnan(expected)
    assert seen.mean() > 0.8
    np.testing.assert_allclose(np.asarray(form(*given, divisor=2.5))[seen], expected[seen], atol=2e-6)


def test_blocks_have_the_gradient_of_the_definition():
    q, k, v, mask = inputs(2 * BLOCK + 30)
    weight = jnp.sin(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
    weight = jnp.where(jnp.any(mask, axis=-1)[:, None, :, None], weight, 0)  # padding is read by nobody

    def grads(form):
        def loss(q, k, v):
            return jnp.sum(weight * form(q, k, v, mask, divisor=2.0))

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    for ours, theirs in zip(grads(attend_in_blocks), grads(attend_at_once), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_blocks_stand_in_for_causal_passes_only():
    q, k, v, mask = inputs(2 * BLOCK)

    def differs(causal: bool, time: int) -> bool:
        given = (q[:, :, -time:], k, v, mask[:, -time:])
        if causal:
            given = (q[:, :, :time], k[:, :, :time], v[:, :, :time], mask[:, :time, :time])
        ours = attend(*given, divisor=2.0, causal=causal)
        return bool(jnp.any(ours != attend_at_once(*given, divisor=2.0)))

    assert not differs(causal=False, time=2 * BLOCK)
    assert not differs(causal=False, time=1)  # a decoding step
    assert not differs(causal=True, time=BLOCK)
    assert differs(causal=True, time=2 * BLOCK)  # other roundings: the blocks were at work


def test_large_scores_stay_finite():
    q, k, v, mask = inputs(2 * BLOCK)
    out = attend_in_blocks(q * 1e4, k, v, mask, divisor=1.0)
    assert bool(jnp.all(jnp.isfinite(jnp.where(jnp.any(mask, -1)[:, None, :, None], out, 0))))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_on_accelerators_attention_is_plain_products(platform):
    """What the docstring says, of the JAX that is installed."""
    q, k, v, mask = inputs(2 * BLOCK)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]

    def form(q, k, v, mask):
        return attend(q, k, v, mask, divisor=2.0, causal=True)

    with jax.numpy_dtype_promotion("standard"):  # JAX's own code asks for it
        text = jax.jit(form).trace(*half, mask).lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text
    assert "custom_call" not in text
    assert f"x{2 * BLOCK}x{2 * BLOCK}x" in text  # all scores, as on CPU they never are

"""Cached serving in pages against the plain decoder, and the independence of its rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, plain_logits, random_decoder

from lemon_jax.model import serving
from lemon_jax.model.serving import ServingEngine, ServingShape
from lemon_jax.model.serving_sampling import MIN_P, TOP_K, TOP_P, draw_tokens, top_tokens
from lemon_jax.model.serving_weights import serving_weights

SHAPE = ServingShape(slots=4, context=64, pages=33, page=8, parts=3)
GEMMA = dataclasses.replace(
    TINY,
    qk_norm=True,
    post_norms=True,
    scale_embeddings=True,
    activation="gelu_tanh",
    query_pre_attn_scalar=11.0,
    sliding_layers=(0,),
    sliding_window=13,
    rope_local_theta=1e4,
    rope_theta=1e6,
)
QWEN = dataclasses.replace(TINY, qkv_bias=True, tie_embeddings=False)


def engine_of(decoder, weights="float32", shape=SHAPE):
    return ServingEngine(serving_weights(decoder, weights), decoder.config, shape)


def tables(rows, first=1, shape=SHAPE):
    """Row r gets its own pages, in an order that is not that of the pool."""
    pages = np.arange(first, first + rows * shape.most_pages).reshape(rows, -1)
    return pages[:, ::-1].astype(np.int32)


def fill(engine, prompt, table_M, row=0):
    """Prefill all but the last token of a prompt, one part a call, at `row` of the call."""
    shape = engine.shape
    for index in range(-(-(len(prompt) - 1) // shape.page)):
        tokens, table = np.zeros((shape.parts, shape.page), np.int32), np.zeros((shape.parts, len(table_M)))
        part = prompt[:-1][index * shape.page : (index + 1) * shape.page]
        tokens[row, : len(part)], table[row] = part, table_M
        at = np.zeros(shape.parts, np.int32)
        at[row] = index
        engine.prefill(tokens, table.astype(np.int32), at)


def greedy(engine, prompt, table_M, steps, slot=0, rows=None):
    """Tokens after a prompt whose pages are filled, decoded in one slot among idle ones."""
    slots = rows or engine.shape.slots
    out, token = [], prompt[-1]
    for step in range(steps):
        tokens, positions = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        table = np.zeros((slots, len(table_M)), np.int32)
        tokens[slot], positions[slot], table[slot] = token, len(prompt) - 1 + step, table_M
        zeros = np.zeros(slots)
        token = int(
            engine.decode(
                tokens,
                positions,
                table,
                zeros.astype(np.float32),
                zeros.astype(np.uint32),
                zeros.astype(np.int32),
            )[slot]
        )
        out.append(token)
    return out


def plain_greedy(decoder, prompt, steps):
    """The oracle: the whole sequence anew for every token."""
    ids = list(prompt)
    for _ in range(steps):
        padded = np.zeros(64, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(np.argmax(plain_logits(decoder, jnp.asarray(padded))[len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("config", [TINY, QWEN, GEMMA], ids=["llama", "qwen2", "gemma3"])
def test_serving_equals_the_plain_decoder(config):
    decoder = random_decoder(config)
    engine = engine_of(decoder)
    rng = np.random.default_rng(1)
    for length in (1, 2, 8, 9, 17, 30):
        prompt = [int(t) for t in rng.integers(0, config.vocab_size, length)]
        table_M = tables(1)[0]
        fill(engine, prompt, table_M)
        assert greedy(engine, prompt, table_M, 12) == plain_greedy(decoder, prompt, 12), length


def test_parts_of_one_prompt_may_share_a_call_and_a_beginning_may_be_shared():
    decoder = random_decoder(QWEN)
    engine = engine_of(decoder)
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, 512, 25)]
    one, other = tables(2)
    tokens = np.asarray(prompt[:24], np.int32).reshape(3, 8)
    engine.prefill(tokens, np.stack([one] * 3), np.arange(3, dtype=np.int32))
    expected = plain_greedy(decoder, prompt, 8)
    assert greedy(engine, prompt, one, 8) == expected
    # Another request with the same first two pages: it fills only the rest, in pages of its own.
    mixed = np.concatenate([one[:2], other[2:]])
    engine.prefill(np.stack([tokens[2]] * 3), np.stack([mixed, mixed * 0, mixed * 0]), np.int32([2, 0, 0]))
    assert greedy(engine, prompt, mixed, 8, slot=2) == expected


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_row_is_the_same_bits_in_any_company(weights):
    """Pages and logits of a request, at every row and slot, between other requests or none."""
    decoder = random_decoder(QWEN, scale=0.3)
    rng = np.random.default_rng(3)
    prompt = [int(t) for t in rng.integers(0, 512, 20)]
    seen = []
    for place in range(6):
        engine = engine_of(decoder, weights)
        noise = tables(3, first=9)
        table_M = tables(1)[0]
        for row in range(3) if place % 2 else []:  # others are there first, with longer prompts
            fill(engine, [int(t) for t in rng.integers(0, 512, 50)], noise[row])
        fill(engine, prompt, table_M, row=place % 3)
        slots = SHAPE.slots
        tokens, positions = rng.integers(0, 512, slots).astype(np.int32), np.zeros(slots, np.int32)
        table = np.zeros((slots, SHAPE.most_pages), np.int32)
        if place % 2:
            table[:3], positions[:3] = noise, 50
        slot = place % slots
        table[slot], positions[slot], tokens[slot] = table_M, 19, prompt[-1]
        temperature = np.full(slots, 0.7, np.float32)
        seeds = rng.integers(0, 99, slots).astype(np.uint32)
        seeds[slot] = 7
        drawn = engine.decode(tokens, positions, table, temperature, seeds, np.zeros(slots, np.int32))[slot]
        pages = [np.asarray(x)[table_M[:3]] for pair in engine._pages for x in pair]
        # The last page has room for four more tokens, whose slots hold what nobody reads.
        pages = [np.concatenate([p[:2].reshape(-1), p[2][:, :4].reshape(-1)]) for p in pages]
        seen.append((int(drawn), b"".join(p.tobytes() for p in pages)))
    assert all(other == seen[0] for other in seen)


WIDE = ServingShape(slots=12, context=64, pages=40, page=8, parts=3)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_a_step_of_few_rows_gives_what_the_whole_one_gives(weights):
    decoder = random_decoder(QWEN, scale=0.3)
    whole, few = (engine_of(decoder, weights, WIDE) for _ in range(2))
    assert few.rows(1) == 12  # before it was tried
    few.warm_up()
    if few.rows(1) == 12:
        pytest.skip("this processor sums otherwise where there are fewer rows")
    assert [few.rows(count) for count in (1, serving.FEW, serving.FEW + 1, 12)] == [8, 8, 12, 12]
    prompt = [int(t) for t in np.random.default_rng(3).integers(0, 512, 20)]
    own = tables(1, shape=WIDE)[0]
    found = []
    for engine, rows in ((whole, 12), (few, 8)):
        fill(engine, prompt, own)
        drawn = greedy(engine, prompt, own, 9, slot=rows - 1, rows=rows)
        # The page after the prompt's holds the last tokens; the rest of it nobody reads.
        pages = [np.asarray(x)[own[:3]] for pair in engine._pages for x in pair]
        found.append((drawn, b"".join(p.tobytes() for p in pages)))
    assert found[0] == found[1]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_step_of_few_rows_that_rounds_otherwise_is_not_used(changed, monkeypatch):
    decode = serving.decode

    def otherwise(weights, pages, tokens, *rest, config):
        out = list(decode(weights, pages, tokens, *rest, config=config))
        if len(tokens) == serving.FEW:
            out[changed] = jax.tree.map(lambda x: x.at[1].add(1e-6 if x.dtype == float else 1), out[changed])
        return out

    monkeypatch.setattr(serving, "decode", otherwise)
    engine = engine_of(random_decoder(QWEN), shape=WIDE)
    engine.warm_up()
    assert engine.rows(1) == 12


@pytest.mark.parametrize(("slots", "pages"), [(8, 40), (12, 8), (4, 33)])
def test_where_there_are_no_more_slots_or_pages_there_is_one_step(slots, pages):
    shape = ServingShape(slots=slots, context=64, pages=pages, page=8, parts=3)
    engine = engine_of(random_decoder(TINY), shape=shape)
    engine.warm_up()
    assert engine.rows(1) == slots


def test_bfloat16_is_near_float32():
    decoder = random_decoder(QWEN)
    prompts = np.random.default_rng(4).integers(0, 512, (24, 20)).tolist()
    agree = 0
    exact, rounded = engine_of(decoder), engine_of(decoder, "bfloat16")
    for prompt in prompts:
        for engine in (exact, rounded):
            fill(engine, prompt, tables(1)[0])
        agree += greedy(exact, prompt, tables(1)[0], 1) == greedy(rounded, prompt, tables(1)[0], 1)
    assert agree >= 22


def test_the_largest_logits_and_the_first_of_equal_ones():
    rng = np.random.default_rng(5)
    for vocab in (7, 64, 500, 1000):
        logits = jnp.asarray(rng.normal(size=(3, vocab)), jnp.float32)
        values, ids = top_tokens(logits, 40)
        expected = jax.lax.top_k(logits, min(40, vocab))
        np.testing.assert_array_equal(values, expected[0])
        np.testing.assert_array_equal(ids, expected[1])
    tied = jnp.zeros((1, 300)).at[0, jnp.array([70, 71, 200])].set(1.0)
    assert int(top_tokens(tied, 1)[1][0, 0]) == 70


def test_draws_follow_the_limited_distribution():
    rng = np.random.default_rng(6)
    logits = 2.5 * rng.normal(size=200).astype(np.float32)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)[:TOP_K]
    top = p[order] / p[order].sum()
    kept = (np.cumsum(top) - top < TOP_P) & (top >= MIN_P * top[0])
    weights = np.where(kept, top ** (1 / 0.7), 0)
    expected = np.zeros(200)
    expected[order] = weights / weights.sum()
    rows = 4000
    drawn = draw_tokens(
        jnp.asarray(np.tile(logits, (rows, 1))),
        jnp.full(rows, 0.7),
        jnp.arange(rows, dtype=jnp.uint32),
        jnp.zeros(rows, jnp.int32),
    )
    found = np.bincount(np.asarray(drawn), minlength=200) / rows
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(expected))
    # Four standard deviations of a share.
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / rows) + 1e-9).all()


def test_temperature_zero_is_greedy_beside_rows_that_are_not():
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(4, 90)), jnp.float32)
    drawn = draw_tokens(
        logits, jnp.array([0.0, 1.0, 0.0, 2.0]), jnp.arange(4, dtype=jnp.uint32), jnp.zeros(4, jnp.int32)
    )
    assert np.asarray(drawn)[[0, 2]].tolist() == np.argmax(logits, axis=-1)[np.array([0, 2])].tolist()

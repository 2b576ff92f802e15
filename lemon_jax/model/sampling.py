"""Sampling: one prefill a prompt, then cached decoding of its whole group until all have ended."""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from lemon_jax.model.decoder import Decoder, KVCache
from lemon_jax.model.layout import attention_mask, rope_positions
from lemon_jax.model.sharding import on_one_device
from lemon_jax.model.stages import in_stages


class Samples(NamedTuple):
    """B = N * group sampled completions; row n * group + g is sample g of prompt n.

    `lengths` counts the end-of-sequence token; a row that ran out of steps has `finished` False.
    Beyond its length a row holds token 0 and log-probability 0.
    """

    tokens_BxC: Int[Array, "batch completion"]
    log_probs_BxC: Float[Array, "batch completion"]
    lengths_B: Int[Array, " batch"]
    finished_B: Bool[Array, " batch"]


class _Rows(NamedTuple):
    """What a decoding step hands to the next. Rows that go on have all drawn the same number of tokens."""

    key_B: Array
    prompt_length_B: Array
    token_B: Array  # the last one drawn
    samples: Samples


def prefill(
    decoder: Decoder,
    prompts_NxP: Int[Array, "prompts slots"],
    prompt_lengths_N: Int[Array, " prompts"],
    *,
    group: int,
    begun_F: Int[Array, " begun"] | None = None,
) -> tuple[Float[Array, "batch dim"], KVCache]:
    """The hidden state of each last token and a cache of all slots, both repeated `group` times: each prompt
    is computed once for its group, and so is `begun`, what every completion begins with."""
    prompts, prompt_slots = prompts_NxP.shape
    begun = 0 if begun_F is None else begun_F.shape[0]
    tokens_NxS, last_N = prompts_NxP, prompt_lengths_N - 1
    if begun_F is not None and begun:
        tokens_NxS = jnp.concatenate([prompts_NxP, jnp.broadcast_to(begun_F[None], (prompts, begun))], axis=1)
        last_N = jnp.full((prompts,), prompt_slots + begun - 1)
    slots = jnp.arange(prompt_slots + begun)
    hidden_NxSxD, cache = decoder(
        tokens_NxS,
        rope_positions(prompt_lengths_N, slots, prompt_slots),
        attention_mask(prompt_lengths_N, slots, prompt_slots, prompt_slots + begun),
    )
    last_NxD = jnp.take_along_axis(hidden_NxSxD, last_N[:, None, None], axis=1)[:, 0]
    return jax.tree.map(lambda x: jnp.repeat(x, group, axis=0), (last_NxD, cache))


def append(
    samples: Samples,
    writing_B: Bool[Array, " batch"],
    token_B: Int[Array, " batch"],
    log_prob_B: Float[Array, " batch"],
    eos_ids: tuple[int, ...],
) -> Samples:
    """The samples with one more token in the rows that are `writing`; beyond the last step nothing is."""
    batch, steps = samples.tokens_BxC.shape
    at = (jnp.arange(batch), jnp.where(writing_B, samples.lengths_B, steps))
    return Samples(
        tokens_BxC=samples.tokens_BxC.at[at].set(token_B, mode="drop"),
        log_probs_BxC=samples.log_probs_BxC.at[at].set(log_prob_B, mode="drop"),
        lengths_B=samples.lengths_B + writing_B.astype(jnp.int32),
        finished_B=samples.finished_B | (writing_B & is_end(token_B, eos_ids)),
    )


def inverse_cdf(
    logits_BxV: Float[Array, "batch vocab"], uniform_B: Float[Array, " batch"]
) -> Int[Array, " batch"]:
    """The first token of each row whose cumulative probability exceeds `uniform` in [0, 1).

    One random number a row and two short cumulative sums: on CPU 25 times faster than a Gumbel number
    for every token of the vocabulary. Never returns a token of probability 0.
    """
    batch, vocab = logits_BxV.shape
    width = math.isqrt(vocab - 1) + 1
    blocks = -(-vocab // width)
    p = jnp.exp(logits_BxV - jnp.max(logits_BxV, axis=-1, keepdims=True))
    p = jnp.pad(p, ((0, 0), (0, blocks * width - vocab))).reshape(batch, blocks, width)

    # First the block that holds the target, then the token inside it.
    sums = jnp.sum(p, axis=-1)
    upto = jnp.cumsum(sums, axis=-1)
    target_Bx1 = uniform_B[:, None] * upto[:, -1:]
    block_Bx1 = _likely_from(jnp.sum(upto <= target_Bx1, axis=-1), sums)[:, None]
    before_Bx1 = jnp.where(
        block_Bx1 > 0, jnp.take_along_axis(upto, jnp.maximum(block_Bx1 - 1, 0), axis=-1), 0
    )
    inside = jnp.take_along_axis(p, block_Bx1[:, :, None], axis=1)[:, 0]
    index_B = jnp.sum(before_Bx1 + jnp.cumsum(inside, axis=-1) <= target_Bx1, axis=-1)
    return block_Bx1[:, 0] * width + _likely_from(index_B, inside)


def _likely_from(index_B: Int[Array, " batch"], p_BxN: Float[Array, "batch choices"]) -> Int[Array, " batch"]:
    """`index`, or where it names a choice of probability 0 the next of more than that, or the last of these.

    Sums round: those of a row may lie a hair below the one they add up to, and a cumulative sum is computed
    as a tree, so that it may rise and fall where all that is added is 0.
    """
    likely_BxN = p_BxN > 0
    choices = p_BxN.shape[-1]
    last_B = choices - 1 - jnp.argmax(likely_BxN[:, ::-1], axis=-1)
    from_B = jnp.minimum(index_B, last_B)
    return jnp.argmax(likely_BxN & (jnp.arange(choices)[None, :] >= from_B[:, None]), axis=-1)


def draw(
    logits_BxV: Float[Array, "batch vocab"],
    row_keys_B: Array,
    step: Int[Array, ""] | Int[Array, " batch"] | int,
    temperature: float,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """A token a row and its log-probability. Row b at a step draws with `fold_in(row_keys[b], step)`,
    so that it depends on no other row; `step` is one for all or one a row. Temperature 0 takes the
    likeliest and reports it at temperature 1.
    """
    if temperature == 0:
        tokens_B = jnp.argmax(logits_BxV, axis=-1)
    else:
        logits_BxV = logits_BxV / temperature
        step_B = jnp.broadcast_to(jnp.asarray(step), row_keys_B.shape)
        uniform_B = jax.vmap(lambda key, step: jax.random.uniform(jax.random.fold_in(key, step)))(
            row_keys_B, step_B
        )
        tokens_B = inverse_cdf(logits_BxV, uniform_B)
    chosen_B = jnp.take_along_axis(logits_BxV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B.astype(jnp.int32), chosen_B - jax.nn.logsumexp(logits_BxV, axis=-1)


def _nothing_drawn(batch: int, steps: int) -> Samples:
    return Samples(
        tokens_BxC=jnp.zeros((batch, steps), jnp.int32),
        log_probs_BxC=jnp.zeros((batch, steps), jnp.float32),
        lengths_B=jnp.zeros((batch,), jnp.int32),
        finished_B=jnp.zeros((batch,), bool),
    )


def is_end(token_B: Int[Array, " batch"], eos_ids: tuple[int, ...]) -> Bool[Array, " batch"]:
    """Whether a token is one of `eos_ids`. Models have several: the end of a turn, the end of a text."""
    return functools.reduce(jnp.logical_or, [token_B == eos for eos in eos_ids])


@partial(jax.jit, static_argnames=("group", "max_new", "temperature", "eos_ids"))
def sample(
    decoder: Decoder,
    prompts_NxP: Int[Array, "prompts slots"],
    prompt_lengths_N: Int[Array, " prompts"],
    key: Key[Array, ""],
    *,
    group: int,
    max_new: int,
    temperature: float,
    eos_ids: tuple[int, ...],
    first_row: Int[Array, ""] | int = 0,
) -> Samples:
    """`group` completions of each right-padded prompt, of at most `max_new` tokens; any of
    `eos_ids` ends one.

    Log-probabilities are fp32, in nats, of softmax(logits / temperature): those that
    `scoring.completion_log_probs` gives at the same temperature. Temperature 0 is greedy, its
    log-probabilities are those at temperature 1. Row b draws with
    `fold_in(key, first_row + b)`. Compiled once for each (N, P) and static arguments: pad prompts to few
    bucket lengths. Raises ValueError for a group or max_new below 1, or a negative
    temperature.
    """
    if group < 1 or max_new < 1 or temperature < 0:
        raise ValueError(f"group {group} and max_new {max_new} must be >= 1, temperature {temperature} >= 0")
    prompt_slots = prompts_NxP.shape[1]
    hidden_BxD, cache = prefill(decoder, prompts_NxP, prompt_lengths_N, group=group)
    prompt_lengths_B = jnp.repeat(prompt_lengths_N, group)
    batch = prompt_lengths_B.shape[0]
    row_keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(batch))

    def record(rows: _Rows, hidden_BxD: Array, step: Array | int, writing_B: Array) -> _Rows:
        token_B, log_prob_B = draw(decoder.logits(hidden_BxD), rows.key_B, step, temperature)
        samples = append(rows.samples, writing_B, token_B, log_prob_B, eos_ids)
        return rows._replace(token_B=token_B, samples=samples)

    def going(rows: _Rows, end: int) -> Array:
        return ~rows.samples.finished_B & (rows.samples.lengths_B < end)

    def step(rows: _Rows, cache: KVCache, going_B: Array) -> tuple[_Rows, KVCache]:
        num_slots = cache[0][0].shape[2]
        drawn = jnp.max(jnp.where(going_B, rows.samples.lengths_B, 0))
        slot = prompt_slots + drawn - 1  # where the last drawn token goes
        hidden_Bx1xD, cache = decoder(
            rows.token_B[:, None],
            rope_positions(rows.prompt_length_B, slot[None], prompt_slots),
            attention_mask(rows.prompt_length_B, slot[None], prompt_slots, num_slots),
            cache,
            slot,
        )
        return record(rows, hidden_Bx1xD[:, 0], drawn, going_B), cache

    empty = _nothing_drawn(batch, max_new)
    first = _Rows(row_keys_B, prompt_lengths_B, jnp.zeros((batch,), jnp.int32), empty)
    first = record(first, hidden_BxD, 0, ~empty.finished_B)
    return in_stages(
        first, cache, max_new=max_new, spare=0, going=going, step=step, regroup=on_one_device()
    ).samples

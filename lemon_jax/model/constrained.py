"""Sampling within a language: forced tokens are written without being drawn, several in one step.

A step of decoding takes the token just drawn and up to `BLOCK` - 1 tokens that must follow it. Rows advance
by different numbers of tokens, so each writes its own slots of the cache; what a row computes beyond its
own tokens is overwritten by its next step and seen by nobody before that.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from lemon_jax.model.automaton import Automaton
from lemon_jax.model.decoder import Decoder, KVCache
from lemon_jax.model.layout import attention_mask, rope_positions
from lemon_jax.model.sampling import Samples, append, draw, prefill
from lemon_jax.model.sharding import on_one_device
from lemon_jax.model.stages import in_stages
from lemon_jax.model.support import Constraint, Place, advance, begin, count_allowed, mask_logits, where

BLOCK = 4


class _Rows(NamedTuple):
    """What a step hands to the next: `block` holds the last `count` tokens of each row, not yet decoded."""

    key_B: Array
    prompt_length_B: Array
    place: Place
    block_BxW: Array
    count_B: Array
    samples: Samples


@partial(jax.jit, static_argnames=("group", "max_new", "temperature", "eos_ids", "block"))
def sample_constrained(
    decoder: Decoder,
    prompts_NxP: Int[Array, "prompts slots"],
    prompt_lengths_N: Int[Array, " prompts"],
    key: Key[Array, ""],
    automaton: Automaton,
    *,
    group: int,
    max_new: int,
    temperature: float,
    eos_ids: tuple[int, ...],
    block: int = BLOCK,
    first_row: Int[Array, ""] | int = 0,
) -> Samples:
    """As `sampling.sample`, over the support of `automaton`: every row finishes, as a text of the language.

    Log-probabilities are those of softmax over the tokens that may come, as `scoring.completion_log_probs`
    gives them for the same constraint; a token without alternative has 0. The token at position c of row b is
    drawn with `fold_in(row_keys[b], c)`, whatever the block; `first_row` as there. `max_new` must be at least
    the language's shortest text, `len(prefix) + distance[start]` tokens. Raises ValueError as
    `sampling.sample` does.
    """
    if group < 1 or max_new < 1 or temperature < 0 or block < 1:
        raise ValueError(
            f"group {group}, max_new {max_new} and block {block} must be >= 1, temperature {temperature} >= 0"
        )
    prompt_slots = prompts_NxP.shape[1]
    batch = prompts_NxP.shape[0] * group
    hidden_BxD, cache = prefill(
        decoder, prompts_NxP, prompt_lengths_N, group=group, begun_F=automaton.prefix_F
    )

    def extend(rows: _Rows, hidden_BxD: Array, going_B: Array) -> _Rows:
        """Draw a token for each row that goes on, and add what must follow: at most `block` tokens."""
        place, samples = rows.place, rows.samples
        logits_BxV = mask_logits(automaton, place, decoder.logits(hidden_BxD))
        token_B, log_prob_B = draw(logits_BxV, rows.key_B, samples.lengths_B, temperature)
        log_prob_B = jnp.where(count_allowed(automaton, place) > 1, log_prob_B, 0.0)
        writing_B, before_B, tokens = going_B, samples.lengths_B, []
        for i in range(block):
            if i > 0:
                forced_B = automaton.forced_S[place.state]
                writing_B = writing_B & ~samples.finished_B & (forced_B >= 0)
                token_B, log_prob_B = jnp.maximum(forced_B, 0), jnp.zeros_like(log_prob_B)
            samples = append(samples, writing_B, token_B, log_prob_B, eos_ids)
            place = where(writing_B, advance(automaton, place, token_B), place)
            tokens.append(token_B)
        block_BxW = jnp.where(going_B[:, None], jnp.stack(tokens, axis=1), rows.block_BxW)
        count_B = jnp.where(going_B, samples.lengths_B - before_B, rows.count_B)
        return rows._replace(place=place, samples=samples, block_BxW=block_BxW, count_B=count_B)

    def first(rows: _Rows) -> Array:  # of the completion, the block's first position
        return rows.samples.lengths_B - rows.count_B

    def going(rows: _Rows, end: int) -> Array:
        return ~rows.samples.finished_B & (first(rows) < end)

    def step(rows: _Rows, cache: KVCache, going_B: Array) -> tuple[_Rows, KVCache]:
        num_slots = cache[0][0].shape[2]
        slots_BxW = prompt_slots + first(rows)[:, None] + jnp.arange(block)[None, :]
        # A row that has reached the stage's end computes its block again: up to 2 blocks lie beyond the end.
        hidden_BxWxD, cache = decoder(
            rows.block_BxW,
            rope_positions(rows.prompt_length_B, slots_BxW, prompt_slots),
            attention_mask(rows.prompt_length_B, slots_BxW, prompt_slots, num_slots),
            cache,
            prompt_slots + first(rows),
        )
        last_Bx1x1 = jnp.maximum(rows.count_B - 1, 0)[:, None, None]
        hidden_BxD = jnp.take_along_axis(hidden_BxWxD, last_Bx1x1, axis=1)[:, 0]
        return extend(rows, hidden_BxD, going_B), cache

    rows = _Rows(
        key_B=jax.vmap(lambda row: jax.random.fold_in(key, row))(first_row + jnp.arange(batch)),
        prompt_length_B=jnp.repeat(prompt_lengths_N, group),
        place=begin(Constraint(automaton, max_new), batch),
        block_BxW=jnp.zeros((batch, block), jnp.int32),
        count_B=jnp.zeros((batch,), jnp.int32),
        samples=_begun(automaton, batch, max_new),
    )
    rows = extend(rows, hidden_BxD, ~rows.samples.finished_B)
    return in_stages(
        rows, cache, max_new=max_new, spare=2 * block, going=going, step=step, regroup=on_one_device()
    ).samples


def _begun(automaton: Automaton, batch: int, steps: int) -> Samples:
    """Samples that hold the prefix."""
    prefix = automaton.prefix_F.shape[0]
    tokens_BxC = jnp.zeros((batch, steps), jnp.int32).at[:, :prefix].set(automaton.prefix_F[None])
    return Samples(
        tokens_BxC=tokens_BxC,
        log_probs_BxC=jnp.zeros((batch, steps), jnp.float32),
        lengths_B=jnp.full((batch,), prefix, jnp.int32),
        finished_B=jnp.zeros((batch,), bool),
    )

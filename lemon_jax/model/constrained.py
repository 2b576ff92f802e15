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
from lemon_jax.model.sampling import Samples, draw
from lemon_jax.model.support import Constraint, Place, advance, begin, count_allowed, mask_logits, where

BLOCK = 4


class _Loop(NamedTuple):
    """What a step hands to the next: `block` holds the last `count` tokens of each row, not yet decoded."""

    place: Place
    block_BxW: Array
    count_B: Array
    samples: Samples
    cache: KVCache


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
) -> Samples:
    """As `sampling.sample`, over the support of `automaton`: every row finishes, as a text of the language.

    Log-probabilities are those of softmax over the tokens that may come, as `scoring.completion_log_probs`
    gives them for the same constraint; a token without alternative has 0. The token at position c of row b is
    drawn with `fold_in(row_keys[b], c)`, whatever the block. `max_new` must be at least the language's
    shortest text, `len(prefix) + distance[start]` tokens. Raises ValueError as `sampling.sample` does.
    """
    if group < 1 or max_new < 1 or temperature < 0 or block < 1:
        raise ValueError(
            f"group {group}, max_new {max_new} and block {block} must be >= 1, temperature {temperature} >= 0"
        )
    prompt_slots = prompts_NxP.shape[1]
    batch = prompts_NxP.shape[0] * group
    num_slots = prompt_slots + max_new + block
    hidden_BxD, cache = _prefill(decoder, prompts_NxP, prompt_lengths_N, automaton, group, num_slots)
    prompt_lengths_B = jnp.repeat(prompt_lengths_N, group)
    row_keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))
    rows_B = jnp.arange(batch)

    def write(samples: Samples, writing_B: Array, token_B: Array, log_prob_B: Array) -> Samples:
        # Beyond the last step nothing is written.
        at = (rows_B, jnp.where(writing_B, samples.lengths_B, max_new))
        ended_B = jnp.isin(token_B, jnp.array(eos_ids, jnp.int32))
        return Samples(
            tokens_BxC=samples.tokens_BxC.at[at].set(token_B, mode="drop"),
            log_probs_BxC=samples.log_probs_BxC.at[at].set(log_prob_B, mode="drop"),
            lengths_B=samples.lengths_B + writing_B.astype(jnp.int32),
            finished_B=samples.finished_B | (writing_B & ended_B),
        )

    def extend(place: Place, samples: Samples, hidden_BxD: Array) -> tuple[Place, Samples, Array, Array]:
        """Draw a token for each row that has not ended, and add what must follow: at most `block` tokens."""
        logits_BxV = mask_logits(automaton, place, decoder.logits(hidden_BxD))
        token_B, log_prob_B = draw(logits_BxV, row_keys_B, samples.lengths_B, temperature)
        log_prob_B = jnp.where(count_allowed(automaton, place) > 1, log_prob_B, 0.0)
        writing_B, before_B, tokens = ~samples.finished_B, samples.lengths_B, []
        for i in range(block):
            if i > 0:
                forced_B = automaton.forced_S[place.state]
                writing_B = writing_B & ~samples.finished_B & (forced_B >= 0)
                token_B, log_prob_B = jnp.maximum(forced_B, 0), jnp.zeros_like(log_prob_B)
            samples = write(samples, writing_B, token_B, log_prob_B)
            place = where(writing_B, advance(automaton, place, token_B), place)
            tokens.append(token_B)
        return place, samples, jnp.stack(tokens, axis=1), samples.lengths_B - before_B

    def body(loop: _Loop) -> _Loop:
        first_B = loop.samples.lengths_B - loop.count_B  # of the completion, the block's first position
        slots_BxW = prompt_slots + first_B[:, None] + jnp.arange(block)[None, :]
        hidden_BxWxD, cache = decoder(
            loop.block_BxW,
            rope_positions(prompt_lengths_B, slots_BxW, prompt_slots),
            attention_mask(prompt_lengths_B, slots_BxW, prompt_slots, num_slots),
            loop.cache,
            prompt_slots + first_B,
        )
        last_Bx1x1 = jnp.maximum(loop.count_B - 1, 0)[:, None, None]
        hidden_BxD = jnp.take_along_axis(hidden_BxWxD, last_Bx1x1, axis=1)[:, 0]
        place, samples, block_BxW, count_B = extend(loop.place, loop.samples, hidden_BxD)
        return _Loop(place, block_BxW, count_B, samples, cache)

    place = begin(Constraint(automaton, max_new), batch)
    samples = _begun(automaton, batch, max_new)
    place, samples, block_BxW, count_B = extend(place, samples, hidden_BxD)
    start = _Loop(place, block_BxW, count_B, samples, cache)
    return jax.lax.while_loop(lambda loop: ~jnp.all(loop.samples.finished_B), body, start).samples


def _prefill(
    decoder: Decoder,
    prompts_NxP: Array,
    prompt_lengths_N: Array,
    automaton: Automaton,
    group: int,
    num_slots: int,
) -> tuple[Array, KVCache]:
    """The prompts and, behind each, what every text begins with: once for a whole group."""
    prompts, prompt_slots = prompts_NxP.shape
    prefix = automaton.prefix_F.shape[0]
    slots = jnp.arange(prompt_slots + prefix)
    tokens = jnp.concatenate(
        [prompts_NxP, jnp.broadcast_to(automaton.prefix_F[None], (prompts, prefix))], axis=1
    )
    hidden_NxSxD, cache = decoder(
        tokens,
        rope_positions(prompt_lengths_N, slots, prompt_slots),
        attention_mask(prompt_lengths_N, slots, prompt_slots, prompt_slots + prefix),
    )
    last_N = prompt_lengths_N - 1 if prefix == 0 else jnp.full((prompts,), prompt_slots + prefix - 1)
    last_NxD = jnp.take_along_axis(hidden_NxSxD, last_N[:, None, None], axis=1)[:, 0]

    def grow(x_NxKxSxE):
        padded = jnp.pad(x_NxKxSxE, ((0, 0), (0, 0), (0, num_slots - x_NxKxSxE.shape[2]), (0, 0)))
        return jnp.repeat(padded, group, axis=0)

    return jnp.repeat(last_NxD, group, axis=0), jax.tree.map(grow, cache)


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

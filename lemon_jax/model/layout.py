"""Where the tokens of prompt + completion lie, which positions they have, and who sees whom.

Prompts are right-padded to P slots; the completion of every row starts at slot P, so that cached
decoding writes all rows at one common slot. Rotary positions skip the padding, which the mask hides:

    # prompt length 2, P = 4, completion of 2
    # slot      0   1   2   3   4   5
    # token     p0  p1  -   -   c0  c1
    # position  0   1   2   3   2   3
    # visible from slot 5: 1 1 0 0 1 1
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# What stands in place of a score or a logit that does not count. Finite: a row in which nothing counts gives
# numbers that nobody reads and a gradient, where minus infinity would give NaN.
MASKED = -1e30


def rope_positions(
    prompt_lengths_B: Int[Array, " batch"], slots: Int[Array, "*batch time"], prompt_slots: int
) -> Int[Array, "batch time"]:
    """Rotary position of each slot: the completion continues from the row's true prompt length.

    `slots` [T] are those of all rows, [B, T] each row's own.
    """
    slots_BxT = slots if slots.ndim == 2 else slots[None, :]
    shift_B = prompt_slots - prompt_lengths_B
    return jnp.where(slots_BxT < prompt_slots, slots_BxT, slots_BxT - shift_B[:, None])


def attention_mask(
    prompt_lengths_B: Int[Array, " batch"],
    slots: Int[Array, "*batch time"],
    prompt_slots: int,
    num_slots: int,
) -> Bool[Array, "batch time slots"]:
    """True where the query in slot t may read slot s: not later, and not prompt padding.

    `slots` are the queries' own, as in `rope_positions`.

    Completion padding needs no mask of its own: it comes after every real token of its row.
    """
    keys_S = jnp.arange(num_slots)
    real_BxS = (keys_S[None, :] < prompt_lengths_B[:, None]) | (keys_S[None, :] >= prompt_slots)
    slots_BxT = slots if slots.ndim == 2 else slots[None, :]
    causal_BxTxS = keys_S[None, None, :] <= slots_BxT[:, :, None]
    return real_BxS[:, None, :] & causal_BxTxS


def window_mask(mask_BxTxS: Bool[Array, "batch time slots"], window: int) -> Bool[Array, "batch time slots"]:
    """Of the slots that each query may read, the last `window`: itself and the tokens before it.

    Counts tokens, not slots, so padding between prompt and completion takes no room. Needs masks in which a
    query reads every token before it, as `attention_mask` gives them.

        # mask of slot 5:  1 1 0 0 1 1
        # later or equal:  4 3 2 2 2 1    window 3 -> 0 1 0 0 1 1
    """
    upto_BxTxS = jnp.cumsum(mask_BxTxS, axis=-1, dtype=jnp.int32)
    earlier_BxTxS = upto_BxTxS - mask_BxTxS.astype(jnp.int32)
    return mask_BxTxS & (upto_BxTxS[:, :, -1:] - earlier_BxTxS <= window)

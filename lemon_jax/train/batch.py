"""From rollouts, rewards and contrasts to the arrays of one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lemon_jax.model import TextTokenizer, covering_tokens
from lemon_jax.orchestrator import Rollout, pad
from lemon_jax.spec import Edit

COMPLETION_BUCKET = 64  # completion slots are a multiple of this, so that few shapes are compiled
Array = Any  # NumPy where it is built, traced inside the jit-compiled update


class UpdateBatch(NamedTuple):
    """B rollouts and K edits. An edit's row repeats its rollout up to the edited span, where the new
    span stands; an absent edit has weight 0 and points at rollout 0."""

    prompts_BxP: Array
    prompt_lengths_B: Array
    completions_BxC: Array
    lengths_B: Array
    old_log_probs_BxC: Array
    advantages_B: Array
    kept_B: Array  # False: a masked execution; its tokens count nowhere
    source_K: Array  # the rollout that was edited
    first_K: Array  # original span, in completion tokens: [first, last)
    last_K: Array
    edited_completions_KxC: Array
    edited_lengths_K: Array  # ends with the edited span, which starts at first_K too
    contrast_K: Array
    weight_K: Array


@dataclass(frozen=True, kw_only=True)
class SpanTokens:
    """An edit in tokens. `edited_ids` replace the sampled ids [first, last)."""

    first: int
    last: int
    edited_ids: tuple[int, ...]


Spell = Callable[[Rollout, int, str, Sequence[int]], tuple[int, ...] | None]


def span_tokens(
    tokenizer: TextTokenizer, rollout: Rollout, edit: Edit, spell: Spell | None = None
) -> SpanTokens | None:
    """The smallest token range of the sampled ids that covers the edited field, and its replacement.

    Tokens may straddle the field's ends; what they hold beyond it stands in the replacement too. Ids that
    both begin with are no part of either: they belong to the common prefix, and a mean over spans of
    different lengths would push them.

    The replacement is written with the tokenizer's own ids, or with those that `spell` gives (see
    `Orchestrator.spell`); None if it has none.

    In:  `[a1, a2]` edited to `[a1]`
    Out: `, a2]` and `]`
    """
    offsets = tokenizer.offsets(rollout.token_ids)
    start, end = edit.span
    first, last = covering_tokens(offsets, start, end)
    left, right = offsets[first][0], offsets[last - 1][1]
    edited = edit.text[edit.edited_span[0] : edit.edited_span[1]]
    text = rollout.text
    replacement = text[left:start] + edited + text[end:right]
    sampled, new = rollout.token_ids[first:last], tuple(tokenizer.encode(replacement))
    if spell is not None:
        spelled = spell(rollout, first, replacement, new)
        if spelled is None:
            return None
        new = spelled
    shared = 0
    while shared < min(len(sampled), len(new)) - 1 and sampled[shared] == new[shared]:
        shared += 1
    return SpanTokens(first=first + shared, last=last, edited_ids=new[shared:])


def make_batch(
    rollouts: Sequence[Rollout],
    advantages: np.ndarray,
    masked: Sequence[bool],
    edits: Sequence[tuple[int, SpanTokens, float]],
    *,
    num_edits: int,
    prompt_slots: int,
    pad_id: int,
) -> UpdateBatch:
    """Arrays of fixed shapes but for the completion length, which is one of few buckets.

    Args:
        edits: (rollout index, its span, contrast), at most `num_edits`.
    """
    rows = []
    for index, span, _ in edits:
        rows.append([*rollouts[index].token_ids[: span.first], *span.edited_ids])
    rows += [[pad_id]] * (num_edits - len(rows))
    longest = max(len(ids) for ids in [*(r.token_ids for r in rollouts), *rows])
    slots = -(-longest // COMPLETION_BUCKET) * COMPLETION_BUCKET
    prompts, prompt_lengths = pad([r.prompt_ids for r in rollouts], prompt_slots, pad_id)
    completions, lengths = pad([r.token_ids for r in rollouts], slots, pad_id)
    edited, edited_lengths = pad(rows, slots, pad_id)
    old = np.zeros(completions.shape, np.float32)
    for i, rollout in enumerate(rollouts):
        old[i, : len(rollout.log_probs)] = rollout.log_probs

    def column(values: list[float], dtype: type, fill: float = 0) -> np.ndarray:
        return np.array([*values, *([fill] * (num_edits - len(values)))], dtype)

    return UpdateBatch(
        prompts_BxP=prompts,
        prompt_lengths_B=prompt_lengths,
        completions_BxC=completions,
        lengths_B=lengths,
        old_log_probs_BxC=old,
        advantages_B=np.asarray(advantages, np.float32),
        kept_B=~np.asarray(masked, bool),
        source_K=column([i for i, _, _ in edits], np.int32),
        first_K=column([s.first for _, s, _ in edits], np.int32),
        last_K=column([s.last for _, s, _ in edits], np.int32),
        edited_completions_KxC=edited,
        edited_lengths_K=edited_lengths,
        contrast_K=column([d for _, _, d in edits], np.float32),
        weight_K=column([1.0] * len(edits), np.float32),
    )


def micro_batches(batch: UpdateBatch, parts: int) -> UpdateBatch:
    """The same rollouts and edits in `parts` batches of equal shapes, stacked along a new first axis.

    An edit goes with the rollout it was made of, since its loss compares the two; edited rollouts are dealt
    out first, so that each part has about as many. What is missing to equal shapes are rollouts and edits
    that count nowhere.

    In:  rollouts 0 1 2 3 4, an edit of 3, 2 parts
    Out: rollouts 3 1 4 and 0 2 -, the edit in the first part, of its rollout 0
    """
    given = UpdateBatch(*(np.asarray(x) for x in batch))
    present = np.flatnonzero(given.weight_K > 0)
    edited = list(dict.fromkeys(given.source_K[present].tolist()))
    order = edited + [i for i in range(len(given.lengths_B)) if i not in edited]
    rows = [order[part::parts] for part in range(parts)]
    edits = [[k for k in present.tolist() if given.source_K[k] in mine] for mine in rows]
    num_edits = max(-(-len(given.weight_K) // parts), *map(len, edits))

    def stacked(name: str, array: np.ndarray) -> np.ndarray:
        chosen, size = (edits, num_edits) if "_K" in name else (rows, len(rows[0]))
        out = np.zeros((parts, size, *array.shape[1:]), array.dtype)
        for part, indices in enumerate(chosen):
            out[part, : len(indices)] = array[indices]
        return out

    out = UpdateBatch(**{name: stacked(name, x) for name, x in given._asdict().items()})
    for part, (mine, chosen) in enumerate(zip(rows, edits, strict=True)):
        out.source_K[part, : len(chosen)] = [mine.index(given.source_K[k]) for k in chosen]
    out.prompt_lengths_B[out.prompt_lengths_B == 0] = 1  # a decoder needs a token to start from
    return out

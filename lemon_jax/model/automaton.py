"""An automaton over bytes becomes one over the tokens of a vocabulary: compiled once, on the host.

Every path of tokens that spells a text of the language is allowed, with one exception: where the language
leaves no choice of the next bytes, one token is chosen to write them, the tokenizer's own where it
can be told. Such forced tokens need no sampling, which is most of what a spec consists of.

The table stays small because equal things are stored once: states that see the same bytes ahead, told by
differences of state numbers, share a row; tokens that do the same in every row share a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

# Longer tokens (runs of spaces and dashes) are not used: states are told apart by what lies so far ahead.
MAX_TOKEN_BYTES = 32
UNREACHABLE = 1 << 30
AUTOMATON_VERSION = 1  # of what is compiled here: a kept automaton of another version is compiled anew
Array = Any  # NumPy on the host; JAX where it is an argument of a compiled function


class Automaton(NamedTuple):
    """The language over tokens; see `support` for how it is walked.

    S states, R rows, C classes of tokens, A actions, V tokens, F tokens that begin every text. Action 0
    says that a token may not come. A state within a free text is walked with its `room`: the bytes
    that the text may still have.
    """

    class_V: Array
    class_size_C: Array
    row_S: Array
    action_RxC: Array
    step_A: Array  # added to the state's number
    use_A: Array  # bytes the token adds to the text that it starts in
    room_A: Array  # the room in a text that the token opens; -1: the room before it less `use`
    need_S: Array  # bytes without which the text around a state cannot be closed
    distance_S: Array  # the fewest tokens to the end, whatever the room
    forced_S: Array  # the only token of a state, or -1
    prefix_F: Array
    start: Array  # the state behind the prefix
    start_room: Array


class _Entries(NamedTuple):
    """What each token does in each row where it may come."""

    row_E: np.ndarray
    token_E: np.ndarray
    step_E: np.ndarray
    use_E: np.ndarray
    room_E: np.ndarray

    def take(self, index: np.ndarray) -> _Entries:
        return _Entries(*(x[index] for x in self))


def compile_automaton(
    next_Sx257: np.ndarray,
    bound_S: np.ndarray,
    need_S: np.ndarray,
    start: int,
    *,
    token_bytes: Sequence[bytes | None],
    eos_id: int,
    encode: Callable[[str], Sequence[int]],
) -> Automaton:
    """The language of `spec.grammar` over a vocabulary.

    Args:
        next_Sx257: the state behind each byte, or behind the end (256); 0 where it may not come.
        bound_S: the bytes that the free text around a state may have, 0 outside of one.
        need_S: the fewest bytes after which that text may be closed.
        token_bytes: what each token spells; None for tokens that are no text.
        encode: the tokenizer, for the choice of forced tokens.

    Raises ValueError if the vocabulary cannot spell the language's shortest text.
    """
    symbols: list[list[int]] = [
        list(text) if text and len(text) <= MAX_TOKEN_BYTES else [] for text in token_bytes
    ]
    symbols[eos_id] = [next_Sx257.shape[1] - 1]
    row_S, state_R = _rows(next_Sx257, bound_S)
    entries = _walk(next_Sx257, bound_S, need_S, state_R, symbols)
    entries = _choose_forced(entries, _runs(next_Sx257, state_R), symbols, encode)

    # One number for what a token does: sorting numbers is ten times faster than sorting rows.
    uses, rooms = MAX_TOKEN_BYTES + 1, int(bound_S.max()) + 2
    what_E = (entries.step_E * uses + entries.use_E) * rooms + entries.room_E + 1
    what_A, action_E = np.unique(what_E, return_inverse=True)
    action_E = action_E + 1  # action 0 is none
    step_A = np.concatenate([[0], what_A // rooms // uses]).astype(np.int32)
    use_A = np.concatenate([[0], what_A // rooms % uses]).astype(np.int32)
    room_A = np.concatenate([[-1], what_A % rooms - 1]).astype(np.int32)
    class_V, table_RxC = _classes(entries, action_E, rows=len(state_R), tokens=len(symbols))
    distance_S = _distances(next_Sx257, need_S, row_S, entries, action_E, (step_A, use_A, room_A))
    count_R = np.bincount(entries.row_E, minlength=len(state_R))
    only_R = np.full(len(state_R), -1, np.int32)
    only_R[entries.row_E] = entries.token_E
    automaton = Automaton(
        class_V=class_V.astype(np.int32),
        class_size_C=np.bincount(class_V).astype(np.int32),
        row_S=row_S.astype(np.int32),
        action_RxC=table_RxC,
        step_A=step_A,
        use_A=use_A,
        room_A=room_A,
        need_S=need_S.astype(np.int32),
        distance_S=distance_S,
        forced_S=np.where(count_R == 1, only_R, -1)[row_S].astype(np.int32),
        prefix_F=np.zeros(0, np.int32),
        start=np.int32(start),
        start_room=np.int32(0),
    )
    if distance_S[start] >= UNREACHABLE:
        raise ValueError("the vocabulary cannot spell the language: it lacks bytes, or its end token")
    return _with_prefix(automaton)


def _mixed(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each number (the finaliser of SplitMix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _rows(next_Sx257: np.ndarray, bound_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each state, and one state of each row.

    States share a row if all that can follow within MAX_TOKEN_BYTES bytes is the same, up to one
    difference between their numbers: a partition, refined byte by byte (as in Moore's algorithm).
    """
    source, symbol = np.nonzero(next_Sx257)
    target = next_Sx257[source, symbol]
    edge = _mixed(((target - source).astype(np.int64) * 512 + symbol).astype(np.uint64))
    first = np.flatnonzero(np.diff(source, prepend=-1))
    own_S = _mixed(bound_S.astype(np.uint64) + np.uint64(1))
    hash_S = own_S
    for _ in range(MAX_TOKEN_BYTES):
        after = np.zeros_like(hash_S)
        after[source[first]] = np.add.reduceat(_mixed(edge + hash_S[target]), first)
        hash_S = _mixed(own_S + after)
    _, state_R, row_S = np.unique(hash_S, return_index=True, return_inverse=True)
    return row_S, state_R


def _walk(
    next_Sx257: np.ndarray,
    bound_S: np.ndarray,
    need_S: np.ndarray,
    state_R: np.ndarray,
    symbols: list[list[int]],
) -> _Entries:
    """Every token from one state of every row, byte by byte: all rows and all tokens with a common prefix
    go together."""
    length_V = np.array([len(text) for text in symbols])
    padded_VxL = np.zeros((len(symbols), MAX_TOKEN_BYTES), np.int64)
    for token, text in enumerate(symbols):
        padded_VxL[token, : len(text)] = text
    node_V = np.zeros(len(symbols), np.int64)
    # One walker for each node of the trie and row that are still alive, sorted by node.
    rows = np.arange(len(state_R))
    node, row, state = np.zeros_like(rows), rows, state_R.astype(np.int64)
    within = bound_S[state] > 0  # still in the text that it started in
    use, run = np.zeros_like(rows), np.zeros_like(rows)
    found = []
    for depth in range(MAX_TOKEN_BYTES):
        alive_V = np.flatnonzero(length_V > depth)
        if not len(alive_V) or not len(node):
            break
        keys, child = np.unique(node_V[alive_V] * 512 + padded_VxL[alive_V, depth], return_inverse=True)
        node_V[alive_V] = child
        parent, symbol = keys // 512, keys % 512
        begin, stop = np.searchsorted(node, parent), np.searchsorted(node, parent, side="right")
        node, index = _expand(begin, stop - begin)
        before, start_row = state[index], row[index]
        state = next_Sx257[before, symbol[node]].astype(np.int64)
        inside, was = bound_S[state] > 0, bound_S[before] > 0
        added = (inside & was).astype(np.int64)
        use, run = use[index] + added * within[index], (run[index] + added) * inside
        within = within[index] & inside
        live = state > 0
        node, row, state, within, use, run = (x[live] for x in (node, start_row, state, within, use, run))
        ended_V = np.flatnonzero(length_V == depth + 1)
        begin, stop = np.searchsorted(node, node_V[ended_V]), np.searchsorted(node, node_V[ended_V], "right")
        which, index = _expand(begin, stop - begin)
        room = np.where(within[index] | (bound_S[state[index]] == 0), -1, bound_S[state[index]] - run[index])
        step = state[index] - state_R[row[index]]
        # A token that leaves every text ends without room; one that opens a text must be able to close it.
        fits = (room < 0) | (room >= need_S[state[index]])
        found.append(_Entries(row[index], ended_V[which], step, use[index], room).take(np.flatnonzero(fits)))
    return _Entries(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _expand(begin: np.ndarray, count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(i, begin[i] + j) for every i and j < count[i]."""
    owner = np.repeat(np.arange(len(count)), count)
    offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return owner, begin[owner] + offset


def _runs(next_Sx257: np.ndarray, state_R: np.ndarray) -> list[list[int]]:
    """The symbols that must follow in each row, as far as there is no choice."""
    single_S = np.count_nonzero(next_Sx257, axis=1) == 1
    symbol_S = np.argmax(next_Sx257 > 0, axis=1)
    runs = []
    for state in state_R:
        run: list[int] = []
        while single_S[state] and len(run) < MAX_TOKEN_BYTES:
            run.append(int(symbol_S[state]))
            state = next_Sx257[state, symbol_S[state]]
        runs.append(run)
    return runs


def _choose_forced(
    entries: _Entries,
    runs: list[list[int]],
    symbols: list[list[int]],
    encode: Callable[[str], Sequence[int]],
) -> _Entries:
    """Of the tokens that lie within what must follow, keep one a row: the first that the tokenizer
    writes it with, or else the longest. Tokens that reach beyond it stay, for they are choices."""
    length_V = np.array([len(text) for text in symbols])
    run_E = np.array([len(run) for run in runs])[entries.row_E]
    inner_E = length_V[entries.token_E] <= run_E
    chosen_R = np.full(len(runs), -1)
    order = np.flatnonzero(inner_E)
    order = order[np.lexsort((-entries.token_E[order], length_V[entries.token_E[order]]))]
    chosen_R[entries.row_E[order]] = entries.token_E[order]  # the last one written is the longest
    inner = set(zip(entries.row_E[order].tolist(), entries.token_E[order].tolist(), strict=True))
    for row, run in enumerate(runs):
        try:
            text = bytes(symbol for symbol in run if symbol < 256).decode()
        except UnicodeDecodeError:
            continue  # it begins or ends within a character
        ids = encode(text) if text else ()
        if ids and (row, ids[0]) in inner:
            chosen_R[row] = ids[0]
    keep = ~inner_E | (entries.token_E == chosen_R[entries.row_E])
    return entries.take(np.flatnonzero(keep))


def _classes(
    entries: _Entries, action_E: np.ndarray, *, rows: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, and the action of each row and class. Class 0 may come nowhere."""
    order = np.lexsort((entries.row_E, entries.token_E))
    column_ExK = np.stack([entries.row_E[order], action_E[order]], axis=1).astype(np.int32)
    token_E = entries.token_E[order]
    bounds = np.searchsorted(token_E, np.arange(tokens + 1))
    known: dict[bytes, int] = {b"": 0}
    class_V = np.array([known.setdefault(column_ExK[a:b].tobytes(), len(known)) for a, b in pairwise(bounds)])
    dtype = np.int16 if action_E.max() < 2**15 else np.int32
    table = np.zeros((rows, len(known)), dtype)
    table[entries.row_E, class_V[entries.token_E]] = action_E
    return class_V, table


def _distances(
    next_Sx257: np.ndarray,
    need_S: np.ndarray,
    row_S: np.ndarray,
    entries: _Entries,
    action_E: np.ndarray,
    actions: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
    """The fewest tokens from each state to the end, with just the room that it needs to close its text."""
    step_A, use_A, room_A = actions
    pairs = np.unique(entries.row_E * np.int64(len(step_A)) + action_E)
    row_P, action_P = np.divmod(pairs, len(step_A))
    begin, stop = np.searchsorted(row_P, row_S), np.searchsorted(row_P, row_S, side="right")
    source, index = _expand(begin, stop - begin)
    action = action_P[index]
    target = source + step_A[action]
    left = need_S[source] - use_A[action]
    possible = (left >= 0) & (np.where(room_A[action] < 0, left, room_A[action]) >= need_S[target])
    source, target = source[possible], target[possible]
    first = np.flatnonzero(np.diff(source, prepend=-1))
    distance_S = np.full(len(row_S), UNREACHABLE, np.int32)
    ended = next_Sx257[next_Sx257[:, -1] > 0, -1]
    distance_S[ended] = 0
    while True:
        best = np.minimum.reduceat(distance_S[target], first) + 1
        better = np.minimum(distance_S[source[first]], best)
        if (better == distance_S[source[first]]).all():
            return distance_S
        distance_S[source[first]] = better


def _with_prefix(automaton: Automaton) -> Automaton:
    """The tokens that every text begins with, walked once for all."""
    a, prefix = automaton, []
    state, room = int(a.start), 0
    while (token := int(a.forced_S[state])) >= 0:
        prefix.append(token)
        action = a.action_RxC[a.row_S[state], a.class_V[token]]
        state += int(a.step_A[action])
        room = room - int(a.use_A[action]) if a.room_A[action] < 0 else int(a.room_A[action])
    return a._replace(prefix_F=np.array(prefix, np.int32), start=np.int32(state), start_room=np.int32(room))

"""The automaton over tokens against walks over bytes."""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grammar_helpers import byte_step, compiled, grammar, tiny_automaton, tiny_tokenizer
from policy_helpers import teacher_specs

from lemon_jax.model import Constraint, Walk, compile_automaton
from lemon_jax.model.automaton import MAX_TOKEN_BYTES
from lemon_jax.model.host_walk import allowed, pieces_of
from lemon_jax.model.support import advance, allowed_classes, begin, mask_logits
from lemon_jax.spec import parse
from lemon_jax.spec.grammar import END

PLENTY = 100_000


class ByteTokens:
    """A vocabulary of byte strings; some are parts of characters, some lie across borders of the text."""

    eos_id = 0

    def __init__(self):
        parts = [
            "é".encode()[1:] + b"x",
            "€".encode()[:2],
            "漢字".encode()[1:5],
            b'."\n    ',
            b"  - id: a1",
            b"a1, a2]\n",
        ]
        words = [
            "version: ",
            "agents:\n",
            "    role: ",
            "duty",
            ' "',
            '"Solve',
            "math",
            "_solver\n",
            "the",
            " ",
            "aa",
            "small\n",
        ]
        spelled = [bytes([b]) for b in range(256)] + parts + [w.encode() for w in words] + [b"-" * 40]
        self._bytes = [None, None, *spelled]
        self._ids = {b: i for i, b in enumerate(self._bytes) if b}

    def token_bytes(self):
        return self._bytes

    def encode(self, text):
        data, ids = text.encode(), []
        while data:
            longest = max(n for n in range(1, 41) if data[:n] in self._ids)
            ids.append(self._ids[data[:longest]])
            data = data[longest:]
        return ids


TOKENIZERS = {"sentencepiece": tiny_tokenizer, "bytes": ByteTokens}


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def made(request):
    """(tokenizer, automaton)."""
    tokenizer = TOKENIZERS[request.param]()
    return tokenizer, tiny_automaton() if request.param == "sentencepiece" else compiled(tokenizer)


def symbols_of(tokenizer):
    symbols = [list(text or b"") for text in tokenizer.token_bytes()]
    symbols[tokenizer.eos_id] = [END]
    return symbols


def slow_support(tokenizer, symbols, place):
    """The tokens that may come at (state, room) with any number of tokens left: token -> place behind it."""
    language, out = grammar(), {}
    for token, spelled in enumerate(symbols):
        after = place
        for symbol in spelled:
            after = after and byte_step(language, *after, symbol)
        if spelled and after and len(spelled) <= MAX_TOKEN_BYTES:
            out[token] = after
    run, state = [], place[0]
    while np.count_nonzero(language.next_Sx257[state]) == 1 and len(run) < MAX_TOKEN_BYTES:
        run.append(int(language.next_Sx257[state].argmax()))
        state = int(language.next_Sx257[state, run[-1]])
    inner = {t for t in out if len(symbols[t]) <= len(run)}
    if inner:
        try:
            text = bytes(s for s in run if s != END).decode()
        except UnicodeDecodeError:
            text = ""
        first = tokenizer.encode(text)[:1] if text else []
        longest = max(inner, key=lambda t: (len(symbols[t]), -t))
        kept = first[0] if first and first[0] in inner else longest
        out = {t: after for t, after in out.items() if t not in inner or t == kept}
    return out


def test_the_support_equals_a_walk_over_bytes(made):
    tokenizer, automaton = made
    symbols, rng = symbols_of(tokenizer), random.Random(1)
    place = (grammar().start, 0)
    for token in automaton.prefix_F:
        support = slow_support(tokenizer, symbols, place)
        assert list(support) == [token]
        place = support[token]
    start, seen = place, 0
    for _ in range(6):
        place, walk = start, Walk.begin(automaton, PLENTY)
        while place[0]:
            support = slow_support(tokenizer, symbols, place)
            if rng.random() < 0.3 or len(support) < 9:
                assert np.flatnonzero(allowed(walk)).tolist() == list(support)
                forced = int(automaton.forced_S[walk.state])
                # What is the only token for want of room alone is not known beforehand.
                assert forced == next(iter(support)) if forced >= 0 else len(support) > 1 or walk.room < 9
                seen += 1
            closing = [t for t in support if ord('"') in symbols[t] and grammar().bound_S[place[0]]]
            token = rng.choice(closing if closing and rng.random() < 0.2 else list(support))
            if token == tokenizer.eos_id:
                break
            place, walk = support[token], walk.step(token)
            assert walk.room == place[1] or grammar().bound_S[place[0]] == 0
            assert walk.state == place[0]
    assert seen > 100


def test_random_policies_finish_in_time_as_valid_specs(made):
    """Without a model: the likeliest of random numbers among what may come, for thousands of texts."""
    tokenizer, automaton = made
    constraint = jax.tree.map(jnp.asarray, automaton)
    shortest = len(automaton.prefix_F) + int(automaton.distance_S[automaton.start])
    symbols, batch, most = symbols_of(tokenizer), 256, shortest + 120
    max_new_B = jnp.asarray(np.random.default_rng(0).integers(shortest, most + 1, batch), jnp.int32)

    @jax.jit
    def write(key):
        place = begin(Constraint(constraint, 0), batch)
        place = place._replace(left=max_new_B - len(automaton.prefix_F))

        def step(place, key):
            logits_BxV = jax.random.normal(key, (batch, len(symbols)))
            token_B = jnp.argmax(mask_logits(constraint, place, logits_BxV), axis=-1)
            known_B = jnp.any(allowed_classes(constraint, place), axis=-1)
            return advance(constraint, place, token_B), jnp.where(known_B, token_B, -1)

        return jax.lax.scan(step, place, jax.random.split(key, most))[1]

    texts = set()
    for seed in range(3):
        for row, max_new in zip(
            np.asarray(write(jax.random.key(seed))).T, np.asarray(max_new_B), strict=True
        ):
            ids = row[row >= 0]
            assert ids[-1] == tokenizer.eos_id
            assert len(ids) + len(automaton.prefix_F) <= max_new
            text = bytes(s for t in (*automaton.prefix_F, *ids[:-1]) for s in symbols[t]).decode()
            parsed = parse(text)
            assert parsed.strict_ok, (text, parsed.issues)
            if isinstance(tokenizer, ByteTokens):
                continue
            assert tokenizer.decode([*automaton.prefix_F.tolist(), *ids[:-1].tolist()]) == text
            texts.add(text)
    assert isinstance(tokenizer, ByteTokens) or len(texts) > 700


def test_what_the_tokenizer_writes_may_come_as_it_writes_it(made):
    tokenizer, automaton = made
    pieces, symbols = pieces_of(tokenizer.token_bytes()), symbols_of(tokenizer)
    prefix = automaton.prefix_F.tolist()
    begins = bytes(s for token in prefix for s in symbols[token]).decode()
    free = total = 0
    for text in teacher_specs(60, seed=5):
        assert text.startswith(begins)
        ids = tokenizer.encode(text.removeprefix(begins))
        spelled = Walk.begin(automaton, PLENTY).spell(text.removeprefix(begins), ids, pieces)
        if isinstance(tokenizer, ByteTokens):  # writes greedily, across what is forced
            ids = list(spelled)
            assert b"".join(tokenizer.token_bytes()[i] for i in (*prefix, *ids)).decode() == text
        else:
            assert [*prefix, *ids] == tokenizer.encode(text)
            assert list(spelled) == ids
        walk = Walk.begin(automaton, PLENTY)
        for token in [*ids, tokenizer.eos_id]:
            free += int(automaton.forced_S[walk.state] < 0)
            total += 1
            walk = walk.step(token)
            assert walk is not None
    assert free < 0.7 * total


def test_the_fewest_tokens_spell_what_the_canonical_ones_may_not():
    tokenizer, automaton = tiny_tokenizer(), tiny_automaton()
    pieces = pieces_of(tokenizer.token_bytes())
    walk = Walk.begin(automaton, PLENTY)
    by_bytes = [tokenizer.encode(c)[0] for c in "Solver"]
    text = 'Solver"\n    role: '
    ids = walk.spell(
        text, [*by_bytes, *tokenizer.encode('"\n'), *tokenizer.encode("    role:")[:1] * 2], pieces
    )
    assert tokenizer.decode(ids) == text
    assert walk.follow(ids) is not None
    assert len(ids) <= len(tokenizer.encode(text))
    assert walk.spell("Solver\n", tokenizer.encode("Solver\n"), pieces) is None
    # With as few tokens as the end of a spec needs there are none for a longer name.
    short = replace(walk, left=int(automaton.distance_S[walk.state]))
    assert short.spell("Careful " + text, tokenizer.encode("Careful " + text), pieces) is None


def test_a_vocabulary_that_cannot_spell_the_language():
    language = grammar()
    with pytest.raises(ValueError, match="cannot spell"):
        compile_automaton(
            language.next_Sx257,
            language.bound_S,
            language.need_S,
            language.start,
            token_bytes=[None, *(bytes([b]) for b in range(256) if b != ord("v"))],
            eos_id=0,
            encode=lambda text: [],
        )


def test_a_large_vocabulary_keeps_a_small_table():
    """100,000 made-up words: texts of free words, of which nearly all do the same."""
    rng = random.Random(0)
    tokenizer = ByteTokens()
    words = {
        rng.choice(" _éA") + "".join(rng.choices("abcdefgh🎲漢-", k=rng.randint(4, 9)))
        for _ in range(100_000)
    }
    tokenizer._bytes = [*tokenizer._bytes, *(word.encode() for word in sorted(words))]
    automaton = compiled(tokenizer)
    assert len(automaton.class_V) > 90_000
    assert sum(np.asarray(x).nbytes for x in automaton) < 2**24
    symbols, walk = symbols_of(tokenizer), Walk.begin(automaton, PLENTY)
    for _ in range(3):
        support = slow_support(tokenizer, symbols, (walk.state, walk.room))
        assert np.flatnonzero(allowed(walk)).tolist() == list(support)
        assert len(support) > 50_000
        walk = walk.step(rng.choice(list(support)))

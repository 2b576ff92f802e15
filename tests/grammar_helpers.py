"""The language and its automaton over the tests' tokenizer, made once a process; slow walks beside them."""

from __future__ import annotations

import random
from functools import cache

from policy_helpers import make_tokenizer

from lemon_jax.spec import ROLES, Spec
from lemon_jax.spec.grammar import DEAD, END, ByteGrammar, byte_grammar


@cache
def grammar() -> ByteGrammar:
    return byte_grammar()


@cache
def tiny_tokenizer():
    return make_tokenizer()


def byte_step(language: ByteGrammar, state: int, room: int, symbol: int) -> tuple[int, int] | None:
    """One byte, from the definitions: None where it may not come or the text could not be closed any more."""
    target = int(language.next_Sx257[state, symbol])
    if target == DEAD:
        return None
    if language.bound_S[target] == 0:
        return target, 0
    room = room - 1 if language.bound_S[state] else int(language.bound_S[target])
    return (target, room) if room >= language.need_S[target] else None


def accepts(language: ByteGrammar, text: str) -> bool:
    place: tuple[int, int] | None = (language.start, 0)
    for symbol in [*text.encode("utf-8", "surrogatepass"), END]:
        place = byte_step(language, *place, symbol)
        if place is None:
            return False
    return True


def random_text(language: ByteGrammar, rng: random.Random, closing: float) -> bytes:
    """A text of the language, byte by byte; a quote is taken with probability `closing` where it may come."""
    place, out = (language.start, 0), []
    while True:
        row = language.next_Sx257[place[0]]
        within = language.bound_S[place[0]] > 0
        if within and row[ord('"')] and (rng.random() < closing or not place[1]):
            symbol = ord('"')
        elif row[ord("o")] and row[ord(" ")] and not within:
            symbol = ord(" ") if rng.random() < 0.9 else ord("o")  # another agent, or the output
        else:
            symbol = int(rng.choice(row.nonzero()[0]))
        if symbol == END:
            return bytes(out)
        after = byte_step(language, *place, symbol)
        if after is not None:  # else there is no room for this one: draw again
            out.append(symbol)
            place = after


@cache
def tiny_automaton():
    """Of the tests' tokenizer, in NumPy arrays."""
    return compiled(tiny_tokenizer())


def compiled(tokenizer):
    from lemon_jax.model import compile_automaton

    language = grammar()
    return compile_automaton(
        language.next_Sx257,
        language.bound_S,
        language.need_S,
        language.start,
        token_bytes=tokenizer.token_bytes(),
        eos_id=tokenizer.eos_id,
        encode=tokenizer.encode,
    )


def fixes(spec: Spec, choice: str) -> bool:
    """Whether a spec leaves nothing of this choice, read off the spec itself."""
    ids = [agent.id for agent in spec.agents]
    if choice == "structure":
        before = [(), *((i,) for i in ids[:-1])]
        return spec.output == ids[-1] and [agent.depends_on for agent in spec.agents] == before
    if choice == "capacity":
        return all(a.capacity == ("medium" if ROLES[a.role].llm else "small") for a in spec.agents)
    return all((a.name, a.duty) == (ROLES[a.role].title, ROLES[a.role].default_duty) for a in spec.agents)

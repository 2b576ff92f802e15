r"""The answer of a reply.

The last explicit marker that carries a value wins ("answer is", "Answer:", "####", a complete \boxed{}), and
of it the first value. Without any marker a weaker rule is tried and flagged as `fallback`. Nothing is ever
assumed: a reply with no answer, two letters, an unknown letter or an empty box has no answer, which is not
the same as a wrong one. Equality is exact (`lemon_jax.numbers` says what counts as the same number). All
patterns are bounded, so the time is linear in the length of the reply.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from lemon_jax.bench.task import LETTERS
from lemon_jax.numbers import Number, find_numbers, format_number, normalise, numbers_in

__all__ = ["Extraction", "extract_choice", "extract_number", "numbers_in"]


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """`value`: canonical number or upper-case letter, None for no answer; `fallback`: it had no marker."""

    value: str | None
    fallback: bool


_ANSWER = r"(?:answer|ans|antwort|respuesta|resposta|risposta|réponse|ответ)"
_CONNECTOR = r"(?:\b(?:is|be|equals|ist|lautet|es|est|é|è)\b(?! ?not\b)|[:=>→])"
_MARKER = re.compile(
    rf"(?<!/)\b{_ANSWER}\b[^\n.:=!?>]{{0,60}}?{_CONNECTOR}"  # the final answer (in cm) is ...
    # a heading; "Answer 42"
    rf"|^[ \t#*>_]{{0,8}}(?:final )?{_ANSWER}[ \t*_]{{0,8}}(?=\n|[-$(+]{{0,3}}[0-9]|\(?[A-Z]\b)"
    r"|答案[是为选: ]{0,3}(?:项 ?)?"
    r"|(?<!#)####(?!#)(?=[ \t]{0,8}(?:[^A-Za-z \t]|[A-Za-z](?![A-Za-z])|$))",  # "#### Step 1" is a heading
    re.IGNORECASE | re.MULTILINE,
)
# "A common wrong answer is 12": what stands behind it is the one that is not meant.
_NEGATED = re.compile(
    r"(?:\b(?:wrong|incorrect|false|falsche?|incorrecta|incorreta|mauvaise|not (?:the|an?)(?: \w{1,12})?)"
    r"|错误|неверный)"
    r"[ \t*_]{0,4}$",
    re.IGNORECASE,
)
_BOX_PART = re.compile(r"\\(?:boxed|fbox) ?\{|\\?[{}]")
_SENTENCE_END = re.compile(r"[.!?]\s+(?=[A-Z])|[.!?]$")
_ZONE = 300  # characters after a marker in which its value must begin


@dataclass(frozen=True)
class _Mark:
    """Where the value of one marker is looked for: `[start, end)`; `near`: right behind the marker."""

    start: int
    end: int
    near: bool = True


def _boxes(text: str) -> tuple[list[_Mark], list[int]]:
    """Complete boxes, and the starts of unclosed ones; one pass with a stack: any nesting depth will do."""
    stack: list[tuple[int, bool]] = []
    boxes = []
    for part in _BOX_PART.finditer(text):
        token = part[0]
        if token == "}":
            if stack:
                start, is_box = stack.pop()
                if is_box:
                    boxes.append(_Mark(start, part.start()))
        elif token == "{":
            stack.append((part.end(), False))
        elif len(token) > 2:
            stack.append((part.end(), True))
    return boxes, [start for start, is_box in stack if is_box]


def _marks(text: str) -> tuple[list[_Mark], bool]:
    """The markers in order of their position, and whether one of them was left blank or unclosed."""
    boxes, unclosed = _boxes(text)
    words = list(_MARKER.finditer(text))
    starts = sorted([m.start() for m in words] + [b.start for b in boxes] + unclosed)
    marks, blank = list(boxes), bool(unclosed)
    following = dict(pairwise(starts))
    for word in words:
        if _NEGATED.search(text, max(0, word.start() - 30), word.start()):
            continue
        limit = min(word.end() + _ZONE, following.get(word.start(), len(text)))
        mark = _first_line(text, word.end(), max(limit, word.end()))
        blank |= "#" in word[0] and mark.start == mark.end
        marks.append(mark)
    blank |= any(not text[b.start : b.end].strip() for b in boxes)
    return sorted(marks, key=lambda mark: mark.start), blank


def _first_line(text: str, start: int, limit: int) -> _Mark:
    """The first line from `start` that holds a letter or digit, cut at the end of its first sentence."""
    near = True
    while start < limit:
        newline = text.find("\n", start, limit)
        end = limit if newline < 0 else newline
        if any(c.isalnum() for c in text[start:end]):
            stop = _SENTENCE_END.search(text, start, end)
            return _Mark(start, stop.start() + 1 if stop else end, near)
        start, near = end + 1, False
    return _Mark(limit, limit)


# "Answer: - 5"; on a line of its own it is a bullet.
_SPACED_MINUS = re.compile(r"^([ \t*$(]{0,4}-) (?=[0-9.$])")
_EXPRESSION = re.compile(r" ?[A-Za-z%]{0,12} ?(?:[+\-*×÷/xX]|\\times|\\div|\\cdot) ?[$(]?[0-9]")


def _value_in(zone: str) -> Number | None:
    """The first number of a zone; of a worked line "3 x 4 = 12" its result, of an open one "3 x 4" none."""
    number = next(find_numbers(zone), None)
    if number and _EXPRESSION.match(zone, number.end):
        results = [next(find_numbers(part), None) for part in zone[number.end :].split("=")[1:]]
        return next((result for result in reversed(results) if result), None)
    return number


def extract_number(text: str) -> Extraction:
    """The number a reply gives. Without a marker: its last number, flagged as fallback."""
    text = _plain(text)
    marks, blank = _marks(text)
    for mark in reversed(marks):
        zone = text[mark.start : mark.end]
        if number := _value_in(_SPACED_MINUS.sub(r"\1", zone) if mark.near else zone):
            return Extraction(value=format_number(number.value), fallback=False)
    if blank:  # an empty or unclosed box says "no answer"; digging up another number would be guessing
        return Extraction(value=None, fallback=False)
    last = None
    for last in find_numbers(text):  # noqa: B007  the last one is meant
        pass
    return Extraction(value=format_number(last.value) if last else None, fallback=last is not None)


def _plain(text: str) -> str:
    """Numbers normalised, wide letters narrow; bold, code and inline-math delimiters dropped."""
    return re.sub(r"\*\*|__|`|\\[()\[\]]|[\u200b-\u200f\u2060\ufeff]", "", normalise(text)).translate(_WIDE)


_WIDE = str.maketrans(
    {chr(0xFF21 + i): chr(0x41 + i) for i in range(26)}
    | {chr(0xFF41 + i): chr(0x61 + i) for i in range(26)}
    | {"（": "(", "）": ")", "\u3000": " "}
)
_WRAP = r"(?:[ \t*_$({\[:\"'“”‘’<~-]|\\(?:text|mathrm|mathbf|textbf|boxed)\{)"
_LEAD = (
    rf"{_WRAP}{{0,8}}(?:(?:la|el|die) )?"
    rf"(?:(?:the |an? )?(?:option|opción|opcion|opção|choice|letter|answer)s? ?(?:is )?{_WRAP}{{0,4}})?"
)
_END = (
    r"(?![A-Za-z0-9]|['’][A-Za-z]|\.[A-Za-z]| ?[=^]| ?>(?= ?[A-Za-z0-9]))"  # no "The", "a's", "e.g.", "b = 5"
)
_LETTER = re.compile(rf"{_LEAD}(?P<letter>[A-Za-z]){_END}(?P<after>[^\n]{{0,40}})")
_OTHER = re.compile(
    rf"[)}}\]. ]{{0,3}}"
    rf"(,|/|&|\+|;|\||、|和|或|,? ?\(?(?:and|or|as well as|или|und|oder) |(?<=\))(?=\())"
    rf" ?(?:possibly |perhaps |maybe |also )?(?:option )?\(?([A-Za-z]){_END}(?! is\b)"
)
_NAMED = re.compile(
    rf"(?<![A-Za-z0-9])\(([A-Za-z])\)|(?<![A-Za-z0-9(])([A-Z])\)|\b(?i:option|choice) \(?([A-Z]){_END}"
)
_VERDICT = re.compile(
    r"(?<![A-Za-z0-9'’])\(?(?P<letter>[A-Z])[).:]{0,2} (?:is|must be) "
    r"(?:the |our )?(?:correct|right|best|final|answer)\b"
    rf"|\b(?:correct |right |best )?(?:option|choice) ?(?:is|:|=) ?[(*]{{0,3}}(?P<named>[A-Z]){_END}"
    rf"|\bI (?:choose|pick|select) (?:option )?\(?(?P<chosen>[A-Z]){_END}"
)
# How a line that *is* a choice begins: "C)", "(c)", "C.", "C because"; but not "A is twice as old as B".
_LINE_START = re.compile(
    r"[ \t*_$(\[\"'“-]{0,8}"
    r"(?:[A-Za-z]\)|[A-Z][.:,](?=\s|$)|[a-z][.:](?=\s|$)|[A-Z] (?:because|since|as)\b|[A-Za-z]\W{0,8}$)"
)
# Words before which "A" is a letter, not the article.
_AFTER_A = re.compile(
    r" (?:because|since|as|is|and|or|with|for|which|where|so|but|given|due|from|by|matches|not)\b"
)


def _letter_at(zone: str, n_options: int) -> str | None:
    """The letter a zone begins with; "" for two letters or an unknown one; None where it begins with none.

    A small or unknown letter may belong to the answer's text, "K/8 (B)", "a - b (C)": the named one counts.
    """
    match = _LETTER.match(zone)
    if not match:
        return None
    letter, after = match["letter"], match["after"]
    if _is_a_word(letter, after):
        return None
    other = _OTHER.match(after)
    two = other and other[2].upper() != letter.upper() and (other[2].isupper() or letter.islower())
    if two and other and other[2] == "A" and _is_a_word("A", after[other.end() :]):
        two = False  # "C, A large city"
    if two and other and other[1] == ",":  # in "C, M + N" a formula follows, no second choice
        two = LETTERS.index(other[2].upper()) < n_options
    known = LETTERS.index(letter.upper()) < n_options
    formula = letter.islower() and (two or re.match(" ?[-+*/×]", after))
    if not known or formula:
        named = _named_in(zone, n_options)
        if named is not None:
            return named
    return letter.upper() if known and not two else ""


def _is_a_word(letter: str, after: str) -> bool:
    """Whether it is the article or the pronoun, by what follows."""
    return letter in "aAiI" and bool(re.match(" [A-Za-z]", after)) and not _AFTER_A.match(after)


def _named_in(zone: str, n_options: int) -> str | None:
    """The one letter a text names: "(C)", "C)", "option C"; "" for several or an unknown one; else None."""
    letters = {(m[1] or m[2] or m[3]).upper() for m in _NAMED.finditer(zone)}
    if not letters:
        return None
    letter = letters.pop()
    return letter if not letters and LETTERS.index(letter) < n_options else ""


def _choice_marks(text: str, marks: list[_Mark], n_options: int) -> Iterator[tuple[int, str | None]]:
    for mark in marks:
        zone = text[mark.start : mark.end]
        letter = _letter_at(zone, n_options)
        yield mark.start, _named_in(zone, n_options) if letter is None else letter
    for verdict in _VERDICT.finditer(text):
        letter = verdict["letter"] or verdict["named"] or verdict["chosen"]
        known = LETTERS.index(letter) < n_options
        if known or letter != "I":  # "Only I is correct" is about a statement
            yield verdict.start(), letter if known else ""


def extract_choice(text: str, n_options: int) -> Extraction:
    """The letter a reply chooses. Without a marker: the one its lines begin with, or the only one named."""
    text = _plain(text)
    marks, blank = _marks(text)
    for _, letter in sorted(_choice_marks(text, marks, n_options), key=lambda mark: mark[0], reverse=True):
        if letter is not None:
            return Extraction(value=letter or None, fallback=False)
    if blank:
        return Extraction(value=None, fallback=False)
    lines = [line for line in text.splitlines() if line.strip()]
    led = [(line, _letter_at(line, n_options)) for line in lines if _LINE_START.match(line)]
    if led:
        agree = len({letter for _, letter in led}) == 1
        bare = len(led[-1][0].strip(" ().*$")) == 1  # the options repeated, then a line with one letter alone
        letter = led[-1][1] if agree or bare else None
    else:
        letter = _named_in(text, n_options)
    return Extraction(value=letter or None, fallback=bool(letter) and not (led and len(lines) == 1))

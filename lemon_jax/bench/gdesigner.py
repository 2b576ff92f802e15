r"""The answer of a reply as G-Designer's family of systems reads it, for numbers that compare with theirs.

The rules are those of the public code of AgentPrune, G-Designer, AgentDropout and OFA-MAS, which share them.
Their faults are kept on purpose:

- Number (GSM8K, MultiArith, SVAMP): what follows the last "The answer is " or, without that, "the answer
  is "; else the content of the last \boxed{}; else the last number of the reply. Of that text, line breaks
  and spaces removed, the last run of digits counts, and "0" where there is none. So signs, decimals and
  thousands separators are lost ("-5" -> 5, "2.50" -> 50, "1,200" -> 200, "0.5" -> 2), a later number wins
  ("30 dollars for the 2 items" -> 2), lines run together ("42\n3 apples" -> 423), and a reply without an
  answer is right wherever the gold is 0. Numbers are compared as floats.
- Letter of AQuA: the same with the last capital letter ("E) None of These" -> T, "B because A is wrong" ->
  A, "d" -> none); without a phrase or a box it is the last capital of the whole reply.
- Letter of MMLU: the first character after the first "answer is" (a colon and the letters of "Option" are
  stripped from both ends), else the first character of the reply ("The ..." -> T, "(A)" -> "(", "a" -> a,
  which is not A).

Where their code stops with an error (an empty text after "answer is", \sqrt at the end) there is no answer.
"""

import re
from fractions import Fraction

from lemon_jax.bench.extract import Extraction
from lemon_jax.bench.task import Task

_PHRASES = ("The answer is ", "the answer is ")
_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_DROPPED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


class _Stops(Exception):
    """Their code would end with an error here."""


def announced(text: str) -> str:
    """A reply of this project's roles in the words that the rule knows.

    Their agents are asked to say "The answer is C"; ours end with "Answer: C", of which the rule for MMLU
    would read the A of "Answer".
    """
    before, marker, after = text.rpartition("Answer:")
    at_line_start = marker and not before.rpartition("\n")[2].strip(" *_#>")
    return f"{before}The answer is {after.strip().lstrip('*_ ')}" if at_line_start else text


def extract(task: Task, text: str) -> Extraction:
    """The answer under the rule of the task's bench: digits, a character, or None.

    `fallback` says that the reply had no phrase (and no box) that announces an answer.
    """
    try:
        if task.bench == "mmlu":
            return _first_character(text)
        return _last(text, r"[A-Z]") if task.kind == "choice" else _last(text, r"\d")
    except _Stops:
        return Extraction(value=None, fallback=False)


def equal(task: Task, value: str | None) -> bool:
    """Their comparison: numbers as floats, letters as texts."""
    if value is None or task.kind == "choice":
        return value == task.gold
    try:
        return float(value) == float(Fraction(task.gold))
    except (ValueError, OverflowError):  # a digit such as "²", or hundreds of digits
        return False


def _first_character(text: str) -> Extraction:
    _, phrase, after = text.partition("answer is")
    answer = after.strip(":").strip().strip("Option").strip() if phrase else text
    if phrase and not answer:
        raise _Stops
    return Extraction(value=answer[:1] or None, fallback=not phrase)


def _last(text: str, kind: str) -> Extraction:
    """The last number (`kind` is a digit) or capital letter of the part that announces the answer."""
    phrase = next((phrase for phrase in _PHRASES if phrase in text), None)
    if phrase:
        answer = text.rpartition(phrase)[2].strip()
    elif "boxed" in text:
        answer = _cleaned(_last_box(text))
    else:
        everywhere = _LAST_NUMBER if kind == r"\d" else re.compile(kind)
        answer = (everywhere.findall(text) or [""])[-1]
    if answer.endswith("."):
        answer = answer[:-1]
        if not answer:
            raise _Stops
    answer = _cleaned(answer.removesuffix("/"))
    if "boxed" in answer:
        answer = _cleaned(_last_box(answer))
    found = re.findall(rf"{kind}+" if kind == r"\d" else kind, answer)
    default = "0" if kind == r"\d" else None
    return Extraction(value=found[-1] if found else default, fallback=not phrase and "boxed" not in text)


def _last_box(text: str) -> str:
    """What follows the last "boxed": to the brace that closes it, or to a dollar sign."""
    rest = text.rpartition("boxed")[2]
    if not rest:
        raise _Stops
    if rest[0] != "{":
        return rest.partition("$")[0].strip()
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i]
    return rest[1:]


def _cleaned(text: str) -> str:
    """Their normal form of a formula, in as far as it changes which digits and capitals are found last."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for piece in _DROPPED:
        text = text.replace(piece, "")
    text, unit, more = text.partition("\\text{ ")
    if unit and "\\text{ " in more:
        raise _Stops
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    if "" in text.split("\\sqrt")[1:]:
        raise _Stops
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = _with_braces(text)
    return "\\frac{1}{2}" if text == "0.5" else text


def _with_braces(text: str) -> str:
    """\\frac12 as \\frac{1}{2}; nothing is changed where one of them has a single character to its right."""
    for piece in text.split("\\frac")[1:]:
        if not piece:
            raise _Stops
        if piece[0] != "{" and len(piece) == 1:
            return text
    return re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)

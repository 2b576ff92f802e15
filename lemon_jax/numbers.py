"""Numbers in free text, read exactly (`fractions.Fraction`, never float).

Decisions, each tested:
- Currency, percent and unit signs are no part of the value: "$39", "39%", "39 km/h" and "39.0" all equal 39
  ("39%" is never 0.39, because a question that asks for percent has a gold in percent).
- A minus is a sign only where it cannot be a subtraction or a hyphen: "is -5" is -5,
  "10 - 5" holds 10 and 5, "3-5" holds 3 and 5.
- "3:5" and "3 : 5" are ratios, 3/5; "1:2:3", "9:05", "9:15 pm" and "at 9:15" (clock times) are no numbers.
- A comma separates thousands only in groups that can be that: "1,200", "1,20,000"; "3,5" is two numbers.
- "2 1/2", "2½" and "2\\frac{1}{2}" are mixed numbers; "3 million" and "2 lakh" are scaled.

Every pattern is bounded or possessive, so that the time is linear in the length of the text.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

_MAX_DIGITS = 60  # longer digit strings are noise (and int() refuses more than 4300 digits)

_VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5",
           "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}  # fmt: skip
_CHARACTERS = str.maketrans(
    dict.fromkeys("−–‒﹣－‐‑⁻˗", "-")
    | {chr(0xFF10 + d): str(d) for d in range(10)}
    | _VULGAR
    | {"⁄": "/", "∕": "/", "：": ":", "∶": ":", "，": ",", "\u00a0": " ", "\u2009": " ", "\u202f": " "}
)
_BEFORE_VULGAR = re.compile(f"(?<=[0-9])(?=[{''.join(_VULGAR)}])")
_THIN_GROUP = re.compile("(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")
_LATEX_GROUP = re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))")  # 1\,000
_FRAC = re.compile(r"([0-9]?)\\[dt]?frac(?:\{([^{}]{1,40})\}\{([^{}]{1,40})\}|([0-9])([0-9]))")

_TOKEN = re.compile(
    r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,12}(?![0-9])"  # 1,200,000
    r"|[0-9]{1,2}(?:,[0-9]{2}){1,6},[0-9]{3}(?![0-9])"  # 1,20,000 (lakh grouping)
    r"|[0-9]++)(?:\.[0-9]++)?"
    r"|(?<![0-9A-Za-z.])\.[0-9]++"  # .5, but not the dot of "Rs.450"
)
_EXPONENT = re.compile(r"[eE]([+-]?[0-9]{1,3})(?![0-9A-Za-z])")
_POWER_OF_TEN = re.compile(r" ?(?:[×xX*]|\\times) ?10 ?\^ ?\{?(-?[0-9]{1,3})(?![0-9])\}?")
_DENOMINATOR = re.compile(r" ?/ ?([0-9]{1,18})(?![0-9]|\.[0-9])")
_MIXED = re.compile(r" ([0-9]{1,4})/([0-9]{1,4})(?![0-9/]|\.[0-9])")
_RATIO = re.compile(r"(?: : |:)([0-9]{1,9}(?:\.[0-9]{1,9})?)(?![0-9])((?: : |:)[0-9]++)?")
_CLOCK_AFTER = re.compile(r" ?[ap]\.?m\b", re.IGNORECASE)
_CONTINUES = frozenset(" :/eExX×*\\")
_SCALE = {"thousand": 10**3, "lakh": 10**5, "lac": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9}
_SCALE_RE = re.compile(rf" ?({'|'.join(_SCALE)})s?\b(?!-)", re.IGNORECASE)
_CURRENCY_BEFORE = re.compile(r"(?:[$€£₹¥]|(?<![A-Za-z])(?:rs|inr|usd|eur|gbp)\.?) ?$", re.IGNORECASE)
_MINUS_WORD = re.compile(r"(?<![A-Za-z])(?:minus|negative) $", re.IGNORECASE)


class Number(NamedTuple):
    """One number and where it stands: `[start, end)` in `normalise(text)`."""

    value: Fraction
    start: int
    end: int


def normalise(text: str) -> str:
    """Bring signs, digits, vulgar and LaTeX fractions to plain ASCII forms; everything else stays.

    Not NFKC, which would turn "cm²" into "cm2".
    """
    text = _BEFORE_VULGAR.sub(" ", _THIN_GROUP.sub(",", text)).translate(_CHARACTERS)
    if "\\" in text:
        text = (
            _LATEX_GROUP.sub(",", text)
            .replace("\\$", "$")
            .replace("\\%", "%")
            .replace("{,}", ",")
            .replace("\\!", "")
            .replace("\\,", " ")
        )
        text = _FRAC.sub(lambda m: f"{m[1] and m[1] + ' '}{m[2] or m[4]}/{m[3] or m[5]}", text)
    return text


def find_numbers(text: str) -> Iterator[Number]:
    """Yield the numbers of an already normalised `text`, left to right, without overlap."""
    position = 0
    while token := _TOKEN.search(text, position):
        number = _read(text, token)
        position = max(number.end, token.end())
        if number.start >= 0:
            yield number


def numbers_in(text: str) -> tuple[Fraction, ...]:
    """All numbers of `text` in order, exact."""
    return tuple(number.value for number in find_numbers(normalise(text)))


def _read(text: str, token: re.Match[str]) -> Number:
    """The number that begins with `token`; `start` is -1 where it is none (its `end` is then skipped)."""
    start, end = token.span()
    digits = token[0].replace(",", "")
    before = text[max(0, start - 10) : start]
    left = before[-1:]
    currency = _CURRENCY_BEFORE.search(before) if left.isalpha() or left in "$€£₹¥ ." else None
    glued = left.isascii() and (left.isalpha() or left == "_")
    if len(digits) > _MAX_DIGITS or (glued and not currency):
        return Number(Fraction(0), -1, end)
    value = Fraction(digits)
    if text[end : end + 1] not in _CONTINUES:
        pass  # the common case, kept short
    elif mark := _EXPONENT.match(text, end) or _POWER_OF_TEN.match(text, end):
        value, end = value * Fraction(10) ** int(mark[1]), mark.end()
    elif mark := _RATIO.match(text, end):
        right = Fraction(mark[1])
        clock = mark[1].startswith("0") or _CLOCK_AFTER.match(text, mark.end()) or before.endswith("at ")
        if mark[2] or clock or right == 0:
            return Number(value, -1, mark.end())
        value, end = value / right, mark.end()
    elif (mark := _MIXED.match(text, end)) and digits.isdigit() and 0 < int(mark[1]) < int(mark[2]):
        value, end = value + Fraction(int(mark[1]), int(mark[2])), mark.end()
    elif mark := _DENOMINATOR.match(text, end):
        if int(mark[1]) == 0:
            return Number(value, -1, mark.end())
        value, end = value / int(mark[1]), mark.end()
    if mark := _SCALE_RE.match(text, end):
        value, end = value * _SCALE[mark[1].lower()], mark.end()
    if currency:
        start -= len(currency[0])
    sign_at = _minus(text, start)
    return Number(value, start, end) if sign_at is None else Number(-value, sign_at, end)


def _minus(text: str, start: int) -> int | None:
    """Where the minus sign of the number at `start` stands, or None: binary minus and hyphen are none."""
    if word := _MINUS_WORD.search(text[max(0, start - 10) : start]):
        sign_at = start - len(word[0])
        gap = False
    else:
        gap = text[start - 1 : start] == " "
        sign_at = start - 1 - gap
        if sign_at < 0 or text[sign_at] != "-":
            return None
        if text[max(0, sign_at - 1) : sign_at].isalnum():
            return None  # hyphen or subtraction: "grade-5", "3-5", "x-5"
    left = text[max(0, sign_at - 3) : sign_at].rstrip(" ")[-1:]
    if gap:  # "= - 5" is a sign; "- 5 apples" at the start of a line is a bullet
        return sign_at if left and left in "=:([{" else None
    return None if left.isdigit() or (left and left in ")]}%") else sign_at


_NOT_A_PLAIN_NUMBER = re.compile(
    r"[(√π^∛°²³]|\\(?:sqrt|pi|cdot)| ?(?:[+*×÷=^√π]|- ?[0-9(]|- [A-Za-z]|[xX] ?[0-9])|[a-zA-Z](?![a-zA-Z])"
)
_UNIT_LETTERS = frozenset("mMgGsShHlLcCkKdDtTpPFVWNJA")  # "750m" is a length, "5x" is a variable
_OPERATOR_BEFORE = re.compile(r"(?:[√π^∛*×÷/]|(?<!^)\+|\\sqrt\{?|\\pi)[ (]?$")


def parse_number(text: str) -> Fraction | None:
    """The first number of a short answer or option text, exact; None for an expression or no number.

    "$78.20" -> 391/5, "1,200" -> 1200, "Rs. 450" -> 450, "20%" -> 20, "12 km/h" -> 12, "1/4" -> 1/4,
    "3:5" -> 3/5;
    "5(√3 + 1)", "2π", "x + 5", "3-5", "10^5", "1:2:3", "None of these" -> None.
    """
    text = re.sub(r"^([+-]) (?=[0-9.$])", r"\1", normalise(text).strip())  # "- 5" is no bullet here
    number = next(find_numbers(text), None)
    if number is None or _OPERATOR_BEFORE.search(text[max(0, number.start - 20) : number.start]):
        return None
    after = _NOT_A_PLAIN_NUMBER.match(text, number.end)
    if after and not (len(after[0]) == 1 and after[0] in _UNIT_LETTERS):
        return None if after[0] != "°" else number.value
    return number.value


def format_number(value: Fraction) -> str:
    """The canonical text: "42", "-0.25", or "1/3" where no finite decimal exists."""
    denominator, twos, fives = value.denominator, 0, 0
    while denominator % 2 == 0:
        denominator, twos = denominator // 2, twos + 1
    while denominator % 5 == 0:
        denominator, fives = denominator // 5, fives + 1
    places = max(twos, fives)
    if denominator != 1:
        return f"{value.numerator}/{value.denominator}"
    if places == 0:
        return str(value.numerator)
    scaled = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{scaled[:-places]}.{scaled[-places:]}"

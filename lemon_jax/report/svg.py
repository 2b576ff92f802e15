"""Charts as inline SVG text, coloured by the classes s0, s1, ... of report.css."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .run_files import plain

_WIDTH, _HEIGHT = 340.0, 200.0
_TOP, _RIGHT, _BOTTOM = 8.0, 12.0, 36.0
_CHARACTER = 6.4  # width of a digit at the 11 px of tick labels
_MAX_POINTS = 240  # more than one point per 1.3 px is a smear and a megabyte
_SMOOTH_FROM = 15
_SMOOTH_RATE = 0.25

Point = tuple[float, float | None]
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named line; a y of None is a gap."""

    name: str
    points: Sequence[Point]


def esc(value: object) -> str:
    """Text as HTML: nothing in it is markup, nothing in it is a control character."""
    return escape(plain(value), quote=True)


def compact(value: float) -> str:
    """A number in at most six characters or so.

    # In: 0.00312, 1.314, 3412, 81234, 2.1e6   Out: "0.00312", "1.31", "3,412", "81.2k", "2.1M"
    """
    size = abs(value)
    if size >= 1e15:
        return f"{value:.1e}"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:,.1f}".removesuffix(".0") + unit
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 0.1 or size == 0:
        return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """# In: 0.5, 0.025   Out: "50 %", "2.5 %" """
    return f"{100 * value:.1f}".removesuffix(".0") + " %"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers, at most `most` intervals apart, that cover [low, high].

    # In: 0.93, 1.37   Out: [0.9, 1.0, 1.1, 1.2, 1.3, 1.4]
    """
    if not high > low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Without the digits that are rounding: 0.1 * 3 is 0.30000000000000004.
    found = [float(f"{i * step:.12g}") for i in range(first, min(last, first + 50) + 1)]
    # Differences near what floats of this size resolve have no round numbers between them.
    return found if found[0] <= low and found[-1] >= high else [low, high]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    form: Format = compact,
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Lines over training steps, with `low` and `high` inside the y axis; "" if there is no value at all.

    From 15 points on the raw line is faint and its exponential average is drawn over it.
    """
    series = [Series(name=s.name, points=_thinned(s.points)) for s in series]
    xs = [x for s in series for x, y in s.points if y is not None]
    ys = [y for s in series for _, y in s.points if y is not None]
    if not ys:
        return ""
    y_ticks = ticks(
        min([*ys, *([low] if low is not None else [])]), max([*ys, *([high] if high is not None else [])])
    )
    left = 10 + _CHARACTER * max(len(form(t)) for t in y_ticks)
    x_low, x_high = min(xs), max(xs)
    x_span = x_high - x_low or 1.0
    y_span = y_ticks[-1] - y_ticks[0]

    def at_x(x: float) -> float:
        middle = 0.5 if x_high == x_low else (x - x_low) / x_span
        return left + middle * (_WIDTH - left - _RIGHT)

    def at_y(y: float) -> float:
        return _TOP + (1 - (y - y_ticks[0]) / y_span) * (_HEIGHT - _TOP - _BOTTOM)

    right = _WIDTH - _RIGHT
    parts = [f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="{esc(label)}">']
    for t in y_ticks:
        parts.append(
            f'<line class="grid" x1="{left:.1f}" x2="{right}" y1="{at_y(t):.1f}" y2="{at_y(t):.1f}"/>'
        )
        parts.append(
            f'<text class="tick end" x="{left - 6:.1f}" y="{at_y(t) + 3.5:.1f}">{esc(form(t))}</text>'
        )
    for t in _step_ticks(x_low, x_high):
        parts.append(f'<text class="tick mid" x="{at_x(t):.1f}" y="{_HEIGHT - _BOTTOM + 15}">{t:,.0f}</text>')
    middle = (left + right) / 2
    parts.append(f'<text class="tick mid" x="{middle:.1f}" y="{_HEIGHT - 6}">step</text>')
    for i, s in enumerate(series):
        smooth = len(s.points) >= _SMOOTH_FROM
        if smooth:
            parts.append(f'<path class="line faint s{i % 8}" d="{_path(s.points, at_x, at_y)}"/>')
        drawn = _smoothed(s.points) if smooth else s.points
        parts.append(f'<path class="line s{i % 8}" d="{_path(drawn, at_x, at_y)}"/>')
    for s in series:  # last, so that the pointer finds them above every line
        name = f"{s.name}, " if len(series) > 1 else ""
        for x, y in s.points:
            if y is not None:
                tip = esc(f"{name}step {x:,.0f}: {form(y)}")
                place = f'cx="{at_x(x):.1f}" cy="{at_y(y):.1f}"'
                parts.append(f'<circle class="hit" {place} r="5"><title>{tip}</title></circle>')
    return "".join([*parts, "</svg>"])


def interval_mark(value: float, interval: tuple[float, float] | None, *, strong: bool) -> str:
    """A point and its interval on a scale from 0 to 1, for a table cell."""

    def at(v: float) -> float:
        return 5 + 150 * min(1.0, max(0.0, v))

    grid = "".join(
        f'<line class="grid" x1="{at(v):.1f}" x2="{at(v):.1f}" y1="1" y2="17"/>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    )
    bar = ""
    if interval:
        bar = f'<line class="whisker" x1="{at(interval[0]):.1f}" x2="{at(interval[1]):.1f}" y1="9" y2="9"/>'
    return (
        f'<svg class="mark{" strong" if strong else ""}" viewBox="0 0 160 18" aria-hidden="true">{grid}{bar}'
        f'<circle cx="{at(value):.1f}" cy="9" r="4.5"/></svg>'
    )


def _step_ticks(low: float, high: float) -> list[float]:
    if high - low < 1:
        return [low]
    return [t for t in ticks(low, high, 6) if low <= t <= high and t == int(t)]


def _path(points: Sequence[Point], at_x: Format | Callable, at_y: Format | Callable) -> str:
    words, pen_down = [], False
    for i, (x, y) in enumerate(points):
        if y is None:
            pen_down = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{at_x(x):.1f} {at_y(y):.1f}")
        alone = not pen_down and (i + 1 == len(points) or points[i + 1][1] is None)
        if alone:
            words.append("h0")  # with round caps a line of no length is a dot
        pen_down = True
    return "".join(words)


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Exponential average without the pull towards 0 of its start (Kingma & Ba 2015, section 3).

    It goes through gaps: a family of edits that was not drawn at a step keeps its average.
    """
    total = weight = 0.0
    found: list[Point] = []
    for x, y in points:
        if y is None:
            continue
        total = (1 - _SMOOTH_RATE) * total + _SMOOTH_RATE * y
        weight = (1 - _SMOOTH_RATE) * weight + _SMOOTH_RATE
        found.append((x, total / weight))
    return found


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most _MAX_POINTS points, each the mean of as many neighbours."""
    size = math.ceil(len(points) / _MAX_POINTS)
    if size <= 1:
        return list(points)
    found: list[Point] = []
    for i in range(0, len(points), size):
        bucket = points[i : i + size]
        ys = [y for _, y in bucket if y is not None]
        found.append((bucket[-1][0], sum(ys) / len(ys) if ys else None))
    return found

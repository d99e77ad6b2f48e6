"""The frame of a chart as SVG: ticks at round numbers, a grid, and labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 84, 16, 14, 52


@dataclass(frozen=True)
class Axis:
    """One axis: its label, the values at its ends, and the format of its ticks."""

    label: str
    low: float
    high: float
    form: str = "{:g}"

    @property
    def ticks(self) -> list[float]:
        """About six round numbers from end to end."""
        span = self.high - self.low
        rough = span / 6
        power = 10.0 ** floor(log10(rough))
        step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
        first = ceil(self.low / step - 1e-9)
        last = floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]

    def share(self, value: float) -> float:
        """Where a value is between the ends, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def axis(label: str, values: Iterable[float], form: str = "{:g}", *, zero: bool = False) -> Axis:
    """An axis around all values with a little room; with `zero` it starts at 0."""
    found = list(values) or [0.0, 1.0]
    low, high = min(found), max(found)
    room = 0.06 * (high - low) or max(abs(high) * 0.1, 1e-9)
    return Axis(label, 0.0 if zero else low - room, high + room, form)


def x_at(axis: Axis, value: float) -> float:
    """The pixel of a value on the horizontal axis."""
    return round(LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT), 2)


def y_at(axis: Axis, value: float) -> float:
    """The pixel of a value on the vertical axis."""
    return round(HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM), 2)


def frame(x: Axis, y: Axis, *, x_names: Sequence[str] | None = None) -> str:
    """Grid, ticks and labels; with `x_names`, the horizontal axis has names at 0, 1, … instead of numbers.

    An axis with numbers tells its ends: the script of the page draws it anew when curves are hidden or shown.
    """
    parts = [f'<g class="y-axis" {_ends(y, HEIGHT - BOTTOM, TOP)}>']
    for value in y.ticks:
        at = y_at(y, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{y.form.format(value)}</text>')
    parts.append("</g><g>" if x_names is not None else f'</g><g class="x-axis" {_ends(x, LEFT, WIDTH - RIGHT)}>')
    named = enumerate(x_names) if x_names is not None else ((value, x.form.format(value)) for value in x.ticks)
    for value, text in named:
        place = f'x="{x_at(x, value)}" y="{HEIGHT - BOTTOM + 20}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{escape(text)}</text>')
    parts.append("</g>")
    middle, centre = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    turn = f'x="16" y="{centre}" transform="rotate(-90 16 {centre})"'
    parts.append(f'<text class="label" {turn} text-anchor="middle">{escape(y.label)}</text>')
    return "".join(parts)


def _ends(axis: Axis, start: int, end: int) -> str:
    """The values at both ends of an axis, and the pixels where they are."""
    return f'data-low="{axis.low!r}" data-high="{axis.high!r}" data-start="{start}" data-end="{end}"'

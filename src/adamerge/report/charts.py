"""Charts as SVG: curves with intervals, grouped bars and histograms; each mark tells its values on hover and focus."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from adamerge.report.svg_axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, axis, frame, x_at, y_at

# As many colours as the style sheet has; the markers differ too, for those who cannot tell the colours apart.
COLOURS = 7
# Curves that are drawn at first; a click in the legend draws the others.
FEW = 6
MARKERS = ("circle", "square", "diamond", "up", "down", "plus", "cross")
SIZE = 5.0


@dataclass(frozen=True)
class Point:
    """A point of a curve: its values as the file has them, and the text shown on hover.

    `scale` turns the values into the units of the chart; `place` replaces the horizontal one.  `ends` are those of its
    interval.  A hollow point missed its target.
    """

    x: str
    y: str
    tip: str
    scale: tuple[float, float] = (1.0, 1.0)
    ends: tuple[float, float] | None = None
    hollow: bool = False
    place: float | None = None

    @property
    def at(self) -> tuple[float, float]:
        """The point in the units of the chart."""
        across = self.scale[0] * float(self.x) if self.place is None else self.place
        return across, self.scale[1] * float(self.y)


@dataclass(frozen=True)
class Series:
    """A named curve, or a named group of bars with one value for each block."""

    name: str
    points: Sequence[Point] = field(default_factory=tuple)


def definitions() -> str:
    """What all charts of a page refer to: the frame that curves are cut at."""
    place = f'x="{LEFT - 8}" y="{TOP - 8}" width="{WIDTH - LEFT - RIGHT + 16}" height="{HEIGHT - TOP - BOTTOM + 12}"'
    return f'<svg width="0" height="0" aria-hidden="true"><clipPath id="inside"><rect {place}/></clipPath></svg>'


def curves(
    title: str,
    labels: tuple[str, str],
    series: Sequence[Series],
    *,
    level: float | None = None,
    names: Sequence[str] | None = None,
) -> str:
    """Curves with 95 % intervals; the first `FEW` are drawn, the others on request.

    `level` is a dashed line.  `names` are written at the places 0, 1, … instead of numbers.
    """
    shown = [point for one in series[:FEW] for point in one.points]
    ys = [y for point in shown for y in (point.at[1], *(point.ends or ()))] + ([] if level is None else [level])
    x, y = axis(labels[0], (point.at[0] for point in shown)), axis(labels[1], ys)
    parts = [frame(x, y, x_names=names)]
    if level is not None:
        at = y_at(y, level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
    parts += [_curve(one, index, x, y) for index, one in enumerate(series)]
    return _figure(title, parts, [one.name for one in series])


def bars(title: str, labels: tuple[str, str], series: Sequence[Series]) -> str:
    """Groups of bars: one group for each block, one bar for each of the series that are drawn."""
    drawn = series[:FEW]
    blocks = max((len(one.points) for one in drawn), default=0)
    x = Axis(labels[0], -0.5, blocks - 0.5)
    y = axis(labels[1], [0.0, *(point.at[1] for one in drawn for point in one.points)], zero=True)
    parts = [frame(x, y, x_names=[str(block) for block in range(blocks)])]
    width = 0.8 / max(len(drawn), 1)
    for index, one in enumerate(drawn):
        marks = "".join(
            _bar(point, point.at[0] - 0.4 + index * width, width * 0.94, x, y) for point in one.points if point.y
        )
        parts.append(f'<g class="series c{index % COLOURS}" data-series="{index}">{marks}</g>')
    return _figure(title, parts, [one.name for one in drawn])


def histogram(title: str, label: str, values: Sequence[int], *, most_bins: int = 28) -> str:
    """How many images have which number of tokens."""
    low, high = min(values), max(values)
    width = max(1, -(-(high - low + 1) // most_bins))
    counts = [0] * ((high - low) // width + 1)
    for value in values:
        counts[(value - low) // width] += 1
    x, y = Axis(label, low - 0.5, low + width * len(counts) - 0.5), axis("images", [0, *counts], zero=True)
    parts = [frame(x, y)]
    for index, count in enumerate(counts):
        first = low + index * width
        last = first + width - 1
        tip = f"{first if width == 1 else f'{first} to {last}'} tokens: {count} images"
        parts.append(_bar(Point(str(first), str(count), tip), first - 0.5, width, x, y))
    return _figure(title, [parts[0], f'<g class="series c0">{"".join(parts[1:])}</g>'], [])


def _bar(point: Point, left: float, width: float, x: Axis, y: Axis) -> str:
    """A bar from 0 to the point's value; `left` and `width` are in the units of the horizontal axis."""
    start, end, top, floor = x_at(x, left), x_at(x, left + width), y_at(y, point.at[1]), y_at(y, 0)
    shape = f'x="{start}" y="{top}" width="{max(end - start - 1, 1):.2f}" height="{max(floor - top, 0):.2f}"'
    return f'<rect class="bar mark" {shape} {_told(point)}/>'


def _curve(one: Series, index: int, x: Axis, y: Axis) -> str:
    points = sorted(one.points, key=lambda point: point.at)
    path = " ".join(f"{x_at(x, point.at[0])},{y_at(y, point.at[1])}" for point in points)
    marks: list[str] = [f'<polyline class="curve" points="{path}"/>']
    for point in points:
        at = x_at(x, point.at[0])
        if point.ends is not None:
            low, high = (y_at(y, end) for end in point.ends)
            marks.append(f'<line class="interval" x1="{at}" x2="{at}" y1="{low}" y2="{high}"/>')
    marks += [_marker(point, index, x_at(x, point.at[0]), y_at(y, point.at[1])) for point in points]
    hidden = " off" if index >= FEW else ""
    name = f"series c{index % COLOURS}{hidden}"
    return f'<g class="{name}" data-series="{index}" clip-path="url(#inside)">{"".join(marks)}</g>'


def _marker(point: Point, index: int, x: float, y: float) -> str:
    kind = "mark hollow" if point.hollow else "mark"
    return f'<path class="{kind}" d="{shape(index, x, y)}" {_told(point)}/>'


def _told(point: Point) -> str:
    """The attributes that hold the values, and the text for the pointer, the keyboard and screen readers."""
    tip = escape(point.tip, quote=True)
    return f'data-x="{escape(point.x)}" data-y="{escape(point.y)}" data-tip="{tip}" aria-label="{tip}" role="img"'


def shape(index: int, x: float, y: float) -> str:
    """The path of a marker around a point."""
    s = SIZE
    match MARKERS[(index + index // COLOURS) % len(MARKERS)]:
        case "circle":
            return f"M{x - s:.2f} {y}a{s} {s} 0 1 0 {2 * s} 0a{s} {s} 0 1 0 {-2 * s} 0z"
        case "square":
            return f"M{x - s:.2f} {y - s:.2f}h{2 * s}v{2 * s}h{-2 * s}z"
        case "diamond":
            return f"M{x} {y - 1.3 * s:.2f}l{1.3 * s} {1.3 * s}l{-1.3 * s} {1.3 * s}l{-1.3 * s} {-1.3 * s}z"
        case "up":
            return f"M{x} {y - 1.2 * s:.2f}l{1.2 * s} {2.1 * s}h{-2.4 * s}z"
        case "down":
            return f"M{x} {y + 1.2 * s:.2f}l{1.2 * s} {-2.1 * s}h{-2.4 * s}z"
        case "plus":
            return f"M{x - 2} {y - s:.2f}h4v{s - 2}h{s - 2}v4h{2 - s}v{s - 2}h-4v{2 - s}h{2 - s}v-4h{s - 2}z"
        case _:
            return f"M{x - s:.2f} {y - s:.2f}l{2 * s} {2 * s}m0 {-2 * s}l{-2 * s} {2 * s}"


def _figure(title: str, parts: Sequence[str], legend: Sequence[str]) -> str:
    """A chart with its caption and a legend of switches; each chart has one stop for the Tab key, then arrows."""
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" tabindex="0" aria-label="{escape(title)}: arrow keys go '
        f'through the values">{"".join(parts)}</svg>'
    )
    switches = "".join(_switch(index, name) for index, name in enumerate(legend))
    below = f'<div class="legend">{switches}</div>' if len(legend) > 1 else ""
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{drawing}{below}</figure>'


def _switch(index: int, name: str) -> str:
    """A button of the legend that shows or hides a series."""
    icon = f'<svg viewBox="0 0 16 16" aria-hidden="true"><path class="mark" d="{shape(index, 8, 8)}"/></svg>'
    state = f'data-switch="{index}" aria-pressed="{str(index < FEW).lower()}"'
    return f'<button type="button" class="c{index % COLOURS}" {state}>{icon}{escape(name)}</button>'

"""Charts as plain SVG text: axes, ticks and formatted numbers. Colours are CSS classes that the page defines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Final

WIDTH: Final = 960
LEFT: Final = 86
RIGHT: Final = 20
INNER: Final = WIDTH - LEFT - RIGHT


def drawing(height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """One chart. Screen readers read the title and the description, which says in words what the chart shows."""
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}. {escape(description)}">',
            *parts,
            "</svg>",
        ]
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, *, tip: str = "", opacity: float = 1.0) -> str:
    """A box with a tooltip."""
    fade = "" if opacity >= 1.0 else f' fill-opacity="{opacity:.3f}"'
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" class="{kind}"{fade}'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def path(points: list[tuple[float, float]], kind: str, *, closed_at: float | None = None) -> str:
    """A line through the points; with `closed_at` the area between the line and that height."""
    if not points:
        return ""
    steps = " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    if closed_at is not None:
        steps = f"{points[0][0]:.1f},{closed_at:.1f} L{steps} L{points[-1][0]:.1f},{closed_at:.1f} Z"
    return f'<path d="M{steps}" class="{kind}"/>'


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a chart with a value axis from 0 upwards."""

    top: float
    height: float
    most: float

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - min(1.0, value / self.most if self.most else 0.0))

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def axis(self, unit: str) -> list[str]:
        """Horizontal lines at round values, with their numbers."""
        parts = []
        for value in ticks(self.most):
            parts.append(line(LEFT, self.y(value), LEFT + INNER, self.y(value), "grid"))
            parts.append(text(LEFT - 8, self.y(value) + 4, number(value), anchor="end", kind="soft"))
        parts.append(text(LEFT, self.top - 8, unit, kind="soft"))
        return parts


def time_axis(start: int, end: int, y: float) -> list[str]:
    """Times of day below a chart; input in microseconds."""
    parts = []
    for step in range(7):
        x = LEFT + INNER * step / 6
        anchor = "start" if step == 0 else "end" if step == 6 else "middle"
        parts.append(line(x, y, x, y + 4, "axis"))
        parts.append(text(x, y + 18, clock(start + (end - start) * step / 6, end - start), anchor=anchor, kind="soft"))
    return parts


def ticks(most: float, count: int = 4) -> list[float]:
    """Round values from 0 to the largest."""
    if most <= 0:
        return [0.0]
    rough = most / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return [n * step for n in range(int(most / step) + 1)]


def number(value: float) -> str:
    """Short form: 12, 1.5 k, 3 M."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= limit:
            scaled = value / (limit if unit != " k" else 1e3)
            return f"{scaled:.4g}{unit}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    """A duration in a suitable unit."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 0.001:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def clock(micros: float, span: float) -> str:
    """Time of day in UTC, with the date or fractions of a second where the time span needs them."""
    when = datetime.fromtimestamp(micros / 1e6, UTC)
    if span > 2 * 86_400e6:
        return f"{when:%m-%d %H:%M}"
    return f"{when:%H:%M:%S}" if span > 12e6 else f"{when:%H:%M:%S}.{when.microsecond // 100_000}"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key that puts p2 before p10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.findall(r"\d+|\D+", name))

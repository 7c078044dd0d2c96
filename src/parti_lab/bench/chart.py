"""A result as one self-contained HTML page with an inline SVG: figures next to their goals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final, TypeGuard

from parti_lab.bench.goals import Figure, Goal
from parti_lab.bench.report import Result

_ROW: Final = 30
_LABEL: Final = 300
_BAR: Final = 420
_WIDTH: Final = _LABEL + _BAR + 260

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #6b7280; --bar: #4f7cac; --met: #2e7d4f;
  --missed: #b3372f; --track: #e7eaee }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #15181c; --soft: #9aa3ad; --bar: #6f9fd0;
  --met: #4fae76; --missed: #e0655c; --track: #2a2f36 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem }
svg { width: 100%; height: auto } svg text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.soft, svg text.soft { color: var(--soft); fill: var(--soft) } .bar { fill: var(--bar) } .met { fill: var(--met) }
.missed { fill: var(--missed) } .track { fill: var(--track) } .goal { stroke: var(--ink); stroke-width: 2 }
strong.met { color: var(--met) } strong.missed { color: var(--missed) }
"""


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    value: float
    scale: float
    """The value that fills the whole bar."""
    goal: Goal | None
    met: bool | None


def render_html(result: Result) -> str:
    """The page. A figure with a goal has its own scale and a mark at the goal; the others share a scale per unit."""
    judged = list(_judged(result))
    others = list(_grouped(result))
    words = [(name, value) for name, value in result.figures.items() if isinstance(value, str | bool) or value is None]
    machine = ", ".join(f"{escape(key)} {escape(str(value))}" for key, value in result.machine.items())
    verdict = '<strong class="met">ok</strong>' if result.ok else '<strong class="missed">not ok</strong>'
    parts = [
        "<!doctype html>",
        f'<html lang="en"><meta charset="utf-8"><title>{escape(result.name)}</title><style>{_STYLE}</style>',
        f"<h1>{escape(result.name)}: {verdict}</h1>",
        f'<p class="soft">{result.seconds:.1f} s. {machine}</p>',
    ]
    if judged:
        parts += ["<h2>Goals</h2>", _svg(judged, "Figures with goals; the line marks the goal")]
    if others:
        parts += ["<h2>Figures</h2>", _svg(others, "Other figures; those with the same unit share a scale")]
    if words:
        parts += ["<ul>", *(f"<li>{escape(name)}: {escape(str(value))}</li>" for name, value in words), "</ul>"]
    if result.missed:
        parts += ["<h2>Missed</h2><ul>", *(f"<li>{escape(why)}</li>" for why in result.missed.values()), "</ul>"]
    return "\n".join([*parts, "</html>", ""])


def _judged(result: Result) -> Iterator[_Row]:
    for name, text in result.goals.items():
        goal, value = Goal.parse(text), result.figures.get(name)
        if not _is_number(value) or isinstance(goal.bound, str):
            continue
        bound = goal.bound if math.isfinite(goal.bound) else 0.0
        yield _Row(name, float(value), max(abs(float(value)), abs(bound)) * 1.15, goal, goal.met_by(value))


def _grouped(result: Result) -> Iterator[_Row]:
    plain = {
        name: float(value)
        for name, value in result.figures.items()
        if _is_number(value) and name not in result.goals and name != "seed"
    }
    largest: dict[str, float] = {}
    for name, value in plain.items():
        largest[_unit(name)] = max(largest.get(_unit(name), 0.0), abs(value))
    for name, value in plain.items():
        yield _Row(name, value, largest[_unit(name)], None, None)


def _unit(name: str) -> str:
    """The last word of a figure's name is its unit by convention: reader_msgs_per_s, pause_ms."""
    return name.rpartition("_")[2]


def _is_number(value: Figure | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _svg(rows: Iterable[_Row], title: str) -> str:
    rows = list(rows)
    height = _ROW * len(rows) + 10
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img"><title>{escape(title)}</title>']
    for index, row in enumerate(rows):
        top = index * _ROW + 5
        length = _BAR * min(1.0, abs(row.value) / row.scale) if row.scale else 0.0
        kind = "bar" if row.met is None else "met" if row.met else "missed"
        text = f"{row.value:,.4g}" if abs(row.value) < 10_000 else f"{row.value:,.0f}"
        parts += [
            f'<text x="{_LABEL - 10}" y="{top + 16}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect class="track" x="{_LABEL}" y="{top + 2}" width="{_BAR}" height="{_ROW - 10}" rx="3"/>',
            f'<rect class="{kind}" x="{_LABEL}" y="{top + 2}" width="{length:.1f}" height="{_ROW - 10}" rx="3"/>',
        ]
        tail = text
        if row.goal is not None and not isinstance(row.goal.bound, str):
            mark = _LABEL + (_BAR * min(1.0, abs(row.goal.bound) / row.scale) if row.scale else 0.0)
            parts.append(f'<line class="goal" x1="{mark:.1f}" x2="{mark:.1f}" y1="{top - 1}" y2="{top + _ROW - 5}"/>')
            tail = f"{text}  ({row.goal})"
        parts.append(f'<text x="{_LABEL + _BAR + 12}" y="{top + 16}">{escape(tail)}</text>')
    return "\n".join([*parts, "</svg>"])

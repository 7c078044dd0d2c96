"""The four charts of the report: latency, throughput and lag, partitions, and ownership."""

from __future__ import annotations

import math
import statistics
from typing import Final

from parti.audit.assemble import lag_series, whole
from parti.audit.model import Details, PartitionCourse, Turn
from parti.audit.svg import (
    INNER,
    LEFT,
    RIGHT,
    WIDTH,
    Panel,
    clock,
    drawing,
    line,
    natural,
    number,
    path,
    rect,
    seconds,
    text,
    time_axis,
)

_MOMENTS: Final = 160  # points of a line over time
_CELLS: Final = 4_000  # cells of the heat map; above this number neighbours share a cell
_BANDS: Final = 40  # ownership histories that are drawn; rarer ones are only counted
_TURNS: Final = 12  # owners of a partition that are drawn, the latest ones
_COLOURS: Final = 8
_EMPTY: Final = '<p class="soft">Nothing to draw: the effects do not tell it.</p>'


def latency_chart(details: Details) -> str:
    """Latency from stored to done, on a logarithmic scale."""
    spread = details.latency
    bars = spread.bars()
    if not bars:
        return _EMPTY
    panel = Panel(30, 200, max(count for _, _, count in bars))
    wide = INNER / len(bars)
    low, high = math.log2(bars[0][0] * 1e6 + 1), math.log2(bars[-1][1] * 1e6 + 1)
    parts = panel.axis("messages")
    for index, (start, end, count) in enumerate(bars):
        if count:
            tip = f"{seconds(start)} to {seconds(end)}: {count:,} messages"
            top = min(panel.y(count), panel.bottom - 1)
            parts.append(rect(LEFT + index * wide + 0.5, top, max(1.0, wide - 1), panel.bottom - top, "bar", tip=tip))
    parts.append(line(LEFT, panel.bottom, LEFT + INNER, panel.bottom, "axis"))
    every = max(1, len(bars) // 9)
    for index in range(0, len(bars), every):
        x = LEFT + index * wide
        parts.append(line(x, panel.bottom, x, panel.bottom + 4, "axis"))
        parts.append(text(x, panel.bottom + 18, seconds(bars[index][0]), anchor="middle", kind="soft"))
    summary = []
    for row, share in enumerate((0.5, 0.95, 0.99)):
        value = spread.percentile(share)
        x = LEFT + INNER * (math.log2(value * 1e6 + 1) - low) / max(high - low, 1e-9)
        words = f"p{round(share * 100)} {seconds(value)}"
        anchor, shift = ("end", -5) if x > LEFT + 0.8 * INNER else ("start", 5)
        parts.append(line(x, 24, x, panel.bottom, "mark"))
        parts.append(text(x + shift, 34 + 16 * row, words, anchor=anchor, kind="strong"))
        summary.append(words)
    return drawing(panel.bottom + 28, "Latency from stored to done", ", ".join(summary), parts)


def flow_chart(details: Details) -> str:
    """Publishes and effects per second, and below them the number of waiting messages."""
    published, done = details.published, details.done
    if published.span is None or done.span is None:
        return _EMPTY
    start, end = whole(published, done)
    # Each point covers a whole number of counted buckets, or some points would look busier than others.
    step = max(published.width, done.width)
    step *= -(-(end - start) // (step * _MOMENTS))
    moments = -(-(end - start) // step)
    end = start + moments * step
    width = (end - start) / 1e6 / moments
    rates = {
        "published": published.between(start, end, moments) / width,
        "done": done.between(start, end, moments) / width,
    }
    behind = lag_series(published, done, moments, (start, end))
    upper = Panel(40, 150, max(1.0, *(float(rate.max()) for rate in rates.values())))
    lower = Panel(upper.bottom + 48, 110, max(1.0, float(behind.max())))
    places = [LEFT + INNER * (index + 0.5) / moments for index in range(moments)]
    parts = [*upper.axis("messages a second"), *lower.axis("messages waiting (lag)")]
    for name, rate in rates.items():
        heights = [upper.y(float(value)) for value in rate]
        parts.append(path(list(zip(places, heights, strict=True)), f"flow {name}"))
    area = [(x, lower.y(float(value))) for x, value in zip(places, behind, strict=True)]
    parts.append(path(area, "lag", closed_at=lower.bottom))
    parts += [
        line(LEFT, upper.bottom, LEFT + INNER, upper.bottom, "axis"),
        line(LEFT, lower.bottom, LEFT + INNER, lower.bottom, "axis"),
        rect(WIDTH - RIGHT - 190, 12, 14, 4, "key published"),
        text(WIDTH - RIGHT - 170, 18, "published"),
        rect(WIDTH - RIGHT - 80, 12, 14, 4, "key done"),
        text(WIDTH - RIGHT - 60, 18, "done"),
        *time_axis(start, end, lower.bottom),
    ]
    for at, x in enumerate(places):
        when = clock(start + (end - start) * (at + 0.5) / moments, end - start)
        tip = ", ".join(f"{number(float(rate[at]))} {name} a second" for name, rate in rates.items())
        tip = f"{when}: {tip}, {number(float(behind[at]))} waiting"
        wide = INNER / moments
        parts.append(rect(x - wide / 2, upper.top, wide, lower.bottom - upper.top, "hover", tip=tip))
    summary = f"at most {number(float(behind.max()))} messages waited"
    return drawing(lower.bottom + 28, "Throughput and lag over time", summary, parts)


def heat_map(details: Details) -> str:
    """One cell per partition: its number of effects and its longest latency."""
    courses = sorted(details.courses, key=lambda course: natural(course.name))
    if not courses:
        return _EMPTY
    together = -(-len(courses) // _CELLS)
    cells = [courses[index : index + together] for index in range(0, len(courses), together)]
    columns = min(len(cells), max(10, math.ceil(math.sqrt(len(cells) * 2.4))))
    size = min(26.0, INNER / columns)
    parts: list[str] = []
    top = 0.0
    for title, values, words in (
        ("effects", [float(sum(c.effects for c in cell)) for cell in cells], number),
        ("longest latency", [max(c.latency_max for c in cell) for cell in cells], seconds),
    ):
        most = max(values) or 1.0
        parts.append(text(LEFT, top + 16, f"{title}: {words(min(values))} to {words(most)}", kind="strong"))
        parts += _legend(top + 6)
        top += 30
        for index, (cell, value) in enumerate(zip(cells, values, strict=True)):
            x, y = LEFT + index % columns * size, top + index // columns * size
            faults = sum(course.faults for course in cell)
            kind = "heat wrong" if faults else "heat"
            parts.append(
                rect(x, y, size - 1, size - 1, kind, tip=_cell(cell, faults), opacity=0.08 + 0.92 * value / most)
            )
            if index % columns == 0:
                parts.append(text(LEFT - 8, y + size / 2 + 4, cell[0].name[:12], anchor="end", kind="soft small"))
        top += -(-len(cells) // columns) * size + 22
    wrong = sum(1 for course in courses if course.faults)
    summary = f"{len(courses):,} partitions, {wrong:,} of them with a fault"
    return drawing(top, "Partitions", summary, parts)


def _legend(y: float) -> list[str]:
    parts = [text(WIDTH - RIGHT - 130, y + 10, "less", anchor="end", kind="soft")]
    for step in range(5):
        parts.append(rect(WIDTH - RIGHT - 122 + step * 16, y, 15, 12, "heat", opacity=0.08 + 0.92 * step / 4))
    return [*parts, text(WIDTH - RIGHT - 36, y + 10, "more", kind="soft")]


def _cell(cell: list[PartitionCourse], faults: int) -> str:
    name = cell[0].name if len(cell) == 1 else f"{cell[0].name} to {cell[-1].name}"
    effects = sum(course.effects for course in cell)
    mean = statistics.fmean(course.latency_mean for course in cell)
    longest = max(course.latency_max for course in cell)
    wrong = f", {faults:,} faults" if faults else ""
    return f"{name}: {effects:,} effects, latency {seconds(mean)} on average, {seconds(longest)} at most{wrong}"


def handoff_chart(details: Details) -> str:
    """Which owner had which partitions when; partitions with the same sequence of owners share one band."""
    histories: dict[tuple[str, ...], list[PartitionCourse]] = {}
    for course in details.courses:
        latest = course.turns[-_TURNS:]
        if latest and all(turn.owner for turn in latest):
            histories.setdefault(tuple(turn.owner for turn in latest), []).append(course)
    if not histories:
        return _EMPTY
    ranked = sorted(histories.items(), key=lambda item: (-len(item[1]), item[0]))
    shown, rest = ranked[:_BANDS], ranked[_BANDS:]
    every = [turn for courses in histories.values() for course in courses for turn in course.turns]
    start, end = min(turn.first for turn in every), max(turn.last for turn in every)
    owners = {name: n for n, name in enumerate(sorted({turn.owner for turn in every}, key=natural))}
    largest = len(shown[0][1])
    parts: list[str] = []
    top = 8.0
    for history, courses in sorted(shown, key=lambda item: [natural(owner) for owner in item[0]]):
        height = 16 + 44 * len(courses) / largest
        label = courses[0].name[:12] if len(courses) == 1 else f"{len(courses):,} part."
        parts.append(text(LEFT - 8, top + height / 2 + 4, label, anchor="end", kind="soft small"))
        for place, owner in enumerate(history):
            turns = [course.turns[-_TURNS:][place] for course in courses]
            parts += _turn(owner, owners[owner], turns, (start, end), (top, height))
        top += height + 4
    parts += time_axis(start, end, top)
    top += 30
    if rest:
        count = sum(len(courses) for _, courses in rest)
        parts.append(text(LEFT, top, f"and {count:,} partitions with {len(rest):,} other histories", kind="soft"))
        top += 16
    summary = f"{len(details.courses):,} partitions, {len(owners):,} owners, {len(ranked):,} different histories"
    return drawing(top, "Owners of partitions over time", summary, parts)


def _turn(owner: str, colour: int, turns: list[Turn], span: tuple[int, int], place: tuple[float, float]) -> list[str]:
    """One owner's part of a band: from the median first effect to the median last."""
    start, end = span
    first, last = (statistics.median(times) for times in zip(*((t.first, t.last) for t in turns), strict=True))
    x = LEFT + INNER * (first - start) / max(1, end - start)
    width = max(2.0, INNER * (last - first) / max(1, end - start))
    low, high = min(turn.epoch for turn in turns), max(turn.epoch for turn in turns)
    epochs = f"epoch {low}" if low == high else f"epochs {low} to {high}"
    effects = sum(turn.count for turn in turns)
    tip = (
        f"{owner}, {epochs}: {len(turns):,} partitions, {effects:,} effects, "
        f"{clock(first, end - start)} to {clock(last, end - start)}"
    )
    parts = [rect(x, place[0], width, place[1], f"owner c{colour % _COLOURS}", tip=tip)]
    words = f"{owner} · {epochs}"
    if width > 7 * len(words):
        parts.append(text(x + 6, place[0] + place[1] / 2 + 4, words, kind="inside"))
    elif width > 7 * len(owner):
        parts.append(text(x + 6, place[0] + place[1] / 2 + 4, owner, kind="inside"))
    return parts

"""One consumer's verdict, assembled from the results of the jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from parti.audit.effects import NOWHERE, Names
from parti.audit.examples import Examples
from parti.audit.measures import Tempo
from parti.audit.model import Details, Finding, Lag, PartitionCourse, Percentiles, Side, Turn
from parti.audit.order import Course, Judged
from parti.audit.presence import Weight
from parti.audit.scan import ScanFacts
from parti.audit.slo import slos

_MOMENTS: Final = 240  # points of the lag over time: as many as a chart can show
_KINDS: Final = {
    "duplicated": "duplicated",
    "out_of_order_key": "key_inversions",
    "out_of_order_partition": "inversions",
    "two_owners": "two_owners",
    "stale_owner": "stale",
}
"""Finding -> its name in the order check."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The job results for one consumer."""

    weight: Weight
    facts: ScanFacts
    judged: Judged
    names: Names
    published: Tempo
    updates: tuple[float, float] | None
    whole: bool = True
    """Whether all subjects of the stream were read; if not, effects of other subjects are legitimately unknown."""


def side(label: str, heard: Heard, words: Examples, order: str, duplicates: int) -> Side:
    """Judge one consumer; `order` and `duplicates` are the promises to check."""
    judged = heard.judged
    weight, facts = heard.weight, heard.facts
    allowed: dict[str, int | None] = {"duplicated": duplicates}
    if order != "partition":
        allowed["out_of_order_partition"] = None
    if not heard.whole:
        allowed["unknown"] = None
    done = weight.done
    ratio = round((facts.deliveries - done) / facts.deliveries, 6) if facts.deliveries else 0.0
    return Side(
        label=label,
        effects=facts.effects,
        done=done,
        dead_lettered=facts.buried,
        waiting=weight.waiting,
        redelivery_ratio=max(0.0, ratio),
        partitions=len({course.partition for course in judged.courses}),
        handoffs=sum(_handoffs(course) for course in judged.courses),
        findings=_findings(heard, words, allowed),
        latency=Percentiles.of(judged.latency),
        handler=Percentiles.of(facts.took),
        lag=lag(heard.published, judged.tempo),
        slos=slos(facts.took, max(0.0, ratio), heard.updates),
        details=Details(judged.latency, heard.published, judged.tempo, _courses(judged.courses, heard.names)),
    )


def lag(published: Tempo, done: Tempo) -> Lag | None:
    """How far effects were behind, at equally spaced moments; None when times are unknown."""
    if published.span is None or done.span is None:
        return None
    behind = lag_series(published, done, _MOMENTS)
    return Lag(float(np.percentile(behind, 50)), float(np.percentile(behind, 95)), float(behind.max()))


def lag_series(
    published: Tempo, done: Tempo, moments: int, span: tuple[int, int] | None = None
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Messages published and not done, at the end of each of a number of equal parts of the whole time."""
    start, end = span or whole(published, done)
    waiting = np.cumsum(published.between(start, end, moments)) - np.cumsum(done.between(start, end, moments))
    return np.maximum(waiting, 0.0)


def whole(published: Tempo, done: Tempo) -> tuple[int, int]:
    """The time from the first publish or effect to the last, in microseconds."""
    spans = [span for span in (published.span, done.span) if span is not None]
    if not spans:
        return 0, 1
    return min(span[0] for span in spans), max(span[1] for span in spans)


def _findings(heard: Heard, words: Examples, allowed: dict[str, int | None]) -> tuple[Finding, ...]:
    judged, weight = heard.judged, heard.weight
    counts = {"lost": weight.lost, "unknown": weight.unknown, "duplicated": heard.facts.effects - weight.done}
    for name, field in _KINDS.items():
        if name != "duplicated":
            counts[name] = sum(getattr(course, field) for course in judged.courses)
    chosen = {
        name: list(dict.fromkeys(sequence for _, sequence in judged.examples.get(kind, [])))
        for name, kind in _KINDS.items()
    }
    chosen["unknown"] = weight.examples.get("unknown", [])
    lost = weight.examples.get("lost", [])
    effect_texts = words.of_effects(sorted({sequence for found in chosen.values() for sequence in found}))
    of_lost = words.of_messages(lost)
    chosen["lost"] = lost
    return tuple(
        Finding(
            name,
            count,
            allowed.get(name, 0),
            tuple(
                (of_lost if name == "lost" else effect_texts).get(sequence, f"sequence {sequence}")
                for sequence in chosen[name]
            ),
        )
        for name, count in counts.items()
    )


def _handoffs(course: Course) -> int:
    return sum(1 for before, after in zip(course.runs, course.runs[1:], strict=False) if before.owner != after.owner)


def _courses(courses: list[Course], names: Names) -> tuple[PartitionCourse, ...]:
    made = []
    for course in courses:
        turns = (
            Turn(run.epoch, names.owners.get(run.owner, ""), run.first, run.last, run.count) for run in course.runs
        )
        faults = course.key_inversions + course.two_owners + course.stale
        made.append(
            PartitionCourse(
                "none" if course.partition == NOWHERE else names.partitions.get(course.partition, "another"),
                course.effects,
                course.latency_sum / max(1, course.effects) / 1e6,
                course.latency_max / 1e6,
                faults,
                tuple(turns),
            )
        )
    return tuple(made)

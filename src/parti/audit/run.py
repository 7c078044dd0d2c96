"""The one job of an audit: some tasks read messages and effects, others judge them, the driver adds up the results.

No data that grows with the number of messages reaches the driver: tasks return the counts of blocks of a million
messages, distributions, the history of each partition, and a few examples of each fault.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from parti.audit.assemble import Heard, side
from parti.audit.effects import COLUMNS, Names
from parti.audit.examples import Examples
from parti.audit.measures import Tempo
from parti.audit.model import Parity, Report, Side
from parti.audit.order import Judged
from parti.audit.presence import Weight
from parti.audit.scan import FACTS, JUDGED, NAMES, ROWS, TEMPO, WEIGHT, ReadEffects, ReadPublished, ScanFacts, judge
from parti.audit.sources import Effects, Published
from parti.audit.tables import Table
from parti.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS: Final = ("key", "partition")
_A_PLACE: Final = 1_000_000  # messages that one task judges when the partitions are evenly loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """What counts as a broken promise."""

    order: str = "key"
    """`key`: the effects of a key are in stream order. `partition`: those of the whole partition are."""
    duplicates: int = 0
    """Allowed repeats: planned moves make none, a crash may repeat what was in flight."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise UsageError(f"order {self.order!r}: say key or partition")
        if self.duplicates < 0:
            raise UsageError(f"{self.duplicates} duplicates cannot be allowed: say 0 or more")


def audit(
    spark: SparkSession,
    published: Published,
    effects: Effects,
    *,
    compare: Effects | None = None,
    rules: AuditRules | None = None,
    compare_rules: AuditRules | None = None,
    updates: tuple[float, float] | None = None,
) -> Report:
    """Judge effects against what was published. The range is fixed at the start: later messages do not count.

    `compare`: effects of another consumer or run, judged by `compare_rules` (default: the same rules), for parity.
    `updates`: consumer updates of the workers that made `effects`, as (succeeded, total), see `update_counts`.
    """
    began = time.perf_counter()
    first_rules = rules or AuditRules()
    promised = [first_rules, compare_rules or first_rules]
    published = published.bounded(spark)
    given = [effects] if compare is None else [effects, compare]
    tables = [one.table(spark, published) for one in given]
    sums = _run(spark, published, tables)
    sides = [
        side(
            one.label or f"effects {number + 1}",
            Heard(
                sums.weights[number],
                sums.facts[number],
                sums.judged[number],
                sums.names,
                sums.tempo,
                updates if number == 0 else None,
                whole=not published.subjects,
            ),
            Examples(spark, published, tables[number]),
            promised[number].order,
            promised[number].duplicates,
        )
        for number, one in enumerate(given)
    ]
    assert published.first is not None
    assert published.last is not None
    return Report(
        stream=published.stream,
        first=published.first,
        last=published.last,
        published=sums.weights[0].published,
        sides=tuple(sides),
        parity=_parity(sums.weights, sides) if compare is not None else None,
        seconds=round(time.perf_counter() - began, 3),
    )


@dataclass(slots=True)
class _Sums:
    """The added-up task results; lists have one entry per consumer."""

    weights: list[Weight] = field(default_factory=lambda: [Weight(), Weight()])
    facts: list[ScanFacts] = field(default_factory=lambda: [ScanFacts(), ScanFacts()])
    judged: list[Judged] = field(default_factory=lambda: [Judged(), Judged()])
    names: Names = field(default_factory=Names)
    tempo: Tempo = field(default_factory=Tempo)

    def add(self, kind: str, number: int, data: bytes) -> None:
        decode = msgspec.msgpack.decode
        if kind == WEIGHT:
            for weight, found in zip(self.weights, decode(data, type=list[Weight]), strict=True):
                weight.add(found)
        elif kind == FACTS:
            self.facts[number].add(decode(data, type=ScanFacts))
        elif kind == JUDGED:
            self.judged[number].add(decode(data, type=Judged))
        elif kind == NAMES:
            self.names.add(decode(data, type=Names))
        elif kind == TEMPO:
            self.tempo.add(decode(data, type=Tempo))


def _run(spark: SparkSession, published: Published, tables: list[Table]) -> _Sums:
    first, last = published.first or 0, published.last or 0
    places = max(int(spark.sparkContext.defaultParallelism), -(-(last - first + 1) // _A_PLACE))
    rows = published.table(spark).run(spark, ReadPublished(first, last, places), ROWS, ("sequence", "timestamp"))
    for number, table in enumerate(tables):
        task = ReadEffects(published.stream, first, last, places, number)
        rows = rows.union(table.run(spark, task, ROWS, COLUMNS))
    sums = _Sums()
    # Bounded in size, so it may be collected: see the module docstring.
    for row in rows.repartitionById(places, "place").sortWithinPartitions("low").mapInArrow(judge, ROWS).collect():
        sums.add(row["kind"], row["side"], row["data"])
    return sums


def _parity(weights: list[Weight], sides: list[Side]) -> Parity:
    first, second = (side.latency for side in sides)
    ratio = None
    if first is not None and second is not None and first.p99 > 0:
        ratio = round(second.p99 / first.p99, 3)
    examples = [
        f"sequence {sequence} only in {side.label}"
        for weight, side in zip(weights, sides, strict=True)
        for sequence in weight.examples.get("only_here", [])
    ]
    return Parity(weights[0].only_here, weights[1].only_here, ratio, tuple(examples))

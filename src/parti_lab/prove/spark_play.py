"""Plays Spark in this process: calls and copies the readers exactly as Spark's driver and executors do.

This takes milliseconds where Spark takes seconds, so hundreds of generated cases can be played; the same cases also
run on a real Spark (`spark_generated`).
"""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from structlog.testing import capture_logs

from parti.errors import DataLoss
from parti.spark.source.batch_reader import JetStreamReader
from parti.spark.source.options import SourceOptions
from parti.spark.source.stream_reader import JetStreamStreamReader
from parti.spark.source.tasks import RangePartition
from parti_lab.prove.plain_reader import Plain
from parti_lab.prove.spark_case import Case
from parti_lab.prove.spark_world import SparkWorld

SCHEMA = StructType(
    [
        StructField("sequence", LongType()),
        StructField("subject", StringType()),
        StructField("timestamp", TimestampType()),
        StructField("value", BinaryType()),
        StructField(
            "headers",
            ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
        ),
    ]
)
_TRIES = 4  # of a task, as in parti's session
_MOST_BATCHES = 3_000


@dataclass(slots=True)
class Task:
    """One task that succeeded."""

    after: int
    to: int
    began: int
    """The world's step at which its last try began."""
    open_start: bool
    """Whether it had to begin at the first message that the stream held at that time."""
    first: int
    """The first sequence that was read, or its end if none was."""


@dataclass(slots=True)
class PlayOutcome:
    """The result of a query, and the losses that it reported."""

    rows: list[Plain] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    said: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that were reported as lost, both ends included."""
    failures: list[DataLoss] = field(default_factory=list)
    tasks_follow: bool = True
    """Whether the query continued after a failure: a batch does not, and then has no result."""
    open_start: bool = True
    """Whether the query had to begin at the stream's first message; for a query without tasks."""
    tolerant: bool = False
    """Whether losses were allowed, and only reported in the logs of Spark's workers, which the proof does not read."""
    differing: int = 0
    """Batches whose replay differed although the stream had not changed."""


class Play:
    """One case, played to its end."""

    def __init__(self, case: Case, world: SparkWorld, url: str, seed: int) -> None:
        self.case = case
        self.world = world
        self.rng = random.Random(f"{seed}:{case.number}:play")
        self.outcome = PlayOutcome()
        self._steps = 0
        self._acts = list(case.reader.acts)
        self.given = starting(case, world, url, self.rng)

    def run(self) -> PlayOutcome:
        with capture_logs() as logs:
            if self.case.reader.streaming:
                self._stream()
            else:
                self._batch()
        self.world.settle()
        self.outcome.said += [
            (each["first"], each["last"]) for each in logs if each["event"] == "source.data_lost" and each["last"]
        ]
        return self.outcome

    def _step(self) -> None:
        """A moment at which the stream may change."""
        self._steps += 1
        while self._acts and self._acts[0][0] <= self._steps:
            self.world.act(self._acts.pop(0)[1])

    def _batch(self) -> None:
        options = SourceOptions.parse(self.given, streaming=False)
        reader = JetStreamReader(SCHEMA, options)
        try:
            parts = reader.partitions()
            self._range(parts)
            for part in parts:
                self.outcome.rows += self._task(reader, part)
        except DataLoss as loss:
            self.outcome.tasks_follow = False
            self.outcome.failures.append(loss)

    def _range(self, parts: list[InputPartition]) -> None:
        ranges = [part for part in parts if isinstance(part, RangePartition)]
        self.outcome.begin = min((part.after for part in ranges), default=0)
        self.outcome.end = max((part.to for part in ranges), default=0)

    def _stream(self) -> None:
        tolerant = self.given["failOnDataLoss"] == "false"
        reader = self._reader(tolerant=tolerant)
        start = reader.initialOffset()
        self.outcome.begin = start["sequence"]
        fresh, number = True, 0
        if self.case.reader.trigger == "now":
            reader.prepareForTriggerAvailableNow()
        limit = ReadAllAvailable() if self.case.reader.trigger == "once" else reader.getDefaultReadLimit()
        end: dict[str, Any] | None = None  # as in Spark's offset log: planned and not committed
        while number < _MOST_BATCHES:
            try:
                if end is None:
                    self._step()
                    found = json.loads(json.dumps(reader.latestOffset(start, limit)))
                    if found == start:
                        if not self._acts or self.case.reader.trigger != "processing":
                            break
                        continue
                    end = found
                changed = self.world.step
                rows = self._rows(reader, start, end)
                if number in self.case.reader.crashes:
                    reader = self._reader(tolerant=tolerant)
                    start = reader.initialOffset() if fresh else start
                    again = self._rows(reader, start, end, again=True)
                    self.outcome.differing += again != rows and changed == self.world.step
                    rows = again
            except DataLoss as loss:
                if tolerant:
                    raise
                self.outcome.failures.append(loss)
                tolerant = True
                reader = self._reader(tolerant=True)  # as a user would continue: the same checkpoint, losses allowed
                start = reader.initialOffset() if fresh else start
                continue
            self.outcome.rows += rows
            self.outcome.end = end["sequence"]
            reader.commit(end)
            start, end, fresh, number = end, None, False, number + 1
        self.outcome.end = max(self.outcome.end, start["sequence"])

    def _reader(self, *, tolerant: bool) -> JetStreamStreamReader:
        given = self.given | {"failOnDataLoss": str(not tolerant).lower()}
        return JetStreamStreamReader(SCHEMA, SourceOptions.parse(given, streaming=True))

    def _rows(self, reader: Any, start: Any, end: Any, *, again: bool = False) -> list[Plain]:
        parts = reader.partitions(start, end)
        remote = JetStreamStreamReader(SCHEMA, reader._options)
        return [row for part in parts for row in self._task(remote, part, again=again)]

    def _task(self, reader: Any, part: Any, *, again: bool = False) -> list[Plain]:
        """Run one task as an executor does: on copies, and again if it failed."""
        part = pickle.loads(pickle.dumps(part))  # noqa: S301 - our own data, as Spark sends it
        for left in reversed(range(_TRIES)):
            if not again:
                self._step()
            began = self.world.step
            remote = pickle.loads(pickle.dumps(reader))  # noqa: S301
            try:
                rows = self._read(remote, part)
            except DataLoss:
                if left == 0:
                    raise
                continue
            if left and self.rng.randrange(100) < self.case.reader.retries:
                continue  # the executor was lost after its work, which does not count
            self.outcome.tasks.append(
                Task(part.after, part.to, began, part.open_start, rows[0].sequence if rows else part.to + 1)
            )
            return rows
        raise AssertionError("a task has a last try")

    def _read(self, reader: Any, part: Any) -> list[Plain]:
        rows: list[Plain] = []
        for batch in reader.read(part):
            rows += plain_rows(batch)
            self._step()
        return rows


def starting(case: Case, world: SparkWorld, url: str, rng: random.Random) -> dict[str, str]:
    """The options of the case's reader, with a start within the stream's content."""
    given = {"servers": url, "stream": world.name, **case.reader.options}
    if case.reader.filtered:
        given["subjects"] = ",".join(world.filters)
    here = sorted(world.present)
    match case.reader.start:
        case "sequence" if here:
            return given | {"startingOffsets": str(rng.choice(here))}
        case "timestamp" if here:
            return given | {"startingTimestamp": str(world.ledger[rng.choice(here)].microseconds // 1_000)}
    return given | {"startingOffsets": "earliest"}


def plain_rows(batch: pa.RecordBatch | pa.Table) -> list[Plain]:
    """The rows of a data frame in the plain reader's form."""
    return [
        Plain(
            sequence=row["sequence"],
            subject=row["subject"],
            microseconds=round(row["timestamp"].timestamp() * 1e6),
            headers=tuple((entry["key"], bytes(entry["value"])) for entry in row["headers"] or ()),
            data=bytes(row["value"]),
        )
        for row in batch.to_pylist()
    ]

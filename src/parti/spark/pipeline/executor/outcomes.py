"""Outcomes as rows: how each message of a batch ended, as the columns that Spark, the audit and people read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from parti.spark.pipeline.executor.blocks import BLOCK, PARKED, completed, packed
from parti.spark.pipeline.executor.emit import Emit
from parti.spark.pipeline.executor.message import MessageRows, micros
from parti.wire.outgoing import HEADERS


class RowOutcome(StrEnum):
    """How a message ended in this batch."""

    DONE = "done"
    DEAD = "dead-lettered"
    PARKED = "parked"
    """It failed, or waits behind a failed message of its key; it is stored and comes again."""
    FAILED = "failed"
    """It failed and the policy is to stop: the batch is not committed."""
    SKIPPED = "skipped"
    """It was not tried, because another message stopped the pipeline."""


RESULTS = "results"
_RESULT: Final = pa.struct([("subject", pa.string()), ("value", pa.binary())])
_COLUMNS: Final[tuple[tuple[str, str, pa.DataType], ...]] = (
    ("stream", "string", pa.string()),
    ("sequence", "bigint", pa.int64()),
    ("subject", "string", pa.string()),
    ("partition", "int", pa.int32()),
    ("key", "string", pa.string()),
    ("outcome", "string", pa.string()),
    ("attempts", "int", pa.int32()),
    ("latency", "double", pa.float64()),
    ("took", "double", pa.float64()),
    ("error", "string", pa.string()),
    ("epoch", "bigint", pa.int64()),
    ("owner", "string", pa.string()),
    ("finished", "timestamp", pa.timestamp("us", tz="UTC")),
)
_PARKED: Final[tuple[tuple[str, str, pa.DataType], ...]] = (
    ("value", "binary", pa.binary()),
    ("timestamp", "timestamp", pa.timestamp("us", tz="UTC")),
    (
        "headers",
        "array<struct<key:string,value:binary>>",
        HEADERS,
    ),
    ("parked_until", "double", pa.float64()),
    ("parked_times", "int", pa.int32()),
    ("parked_alone", "boolean", pa.bool_()),
)
_DDL: Final = {name: kind for name, kind, _ in _COLUMNS + _PARKED}
PARKED_DDL: Final = ", ".join(f"{name} {_DDL[name]}" for name in PARKED.names)
"""The columns of parked messages, as Spark writes them."""


_COUNTS: Final[tuple[tuple[str, str, pa.DataType], ...]] = (
    ("messages", "bigint", pa.int64()),
    ("dead", "bigint", pa.int64()),
    ("parked", "bigint", pa.int64()),
    ("failed", "bigint", pa.int64()),
    ("took", "double", pa.float64()),
    ("first_failed", "string", pa.string()),
    ("due", "double", pa.float64()),
)
COUNTED: Final = tuple(name for name, _, _ in _COUNTS)


class ParkedRows(NamedTuple):
    """Why a message is parked in the checkpoint."""

    until: float = 0.0
    """Seconds since 1970."""
    times: int = 0
    """How often it was parked because of itself."""
    alone: bool = False
    """Whether later messages of its key may pass it."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How the messages of a batch ended, in numbers."""

    messages: int = 0
    dead: int = 0
    parked: int = 0
    failed: int = 0
    took: float = 0.0
    """Seconds in the handler."""
    first_failed: str | None = None
    """Sequence, subject and error of the first message that stops the pipeline."""
    due: float | None = None
    """When the first parked message may be tried again, in seconds since 1970."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Counts:
        """From a row of Spark, where a count that is missing is null."""
        numbers = {name: int(found[name] or 0) for name in ("messages", "dead", "parked", "failed")}
        return cls(**numbers, took=float(found["took"] or 0.0), first_failed=found["first_failed"], due=found["due"])

    def __add__(self, other: Counts) -> Counts:
        failures = [text for text in (self.first_failed, other.first_failed) if text]
        due = [at for at in (self.due, other.due) if at is not None]
        return Counts(
            self.messages + other.messages,
            self.dead + other.dead,
            self.parked + other.parked,
            self.failed + other.failed,
            self.took + other.took,
            min(failures, key=lambda text: int(text.partition(" ")[0]), default=None),
            min(due, default=None),
        )


@dataclass(frozen=True, slots=True)
class RowShape:
    """Which columns outcome rows have."""

    counted: bool = False
    """No sink stores the rows: one row with the `Counts` of each Arrow batch replaces them.

    Creating ten thousand outcome rows, moving them to the JVM and counting them there was a third of the batch's cost.
    """
    results: bool = False
    """With the results, for sinks on Spark's side."""
    parking: bool = False
    """With what a parked message needs to come again; together with counts, as one block of all parked messages."""

    @property
    def columns(self) -> tuple[tuple[str, str, pa.DataType], ...]:
        """Name, Spark's type, Arrow's type."""
        if self.counted:
            return (*_COUNTS, (BLOCK, "binary", pa.binary())) if self.parking else _COUNTS
        found = _COLUMNS
        if self.results:
            found += ((RESULTS, "array<struct<subject:string,value:binary>>", pa.list_(_RESULT)),)
        return found + _PARKED if self.parking else found

    @property
    def ddl(self) -> str:
        """The schema as Spark reads it."""
        return ", ".join(f"{name} {kind}" for name, kind, _ in self.columns)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(name, kind) for name, _, kind in self.columns])


class OutcomeTally:
    """The outcomes of one Arrow batch while its messages run; cheap for the usual case, done at the first attempt."""

    __slots__ = ("aside", "codes", "ended", "errors", "parked", "remaining", "results", "rows", "took", "wall")

    def __init__(self, rows: MessageRows) -> None:
        self.rows = rows
        self.remaining = len(rows)
        self.took: list[float] = [0.0] * len(rows)
        self.ended: list[float] = [0.0] * len(rows)
        """When each message was done, by `time.perf_counter`."""
        self.codes: dict[int, RowOutcome] = {}
        self.errors: dict[int, str] = {}
        self.results: dict[int, tuple[Emit, ...]] = {}
        self.parked: dict[int, ParkedRows] = {}
        """By index: messages that were parked before, and those to be parked."""
        self.aside: set[int] = set()
        """Messages to skip: they are parked alone, and nothing in this batch concerns them."""
        self.wall = time.time() - time.perf_counter()

    def __repr__(self) -> str:
        return f"<OutcomeTally {self.remaining} of {len(self.rows)} open>"

    def took_together(self, start: int, stop: int, began: float, each: float) -> None:
        """These messages were handled one by one, each in about the same time."""
        self.took[start:stop] = [each] * (stop - start)
        self.ended[start:stop] = (began + each * np.arange(1, stop - start + 1)).tolist()

    def leave_aside(self) -> None:
        """Park again the messages that wait alone and are not due yet."""
        now = time.time()
        self.aside = {index for index, parked in self.parked.items() if parked.alone and parked.until > now}
        for index in self.aside:
            self.codes[index], self.ended[index] = RowOutcome.PARKED, time.perf_counter()
        self.remaining -= len(self.aside)

    def open_from(self, start: int) -> int:
        """How many messages from this one on are to be handled."""
        return len(self.rows) - start - sum(index >= start for index in self.aside)

    def shorten(self, count: int) -> None:
        """End the batch after its first `count` messages; none of the others may have been started."""
        self.remaining -= self.open_from(count)
        self.aside = {index for index in self.aside if index < count}
        self.rows.batch = self.rows.batch.slice(0, count)
        del self.took[count:], self.ended[count:]
        self.parked = {index: found for index, found in self.parked.items() if index < count}

    def to_arrow(self, shape: RowShape) -> pa.RecordBatch:
        """All rows of the batch with their outcome, in the order they came; or one row with their counts."""
        if shape.counted:
            counts = asdict(self.counts()) | ({BLOCK: self._block()} if shape.parking else {})
            return pa.RecordBatch.from_pylist([counts], schema=shape.schema)
        columns = self._full()
        if shape.results:
            columns[RESULTS] = self._results(len(self.rows))
        if shape.parking:
            columns |= self._parking(len(self.rows))
        return pa.RecordBatch.from_arrays([columns[name] for name, _, _ in shape.columns], schema=shape.schema)

    def counts(self) -> Counts:
        """How the messages of this Arrow batch ended."""
        found = list(self.codes.values())
        failed = min((index for index, code in self.codes.items() if code is RowOutcome.FAILED), default=None)
        first = None
        if failed is not None:
            rows = self.rows
            first = f"{rows.sequences[failed]} {rows.subjects[failed]} {self.errors.get(failed, '')}"
        return Counts(
            len(self.rows),
            found.count(RowOutcome.DEAD),
            found.count(RowOutcome.PARKED),
            found.count(RowOutcome.FAILED),
            sum(self.took),
            first,
            min((self.parked[index].until for index in self._waiting()), default=None),
        )

    def _waiting(self) -> list[int]:
        """The messages that are parked when this batch ends."""
        return [index for index, code in self.codes.items() if code is RowOutcome.PARKED]

    def _block(self) -> bytes | None:
        """All parked messages, with what they need to come again."""
        waiting = sorted(self._waiting())
        if not waiting:
            return None
        batch = self.rows.batch.take(pa.array(waiting))
        until, times, alone = zip(*(self.parked[index] for index in waiting), strict=True)
        columns = {name: batch.column(name) for name in batch.schema.names if name in PARKED.names}
        columns |= {"parked_until": pa.array(until), "parked_times": pa.array(times), "parked_alone": pa.array(alone)}
        whole = completed(pa.RecordBatch.from_pydict(columns))
        return packed([whole])[0].as_py()  # type: ignore[no-any-return]

    def _outcomes(self, count: int) -> pa.Array:
        return _filled(RowOutcome.DONE.value, {index: code.value for index, code in self.codes.items()}, count)

    def _full(self) -> dict[str, pa.Array]:
        rows, batch, count = self.rows, self.rows.batch, len(self.rows)
        finished = ((np.array(self.ended) + self.wall) * 1e6).astype(np.int64)
        latency = np.maximum(finished - micros(batch), 0) / 1e6
        return {
            "stream": pa.repeat(rows.stream, count),
            "sequence": batch.column("sequence"),
            "subject": batch.column("subject"),
            "partition": batch.column("partition"),
            "key": pc.coalesce(batch.column("key"), batch.column("subject")),
            "outcome": self._outcomes(count),
            "attempts": pa.array(_numbers(1, rows.attempts, count)),
            "latency": pa.array(latency),
            "took": pa.array(np.array(self.took)),
            "error": _filled(None, self.errors, count),
            "epoch": pa.array(np.full(count, rows.epoch, dtype=np.int64)),
            "owner": pa.repeat(rows.owner, count),
            "finished": pa.array(finished).cast(pa.timestamp("us", tz="UTC")),
        }

    def _results(self, count: int) -> pa.Array:
        if not self.results:
            return pa.nulls(count, pa.list_(_RESULT))
        made: list[Any] = [None] * count
        for index, emitted in self.results.items():
            made[index] = [{"subject": one.subject, "value": one.data} for one in emitted]
        return pa.array(made, pa.list_(_RESULT))

    def _parking(self, count: int) -> dict[str, pa.Array]:
        """What a parked message needs to come again; empty for the others."""
        kept = np.zeros(count, dtype=bool)
        kept[list(self.parked)] = True
        mask = pa.array(kept)
        until = np.zeros(count)
        times = np.zeros(count, dtype=np.int32)
        alone = np.zeros(count, dtype=bool)
        for index, found in self.parked.items():
            until[index], times[index], alone[index] = found
        batch = self.rows.batch
        kinds = {name: kind for name, _, kind in _PARKED}
        columns = {"parked_until": pa.array(until), "parked_times": pa.array(times), "parked_alone": pa.array(alone)}
        for name in ("value", "timestamp", "headers"):
            whole = batch.column(name) if name in batch.schema.names else pa.nulls(count, kinds[name])
            columns[name] = pc.if_else(mask, whole, pa.scalar(None, whole.type)).cast(kinds[name])
        return columns


def _numbers(usual: int, other: dict[int, int], count: int) -> npt.NDArray[np.int32]:
    made = np.full(count, usual, dtype=np.int32)
    for index, value in other.items():
        made[index] = value
    return made


def _filled(usual: str | None, other: dict[int, str], count: int) -> pa.Array:
    if not other:
        return pa.nulls(count, pa.string()) if usual is None else pa.repeat(usual, count)
    made: list[str | None] = [usual] * count
    for index, value in other.items():
        made[index] = value
    return pa.array(made, pa.string())

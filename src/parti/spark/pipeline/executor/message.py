"""A row of an Arrow batch as the message a handler sees, without Python objects for what the handler does not read.

The worker plane fills sixteen fields of every message, which costs more than reading the message did. Here a message
is its payload and two references; other columns become Python values when a handler first reads one in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from parti.model import Lease, Partition, PartitionId
from parti.worker.message import Message

UNKNOWN = "none"
"""The partition of a subject that lacks the tokens for one."""


class MessageRows:
    """One Arrow batch of messages; each column is turned into a list at first use."""

    def __init__(self, batch: pa.RecordBatch, stream: str, epoch: int, owner: str, tasks: int = 1) -> None:
        self.batch = batch
        self.stream = stream
        self.epoch = epoch
        self.owner = owner
        self.tasks = tasks
        self.received = time.time()
        self.attempts: dict[int, int] = {}
        self.failures: dict[int, str] = {}
        self.tally: Any = None
        """Where the outcomes of these rows are recorded."""
        self._places: dict[int | None, tuple[Partition, Lease]] = {}

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __repr__(self) -> str:
        return f"<MessageRows {len(self)} of {self.stream} epoch={self.epoch}>"

    def __getattr__(self, name: str) -> Any:
        """The lists `subjects`, `keys`, `sequences`, `values`, `partitions`, `timestamps`, `headers`, `lanes`."""
        make = _LISTS.get(name)
        if make is None:
            raise AttributeError(name)
        made = make(self.batch)
        setattr(self, name, made)
        return made

    def place(self, index: int) -> tuple[Partition, Lease]:
        """The partition of a row, and the right to act on it within this epoch."""
        number = self.partitions[index]
        place = self._places.get(number)
        if place is None:
            partition = Partition((UNKNOWN if number is None else str(number),))
            place = self._places[number] = (partition, Lease(PartitionId(partition.id), self.epoch))
        return place


def _keys(batch: pa.RecordBatch) -> list[str]:
    """The key of each row; its subject, if the subject lacks the key's tokens or the payload lacks the key's field."""
    keys: list[str] = batch.column("key").to_pylist()
    if batch.column("key").null_count:
        subjects = batch.column("subject").to_pylist()
        keys = [subject if key is None else key for key, subject in zip(keys, subjects, strict=True)]
    return keys


def _headers(batch: pa.RecordBatch) -> list[Any]:
    if "headers" not in batch.schema.names:
        return [None] * batch.num_rows
    return list(batch.column("headers").to_pylist())


def _timestamps(batch: pa.RecordBatch) -> list[float]:
    return list((micros(batch) / 1e6).tolist())


def micros(batch: pa.RecordBatch) -> Any:
    """When each row was stored, in microseconds since 1970."""
    return np.asarray(batch.column("timestamp").cast(pa.int64()))


_LISTS: Mapping[str, Any] = {
    "subjects": lambda batch: batch.column("subject").to_pylist(),
    "keys": _keys,
    "sequences": lambda batch: batch.column("sequence").to_pylist(),
    "values": lambda batch: batch.column("value").to_pylist(),
    "partitions": lambda batch: batch.column("partition").to_pylist(),
    "timestamps": _timestamps,
    "headers": _headers,
}


class RowMessage(Message):
    """A message of a Spark batch. To a handler it is a `Message` like any other; it keeps its whole batch in memory."""

    __slots__ = ("index", "rows")

    rows: MessageRows
    index: int

    # Message declares slots that a worker fills; the properties below read from the batch instead.
    def __init__(self, rows: MessageRows, index: int, data: bytes) -> None:
        self.rows = rows
        self.index = index
        self.data = data  # nearly every handler reads it, and a slot is read six times faster than a property

    @property
    def attempt(self) -> int:  # type: ignore[override]
        return self.rows.attempts.get(self.index, 1)

    @property
    def last_error(self) -> str:  # type: ignore[override]
        return self.rows.failures.get(self.index, "")

    def failed(self, error: str) -> None:
        """Record that this attempt failed: the next one sees its number and the error."""
        self.rows.attempts[self.index] = self.attempt + 1
        self.rows.failures[self.index] = error

    @property
    def subject(self) -> str:  # type: ignore[override]
        return self.rows.subjects[self.index]  # type: ignore[no-any-return]

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.rows.keys[self.index]  # type: ignore[no-any-return]

    @property
    def sequence(self) -> int:  # type: ignore[override]
        return self.rows.sequences[self.index]  # type: ignore[no-any-return]

    @property
    def timestamp(self) -> float:  # type: ignore[override]
        return self.rows.timestamps[self.index]  # type: ignore[no-any-return]

    @property
    def partition(self) -> Partition:  # type: ignore[override]
        return self.rows.place(self.index)[0]

    @property
    def lease(self) -> Lease:  # type: ignore[override]
        return self.rows.place(self.index)[1]

    @property
    def delivered(self) -> int:  # type: ignore[override]
        return 0  # it came from a range read

    @property
    def received_at(self) -> float:  # type: ignore[override]
        return self.rows.received

    @property
    def worker_id(self) -> str:  # type: ignore[override]
        return self.rows.owner

    @property
    def headers(self) -> Mapping[str, str]:
        found = self.rows.headers[self.index]
        if not found:
            return {}
        return {entry["key"]: bytes(entry["value"]).decode("utf-8", "replace") for entry in found}

"""Which write a row belongs to: two writes never share an identity, and a replay of a write keeps its identity.

Spark tells a task its query and batch, but not which `save()` inside `foreachBatch` it belongs to. So writes are
counted: the first, the second, ... of a batch, in the order in which they succeed. A replayed batch counts from the
start again, and its n-th write is the n-th write of the first try. The count is stored beside the driver's block files,
in a folder that Spark creates for one application and deletes with it.

Where counting is ambiguous (a write starts while an equal one is running, in another thread or query), the write gets a
unique identity: a replay of it is stored again, and no write is ever mistaken for another.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

_FILE: Final = "parti-writes.json"
_MOST: Final = 256  # batches that are remembered: the last one of each running query


@dataclass(frozen=True, slots=True)
class WritePlace:
    """The micro-batch that a task works for."""

    query: str
    run: str
    """The query's run; a replay is another one."""
    batch: str

    @classmethod
    def of(cls, properties: Mapping[str, str | None]) -> WritePlace | None:
        """From the local properties of a task; None outside a streaming query."""
        query, batch = properties.get("sql.streaming.queryId"), properties.get("streaming.sql.batchId")
        if not query or not batch:
            return None
        return cls(query.replace("-", ""), properties.get("spark.jobGroup.id") or "", batch)

    @property
    def key(self) -> str:
        return f"{self.query} {self.run} {self.batch}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """Sent with a writer to its tasks: its identity, and how many equal writes each batch has seen before."""

    writer: str
    kind: str
    """Writes of one kind could write the same rows to the same destination."""
    alone: bool
    """Whether no other write of this kind was running when it started."""
    seen: Mapping[str, int] = field(default_factory=dict)

    def number(self, place: WritePlace) -> int | None:
        """The index of this write in its batch, from 0; None when it cannot be known."""
        return self.seen.get(place.key, 0) if self.alone else None


def kind_of(*parts: object) -> str:
    """A short hash of everything that makes writes equal."""
    return hashlib.blake2b(json.dumps([str(part) for part in parts]).encode(), digest_size=8).hexdigest()


class WriteLedger:
    """The counted writes of one Spark application, stored in a file that its planner processes share."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def __repr__(self) -> str:
        return f"<WriteLedger {self._path}>"

    @classmethod
    def of_application(cls) -> WriteLedger | None:
        """The ledger beside the driver's block files; None where Spark names no folder for the application."""
        first = Path(os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0])
        return cls(first) if first.name.startswith("blockmgr-") and first.is_dir() else None

    def begin(self, kind: str) -> Ticket:
        """A write of this kind starts; until it ends, no other write of the kind is counted."""
        writer = uuid.uuid4().hex
        with self._changed() as state:
            alone = kind not in state["open"].values()
            state["open"][writer] = kind
            seen = {key[len(kind) + 1 :]: n for key, n in state["done"].items() if key.startswith(f"{kind} ")}
        return Ticket(writer, kind, alone, seen)

    def succeeded(self, ticket: Ticket, place: WritePlace | None) -> None:
        """The write is stored: the next one of its kind in this batch is another write."""
        with self._changed() as state:
            state["open"].pop(ticket.writer, None)
            if place is None:
                return
            key = f"{ticket.kind} {place.key}"
            count = state["done"].pop(key, 0) + 1
            earlier = f"{ticket.kind} {place.query} {place.run} "
            kept = [(name, n) for name, n in state["done"].items() if not name.startswith(earlier)]
            state["done"] = dict([*kept[-_MOST:], (key, count)])

    def failed(self, ticket: Ticket) -> None:
        """The write failed: when it is retried in the same batch, it is the same write."""
        with self._changed() as state:
            state["open"].pop(ticket.writer, None)

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        with open(self._path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = _read(file)
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    text = file.read()
    found: dict[str, Any] = json.loads(text) if text else {"open": {}, "done": {}}
    return found

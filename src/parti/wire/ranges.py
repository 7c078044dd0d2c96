"""The range reader: `read (after, to] of these subjects, in order, complete`.

This is the heart of the data plane: Spark batches, take-overs, catch-up, audits and replays are all range reads. A read
ends in one of two ways: every message of the range that the stream still holds was yielded once, in order; or an
error was raised. It never ends short. That needs care, because the server gives no such promise (SPARK.md 2.4):

- a lagging replica answers "nothing more", and an expired consumer answers 404, without any error. So a range is done
  only when its last sequence was seen, or when the stream *leader* says that nothing is left below it;
- deliveries can be lost when a connection or a leader changes. So consumer sequences must be consecutive, else the
  read starts anew behind the last message that was yielded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa

from parti.backoff import Backoff
from parti.errors import ConnectionFailed, DataLoss, PartiError, TransientError, UsageError
from parti.wire.attempt import Attempt, ConsumerAttempt, DirectAttempt
from parti.wire.blocking import BlockingConnection
from parti.wire.columns import SCHEMA
from parti.wire.errors import MessageNotFound
from parti.wire.filters import SubjectFilter
from parti.wire.options import ConnectOptions

Path = Literal["auto", "consumer", "direct"]

DIRECT_BELOW = 500  # a Direct Get of few messages is quicker than creating and deleting a consumer (SPARK.md 2.3)
SELECTIVE = 0.15  # below this share of matches a filter on the server is cheaper than reading everything (SPARK.md 5)
_WAITS = Backoff(base=0.01, cap=1.0, max_tries=None)  # a lagging replica catches up within milliseconds
PATIENCE = 30.0  # seconds without any progress before a read gives up; a leader election takes up to 6


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a range read must know of its stream, as the stream's leader said it."""

    name: str
    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    created: str
    retention: str
    storage: str
    replicas: int
    allow_direct: bool
    subjects: tuple[str, ...]
    last_time: datetime | None

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> StreamState:
        config, state = info["config"], info["state"]
        last_time = state.get("last_ts", "")
        return cls(
            name=config["name"],
            first_seq=state["first_seq"],
            last_seq=state["last_seq"],
            messages=state["messages"],
            bytes=state["bytes"],
            created=info["created"],
            retention=config["retention"],
            storage=config["storage"],
            replicas=config["num_replicas"],
            allow_direct=bool(config.get("allow_direct")),
            subjects=tuple(config.get("subjects") or ()),
            last_time=None if last_time.startswith("0001") or not last_time else datetime.fromisoformat(last_time),
        )


class BehindLeader(TransientError):
    """The leader that answered does not know the range's end yet, as after an election: ask again."""


class RangeReader:
    """Reads ranges of streams over one connection, which it opens when needed and replaces when it breaks.

    For one thread at a time. `close()` may be called from any thread and ends a read that is under way.
    """

    def __init__(self, options: ConnectOptions, *, patience: float = PATIENCE, name: str = "parti-range") -> None:
        self.options = options
        self.patience = patience
        self._name = name
        self._connection: BlockingConnection | None = None
        self._closing = threading.Event()

    def __repr__(self) -> str:
        return f"<RangeReader {self._connection or 'not connected'}>"

    @property
    def connection(self) -> BlockingConnection:
        """The live connection, opened anew when there is none."""
        if self._closing.is_set():
            raise UsageError("this reader is closed: make a new one")
        if self._connection is None or self._connection.closed:
            self._connection = BlockingConnection.open(self.options, name=self._name)
        return self._connection

    def close(self) -> None:
        """End the connection and any read under way; the reader cannot be used again."""
        self._closing.set()
        if self._connection is not None:
            self._connection.close()

    def check(self) -> None:
        """After this returns the cached connection is alive: a dead one was replaced.

        A server drops a connection whose PINGs nobody answers, so one that idled for minutes may be gone.
        """
        try:
            self.connection.ping()
        except TransientError:
            self._drop()
            self.connection.ping()

    def state(self, stream: str) -> StreamState:
        """The stream's state from its leader."""
        return StreamState.from_info(self.connection.api(f"STREAM.INFO.{stream}"))

    def next_sequence(self, stream: str, at_least: int, subject: str = ">") -> int | None:
        """The first sequence >= `at_least` that holds a message of `subject`, asked of the leader; None for none."""
        try:
            answer = self.connection.api(f"STREAM.MSG.GET.{stream}", {"seq": at_least, "next_by_subj": subject})
        except MessageNotFound:
            return None
        return int(answer["message"]["seq"])

    def read(
        self,
        stream: str,
        after: int,
        to: int,
        *,
        subjects: tuple[str, ...] = (),
        columns: tuple[str, ...] = tuple(SCHEMA.names),
        path: Path = "auto",
        allow_gone: bool = False,
        created: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The messages with `after` < sequence <= `to` whose subject matches, in order, each exactly once, all of them.

        Raises DataLoss when the start of the range is no longer in the stream, unless `allow_gone`; and when `created`
        is given and the stream is not the one of that creation time, but a later one of the same name. Faults are
        retried until `patience` seconds pass without progress; then the last one is raised.
        """
        if unknown := set(columns) - set(SCHEMA.names):
            raise UsageError(f"unknown columns {sorted(unknown)}: choose from {SCHEMA.names}")
        return self._read(stream, after, to, SubjectFilter(subjects), columns, path, allow_gone, created)

    def _read(
        self,
        stream: str,
        after: int,
        to: int,
        chosen: SubjectFilter,
        columns: tuple[str, ...],
        path: Path,
        gone: bool,
        created: str | None,
    ) -> Iterator[pa.RecordBatch]:
        position = max(after, 0)  # every message up to here was yielded, or does not match, or does not exist
        waits = iter(_WAITS.delays())
        last_progress = time.monotonic()
        while position < to:
            before = position
            try:
                state = self._state_holding(stream, position, to, gone, created)
                position = max(position, min(to, state.first_seq - 1))
                if position < to:
                    with self._attempt(state, position, to, chosen, path) as attempt:
                        for deliveries in attempt.run():
                            position = attempt.position
                            if len(deliveries):
                                yield deliveries.to_arrow(columns)
                                last_progress = time.monotonic()
                    self._check_not_overtaken(state, attempt, gone)
                if position < to and self._nothing_left(stream, position, to):
                    position = to
            except PartiError as error:
                if isinstance(error, ConnectionFailed):
                    self._drop()
                impatient = time.monotonic() - last_progress > self.patience
                if not error.retriable or self._closing.is_set() or impatient:
                    raise
            if position > before:
                last_progress = time.monotonic()
                waits = iter(_WAITS.delays())
            elif position < to:
                self._closing.wait(next(waits))

    def _nothing_left(self, stream: str, position: int, to: int) -> bool:
        """Whether the leader holds no message between position and end; any message counts, matching or not."""
        following = self.next_sequence(stream, position + 1)
        return following is None or following > to

    def _state_holding(self, stream: str, position: int, to: int, gone: bool, created: str | None) -> StreamState:
        state = self.state(stream)
        if created is not None and state.created != created:
            raise DataLoss(
                f"stream {stream!r} was deleted and made anew at {state.created}: sequences {position + 1} to {to} of "
                f"the one made at {created} are gone",
                stream=stream,
                first_missing=position + 1,
                first_available=to + 1,
            )
        if state.last_seq < to:
            text = f"the range up to {to} of stream {stream!r} ends beyond its last sequence {state.last_seq}"
            raise BehindLeader(text) if state.replicas > 1 else UsageError(text)
        if state.first_seq > position + 1 and not gone and state.retention != "workqueue":
            raise _data_loss(stream, position + 1, state.first_seq)
        return state

    def _attempt(self, state: StreamState, position: int, to: int, chosen: SubjectFilter, path: Path) -> Attempt:
        connection = self.connection
        if path == "auto":
            direct = state.retention == "workqueue" or (to - position < DIRECT_BELOW and state.allow_direct)
            path = "direct" if direct else "consumer"
        if path == "direct":
            if not state.allow_direct:
                raise UsageError(
                    f"stream {state.name!r} has no allow_direct, so that ranges of it cannot be read here: "
                    f"enable it with `nats stream edit {state.name} --allow-direct`"
                )
            return DirectAttempt(connection, state.name, position, to, chosen)
        return ConsumerAttempt(connection, state.name, position, to, chosen, selective=SELECTIVE)

    def _check_not_overtaken(self, state: StreamState, attempt: Attempt, gone: bool) -> None:
        """Raise DataLoss when the stream removed messages of the range before we came to them.

        A hole in the sequences may be an old deletion or a message that aged out under our hands. It was the
        latter only if the stream's first sequence has passed the hole by now. On a work queue a hole is work done.
        """
        if gone or attempt.first_hole is None or state.retention == "workqueue":
            return
        first = self.state(state.name).first_seq
        if first > attempt.first_hole:
            raise _data_loss(state.name, attempt.first_hole, first)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _data_loss(stream: str, missing: int, first: int) -> DataLoss:
    return DataLoss(
        f"stream {stream!r} no longer holds sequence {missing}: its first is {first}, {first - missing} are gone; "
        "raise the stream's limits, read sooner, or allow the loss",
        stream=stream,
        first_missing=missing,
        first_available=first,
    )

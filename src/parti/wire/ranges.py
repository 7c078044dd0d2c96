"""The range reader: `read (after, to] of these subjects, in order, complete`.

This is the core of the data plane: Spark batches, take-overs, catch-up, audits and replays are all range reads. A read
ends in one of two ways: every message of the range that the stream still holds was yielded once, in order; or an error
was raised. It never ends short. That needs care, because the server gives no such guarantee
(docs/evidence/spark.md#s11):

- a lagging replica answers "nothing more", and an expired consumer answers 404, without any error. So a range is done
  only when its last sequence was seen, or when the stream *leader* confirms that nothing is left below it;
- a replica that lags, or lost a part of its store, omits messages, and a mirror answers Direct Get in its origin's
  name. So the leader must confirm every gap in the sequences (`witness`), and a mirror's answer is discarded;
- deliveries can be lost when a connection or a leader changes. So consumer sequences must be consecutive, else the read
  restarts after the last message that was yielded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Literal, get_args

import pyarrow as pa

from parti.backoff import FAST
from parti.errors import ConnectionFailed, DataLoss, FatalError, PartiError, TransientError, UsageError
from parti.subjects import validate_token
from parti.wire.attempt import ConsumerAttempt, DirectAttempt, LeaderAttempt, ReadAttempt, ReadInterrupted
from parti.wire.blocking import BlockingConnection
from parti.wire.columns import SCHEMA
from parti.wire.cursor import Cursor
from parti.wire.errors import MessageNotFound
from parti.wire.filters import SubjectFilter
from parti.wire.options import ConnectOptions
from parti.wire.state import StreamState
from parti.wire.stored import AnsweredElsewhere
from parti.wire.witness import OnLoss, Witness

Path = Literal["auto", "consumer", "direct"]

# a Direct Get of few messages is faster than creating and deleting a consumer (docs/evidence/spark.md#s8)
DIRECT_BELOW = 500
# below this share of matches a server-side filter is cheaper than reading everything (docs/evidence/spark.md#s19)
SELECTIVE = 0.15
_DIRECT_TRIES = 4  # Direct Gets that a mirror answers, or the leader contradicts, before another path is used
PATIENCE = 30.0  # seconds without any progress before a read gives up; a leader election takes up to 6
BEHIND = 10.0  # ... or that a leader may take to reach the range's end, before the end counts as wrong

__all__ = ["BehindLeader", "Leaderless", "Path", "RangeReader", "ReadEnded", "StreamState"]


class Leaderless(TransientError):
    """The stream has no leader now, and a replica answered from its own state: retry."""


class BehindLeader(TransientError):
    """The leader does not know the range's end yet, for example after an election: retry."""


class ReadEnded(FatalError):
    """`cancel()` or `close()` ended the read before it was complete."""


class RangeReader:
    """Reads ranges of streams over one connection, which it opens when needed and replaces when it breaks.

    For one thread at a time; only `cancel` and `close` may be called from another one.
    """

    def __init__(self, options: ConnectOptions, *, patience: float = PATIENCE, name: str = "parti-range") -> None:
        self.options = options
        self.patience = patience
        self._name = name
        self._connection: BlockingConnection | None = None
        self._side: BlockingConnection | None = None  # for requests while messages arrive on the other one
        self._closed = False
        self._cancelled = threading.Event()

    def __repr__(self) -> str:
        return f"<RangeReader {self._connection or 'not connected'}>"

    @property
    def connection(self) -> BlockingConnection:
        """The live connection, reopened if there is none."""
        if self._connection is None or self._connection.closed:
            self._connection = BlockingConnection.open(self.options, name=self._name)
        if self._closed:  # checked after opening, so that a `close` meanwhile leaves no connection open
            self._connection.close()
            raise UsageError("this reader is closed: make a new one")
        return self._connection

    def cancel(self) -> None:
        """End the current read with ReadEnded, even if it waits for the network; the reader can be used again."""
        self._cancelled.set()
        for connection in (self._connection, self._side):
            if connection is not None:
                connection.close()

    def close(self) -> None:
        """End the connection and any current read; the reader cannot be used again."""
        self._closed = True
        self.cancel()

    def check(self) -> None:
        """After this returns, the cached connection is alive: a dead one was replaced.

        A server drops a connection that does not answer PINGs, so one that was idle for minutes may be gone.
        """
        try:
            self.connection.ping()
        except ConnectionFailed:
            self.connection.ping()

    def state(self, stream: str) -> StreamState:
        """The stream's state from its leader."""
        return _state(self.connection, validate_token(stream, what="stream"))

    def next_sequence(self, stream: str, at_least: int, subject: str = ">") -> int | None:
        """The first sequence >= `at_least` with a message of `subject`, from the leader; None if there is none."""
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
        open_start: bool = False,
        on_loss: OnLoss | None = None,
    ) -> Generator[pa.RecordBatch, None, None]:
        """The messages with `after` < sequence <= `to` whose subject matches, in order, each exactly once, all of them.

        Raises DataLoss when the stream has removed messages of the range from its front before they were read, or when
        that cannot be ruled out; not on a work queue, nor where messages are removed one by one (`StreamState.loses`).
        With `on_loss` that is called instead, for each run of sequences, and the read continues; with `allow_gone`
        losses are not reported. With `open_start` the read begins at the first message present at its start: earlier
        ones are not lost. Messages deleted one by one never count as lost. With `created`, DataLoss also when the
        stream of that creation time was deleted and recreated. Faults are retried until `patience` seconds pass without
        progress; then the last one is raised.
        """
        validate_token(stream, what="stream")
        if unknown := set(columns) - set(SCHEMA.names):
            raise UsageError(f"unknown columns {sorted(unknown)}: choose from {SCHEMA.names}")
        if path not in get_args(Path):
            raise UsageError(f"unknown path {path!r}: choose from {get_args(Path)}")
        witness = Witness(
            lambda: self._ask_aside(stream, witness), allow_gone=allow_gone, open_start=open_start, on_loss=on_loss
        )
        return self._read(stream, Cursor(after, to, SubjectFilter(subjects), witness), columns, path, created)

    def _read(
        self, stream: str, cursor: Cursor, columns: tuple[str, ...], path: Path, created: str | None
    ) -> Generator[pa.RecordBatch, None, None]:
        self._cancelled.clear()
        waits = FAST.delays()
        last_progress = time.monotonic()
        refused = 0  # consecutive Direct Gets without progress
        while not cursor.done:
            before = cursor.position
            failure: PartiError = ReadInterrupted(
                f"stream {stream!r} holds messages behind {before}, but none came for {self.patience:g} s"
            )
            try:
                state = self._begin(stream, cursor, created)
                with self._attempt(state, cursor, path, refused, times="timestamp" in columns) as attempt:
                    refused = refused + 1 if isinstance(attempt, DirectAttempt) else 0
                    for deliveries in attempt.run():
                        self._raise_if_ended(stream, cursor)
                        if len(deliveries):
                            yield deliveries.to_arrow(columns)
                            last_progress = time.monotonic()
                        if cursor.loss is not None:
                            raise cursor.loss
                        if cursor.withheld is not None:
                            raise ReadInterrupted(
                                f"stream {stream!r} holds sequence {cursor.withheld}, but a replica left it out"
                            )
                if not cursor.done and self._nothing_left(state, cursor, attempt.served):
                    cursor.skip_to(cursor.to)
            except AnsweredElsewhere as error:
                failure = error
                refused = refused if cursor.position == before else 0
                if refused < _DIRECT_TRIES:  # the answering replica is random: retry at once
                    continue
            except PartiError as error:
                self._raise_if_ended(stream, cursor)
                if not error.retriable:
                    raise
                failure = error
            if cursor.position > before:
                last_progress = time.monotonic()
                waits = FAST.delays()
                refused = 0
            elif not cursor.done:
                patience = min(self.patience, BEHIND) if isinstance(failure, BehindLeader) else self.patience
                if time.monotonic() - last_progress > patience:
                    raise failure
                self._cancelled.wait(next(waits))
                self._raise_if_ended(stream, cursor)

    def _raise_if_ended(self, stream: str, cursor: Cursor) -> None:
        if self._cancelled.is_set():
            raise ReadEnded(f"the read of {stream!r} was ended at sequence {cursor.position} of {cursor.to}")

    def _nothing_left(self, state: StreamState, cursor: Cursor, served: str) -> bool:
        """Whether the leader holds no requested message between position and end.

        Only a leader that knew the range's end when the attempt began counts: a newly elected one may not know it yet.
        """
        following = self.next_sequence(state.name, cursor.position + 1, served)
        if following is not None and following <= cursor.to:
            return False
        return state.replicas == 1 or self.state(state.name).leader == state.leader

    def _begin(self, stream: str, cursor: Cursor, created: str | None) -> StreamState:
        """The stream's state before an attempt; messages gone from its front are skipped or reported."""
        state = self.state(stream)
        if created is not None and state.created != created:
            raise DataLoss(
                f"stream {stream!r} was deleted and recreated at {state.created}: sequences {cursor.position + 1} to "
                f"{cursor.to} of the one made at {created} are gone",
                stream=stream,
                first_missing=cursor.position + 1,
                first_available=cursor.to + 1,
            )
        if state.last_seq < cursor.to:
            text = f"the range up to {cursor.to} of stream {stream!r} ends beyond its last sequence {state.last_seq}"
            raise BehindLeader(text) if state.replicas > 1 else UsageError(text)
        if cursor.witness.wants_deleted(state):
            state = _state(self.connection, stream, deleted=True)
        cursor.resume()
        cursor.witness.know(state)
        cursor.begin_at(state.first_seq)
        return state

    def _ask_aside(self, stream: str, witness: Witness) -> StreamState:
        """The stream's state now, read over a separate connection: messages of the read are in transit on the other."""
        if self._side is None or self._side.closed:
            self._side = BlockingConnection.open(self.options, name=f"{self._name}-aside")
        state = _state(self._side, stream)
        return _state(self._side, stream, deleted=True) if witness.wants_deleted(state) else state

    def _attempt(self, state: StreamState, cursor: Cursor, path: Path, refused: int, *, times: bool) -> ReadAttempt:
        if path == "auto":
            small = cursor.to - cursor.position < DIRECT_BELOW and state.allow_direct and not refused
            path = "direct" if state.retention == "workqueue" or small else "consumer"
        if path == "consumer":
            return ConsumerAttempt(self.connection, state, cursor, selective=SELECTIVE, times=times)
        if not state.allow_direct:
            raise UsageError(
                f"stream {state.name!r} has no allow_direct, so that ranges of it cannot be read here: "
                f"enable it with `nats stream edit {state.name} --allow-direct`"
            )
        if refused >= _DIRECT_TRIES:
            return LeaderAttempt(self.connection, state.name, cursor)
        return DirectAttempt(self.connection, state.name, cursor)


def _state(connection: BlockingConnection, stream: str, *, deleted: bool = False) -> StreamState:
    body = {"deleted_details": True} if deleted else None
    state = StreamState.from_info(connection.api(f"STREAM.INFO.{stream}", body))
    if state.replicas > 1 and state.leader is None:
        raise Leaderless(f"stream {stream!r} has no leader now, so its end is unknown")
    return state

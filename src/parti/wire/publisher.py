"""Publishes many messages over one blocking connection: all in flight at once, each acknowledged by its stream.

When `flush` returns, the stream has stored every published row; otherwise an error is raised. Rows without an ack are
sent again with the same ids, over a new connection if needed, so that within the stream's duplicate window each is
stored once. Memory is bounded by `max_in_flight` rows (2 MiB for each thousand of them).
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parti.backoff import FAST
from parti.errors import AuthFailed, FatalError, PartiError, ProtocolError, TransientError
from parti.wire.blocking import BlockingConnection, status_of
from parti.wire.digits import Ints
from parti.wire.errors import (
    AtomicPublishDisabled,
    AtomicPublishDuplicate,
    AtomicPublishIncomplete,
    AtomicPublishUnsupportedHeader,
    NoResponder,
    StreamNotFound,
    TooManyRequests,
    api_error,
    status_error,
)
from parti.wire.filters import SubjectFilter
from parti.wire.frames import Frames, uints
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import CHUNK_ROWS, Rows, atomic_frames, check_sizes, checked, joined_bytes, single_frames
from parti.wire.replying import Replying
from parti.wire.target import Target, find_target, target_of

MAX_IN_FLIGHT = 4 * CHUNK_ROWS  # the server rejects publishes above 10,000 waiting messages per stream (10167)
PATIENCE = 30.0  # seconds without any acknowledgement before giving up; a leader election takes up to 6
_STORED = np.frombuffer(b'{"stream":"', dtype=np.uint8)


class NotAcknowledged(TransientError):
    """The stream did not confirm some messages in time; they may be stored or not. Publish them again: ids are kept."""


@dataclass(slots=True)
class PublishResult:
    """What the stream has acknowledged."""

    messages: int = 0
    duplicates: int = 0
    """Of those, the messages that the stream already held: a replay."""


class _Unit:
    """Rows sent together: which of them are not stored yet, and which of those wait for a reply."""

    def __init__(self, rows: Rows, chunk: str, first: int, *, atomic: bool) -> None:
        self.rows = rows
        self.chunk = chunk
        self.first = first
        self.atomic = atomic
        self.base = 0  # reply numbers of the last send: one per row, or first and last of an atomic batch
        self.missing = np.ones(len(rows), dtype=bool)
        self.waiting = np.zeros(len(rows), dtype=bool)

    @property
    def numbers(self) -> int:
        return 2 if self.atomic else len(self.rows)

    def answered_by(self, place: int) -> npt.NDArray[np.bool_]:
        """The rows that the reply at this place acknowledges."""
        return np.ones(len(self.rows), dtype=bool) if self.atomic else np.arange(len(self.rows)) == place

    def described(self, place: int) -> str:
        if self.atomic:
            last = self.first + len(self.rows) - 1
            return f"rows {self.first} to {last} (first to {self.rows.subject_at(0)!r}), published as one atomic batch"
        return f"row {self.first + place} to {self.rows.subject_at(place)!r}"


class Publisher(Replying):
    """Sends chunks of rows and tracks their acknowledgements; for one thread. Close it, or use it as a context."""

    def __init__(
        self,
        options: ConnectOptions,
        *,
        stream: str | None = None,
        atomic: bool = True,
        max_in_flight: int = MAX_IN_FLIGHT,
        patience: float = PATIENCE,
        name: str = "parti-publish",
        expect: tuple[str, int] | None = None,
    ) -> None:
        """`stream` makes the server refuse any subject of another one; `atomic` uses batches if the stream has them.

        `expect` is a fence: unless the last message of that subject has that sequence, the server refuses every publish
        with WrongLastSequence, atomically with storing it.
        """
        super().__init__(options, name)
        self.published = PublishResult()
        self._expected = stream
        self._constant = f"Nats-Expected-Stream: {stream}\r\n".encode() if stream else b""
        if expect is not None:
            subject, sequence = expect
            self._constant += (
                f"Nats-Expected-Last-Subject-Sequence: {sequence}\r\n"
                f"Nats-Expected-Last-Subject-Sequence-Subject: {subject}\r\n"
            ).encode()
        self._batchable: SubjectFilter | None = None  # the subjects of a stream that accepts atomic batches
        self._looked_up = not atomic
        self._window = max_in_flight
        self._patience = patience
        self._next_reply = 1
        self._units: deque[_Unit] = deque()
        self._in_flight = 0
        self._rows = 0
        self._progress = time.monotonic()
        self._waits = iter(FAST.delays())
        self._refusal: PartiError | None = None
        self._never = threading.Event()

    def __repr__(self) -> str:
        return f"<Publisher in_flight={self._in_flight} acknowledged={self.published.messages}>"

    def publish(self, rows: Rows, chunk: str) -> None:
        """Send up to 1000 rows whose ids derive from `chunk`; returns when they are sent, not when stored."""
        if not len(rows):
            return
        unit = _Unit(checked(rows, self._rows), chunk, self._rows, atomic=len(rows) > 1 and self._takes_batch(rows))
        self._rows += len(rows)
        self._drain(max(self._window - len(rows), 0))
        if not self._in_flight:
            self._progress = time.monotonic()  # patience counts from a publish with nothing in flight
        self._units.append(unit)
        self._in_flight += len(rows)
        try:
            self._send(unit)
        except TransientError as error:
            self._setback(error)

    def flush(self) -> PublishResult:
        """When this returns, every row published so far is stored."""
        self._drain(0)
        return self.published

    def _takes_batch(self, rows: Rows) -> bool:
        if not self._looked_up:
            self._looked_up = True
            target = self._target(rows.subject_at(0))
            if target is not None and target.allow_atomic:
                self._batchable = SubjectFilter(target.subjects)
        if self._batchable is None:
            return False
        return bool(self._batchable.mask(rows.subject.cast("string")).all())

    def _target(self, subject: str) -> Target | None:
        """The stream, or None without permission to ask. It waits during an outage: a guess would change the ids."""
        try:
            return find_target(self.options, stream=self._expected, subject=subject, patience=self._patience)
        except AuthFailed:
            return None

    def _send(self, unit: _Unit) -> None:
        """Send the rows of the unit that are neither stored nor in flight."""
        connection = self._connected()
        if unit.atomic or not unit.base:
            # A batch sent again gets new numbers: a late refusal of the first attempt must not count for the second. A
            # single row keeps its number, so that a late acknowledgement does count.
            unit.base, self._next_reply = self._next_reply, self._next_reply + unit.numbers
        todo = unit.missing & ~unit.waiting
        if unit.atomic:
            batch = secrets.token_hex(8)
            built = atomic_frames(unit.rows, self._inbox, unit.base, batch, unit.chunk, self._constant)
        else:
            built = single_frames(unit.rows, self._inbox, unit.base, unit.chunk, self._constant)
        check_sizes(built, unit.rows, connection.max_payload, unit.first)
        unit.waiting |= todo
        connection.send(joined_bytes(built.frames if todo.all() else built.frames.filter(todo)).to_pybytes())

    def _drain(self, limit: int) -> None:
        """Process replies until at most `limit` rows are unacknowledged."""
        while self._in_flight > limit:
            try:
                self._resend()
                self._take(self._connected().frames(self.options.request_timeout))
            except TransientError as error:
                if error is self._refusal:  # it was retried until patience ended
                    raise
                self._setback(error)

    def _resend(self) -> None:
        """Send refused and lost rows again, after a wait that grows while nothing is acknowledged."""
        late = [unit for unit in self._units if (unit.missing & ~unit.waiting).any()]
        if not late:
            return
        if self._refusal is not None and time.monotonic() - self._progress > self._patience:
            self._refusal.add_note(f"{self._in_flight} messages were tried for {self._patience:g} s")
            raise self._refusal
        self._never.wait(next(self._waits))
        for unit in late:
            self._send(unit)

    def _setback(self, error: TransientError) -> None:
        """The connection broke or is silent: every row without an ack must be sent again over a new connection."""
        self.close()
        for unit in self._units:
            unit.waiting[:] = False
        if time.monotonic() - self._progress > self._patience:
            first = self._units[0].described(0) if self._units else "nothing"
            raise NotAcknowledged(
                f"{self._in_flight} messages, from {first}, were not acknowledged within {self._patience:g} s: {error}"
            ) from error

    def _take(self, frames: Frames) -> None:
        frames = frames.select(frames.sid == self._sid)
        if not len(frames):
            return
        numbers = uints(frames.data, frames.subject_start + len(self._inbox) + 1, frames.subject_end)
        if numbers is None:
            raise ProtocolError(f"an answer came on a reply subject that we never gave: {frames.subject(0)[:200]!r}")
        stored = _is_stored(frames)
        again = stored & (frames.data[np.maximum(frames.payload_end - 2, 0)] == ord("e"))  # `"duplicate":true}`
        for unit in list(self._units):
            inside = (numbers >= unit.base) & (numbers < unit.base + unit.numbers)
            if not inside.any():
                continue
            places = numbers - unit.base
            if unit.atomic:
                self._take_atomic(unit, frames, places, inside, stored)
            else:
                before = int(unit.missing.sum())
                duplicates = int(unit.missing[places[inside & again]].sum())
                unit.missing[places[inside & stored]] = False
                unit.waiting[places[inside & stored]] = False
                self._acknowledged(before - int(unit.missing.sum()), duplicates)
                for index in np.flatnonzero(inside & ~stored):
                    self._refused(unit, int(places[index]), frames, int(index))
            if not unit.missing.any():
                self._units.remove(unit)

    def _take_atomic(
        self, unit: _Unit, frames: Frames, places: Ints, inside: npt.NDArray[np.bool_], stored: npt.NDArray[np.bool_]
    ) -> None:
        for index in np.flatnonzero(inside):
            if not unit.waiting.any():
                return  # a refused batch gets two replies: to its first message and to its commit
            if stored[index]:
                count = json.loads(frames.payload(int(index))).get("count")
                if count != len(unit.rows):
                    raise ProtocolError(f"{unit.described(0)}: the server counted {count} messages")
                self._done(unit, duplicates=0)
            elif places[index] == 1 or frames.payload(int(index)) or frames.header(int(index)):
                self._refused(unit, 0, frames, int(index))

    def _done(self, unit: _Unit, duplicates: int) -> None:
        unit.missing[:] = False
        unit.waiting[:] = False
        self._acknowledged(len(unit.rows), duplicates)

    def _acknowledged(self, rows: int, duplicates: int) -> None:
        if rows:
            self._in_flight -= rows
            self.published.messages += rows
            self.published.duplicates += duplicates
            self._progress = time.monotonic()
            self._waits = iter(FAST.delays())
            self._refusal = None

    def _refused(self, unit: _Unit, place: int, frames: Frames, index: int) -> None:
        """Raise an error that a retry cannot fix; mark other rows for a retry."""
        error = _answer_error(frames, index, unit.described(place))
        if isinstance(error, AtomicPublishDuplicate) and unit.rows.msg_id is None:
            self._done(unit, duplicates=len(unit.rows))  # one id covered all: the batch is stored as it was sent
            return
        if isinstance(error, AtomicPublishDuplicate | AtomicPublishDisabled | AtomicPublishUnsupportedHeader):
            # Some ids are known and some are not, or the stream no longer accepts batches: send them one by one.
            unit.atomic, unit.base = False, 0
            unit.waiting[:] = False
            if not isinstance(error, AtomicPublishDuplicate):
                self._batchable = None
        elif not error.retriable and not isinstance(error, AtomicPublishIncomplete):
            raise error
        elif isinstance(error, NoResponder) and self._refusal is None:
            self._check_stream_exists(unit, place)
        elif isinstance(error, TooManyRequests):
            self._window = max(CHUNK_ROWS, self._window // 2)
        self._refusal = error
        unit.waiting[:] = unit.waiting & ~unit.answered_by(place)

    def _check_stream_exists(self, unit: _Unit, place: int) -> None:
        """Distinguish a stream without a leader, which recovers, from a subject that belongs to no stream."""
        subject = unit.rows.subject_at(place)
        try:
            with BlockingConnection.open(self.options, name=self._name) as connection:
                target_of(connection, subject)
        except StreamNotFound as error:
            raise StreamNotFound(f"{unit.described(place)}: {error}", code=404) from None
        except (AuthFailed, TransientError):
            return  # unknown: patience decides


def _is_stored(frames: Frames) -> npt.NDArray[np.bool_]:
    """True where the reply is a stream's positive acknowledgement, recognised by its first bytes."""
    size = len(_STORED)
    found: npt.NDArray[np.bool_] = (frames.payload_end - frames.payload_start > size) & (
        frames.header_start == frames.payload_start
    )
    top = len(frames.data) - 1
    for offset in range(size):
        found &= frames.data[np.minimum(frames.payload_start + offset, top)] == _STORED[offset]
    return found


def _answer_error(frames: Frames, index: int, request: str) -> PartiError:
    status, description = status_of(frames.header(index))
    if status:
        return status_error(status, description, request=request)
    body = frames.payload(index)
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return FatalError(f"{request}: answered by something that is no stream: {body[:200]!r}")
    return api_error(error, request=request)

"""What a task publishes: results and dead letters, in order, each stored once.

One thread of the task publishes over one connection, chunk after chunk: the next chunk is sent when the one before is
acknowledged, so that no failure can let a later result of a key overtake an earlier one. Ids consist of pipeline,
stream and sequence: a task that runs again publishes under the same ids. With a fence every publish names the epoch
marker it relies on, and the server itself refuses those of a stale owner (docs/evidence/pipeline.md#p9).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from parti.dead_letters.format import letter_id
from parti.dead_letters.headers import MSG_ID
from parti.dead_letters.letter import letter_of
from parti.dead_letters.parts import letter_messages
from parti.errors import ConfigError
from parti.outcomes import Bury, DeadLetterReason
from parti.spark.pipeline.executor.emit import Emit
from parti.spark.pipeline.executor.message import RowMessage
from parti.spark.pipeline.executor.outcomes import RowOutcome
from parti.spark.pipeline.executor.policy import Ended
from parti.subjects import validate_subject
from parti.wire.blocking import ClosedOnExit
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import CHUNK_ROWS, HEADERS, Rows, chunk_id, chunks
from parti.wire.publisher import Publisher

_WAITING = 8  # chunks between the handlers and the publishing thread; beyond that the handlers wait
_PUBLISHER_HEADERS = 1024  # bytes of a message for the headers of fence, stream and batch
_PATIENCE = 60.0  # seconds without an acknowledgement before the task fails and is run again

Fences = Mapping[str, tuple[str, int]]
"""Stream -> (subject of its marker, sequence of the marker)."""


@dataclass(frozen=True, slots=True)
class ResultSink:
    """Results as messages of a stream."""

    connect: ConnectOptions
    stream: str
    subject: str
    """May contain {key}, {subject} and {partition} of the message the result came from."""
    fence: tuple[str, int] | None = None
    known: frozenset[str] = frozenset()
    """Ids that the stream already holds, for a batch that is replayed after the stream forgot them."""

    def fenced(self, fences: Fences) -> ResultSink:
        return replace(self, fence=fences.get(self.stream))


@dataclass(frozen=True, slots=True)
class LetterSink:
    """Messages that no handler could process, in the dead-letter stream of their stream."""

    connect: ConnectOptions
    stream: str
    """The dead-letter stream."""
    largest: int
    """The most bytes that a message of it may have, with its headers; a larger letter is stored in parts."""
    fence: tuple[str, int] | None = None

    def fenced(self, fences: Fences) -> LetterSink:
        return replace(self, fence=fences.get(self.stream))


def id_scope(name: str, stream: str, created: str) -> str:
    """The prefix of all result ids; a recreated stream counts from 1 again, and gets another prefix."""
    return f"{name}:{stream}:{zlib.crc32(created.encode()):08x}"


class TaskSinks(ClosedOnExit):
    """The publishing side of one task. `flush` returns when everything is stored; `check` raises errors."""

    def __init__(
        self,
        results: ResultSink | None,
        letters: LetterSink | None,
        *,
        pipeline: str,
        stream: str,
        created: str = "",
        scope: str = "",
    ) -> None:
        self._results = results
        self._letters = letters
        self._pipeline = pipeline
        self._stream = stream
        self._created = created
        self._scope = id_scope(scope or pipeline, stream, created)
        self._lines = {
            kind: _Line(sink.connect, sink.stream, sink.fence, f"{pipeline}-{kind}")
            for kind, sink in (("results", results), ("letters", letters))
            if sink is not None
        }

    def close(self) -> None:
        for line in self._lines.values():
            line.close()

    def emit(self, message: RowMessage, results: tuple[Emit, ...]) -> Ended | None:
        """Publish the results of a message; returns an end when one of them has no valid subject."""
        sink = self._results
        if sink is None:
            return None
        try:
            named = self.named(message, results)
        except ConfigError as error:
            return Ended(RowOutcome.DEAD, f"no subject for a result: {error}", DeadLetterReason.REJECTED)
        for number, result in enumerate(named):
            name = f"{self._scope}:{message.sequence}:{number}"
            if name not in sink.known:
                assert result.subject is not None
                self._lines["results"].put(result.subject, result.data, name, None)
        return None

    def named(self, message: RowMessage, results: tuple[Emit, ...]) -> tuple[Emit, ...]:
        """The same results, each with its subject; ConfigError when one is not valid."""
        template = self._results.subject if self._results is not None else None
        if template is None:
            return results
        return tuple(
            result
            if result.subject is not None and validate_subject(result.subject)
            else replace(result, subject=validate_subject(_fill(template, message)), more=())
            for result in results
        )

    def bury(self, message: RowMessage, end: Ended) -> None:
        """Publish a dead letter."""
        assert self._letters is not None
        letter = letter_of(message, Bury(end.reason, end.error), stream=self._stream, consumer=self._pipeline)
        identity = letter_id(letter, created=self._created, scope=self._pipeline, timestamp=message.timestamp)
        line = self._lines["letters"]
        *parts, last = letter_messages(letter, identity, self._letters.largest - _PUBLISHER_HEADERS)
        for part in parts:
            line.put(part.subject, part.data, part.headers[MSG_ID], [])
        if parts:
            line.end_chunk()  # a letter is sent when its parts are stored
        lines = [{"key": key, "value": value.encode()} for key, value in last.headers.items() if key != MSG_ID]
        line.put(last.subject, last.data, last.headers[MSG_ID], lines)

    def check(self) -> None:
        """Raise the error of the publishing thread."""
        for line in self._lines.values():
            line.check()

    def flush(self) -> None:
        """When this returns, every result and letter is stored."""
        for line in self._lines.values():
            line.flush()


def _fill(template: str, message: RowMessage) -> str:
    if "{" not in template:
        return template
    number = message.rows.partitions[message.index]
    return template.format(key=message.key, subject=message.subject, partition=number if number is not None else "none")


class _Line:
    """One ordered queue of messages to one stream, with its thread. It connects when the first message comes."""

    def __init__(self, connect: ConnectOptions, stream: str, fence: tuple[str, int] | None, name: str) -> None:
        self._connect = connect
        self._stream = stream
        self._fence = fence
        self._name = name
        self._waiting: queue.Queue[list[tuple[str, bytes, str, Any]] | None] = queue.Queue(_WAITING)
        self._filling: list[tuple[str, bytes, str, Any]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._closed = threading.Event()

    def put(self, subject: str, data: bytes, name: str, headers: Any) -> None:
        self._filling.append((subject, data, name, headers))
        if len(self._filling) >= CHUNK_ROWS:
            self.end_chunk()

    def end_chunk(self) -> None:
        """What is put later is sent when everything so far is stored."""
        if self._filling:
            self._hand_over(self._filling)
            self._filling = []

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        self.end_chunk()
        if self._thread is not None:
            self._hand_over(None)
            self._thread.join()
            self._thread = None
        self.check()

    def close(self) -> None:
        """Drop what is not published."""
        self._closed.set()
        if self._thread is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _hand_over(self, chunk: list[tuple[str, bytes, str, Any]] | None) -> None:
        self.check()
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._run, name=f"parti-{self._name}", daemon=True)
            self._thread.start()
        self._waiting.put(chunk)

    def _run(self) -> None:
        try:
            self._publish()
        except BaseException as error:  # raised again in the task's own thread
            self._error = error
            while self._next() is not None:  # else a handler could wait for room forever
                pass

    def _next(self) -> list[tuple[str, bytes, str, Any]] | None:
        """The next chunk; None at the end, and after it."""
        if self._ended:
            return None
        chunk = self._waiting.get()
        self._ended = chunk is None
        return chunk

    def _publish(self) -> None:
        with Publisher(
            self._connect,
            stream=self._stream,
            max_in_flight=CHUNK_ROWS,
            patience=_PATIENCE,
            name=self._name,
            expect=self._fence,
        ) as publisher:
            while (waiting := self._next()) is not None and not self._closed.is_set():
                for number, rows in enumerate(chunks([_rows(waiting)])):
                    publisher.publish(rows, chunk_id(self._name, number, rows))
                    publisher.flush()  # it would send several chunks of less than CHUNK_ROWS at once


def _rows(chunk: list[tuple[str, bytes, str, Any]]) -> Rows:
    subjects, data, names, headers = zip(*chunk, strict=True)
    return Rows(
        value=pa.array(data, pa.binary()),
        subject=pa.array([subject.encode() for subject in subjects], pa.binary()),
        headers=None if headers[0] is None else pa.array(headers, HEADERS),
        msg_id=pa.array([name.encode() for name in names], pa.binary()),
    )

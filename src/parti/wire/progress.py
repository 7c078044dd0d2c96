"""Publishes chunks of rows exactly once, even if repeated: each chunk moves a marker in its own atomic batch.

The marker is a message of the same stream on the writer's own subject. It names the chunk stored last, and the server
stores a chunk only while the marker is the one that the writer has seen. So a chunk is stored with its marker or not at
all, a repeated chunk finds that the marker already covers it, and of two writers at the same chunk one is refused and
finds the other's marker. No duplicate window is involved.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from parti.backoff import FAST
from parti.errors import FatalError, PartiError, ProtocolError, TransientError
from parti.observe.logs import get_logger
from parti.wire.blocking import status_of
from parti.wire.errors import (
    AtomicPublishIncomplete,
    MessageNotFound,
    WrongLastSequence,
    api_error,
    status_error,
)
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import OutgoingFrames, Rows, build, check_sizes, checked, joined_bytes
from parti.wire.publisher import NotAcknowledged, PublishResult
from parti.wire.replying import Replying

PROGRESS_ROWS = 999  # the marker is the thousandth message of the server's largest batch

log = get_logger("wire.progress")


class RowsChanged(FatalError):
    """A repeated write has other rows, or the same in another order: make the order deterministic (sort the rows)."""


@dataclass(frozen=True, slots=True)
class Marker:
    """The progress of a writer: the last stored chunk of a step, and the digest of all chunks of the step up to it."""

    sequence: int
    step: int = -1
    chunk: int = -1
    digest: str = ""

    def covers(self, step: int, chunk: int) -> bool:
        return (self.step, self.chunk) >= (step, chunk)


class ProgressPublisher(Replying):
    """Stores the chunks of one step, one after the other; for one thread. Close it, or use it as a context."""

    def __init__(
        self, options: ConnectOptions, *, stream: str, subject: str, step: int, patience: float, name: str
    ) -> None:
        """`subject` is the marker's; `step` increases with everything that this writer ever writes."""
        super().__init__(options, name)
        self.published = PublishResult()
        self._stream = stream
        self._subject = subject
        self._step = step
        self._patience = patience
        self._replies = 0
        self._marker: Marker | None = None
        self._chain = hashlib.blake2b(digest_size=16)
        self._chunk = 0
        self._rows = 0
        self._deadline = 0.0
        self._never = threading.Event()

    def __repr__(self) -> str:
        return f"<ProgressPublisher {self._subject} step={self._step} chunk={self._chunk}>"

    def publish(self, rows: Rows, chunk: str) -> None:
        """When this returns, the rows are stored, by this call or by an earlier one; `chunk` names their content."""
        rows = checked(rows, self._rows)
        self._chain.update(chunk.encode())
        self._deadline = time.monotonic() + self._patience
        waits = iter(FAST.delays())
        trouble: PartiError | None = None
        while True:
            try:
                if self._marker is None:
                    self._marker = self._read()
                if self._marker.covers(self._step, self._chunk):
                    self._check_same(self._marker)
                    self.published.duplicates += len(rows)
                    break
                self._marker = self._store(rows, self._marker)
                break
            except (WrongLastSequence, AtomicPublishIncomplete, TransientError) as error:
                trouble = error
            self._marker = None  # another writer may have moved it, or the reply was lost: read it before the retry
            if time.monotonic() > self._deadline:
                raise NotAcknowledged(
                    f"rows {self._rows} to {self._rows + len(rows) - 1} were not stored within {self._patience:g} s: "
                    f"{trouble}"
                ) from trouble
            self._never.wait(next(waits))
        self.published.messages += len(rows)
        self._chunk += 1
        self._rows += len(rows)

    def flush(self) -> PublishResult:
        """Remove all markers but the last; every `publish` call is already acknowledged."""
        if self._chunk and self._connection is not None:
            try:
                self._connection.api(f"STREAM.PURGE.{self._stream}", {"filter": self._subject, "keep": 1})
            except PartiError as error:  # only the last marker counts, however many there are
                log.warning("progress.markers_kept", subject=self._subject, error=str(error))
        return self.published

    def _read(self) -> Marker:
        """The marker from the stream's leader; never by Direct Get, which a lagging replica may answer."""
        try:
            found = self._connected().api(f"STREAM.MSG.GET.{self._stream}", {"last_by_subj": self._subject})["message"]
        except MessageNotFound:
            return Marker(0)
        body = json.loads(base64.b64decode(found["data"]))
        return Marker(int(found["seq"]), int(body["step"]), int(body["chunk"]), str(body["digest"]))

    def _check_same(self, marker: Marker) -> None:
        if (marker.step, marker.chunk) == (self._step, self._chunk) and marker.digest != self._chain.hexdigest():
            raise RowsChanged(
                f"step {self._step} of {self._subject} was stored with other rows up to chunk {self._chunk} than it "
                "has now: sort the rows, or read them from the same partitions as before"
            )

    def _store(self, rows: Rows, marker: Marker) -> Marker:
        connection = self._connected()
        self._replies += 1
        reply = f"{self._inbox}.{self._replies}"
        body = {"step": self._step, "chunk": self._chunk, "digest": self._chain.hexdigest()}
        frames = progress_frames(rows, reply, self._stream, self._subject, marker.sequence, body)
        check_sizes(frames, rows, connection.max_payload, self._rows)
        connection.send(joined_bytes(frames.frames).to_pybytes())
        while True:
            found = connection.frames(self.options.request_timeout)
            found = found.select(found.sid == self._sid)
            for index in range(len(found)):
                if found.subject(index) != reply.encode() or not (found.payload(index) or found.header(index)):
                    continue  # a reply to an earlier attempt, or the empty one to a batch's first message
                sequence = self._answer(found.header(index), found.payload(index), len(rows))
                return Marker(sequence, self._step, self._chunk, self._chain.hexdigest())

    def _answer(self, header: bytes, body: bytes, rows: int) -> int:
        request = f"rows {self._rows} to {self._rows + rows - 1} and their marker {self._subject}"
        status, description = status_of(header)
        if status:
            raise status_error(status, description, request=request)
        answer = json.loads(body)
        if (error := answer.get("error")) is not None:
            raise api_error(error, request=request)
        if answer.get("count") != rows + 1:
            raise ProtocolError(f"{request}: the server counted {answer.get('count')} messages")
        return int(answer["seq"])


def progress_frames(
    rows: Rows, reply: str, stream: str, subject: str, expected: int, body: dict[str, object]
) -> OutgoingFrames:
    """The rows followed by the marker, as one atomic batch that is refused unless the marker is at `expected`."""
    marker = Rows(
        value=pa.array([json.dumps(body).encode()], pa.binary()),
        subject=pa.array([subject.encode()], pa.binary()),
        headers=None if rows.headers is None else pa.nulls(1, rows.headers.type),
    )
    count = len(rows) + 1
    fixed = f"Nats-Expected-Stream: {stream}\r\nNats-Batch-Id: {secrets.token_hex(8)}\r\nNats-Batch-Sequence: "
    extra = [f"{fixed}{number}\r\n".encode() for number in range(1, count + 1)]
    extra[-1] += f"Nats-Expected-Last-Subject-Sequence: {expected}\r\nNats-Batch-Commit: 1\r\n".encode()
    replies = np.full(count, b"", dtype=object)
    replies[0] = replies[-1] = reply.encode()
    return build(rows.joined(marker), pa.array(replies, pa.binary()), pa.array(extra, pa.binary()))

"""One attempt at a range: deliver what one consumer, or Direct Get, has of it, and say how far it got.

An attempt may end early, never wrongly: whatever lies at or below its `position` was delivered in order, or does not
match, or was not in the stream. Whether anything is left behind `position` is for the range reader to find out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np

from parti.errors import ConnectionFailed, RequestTimeout, TransientError
from parti.wire.blocking import BlockingConnection, status_of
from parti.wire.columns import Deliveries, consumer_deliveries, direct_deliveries, is_delivery
from parti.wire.errors import status_error
from parti.wire.filters import SubjectFilter

_PULLS = 2  # the server fills one while we parse the other
_PULL_BATCH = 20_000
_IN_FLIGHT = 16 << 20  # bytes; beyond it the server may cut us off as a slow consumer (SPARK.md 2.3)
_DIRECT_BATCH = 512  # publishers wait while a batch is read: p99 4 ms at 256, 15 ms at 2,000 (SPARK.md 2.3)
_DIRECT_BYTES = 1 << 20
_STALL = 5.0  # seconds without a byte although an answer is due; then the connection is taken for dead
_IDLE = 30.0  # seconds after which the server removes a consumer that a crashed reader left behind


class ReadInterrupted(TransientError):
    """The consumer or its leader is gone, or a delivery was lost: read on behind the last position."""


class Attempt:
    """Base of both paths: keeps the position, trims to the range, filters, and notices holes."""

    def __init__(
        self, connection: BlockingConnection, stream: str, position: int, to: int, chosen: SubjectFilter
    ) -> None:
        self.connection = connection
        self.stream = stream
        self.position = position
        self.first_hole: int | None = None
        """The first sequence of the range that did not come: deleted, or aged out; None when there is no hole."""
        self._to = to
        self._chosen = chosen
        self._inbox = f"{connection.options.inbox_prefix}.{uuid4().hex}"
        self._sid = connection.subscribe(f"{self._inbox}.*")

    def run(self) -> Iterator[Deliveries]:
        """The messages of the range in order, batch by batch; each batch is valid until the next is asked for."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the connection clean: leftovers of a pull would break the next read on it (SPARK.md 2.4)."""
        if not self.connection.closed:
            self.connection.unsubscribe(self._sid)

    def _call(self, subject: str, body: dict[str, Any], token: str) -> None:
        self.connection.publish(
            f"{self.connection.options.js_prefix}.{subject}", json.dumps(body).encode(), f"{self._inbox}.{token}"
        )

    def _accept(self, deliveries: Deliveries) -> Deliveries:
        """The part of a batch that belongs to the range and matches; moves the position past all of it."""
        sequence = deliveries.stream_seq
        if len(sequence) == 0:
            return deliveries
        if self.first_hole is None:
            steps = np.diff(sequence, prepend=self.position)
            if (steps != 1).any():
                index = int(np.argmax(steps != 1))
                self.first_hole = int(sequence[index - 1] if index else self.position) + 1
        self.position = min(int(sequence[-1]), self._to)
        if sequence[-1] > self._to:
            deliveries = deliveries.select(sequence <= self._to)
        if self._chosen.matches_all or not len(deliveries):
            return deliveries
        return deliveries.select(self._chosen.mask(deliveries.subjects()))

    def _stalled(self, error: RequestTimeout) -> ConnectionFailed:
        self.connection.close()
        return ConnectionFailed(f"reading {self.stream!r} from {self.connection.address} stalled: {error}")


class ConsumerAttempt(Attempt):
    """Through an ephemeral pull consumer without acks, kept in memory: the fast path, for limits and interest."""

    def __init__(
        self,
        connection: BlockingConnection,
        stream: str,
        position: int,
        to: int,
        chosen: SubjectFilter,
        *,
        selective: float,
    ) -> None:
        super().__init__(connection, stream, position, to, chosen)
        self._consumer = ""
        self._next = 1  # the consumer sequence that must come next
        self._pulls: dict[str, int] = {}  # inbox token -> messages still to come
        self._asked = 0
        one = chosen.patterns[0] if len(chosen.patterns) == 1 and not chosen.matches_all else None
        if one is None or not self._create(one) < selective:
            if one is not None:
                self._delete()
            self._create(None)

    def _create(self, subject: str | None) -> float:
        """Create the consumer; returns the share of the stream's remaining messages that it will deliver."""
        self._consumer = f"parti-range-{uuid4().hex}"
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.position + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "max_waiting": 4 * _PULLS,
            "mem_storage": True,
            "inactive_threshold": int(_IDLE * 1e9),
        }
        if subject:
            config["filter_subject"] = subject
        answer = self.connection.api(
            f"CONSUMER.CREATE.{self.stream}.{self._consumer}" + (f".{subject}" if subject else ""),
            {"stream_name": self.stream, "config": config, "action": "create"},
        )
        return int(answer["num_pending"]) / max(self._to - self.position, 1)

    def _delete(self) -> None:
        # No answer is awaited: if this gets lost the server removes the consumer after `inactive_threshold`.
        self.connection.publish(f"{self.connection.options.js_prefix}.CONSUMER.DELETE.{self.stream}.{self._consumer}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.connection.closed:
            self._delete()
        super().__exit__(kind, error, trace)

    def run(self) -> Iterator[Deliveries]:
        while self.position < self._to:
            self._pull()
            try:
                frames = self.connection.frames(_STALL)
            except RequestTimeout as error:
                raise self._stalled(error) from error
            frames = frames.select(frames.sid == self._sid)
            data = is_delivery(frames)
            deliveries = consumer_deliveries(frames.select(data))
            good = self._consecutive(deliveries)
            intact = good == len(deliveries)
            if not intact:
                deliveries = deliveries.select(np.arange(len(deliveries)) < good)
            self._count(len(deliveries))
            dry = len(deliveries) > 0 and deliveries.pending[-1] == 0
            yield self._accept(deliveries)
            if not intact:
                raise ReadInterrupted(f"a delivery of stream {self.stream!r} was lost behind sequence {self.position}")
            statuses = frames.select(~data)
            for index in range(len(statuses)):
                dry |= self._status(statuses.subject(index), statuses.header(index))
            if dry:
                return

    def _pull(self) -> None:
        while len(self._pulls) < _PULLS:
            wanted = self._to - self.position - sum(self._pulls.values())
            if wanted <= 0:
                return
            self._asked += 1
            batch = min(wanted, _PULL_BATCH)
            self._pulls[str(self._asked)] = batch
            limit = max(_IN_FLIGHT // _PULLS, 2 * self.connection.max_payload)  # a single message must always fit
            body = {"batch": batch, "max_bytes": limit, "no_wait": True}
            self._call(f"CONSUMER.MSG.NEXT.{self.stream}.{self._consumer}", body, str(self._asked))

    def _consecutive(self, deliveries: Deliveries) -> int:
        """How many messages from the first on have the consumer sequence that must come next."""
        sequence = deliveries.consumer_seq
        expected = np.arange(self._next, self._next + len(sequence))
        wrong = sequence != expected
        good = int(np.argmax(wrong)) if wrong.any() else len(sequence)
        self._next += good
        return good

    def _count(self, received: int) -> None:
        """Book the messages on the oldest pulls; the server fills them in order."""
        for token in list(self._pulls):
            taken = min(received, self._pulls[token])
            self._pulls[token] -= taken
            received -= taken
            if not self._pulls[token]:
                del self._pulls[token]

    def _status(self, subject: bytes, header: bytes) -> bool:
        """Note that a pull ended; True when the server has nothing more to deliver."""
        status, description = status_of(header)
        if status in (100, 0):
            return False
        self._pulls.pop(subject.decode().rpartition(".")[2], None)
        if status in (404, 408):
            return not self._pulls
        if status == 409 and ("Batch Completed" in description or "MaxBytes" in description):
            return False
        error = status_error(status, description, request=f"pull from {self._consumer}")
        if status in (409, 503):
            raise ReadInterrupted(f"reading stream {self.stream!r} was interrupted: {description or status}") from error
        raise error


class DirectAttempt(Attempt):
    """Through batch Direct Get: for work queues, which allow no second consumer, and for small ranges."""

    def run(self) -> Iterator[Deliveries]:
        asked = 0
        while self.position < self._to:
            asked += 1
            batch = min(self._to - self.position, _DIRECT_BATCH)
            body = {"seq": self.position + 1, "batch": batch, "max_bytes": _DIRECT_BYTES}
            self._call(f"DIRECT.GET.{self.stream}", body, str(asked))
            before = self.position
            ended = False
            while not ended and self.position < self._to:
                try:
                    frames = self.connection.frames(_STALL)
                except RequestTimeout as error:
                    raise self._stalled(error) from error
                frames = frames.select(frames.sid == self._sid)
                deliveries, statuses = direct_deliveries(frames)
                yield self._accept(deliveries)
                for index in statuses:
                    ended |= self._status(frames.header(index))
            if self.position == before:
                return

    def _status(self, header: bytes) -> bool:
        status, description = status_of(header)
        if status in (204, 404):
            return True
        error = status_error(status, description, request=f"Direct Get on {self.stream!r}")
        if status in (408, 409, 412, 429, 503):
            raise ReadInterrupted(f"reading stream {self.stream!r} was interrupted: {description or status}") from error
        raise error

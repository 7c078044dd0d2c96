"""One attempt to read a range: yields what one consumer, or Direct Get, has of it, and advances the cursor.

An attempt may end early, but never yields wrong data. The range reader checks whether anything is left to read.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from secrets import token_hex
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np

from parti.errors import ConnectionFailed, RequestTimeout, TransientError
from parti.wire.blocking import BlockingConnection, status_of
from parti.wire.columns import Deliveries, consumer_deliveries, direct_deliveries, is_delivery
from parti.wire.cursor import Cursor
from parti.wire.errors import BatchCompleted, MessageExceedsMaxBytes, MessageNotFound, status_error
from parti.wire.frames import Frames, scan
from parti.wire.state import StreamState
from parti.wire.stored import parse_time
from parti.wire.witness import LISTED

_PLACE, _COUNT, _TIME = 1, 2, 3  # rows of `Deliveries.numbers`: the two sequences, and the storage time
_PULL_BATCH = 32_000
_WAITING = 8  # max_waiting of the consumer; at most two pulls are outstanding
# bytes of two pulls; far above it the server disconnects us as a slow consumer (docs/evidence/spark.md#s10)
_IN_FLIGHT = 16 << 20
_ENVELOPE = 64 << 10  # subject, reply and header lines around the largest payload
# publishers wait while a batch is read: p99 4 ms at 256, 15 ms at 2,000 (docs/evidence/spark.md#s9)
_DIRECT_BATCH = 512
_DIRECT_BYTES = 1 << 20
_STALL = 2.0  # seconds without a byte while a reply is due; then the server is pinged
_STALLS = 5  # ... and after this many in a row a new consumer is tried
_AFTERMATH = 0.05  # seconds to wait for deliveries that a "no more messages" status overtook
_PLACINGS = 8  # tries to place a consumer on the stream leader's server; each has a 1 in 3 chance with 3 servers
_DEAR_PLACINGS = 2  # ... on an interest stream, where each consumer is replicated
_LEADER_BATCH = 256  # messages read one by one from the leader before Direct Get is tried again
_IDLE = 30.0  # seconds after which the server removes a consumer that a crashed reader left behind
_LAST_SEQUENCE = re.compile(rb"\r\nNats-Last-Sequence: (\d+)\r\n")
_PENDING_MESSAGES = re.compile(rb"\r\nNats-Pending-Messages: (\d+)\r\n")


class ReadInterrupted(TransientError):
    """The consumer or its leader is gone, or a delivery was lost: continue after the last position."""


class ReadAttempt(ABC):
    """Base of all paths: a separate inbox, liveness checks of the server, and a clean connection afterwards."""

    def __init__(self, connection: BlockingConnection, stream: str, cursor: Cursor) -> None:
        self.connection = connection
        self.stream = stream
        self.cursor = cursor
        self.served = ">"
        """The subjects requested from the server; messages of other subjects are not seen."""
        self._inbox = f"{connection.options.inbox_prefix}.{uuid4().hex}"
        self._sid: int | None = None
        self._stalls = 0

    @abstractmethod
    def run(self) -> Iterator[Deliveries]:
        """Yields the messages of the range in order, batch by batch; a batch is valid until the next is requested."""

    def __enter__(self) -> Self:
        self._sid = self.connection.subscribe(f"{self._inbox}.*")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the connection clean, or closed: leftovers of a pull would break the next read.

        See docs/evidence/spark.md#s12.
        """
        with contextlib.suppress(ConnectionFailed):  # then it is closed; what it read before is valid
            if self._sid is not None and not self.connection.closed:
                self._leave(self._sid)

    def _leave(self, sid: int) -> None:
        self.connection.unsubscribe(sid)

    def _call(self, subject: str, body: dict[str, Any], token: str) -> None:
        self.connection.publish(
            f"{self.connection.options.js_prefix}.{subject}", json.dumps(body).encode(), f"{self._inbox}.{token}"
        )

    def _frames(self) -> Frames:
        """The next frames of this attempt, maybe none; raises when the server does not respond."""
        try:
            frames = self.connection.frames(_STALL, self._bytes_due())
        except RequestTimeout:
            frames = self._sign_of_life()
        frames = frames.select(frames.sid == self._sid)
        if len(frames):
            self._stalls = 0
        return frames

    def _bytes_due(self) -> int:
        """Estimate, slightly low, of the message bytes still to arrive."""
        return 0

    def _sign_of_life(self) -> Frames:
        self._stalls += 1
        if self._stalls > _STALLS:
            raise ReadInterrupted(f"nothing of stream {self.stream!r} came for {self._stalls * _STALL:g} s")
        self.connection.probe()
        try:
            return self.connection.frames(self.connection.options.request_timeout)
        except RequestTimeout as error:
            self.connection.close()
            raise ConnectionFailed(
                f"reading {self.stream!r} from {self.connection.address} stalled: {error}"
            ) from error

    def _interrupted(self, status: int, description: str) -> ReadInterrupted:
        return ReadInterrupted(f"reading stream {self.stream!r} was interrupted: {description or status}")


class ConsumerAttempt(ReadAttempt):
    """Reads through an ephemeral in-memory pull consumer without acks: the fast path, for limits and interest."""

    def __init__(
        self, connection: BlockingConnection, state: StreamState, cursor: Cursor, *, selective: float, times: bool
    ) -> None:
        """`selective`: if a filter matches a smaller share of the stream than this, the server applies it.

        Without `times` the deliveries have no times.
        """
        super().__init__(connection, state.name, cursor)
        self._numbers = (_PLACE, _TIME) if times else (_PLACE,)
        self._last_seq = state.last_seq
        self._selective = selective
        self._leader = state.leader if state.replicas > 1 else None
        self._unlisted = state.num_deleted > LISTED
        self._placings = _PLACINGS if state.retention == "limits" else _DEAR_PLACINGS
        self._server: str | None = None
        self._consumer = ""
        self._next = 1  # the expected next consumer sequence
        self._pulls: dict[str, int] = {}  # inbox token -> batch of the latest pulls
        self._asked = 0
        self._due = 0  # messages requested and not yet received
        self._sated = False  # the server reported that it has no more to send
        half = _IN_FLIGHT // 2
        self._limit = max(half, connection.max_payload + _ENVELOPE)  # a single message must always fit
        self._average = state.bytes // max(state.messages, 1) + 1
        self._batch = max(1, min(_PULL_BATCH, half // self._average))
        self._ask_at = self._batch // 2 if self._limit <= half + _ENVELOPE else 0

    def run(self) -> Iterator[Deliveries]:
        self._choose()
        while not self.cursor.done:
            self._pull()
            try:
                frames = self._overtaken() if self._sated else self._frames()
            except RequestTimeout:
                return
            data = is_delivery(frames)
            deliveries = consumer_deliveries(frames.select(data), self._numbers)
            good = self._consecutive(deliveries)
            intact = good == len(deliveries)
            if not intact:
                deliveries = deliveries.select(np.arange(len(deliveries)) < good)
            self._due -= len(deliveries)
            dry = len(deliveries) > 0 and deliveries.pending_behind_last() == 0
            yield self.cursor.accept(deliveries, filtered=self.served != ">")
            if not intact:
                raise ReadInterrupted(f"a delivery of {self.stream!r} was lost behind sequence {self.cursor.position}")
            statuses = frames.select(~data)
            for index in range(len(statuses)):
                self._status(statuses.subject(index), statuses.header(index))
            if dry or (self._sated and self._due <= 0):
                return

    def _choose(self) -> None:
        """Create the consumer, with a server-side filter only where that is cheaper.

        See docs/evidence/spark.md#s19.
        """
        chosen = self.cursor.chosen
        if len(chosen.patterns) == 1 and not chosen.matches_all:
            matching = self._create(chosen.patterns[0])
            if matching < self._selective * (self._last_seq - self.cursor.position) and self._led(chosen.patterns[0]):
                self.served = chosen.patterns[0]
                return
            self._delete()
        self._create(None)
        if self._unlisted:
            self._led(None)

    def _led(self, subject: str | None) -> bool:
        """Recreate the consumer until it runs on the stream leader's server; returns whether it does.

        The server places it on any replica. A replica that lacks messages leaves gaps. With a server-side filter, or
        with too many deletions to list, these gaps look the same as messages that are legitimately absent.
        """
        for _ in range(self._placings):
            if self._leader is None or self._server == self._leader:
                return True
            self._delete()
            self._create(subject)
        return self._server == self._leader

    def _create(self, subject: str | None) -> int:
        """Create the consumer; returns how many messages it will deliver up to the stream's end."""
        self._consumer = f"parti-range-{token_hex(6)}"  # each delivery repeats it: 32 digits were 10 % of the bytes
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self.cursor.position + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "max_waiting": _WAITING,
            "mem_storage": True,
            "inactive_threshold": int(_IDLE * 1e9),
        }
        if subject:
            config["filter_subject"] = subject
        answer = self.connection.api(
            f"CONSUMER.CREATE.{self.stream}.{self._consumer}" + (f".{subject}" if subject else ""),
            {"stream_name": self.stream, "config": config, "action": "create"},
        )
        self._server = (answer.get("cluster") or {}).get("leader")
        return int(answer["num_pending"])

    def _delete(self) -> None:
        # No reply is awaited: if this gets lost, the server removes the consumer after `inactive_threshold`.
        self.connection.publish(f"{self.connection.options.js_prefix}.CONSUMER.DELETE.{self.stream}.{self._consumer}")

    def _leave(self, sid: int) -> None:
        if self._consumer:
            self._delete()
        super()._leave(sid)

    def _pull(self) -> None:
        """Pull again when half of a pull is left. The server alternates between pulls; at most two are outstanding."""
        while self._due <= self._ask_at and not self._sated:
            batch = min(self.cursor.to - self.cursor.position - self._due, self._batch)
            if batch <= 0:
                return
            self._asked += 1
            self._pulls[str(self._asked)] = batch
            self._pulls.pop(str(self._asked - _WAITING), None)
            self._due += batch
            body = {"batch": batch, "max_bytes": self._limit, "no_wait": True}
            self._call(f"CONSUMER.MSG.NEXT.{self.stream}.{self._consumer}", body, str(self._asked))

    def _bytes_due(self) -> int:
        return self._due * self._average

    def _overtaken(self) -> Frames:
        frames = self.connection.frames(_AFTERMATH)
        return frames.select(frames.sid == self._sid)

    def _consecutive(self, deliveries: Deliveries) -> int:
        """How many messages, from the first on, have consecutive consumer sequences.

        Consumer sequences have no gap where stream sequences have none; so they are read from the first gap on only.
        """
        count = len(deliveries)
        if _COUNT not in self._numbers:
            if np.array_equal(
                deliveries.stream_seq, np.arange(self.cursor.position + 1, self.cursor.position + 1 + count)
            ):
                self._next += count
                return count
            self._numbers = (*self._numbers, _COUNT)
            deliveries = consumer_deliveries(deliveries.frames, (_COUNT,))
        wrong = deliveries.consumer_seq != np.arange(self._next, self._next + count)
        good = int(np.argmax(wrong)) if wrong.any() else count
        self._next += good
        return good

    def _status(self, subject: bytes, header: bytes) -> None:
        """Record that a pull ended before it was filled."""
        status, description = status_of(header)
        if status in (100, 0):
            return
        batch = self._pulls.pop(subject.decode().rpartition(".")[2], 0)
        error = status_error(status, description, request=f"pull from a consumer of {self.stream!r}")
        match status:
            case 404:
                self._sated = True
            case 408:  # refused at once: earlier pulls take all messages
                self._sated = True
                self._due -= batch
            case 409 if isinstance(error, BatchCompleted | MessageExceedsMaxBytes):
                unfilled = _pending_messages(header)
                if unfilled == batch and isinstance(error, MessageExceedsMaxBytes):
                    raise error  # the next message alone is too large: retrying would never end
                self._due -= unfilled
            case 409 | 503:
                raise self._interrupted(status, description) from error
            case _:
                raise error


def _pending_messages(header: bytes) -> int:
    found = _PENDING_MESSAGES.search(header)
    return int(found[1]) if found else 0


class DirectAttempt(ReadAttempt):
    """Reads through batch Direct Get: for work queues, which allow no second consumer, and for small ranges.

    Every replica answers it, and so does every mirror of the stream, in the stream's name (`mirror_direct`, which the
    server sets by itself). A mirror's answer is refused: it may be filtered, and deletions never reach a mirror.
    """

    def run(self) -> Iterator[Deliveries]:
        cursor = self.cursor
        self._ask(cursor.position + 1)
        while not cursor.done:
            frames = self._frames()
            following = self._following(frames)
            if following is not None and following <= cursor.to:
                self._ask(following)  # before parsing, so that the server reads the next batch meanwhile
            deliveries, statuses = direct_deliveries(frames, self.stream.encode())
            yield cursor.accept(deliveries)
            ended = False
            for index in statuses:
                ended |= self._ends(frames.header(index))
            if ended and following is None:
                return
            if following is not None and following != cursor.position + 1 and not cursor.done:
                raise ReadInterrupted(f"stream {self.stream!r} answered up to {following - 1}, not {cursor.position}")

    def _ask(self, start: int) -> None:
        batch = min(self.cursor.to - start + 1, _DIRECT_BATCH)
        self._call(f"DIRECT.GET.{self.stream}", {"seq": start, "batch": batch, "max_bytes": _DIRECT_BYTES}, "1")

    def _following(self, frames: Frames) -> int | None:
        """The next start sequence, if these frames contain the end of a batch."""
        header = frames.header(len(frames) - 1) if len(frames) else b""
        found = _LAST_SEQUENCE.search(header) if status_of(header)[0] == 204 else None
        return int(found[1]) + 1 if found and int(found[1]) else None

    def _ends(self, header: bytes) -> bool:
        status, description = status_of(header)
        if status in (204, 404):
            return True
        error = status_error(status, description, request=f"Direct Get on {self.stream!r}")
        if status in (408, 409, 412, 429, 503):
            raise self._interrupted(status, description) from error
        raise error


class LeaderAttempt(ReadAttempt):
    """Reads message by message from the stream's leader, some concurrently: slow, but correct even with mirrors.

    For a work queue whose Direct Get a mirror answers, which near a mirror happens every time.
    """

    def __enter__(self) -> Self:
        return self

    def run(self) -> Iterator[Deliveries]:
        frames, position = bytearray(), self.cursor.position
        for _ in range(_LEADER_BATCH):
            try:
                request = {"seq": position + 1, "next_by_subj": ">"}
                message = self.connection.api(f"STREAM.MSG.GET.{self.stream}", request)["message"]
            except MessageNotFound:
                break
            position = int(message["seq"])
            frames += _as_delivered(message)
            if position >= self.cursor.to or len(frames) > _DIRECT_BYTES:
                break
        if frames:
            yield self.cursor.accept(consumer_deliveries(scan(np.frombuffer(frames, dtype=np.uint8), len(frames))))


def _as_delivered(message: dict[str, Any]) -> bytes:
    """The frame that a consumer would have sent for this message."""
    header, data = (base64.b64decode(message.get(part) or "") for part in ("hdrs", "data"))
    reply = b"$JS.ACK.s.c.1.%d.1.%d.0" % (message["seq"], parse_time(message["time"]))
    sizes = b"%d %d" % (len(header), len(header) + len(data)) if header else b"%d" % len(data)
    verb = b"HMSG" if header else b"MSG"
    return b"%s %s 1 %s %s\r\n%s%s\r\n" % (verb, message["subject"].encode(), reply, sizes, header, data)

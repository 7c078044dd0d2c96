"""The live pull loop of one consumer: keeps enough messages requested, and passes them on, one read at a time.

It does not manage the consumer: every event that ends or endangers the flow (consumer deleted, leader changed,
heartbeats missed, delivery lost) is reported to its owner through `on_trouble`, which resyncs and starts a new pull.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.compute as pc

from parti.errors import PartiError, ProtocolError, TransientError
from parti.wire.acks import ACK_FRAME
from parti.wire.blocking import status_of
from parti.wire.columns import Deliveries, consumer_deliveries, is_delivery
from parti.wire.errors import status_error
from parti.wire.frames import Frames
from parti.wire.live import LiveConnection

_END_OF_PULL = frozenset({404, 408})
_EXCEEDS = "Exceeds MaxBytes"
_ACK = b"$JS.ACK."
_NUMBERS_AT = {9: 4, 11: 6, 12: 6}  # tokens of an ack subject -> index of delivered, stream and consumer sequence
_FEW = 64  # messages of one read below which a plain loop is faster than columns (0.3 ms of fixed cost)

Item = tuple[bytes, bytes, bytes, bytes, int, int, int]
"""Subject, reply, headers, payload, delivered count, stream sequence, nanoseconds since 1970."""
_PIN = re.compile(rb"\r\nNats-Pin-Id: *(\S+)\r\n")


def items_of(deliveries: Deliveries) -> list[Item]:
    """The messages of a large read, cut out of one copy of it, because the receive buffer is reused."""
    frames = deliveries.frames
    first = int(frames.subject_start[0])
    raw = frames.data[first : int(frames.payload_end[-1])].tobytes()
    subjects, subject_ends, _, replies, reply_ends, heads, payloads, ends = (frames.positions - first).tolist()
    counts, sequences, _, stamps, _ = deliveries.numbers.tolist()
    return [
        (
            raw[subjects[i] : subject_ends[i]],
            raw[replies[i] : reply_ends[i]],
            raw[heads[i] : payloads[i]],
            raw[payloads[i] : ends[i]],
            counts[i],
            sequence,
            stamps[i],
        )
        for i, sequence in enumerate(sequences)
    ]


class DeliveryLost(TransientError):
    """The consumer sequence has a gap: a delivery was lost. Resync before anything else is processed."""


class HeartbeatMissed(TransientError):
    """Nothing arrived from the consumer for two heartbeats: it, its leader or the connection is gone. Resync."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """How many messages to request, and for how long."""

    batch: int = 500  # a pull of 500 costs as much as a pull of 1; larger ones only delay a filter change
    prefetch: int = 1000  # two batches: the server fills one while we work on the other
    # seconds; must be shorter than the lease, or a frozen owner swallows messages (docs/evidence/cluster.md#c13)
    expires: float = 5.0
    heartbeat: float = 1.0  # a dead consumer is detected after two of them
    group: str | None = None  # priority group, for pinned consumers
    max_bytes: int = 0  # of one pull; 0: no limit. A larger message is pulled alone
    exclusive: bool = True  # the only client that pulls: then consumer sequences must be consecutive


@dataclass(frozen=True, slots=True)
class PullOwner:
    """The calls that a pull makes to its owner."""

    on_batch: Callable[[Deliveries], None]
    on_trouble: Callable[[PartiError], None]
    capacity: Callable[[], int]
    """How many more messages the owner can hold; never more than that is requested."""
    on_few: Callable[[list[Item], int], None] | None = None
    """Gets small reads instead of `on_batch`, and how many messages are still pending."""


class LivePull:
    """Pulls from one consumer until stopped. Deliveries reach `on_batch` in the order the server sent them.

    Call `kick()` after capacity was freed or filters were changed: a filter update does not wake a waiting pull
    (docs/evidence/jetstream.md#j3).
    """

    def __init__(
        self,
        connection: LiveConnection,
        stream: str,
        consumer: str,
        owner: PullOwner,
        settings: PullSettings,
        *,
        next_sequence: int | None = None,
    ) -> None:
        self.connection = connection
        self.consumer = consumer
        self.pin: str | None = None
        self._settings = settings
        self._subject = f"{connection.options.js_prefix}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._on_batch = owner.on_batch
        self._on_few = owner.on_few
        self._on_trouble = owner.on_trouble
        self._capacity = owner.capacity
        self._next = next_sequence  # None: accept any first sequence
        self._inbox = connection.new_inbox()
        self._sid: int | None = None
        self._withdrawn = False
        self._pulls: dict[bytes, int] = {}
        self._asked = 0
        self._oversized = False  # the next message is larger than the limit of one pull
        self._fresh: set[bytes] = set()  # pulls without any message so far
        self._loop = asyncio.get_running_loop()
        self._last_seen = self._loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
        self._due = self._last_seen

    def __repr__(self) -> str:
        state = "stopped" if self._sid is None else f"waiting for {self.outstanding}"
        return f"<LivePull {self.consumer} {state}>"

    @property
    def outstanding(self) -> int:
        """Messages requested and not yet received."""
        return sum(self._pulls.values())

    def start(self) -> None:
        """Start to pull."""
        self._sid = self.connection.subscribe(f"{self._inbox}.*", self._on_frames)
        self._seen()
        self._due = self._last_seen
        self._watch()
        self.kick()

    def stop(self) -> None:
        """After this returns, nothing more reaches `on_batch`; messages in transit stay pending at the server."""
        if self._sid is not None:
            self.connection.unsubscribe(self._sid)
            self._sid = None
        if self._watchdog is not None:
            self._watchdog.cancel()

    async def withdraw(self) -> None:
        """Stop without leaving messages in transit: those that the server has already sent still reach `on_batch`.

        Raises the connection's error if it is lost meanwhile; the pull is stopped then too.
        """
        if self._sid is None:
            return
        self._withdrawn = True
        # Not `unsubscribe`: frames in transit must still reach their handler.
        self.connection.write(f"UNSUB {self._sid}\r\n".encode())
        try:
            await self.connection.ping()
        finally:
            self.stop()

    def tune(self, batch: int, prefetch: int) -> None:
        """Use these sizes from the next pull on."""
        self._settings = replace(self._settings, batch=batch, prefetch=prefetch)

    def kick(self) -> None:
        """Request more messages, if there is capacity."""
        settings = self._settings
        while self._sid is not None and not self._withdrawn:
            outstanding = self.outstanding
            room = min(settings.prefetch, self._capacity()) - outstanding
            # Small pulls cost as much as large ones: refill by whole batches, and at once only when nothing is due.
            if room <= 0 or (outstanding and room < min(settings.batch, settings.prefetch // 2)):
                return
            if self._oversized:
                if outstanding:
                    return  # the large message alone, so that no other comes without a limit
                self._ask(1)
                self._oversized = False
                continue
            self._ask(min(room, settings.batch))

    def _ask(self, batch: int) -> None:
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        self._pulls[reply.encode()] = batch
        if self._settings.max_bytes:
            self._fresh.add(reply.encode())
        body: dict[str, Any] = {
            "batch": batch,
            "expires": int(self._settings.expires * 1e9),
            "idle_heartbeat": int(self._settings.heartbeat * 1e9),
        }
        if self._settings.max_bytes and not self._oversized:
            body["max_bytes"] = self._settings.max_bytes
        if self._settings.group:
            body |= {"group": self._settings.group} | ({"id": self.pin} if self.pin else {})
        self.connection.publish(self._subject, json.dumps(body).encode(), reply)

    def _on_frames(self, frames: Frames) -> None:
        self._seen()
        if self._on_few is not None and len(frames) < _FEW and not self._settings.group:
            self._few(frames, self._on_few)
            self.kick()
            return
        data = is_delivery(frames)
        if data.all():
            self._deliver(consumer_deliveries(frames))
        else:
            if data.any():
                self._deliver(consumer_deliveries(frames.select(data)))
            statuses = frames.select(~data)
            for index in range(len(statuses)):
                self._status(statuses.subject(index), statuses.header(index))
        self.kick()

    def _few(self, frames: Frames, take: Callable[[list[Item], int], None]) -> None:
        """Handle a small read without columns: near the tail of a stream most reads have one to three messages."""
        rows = frames.positions.T.tolist()
        first = rows[0][0]
        raw = frames.data[first : rows[-1][7]].tobytes()
        items: list[Item] = []
        statuses: list[tuple[bytes, bytes]] = []
        consumer_seqs: list[int] = []
        pending = 0
        for row in rows:
            subject, subject_end, _, reply, reply_end, head, payload, end = (position - first for position in row)
            ack = raw[reply:reply_end]
            if not ack.startswith(_ACK):
                statuses.append((raw[subject:subject_end], raw[head:payload]))
                continue
            tokens = ack.split(b".")
            at = _NUMBERS_AT.get(len(tokens))
            if at is None:
                raise ProtocolError(f"reply subject {ack[:200]!r} is no acknowledgement subject known to parti")
            delivered, sequence, consumer_seq, stamp, pending = (int(token) for token in tokens[at : at + 5])
            consumer_seqs.append(consumer_seq)
            items.append(
                (raw[subject:subject_end], ack, raw[head:payload], raw[payload:end], delivered, sequence, stamp)
            )
        if items:
            self._book(len(items))
            if self._in_sequence(consumer_seqs):
                take(items, pending)
        for inbox, header in statuses:
            self._status(inbox, header)

    def _in_sequence(self, sequences: list[int]) -> bool:
        """Whether these deliveries follow the previous ones; if not, one was lost, and the owner is notified."""
        if not self._settings.exclusive:
            return True
        count, first, last = len(sequences), sequences[0], sequences[-1]
        expected = first if self._next is None else self._next
        if sequences != list(range(expected, expected + count)):
            self.stop()
            self._on_trouble(
                DeliveryLost(
                    f"{self.consumer}: expected the {count} deliveries from {expected} on, got {first} to {last}"
                )
            )
            return False
        self._next = last + 1
        return True

    def _deliver(self, deliveries: Deliveries) -> None:
        count = len(deliveries)
        self._book(count)
        if self._settings.group and (found := _PIN.search(deliveries.frames.header(count - 1))):
            self.pin = found[1].decode()
        if not self._in_sequence(deliveries.consumer_seq.tolist()):
            return
        self._on_batch(deliveries)

    def _book(self, count: int) -> None:
        for reply in list(self._pulls):
            taken = min(count, self._pulls[reply])
            self._pulls[reply] -= taken
            count -= taken
            self._fresh.discard(reply)
            if not self._pulls[reply]:
                del self._pulls[reply]
            if not count:
                return

    def _status(self, reply: bytes, header: bytes) -> None:
        status, description = status_of(header)
        if status in (0, 100):
            return
        self._pulls.pop(reply, None)
        fresh = reply in self._fresh
        self._fresh.discard(reply)
        if status == 409 and _EXCEEDS in description:
            self._oversized = self._oversized or fresh
            return  # the pull is filled; an empty one was too small for the next message
        if status == 423:
            self.pin = None  # another client is pinned: pulls with our old pin would always be refused
        if status in _END_OF_PULL or "Batch Completed" in description:
            return
        self._on_trouble(status_error(status, description, request=f"pull from {self.consumer!r}"))

    def _seen(self) -> None:
        self._last_seen = self._loop.time()

    def _watch(self) -> None:
        """One timer per heartbeat, not per message: check when something last arrived."""
        if self._sid is None:
            return
        limit = 2 * self._settings.heartbeat
        now = self._loop.time()
        if now - self._due > self._settings.heartbeat / 2:
            # This process was busy: messages may have arrived and be unread.
            self._last_seen = max(self._last_seen, now - self._settings.heartbeat)
        silent = now - self._last_seen
        if silent >= limit and self._pulls:
            self.stop()
            self._on_trouble(HeartbeatMissed(f"{self.consumer}: nothing came for {silent:.1f} s"))
            return
        if not self._pulls:
            self._seen()  # nothing is due, so silence is not an error
        self._due = now + max(limit - silent, 0.01)
        self._watchdog = self._loop.call_at(self._due, self._watch)


def ack_frames(deliveries: Deliveries) -> bytes:
    """The frames that acknowledge these deliveries, joined: one write, and no Python object per message."""
    before, after = ACK_FRAME.split(b"%s")
    joined = pc.binary_join_element_wise(before, deliveries.replies(), after, b"")
    return bytes(joined.buffers()[2] or b"")

"""Watches a bucket: every state of every key once and in order, whatever happens to connection, server and consumer.

It reads the stream with its own ephemeral pull consumer. Each of these causes a resync, which creates a new consumer
right after the last yielded revision: a gap in the consumer sequence, a deleted consumer, a leader change, a missed
heartbeat, a lost connection. nats-py's watch received nothing for 15 to 20 s after a server restart or a deletion of
its consumer (docs/evidence/jetstream.md#j21).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nats import errors as nats_errors

from parti.backoff import FOREVER
from parti.clock import SystemClock
from parti.errors import ConnectionFailed, ConnectionLost, PartiError, TransientError
from parti.observe.logs import get_logger
from parti.waiting import first_of
from parti.wire.api import JetStreamApi
from parti.wire.delivery import Delivery, parse_delivery
from parti.wire.errors import BatchCompleted, MessageNotFound, NoMessages, PullExpired, status_error
from parti.wire.events import ConnectionEvent, ConnectionEventKind
from parti.wire.kv_model import Change, Operation, SnapshotDone, operation_of
from parti.wire.requests import Reply, reply_of

log = get_logger("wire")

_NANOSECONDS = 1_000_000_000
_BATCH = 256  # messages per pull; at most these wait in memory
_PULL_BYTES = 4 * 1024 * 1024
_PULL_EXPIRES = 30.0
_HEARTBEAT_STATUS = 100
_INACTIVE = 30.0  # seconds until the server removes a consumer that we could not delete
_DELETE_TIMEOUT = 1.0


class Resync(TransientError):
    """The consumer is no longer reliable: create another one after the last yielded revision."""


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """How a bucket is watched."""

    values: bool = True
    heartbeat: float = 1.0
    relist_every: float = 30.0
    """How often to compare with the leader, to find keys that vanished without a marker."""
    written: Callable[[], Mapping[str, int]] = dict
    """Keys that the caller wrote, with the revision: one that is purged before it was yielded has vanished, too."""
    recreated: Callable[[], None] = lambda: None
    """Called when the stream was recreated with the same name, or has lost its end: revisions restart."""


class KvWatch:
    """The changes of the keys that match one pattern, each yielded once and in revision order per key.

    Guarantees, over any number of resyncs: no state that persists is missed, no revision is yielded twice, and the
    removal of a key that was yielded as live is always yielded. States overwritten while the connection was down may be
    skipped, as the bucket's history keeps only the last ones. Memory holds the live keys and one pull.
    """

    def __init__(self, api: JetStreamApi, stream: str, subjects: str, pattern: str, settings: WatchSettings) -> None:
        self._api = api
        self._stream = stream
        self._prefix = subjects
        self._filter = subjects + pattern
        self._settings = settings
        self._clock = SystemClock()
        self._reconnected = asyncio.Event()
        self._queue: asyncio.Queue[Reply | PartiError] = asyncio.Queue()
        self._subscription: Any = None
        self._inbox = ""
        self._consumer = ""
        self._consumer_seq = 0
        self._awaited = 0
        """Messages that the current pull may still deliver; 0 if there is no pull."""
        self._created = ""
        """The stream's creation time: another time means another stream of the same name."""
        self._last_seq = 0
        self._alive: dict[str, int] = {}
        self._orphans: dict[str, int] = {}
        """Keys of an earlier stream of this name that the current one has not yielded yet."""
        self._snapshot: int | None = None
        """Remaining messages of the snapshot; None when it is complete."""
        self._announced = False
        self._relist_at = 0.0
        self._heard = True
        """Whether the current consumer has worked at all; if not, the next one is created after a backoff."""
        self._waits = FOREVER.delays()

    async def changes(self) -> AsyncGenerator[Change | SnapshotDone, None]:
        """Iterate without end; closing the iterator removes the consumer from the server.

        Raises `StreamNotFound` when the bucket does not exist at the start, and `ConnectionFailed` when the connection
        was closed permanently; any other error is retried.
        """
        unlisten = self._api.connection.add_listener(self._on_event)
        try:
            try:
                found_changes = await self._start()
            except TransientError as reason:
                found_changes = await self._recover(reason)
            while True:
                for item in found_changes:
                    yield item
                try:
                    found_changes = await self._step()
                except PartiError as reason:
                    found_changes = await self._recover(reason)
        finally:
            unlisten()
            await self._drop_consumer()

    async def _start(self) -> list[Change | SnapshotDone]:
        """Create the consumer after the last yielded revision; returns changes found by comparing with the stream."""
        info = await self._api.stream_info(self._stream)
        resumed = bool(self._created)
        # A stream whose last sequence decreased has lost its end (a crash before the disk was synced): revisions
        # restart below ours, and would look like old ones.
        if resumed and (info["created"] != self._created or info["state"]["last_seq"] < self._last_seq):
            log.warning("watch.stream_recreated", stream=self._stream, last_seq=self._last_seq)
            self._settings.recreated()
            self._orphans |= self._alive
            self._alive.clear()
            self._last_seq = 0
            self._snapshot = None
            resumed = False
        fresh = self._last_seq == 0 or self._snapshot is not None
        self._created = info["created"]
        name = f"parti-watch-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": name,
            "filter_subject": self._filter,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE * _NANOSECONDS),
            "headers_only": not self._settings.values,
            # An interrupted snapshot is restarted, and parts already yielded are dropped by revision; continuing from
            # the last sequence instead would yield older values of a bucket with history.
            **(
                {"deliver_policy": "last_per_subject"}
                if fresh
                else {"deliver_policy": "by_start_sequence", "opt_start_seq": self._last_seq + 1}
            ),
        }
        await self._listen()
        self._consumer, self._consumer_seq, self._awaited = name, 0, 0
        created = await self._api.consumer_create(self._stream, config, action="create")
        found_changes: list[Change | SnapshotDone] = []
        if fresh:
            self._snapshot = int(created["num_pending"])
            if self._snapshot == 0:
                found_changes += self._finish_snapshot()
        if resumed:
            found_changes += await self._relist()
        self._relist_at = self._clock.now() + self._settings.relist_every
        return found_changes

    async def _listen(self) -> None:
        """Create a new inbox and queue, so that late messages of an earlier consumer cannot mix in."""
        queue: asyncio.Queue[Reply | PartiError] = asyncio.Queue()

        async def receive(message: Any) -> None:
            queue.put_nowait(reply_of(message))

        self._queue, self._inbox = queue, self._api.connection.new_inbox()
        try:
            self._subscription = await self._api.connection.subscribe(self._inbox, cb=receive)
        except nats_errors.Error as error:
            raise ConnectionFailed(f"cannot subscribe: {error}") from error

    async def _step(self) -> list[Change | SnapshotDone]:
        """Wait for the next message, heartbeat or comparison, and return the changes to yield."""
        if self._clock.now() >= self._relist_at and self._snapshot is None:
            self._relist_at = self._clock.now() + self._settings.relist_every
            return await self._relist()
        if self._awaited == 0:
            await self._pull()
        patience = 2.5 * self._settings.heartbeat
        try:
            message = self._queue.get_nowait()  # a burst of thousands needs no timer per message
        except asyncio.QueueEmpty:
            try:
                async with asyncio.timeout(patience):
                    message = await self._queue.get()
            except TimeoutError:
                raise Resync(f"nothing heard from {self._consumer} for {patience:g} s") from None
        if isinstance(message, PartiError):
            raise message
        if not self._heard:
            self._heard, self._waits = True, FOREVER.delays()
        if message.status:
            return await self._on_status(message)
        delivery = parse_delivery(message.reply)
        if delivery is None:
            raise Resync(f"a message without an ack subject came from {self._consumer}")
        return self._on_delivery(message, delivery)

    async def _on_status(self, message: Reply) -> list[Change | SnapshotDone]:
        if message.status == _HEARTBEAT_STATUS:
            sent = int(message.headers.get("Nats-Last-Consumer", self._consumer_seq))
            if sent != self._consumer_seq:
                raise Resync(f"{self._consumer} has sent {sent} messages, and {self._consumer_seq} arrived")
            # A key that expired before it was read never arrives: an idle, empty consumer ends the snapshot.
            if self._snapshot is not None:
                info = await self._api.consumer_info(self._stream, self._consumer)
                if info["num_pending"] == 0 and info["delivered"]["consumer_seq"] == self._consumer_seq:
                    return self._finish_snapshot()
            return []
        error = status_error(message.status, message.description, request=self._consumer)
        if isinstance(error, NoMessages | PullExpired | BatchCompleted):
            self._awaited = 0
            return []
        raise Resync(str(error)) from error

    def _on_delivery(self, message: Reply, delivery: Delivery) -> list[Change | SnapshotDone]:
        self._consumer_seq += 1
        if delivery.consumer_seq != self._consumer_seq:
            raise Resync(f"{self._consumer} delivered {delivery.consumer_seq} where {self._consumer_seq} was next")
        self._awaited -= 1
        found_changes: list[Change | SnapshotDone] = []
        if delivery.stream_seq > self._last_seq:
            self._last_seq = delivery.stream_seq
            found_changes.append(self._change(message, delivery))
        if self._snapshot is not None:
            self._snapshot -= 1
            if self._snapshot <= 0 or delivery.pending == 0:
                found_changes += self._finish_snapshot()
        return found_changes

    def _change(self, message: Reply, delivery: Delivery) -> Change:
        key = message.subject.removeprefix(self._prefix)
        operation = operation_of(message.headers)
        self._orphans.pop(key, None)
        if operation is Operation.PUT:
            self._alive[key] = delivery.stream_seq
        else:
            self._alive.pop(key, None)
        value = message.data if operation is Operation.PUT else None
        return Change(key, value, delivery.stream_seq, operation, delivery.time_ns)

    def _finish_snapshot(self) -> list[Change | SnapshotDone]:
        self._snapshot = None
        found_changes: list[Change | SnapshotDone] = [self._vanished(key, seq) for key, seq in self._orphans.items()]
        self._orphans.clear()
        if not self._announced:
            self._announced = True
            found_changes.append(SnapshotDone(self._last_seq))
        return found_changes

    def _vanished(self, key: str, revision: int) -> Change:
        return Change(key, None, revision, Operation.VANISHED, int(self._clock.wall() * _NANOSECONDS))

    async def _relist(self) -> list[Change | SnapshotDone]:
        """Keys yielded as live that the leader no longer holds: removed without a marker, or with an expired one."""
        before = {**self._settings.written(), **self._alive}
        present: set[str] = set()
        async for page in self._api.stream_subjects(self._stream, self._filter):
            present.update(subject.removeprefix(self._prefix) for subject in page)
        found_changes: list[Change | SnapshotDone] = []
        for key, revision in before.items():
            if key not in present and await self._is_gone(key):
                self._alive.pop(key, None)
                found_changes.append(self._vanished(key, revision))
        return found_changes

    async def _is_gone(self, key: str) -> bool:
        # Pages of a changing listing may skip a subject, so each missing one is read individually.
        try:
            await self._api.msg_get(self._stream, last_by_subj=self._prefix + key)
        except MessageNotFound:
            return True
        return False

    async def _pull(self) -> None:
        body = {
            "batch": _BATCH,
            "max_bytes": max(_PULL_BYTES, 2 * self._api.connection.max_payload),
            "expires": int(_PULL_EXPIRES * _NANOSECONDS),
            "idle_heartbeat": int(self._settings.heartbeat * _NANOSECONDS),
        }
        call = f"{self._api.prefix}.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._api.connection.requests.send(call, json.dumps(body).encode(), reply=self._inbox)
        self._awaited = _BATCH

    async def _recover(self, reason: PartiError) -> list[Change | SnapshotDone]:
        """Restart, with retries; only a permanently closed connection ends the watch."""
        log.info("watch.resync", stream=self._stream, consumer=self._consumer, last_seq=self._last_seq, why=str(reason))
        worked, self._heard = self._heard, False
        while True:
            await self._drop_consumer()
            if not worked:
                await self._pause(next(self._waits))
            worked = False
            self._reconnected.clear()
            try:
                return await self._start()
            except PartiError as error:
                if self._api.connection.is_closed:
                    raise ConnectionFailed(f"the connection is closed: the watch of {self._stream} ends") from error
                log.info("watch.retry", stream=self._stream, why=str(error))

    async def _pause(self, seconds: float) -> None:
        """Wait, but at most until the connection is back."""
        await first_of(self._clock.sleep(seconds), self._reconnected.wait())

    async def _drop_consumer(self) -> None:
        """Stop listening and delete the consumer; the server removes an unreachable one after a while."""
        subscription, self._subscription = self._subscription, None
        consumer, self._consumer = self._consumer, ""
        if subscription is not None and not self._api.connection.is_closed:
            await subscription.unsubscribe()
        if not consumer or not self._api.connection.is_connected:
            return
        try:
            call = f"CONSUMER.DELETE.{self._stream}.{consumer}"
            await self._api.request(call, timeout=_DELETE_TIMEOUT)
        except PartiError as error:
            log.debug("watch.consumer_left", stream=self._stream, consumer=consumer, why=str(error))

    def _on_event(self, event: ConnectionEvent) -> None:
        if event.kind in (ConnectionEventKind.DISCONNECTED, ConnectionEventKind.CLOSED):
            self._queue.put_nowait(ConnectionLost(f"the connection to {event.server} broke"))
        if event.kind in (ConnectionEventKind.RECONNECTED, ConnectionEventKind.CLOSED):
            self._reconnected.set()

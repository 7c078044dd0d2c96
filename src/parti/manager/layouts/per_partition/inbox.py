"""What the partitions of one worker share in the per-partition layout: the limit on messages in flight, and metrics.

The metrics have the same names as in the per-worker layout, so one dashboard serves both layouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from parti.errors import PartiError
from parti.observe import worker_metrics as m
from parti.wire.pull import HeartbeatMissed, PullSettings
from parti.worker.health import Part
from parti.worker.message import Message
from parti.worker.runtime import Runtime


class SlotInbox:
    """Bounds memory: at most `config.capacity` messages and `config.max_bytes` bytes are in flight."""

    def __init__(self, runtime: Runtime) -> None:
        self.in_hand = 0
        self.bytes = 0
        self.asked = 0
        """Messages that all partitions together have requested and not yet received."""
        self.flows = 1
        """Partitions that pull: each may request its share, because requested messages count too."""
        self._starved: dict[str, Callable[[], None]] = {}
        """Partitions that want to request more, with the callback that lets them do so."""
        self._kick_due = False
        self._config = runtime.config
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._loop = asyncio.get_running_loop()
        self._last_read = 0.0
        self._pending = 0
        """Messages pending at the server at the last check of the durables."""

    def __repr__(self) -> str:
        return f"<SlotInbox in_hand={self.in_hand} bytes={self.bytes} flows={self.flows}>"

    def room(self, partition: str, asked: int, *, own: int, kick: Callable[[], None]) -> int:
        """How many messages one partition may request; it has requested `asked`, and `own` are in flight.

        Requested and in-flight messages together stay below the capacity, except that a partition without any may
        always request one: with more partitions than capacity some would starve. A partition with its share in flight
        leaves a quarter to others, or partitions with hanging handlers would block all capacity permanently. It gets a
        whole share or nothing: a pull for one message costs as much as a pull for many.
        """
        config = self._config
        share = max(1, config.capacity // self.flows)
        left = config.capacity // 4 if own >= share and self.flows > 1 else 0
        if self.bytes * 2 < config.max_bytes:
            free = config.capacity - self.in_hand - (self.asked - asked)
            if free - left >= share:
                return share
            if not own:
                return max(1, free)
        if not asked:
            self._starved[partition] = kick
        return 0

    def settings(self) -> PullSettings:
        """The pull settings of one partition. All pulls together bring at most the half that is not in flight."""
        config = self._config
        return PullSettings(
            batch=config.pull_batch_size,
            prefetch=config.pull_batch_size * config.prefetch_depth,
            expires=config.pull_timeout,
            heartbeat=config.idle_heartbeat,
            max_bytes=max(1, config.max_bytes // (2 * config.prefetch_depth * self.flows)),
        )

    def took(self, messages: int, size: int) -> None:
        """Count messages that became in flight, and their bytes of payload and headers."""
        self.in_hand += messages
        self.bytes += size

    def let_go(self, message: Message) -> None:
        self.in_hand -= 1
        self.bytes -= len(message.data) + len(message._head)
        if not self.in_hand:
            self._show()
        if self._starved and not self._kick_due and self._has_share():
            self._kick_due = True
            self._loop.call_soon(self._kick)

    def _has_share(self) -> bool:
        capacity = self._config.capacity
        return capacity - self.in_hand - self.asked >= capacity // self.flows

    def _kick(self) -> None:
        """Capacity became free while it was short: waiting partitions may request again, once per turn of the loop."""
        self._kick_due = False
        starved, self._starved = self._starved, {}
        for kick in starved.values():
            kick()

    def waits(self, pending: int) -> None:
        """Set the number of messages pending at the server: a full worker reads no message that would show it."""
        self._pending = pending
        self._show()

    def _show(self) -> None:
        self._recorder.metrics.set(m.INFLIGHT, self._pending + self.in_hand)

    def read(self, messages: int, again: int, dropped: int) -> None:
        """Count the messages of one read of the socket."""
        metrics, now = self._recorder.metrics, self._loop.time()
        metrics.count(m.MESSAGES, messages)
        metrics.observe(m.PULL_BATCH, messages)
        if self._last_read:
            metrics.observe(m.PULL_CYCLE, now - self._last_read)
        self._last_read = now
        self._pending = max(0, self._pending - messages)
        self._show()
        if again:
            metrics.count(m.REDELIVERIES, again)
        if dropped:
            metrics.count(m.SKIPPED, dropped)

    def works(self) -> None:
        """A pull received messages, or has been waiting without an error."""
        now = self._clock.now()
        self._recorder.worked(Part.ITERATOR, now)
        self._recorder.worked(Part.RECREATION, now)

    def trouble(self, error: PartiError, partition: str) -> None:
        """A pull failed, and restarts after a reset."""
        reason = "heartbeat" if isinstance(error, HeartbeatMissed) else "transient"
        self._recorder.metrics.count(m.ITERATOR_RESTARTS, reason=reason)
        self._recorder.event("slot.trouble", op="iterate", result="reset", partition=partition, error=str(error))
        self._recorder.failed(Part.ITERATOR, self._clock.now(), error)

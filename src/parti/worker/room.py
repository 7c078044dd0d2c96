"""Bounds the open messages: how many more may be requested, and the release of done ones, which makes room again."""

from __future__ import annotations

import asyncio

from parti.observe import worker_metrics as m
from parti.wire.acks import ACK_FRAME
from parti.worker.batching import BatchSize
from parti.worker.channel import Channel
from parti.worker.ledger import Ledger
from parti.worker.message import Message
from parti.worker.runtime import Runtime


class Room:
    """`config.capacity` messages and half of `config.max_bytes`, because memory is bounded.

    Range reads may use a quarter more when the messages held for them fill the inbox.
    """

    def __init__(self, runtime: Runtime, ledger: Ledger, channel: Channel) -> None:
        config = self._config = runtime.config
        self.batches = BatchSize(config.pull_batch_size, limit=max(1, config.capacity // 2))
        self._ledger = ledger
        self._channel = channel
        self._may_pull = runtime.fence.may_pull
        self._metrics = runtime.recorder.metrics
        self._loop = asyncio.get_running_loop()
        self._pending = 0  # messages waiting at the server, as last reported
        self._kick_due = False
        self._tight = False  # less room than one round of pulls needs
        self._free = asyncio.Event()
        self._starved = 0  # range reads waiting for room

    def __repr__(self) -> str:
        return f"<Room for={self._config.capacity - self._ledger.in_hand} {self.batches!r}>"

    def capacity(self) -> int:
        """How many more messages may arrive, those already requested included."""
        room = self._config.capacity - self._ledger.in_hand if self._may_pull() else 0
        if self._ledger.bytes * 2 >= self._config.max_bytes:
            room = 0  # earlier requests may bring the other half
        self._tight = room < self.batches.size * self._config.prefetch_depth
        return room

    def left(self) -> bool:
        """Whether a range read may bring another message.

        Held messages wait for the range read itself: if only those fill the inbox, the read must continue.
        """
        in_hand, capacity = self._ledger.in_hand, self._config.capacity
        if in_hand < capacity and self._ledger.bytes * 2 < self._config.max_bytes:
            return True
        held = sum(len(state.held) for state in self._ledger.states.values())
        return in_hand - held < (max(1, capacity // 4) if in_hand >= capacity else 1)

    async def wait(self) -> None:
        """Returns when a range read may bring another message."""
        while not self.left():
            self._free.clear()
            self._starved += 1
            try:
                await self._free.wait()
            finally:
                self._starved -= 1

    def let_go(self, message: Message) -> None:
        """The message is done: acknowledge it, and make room for another."""
        ledger = self._ledger
        if not ledger.let_go(message):
            return
        message._lane.state.done += 1
        self.batches.done += 1
        connection = self._channel.connection
        if message._reply and connection is not None:
            connection.write(ACK_FRAME % message._reply)
        if not ledger.in_hand:
            self._metrics.set(m.INFLIGHT, self._pending)
        if self._tight or self._starved:
            self.made()

    def made(self) -> None:
        """There may be more room than before."""
        if not self._kick_due:
            self._kick_due = True
            self._loop.call_soon(self._kick)

    def made_for_reads(self) -> None:
        """There may be more room for a range read that waits for it."""
        if self._starved:
            self.made()

    def _kick(self) -> None:
        """There is room again after a shortage: request more, once per iteration of the event loop."""
        self._kick_due = False
        if self.left():
            self._free.set()
        if self._channel.pull is not None:
            self.adapt(self._loop.time())
            self._channel.kick()

    def adapt(self, now: float) -> None:
        """Adjust the pull size to the handlers' rate."""
        pull = self._channel.pull
        if self.batches.adapt(now) and pull is not None:
            pull.tune(self.batches.size, self.batches.size * self._config.prefetch_depth)

    @property
    def pending(self) -> int:
        return self._pending

    def waits(self, pending: int) -> None:
        """`pending` messages wait at the server; kept, because nothing is read to update it while there is no room."""
        self._pending = pending
        self._metrics.set(m.INFLIGHT, pending + self._ledger.in_hand)

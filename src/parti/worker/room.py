"""What is in hand is bounded: how much more may come, and letting go of what is done, which makes room again."""

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
    """`config.capacity` messages and half of `config.max_bytes`, as memory is bounded.

    Range reads may have a quarter more when what is held for them fills the inbox.
    """

    def __init__(self, runtime: Runtime, ledger: Ledger, channel: Channel) -> None:
        config = self._config = runtime.config
        self.batches = BatchSize(config.pull_batch_size, limit=max(1, config.capacity // 2))
        self._ledger = ledger
        self._channel = channel
        self._may_pull = runtime.fence.may_pull
        self._metrics = runtime.recorder.metrics
        self._loop = asyncio.get_running_loop()
        self._pending = 0  # messages that waited at the server when it last spoke of them
        self._kick_due = False
        self._tight = False  # less room than one round of pulls needs
        self._free = asyncio.Event()
        self._starved = 0  # range reads that wait for room

    def __repr__(self) -> str:
        return f"<Room for={self._config.capacity - self._ledger.in_hand} {self.batches!r}>"

    def capacity(self) -> int:
        """How many more messages may be asked for, those on their way included."""
        room = self._config.capacity - self._ledger.in_hand if self._may_pull() else 0
        if self._ledger.bytes * 2 >= self._config.max_bytes:
            room = 0  # what was asked for before may bring the other half
        self._tight = room < self.batches.size * self._config.prefetch_depth
        return room

    def left(self) -> bool:
        """Whether a range read may bring another message.

        What is held waits for the range read itself: if only that fills the inbox, the read must go on.
        """
        in_hand, capacity = self._ledger.in_hand, self._config.capacity
        if in_hand < capacity and self._ledger.bytes * 2 < self._config.max_bytes:
            return True
        held = sum(len(state.held) for state in self._ledger.states.values())
        return in_hand - held < (max(1, capacity // 4) if in_hand >= capacity else 1)

    async def wait(self) -> None:
        """Return when a range read may bring another message."""
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
        """There may be more of it than before."""
        if not self._kick_due:
            self._kick_due = True
            self._loop.call_soon(self._kick)

    def made_for_reads(self) -> None:
        """There may be more of it for a range read that waits for just this."""
        if self._starved:
            self.made()

    def _kick(self) -> None:
        """Room was made while it was short: ask for more, once a turn of the loop."""
        self._kick_due = False
        if self.left():
            self._free.set()
        if self._channel.pull is not None:
            self.adapt(self._loop.time())
            self._channel.kick()

    def adapt(self, now: float) -> None:
        """Ask for as much at once as the handlers manage."""
        pull = self._channel.pull
        if self.batches.adapt(now) and pull is not None:
            pull.tune(self.batches.size, self.batches.size * self._config.prefetch_depth)

    @property
    def pending(self) -> int:
        return self._pending

    def waits(self, pending: int) -> None:
        """So many messages wait at the server: when all places are taken nothing is read that would tell."""
        self._pending = pending
        self._metrics.set(m.INFLIGHT, pending + self._ledger.in_hand)

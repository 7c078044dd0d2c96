"""Messages of one partition with its own durable: pulled, queued in its lanes, acknowledged when done."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from parti.control.signals import DeliveryVerdict
from parti.errors import PartiError
from parti.manager.layouts.per_partition.inbox import SlotInbox
from parti.model import Ahead, Lease, Partition, PartitionId, Retention
from parti.wire.acks import ACK_FRAME, IN_PROGRESS_FRAME
from parti.wire.errors import MaxAckPendingReached, TooManyPulls
from parti.wire.live import LiveConnection
from parti.wire.pull import Item, LivePull, PullOwner, items_of
from parti.worker.info import PartitionInfo
from parti.worker.lanes import LanePool
from parti.worker.ledger import PartitionState
from parti.worker.message import Message
from parti.worker.runtime import Runtime


class SlotOwner(Protocol):
    """Decides about the partition's messages, and is notified of the events of its pull."""

    def deliver(self, partition: PartitionId, sequence: int, consumer_sequence: int, inbox: int) -> DeliveryVerdict:
        """Decide what to do with one delivery."""
        ...

    def deliver_new(self, partition: PartitionId, sequences: list[int], consumer_sequence: int, inbox: int) -> bool:
        """Accept all messages of one read if each is to be processed; else False, and none is recorded as delivered."""
        ...

    def skipped(self, partition: PartitionId) -> None:
        """A message arrived that an earlier owner had done."""
        ...

    def gap(self, partition: PartitionId) -> None:
        """A delivery is missing: what arrives may be incomplete from now on."""
        ...

    def may_pull(self) -> bool: ...


class SlotFlow:
    """One partition's pull and lanes. `ticket` names the inbox: messages from an older inbox are ignored."""

    def __init__(
        self,
        partition: PartitionId,
        runtime: Runtime,
        pool: LanePool,
        inbox: SlotInbox,
        retention: Retention,
        owner: SlotOwner,
    ) -> None:
        self.partition = partition
        self.state = PartitionState(Partition(tuple(partition.split("."))), Lease(partition, 0))
        self.state.stopped = True
        self._runtime = runtime
        self._pool = pool
        self._inbox = inbox
        self._owner = owner
        self._asked = 0  # as counted in the inbox
        self._following = 1  # the consumer sequence of the next delivery
        self._pull: LivePull | None = None
        self._connection: LiveConnection | None = None
        self._stable: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._keyed = runtime.config.lanes == "key"
        # Acks are sent without waiting for a reply. On limits only the last one is confirmed; elsewhere at most
        # max_ack_pending can be unconfirmed, because the server delivers no more.
        remembered = 1 if retention is Retention.LIMITS else runtime.config.max_ack_pending
        self._acks: deque[tuple[int, bytes]] = deque(maxlen=remembered)
        self._void: set[int] = set()
        """In flight when the durable was reset: only an ack of the next delivery counts, not one of that delivery."""

    def __repr__(self) -> str:
        return f"<SlotFlow {self.partition} open={len(self.state.open)} {'pulling' if self._pull else 'idle'}>"

    def info(self, cursor: int) -> PartitionInfo:
        """The partition's state on this worker; everything up to `cursor` is done."""
        state = self.state
        return PartitionInfo(
            partition=state.partition,
            lease=state.lease,
            cursor=cursor,
            target=None,
            in_hand=len(state.open),
            done=state.done,
            retries=state.retries,
            dead_letters=state.dead_letters,
            stopped=state.stopped,
            held=False,
        )

    # -- pulling ------------------------------------------------------------------------------------------------------

    def begin(self, connection: LiveConnection, durable: str, ticket: int) -> None:
        """Pull into a new inbox; the durable was just reset, so its first delivery has consumer sequence 1."""
        self.end_pull()
        config = self._runtime.config
        self._connection = connection
        self._acks.clear()
        self._following = 1
        self._pull = LivePull(
            connection,
            config.stream,
            durable,
            PullOwner(
                on_batch=lambda deliveries: self._take(items_of(deliveries), ticket),
                on_trouble=self._on_trouble,
                capacity=self._room,
                on_few=lambda items, _: self._take(items, ticket),
            ),
            self._inbox.settings(),
            next_sequence=1,
        )
        self._pull.start()
        # No message and no error for longer than the watchdog interval: the pull works, the partition is idle.
        self._stable = self._loop.call_later(3 * config.idle_heartbeat, self._inbox.works)

    @property
    def pulling(self) -> bool:
        return self._pull is not None

    def _room(self) -> int:
        asked = self._pull.outstanding if self._pull is not None else 0
        self._inbox.asked += asked - self._asked
        self._asked = asked
        if not self._owner.may_pull():
            return 0
        return self._inbox.room(self.partition, asked, own=len(self.state.open), kick=self.kick)

    def resetting(self) -> None:
        """The durable is about to be reset, which invalidates every earlier delivery."""
        self.end_pull()
        self._void.update(self.state.open)

    @property
    def acked_in_vain(self) -> list[int]:
        """Messages done and acknowledged on a delivery that a reset had invalidated, and not delivered again since."""
        return sorted(sequence for sequence in self._void if sequence not in self.state.open)

    def removed(self, sequence: int) -> None:
        """The message was removed from the stream in another way."""
        self._void.discard(sequence)

    def end_pull(self) -> None:
        if self._stable is not None:
            self._stable.cancel()
        if self._pull is not None:
            self._pull.stop()
            self._pull = None
            self._inbox.asked -= self._asked
            self._asked = 0

    def look(self) -> None:
        """Send a pull if none is outstanding; an outstanding pull leads to the next one when it is filled or ends."""
        if self._pull is not None and not self._pull.outstanding:
            self._pull.kick()

    def kick(self) -> None:
        if self._pull is not None:
            self._pull.kick()

    def _on_trouble(self, error: PartiError) -> None:
        if isinstance(error, TooManyPulls | MaxAckPendingReached):
            return  # only this pull ended; the next tick pulls again
        self._inbox.trouble(error, self.partition)
        self._owner.gap(self.partition)

    def _take(self, items: list[Item], ticket: int) -> None:
        """Handle all messages of one read. Most reads have only new messages: these are decided all at once."""
        following = self._following
        self._following += len(items)  # the pull has checked: consumer sequences have no gap
        sequences = [item[5] for item in items]
        if self.state.ahead is None and self._owner.deliver_new(self.partition, sequences, following, ticket):
            self._queue(items)
            dropped = 0
        else:
            dropped = sum(self._take_one(item, following + i, ticket) for i, item in enumerate(items))
        self._inbox.read(len(items), sum(item[4] > 1 for item in items), dropped)
        self._inbox.works()

    def _take_one(self, item: Item, consumer_sequence: int, ticket: int) -> bool:
        """Returns whether it was dropped, because it is done or already in flight."""
        sequence, reply = item[5], item[1]
        verdict = self._owner.deliver(self.partition, sequence, consumer_sequence, ticket)
        if verdict is DeliveryVerdict.PROCESS:
            ahead = self.state.ahead
            if ahead is not None and ahead.covers(sequence):
                self.state.received_through = sequence
                self._acks.append((sequence, reply))
                self._write(ACK_FRAME % reply)
                self._owner.skipped(self.partition)
                return True
            if ahead is not None and sequence > ahead.upto:
                self.state.pass_ahead()
            self._queue([item])
            return False
        if verdict is DeliveryVerdict.ACK_WHEN_DONE and (held := self.state.open.get(sequence)) is not None:
            held._reply = reply  # after a reset only the newest delivery can be acknowledged
        elif verdict in (DeliveryVerdict.ACK, DeliveryVerdict.ACK_WHEN_DONE):
            # Done, or done above the cursor while another key's message is not (its first ack may be void).
            self._acks.append((sequence, reply))
            self._write(ACK_FRAME % reply)
        else:
            return False
        self._void.discard(sequence)
        return True

    def _queue(self, items: list[Item]) -> None:
        """These are to be processed: record them as in flight, and queue them in their lanes."""
        state, push, keyed, size = self.state, self._pool.push, self._keyed, 0
        received, now, worker_id = time.time(), self._loop.time(), self._runtime.recorder.worker_id
        for subject, reply, head, data, count, sequence, stamp in items:
            message = Message()
            message.subject = text = subject.decode(errors="replace")
            message.partition, message.lease = state.partition, state.lease
            message.sequence, message.delivered = sequence, count
            message.data, message._head, message._reply, message._headers = data, head, reply, None
            message.timestamp, message.received_at = stamp / 1e9, received
            message._held_since, message.worker_id = now, worker_id
            message.attempt, message.last_error = 0, ""
            if keyed:
                message.key, message._lane = text, state.lane(text)
            else:
                message.key, message._lane = self.partition, state.main
            state.open[sequence] = message
            size += len(data) + len(head)
            push(message)
        state.received_through = items[-1][5]
        self._inbox.took(len(items), size)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def go(self, lease: Lease, ahead: Ahead | None) -> None:
        """Handlers may start under this lease. `ahead`: messages above the claim's cursor that it lists as done."""
        known = self.state.ahead
        if ahead is not None and (known is None or known.upto < ahead.upto):
            self.state.ahead = ahead
        self.state.lease, self.state.stopped = lease, False
        self._pool.resume(self.state)

    def stop(self) -> tuple[int, int | None]:
        """Start only what has to be finished, and drop the rest; returns (last to be finished, first dropped).

        If it is already stopped, the running drain decides what else is dropped, and reports that first.
        """
        self.end_pull()
        if self.state.stopped:
            return self._dropped(())
        self.state.stop(self._pool.running_of(self.state))
        return self._dropped(sequence for sequence in self.state.open if sequence > self.state.finish_through)

    async def drained(self) -> tuple[int, int | None]:
        """When this returns, no handler of the partition runs. After `drain_timeout` open messages are dropped."""
        await self._pool.drained(self.state, self._runtime.config.drain_timeout)
        if self.state.stopped:
            self.state.look_ahead()
        return self._dropped(self.state.open if self.state.stopped else ())

    def _dropped(self, sequences: Iterable[int]) -> tuple[int, int | None]:
        """Drop these without an ack; returns the last message left to be finished, and the first of these."""
        dropped = sorted(sequences)
        for sequence in dropped:
            message = self.state.open.pop(sequence)
            self._inbox.let_go(message)
            self._void.discard(sequence)
            if message in message._lane.queue:
                message._lane.queue.remove(message)
        if dropped:
            self.state.received_through = min(
                self.state.received_through, dropped[0] - 1
            )  # else they would count as done (`look_ahead`)
        return max(self.state.open, default=0), dropped[0] if dropped else None

    def discard(self) -> None:
        """Drop everything without an ack: this worker does not own it."""
        self.end_pull()
        self._pool.fence(self.state)
        self.state.stopped, self.state.finish_through, self.state.highest_done = True, 0, 0
        self.state.ahead, self.state.received_through = None, 0
        for message in self.state.open.values():
            self._inbox.let_go(message)
        self.state.open.clear()
        self._void.clear()
        self._acks.clear()
        if self.state.drained is not None:
            self.state.drained.set()
        self._pool.forget(self.state)

    def done(self, message: Message) -> bool:
        """The message is finished: acknowledge it. False when this worker had already lost it."""
        state = self.state
        if state.open.get(message.sequence) is not message:
            return False
        del state.open[message.sequence]
        self._inbox.let_go(message)
        state.done += 1
        state.highest_done = max(state.highest_done, message.sequence)
        if message.sequence not in self._void:  # the server never confirms an ack of a void delivery
            self._acks.append((message.sequence, message._reply))
        self._write(ACK_FRAME % message._reply)
        return True

    def acks_above(self, floor: int) -> list[bytes]:
        """The ack subjects used for messages above `floor`, in stream order."""
        return [reply for sequence, reply in sorted(self._acks) if sequence > floor]

    @property
    def last_acked(self) -> int:
        """The highest stream sequence acknowledged since the last reset; 0 when there is none."""
        return max((sequence for sequence, _ in self._acks), default=0)

    def finished_up_to(self, queued: int) -> int:
        """Every message up to here is done; running, waiting and dropped messages are above it."""
        return min(self.state.open) - 1 if self.state.open else min(queued, self.state.received_through)

    def heartbeat(self, older_than: float) -> None:
        """Send in-progress acks for messages in flight for longer than this."""
        until = self._loop.time() - older_than
        frames = [IN_PROGRESS_FRAME % m._reply for m in self.state.open.values() if m._held_since <= until]
        if frames:
            self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        if self._connection is not None and not self._connection.lost.done():
            self._connection.write(data)

"""Messages of one partition with a durable of its own: pulled, queued in its lanes, acknowledged when they are done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from parti.errors import PartiError
from parti.model import Lease, Partition, PartitionId, Retention
from parti.wire.columns import Deliveries
from parti.wire.errors import MaxAckPendingReached, TooManyPulls
from parti.wire.live import LiveConnection
from parti.wire.pull import LivePull, PullSettings
from parti.worker.consumer import WorkerParts
from parti.worker.desk import ACK, IN_PROGRESS
from parti.worker.lanes import LanePool
from parti.worker.ledger import PartitionState
from parti.worker.message import Message

Judge = Callable[[PartitionId, int, int, int], str]
"""(partition, stream sequence, consumer sequence, inbox) -> verdict of `control.slot.deliver`."""


class SlotFlow:
    """One partition's pull and lanes. `ticket` names the inbox: what an older one brings is not ours any more."""

    def __init__(
        self,
        partition: PartitionId,
        parts: WorkerParts,
        pool: LanePool,
        retention: Retention,
        *,
        worker_id: str,
        judge: Judge,
        gap: Callable[[PartitionId], None],
        room: Callable[[], int],
    ) -> None:
        self.partition = partition
        self.state = PartitionState(Partition(tuple(partition.split("."))), Lease(partition, 0))
        self.state.stopped = True
        self._parts = parts
        self._pool = pool
        self._worker_id = worker_id
        self._judge = judge
        self._gap = gap
        self._room = room
        self._pull: LivePull | None = None
        self._connection: LiveConnection | None = None
        self._keyed = parts.config.lanes == "key"
        # Acks are sent without waiting for an answer. On limits only the last one is asked about; elsewhere no more
        # than max_ack_pending can be unanswered, because the server delivers no more.
        remembered = 1 if retention is Retention.LIMITS else parts.config.max_ack_pending
        self._acks: deque[tuple[int, bytes]] = deque(maxlen=remembered)

    def __repr__(self) -> str:
        return f"<SlotFlow {self.partition} open={len(self.state.open)} {'pulling' if self._pull else 'idle'}>"

    # -- pulling ------------------------------------------------------------------------------------------------------

    def begin(self, connection: LiveConnection, durable: str, ticket: int) -> None:
        """Pull into a new inbox; the durable was just reset, so its first delivery has the sequence 1."""
        self.end_pull()
        config = self._parts.config
        self._connection = connection
        self._acks.clear()
        self._pull = LivePull(
            connection,
            config.stream,
            durable,
            on_batch=lambda deliveries: self._on_batch(deliveries, ticket),
            on_trouble=self._on_trouble,
            capacity=self._room,
            settings=PullSettings(
                batch=config.pull_batch_size,
                prefetch=config.pull_batch_size * config.prefetch_depth,
                expires=config.pull_timeout,
                heartbeat=config.idle_heartbeat,
            ),
            next_sequence=1,
        )
        self._pull.start()

    def end_pull(self) -> None:
        if self._pull is not None:
            self._pull.stop()
            self._pull = None

    def kick(self) -> None:
        if self._pull is not None:
            self._pull.kick()

    def _on_trouble(self, error: PartiError) -> None:
        if isinstance(error, TooManyPulls | MaxAckPendingReached):
            return  # only this pull ended; the next tick asks again
        self._parts.recorder.event("slot.trouble", op="iterate", result="reset", error=str(error))
        self._gap(self.partition)

    def _on_batch(self, deliveries: Deliveries, ticket: int) -> None:
        frames = deliveries.frames
        first = int(frames.subject_start[0])
        raw = frames.data[first : int(frames.payload_end[-1])].tobytes()
        spans = (frames.positions - first).tolist()
        subject_at, subject_end, _, reply_at, reply_end, head_at, data_at, data_end = spans
        counts, sequences, consumed, stamps, _ = deliveries.numbers.tolist()
        now = time.time()
        for i, sequence in enumerate(sequences):
            reply = raw[reply_at[i] : reply_end[i]]
            verdict = self._judge(self.partition, sequence, consumed[i], ticket)
            if verdict == "ack":
                self._write(ACK % reply)
            elif verdict == "ack_when_done" and (held := self.state.open.get(sequence)) is not None:
                held._reply = reply  # after a reset only the newest delivery can be acknowledged
            elif verdict == "process":
                message = Message()
                message.subject = raw[subject_at[i] : subject_end[i]].decode(errors="replace")
                message.partition, message.lease = self.state.partition, self.state.lease
                message.key = message.subject if self._keyed else self.partition
                message.sequence, message.delivered = sequence, counts[i]
                message.data, message._head = raw[data_at[i] : data_end[i]], raw[head_at[i] : data_at[i]]
                message._reply, message._headers = reply, None
                message.timestamp, message.received_at = stamps[i] / 1e9, now
                message._held_since, message.worker_id = time.monotonic(), self._worker_id
                message.attempt, message.last_error = 0, ""
                message._lane = self.state.lane(message.key)
                self.state.open[sequence] = message
                self._pool.push(message)

    # -- lanes --------------------------------------------------------------------------------------------------------

    def go(self, lease: Lease) -> None:
        """Handlers may start under this lease."""
        self.state.lease, self.state.stopped = lease, False
        self._pool.resume(self.state)

    def stop(self) -> tuple[int, int | None]:
        """Start nothing more but what has to be finished, and drop the rest: (last to be finished, first dropped)."""
        self.end_pull()
        self.state.stop(self._pool.running_of(self.state))
        dropped = sorted(sequence for sequence in self.state.open if sequence > self.state.finish)
        for sequence in dropped:
            message = self.state.open.pop(sequence)
            if message in message._lane.queue:
                message._lane.queue.remove(message)
        return max(self.state.open, default=0), dropped[0] if dropped else None

    def discard(self) -> None:
        """Forget everything, unacked: it is not ours."""
        self.end_pull()
        self.state.stopped, self.state.finish, self.state.furthest = True, 0, 0
        self.state.open.clear()
        if self.state.idle is not None:
            self.state.idle.set()
        for lane in self.state.lanes.values():
            lane.queue.clear()

    def done(self, message: Message) -> bool:
        """The message is finished: acknowledge it. False when it had been taken from us before."""
        if self.state.open.pop(message.sequence, None) is None:
            return False
        self.state.done += 1
        self.state.furthest = max(self.state.furthest, message.sequence)
        self._acks.append((message.sequence, message._reply))
        self._write(ACK % message._reply)
        return True

    def acks_above(self, floor: int) -> list[bytes]:
        """Where the acks went that were sent for messages above `floor`, in stream order."""
        return [reply for sequence, reply in sorted(self._acks) if sequence > floor]

    @property
    def last_acked(self) -> int:
        """The highest stream sequence acknowledged since the last reset; 0 when there is none."""
        return max((sequence for sequence, _ in self._acks), default=0)

    def finished_up_to(self, queued: int) -> int:
        """Everything up to here is done; what runs or waits lies above."""
        return min(self.state.open) - 1 if self.state.open else queued

    def heartbeat(self, older_than: float) -> None:
        """In-progress for what is held for longer than this."""
        until = time.monotonic() - older_than
        frames = [IN_PROGRESS % m._reply for m in self.state.open.values() if m._held_since <= until]
        if frames:
            self._write(b"".join(frames))

    def _write(self, data: bytes) -> None:
        if self._connection is not None and not self._connection.lost.done():
            self._connection.write(data)

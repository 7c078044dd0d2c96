"""The inbox: puts each incoming message into its lane, holds it or drops it; acks of done messages are joined.

This is the hot path. One read of the socket is one call of `take`, and everything a message needs is cut out of one
copy of that read: the buffer is reused (parti.wire.live).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from parti.model import Ahead
from parti.observe import worker_metrics as m
from parti.wire.acks import ACK_FRAME, IN_PROGRESS_FRAME
from parti.wire.pull import Item
from parti.worker.channel import Channel
from parti.worker.lanes import LanePool
from parti.worker.ledger import Ledger, PartitionState, Place
from parti.worker.message import Message
from parti.worker.room import Room
from parti.worker.runtime import Runtime


class Inbox:
    """Decides about every incoming message, and about open messages of partitions being added, stopped or removed."""

    def __init__(self, runtime: Runtime, ledger: Ledger, channel: Channel, room: Room, pool: LanePool) -> None:
        self._config = runtime.config
        self._ledger = ledger
        self._channel = channel
        self._room = room
        self._pool = pool
        self._recorder = runtime.recorder
        self._loop = asyncio.get_running_loop()
        self._foreign: set[int] = set()  # delivered to us since the last reset, but not ours to acknowledge
        self._last_read = 0.0
        self._spacing = 1.0  # average distance in stream sequences between two of our messages

    def __repr__(self) -> str:
        return f"<Inbox {self._ledger!r} {self._pool!r}>"

    # -- receiving ----------------------------------------------------------------------------------------------------

    def take(self, items: list[Item], pending: int) -> None:
        """Route each message of one read; `pending` more wait at the server."""
        received, now = time.time(), self._loop.time()
        ledger, push, place_of = self._ledger, self._pool.push, self._ledger.place
        answers: list[bytes] = []
        taken = dropped = again = highest = size = 0
        for subject, reply, head, data, count, sequence, stamp in items:
            if count > 1:
                again += 1
            if sequence > highest:
                highest = sequence
            place = place_of(subject)
            if place is None:
                # From a moved partition. On limits its ack is bookkeeping; elsewhere it would delete the message.
                if not ledger.by_reset:
                    answers.append(ACK_FRAME % reply)
                else:
                    self._foreign.add(sequence)
                continue
            state = place.state
            if sequence <= state.received_through or state.target is not None:
                answer = self._not_new(state, sequence, reply)
                if answer is not None:
                    dropped += 1
                    answers.append(answer)
                    continue
            if state.ahead is not None and self._was_done(state, sequence):
                dropped += 1
                answers.append(ACK_FRAME % reply)
                continue
            message = Message()
            message.subject, message.key = place.subject, place.key
            message.sequence, message.delivered = sequence, count
            message.data, message._head, message._reply = data, head, reply
            message.timestamp = stamp / 1e9
            self._fill(message, place, received, now)
            state.open[sequence] = message
            taken += 1
            size += len(data)
            if state.target is not None:
                self._hold(state, message, answers)
                continue
            if sequence > state.received_through:
                state.received_through = sequence
            push(message)
            if state.stopped:
                self._give_up(state, answers)
        ledger.in_hand += taken
        ledger.bytes += size
        if highest > ledger.high:
            self._spacing += 0.2 * ((highest - ledger.high) / len(items) - self._spacing)
            ledger.high = highest
        self._channel.write(answers)
        self._room.waits(pending)
        self._count(len(items), again, dropped, now)
        self._room.adapt(now)

    @property
    def lag(self) -> int:
        """How many sequences of the whole stream are still to come after the last read (an estimate)."""
        return int(self._room.pending * max(self._spacing, 1.0))

    @property
    def clogged(self) -> bool:
        """Whether deliveries of removed partitions, which only their owner may acknowledge, use up our ack limit.

        They stay pending until their owner has handled them, or permanently if another durable retains them. When they
        reach the server's limit, none of our own messages would be delivered. A reset excludes them.
        """
        return len(self._foreign) > self._config.max_ack_pending - self._config.capacity

    def feed(self, place: Place, sequence: int, data: bytes, head: bytes, timestamp: float) -> bool:
        """Accept one message of a range read; False when it was received before."""
        state = place.state
        if sequence <= state.received_through and sequence not in self._ledger.owed:
            return False
        if state.target is not None and sequence > state.target:
            return False  # it is delivered live
        self._ledger.owed.discard(sequence)
        if sequence in state.open or (state.ahead is not None and self._was_done(state, sequence)):
            return False
        message = Message()
        message.subject, message.key = place.subject, place.key
        message.sequence, message.delivered = sequence, 0
        message.data, message._head, message._reply = data, head, b""
        message.timestamp = timestamp
        self._fill(message, place, time.time(), self._loop.time())
        state.open[sequence] = message
        state.received_through = max(state.received_through, sequence)
        state.from_ranges += 1
        self._ledger.in_hand += 1
        self._ledger.bytes += len(data)
        self._pool.push(message)
        return True

    def _fill(self, message: Message, place: Place, received: float, now: float) -> None:
        state = place.state
        message.partition, message.lease = state.partition, state.lease
        message.received_at, message._held_since = received, now
        message.worker_id = self._recorder.worker_id
        message._headers = None
        message.attempt = 0
        message.last_error = ""
        message._lane = place.lane or state.lane(place.key)

    def _was_done(self, state: PartitionState, sequence: int) -> bool:
        """Whether the message was done out of order before this worker got the partition."""
        assert state.ahead is not None
        if sequence > state.ahead.upto:
            if state.target is None:  # else the range below is still to be read
                state.pass_ahead()
        elif state.ahead.covers(sequence):
            state.received_through = max(state.received_through, sequence)
            return True
        return False

    def _not_new(self, state: PartitionState, sequence: int, reply: bytes) -> bytes | None:
        """The answer to a delivery that may be a repeat; None when the message must be accepted."""
        held = state.open.get(sequence)
        if held is not None:
            held._reply = reply  # after a reset only the newest delivery can be acknowledged
            return b""
        if state.target is not None and self._ledger.by_reset:
            return b""  # aside: not ours, or not yet; the reset that starts the partition redelivers this
        if sequence in self._ledger.owed:
            self._ledger.owed.discard(sequence)
            return None
        if state.target is not None and sequence > state.target:
            return None
        return ACK_FRAME % reply

    def _hold(self, state: PartitionState, message: Message, answers: list[bytes]) -> None:
        """Hold a live message until the catch-up reaches its target; too many of them move the target up instead."""
        state.held.append(message)
        if len(state.held) > self._config.capacity // 4:
            answers.extend(self._extended(state, message.sequence))

    def extend(self, state: PartitionState, target: int) -> None:
        """Extend the partition's catch-up to this target; the range read brings the held messages up to there again."""
        self._channel.write(self._extended(state, target))

    def _extended(self, state: PartitionState, target: int) -> list[bytes]:
        state.target = target
        answers = []
        while state.held and state.held[0].sequence <= target:
            given_up = state.held.popleft()
            del state.open[given_up.sequence]
            self._ledger.forget((given_up,))
            answers.append(ACK_FRAME % given_up._reply)
        self._room.made_for_reads()
        return answers

    def _give_up(self, state: PartitionState, answers: list[bytes]) -> None:
        """A stopped partition must not fill the inbox: messages above its share are read again on resume."""
        if self._ledger.by_reset or len(state.open) <= self._config.capacity // 4:
            return
        if state.running or state.unfinished:
            return
        self._ledger.forget(state.open.values())
        state.look_ahead()
        state.target, state.received_through, state.range_end = state.received_through, min(state.open) - 1, None
        state.turn += 1
        answers.extend(ACK_FRAME % message._reply for message in state.open.values() if message._reply)
        state.open.clear()
        state.from_ranges = 0
        self._pool.forget(state)
        self._room.made()

    def release_held(self, state: PartitionState) -> None:
        """The catch-up of the partition has reached its target: process the live messages held meanwhile."""
        assert state.target is not None
        state.received_through = max(state.received_through, state.target)
        state.range_end, state.target = state.target, None
        while state.held:
            message = state.held.popleft()
            state.received_through = max(state.received_through, message.sequence)
            # A key's lane ends when it is empty: the lane known when this message was held may have been replaced.
            message._lane = state.lane(message._lane.key)
            self._pool.push(message)
        state.check_whole()

    def put_aside(self, state: PartitionState) -> None:
        """From now on hold or ignore new messages of the partition; they are read or delivered again when it resumes.

        Its cursor stays exact: open messages keep it down, and ignored messages never move it.
        """
        if state.target is None:
            state.received_through = max(state.received_through, self._ledger.verified)
            state.target = state.received_through

    def give_back(self, state: PartitionState) -> None:
        """Drop the messages of a partition aside that have not started: the server has them and redelivers them.

        Call `look_ahead` first: the cursor alone does not say what is done above it.
        """
        state.received_through = self._ledger.cursor(state.id)
        self.drop(state)

    def hold(self, state: PartitionState) -> None:
        """Restart a stopped partition that another worker may own: nothing of it counts as done until `resume_at`."""
        self.drop(state)
        state.received_through, state.target = 0, max(state.received_through, self._ledger.high)
        state.range_end = None

    def resume_at(self, state: PartitionState, after: int, ahead: Ahead | None = None) -> int:
        """The partition is ours from just after `after`; returns its target, above which messages come live."""
        state.ahead, state.highest_done = ahead or state.ahead, 0
        # The previous owner may have got beyond T before it stopped: held messages up to there may be done.
        target = max(state.target or 0, after, ahead.upto if ahead is not None else 0)
        self.extend(state, target)
        # After an aborted move, open messages up to `received_through` start now: no read may bring them again.
        state.received_through, state.stopped, state.turn = max(state.received_through, after), False, state.turn + 1
        return target

    async def stop(self, state: PartitionState) -> None:
        """When this returns nothing of the partition runs or will start, and its cursor is exact.

        A handler that takes longer than `drain_timeout` is cancelled, and left behind if it ignores that or runs in a
        thread; then the next owner repeats its message, and possibly later messages of other keys.
        """
        if self._ledger.by_reset:
            self.put_aside(state)
        state.stop(self._pool.running_of(state))
        await self._pool.drained(state, self._config.drain_timeout)
        state.finish_through = 0
        if state.stopped:
            state.look_ahead()
            if self._ledger.by_reset:
                self.give_back(state)

    def resume(self, state: PartitionState) -> None:
        """Let the lanes of a stopped partition continue."""
        self._pool.resume(state)

    def joining(self) -> list[PartitionState]:
        """Partitions that are aside and that we own: the next reset of the consumer starts them."""
        return [s for s in self._ledger.states.values() if s.target is not None and not s.stopped]

    def restarted(self, joining: Iterable[PartitionState]) -> list[PartitionState]:
        """The consumer restarts with the remaining messages; returns the partitions that became live by that.

        `joining`: the partitions we owned before the reset was requested, so that all their messages follow it.
        """
        self._ledger.rebase()
        self._foreign.clear()
        begun = [s for s in joining if self._ledger.states.get(s.id) is s and not s.stopped and s.target is not None]
        for state in begun:
            state.range_end, state.target = state.target, None
        return begun

    def _count(self, messages: int, redelivered: int, dropped: int, now: float) -> None:
        metrics = self._recorder.metrics
        metrics.count(m.MESSAGES, messages)
        metrics.observe(m.PULL_BATCH, messages)
        if self._last_read:
            metrics.observe(m.PULL_CYCLE, now - self._last_read)
        self._last_read = now
        if redelivered:
            metrics.count(m.REDELIVERIES, redelivered)
        if dropped:
            metrics.count(m.SKIPPED, dropped)

    # -- releasing ----------------------------------------------------------------------------------------------------

    def drop(self, state: PartitionState) -> None:
        """Drop the open messages of a partition we no longer own; on limits streams its acks are only bookkeeping."""
        answers = [ACK_FRAME % message._reply for message in state.open.values() if message._reply]
        self._ledger.forget(state.open.values())
        state.turn += 1
        state.open.clear()
        state.held.clear()
        state.from_ranges = 0
        for waited in (state.caught_up, state.drained):
            if waited is not None:
                waited.set()
        self._pool.forget(state)
        if not self._ledger.by_reset:
            self._channel.write(answers)
        self._room.made()

    def heartbeat(self, older_than: float) -> None:
        """Send in-progress for messages held longer than this."""
        until = self._loop.time() - older_than
        self._channel.write(
            IN_PROGRESS_FRAME % message._reply
            for state in self._ledger.states.values()
            for message in state.open.values()
            if message._reply and message._held_since <= until
        )

"""Catch-up by range reads: the same code takes over a partition and brings back a worker that fell behind.

A consumer with many filters on a file stream collapses to about 3,000 messages per second as soon as it has a backlog,
and stays there (docs/evidence/jetstream.md#j8). A range read of the same messages, filtered here, runs at several
100,000. So a backlog is read by range, up to a sequence above which live deliveries are known to follow:

- take-over of a partition: `(cursor, T]`, T read from the leader after the filter was in force; live messages above T
  are held meanwhile and released in order (docs/evidence/handoff.md#h1);
- falling behind: the consumer pauses while `(high, T]` of all partitions is read, then it is reset to just after what
  is done. The ledger recognises deliveries that overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping

import pyarrow as pa

from parti.model import PartitionId
from parti.observe import worker_metrics as m
from parti.wire.async_ranges import AsyncRangeReader
from parti.worker.durable import Durable
from parti.worker.inbox import Inbox
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.room import Room
from parti.worker.runtime import Runtime

_COLUMNS = ("subject", "sequence", "timestamp", "headers", "data")
_SLICE = 256  # rows turned into messages before the event loop may run something else


class CatchUpReader:
    """Range reads of one worker's stream, passed to its inbox as fast as the handlers make room."""

    def __init__(self, runtime: Runtime, ledger: Ledger, room: Room, inbox: Inbox, durable: Durable) -> None:
        options = runtime.js.connection.connect_options
        self.open_reader: Callable[[], AsyncRangeReader] = lambda: AsyncRangeReader(options, name="parti-catchup")
        self._stream = runtime.config.stream
        self._ledger = ledger
        self._room = room
        self._inbox = inbox
        self._recorder = runtime.recorder
        self._durable = durable
        self._one_at_a_time = asyncio.Lock()

    async def take_over(self, states: Iterable[PartitionState], subjects: tuple[str, ...]) -> None:
        """When this returns, each partition has received everything up to its target and continues with live messages.

        Each state has its position in `received_through` and its target in `target`, which may move during the read. A
        partition that is stopped or removed meanwhile is left as it is.
        """
        async with self._one_at_a_time:
            waiting = {state.id: state for state in states}
            while waiting := {key: state for key, state in waiting.items() if self._catching(state)}:
                after = min(state.received_through for state in waiting.values())
                target = max(state.target or 0 for state in waiting.values())
                parts = {key: (state, state.turn, state.target or 0) for key, state in waiting.items()}
                if after < target:
                    await self._read(after, target, subjects, _bounds(parts))
                for state, turn, upto in parts.values():
                    # Everything up to `upto` was read, even if it held no message of this partition.
                    if not self._catching(state) or state.turn != turn:
                        continue
                    if state.target is not None and state.target <= upto:
                        self._inbox.release_held(state)
                    else:
                        state.received_through = max(state.received_through, upto)

    async def backlog(self, subjects: tuple[str, ...], near: int, checkpoint: Callable[[], Awaitable[None]]) -> int:
        """Read all live partitions until fewer than `near` sequences are left; returns the number of messages read.

        Do not pull from the consumer meanwhile; afterwards reset it to just after what is done.
        `checkpoint` is called after each part to store the progress: a crash then repeats one part at most.
        """
        async with self._one_at_a_time:
            ledger = self._ledger
            total = 0
            end = await self._durable.last_sequence()
            while ledger.high < end:
                total += await self._read(ledger.high, end, subjects, _live, checkpoint=checkpoint)
                ledger.stand_at(max(ledger.high, end))
                await checkpoint()
                end = await self._durable.last_sequence()
                if end - ledger.high < near:
                    break
            # A partition that is being taken over was left out: its own range read must reach as far.
            for state in ledger.states.values():
                if state.target is not None and state.target < ledger.high:
                    self._inbox.extend(state, ledger.high)
            return total

    def _catching(self, state: PartitionState) -> bool:
        return state.catching_up and not state.stopped and self._ledger.has(state)

    async def _read(
        self,
        after: int,
        to: int,
        subjects: tuple[str, ...],
        bound: Callable[[PartitionState], int],
        *,
        checkpoint: Callable[[], Awaitable[None]] | None = None,
    ) -> int:
        """Pass `(after, to]` to the inbox in order, each partition up to its `bound`; returns the message count."""
        fed, ledger = 0, self._ledger
        async with contextlib.aclosing(self._batches(after, to, subjects)) as batches:
            async for batch in batches:
                fed += await self._feed(batch, bound)
                if checkpoint is not None and batch.num_rows:
                    ledger.stand_at(max(ledger.high, batch.column("sequence")[-1].as_py()))
                    await checkpoint()
        self._recorder.metrics.count(m.CAUGHT_UP, fed)
        return fed

    async def _batches(self, after: int, to: int, subjects: tuple[str, ...]) -> AsyncGenerator[pa.RecordBatch]:
        """Messages that the stream's limits removed are lost for every reader: this is reported and skipped."""
        reader = self.open_reader()
        lost: list[tuple[int, int]] = []
        try:
            async with contextlib.aclosing(
                reader.read(
                    self._stream,
                    after,
                    to,
                    subjects=subjects,
                    columns=_COLUMNS,
                    # On an interest stream, acked messages are deleted; that is expected.
                    allow_gone=self._ledger.by_reset,
                    on_loss=lambda first, last: lost.append((first, last)),
                )
            ) as batches:
                async for batch in batches:
                    yield batch
        finally:
            await reader.close()
            for first, last in lost:
                gone = f"stream {self._stream!r} no longer holds sequences {first} to {last}: its limits removed them"
                self._recorder.event("worker.catch_up", op="catch_up", result="data_loss", error=gone, warn=True)

    async def _feed(self, batch: pa.RecordBatch, bound: Callable[[PartitionState], int]) -> int:
        fed = 0
        async for rows in self._parts(batch):
            subjects, sequences, stamps, headers, payloads = (column.to_pylist() for column in rows.columns)
            for i, sequence in enumerate(sequences):
                subject = subjects[i].encode()
                place = self._ledger.place(subject)
                if place is None or sequence > bound(place.state):
                    continue
                if not self._room.left():
                    await self._room.wait()
                    # Look up again after each wait: the partition, or our right to feed it, may be gone.
                    place = self._ledger.place(subject)
                    if place is None or sequence > bound(place.state):
                        continue
                fed += self._inbox.feed(place, sequence, payloads[i], _head(headers[i]), stamps[i])
        return fed

    async def _parts(self, batch: pa.RecordBatch) -> AsyncIterator[pa.RecordBatch]:
        index = batch.schema.get_field_index("timestamp")
        seconds = batch.column("timestamp").cast(pa.int64()).cast(pa.float64(), safe=False)
        batch = batch.set_column(index, "timestamp", pa.compute.divide(seconds, 1e9))
        for start in range(0, batch.num_rows, _SLICE):
            await self._room.wait()
            yield batch.slice(start, _SLICE)


def _live(state: PartitionState) -> int:
    return 0 if state.catching_up else sys.maxsize


def _bounds(parts: Mapping[PartitionId, tuple[PartitionState, int, int]]) -> Callable[[PartitionState], int]:
    """How far a read goes for each partition: to the target that it had when the read began.

    A target may move up during the read. The read has already skipped messages below the new target as "comes live", so
    feeding later ones would claim that those were read. A partition that was removed and added again starts elsewhere.
    """

    def bound(state: PartitionState) -> int:
        known, turn, upto = parts.get(state.id, (None, 0, 0))
        return upto if known is state and turn == state.turn else 0

    return bound


def _head(headers: list[dict[str, str | bytes]] | None) -> bytes:
    """The header block, encoded as it was received."""
    if not headers:
        return b""
    lines = [b"NATS/1.0"]
    for header in headers:
        key, value = header["key"], header["value"]
        lines.append(b"%s: %s" % (_bytes(key), _bytes(value)))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text

"""Decides whether a worker that fell behind should read its backlog by range, and performs that read.

A consumer with many filters on a file stream collapses as soon as it has a backlog (docs/evidence/jetstream.md#j8).
"""

from __future__ import annotations

from parti.worker.catchup import CatchUpReader
from parti.worker.channel import FellBehind
from parti.worker.durable import Durable
from parti.worker.ledger import Ledger
from parti.worker.runtime import Runtime

_CHECKPOINT = 1.0  # seconds of work that a crash during a catch-up may repeat
_FEW = 500  # pending messages that even a collapsed consumer delivers quickly enough
_WITHOUT = 30.0  # seconds without catch-up after a failed one: slow progress beats none
# a consumer with fewer filters drains a backlog at tens of thousands per second (docs/evidence/jetstream.md#j8)
_CLIFF_FILTERS = 8


class Backlog:
    """The backlog of all live partitions together; a partition that is being taken over has its own read."""

    def __init__(self, runtime: Runtime, ledger: Ledger, durable: Durable, reader: CatchUpReader) -> None:
        self._config = runtime.config
        self._recorder = runtime.recorder
        self._clock = runtime.clock
        self._ledger = ledger
        self._durable = durable
        self._reader = reader
        self._checkpointed = 0.0
        self._not_before = 0.0

    def cliff_threatens(self) -> bool:
        """Whether a backlog is better read by range: many filters on a file stream with limits retention."""
        return (
            self._config.catch_up == "auto"
            and self._durable.file_storage
            and not self._ledger.by_reset
            and len(self._durable.filters) >= _CLIFF_FILTERS
            and self._clock.now() >= self._not_before
        )

    async def check(self) -> None:
        """Raises `FellBehind` before the first message arrives: a collapsed consumer takes seconds to deliver it."""
        if self._durable.pending >= _FEW and self.cliff_threatens():
            lag = await self._durable.last_sequence() - self._ledger.high
            if lag >= self._config.catch_up_lag:
                raise FellBehind(f"{self._durable.pending} messages behind")

    async def read(self) -> None:
        """When this returns little backlog is left; the consumer must not be pulled from meanwhile."""
        started = self._clock.now()
        self._checkpointed = started
        self._recorder.event("worker.catch_up", op="catch_up", result="started", after=self._ledger.high)
        subjects = self._ledger.routes.subjects
        count = await self._reader.backlog(subjects, self._config.catch_up_lag // 2, self._checkpoint)
        took = round(self._clock.now() - started, 3)
        self._recorder.event("worker.catch_up", op="catch_up", result="success", messages=count, took=took)

    def failed(self) -> None:
        """A read failed: use the consumer for a while."""
        self._not_before = self._clock.now() + _WITHOUT

    async def _checkpoint(self) -> None:
        """Store the catch-up's progress in the consumer itself: after a crash it resumes there."""
        if self._clock.now() - self._checkpointed < _CHECKPOINT:
            return
        async with self._durable.changing:
            await self._durable.reset(self._ledger.floor())
        self._checkpointed = self._clock.now()

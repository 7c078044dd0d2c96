"""The leader's view of the partition source. The last good list stays in force, whatever the source does.

A source may raise, hang, or return partitions that share subjects. None of that stops the leader: it keeps the last
list, reports the error (log, hook, health), and asks again. A new leader without an answer uses the partitions of the
stored assignment, so that a source that fails during a leader change delays nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import aclosing

from parti.backoff import PATIENT
from parti.clock import Clock
from parti.errors import ConfigError, PartiError, TransientError
from parti.manager.sources import PartitionSource
from parti.model import Partition
from parti.observe.logs import get_logger

log = get_logger("control")

Check = Callable[[Sequence[Partition]], None]
"""Raises a ConfigError for partitions that cannot be served together."""


class SourceFailed(TransientError):
    """The partition source raised: the last good list stays in force, and the source is asked again."""


class PartitionFeed:
    """Asks one source while `run` is running."""

    def __init__(
        self,
        source: PartitionSource,
        check: Check,
        *,
        clock: Clock,
        changed: Callable[[tuple[Partition, ...]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`changed`: called with each good list; `failed`: called with each error of the source."""
        self.partitions: tuple[Partition, ...] | None = None
        """The last good list; None before the first."""
        self.problem: str | None = None
        """The current error of the source, as text."""
        self._source = source
        self._check = check
        self._clock = clock
        self._changed = changed
        self._failed = failed
        self._first = asyncio.Event()

    def __repr__(self) -> str:
        known = "-" if self.partitions is None else len(self.partitions)
        return f"<PartitionFeed partitions={known} problem={self.problem or '-'}>"

    async def first(self, patience: float | None) -> tuple[Partition, ...] | None:
        """The last good list; None when there is none within `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._first.wait()
        return self.partitions

    async def run(self) -> None:
        """Follow the source; returns when the source reports that it will not change any more."""
        waits = PATIENT.delays()
        while True:
            try:
                partitions = await self._source.partitions()
            except Exception as error:  # user code: whatever it raises, the last list stays in force
                await self._pause(error, next(waits))
                continue
            self._take(partitions)
            waits = PATIENT.delays()
            async with aclosing(self._source.changes()) as changes:
                while True:
                    try:
                        partitions = await anext(changes)
                    except StopAsyncIteration:
                        return
                    except Exception as error:
                        await self._pause(error, next(waits))
                        break
                    self._take(partitions)

    async def _pause(self, error: Exception, seconds: float) -> None:
        self._report(error, again_in=round(seconds, 2))
        await self._clock.sleep(seconds)

    async def ask(self) -> tuple[Partition, ...]:
        """Ask now; an error in the answer is raised, and the last good list stays in force."""
        try:
            partitions = await self._source.partitions()
            self._check(partitions)
        except Exception as error:
            self._report(error)
            if isinstance(error, PartiError):
                raise
            raise SourceFailed(f"the partition source raised {type(error).__name__}: {error}") from error
        self._good(partitions)
        return partitions

    def _take(self, partitions: tuple[Partition, ...]) -> None:
        try:
            self._check(partitions)
        except ConfigError as error:
            self._report(error)  # no retry: the source reports the next list when there is one
            return
        self._good(partitions)
        self._changed(partitions)

    def _good(self, partitions: tuple[Partition, ...]) -> None:
        if self.problem is not None:
            log.info("source.well", partitions=len(partitions))
        self.partitions, self.problem = partitions, None
        self._first.set()

    def _report(self, error: Exception, **more: object) -> None:
        if isinstance(error, ConfigError):
            self.problem = f"the partition source was refused: {error}"
            log.warning("source.refused", op="source", result="refused", error=str(error))
            self._failed(error)
            return
        self.problem = f"the partition source raised {type(error).__name__}: {error}"
        log.warning("source.failed", op="source", result="failed", error=self.problem, **more)
        changed = error if isinstance(error, PartiError) else SourceFailed(self.problem)
        self._failed(changed)

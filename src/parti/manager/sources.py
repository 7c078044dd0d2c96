"""Partition sources: a fixed list, a key-value bucket, the subjects of a stream, or any callable.

Only the leader asks a source. `partitions()` returns the current set; `changes()` yields the whole set after changes.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

from parti.errors import ConfigError, PartiError
from parti.model import Partition
from parti.observe.logs import get_logger
from parti.wire.api import JetStreamApi
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Operation, SnapshotDone

log = get_logger("control")

_RANGE = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")
_SETTLE = 0.05  # seconds to collect changes of a bucket into one new set
_MOST = 100_000  # partitions: more than an assignment record can carry


class PartitionSource(Protocol):
    """Any partition source. A partition no longer returned is retired: its owner stops, its position is kept."""

    async def partitions(self) -> tuple[Partition, ...]:
        """All current partitions, each once."""
        ...

    def changes(self) -> AsyncGenerator[tuple[Partition, ...], None]:
        """Yields the whole set after each change; ends when there will be no more changes."""
        ...


class StaticSource:
    """A list that changes only by `update`."""

    def __init__(self, partitions: Iterable[Partition | str]) -> None:
        self._partitions = unique(p if isinstance(p, Partition) else parse_partition(p) for p in partitions)
        self._changed = asyncio.Event()
        self._check: Callable[[Sequence[Partition]], None] = lambda _: None

    def check_with(self, check: Callable[[Sequence[Partition]], None]) -> None:
        """Set a check that refuses partitions by raising: applied to the current set now, and to each later update."""
        check(self._partitions)
        self._check = check

    def update(self, partitions: Iterable[Partition | str]) -> None:
        """Use these from now on; a leader in this process is notified at once.

        Partitions that share subjects are refused (OverlappingPartitions), and the previous ones stay in force.
        """
        wanted = unique(p if isinstance(p, Partition) else parse_partition(p) for p in partitions)
        self._check(wanted)
        self._partitions = wanted
        self._changed.set()

    async def partitions(self) -> tuple[Partition, ...]:
        return self._partitions

    async def changes(self) -> AsyncGenerator[tuple[Partition, ...], None]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self._partitions


class KvSource:
    """One bucket key per partition: the key is the partition's keys joined by dots, the value is empty or a weight."""

    def __init__(self, js: JetStreamApi, bucket: str, *, prefix: str = "") -> None:
        self._js = js
        self._bucket = bucket
        self._prefix = f"{prefix}." if prefix else ""

    async def partitions(self) -> tuple[Partition, ...]:
        kv = await KeyValue.open(self._js, self._bucket)
        found = [self._parse(entry.key, entry.value) for entry in await kv.entries(f"{self._prefix}>")]
        return unique(p for p in found if p is not None)

    async def changes(self) -> AsyncGenerator[tuple[Partition, ...], None]:
        kv = await KeyValue.open(self._js, self._bucket)
        known: dict[str, Partition] = {}
        complete = asyncio.Event()
        dirty = asyncio.Event()

        async def follow() -> None:
            async with aclosing(kv.watch(f"{self._prefix}>")) as watch:
                async for change in watch:
                    if isinstance(change, SnapshotDone):
                        complete.set()
                    elif change.operation is Operation.PUT and change.value is not None:
                        partition = self._parse(change.key, change.value)
                        if partition is not None:
                            known[change.key] = partition
                    else:
                        known.pop(change.key, None)
                    dirty.set()

        task = asyncio.create_task(follow(), name="parti-source")
        try:
            await complete.wait()
            while True:
                await dirty.wait()
                await asyncio.sleep(_SETTLE)
                dirty.clear()
                yield unique(known.values())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _parse(self, key: str, value: bytes) -> Partition | None:
        text = value.decode(errors="replace").strip()
        try:
            return Partition(tuple(key.removeprefix(self._prefix).split(".")), int(text) if text else 1)
        except (ConfigError, ValueError) as error:
            log.warning("source.refused", bucket=self._bucket, key=key, error=str(error))
            return None


class SubjectSource:
    """The partitions that a stream's own subjects name: the `token`th token (from 1) of those that match `filter`."""

    def __init__(self, js: JetStreamApi, stream: str, *, filter: str = ">", token: int = 2, every: float = 5.0) -> None:
        if token < 1:
            raise ConfigError(f"token {token} of a subject: tokens count from 1")
        self._js = js
        self._stream = stream
        self._filter = filter
        self._token = token
        self._every = every

    async def partitions(self) -> tuple[Partition, ...]:
        names: set[str] = set()
        async for page in self._js.stream_subjects(self._stream, self._filter):
            for subject in page:
                tokens = subject.split(".")
                if len(tokens) >= self._token:
                    names.add(tokens[self._token - 1])
            if len(names) > _MOST:
                raise ConfigError(f"{self._stream} has more than {_MOST} partitions by token {self._token}: group them")
        return unique(Partition((name,)) for name in names)

    async def changes(self) -> AsyncGenerator[tuple[Partition, ...], None]:
        """The server has no event for a new subject: poll every few seconds. A subject without messages stays known."""
        known = set(await self.partitions())
        while True:
            await asyncio.sleep(self._every)
            try:
                found = set(await self.partitions())
            except PartiError as error:
                log.warning("source.failed", stream=self._stream, error=str(error))
                continue
            if not found <= known:
                known |= found
                yield unique(known)


class CallableSource:
    """The partitions that a plain or async function returns; called again every `every` seconds."""

    def __init__(
        self,
        function: Callable[[], Iterable[Partition | str] | Awaitable[Iterable[Partition | str]]],
        *,
        every: float = 10.0,
    ) -> None:
        self._function = function
        self._every = every

    async def partitions(self) -> tuple[Partition, ...]:
        found = self._function()
        values = await found if inspect.isawaitable(found) else found
        return unique(p if isinstance(p, Partition) else parse_partition(p) for p in values)

    async def changes(self) -> AsyncGenerator[tuple[Partition, ...], None]:
        before: tuple[Partition, ...] | None = None
        while True:
            await asyncio.sleep(self._every)
            now = await self.partitions()  # errors are reported; the last list stays in force (`partition_feed`)
            if now != before:
                before = now
                yield now


def parse_partition(text: str) -> Partition:
    """`orders.7` or `orders.7:100` with a weight."""
    name, colon, weight = text.partition(":")
    if colon and not weight.isdecimal():
        raise ConfigError(f"partition {text!r}: the weight behind the colon must be a whole number")
    return Partition(tuple(name.split(".")), int(weight) if colon else 1)


def expand(patterns: Iterable[str]) -> tuple[Partition, ...]:
    """Partitions from configuration: `p-{0..63}` counts, everything else is taken as it is."""
    found: list[Partition] = []
    for pattern in patterns:
        ranged = _RANGE.fullmatch(pattern)
        if ranged is None:
            found.append(parse_partition(pattern))
            continue
        before, first, last, after = ranged.groups()
        if int(last) - int(first) >= _MOST:
            raise ConfigError(f"control.partitions {pattern!r} names more than {_MOST} partitions")
        found += [parse_partition(f"{before}{number}{after}") for number in range(int(first), int(last) + 1)]
    return unique(found)


def unique(partitions: Iterable[Partition]) -> tuple[Partition, ...]:
    """Sorted by keys, each once; the last weight of a partition wins."""
    return tuple(sorted({p.id: p for p in partitions}.values()))

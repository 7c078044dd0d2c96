"""The one durable consumer of a worker, on the server: created, updated, reset and recreated, with typed results.

An update changes only `filter_subjects`, the metadata and the tunable limits. All other settings were fixed at creation
and are sent back as the server reported them (10012 otherwise).

The metadata stores what a position needs beyond the server's ack floor. The same call that changes the filters writes
it, so a crash in between cannot lose it:

- `parti.catching`: partitions whose catch-up was not finished, with the position it started at;
- `parti.left`: the open messages of a worker that was closed; everything else up to `high` is done.

It also names the consumer's owner (parti.worker.seal). A consumer of another owner is refused with `ForeignDurable`
before anything is done to it: each call that changes or deletes it checks first.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from parti.backoff import retry
from parti.errors import Category, PartiError, RequestTimeout
from parti.model import PartitionId, Retention
from parti.wire.api_consumers import filters_of
from parti.wire.errors import (
    ConsumerDoesNotExist,
    ConsumerFilesGone,
    ConsumerInvalidReset,
    ConsumerNotFound,
    MessageNotFound,
)
from parti.worker.errors import ForeignDurable
from parti.worker.recorder import Op
from parti.worker.routing import consumer_name, consumer_stem
from parti.worker.runtime import Runtime
from parti.worker.seal import Seal, foreign

T = TypeVar("T")
Json = dict[str, Any]

_CATCHING, _LEFT = "parti.catching", "parti.left"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What a worker must know about its stream."""

    retention: Retention
    file: bool
    replicas: int
    last_seq: int
    first_seq: int
    created: str
    """Creation time; a stream that was deleted and recreated counts from 1 again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The positions stored in the consumer's metadata."""

    catching: Mapping[PartitionId, int] = field(default_factory=dict)
    high: int = 0
    left: tuple[int, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Memory:
        """Read from a consumer's configuration; malformed values are ignored."""
        metadata = config.get("metadata") or {}
        try:
            catching = {PartitionId(str(k)): int(v) for k, v in json.loads(metadata.get(_CATCHING, "{}")).items()}
            high, left = json.loads(metadata.get(_LEFT, "[0, []]"))
            return cls(catching, int(high), tuple(int(sequence) for sequence in left))
        except (ValueError, TypeError, AttributeError):
            return cls()

    def metadata(self) -> dict[str, str]:
        entries = {}
        if self.catching:
            entries[_CATCHING] = json.dumps(self.catching, separators=(",", ":"))
        if self.left:
            entries[_LEFT] = json.dumps([self.high, self.left], separators=(",", ":"))
        return entries


class Durable:
    """API calls for one consumer. Retriable errors are retried with a backoff, and counted by operation."""

    def __init__(self, runtime: Runtime) -> None:
        self.js = runtime.js
        self.name = ""
        self.namespace = runtime.namespace
        self.stream_created = ""
        """The stream's creation time, as last seen."""
        self.file_storage = False
        """Whether the stream uses file storage, as last seen."""
        self.filters: tuple[str, ...] = ()
        self.known = False
        """Whether this worker has seen or created the consumer."""
        self._config = runtime.config
        self._backoff = runtime.backoff
        self._clock = runtime.clock
        self._recorder = runtime.recorder
        self.pending = 0
        """Messages that the consumer still had to deliver, as the server last reported."""
        self.changing = asyncio.Lock()
        """Held by code that changes the consumer, or starts a pull that depends on its state."""
        self._stored: Json = {}
        self._created = ""
        self._floor = 0  # the ack floor, as last seen

    def __repr__(self) -> str:
        return f"<Durable {self.name} filters={len(self.filters)}>"

    def name_for(self, worker_id: str) -> str:
        """The name of this worker's durable."""
        return consumer_name(self._config.consumer_prefix, worker_id, self.namespace)

    async def facts(self) -> StreamFacts:
        """The stream's state, from its leader."""
        info = await self._call("info", lambda: self.js.stream_info(self._config.stream))
        self.stream_created = info["created"]
        config = info["config"]
        self.file_storage = config["storage"] == "file"
        return StreamFacts(
            Retention(config["retention"]),
            self.file_storage,
            int(config["num_replicas"]),
            int(info["state"]["last_seq"]),
            int(info["state"]["first_seq"]),
            info["created"],
        )

    async def last_sequence(self) -> int:
        return (await self.facts()).last_seq

    async def next_sequence(self, subject: str, at_least: int) -> int | None:
        """The subject's first message at or above this sequence, from the stream's leader; None if there is none."""
        try:
            found = await self._call(
                "info", lambda: self.js.msg_get(self._config.stream, seq=at_least, next_by_subj=subject)
            )
        except MessageNotFound:
            return None
        return found.seq

    async def info(self) -> Json | None:
        """The consumer's info; None when it does not exist; raises `ForeignDurable` when it has another owner."""
        info = await self._look()
        if info is not None:
            if not self.known:
                self._applied(info)
            self._remember(info)
            self._floor = int(info["ack_floor"]["stream_seq"])
        return info

    async def _look(self) -> Json | None:
        try:
            info = await self._call("info", lambda: self.js.consumer_info(self._config.stream, self.name))
        except ConsumerNotFound:
            return None
        if why := foreign(info["config"], self.namespace):
            raise ForeignDurable(self.name, self._config.stream, why)
        return info

    async def intact(self) -> bool | None:
        """Whether the consumer is still the one we created, with the filters we set; None when it does not exist."""
        info = await self._look()
        if info is None:
            return None
        self.pending = int(info.get("num_pending") or 0)
        return self._as_we_made_it(info)

    def _as_we_made_it(self, info: Json) -> bool:
        return filters_of(info["config"]) == self.filters and info["created"] == self._created

    async def create(self, filters: Sequence[str], memory: Memory, *, after: int, retention: Retention) -> Json:
        """Create the consumer; it delivers what follows `after`."""
        return await self._call("create", lambda: self.create_once(filters, memory, after=after, retention=retention))

    async def create_once(self, filters: Sequence[str], memory: Memory, *, after: int, retention: Retention) -> Json:
        """`create` without a retry."""
        whole = retention is Retention.INTEREST and self.js.can_reset
        config = self._whole(filters, memory, after=0 if whole else after, retention=retention)
        info = await self.js.consumer_create(self._config.stream, config, action="create")
        if whole and after:
            # A reset cannot go below the sequence at which the consumer was created to start (10204). Here it must be
            # able to: a partition that is added may have an earlier position than those that were here.
            await self.js.consumer_reset(self._config.stream, self.name, after + 1)
        self._remember(info)
        self._applied(info)
        return info

    async def update(self, filters: Sequence[str], memory: Memory) -> Json:
        """Replace filters and metadata; raises `ConsumerDoesNotExist` when the consumer is gone.

        Call `look_before_update` first: only that can tell who owns the consumer.

        A consumer that lost its files at the server refuses every update: it is deleted and recreated at its own ack
        floor. The pull then gets an error that the consumer is gone, and attaches again.
        """
        config = self._stored | self._tunables(filters, memory)
        config["max_waiting"] = self._stored.get("max_waiting", self._config.max_waiting)  # cannot be updated (10012)
        try:
            info = await self._call("update", lambda: self.js.consumer_update(self._config.stream, config))
        except ConsumerFilesGone as error:
            self._recorder.event("worker.recreated", op="update", result="files_gone", error=str(error), warn=True)
            return await self._make_anew(self._floor, filters, memory)
        self._remember(info)
        self._applied(info)
        return info

    async def look_before_update(self, filters: Sequence[str]) -> tuple[bool, bool]:
        """Whether another party has changed the consumer, and whether these filters would add to its current ones.

        It costs one extra call. The server has no conditional update, and its answer does not show the previous state:
        only a look tells that the consumer is still ours and that nobody removed filters.
        """
        info = await self.info()
        if info is None:
            return False, False
        had, wanted = filters_of(info["config"]), tuple(sorted(filters))
        tampered = had != wanted and not self._as_we_made_it(info)  # equal: an earlier try of ours succeeded
        return tampered, bool(set(wanted) - set(had))

    async def reset(self, after: int, *, not_above_floor: bool = False) -> bool:
        """Deliver from after `after`, or the ack floor if lower, with consumer sequences from 1; False when it is gone.

        The reset is repeated until it is answered (docs/evidence/cluster.md#c8). A missing consumer does not answer at
        all, so its existence is checked first.
        """
        while True:
            info = await self.info()
            if info is None:
                return False
            start = min(after, int(info["ack_floor"]["stream_seq"])) if not_above_floor else after
            if not self.js.can_reset:
                await self._make_anew(start, self.filters, self.memory())
                return True
            try:
                answer = await self.js.consumer_reset(self._config.stream, self.name, start + 1)
                self.pending = int(answer.get("num_pending") or 0)
                return True
            except ConsumerInvalidReset:
                # another party created it to start later than we need
                await self._make_anew(start, self.filters, self.memory())
                return True
            except RequestTimeout as error:
                self._recorder.retried("iterate", 1, 0.0, error)

    async def _make_anew(self, after: int, filters: Sequence[str], memory: Memory) -> Json:
        """Delete and recreate it; it delivers from the first message after `after`, or from an earlier one."""
        retention = (await self.facts()).retention
        after = 0 if retention is Retention.INTEREST else after
        config = self._whole(filters, memory, after=after, retention=retention)
        guarded = retention is Retention.INTEREST
        remake = self.js.consumer_remake
        info = await self._call("create", lambda: remake(self._config.stream, config, guarded=guarded))
        self._remember(info)
        self._applied(info)
        return info

    async def delete(self) -> None:
        if await self._look() is None:
            return
        try:
            await self._call("update", lambda: self.js.consumer_delete(self._config.stream, self.name))
        except ConsumerNotFound:
            return

    def memory(self) -> Memory:
        """The positions in the consumer's metadata, as last seen."""
        return Memory.read(self._stored) if self.of_this_stream else Memory()

    @property
    def of_this_stream(self) -> bool:
        """False when the consumer was created for an earlier stream of this name: its positions are void then."""
        seal = Seal.read(self._stored)
        return seal is None or seal.stream == self.stream_created

    @property
    def sealed(self) -> bool:
        """Whether the consumer's seal names us and this stream; consumers of earlier versions have no seal."""
        return Seal.read(self._stored) is not None and self.of_this_stream

    @property
    def scope(self) -> str:
        """The common name prefix of the durables that share the stream's partitions with ours."""
        return consumer_stem(self._config.consumer_prefix, self.namespace)

    def _seal(self) -> Seal:
        return Seal(self.namespace, self.stream_created, self.name.removeprefix(f"{self.scope}-"))

    def _remember(self, info: Json) -> None:
        self._stored = info["config"]
        self.known = True
        self.pending = int(info.get("num_pending") or 0)

    def _applied(self, info: Json) -> None:
        """The consumer is now as we want it: any later difference is another party's change."""
        self.filters, self._created = filters_of(info["config"]), info["created"]

    def _whole(self, filters: Sequence[str], memory: Memory, *, after: int, retention: Retention) -> Json:
        config = self._tunables(filters, memory) | {
            "name": self.name,
            "durable_name": self.name,
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "deliver_policy": "all",
        }
        if retention is not Retention.WORKQUEUE and after:  # a work queue starts at its first remaining message (10101)
            config |= {"deliver_policy": "by_start_sequence", "opt_start_seq": after + 1}
        return config

    def _tunables(self, filters: Sequence[str], memory: Memory) -> Json:
        config = self._config
        return {
            "filter_subjects": list(filters),
            "metadata": self._seal().metadata() | memory.metadata(),
            "ack_wait": int(config.ack_wait * 1e9),
            "max_deliver": -1,
            "max_ack_pending": config.max_ack_pending,
            "max_waiting": config.max_waiting,
            "inactive_threshold": int(config.inactive_threshold * 1e9),
        }

    async def _call(self, op: Op, call: Callable[[], Awaitable[T]]) -> T:
        return await retry(
            call,
            backoff=self._backoff,
            clock=self._clock,
            classify=_worth_another_try,
            on_retry=lambda tries, wait, error: self._recorder.retried(op, tries, wait, error),
        )


def _worth_another_try(error: PartiError) -> bool:
    return error.retriable or error.category is Category.TRANSIENT


def is_gone(error: PartiError) -> bool:
    """Whether the error says that the consumer does not exist, or no longer exists."""
    return error.category is Category.NOT_FOUND or isinstance(error, ConsumerDoesNotExist)

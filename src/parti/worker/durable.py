"""The one durable consumer of a worker, on the server: created, updated, reset and recreated, with typed results.

Only `filter_subjects`, the metadata and the tunable limits ever change on an update; whatever else the consumer has
was decided when it was created, and is sent back as the server said it (10012 otherwise).

The metadata carries what a position needs beyond the server's ack floor, written by the same call that changes the
filters, so that a crash in between cannot lose it:

- `parti.catching`: partitions whose catch-up was not finished, with the position it began at;
- `parti.left`: what a worker that was closed had in hand; everything else up to `high` is done.

It also says whose the consumer is (parti.worker.seal). One that is not ours is refused with `ForeignDurable` before
anything is done to it: each call that changes or removes it looks first.
"""

from __future__ import annotations

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
    """What a worker must know of its stream."""

    retention: Retention
    file: bool
    replicas: int
    last_seq: int
    first_seq: int
    created: str
    """When it was made; a stream that was deleted and made anew counts from 1 again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the consumer's metadata remembers."""

    catching: Mapping[PartitionId, int] = field(default_factory=dict)
    high: int = 0
    left: tuple[int, ...] = ()

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Memory:
        """From a consumer's configuration; what is malformed counts as nothing remembered."""
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
    """API calls about one consumer. Retriable errors are tried again with a backoff, and counted by operation."""

    def __init__(
        self,
        runtime: Runtime,
    ) -> None:
        self.js = runtime.js
        self.name = ""
        self.namespace = runtime.namespace
        self.stream_created = ""
        """The stream's creation time, as it was last seen."""
        self.filters: tuple[str, ...] = ()
        self.known = False
        """Whether this worker has seen or made the consumer."""
        self._config = runtime.config
        self._backoff = runtime.backoff
        self._clock = runtime.clock
        self._recorder = runtime.recorder
        self.pending = 0
        """Messages that the consumer had still to deliver when the server last spoke of it."""
        self.before_adding: Callable[[], Awaitable[None]] = _nothing
        """Called before filters are added. On a work queue the ack floor has to be back at the start by then: what lies
        below the floor and matches a filter counts as acknowledged, and a replicated server deletes it (decision 9)."""
        self._stored: Json = {}
        self._created = ""
        self.on_tampered: Callable[[], None] = lambda: None
        """Called before we change a consumer that somebody else has changed: what it left out meanwhile is not known,
        and once our filters are back, what comes does not tell."""

    def __repr__(self) -> str:
        return f"<Durable {self.name} filters={len(self.filters)}>"

    def name_for(self, worker_id: str) -> str:
        """What the durable of this worker is called."""
        return consumer_name(self._config.consumer_prefix, worker_id, self.namespace)

    async def facts(self) -> StreamFacts:
        """The stream as its leader sees it."""
        info = await self._call("info", lambda: self.js.stream_info(self._config.stream))
        self.stream_created = info["created"]
        config = info["config"]
        return StreamFacts(
            Retention(config["retention"]),
            config["storage"] == "file",
            int(config["num_replicas"]),
            int(info["state"]["last_seq"]),
            int(info["state"]["first_seq"]),
            info["created"],
        )

    async def last_sequence(self) -> int:
        return (await self.facts()).last_seq

    async def next_sequence(self, subject: str, at_least: int) -> int | None:
        """The first message of the subject from this sequence on that the stream's leader holds; None for none."""
        try:
            found = await self._call(
                "info", lambda: self.js.msg_get(self._config.stream, seq=at_least, next_by_subj=subject)
            )
        except MessageNotFound:
            return None
        return found.seq

    async def info(self) -> Json | None:
        """The consumer's info, None when it does not exist; `ForeignDurable` when it is somebody else's."""
        info = await self._look()
        if info is not None:
            if not self.known:
                self._applied(info)
            self._remember(info)
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
        """Whether the consumer is still the one we made, with the filters we gave it; None when it is gone."""
        info = await self._look()
        if info is None:
            return None
        self.pending = int(info.get("num_pending") or 0)
        return self._as_we_made_it(info)

    def _as_we_made_it(self, info: Json) -> bool:
        return filters_of(info["config"]) == self.filters and info["created"] == self._created

    async def create(self, filters: Sequence[str], memory: Memory, *, after: int, retention: Retention) -> Json:
        """Make the consumer; it delivers what lies behind `after`."""
        return await self._call("create", lambda: self.create_once(filters, memory, after=after, retention=retention))

    async def create_once(self, filters: Sequence[str], memory: Memory, *, after: int, retention: Retention) -> Json:
        """`create` without a second try."""
        whole = retention is Retention.INTEREST and self.js.can_reset
        config = self._whole(filters, memory, after=0 if whole else after, retention=retention)
        info = await self.js.consumer_create(self._config.stream, config, action="create")
        if whole and after:
            # A reset may go back to where the consumer was made to begin, and no further (10204). Here it must be able
            # to: a partition that comes is not done from an earlier sequence on than those that were here.
            await self.js.consumer_reset(self._config.stream, self.name, after + 1)
        self._remember(info)
        self._applied(info)
        return info

    async def update(self, filters: Sequence[str], memory: Memory) -> Json:
        """Replace filters and metadata; raises `ConsumerDoesNotExist` when the consumer is gone.

        It costs a call more than the update itself. The server has no update on condition, and its answer does not say
        what was there before: only a look can tell that it is still ours, and that nobody had cut its filters.

        A consumer whose files are gone at the server refuses every update: it is deleted and made again behind its own
        ack floor. Whoever pulls from it is told that it is gone, and attaches anew.
        """
        info = await self.info()
        floor = 0
        if info is not None:
            floor = int(info["ack_floor"]["stream_seq"])
            had, wanted = filters_of(info["config"]), tuple(sorted(filters))
            if had != wanted and not self._as_we_made_it(info):  # equal: an earlier try of ours got through
                self.on_tampered()
            if set(wanted) - set(had):
                await self.before_adding()
        config = self._stored | self._tunables(filters, memory)
        config["max_waiting"] = self._stored.get("max_waiting", self._config.max_waiting)  # cannot be updated (10012)
        try:
            info = await self._call("update", lambda: self.js.consumer_update(self._config.stream, config))
        except ConsumerFilesGone as error:
            self._recorder.event("worker.recreated", op="update", result="files_gone", error=str(error), warn=True)
            return await self._make_anew(floor, filters, memory)
        self._remember(info)
        self._applied(info)
        return info

    async def reset(self, after: int, *, not_above_floor: bool = False) -> bool:
        """Deliver from behind `after`, or the ack floor if lower, with a sequence from 1 on; False when it is gone.

        The reset is repeated until it is answered (docs/evidence/cluster.md#c8). A missing consumer does not answer at
        all, so that is asked first.
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
                # somebody made it to begin later than we need
                await self._make_anew(start, self.filters, self.memory())
                return True
            except RequestTimeout as error:
                self._recorder.retried("iterate", 1, 0.0, error)

    async def _make_anew(self, after: int, filters: Sequence[str], memory: Memory) -> Json:
        """Delete it and make it again; it delivers from the first message behind `after`, or from an earlier one."""
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
        """What the consumer's metadata said last."""
        return Memory.read(self._stored) if self.of_this_stream else Memory()

    @property
    def of_this_stream(self) -> bool:
        """False when the consumer was made for another stream of this name: then its positions mean nothing."""
        seal = Seal.read(self._stored)
        return seal is None or seal.stream == self.stream_created

    @property
    def sealed(self) -> bool:
        """Whether the consumer says that it is ours, and of this stream; one of an earlier version does not."""
        return Seal.read(self._stored) is not None and self.of_this_stream

    @property
    def scope(self) -> str:
        """What the names of the durables begin with that share the stream's partitions with ours."""
        return consumer_stem(self._config.consumer_prefix, self.namespace)

    def _seal(self) -> Seal:
        return Seal(self.namespace, self.stream_created, self.name.removeprefix(f"{self.scope}-"))

    def _remember(self, info: Json) -> None:
        self._stored = info["config"]
        self.known = True
        self.pending = int(info.get("num_pending") or 0)

    def _applied(self, info: Json) -> None:
        """This is the consumer as we want it: whatever differs later was done by somebody else."""
        self.filters, self._created = filters_of(info["config"]), info["created"]

    def _whole(self, filters: Sequence[str], memory: Memory, *, after: int, retention: Retention) -> Json:
        config = self._tunables(filters, memory) | {
            "name": self.name,
            "durable_name": self.name,
            "ack_policy": "explicit",
            "replay_policy": "instant",
            "deliver_policy": "all",
        }
        if retention is not Retention.WORKQUEUE and after:  # a work queue begins at what is left of it (10101)
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


async def _nothing() -> None:
    """Nothing has to be done before filters are added."""


def _worth_another_try(error: PartiError) -> bool:
    return error.retriable or error.category is Category.TRANSIENT


def is_gone(error: PartiError) -> bool:
    """Whether the error says that the consumer does not exist (any more)."""
    return error.category is Category.NOT_FOUND or isinstance(error, ConsumerDoesNotExist)

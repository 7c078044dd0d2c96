"""Elections on real NATS: performs what `control.election` decides. At most one leader at a time, by its own clock.

`Elector` performs the effects, over any store of the leader's record. `KvElection` is an election on its own key of a
bucket: it watches the key, ticks, and resigns when it is stopped.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from parti.clock import Clock
from parti.control import election
from parti.control.election import LeaderRecord
from parti.control.lease import LeaseTerms
from parti.control.records import Unreadable, decode_leader, encode_leader
from parti.errors import PartiError
from parti.model import Member, WorkerId
from parti.waiting import first_of
from parti.wire.errors import WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyExists, KeyNotFound

RESIGNED = "resigned"
_LOOK_EVERY = 0.2


class LeaderStore(Protocol):
    """Stores the leader's record."""

    async def leader(self) -> tuple[LeaderRecord | None, int]:
        """The record and its revision; without a record None and the revision of the delete marker, or 0."""
        ...

    async def write_leader(self, record: LeaderRecord, expected: int) -> int | None:
        """Write by compare-and-set (0: no record); returns the new revision, or None when refused."""
        ...


@dataclass(frozen=True, slots=True)
class ElectionEvents:
    """The callbacks of an elector."""

    elected: Callable[[int], None]
    """Called with the term."""
    deposed: Callable[[int, str], None]
    """Called with the term and the reason (`RESIGNED`: voluntarily)."""
    failed: Callable[[PartiError], None] = lambda _error: None
    """May raise an error that ends the election."""
    may_write: Callable[[], bool] = lambda: True
    heard: Callable[[LeaderRecord | None, int], None] | None = None
    """Receives each record that was read, and calls `seen`. Without it the elector calls `seen` itself."""


class Elector:
    """One member's part in an election. Every reply of the bucket becomes one step."""

    def __init__(
        self,
        candidate: election.Election,
        store: LeaderStore,
        clock: Clock,
        events: ElectionEvents,
        *,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.state = candidate
        self.stepped = asyncio.Event()
        """Set by every step: `next_tick` may have changed."""
        self._store = store
        self._clock = clock
        self._spawn = spawn
        self._elected = events.elected
        self._deposed = events.deposed
        self._failed = events.failed
        self._may_write = events.may_write
        self._heard = events.heard or self.seen
        self._writing = asyncio.Lock()
        self._resigned = False

    def __repr__(self) -> str:
        return f"<Elector {self.state.me} {'leads' if self.leading else 'follows'} term={self.state.term}>"

    @property
    def leading(self) -> bool:
        """Whether this member leads now, by its own clock: correct even right after a freeze."""
        return self.state.may_lead(self._clock.now())

    def tick(self) -> None:
        self._step(election.Tick(self._clock.now()))

    def seen(self, record: LeaderRecord | None, revision: int, floor: int = 0) -> None:
        """Handle the record from a watch or a read; `floor`: the highest term found in any other record."""
        self._step(election.LeaderSeen(self._clock.now(), record, revision, floor))

    async def resign(self) -> None:
        """Give up the term, so that the next leader need not wait for a lease to expire. Never leads again."""
        waited, self._resigned = self.state.hold.waiting, True
        self.state, effects = election.step(self.state, election.Resign(self._clock.now()))
        for effect in effects:
            if isinstance(effect, election.Deposed):
                self._deposed(effect.term, effect.reason)
        async with self._writing:
            for effect in effects:
                if isinstance(effect, election.WriteLeader):
                    await self._try_write(effect.record, effect.expected)
            if waited:
                await self._withdraw()

    async def _withdraw(self) -> None:
        """Undo a write of ours that may have succeeded: other members would wait for a leader that is gone."""
        with suppress(PartiError):
            record, revision = await self._store.leader()
            if record is not None and record.leader == self.state.me:
                await self._store.write_leader(replace(record, leader=None), revision)

    def _step(self, event: election.Event) -> None:
        if self._resigned:
            return
        self.state, effects = election.step(self.state, event)
        self.stepped.set()
        for effect in effects:
            match effect:
                case election.ReadLeader():
                    self._spawn(self._read(), "parti-read-leader")
                case election.WriteLeader(record, expected):
                    if self._may_write():
                        self._spawn(self._write(record, expected), "parti-write-leader")
                case election.Elected(term):
                    self._elected(term)
                case election.Deposed(term, reason):
                    self._deposed(term, reason)

    async def _read(self) -> None:
        try:
            record, revision = await self._store.leader()
        except PartiError as error:
            self._failed(error)  # the next tick retries
            return
        self._heard(record, revision)

    async def _write(self, record: LeaderRecord, expected: int) -> None:
        async with self._writing:
            if self._resigned:
                return
            revision = await self._try_write(record, expected)
        now = self._clock.now()
        self._step(election.NotWritten(now) if revision is None else election.Written(now, record, revision))

    async def _try_write(self, record: LeaderRecord, expected: int) -> int | None:
        try:
            return await self._store.write_leader(record, expected)
        except PartiError as error:
            self._failed(error)
            return None


def _somebody(_unreadable: Unreadable) -> LeaderRecord:
    return LeaderRecord(0, Member(WorkerId("unknown"), ""))


class LeaderKey:
    """The leader's record under one key of a bucket."""

    def __init__(
        self,
        kv: KeyValue,
        key: str,
        *,
        unreadable: Callable[[Unreadable], LeaderRecord] = _somebody,
        ttl: int | None = None,
    ) -> None:
        """`unreadable`: returns the record to assume for an unreadable one, or raises; by default one of an unknown
        member, which may renew it or not.

        `ttl`: seconds after which the server drops a record without renewal; its term is lost with it, and resigning
        removes it. Only for users that need no terms.
        """
        self.kv = kv
        self.key = key
        self._unreadable = unreadable
        self._ttl = ttl

    def __repr__(self) -> str:
        return f"<LeaderKey {self.kv.bucket}/{self.key}>"

    def decode(self, value: bytes | None) -> LeaderRecord | None:
        read = decode_leader(value) if value else None
        return self._unreadable(read) if isinstance(read, Unreadable) else read

    async def leader(self) -> tuple[LeaderRecord | None, int]:
        try:
            entry = await self.kv.get(self.key)
        except KeyNotFound as missing:
            return None, missing.revision
        return self.decode(entry.value), entry.revision

    async def write_leader(self, record: LeaderRecord, expected: int) -> int | None:
        try:
            if self._ttl is not None and record.leader is None:
                return await self.kv.delete(self.key, revision=expected)
            if expected:
                return await self.kv.update(self.key, encode_leader(record), expected, ttl=self._ttl)
            return await self.kv.create(self.key, encode_leader(record), ttl=self._ttl)
        except (WrongLastSequence, KeyExists):
            return None


class KvElection:
    """Takes part in the election on one key from `run` until `stop` is set; then it resigns."""

    def __init__(
        self,
        record: LeaderKey,
        me: Member,
        terms: LeaseTerms,
        clock: Clock,
        *,
        elected: Callable[[int], None],
        deposed: Callable[[int, str], None],
        failed: Callable[[PartiError], None],
    ) -> None:
        """The callbacks are those of `ElectionEvents`."""
        self._record = record
        self._clock = clock
        self._renewal = terms.renew_every
        self._tasks: asyncio.TaskGroup | None = None
        self._elector = Elector(
            election.candidate(me, terms=terms),
            record,
            clock,
            ElectionEvents(elected, deposed, failed),
            spawn=self._spawn,
        )

    def __repr__(self) -> str:
        return f"<KvElection {self._record!r} {self._elector!r}>"

    @property
    def leading(self) -> bool:
        return self._elector.leading

    @property
    def term(self) -> int:
        """The highest term seen, or our own when we lead."""
        return self._elector.state.term

    async def run(self, stop: asyncio.Event) -> None:
        elector = self._elector
        async with asyncio.TaskGroup() as self._tasks:
            watching = self._tasks.create_task(self._watch())
            while not stop.is_set():
                elector.tick()
                elector.stepped.clear()
                wait = max(_next_tick(elector.state) - self._clock.now(), 0.01)
                await first_of(elector.stepped.wait(), stop.wait(), timeout=min(wait, self._renewal))
            await elector.resign()
            watching.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work, name=name)

    async def _watch(self) -> None:
        """Feed every change of the record into the election, which also reads the record itself."""
        async for change in self._record.kv.watch(self._record.key):
            if isinstance(change, Change):
                self._elector.seen(self._record.decode(change.value), change.expected)


def _next_tick(state: election.Election) -> float:
    """While a write is in flight, wait for its reply, but at most until the leader's lease expires."""
    if not state.hold.waiting:
        return state.next_tick
    return state.hold.fence.deadline if state.leading else math.inf


async def renewing_leader(record: LeaderKey, clock: Clock, within: float) -> LeaderRecord | None:
    """The record of the current leader: a record that changes within its lease has a live holder. None if it is dead.

    A record without a leader returns None at once. If the leader resigns meanwhile, a new one may take over.
    """
    first: int | None = None
    until = clock.now() + within
    while True:
        found, revision = await record.leader()
        held = found is not None and found.leader is not None
        if held and first is not None and revision != first:
            return found
        if (first is None and not held) or clock.now() >= until:
            return None
        first = revision if first is None else first
        await clock.sleep(_LOOK_EVERY)

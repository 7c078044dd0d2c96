"""The life record of one member, for later owners of its partitions: kept in the bucket, judged by `control.lives`."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from types import MappingProxyType

from parti.backoff import FAST, FOREVER
from parti.control import lives, records
from parti.control.lives import Life, Suspicion
from parti.control.membership import Membership
from parti.control.records import Unreadable
from parti.errors import PartiError
from parti.manager.host import Host
from parti.manager.predecessors import Predecessors
from parti.model import Claim, ClaimState, Lease, Member, PartitionId, Tried, WorkerId
from parti.observe.logs import get_logger
from parti.outcomes import DONE, Bury, DeadLetterReason, Done
from parti.wire.kv_model import KeyNotFound, SnapshotDone
from parti.worker.ledger import PartitionState
from parti.worker.message import Message

_KEYS = "lives."
_TURN = 0.02  # seconds until a waiting lane asks again whether it may start
_ASKED = 1.0  # seconds after which a message that has not asked again loses its turn
_TRIES = 500  # failed messages that one record names
_PACE = 0.2  # seconds between two writes about messages that failed
_QUIET = 0.8  # of a TTL without a renewal means dead: a take-over waits longer than this

log = get_logger("control")


class LifeKeeper:
    """Stores what this member has to report to later owners, and knows what earlier owners reported."""

    def __init__(
        self,
        host: Host,
        member: Member,
        former: Predecessors,
        max_deliver: int,
        blocked: tuple[PartitionId, int] | None = None,
    ) -> None:
        """`former`: earlier members of this same process: it is alive, so none of their messages killed it.

        `blocked`: the message whose handler blocked the event loop, so that the last of them lost its lease.
        """
        self._host = host
        self._member = member
        self._former = former
        self.max_deliver = max_deliver
        self._blocked = blocked
        self._owners: dict[PartitionId, Member] = {}
        self._taken_from: dict[PartitionId, Member | None] = {}
        self._life = Life(member)
        self._before: tuple[Life, ...] = ()
        self._known: dict[WorkerId, tuple[Life, ...]] = {}
        self._revision = 0
        self._begun = asyncio.Event()
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self._written: Life | None = None
        self._watched: dict[PartitionId, _Watched] = {}
        self._states: dict[PartitionId, PartitionState] = {}
        """Partitions owned now or before: a message that failed here may still be open elsewhere."""
        self._failing = asyncio.Event()
        self._trials: dict[tuple[PartitionId, int], bool] = {}
        """Messages in their handlers; True for one that must run alone."""
        self._queue: dict[tuple[PartitionId, int], float] = {}
        """Messages waiting to run alone, in order, and when they last asked; until they ran, no other starts."""

    def __repr__(self) -> str:
        return f"<LifeKeeper {self._member} suspects={len(self._watched)} trials={len(self._trials)}>"

    # -- the record ---------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Copy the lives of earlier holders of this id into our record, then read all records."""
        waits = FOREVER.delays()
        while not await self._begin():
            await self._host.clock.sleep(next(waits))
        self._begun.set()

    async def _begin(self) -> bool:
        kv = self._host.store.kv
        try:
            try:
                entry = await kv.get(_KEYS + self._member.worker)
                found, self._revision = records.decode_lives(entry.value), entry.revision
            except KeyNotFound as gone:
                found, self._revision = (), gone.revision
            for each in await kv.entries(f"{_KEYS}*"):
                self._heard(each.key, each.value)
        except PartiError:
            return False
        before = () if isinstance(found, Unreadable) else found
        mine = [self._judged(life) for life in before if life.member != self._member]
        self._before = tuple(mine[: lives.REMEMBERED - 1])
        return await self._write()

    def _judged(self, life: Life) -> Life:
        """This process is alive, so its former members ended cleanly, except for a message that blocked it."""
        if life.member not in self._former.lives:
            return life
        last = self._former.last
        if last is not None and last.member == life.member:
            life = last  # its last counts may not be stored
        blocked, self._blocked = self._blocked, None
        return lives.blocked(life, blocked, self._host.stream_created)

    async def run(self) -> None:
        """Follow the records of other members, and write our own when it changed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow(), name="parti-lives")
            group.create_task(self._tell_tries(), name="parti-tries")
            while True:
                await self._changed.wait()
                waits = FOREVER.delays()
                self._changed.clear()
                while not await self._write():
                    await self._host.clock.sleep(next(waits))

    async def _tell_tries(self) -> None:
        while True:
            await self._failing.wait()
            self._failing.clear()
            self._note_tries()
            self._changed.set()
            await self._host.clock.sleep(_PACE)

    async def about_to_write(self, claim: Claim) -> None:
        """Store failed attempts before a claim that may release the partition. If that fails, their count is lost."""
        state = self._states.get(claim.partition)
        if state is not None and state.tries.failed:
            self._note_tries()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._write()

    async def _tries_noted(self) -> None:
        """Before a message's last attempt, store that it is the last: later owners know it if the attempt kills us."""
        self._note_tries()
        await self.noted()

    def _note_tries(self) -> None:
        tried: dict[PartitionId, tuple[Tried, ...]] = {}
        left = _TRIES
        for partition, state in self._states.items():
            if state.tries.failed and left > 0:
                tried[partition] = state.tries.to_tell(_passed(state))[:left]
                left -= len(tried[partition])
        self._life = replace(self._life, stream=self._host.stream_created, tried=MappingProxyType(tried))

    async def _follow(self) -> None:
        waits = FOREVER.delays()
        while True:
            try:
                async for change in self._host.store.kv.watch(f"{_KEYS}*"):
                    if isinstance(change, SnapshotDone):
                        waits = FOREVER.delays()
                    elif change.value is not None:
                        self._heard(change.key, change.value)
            except PartiError as error:
                self._host.failed(error)
                await self._host.clock.sleep(next(waits))

    def _heard(self, key: str, value: bytes) -> None:
        found = records.decode_lives(value)
        if isinstance(found, Unreadable):
            return
        self._known[WorkerId(key.removeprefix(_KEYS))] = found
        for life in found:
            if life.stream == self._host.stream_created and life.member != self._member:
                for partition, tried in life.tried.items():
                    if partition in self._states:
                        self._states[partition].tries.heard(life.member, tried)

    def last_words(self) -> Life:
        """Our final life record, for the next member of this process: it may not be fully stored."""
        self._note_tries()
        return self._life

    async def finish(self) -> None:
        """We end cleanly: no message of our partitions is suspect. If this write fails, later owners suspect more."""
        self._note_tries()
        self._life = replace(self._life, ended=True, trials=())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._write()

    async def _write(self) -> bool:
        """Store the current record; False when that is not certain."""
        async with self._writing:
            life, kv, key = self._life, self._host.store.kv, _KEYS + self._member.worker
            if life == self._written:
                return True
            value = records.encode_lives(self._member.worker, (life, *self._before))
            try:
                if self._revision:
                    self._revision = await kv.update(key, value, self._revision)
                else:
                    self._revision = await kv.create(key, value)
            except PartiError as error:
                log.info("lives.write_failed", worker_id=self._member.worker, error=str(error))
                with contextlib.suppress(PartiError):
                    self._revision = await self._revision_now(key)
                return False
            self._written = life
            return True

    async def _revision_now(self, key: str) -> int:
        try:
            return (await self._host.store.kv.get(key)).revision
        except KeyNotFound as gone:
            return gone.revision

    def heard(self, claim: Claim) -> None:
        """Remember the partition's owner: a claim taken over in the middle of a catch-up does not name it."""
        self._taken_from[claim.partition] = claim.taken_from
        acting = claim.accepted or claim.state in (ClaimState.STABLE, ClaimState.PREPARE)
        if acting and claim.owner is not None and claim.owner != self._member:
            self._owners[claim.partition] = claim.owner

    # -- partitions ---------------------------------------------------------------------------------------------------

    def granted(self, lease: Lease, state: PartitionState, previous: Member | None, members: Membership | None) -> None:
        """This member now owns the partition: one of its messages may have killed the previous owner."""
        partition = lease.partition
        self._count_on(partition, state, members)
        watched = self._watched.get(partition)
        other, taken_from = self._owners.pop(partition, None), self._taken_from.get(partition)
        came = (previous, taken_from)
        if watched is not None and watched.state is state and other is None and came in (watched.came, (None, None)):
            return  # owned all the time, only the epoch changed
        candidates = {m for m in (previous, other) if m is not None}
        found = self._suspicion(partition, candidates, members, taken_from)
        if not found.ends:
            self._watched.pop(partition, None)
            state.wary = None
            return
        self._life = lives.holding(self._life, partition, lease.epoch, found)
        self._changed.set()
        state.wary = self._watched[partition] = _Watched(self, partition, state, found, came)
        log.warning(
            "partition.suspected",
            worker_id=self._member.worker,
            op="grant",
            result="suspects" if found.suspects else "noted",
            partition=partition,
            ends=found.ends,
            suspects=found.suspects[:10],
            guilty=found.guilty(self.max_deliver),
        )

    def _count_on(self, partition: PartitionId, state: PartitionState, members: Membership | None) -> None:
        """Count the attempts that messages already failed at earlier owners."""
        self._states[partition] = state
        state.tries.changed, state.tries.tell = self._failing.set, self._tries_noted
        for life in self._told().values():
            if life.member == self._member:
                state.tries.resume(life.tried.get(partition, ()))
            elif life.stream == self._host.stream_created:
                spent = lives.spent(life, partition, dead=self._is_dead(life.member, members))
                state.tries.heard(life.member, spent)

    def _told(self) -> dict[Member, Life]:
        """Every known life record, including ours."""
        by_member = {life.member: life for known in self._known.values() for life in known}
        return by_member | {life.member: life for life in (*self._before, self._life)}

    def _suspicion(
        self, partition: PartitionId, previous: set[Member], members: Membership | None, taken_from: Member | None
    ) -> Suspicion:
        by_member = self._told()
        dead = {member for member in by_member if self._is_dead(member, members)}
        taken_from = taken_from if taken_from != self._member else None
        return lives.suspicion(partition, by_member.values(), previous=previous, dead=dead, taken_from=taken_from)

    def _is_dead(self, member: Member, members: Membership | None) -> bool:
        if member == self._member:
            return False
        seat = members.seats.get(member.worker) if members is not None else None
        if seat is None or seat.record.member != member:
            return True
        quiet = self._host.clock.now() - seat.sighting.since
        return seat.dead or quiet > _QUIET * self._host.config.heartbeat_ttl

    def tick(self, now: float) -> None:
        """A partition that has been processed for long enough is no longer suspect."""
        for partition, watched in list(self._watched.items()):
            worked = watched.worked(now)
            if worked > watched.noted_for and not watched.suspects and watched.state.wary is watched:
                watched.state.wary = None
            if worked > lives.SURVIVED:
                del self._watched[partition]
                if watched.state.wary is watched:
                    watched.state.wary = None
                self._life = lives.survived(self._life, partition)
                self._changed.set()
                log.info("partition.survived", worker_id=self._member.worker, partition=partition)

    # -- trials -------------------------------------------------------------------------------------------------------

    async def begin_trial(self, partition: PartitionId, sequence: int, *, alone: bool) -> float | None:
        """None when the message may start and its start is recorded for later owners; else the seconds to wait."""
        now, trial = self._host.clock.now(), (partition, sequence)
        if alone:
            self._queue[trial] = now
        for gone in [each for each, asked in self._queue.items() if now - asked > _ASKED]:
            del self._queue[gone]  # its partition moved away
        first = next(iter(self._queue), trial)
        if first != trial or (self._trials and (alone or any(self._trials.values()))):
            return _TURN
        self._queue.pop(trial, None)
        self._trials[trial] = alone
        self._note_trials()
        try:
            await self.noted()
        except BaseException:
            self.end_trial(partition, sequence)
            raise
        return None

    def now(self) -> float:
        return self._host.clock.now()

    def end_trial(self, partition: PartitionId, sequence: int) -> None:
        if self._trials.pop((partition, sequence), None) is not None:
            self._note_trials()
            self._changed.set()

    async def note_buried(self, partition: PartitionId, sequence: int) -> None:
        self._life = lives.buried(self._life, partition, sequence)
        await self.noted()

    async def noted(self) -> None:
        """Return when our record is stored for later owners, or when that is not possible.

        Retries for one TTL. If a message starts unrecorded and kills the process, that death is not counted; a message
        that never starts because a record cannot be written would be worse.
        """
        until = self._host.clock.now() + self._host.config.heartbeat_ttl
        waits = FAST.delays()
        while not await self._write():
            if self._host.clock.now() > until or not self._host.may_act():
                log.warning("lives.not_noted", worker_id=self._member.worker)
                return
            await self._host.clock.sleep(next(waits))

    def _note_trials(self) -> None:
        self._life = replace(self._life, stream=self._host.stream_created, trials=tuple(self._trials))


def _passed(state: PartitionState) -> int:
    """Every message of the partition up to here is certainly done; 0 while it is stopped or catches up."""
    return min(state.open) - 1 if state.open and not state.stopped and state.target is None else 0


class _Watched:
    """One partition under suspicion; its lanes ask before each start while it is suspect."""

    def __init__(
        self,
        keeper: LifeKeeper,
        partition: PartitionId,
        state: PartitionState,
        found: Suspicion,
        came: tuple[Member | None, Member | None],
    ) -> None:
        """`came`: the previous owner, and the member it was taken from, by the claim."""
        self.state = state
        self.came = came
        self.suspects = set(found.suspects)
        """Suspects that were not tried yet."""
        self._keeper = keeper
        self._partition = partition
        self._found = found
        self._done = state.done
        # Two deaths without a suspect: the cause comes later than the messages usually started in that time.
        self.noted_for = lives.NOTED if found.ends < 2 or found.suspects else lives.SURVIVED
        # Counted from its first message, which may arrive late. Without any message there is no suspect.
        self._idle, self._since = True, keeper.now() + lives.SURVIVED

    def worked(self, now: float) -> float:
        """For how many seconds the partition has been processed with progress; 0 or less before that."""
        got_on = self.state.done > self._done or not self.state.open
        return now - self._since if got_on else 0.0

    async def buried(self, message: Message) -> None:
        self.suspects.discard(message.sequence)
        await self._keeper.note_buried(self._partition, message.sequence)

    async def enter(self, message: Message) -> Bury | Done | float | None:
        if self._idle:
            self._idle, self._since = False, self._keeper.now()
        if message.sequence in self._found.buried:
            return DONE  # its dead letter is stored; the next process died before the position passed it
        if message.sequence == self._found.guilty(self._keeper.max_deliver):
            ends = self._found.ends
            message.attempt = max(message.attempt, ends)
            error = f"{ends} processes in a row ended, or lost their lease, while they handled it"
            return Bury(DeadLetterReason.CRASH, error)
        alone = message.sequence in self._found.suspects
        return await self._keeper.begin_trial(self._partition, message.sequence, alone=alone)

    def leave(self, message: Message) -> None:
        self.suspects.discard(message.sequence)
        self._keeper.end_trial(self._partition, message.sequence)

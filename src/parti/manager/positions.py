"""Positions: one record per worker id, written several times per second; a crash repeats only what came after it.

The record belongs to the worker id, not to the process: a successor keeps its predecessor's positions until the claims
have moved on. Each write is a CAS, so that a replaced process cannot write any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

from parti.backoff import FAST, FOREVER
from parti.errors import PartiError
from parti.manager.host import Host
from parti.model import Ahead, Checkpoint, Claim, Member, PartitionId, WorkerId
from parti.observe import control_metrics as m
from parti.observe.logs import get_logger

log = get_logger("control")

Positions = Mapping[PartitionId, tuple[int, int]]


def later(one: Positions, other: Positions) -> dict[PartitionId, tuple[int, int]]:
    """The later (epoch, cursor) of each partition: an epoch never begins before the end of the previous one."""
    return {p: max(one.get(p, at), other.get(p, at)) for p, at in {**one, **other}.items()}


def is_former(claim: Claim | None, worker: WorkerId) -> bool:
    """Whether an earlier process's position of a partition still counts, because no owner has continued from it.

    A lost claim does not show that. Until the partition has an owner again, our position may be the only one (without
    this rule `prove sim` repeated a whole partition).
    """
    return claim is None or claim.lost or (claim.owner is not None and claim.owner.worker == worker)


class Checkpointer:
    """Writes the positions of one member. Call `begin`, then `run`; `finish` writes the final positions."""

    def __init__(
        self,
        host: Host,
        member: Member,
        claim_of: Callable[[PartitionId], Claim | None],
        known: Positions | None = None,
    ) -> None:
        """`claim_of`: the known claim of a partition, or None.

        `known`: the certain positions of the earlier process, including those it could no longer store.
        """
        self._host = host
        self._member = member
        self._claim_of = claim_of
        self._known = known or {}
        self._inherited: dict[PartitionId, tuple[int, int]] = {}
        self._ahead: Mapping[PartitionId, Ahead] = {}
        self._revision = 0
        self._written: Positions | None = None

    def __repr__(self) -> str:
        return f"<Checkpointer {self._member} revision={self._revision} inherited={len(self._inherited)}>"

    async def begin(self) -> None:
        """From here on no write of an earlier process of this worker id can succeed."""
        waits = FOREVER.delays()
        while not await self._attempt_begin():
            await self._host.clock.sleep(next(waits))

    async def _attempt_begin(self) -> bool:
        try:
            found, revision = await self._host.store.checkpoint(self._member.worker)
        except PartiError:
            return False
        stored: Positions = found.positions if found is not None else {}
        self._inherited = later(stored, self._known)
        self._ahead = found.ahead if found is not None else {}
        self._revision = revision
        return await self._write({})

    async def run(self, positions: Callable[[], Positions]) -> None:
        """Write changed positions until the member ends."""
        every = self._host.config.checkpoint_every
        looked = self._host.clock.now()
        while True:
            await asyncio.sleep(every)
            if not self._host.may_act():
                continue
            if self._host.clock.now() >= looked + self._host.config.heartbeat_interval:
                looked = self._host.clock.now()
                await self._look_after()
            await self._write(positions())

    async def _look_after(self) -> None:
        """No watch covers this record: check it, and write it again if it was removed or damaged."""
        try:
            found, revision = await self._host.store.checkpoint(self._member.worker)
        except PartiError:
            return
        if found is None and self._written is not None:
            log.warning("positions.lost", worker_id=self._member.worker, op="positions", result="rewritten")
            self._revision, self._written = revision, None

    async def finish(self, positions: Positions, ahead: Mapping[PartitionId, Ahead]) -> bool:
        """Store the final positions, and the messages done above them; False when the lease expired before that."""
        self._ahead, self._written = {**self._ahead, **ahead}, None
        waits = FAST.delays()
        while self._host.may_act():
            if await self._write(positions):
                return True
            await self._host.clock.sleep(next(waits))
        return False

    async def _write(self, positions: Positions) -> bool:
        self._inherited = {
            p: at
            for p, at in self._inherited.items()
            if p not in positions and (not positions or is_former(self._claim_of(p), self._member.worker))
        }
        whole = {**self._inherited, **positions}
        if whole == self._written:
            return True
        ahead = {p: known for p, known in self._ahead.items() if p in whole and known.upto > whole[p][1]}
        checkpoint = Checkpoint(self._member, MappingProxyType(whole), MappingProxyType(ahead))
        try:
            revision = await self._host.store.write_checkpoint(checkpoint, self._revision)
            if revision is None:
                return await self._reread(whole)
        except PartiError:
            return False
        self._revision, self._written = revision, whole
        self._host.metrics.count(m.CHECKPOINTS)
        return True

    async def _reread(self, whole: Positions) -> bool:
        """The reply was lost, or another process wrote: if that one has our id, its lease ends us, not this code."""
        found, revision = await self._host.store.checkpoint(self._member.worker)
        if found is not None and found.member != self._member and self._written is not None:
            return False
        self._revision = revision
        if found is not None and found.member == self._member and dict(found.positions) == dict(whole):
            self._written = whole
            return True
        return False

"""Which process delivers which partition: leases in the bucket, shared evenly, moved only to balance them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from parti.control.assign.sticky import Sticky
from parti.delivery.context import DeliveryContext
from parti.delivery.endpoints import PREFIX
from parti.delivery.lease import SlotLease, slot_terms
from parti.delivery.partition import DeliveryPartition
from parti.errors import PartiError, UsageError
from parti.model import Partition, WorkerId
from parti.observe import delivery_metrics as m
from parti.wire.kv import KeyValue
from parti.wire.kv_lease import KvLease
from parti.wire.kv_model import Change, KeyExists, Operation


class Owner(msgspec.Struct, frozen=True):
    """The value of a lease: its holder; the nonce distinguishes one acquisition from the next."""

    member: str
    nonce: str


@dataclass(slots=True)
class OwnershipView:
    """The members and the owners of partitions, as the bucket shows them."""

    members: set[str] = field(default_factory=set)
    owners: dict[int, str] = field(default_factory=dict)

    def plan(self, me: str, partitions: int, leaving: Collection[int] = ()) -> tuple[list[int], list[int]]:
        """Free partitions that `me` should take, and those of its own that it should give up besides the `leaving`.

        All processes that see the same members and owners make the same plan. A member that joins or leaves moves the
        minimum, and nothing moves once the shares are even.
        """
        slots = [Partition((f"{number:06}",)) for number in range(partitions)]
        kept = {slots[n].id: WorkerId(owner) for n, owner in self.owners.items() if n < partitions and n not in leaving}
        members = [WorkerId(member) for member in self.members | {me}]
        mine = {int(slot.id) for slot in Sticky().assign(members, slots, kept)[WorkerId(me)]}
        surplus = [n for n, owner in self.owners.items() if owner == me and n not in mine and n not in leaving]
        return sorted(mine - self.owners.keys()), surplus


class Ownership:
    """Joins, takes its share, renews it, and leaves in order."""

    def __init__(
        self,
        tools: DeliveryContext,
        bucket: KeyValue,
        make_slot: Callable[[SlotLease], DeliveryPartition],
        admitted: Callable[[], Awaitable[None]],
    ) -> None:
        self.member = secrets.token_hex(8)
        self.slots: dict[int, DeliveryPartition] = {}
        self._bucket = bucket
        self._partitions = tools.config.partitions
        self._ttl = tools.config.lease
        self._terms = slot_terms(self._ttl)
        self._make_slot = make_slot
        self._admitted = admitted
        self._endpoints = tools.endpoints
        self._recorder = tools.recorder
        self._clock = tools.clock
        self._rng = tools.rng
        self._view = OwnershipView()
        self._informed = False
        self._leaving = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Ownership {self.member} owns={sorted(self.slots)}>"

    @property
    def staying(self) -> int:
        """Partitions that this process owns, and is not giving up."""
        return sum(not slot.leaving for slot in self.slots.values())

    async def run(self) -> None:
        """Own a fair share until `leave`; returns when every partition is handed over."""
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self._watch()), group.create_task(self._renew())]
            try:
                while not (self._leaving and not self.slots):
                    await self._changed.wait()
                    self._changed.clear()
                    if self._informed and not self._leaving:
                        await self._balance(group)
            finally:
                for task in beside:
                    task.cancel()
        with contextlib.suppress(PartiError):
            await self._bucket.delete(f"member.{self.member}")

    def leave(self) -> None:
        """Hand everything over, then let `run` return."""
        self._leaving = True
        for slot in self.slots.values():
            slot.stop()
        self._changed.set()

    async def _balance(self, group: asyncio.TaskGroup) -> None:
        self._view.owners |= dict.fromkeys(self.slots, self.member)
        leaving = {number for number, slot in self.slots.items() if slot.leaving}
        take, surplus = self._view.plan(self.member, self._partitions, leaving)
        for number in self.slots.keys() & surplus:
            self.slots[number].give_up()
        for number in take:
            await self._take(number, group)

    async def _take(self, number: int, group: asyncio.TaskGroup) -> None:
        owner = msgspec.json.encode(Owner(self.member, secrets.token_hex(8)))
        try:
            held = await KvLease.take(self._bucket, f"slot.{number}", owner, self._terms, self._clock)
        except KeyExists:
            return
        except PartiError as error:
            # Whether the lease was taken is not known: if so, it expires by itself, and the partition is free again.
            self._recorder.event("deliver.take_failed", warn=True, partition=number, error=str(error))
            return
        try:
            await self._admitted()  # checked after taking the lease, which the other engine looks for
        except UsageError:
            await held.release()
            raise
        except PartiError as error:
            self._recorder.event("deliver.take_failed", warn=True, partition=number, error=str(error))
            return  # the lease expires by itself
        slot = self.slots[number] = self._make_slot(SlotLease(number, held))
        self._view.owners[number] = self.member
        self._recorder.event("deliver.partition_taken", partition=number, epoch=held.epoch)
        self._recorder.metrics.set(m.PARTITIONS, len(self.slots))
        group.create_task(self._own(number, slot))
        if self._leaving:
            slot.stop()

    async def _own(self, number: int, slot: DeliveryPartition) -> None:
        try:
            await slot.run()
        finally:
            del self.slots[number]
            self._view.owners.pop(number, None)
            self._recorder.metrics.set(m.PARTITIONS, len(self.slots))
            self._changed.set()
            with contextlib.suppress(PartiError):  # a lease that is not released expires
                await slot.lease.held.release()

    async def _watch(self) -> None:
        async with aclosing(self._bucket.watch(">")) as changes:
            async for change in changes:
                if not isinstance(change, Change):
                    self._informed = True
                elif not self._apply(change):
                    continue
                self._changed.set()

    def _apply(self, change: Change) -> bool:
        """Whether the view has changed. A renewal, of which there are many, does not change it."""
        kind, _, name = change.key.partition(".")
        alive = change.operation is Operation.PUT and change.value is not None
        before = (set(self._view.members), dict(self._view.owners))
        if kind == "member":
            if alive:
                self._view.members.add(name)
            else:
                self._view.members.discard(name)
        elif kind == "slot" and name.isdecimal():
            number = int(name)
            if change.value is not None and alive:
                with contextlib.suppress(msgspec.DecodeError):
                    self._view.owners[number] = msgspec.json.decode(change.value, type=Owner).member
            elif number not in self.slots:
                self._view.owners.pop(number, None)
        elif change.key.startswith(PREFIX):
            self._endpoints.changed(change.key, alive)
        return before != (self._view.members, self._view.owners)

    async def _renew(self) -> None:
        while True:
            # All at once: a call that never gets its answer must not let the other leases expire.
            await asyncio.gather(self._renew_member(), *(self._renew_one(number) for number in list(self.slots)))
            self._changed.set()
            await self._clock.sleep(self._ttl / 3 * self._rng.uniform(0.9, 1.0))

    async def _renew_member(self) -> None:
        with contextlib.suppress(PartiError):  # without it others divide by one member fewer, and leases still hold
            if not self._leaving:
                await self._bucket.put(f"member.{self.member}", b"{}", ttl=self._ttl)

    async def _renew_one(self, number: int) -> None:
        slot = self.slots.get(number)
        if slot is not None and not slot.lease.held.lost and not await slot.lease.held.renew():
            slot.lose()

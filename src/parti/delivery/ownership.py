"""Which process delivers which partition: leases in the bucket, shared evenly, moved only when that evens them out."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from parti.clock import Clock, Randomness
from parti.delivery.endpoints import PREFIX, Endpoints
from parti.delivery.lease import SlotLease
from parti.delivery.partition import DeliveryPartition
from parti.delivery.recorder import DeliveryRecorder
from parti.errors import PartiError, UsageError
from parti.observe import delivery_metrics as m
from parti.wire.errors import WrongLastSequence
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyExists, KeyNotFound, Operation


class Owner(msgspec.Struct, frozen=True):
    """The value of a lease: who holds it; the nonce tells one taking from the next."""

    member: str
    nonce: str


@dataclass(slots=True)
class OwnershipView:
    """Who is there, and who owns what, as the bucket tells it."""

    members: set[str] = field(default_factory=set)
    owners: dict[int, str] = field(default_factory=dict)

    def plan(self, me: str, partitions: int) -> tuple[list[int], int]:
        """Free partitions that `me` should take, and how many of its own it should give up.

        Partitions move only when somebody has less than an even share; and nobody takes more than that before
        everybody has it. So a member that comes or goes moves no more than it must, and nothing goes round in circles.
        """
        members = self.members | {me}
        load = Counter(owner for owner in self.owners.values() if owner in members)
        floor, rest = divmod(partitions, len(members))
        own = load[me]
        others = [load[member] for member in members if member != me]
        served = min(others, default=floor) >= floor
        most = floor + (1 if rest and served else 0)
        surplus = max(0, own - most)
        free = [slot for slot in range(partitions) if slot not in self.owners]
        return free[: max(0, most - own)], surplus


class Ownership:
    """Joins, takes its share, renews it, and leaves in an orderly way."""

    def __init__(
        self,
        bucket: KeyValue,
        partitions: int,
        ttl: int,
        *,
        make_slot: Callable[[SlotLease], DeliveryPartition],
        admitted: Callable[[], Awaitable[None]],
        endpoints: Endpoints,
        recorder: DeliveryRecorder,
        clock: Clock,
        rng: Randomness,
    ) -> None:
        self.member = secrets.token_hex(8)
        self.slots: dict[int, DeliveryPartition] = {}
        self._bucket = bucket
        self._partitions = partitions
        self._ttl = ttl
        self._make_slot = make_slot
        self._admitted = admitted
        self._endpoints = endpoints
        self._recorder = recorder
        self._clock = clock
        self._rng = rng
        self._view = OwnershipView()
        self._informed = False
        self._leaving = False
        self._changed = asyncio.Event()
        self._owners: dict[int, Owner] = {}

    def __repr__(self) -> str:
        return f"<Ownership {self.member} owns={sorted(self.slots)}>"

    @property
    def staying(self) -> int:
        """Partitions that are ours, and will be as far as we know."""
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
        take, surplus = self._view.plan(self.member, self._partitions)
        for number in [n for n, slot in self.slots.items() if slot.lease.valid][:surplus]:
            self.slots[number].give_up()
        for number in take:
            await self._take(number, group)

    async def _take(self, number: int, group: asyncio.TaskGroup) -> None:
        owner, asked = Owner(self.member, secrets.token_hex(8)), self._clock.now()
        try:
            revision = await self._bucket.create(f"slot.{number}", msgspec.json.encode(owner), ttl=self._ttl)
        except KeyExists:
            return
        except PartiError as error:
            # Whether it is ours is not known: it runs out by itself, and is free again then.
            self._recorder.event("deliver.take_failed", warn=True, partition=number, error=str(error))
            return
        try:
            await self._admitted()  # asked behind the taking, which whoever delivers otherwise looks for
        except UsageError:
            await self._bucket.delete(f"slot.{number}", revision=revision)
            raise
        except PartiError as error:
            self._recorder.event("deliver.take_failed", warn=True, partition=number, error=str(error))
            return  # it runs out by itself
        lease = SlotLease(self._clock, number, revision, asked, self._ttl)
        slot = self._make_slot(lease)
        self.slots[number], self._owners[number] = slot, owner
        self._view.owners[number] = self.member
        self._recorder.event("deliver.partition_taken", partition=number, epoch=lease.epoch)
        self._recorder.metrics.set(m.PARTITIONS, len(self.slots))
        group.create_task(self._own(number, slot))
        if self._leaving:
            slot.stop()

    async def _own(self, number: int, slot: DeliveryPartition) -> None:
        try:
            await slot.run()
        finally:
            del self.slots[number], self._owners[number]
            self._view.owners.pop(number, None)
            self._recorder.metrics.set(m.PARTITIONS, len(self.slots))
            self._changed.set()
            if not slot.lease.lost:
                slot.lease.lost = True
                with contextlib.suppress(PartiError):  # what is not released runs out
                    await self._bucket.delete(f"slot.{number}", revision=slot.lease.revision)

    async def _watch(self) -> None:
        async with aclosing(self._bucket.watch(">")) as changes:
            async for change in changes:
                if isinstance(change, Change):
                    self._apply(change)
                else:
                    self._informed = True
                self._changed.set()

    def _apply(self, change: Change) -> None:
        kind, _, name = change.key.partition(".")
        alive = change.operation is Operation.PUT and change.value is not None
        if kind == "member":
            if alive:
                self._view.members.add(name)
            else:
                self._view.members.discard(name)
        elif kind == "slot" and name.isdecimal():
            number = int(name)
            if not alive:
                if number not in self.slots:
                    self._view.owners.pop(number, None)
                return
            assert change.value is not None
            with contextlib.suppress(msgspec.DecodeError):
                self._view.owners[number] = msgspec.json.decode(change.value, type=Owner).member
        elif change.key.startswith(PREFIX):
            self._endpoints.changed(change.key, alive)

    async def _renew(self) -> None:
        while True:
            # All at once: a call that waits for its answer in vain must not let the other leases run out.
            await asyncio.gather(self._renew_member(), *(self._renew_one(number) for number in list(self.slots)))
            self._changed.set()
            await self._clock.sleep(self._ttl / 3 * self._rng.uniform(0.9, 1.0))

    async def _renew_member(self) -> None:
        with contextlib.suppress(PartiError):  # without it others divide by one fewer, and leases still hold
            if not self._leaving:
                await self._bucket.put(f"member.{self.member}", b"{}", ttl=self._ttl)

    async def _renew_one(self, number: int) -> None:
        slot = self.slots.get(number)
        if slot is None or slot.lease.lost:
            return
        lease, key, owner = slot.lease, f"slot.{number}", self._owners[number]
        for _ in range(2):
            asked = self._clock.now()
            try:
                revision = await self._bucket.update(key, msgspec.json.encode(owner), lease.revision, ttl=self._ttl)
            except WrongLastSequence:
                if not await self._adopt(lease, key, owner):
                    slot.lose()
                    return
            except PartiError:
                return  # the lease holds until its time; the next round tries again
            else:
                lease.renewed(revision, asked, self._ttl)
                return

    async def _adopt(self, lease: SlotLease, key: str, owner: Owner) -> bool:
        """Whether the newer revision is a renewal of our own whose answer got lost."""
        try:
            entry = await self._bucket.get(key)
            if msgspec.json.decode(entry.value, type=Owner) != owner:
                return False
        except (KeyNotFound, msgspec.DecodeError):
            return False
        except PartiError:
            return True  # not known: the next round will tell, and the clock ends it if none does
        lease.revision = entry.revision
        return True

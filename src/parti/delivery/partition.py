"""One partition, while this process owns it: its feeds, its lanes, its park."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from parti.backoff import FOREVER
from parti.clock import by_clock
from parti.delivery.connection import KeptConnection
from parti.delivery.context import DeliveryContext
from parti.delivery.documents import Documents
from parti.delivery.errors import LeaseLost, unforeseen
from parti.delivery.feed import Feed, FeedCheckpoint, FeedOwner, FeedSource, Incoming
from parti.delivery.journal import Journal
from parti.delivery.lease import SlotLease
from parti.delivery.park import Park, decode_wake, due_of
from parti.delivery.pending import Wake
from parti.delivery.sleepers import ParkedDocument, Sleepers
from parti.errors import PartiError
from parti.observe import delivery_metrics as m
from parti.wire.api import JetStreamApi
from parti.wire.kv import KeyValue

_CHECKPOINT_EVERY = 1.0  # seconds; the journal records what happens in between
_SETTLED = 5.0
_SWEEP_EVERY = 20.0  # finds what a process that lost its lease parked during our takeover
_MOST_WAKES = 500
_FEW = 64  # parked documents that are read one by one


class DeliveryPartition:
    """Delivers the tasks of one partition from `run()` until `stop()`, or until the lease is lost."""

    def __init__(
        self,
        tools: DeliveryContext,
        js: JetStreamApi,
        bucket: KeyValue,
        link: KeptConnection,
        lease: SlotLease,
        others: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`others`: the share of a trigger's limits that this process has without this partition."""
        config, names, number = tools.config, tools.names, lease.slot
        self.lease = lease
        self.leaving = False
        """Whether the partition is about to move to another owner."""
        self._others = others
        self._given_up = asyncio.Event()
        self._tools = tools
        self._bucket = bucket
        self._link = link
        self._ending = asyncio.Event()
        self._graceful = False
        self._trouble = asyncio.Event()
        self._last_error = ""
        self._saved = FeedCheckpoint()
        self._parked_tasks = 0  # at the last look
        self._park = Park(js, names, number, tools.clock, config.max_bytes // 8 // config.partitions)
        alone = config.partitions == 1
        self._journal = Journal(js, names, number)
        self.main = Feed(
            js,
            config,
            FeedSource(
                stream=config.stream if alone else names.lanes,
                durable=config.durable if alone else f"{config.durable}-{number}",
                filters=[f"{config.stream}.>"] if alone else [f"{names.lanes}.{number}", f"{names.lanes}.{number}.>"],
                limit=max(16, config.max_ack_pending // config.partitions),
                keeps=alone,
            ),
            FeedOwner(self._take, self._troubled, tools.recorder.duplicate, lambda: tools.gate.has_room),
            self._journal,
        )
        self.wakes = Feed(
            js,
            config,
            FeedSource(
                stream=names.park,
                durable=f"{config.durable}-wake-{number}",
                filters=[names.wake(number, "*"), names.alone(number, "*")],
                limit=max(16, min(_MOST_WAKES, config.max_ack_pending // 2) // config.partitions),
            ),
            FeedOwner(self._take_wake, self._troubled, tools.recorder.duplicate),
        )
        self.lanes: Documents | None = None
        self.attached = asyncio.Event()
        """Set while messages can come in."""

    def __repr__(self) -> str:
        return f"<DeliveryPartition {self.lease.slot} epoch={self.lease.epoch} in_hand={len(self.main)}>"

    async def run(self) -> None:
        """Own the partition. Returns after a stop, when everything is handed back, or after the lease was lost."""
        async with asyncio.TaskGroup() as group:
            lanes = self.lanes = Documents(self._tools, self.lease, self._park, self.wakes, group, self.lose)
            works = (self._keep(), self._beat(), self._save(), self._expire(), self._sweep_often(), self._leave())
            tasks = [group.create_task(work) for work in works]
            try:
                await self._ending.wait()
                if self._graceful and self.lease.valid:
                    await self._hand_over(lanes, tasks[0])
            finally:
                for task in tasks:
                    task.cancel()
                self.main.detach()
                self.wakes.detach()
                await lanes.stop(0)
                lanes.forget()

    def give_up(self) -> None:
        """Stop once no more requests are in flight than allowed without this partition; deliver until then.

        The next owner uses its share of a trigger's concurrency from the first moment.
        """
        self.leaving = True
        self._given_up.set()

    async def _leave(self) -> None:
        await self._given_up.wait()
        await self._tools.gate.fit(self._others, self._tools.config.shutdown)
        self.stop()

    def stop(self) -> None:
        """Finish what is in flight, hand back the rest, and let `run` return."""
        self._graceful = self.leaving = True
        self._ending.set()

    def lose(self) -> None:
        """Another process owns the partition: drop everything at once."""
        if not self.lease.held.lost:
            self._tools.recorder.event("deliver.lease_lost", warn=True, partition=self.lease.slot)
        self.lease.held.lost = True
        self._ending.set()

    async def _hand_over(self, lanes: Documents, keeper: asyncio.Task[None]) -> None:
        clock, ends = self._tools.clock, self._tools.clock.now() + self._tools.config.shutdown
        keeper.cancel()
        with contextlib.suppress(PartiError):
            await self.main.withdraw()
            await self.wakes.withdraw()
        await lanes.stop(self._tools.config.shutdown)
        handed_back = self.main.hand_back()
        self.wakes.hand_back()
        self._tools.recorder.metrics.count(m.HANDED_BACK, handed_back)
        with contextlib.suppress(PartiError, TimeoutError):
            async with asyncio.timeout(2):
                await (await self._link.connected()).ping()  # the server has received what we sent
                await self._checkpoint()
                # The reply to a ping does not mean that the server has processed our acknowledgements: a task with its
                # own schedule would come again. (For other tasks the journal and the checkpoint prevent that.)
                await self.wakes.checkpoint().save(self._bucket, self.lease.slot, "woken")
        await self._tools.gate.fit(self._others, ends - clock.now())
        self._tools.recorder.event("deliver.partition_released", partition=self.lease.slot, handed_back=handed_back)

    # -- coming in ----------------------------------------------------------------------------------------------------

    def _take(self, message: Incoming) -> None:
        self._offer(message, self.main)

    def _take_wake(self, message: Incoming) -> None:
        tokens = message.subject.split(".")
        kind, key = tokens[-3], tokens[-1]  # the filters pass nothing shorter
        if kind == "t":
            self._offer(message, self.wakes)
            return
        said = decode_wake(message.data)
        assert self.lanes is not None
        self.lanes.woken(Wake(key, message.sequence, said.head, said.attempts, said.due))

    def _offer(self, message: Incoming, feed: Feed) -> None:
        held = self._tools.reader.read(
            message.data,
            message.headers,
            stream=feed.source.stream,
            subject=message.subject,
            sequence=message.sequence,
            time=message.time,
            ours=feed is self.wakes,
        )
        clock = self._tools.clock
        held.feed, held.received, held.again = feed, clock.now(), message.sequence <= feed.horizon
        if (tried := message.tried) is not None:
            held.attempts = max(held.attempts, tried.attempts)
            held.due = by_clock(clock, tried.due)
        elif feed is self.wakes:
            held.due = due_of(message.headers, clock)
        try:
            self._tools.recorder.received(held)
        except MemoryError:
            raise
        except Exception as error:  # its policy is checked there
            held.refuse(unforeseen(error, "judged"))
        assert self.lanes is not None
        self.lanes.offer(held)

    # -- the work beside the lanes ------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Stay attached: after any failure, and on a new connection, attach again before anything else comes in."""
        clock, waits, first = self._tools.clock, FOREVER.delays(), True
        while True:
            connection = await self._link.connected()
            self._trouble.clear()
            started = clock.now()
            try:
                saved, woken = await self._arrive() if first else (None, None)
                await self.wakes.attach(connection, woken)
                await self.main.attach(connection, saved)
                first = False
            except LeaseLost:
                self.lose()
                return
            except PartiError as error:
                self._last_error = str(error)
            else:
                self.attached.set()
                trouble = asyncio.ensure_future(self._trouble.wait())
                ends: list[asyncio.Future[Any]] = [trouble, connection.lost]
                try:
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    trouble.cancel()
                    self.attached.clear()
            self.main.detach()
            self.wakes.detach()
            self._tools.recorder.metrics.count(m.RESYNCS)
            self._tools.recorder.event(
                "deliver.resync", warn=True, partition=self.lease.slot, error=self._last_error or "connection lost"
            )
            self._last_error = ""
            if clock.now() - started > _SETTLED:
                waits = FOREVER.delays()
            await clock.sleep(next(waits))

    async def _arrive(self) -> tuple[FeedCheckpoint | None, FeedCheckpoint | None]:
        """Read what the previous owner left: parked documents, and what is done above the ack floor."""
        assert self.lanes is not None
        self.lease.check()
        await self._park.claim(self.lease.epoch)
        await self._sweep(self.lanes)
        if self.lanes.sleepers.strangers <= _FEW:  # more would delay incoming messages
            self.lanes.sleepers.look_at_all()
        slot = self.lease.slot
        return await FeedCheckpoint.load(self._bucket, slot), await FeedCheckpoint.load(self._bucket, slot, "woken")

    async def _sweep(self, lanes: Documents) -> None:
        """No parked document is forgotten: one without a schedule is a stranger, unless a line will call it."""
        known = lanes.sleepers.parked
        parked = await self._park.keys()
        for key in parked.keys() - known.keys():
            if lanes.asleep(key):
                known[key] = ParkedDocument()
                self._park.begin(key, parked[key])
        asleep = {key for key in parked.keys() - await self._park.scheduled() if lanes.asleep(key)}
        if asleep:
            noted = await self._park.noted()
            strangers = [key for key in asleep & known.keys() if lanes.asleep(key)]
            for key in strangers:
                known[key].noted = key in noted
                known[key].known = key not in noted  # nothing is recorded about it anywhere: saves a read
            lanes.sleepers.expect(strangers)
            self._parked_tasks = sum(parked.values())

    async def _place(self, sleepers: Sleepers) -> None:
        """Many strangers wait for few hosts: a glance shows which host, unless it would show more than heads."""
        if sleepers.strangers <= _FEW or self._parked_tasks > 4 * sleepers.strangers:
            return
        tools, looked = self._tools, set[str]()
        async for stored in self._park.glance():
            key = stored.subject.rpartition(".")[2]
            if key not in looked:  # the first task is the head
                looked.add(key)
                held = self._park.read(tools.reader, stored)
                if held.refusal is None and not tools.is_disabled(held):  # those become dead letters, without waiting
                    sleepers.place(key, tools.gate.line(held.host), held.first_seen)
        tools.gate.stir()

    async def _sweep_often(self) -> None:
        clock, config, swept = self._tools.clock, self._tools.config, self._tools.clock.now()
        await self.attached.wait()  # incoming messages do not wait for parked documents
        while True:
            assert self.lanes is not None
            sleepers = self.lanes.sleepers
            try:
                # The cost grows with the number of documents, and this is only a safety net.
                if clock.now() - swept > _SWEEP_EVERY * (1 + len(sleepers.parked) / 2_000) - 1.0:
                    await self._sweep(self.lanes)
                    swept = clock.now()
                with contextlib.suppress(PartiError):
                    await self._place(sleepers)
                sleepers.look_at_all()
                sleepers.call_aged(clock.wall() - config.max_task_age)
            except LeaseLost:
                self.lose()
            except PartiError as error:  # the next sweep comes
                self._tools.recorder.event("deliver.sweep_failed", partition=self.lease.slot, error=str(error))
            # This finds tasks that grow too old outside a line; where tasks live for seconds, seconds count.
            await clock.sleep(min(_SWEEP_EVERY, max(1.0, config.max_task_age / 4)))

    async def _beat(self) -> None:
        while True:
            await self._tools.clock.sleep(self._tools.config.ack_wait / 3)
            self.main.heartbeat()
            self.wakes.heartbeat()

    async def _save(self) -> None:
        while True:
            await self._tools.clock.sleep(_CHECKPOINT_EVERY)
            self.main.kick()  # other partitions may have made room
            with contextlib.suppress(PartiError):  # the next try is a second away
                await self._checkpoint()

    async def _checkpoint(self) -> None:
        checkpoint = self.main.checkpoint()
        if checkpoint == self._saved or not self.lease.valid or not checkpoint.created:
            return
        journaled = await self._journal.end()
        checkpoint = self.main.checkpoint()  # after reading the journal: so it covers all entries
        covered = self.main.uncovered
        await checkpoint.save(self._bucket, self.lease.slot)
        self._saved = checkpoint
        self.main.covered(covered)
        if journaled:
            await self._journal.forget(journaled)

    async def _expire(self) -> None:
        """The lease ends by the clock alone: nothing may be sent after it."""
        while (left := self.lease.remaining) > 0:
            await self._tools.clock.sleep(left)
        self.lose()

    def _troubled(self, error: PartiError) -> None:
        self._last_error = str(error)
        self._trouble.set()

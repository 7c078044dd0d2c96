"""Performs the faults of a torture scenario. Each call returns when the fault is over, and records it in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from parti.errors import PartiError
from parti.manager.kv_store import bucket_of
from parti.testing import NeverHappened, eventually
from parti.wire.kv import KeyValue
from parti_lab.prove.torture_fleet import NAMESPACE, TortureFleet, TorturePlace, last_words, patiently
from parti_lab.prove.torture_judge import Disturbance, TortureLedger
from parti_lab.prove.torture_scenario import RECORDS, TortureFault, TortureKind
from parti_lab.prove.torture_sink import TortureSink
from parti_lab.prove.torture_starve import starve
from parti_lab.prove.torture_traffic import STREAM, TortureTraffic
from parti_lab.prove.traffic import make_stream

_GRACE = 10.0  # seconds between SIGTERM and SIGKILL, as a supervisor waits
_RECORD_KEYS = {
    TortureKind.CLAIM: "live.claim.>",
    TortureKind.LEASE: "live.lease.>",
    TortureKind.LEADER_RECORD: "live.leader",
    TortureKind.ASSIGNMENT: "live.assignment",
    TortureKind.POSITION: "positions.>",
}


class TortureFaults:
    """One method per kind; a fault whose victim another fault holds is recorded as skipped."""

    def __init__(self, fleet: TortureFleet, traffic: TortureTraffic, stack: AsyncExitStack) -> None:
        self.fleet = fleet
        self.traffic = traffic
        self.ledger = fleet.ledger
        self.second: TortureLedger | None = None
        """The ledger of the second namespace, once it exists."""
        self.late_exits: list[str] = []
        self.bad_exits: list[str] = []
        self.exits: list[float] = []
        self.skipped: list[str] = []
        self._stack = stack
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._kills: dict[int, int] = defaultdict(int)

    async def perform(self, fault: TortureFault) -> float:
        """Perform the fault; returns the monotonic time at which it was over."""
        await asyncio.sleep(fault.offset)
        kind = fault.kind
        if kind in RECORDS:
            try:
                return await self._record(fault)
            except PartiError:  # the record was gone already
                return self._skip(fault)
        methods: dict[TortureKind, Callable[[TortureFault], Awaitable[float]]] = {
            TortureKind.RESTART: self._restart,
            TortureKind.RETURN: self._return,
            TortureKind.LEAVE: self._leave,
            TortureKind.ADD: self._add,
            TortureKind.REMOVE: self._remove,
            TortureKind.SOURCE: self._source,
            TortureKind.KILL: self._kill,
            TortureKind.REPLACE: self._kill,
            TortureKind.LEADER: self._kill,
            TortureKind.FREEZE: self._freeze,
            TortureKind.CUT: self._cut,
            TortureKind.HOLE: self._cut,
            TortureKind.SERVER_KILL: self._server_kill,
            TortureKind.OUTAGE: self._server_kill,
            TortureKind.SERVER_FREEZE: self._server_freeze,
            TortureKind.STEPDOWN: self._stepdown,
            TortureKind.NODE: self._node,
            TortureKind.DURABLE_DELETE: self._durable,
            TortureKind.DURABLE_EDIT: self._durable,
            TortureKind.DURABLE_FILES: self._durable,
            TortureKind.REMAKE: self._remake,
            TortureKind.NAMESPACE: self._namespace,
            TortureKind.HANG: self._fate,
            TortureKind.BASE: self._fate,
            TortureKind.EXIT: self._fate,
            TortureKind.BLOCK: self._fate,
            TortureKind.HANG_STOP: self._hang_stop,
            TortureKind.STARVE: self._starve,
        }
        return await methods[kind](fault)

    # -- processes ----------------------------------------------------------------------------------------------------

    async def _restart(self, fault: TortureFault) -> float:
        place = self.fleet.free(fault.target)
        return await self._stopped(place, fault, returning=True) if place else self._skip(fault)

    async def _return(self, fault: TortureFault) -> float:
        place = self.fleet.free(fault.target)
        if place is None or place.process is None:
            return self._skip(fault)
        place.busy = True
        try:
            noted = self._note(fault, place.owner, explains=False)
            place.process.worker = ""
            os.kill(place.process.pid, signal.SIGUSR2)
            try:
                await place.process.live(60.0)
            except RuntimeError:
                self._ended_badly(place, fault, noted)
                await self.fleet.fill(place)
            return self._over(noted)
        finally:
            place.busy = False

    async def _leave(self, fault: TortureFault) -> float:
        place = self.fleet.free(fault.target)
        return await self._stopped(place, fault, returning=False) if place else self._skip(fault)

    async def _stopped(self, place: TorturePlace, fault: TortureFault, *, returning: bool) -> float:
        process = place.process
        assert process is not None
        place.busy = True
        try:
            noted = self._note(fault, place.owner, explains=False)
            asked = time.monotonic()
            os.kill(process.pid, signal.SIGUSR1 if returning else signal.SIGTERM)
            try:
                await process.ended(_GRACE + self.fleet.blocks)  # a blocked loop does not hear the signal
            except NeverHappened:
                self.late_exits.append(f"{place.owner} after {fault.kind} at {asked:.2f}")
                noted.explains = True
                process.kill()
                await process.ended()
            noted.end = time.monotonic()
            self.exits.append(noted.end - asked)
            if process.process.returncode not in (0, -signal.SIGKILL):
                self._ended_badly(place, fault, noted)
            if not returning:
                place.instance = f"{place.instance.split('~')[0]}~{int(noted.end * 1000) % 100_000}"
            await self.fleet.fill(place)
            return noted.end
        finally:
            place.busy = False

    async def _kill(self, fault: TortureFault) -> float:
        place = await self.fleet.leader() if fault.kind is TortureKind.LEADER else self.fleet.free(fault.target)
        if place is None or place.process is None or place.busy:
            return self._skip(fault)
        place.busy = True
        try:
            noted = self._note(fault, place.owner, explains=True)
            place.process.kill()
            noted.end = time.monotonic()
            await place.process.ended()
            if fault.kind is TortureKind.REPLACE:
                place.instance = ""
            await self.fleet.fill(place)
            return noted.end
        finally:
            place.busy = False

    async def _freeze(self, fault: TortureFault) -> float:
        place = self.fleet.free(fault.target)
        if place is None or place.process is None:
            return self._skip(fault)
        place.busy = True
        try:
            noted = self._note(fault, place.owner, explains=fault.seconds >= self._half)
            place.process.freeze()
            await asyncio.sleep(fault.seconds)
            place.process.thaw()
            return self._over(noted)
        finally:
            place.busy = False

    async def _cut(self, fault: TortureFault) -> float:
        place = self.fleet.workers()[fault.target % self.fleet.scenario.workers]
        noted = self._note(fault, "", explains=fault.seconds >= self._half)
        noted.owner = place.owner
        for proxy in place.proxies:
            if fault.kind is TortureKind.CUT:
                await asyncio.to_thread(proxy.cut, refuse=True)
            else:
                await asyncio.to_thread(proxy.half_open)
        await asyncio.sleep(fault.seconds)
        for proxy in place.proxies:
            await asyncio.to_thread(proxy.heal)
        return self._over(noted)

    # -- the source ---------------------------------------------------------------------------------------------------

    async def _add(self, fault: TortureFault) -> float:
        name = f"p{len(self.fleet.partitions)}"
        noted = self._note(fault, "", explains=False)
        self.fleet.partitions.append(name)
        interest = self.fleet.scenario.retention == "interest"
        if not interest:
            self.traffic.add(name)
        self.fleet.tell_source()
        noted.end = time.monotonic()
        if interest:  # the stream keeps nothing for a future consumer
            with contextlib.suppress(NeverHappened):
                await self.fleet.covered(20.0)
            self.traffic.add(name)
            noted.end = time.monotonic()
        return noted.end

    async def _remove(self, fault: TortureFault) -> float:
        partition = self.fleet.partitions[fault.target % len(self.fleet.partitions)]
        interest = self.fleet.scenario.retention == "interest"
        noted = self._note(fault, "", explains=False)
        if interest:  # the server drops messages without interest: nothing may be in flight
            self.traffic.mute(partition)
            with contextlib.suppress(NeverHappened):
                await eventually(
                    lambda: self.ledger.lowest_open(partition) is None, 20.0, "a partition without backlog"
                )
        self.fleet.tell_source(without=partition)
        await asyncio.sleep(fault.seconds)
        self.fleet.tell_source()
        noted.end = time.monotonic()
        if interest:
            with contextlib.suppress(NeverHappened):
                await self.fleet.covered(20.0)
            self.traffic.unmute(partition)
        return self._over(noted)

    async def _source(self, fault: TortureFault) -> float:
        noted = self._note(fault, "", explains=False)
        self.fleet.tell_source(raises=True)
        place = await self.fleet.leader()
        left = [self._stopped(place, fault, returning=False)] if place is not None else []
        await asyncio.gather(asyncio.sleep(fault.seconds), *left)
        self.fleet.tell_source()
        return self._over(noted)

    # -- servers ------------------------------------------------------------------------------------------------------

    async def _server_kill(self, fault: TortureFault) -> float:
        server = self.fleet.servers.server
        assert server is not None
        noted = self._note(fault, "", explains=True)
        await self._down(0, fault.seconds, server.kill, server.restart)
        return self._over(noted)

    async def _server_freeze(self, fault: TortureFault) -> float:
        server = self.fleet.servers.server
        assert server is not None
        noted = self._note(fault, "", explains=fault.seconds >= self._half)
        try:
            with server.frozen():
                await asyncio.sleep(fault.seconds)
        except PartiError:  # another fault had killed the server
            return self._skip(fault)
        return self._over(noted)

    async def _stepdown(self, fault: TortureFault) -> float:
        noted = self._note(fault, "", explains=True)
        js = self.fleet.js
        until = time.monotonic() + fault.seconds
        turn = fault.target
        while time.monotonic() < until:
            calls = [f"STREAM.LEADER.STEPDOWN.{(STREAM, f'KV_{bucket_of(NAMESPACE)}')[turn % 2]}"]
            with contextlib.suppress(PartiError):
                names = sorted(await js.consumer_names(STREAM))
                calls += [f"CONSUMER.LEADER.STEPDOWN.{STREAM}.{names[turn % len(names)]}"] if names else []
            for call in calls:
                with contextlib.suppress(PartiError):
                    await js.request(call)
            turn += 1
            await asyncio.sleep(0.5)
        return self._over(noted)

    async def _node(self, fault: TortureFault) -> float:
        cluster = self.fleet.servers.cluster
        assert cluster is not None
        node = fault.target % 3
        noted = self._note(fault, "", explains=True)
        await self._down(node, fault.seconds, partial(cluster.kill, node), partial(cluster.restart, node))
        return self._over(noted)

    async def _down(self, node: int, seconds: float, kill: Callable[[], object], restart: Callable[[], object]) -> None:
        """Overlapping outages of a server count as one: it is restarted when the last of them is over."""
        async with self._turns[node]:
            self._kills[node] += 1
            if self._kills[node] == 1:
                await asyncio.to_thread(kill)
        await asyncio.sleep(seconds)
        async with self._turns[node]:
            self._kills[node] -= 1
            if not self._kills[node]:
                await asyncio.to_thread(restart)

    async def _starve(self, fault: TortureFault) -> float:
        noted = self._note(fault, "", explains=False)
        noted.ends_leases = True
        await starve(self.fleet, fault.seconds, random.Random(fault.target))
        return self._over(noted)

    # -- what others do to our things ---------------------------------------------------------------------------------

    async def _durable(self, fault: TortureFault) -> float:
        js = self.fleet.js
        infos = [i for i in await patiently(lambda: js.consumer_list(STREAM)) if i["config"].get("durable_name")]
        if not infos:
            return self._skip(fault)
        info = sorted(infos, key=lambda i: str(i["name"]))[fault.target % len(infos)]
        noted = self._note(fault, "", explains=False)
        noted.kind += f" {info['name']}"
        try:
            if fault.kind is TortureKind.DURABLE_DELETE:
                await patiently(lambda: js.consumer_delete(STREAM, info["name"]))
            elif fault.kind is TortureKind.DURABLE_FILES:
                assert self.fleet.servers.server is not None
                self.fleet.servers.server.lose_consumer_files(STREAM, info["name"])
            else:
                config = dict(info["config"])
                filters = list(config.pop("filter_subjects", None) or [config.pop("filter_subject", "")])
                kept = filters[: len(filters) // 2] or [f"{STREAM}._edited_.{fault.target}"]
                await patiently(lambda: js.consumer_update(STREAM, config | {"filter_subjects": kept}))
        except (PartiError, FileNotFoundError):  # its worker deleted it meanwhile
            return self._skip(fault)
        return self._over(noted)

    async def _record(self, fault: TortureFault) -> float:
        kv = await patiently(lambda: KeyValue.open(self.fleet.js, bucket_of(NAMESPACE)))
        keys = sorted(await patiently(lambda: kv.keys(_RECORD_KEYS[fault.kind])))
        if not keys:
            return self._skip(fault)
        key = keys[fault.target % len(keys)]
        noted = self._note(fault, "", explains=False)
        noted.kind += f" {key}"
        await patiently(lambda: kv.delete(key))
        return self._over(noted)

    async def _remake(self, fault: TortureFault) -> float:
        scenario, js = self.fleet.scenario, self.fleet.js
        noted = self._note(fault, "", explains=False)
        await self.traffic.pause()
        with contextlib.suppress(PartiError):  # a retried call finds it gone
            await patiently(lambda: js.stream_delete(STREAM))
        self.ledger.made_anew()
        if self.second is not None:
            self.second.made_anew()
        await make_stream(js, STREAM, scenario.retention, scenario.replicas, scenario.storage)
        noted.end = time.monotonic()
        if scenario.retention == "interest":
            with contextlib.suppress(NeverHappened):
                await self.fleet.covered(20.0)
        self.traffic.resume()
        return noted.end

    async def _namespace(self, fault: TortureFault) -> float:
        noted = self._note(fault, "", explains=False)
        second = TortureLedger(disturbances=self.ledger.disturbances, generation=self.ledger.generation)
        sink = await self._stack.enter_async_context(TortureSink(second, self.fleet.sink.misbehaved))
        places = await self.fleet.join_second(sink)
        await eventually(
            lambda: (
                set(self.fleet.partitions)
                <= {p for place in places if place.process is not None for p in place.process.owned}
            ),
            30.0,
            "the second namespace owns every partition",
        )
        second.generation = self.ledger.generation  # the stream may have been recreated meanwhile
        if self.fleet.scenario.retention == "limits":  # the second namespace begins with the stored messages
            for posted in self.ledger.posted.values():
                if posted.generation == second.generation:
                    second.post(posted)  # open until handled, or deleted with its stream
        self.second = second
        self.traffic.also(second)
        return self._over(noted)

    # -- handlers that misbehave --------------------------------------------------------------------------------------

    async def _fate(self, fault: TortureFault) -> float:
        partition = self.fleet.partitions[fault.target % len(self.fleet.partitions)]
        noted = self._note(fault, "", explains=False)
        self.traffic.plant(partition, fault.kind.value)
        with contextlib.suppress(NeverHappened):
            await eventually(lambda: self.traffic.planted(partition), 5.0, "the planted message was sent")
        if fault.kind is TortureKind.BASE:  # the last message of its partition: no later message may wake it
            self.traffic.mute(partition)
            await asyncio.sleep(2.0)
            self.traffic.unmute(partition)
        elif fault.kind in (TortureKind.BLOCK, TortureKind.HANG):
            await asyncio.sleep(fault.seconds or self.fleet.scenario.timeout)
        return self._over(noted)

    async def _hang_stop(self, fault: TortureFault) -> float:
        partition = self.fleet.partitions[fault.target % len(self.fleet.partitions)]
        self.fleet.hanging.clear()
        self.traffic.plant(partition, "hang")
        try:
            # Longer than any concurrent outage: a handler that hangs later would hang forever, since nobody stops it.
            await eventually(lambda: bool(self.fleet.hanging), 40.0, "a handler hangs")
        except NeverHappened:
            return self._skip(fault)
        place = self.fleet.hanging[0]
        owner = place.owner
        # A partition has one position: the next owner repeats other keys that were done above the hanging message.
        by_key = self.fleet.scenario.lanes == "key"
        hangs = self._note(fault, owner, explains=by_key)
        await asyncio.sleep(0.5)
        await eventually(lambda: not place.busy, 60.0, "no other fault has the process in its hands")
        if place.owner != owner or place.process is None or not place.process.running:
            return self._over(hangs)  # another fault ended it
        hangs.end = await self._stopped(place, fault, returning=fault.target % 2 == 0)
        return hangs.end

    # -- notes --------------------------------------------------------------------------------------------------------

    @property
    def _half(self) -> float:
        """The remaining lease when a fault begins may be this short: its last renewal was some time ago."""
        return self.fleet.scenario.ttl / 2

    def _note(self, fault: TortureFault, owner: str, *, explains: bool) -> Disturbance:
        return self.ledger.disturb(str(fault.kind), time.monotonic(), owner, explains=explains)

    def _ended_badly(self, place: TorturePlace, fault: TortureFault, noted: Disturbance) -> None:
        assert place.process is not None
        code = place.process.process.returncode
        self.bad_exits.append(f"{place.owner} after {fault.kind} with {code}: {last_words(place)}")
        noted.explains = True

    def _over(self, noted: Disturbance) -> float:
        noted.end = time.monotonic()
        return noted.end

    def _skip(self, fault: TortureFault) -> float:
        self.skipped.append(str(fault))
        return time.monotonic()

"""The worker processes of a torture run: each has a place, which gets a new process when the old one ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from parti.errors import Category, PartiError
from parti.manager.kv_store import Store
from parti.testing import FaultProxy, eventually
from parti.wire.api import JetStreamApi
from parti_lab.prove.cluster_faults import Servers
from parti_lab.prove.torture_judge import TortureLedger
from parti_lab.prove.torture_scenario import TortureKind, TortureScenario
from parti_lab.prove.torture_sink import TortureSink
from parti_lab.prove.torture_traffic import STREAM, subject_of
from parti_lab.prove.worker_process import WorkerProcess

T = TypeVar("T")

NAMESPACE = "torture"
SECOND = "torture2"
PROGRAM = "parti_lab.prove.torture_worker"
_LOG_LINES = 4000
_LIVE_WITHIN = 60.0
_PATIENCE = 30.0


@dataclass
class TorturePlace:
    """A place for one worker, one process after the other."""

    number: int
    namespace: str
    instance: str
    sink: TortureSink
    proxies: list[FaultProxy] = field(default_factory=list)
    process: WorkerProcess | None = None
    busy: bool = False
    """A fault is acting on it: no other code may touch or restart it."""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))

    @property
    def owner(self) -> str:
        return self.process.owner if self.process is not None else ""


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Retry the call up to `_PATIENCE` seconds, whatever else is broken meanwhile; "not found" is raised at once."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            return await call()
        except PartiError as error:
            if time.monotonic() > until or error.category is Category.NOT_FOUND:
                raise
            await asyncio.sleep(0.2)


def last_words(place: TorturePlace) -> str:
    """The log line that says why a process ended."""
    lines = [line.strip(" |") for line in place.log if line and not line.startswith(("{", "---"))]
    named = [line for line in lines if "Error" in line or "Exit" in line or "Exception" in line]
    return (named or lines or ["nothing"])[-1][:200]


class TortureFleet:
    """Starts, watches and restarts worker processes."""

    def __init__(
        self,
        scenario: TortureScenario,
        servers: Servers,
        js: JetStreamApi,
        folder: Path,
        ledger: TortureLedger,
        sink: TortureSink,
    ) -> None:
        self.scenario = scenario
        self.servers = servers
        self.js = js
        self.ledger = ledger
        self.sink = sink
        self.log_level = "info"
        self.program = PROGRAM
        self.blocks = max(
            (f.seconds for bout in scenario.bouts for f in bout if f.kind is TortureKind.BLOCK), default=0.0
        )
        """Seconds for which a blocking handler blocks the event loop."""
        self.partitions = [f"p{n}" for n in range(scenario.partitions)]
        self.places: list[TorturePlace] = []
        self.died: list[str] = []
        """Processes that ended without being asked to."""
        self.at_start: list[str] = []
        self.stalled = 0.0
        self.hanging: deque[TorturePlace] = deque()
        self._source = folder / "partitions.json"
        self._watcher: asyncio.Task[None] | None = None
        self.tell_source()

    # -- the source ---------------------------------------------------------------------------------------------------

    def tell_source(self, *, without: str = "", raises: bool = False) -> None:
        """Set what the leader's partition source returns from now on."""
        said = {"partitions": [p for p in self.partitions if p != without], "raises": raises}
        draft = self._source.with_suffix(".new")
        draft.write_text(json.dumps(said))
        draft.replace(self._source)

    # -- processes ----------------------------------------------------------------------------------------------------

    async def open(self, stack: AsyncExitStack) -> None:
        """Fill all places of the first namespace; every partition is owned when this returns."""
        cut = {
            fault.target % self.scenario.workers
            for bout in self.scenario.bouts
            for fault in bout
            if fault.kind in (TortureKind.CUT, TortureKind.HOLE)
        }
        for number in range(self.scenario.workers):
            place = TorturePlace(number, NAMESPACE, f"place-{number}", self.sink)
            if number in cut:
                for url in self.servers.urls:
                    place.proxies.append(await stack.enter_async_context(FaultProxy(url)))
            self.places.append(place)
        stack.push_async_callback(self.close)
        await asyncio.gather(*(self.fill(place) for place in self.places))
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="parti-torture-places")
        await self.covered()

    async def join_second(self, sink: TortureSink, count: int = 2) -> list[TorturePlace]:
        """Start a fleet of another namespace on the same stream."""
        second = [TorturePlace(100 + n, SECOND, f"second-{n}", sink) for n in range(count)]
        for place in second:
            place.busy = True  # we restart it ourselves if its process ends during its start
        self.places += second
        await asyncio.gather(*(self.fill(place) for place in second))
        for place in second:
            place.busy = False
        return second

    async def fill(self, place: TorturePlace, *, live: bool = True) -> None:
        """Start a process in this place."""

        def heard(said: Mapping[str, Any]) -> None:
            self._heard(place, process, said)

        until = time.monotonic() + _LIVE_WITHIN
        while True:
            process = await WorkerProcess.start(self._settings(place), self.program, heard)
            process.log = place.log
            place.process = process
            place.log.append(f"--- {process.owner} as {place.instance or 'nobody'} at {time.monotonic():.2f}")
            if not live:
                return None
            try:
                return await process.live(_LIVE_WITHIN)
            except RuntimeError:  # it ended, for example because the server is down: a supervisor would retry
                if time.monotonic() > until:
                    raise
                self.at_start.append(f"{process.owner} at its start, {time.monotonic():.2f}")

    def workers(self) -> list[TorturePlace]:
        """The places of the first namespace."""
        return [place for place in self.places if place.namespace == NAMESPACE]

    def free(self, target: int) -> TorturePlace | None:
        """The place that a fault hits: the target's own, or the next one that no other fault holds."""
        workers = self.workers()
        for step in range(len(workers)):
            place = workers[(target + step) % len(workers)]
            if not place.busy and place.process is not None and place.process.running and place.process.worker:
                return place
        return None

    async def leader(self) -> TorturePlace | None:
        """The place of the leader's process, read from the bucket."""
        store = await patiently(lambda: Store.open(self.js, NAMESPACE, replicas=self.scenario.replicas))
        record, _ = await patiently(store.leader)
        if record is None or record.leader is None:
            return None
        for place in self.workers():
            process = place.process
            if process is not None and process.running and process.worker == record.leader.worker and not place.busy:
                return place
        return None

    def owner_of(self, partition: str) -> TorturePlace | None:
        for place in self.workers():
            if place.process is not None and place.process.running and partition in place.process.owned:
                return place
        return None

    async def covered(self, timeout: float = 45.0) -> None:
        """Return when every partition is owned and, on an interest stream, has a consumer that keeps its messages."""

        async def reached() -> bool:
            if not all(self.owner_of(partition) for partition in self.partitions):
                return False
            if self.scenario.retention != "interest":
                return True
            wanted = {subject_of(partition, "" if self.scenario.literal else "*") for partition in self.partitions}
            return wanted <= {s for found in await patiently(self.filters) for s in found}

        _: bool = await eventually(reached, timeout, "every partition owned and every subject of interest")

    async def filters(self) -> list[list[str]]:
        """The filter subjects of each consumer."""
        found = []
        for info in await self.js.consumer_list(STREAM):
            config = info["config"]
            one = config.get("filter_subject")
            found.append([one] if one else list(config.get("filter_subjects") or []))
        return found

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await asyncio.gather(*(p.process.close() for p in self.places if p.process is not None))

    async def _watch(self) -> None:
        """Restart a process that ended by itself, as a supervisor would."""
        while True:
            await asyncio.sleep(0.1)
            for place in self.places:
                process = place.process
                if process is None or process.running or place.busy:
                    continue
                code = process.process.returncode
                what = f"{place.owner} of {place.instance} with {code} at {time.monotonic():.2f}"
                (self.died if process.worker else self.at_start).append(f"{what}: {last_words(place)}")
                fault = self.ledger.disturb("died", time.monotonic() - 0.2, place.owner, explains=True)
                fault.end = time.monotonic()
                with contextlib.suppress(Exception):
                    await self.fill(place, live=False)

    def _heard(self, place: TorturePlace, process: WorkerProcess, said: Mapping[str, Any]) -> None:
        place.log.append(json.dumps(said))
        if said["say"] == "stall":
            length = float(said["end"]) - float(said["start"])
            if length > 0.4 * self.scenario.ttl:
                fault = self.ledger.disturb("stall", float(said["start"]), process.owner, explains=True)
                fault.end = float(said["end"])
                if not place.busy:
                    self.stalled = max(self.stalled, length)
        elif said["say"] == "fenced":
            self._fenced(process, str(said["reason"]))
        elif said["say"] == "misbehaves" and said["fate"] == "hang":
            self.hanging.append(place)

    def _fenced(self, process: WorkerProcess, reason: str) -> None:
        """A lease that ended early explains repeats of its owner, if a fault explains why it ended."""
        now = time.monotonic()
        fault = self.ledger.disturb(f"fenced ({reason})", now - self.scenario.ttl, process.owner, explains=False)
        fault.end, fault.lease = now, True

    def _settings(self, place: TorturePlace) -> dict[str, Any]:
        scenario = self.scenario
        ttl = scenario.ttl
        return {
            "urls": [proxy.url for proxy in place.proxies] or list(self.servers.urls),
            "sink": place.sink.port,
            "source": str(self._source),
            "takes": scenario.takes,
            "blocks": self.blocks,
            "log_level": self.log_level,
            "control": {
                "namespace": place.namespace,
                "instance": place.instance,
                "layout": scenario.layout,
                "bucket_replicas": scenario.replicas,
                "heartbeat_ttl": ttl,
                "heartbeat_interval": ttl / 3,
                "lease_margin": ttl / 10,
                "cold_start_window": 0.5,
                "planned_scale_window": 0.2,
                "rebalance_cooldown": 0.2,
                "shutdown_timeout": 4.0,
                "recovery_grace": ttl,
            },
            "worker": {
                "stream": STREAM,
                "subject_template": f"{STREAM}.{{partition}}" if scenario.literal else f"{STREAM}.{{partition}}.*",
                "lanes": scenario.lanes,
                "retry_delays": [f"{1000 * scenario.retry:.0f}ms"],
                "pull_timeout": 0.7,
                "idle_heartbeat": 0.25,
                "handler_timeout": scenario.timeout,
                "drain_timeout": 3.0,
            },
        }

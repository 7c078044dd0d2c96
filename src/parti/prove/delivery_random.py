"""Random situations for delivery, one after the other: each is drawn from its seed, run by real processes and judged.

The hosts are real servers on loopback that are ill for a while and well afterwards. So everything has to arrive in the
end, or rest in the dead letters because its own policy gave it few attempts.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import msgspec

from parti.bench.goals import Figure
from parti.bench.report import RunContext
from parti.clock import SystemClock
from parti.errors import PartiError
from parti.prove.delivery_duplicates import Accepted, explain
from parti.prove.delivery_faults import Fault, Troubles
from parti.prove.delivery_judge import Published, Rested, Seen, judge, prompt
from parti.prove.delivery_main import NAMES
from parti.prove.delivery_scenario import HostKind, Scenario, Trigger, draw
from parti.prove.delivery_worker import SparkWorker, Worker
from parti.tasks import DeadLetters
from parti.tasks.names import Names
from parti.tasks.recorder import AttemptRecord
from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.http_server import Answer, FaultHttpServer, Hang, Received, Reply, Reset
from parti.testing.monitor import ask
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.options import ConnectOptions

_LEASE = 3
_STARTING, _STARTING_SPARK = 4.0, 40.0  # seconds that a process may take to look up a name for the first time
_LOOK = 0.02


@dataclass(slots=True)
class Ground:
    """The endpoints of one run, and what they saw."""

    scenario: Scenario
    rng: random.Random
    heals_at: float = math.inf
    """Known from the first request on: processes take their time to start."""
    servers: dict[str, list[FaultHttpServer]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    stall: float = 0.0
    """The longest time that this process stood still."""
    clock: SystemClock = field(default_factory=SystemClock)

    def url(self, trigger: Trigger, document: int) -> str:
        server = self.servers[trigger.name][document % trigger.hosts]
        if trigger.host == "no_dns":
            return f"http://{trigger.name}{NAMES}:{server.port}/hook"
        return f"{server.url}/hook"

    async def open(self, stack: AsyncExitStack) -> None:
        for trigger in self.scenario.triggers:
            self.servers[trigger.name] = [FaultHttpServer() for _ in range(trigger.hosts)]
            for server in self.servers[trigger.name]:
                await server.start()
                stack.push_async_callback(server.stop)
                server.otherwise(self._script(trigger))
                if trigger.host == "dead":
                    await server.stop()
        stack.callback(asyncio.create_task(self._watch()).cancel)

    async def _watch(self) -> None:
        """Notice when we stood still ourselves; bring the dead back when it is time."""
        dead = [trigger.name for trigger in self.scenario.triggers if trigger.host == "dead"]
        down = [server for name in dead for server in self.servers[name]]
        while True:
            before = self.clock.now()
            await self.clock.sleep(_LOOK)
            self.stall = max(self.stall, self.clock.now() - before - _LOOK)
            while down and self.clock.now() >= self.heals_at:
                await down.pop().start()

    def _script(self, trigger: Trigger) -> Callable[[Received], Reply]:
        def decide(request: Received) -> Reply:
            now, body = self.clock.now(), request.json()
            self.heals_at = min(self.heals_at, now + self.scenario.heals)
            reply = self._reply(trigger.host if now < self.heals_at else "well")
            status = reply.status if isinstance(reply, Answer) else 0
            delay = reply.delay if isinstance(reply, Answer) else 0.0
            self.seen.append(
                Seen(
                    at=now,
                    id=request.headers["webhook-id"],
                    trigger=trigger.name,
                    document=body["documentId"],
                    number=body["seq"],
                    attempt=int(request.headers["x-parti-attempt"]),
                    status=status,
                    epoch=int(request.headers["x-parti-epoch"]),
                    wait=float(reply.headers.get("Retry-After", 0)) if isinstance(reply, Answer) else 0.0,
                    ended=now + delay,
                )
            )
            return reply

        return decide

    def _reply(self, kind: HostKind) -> Reply:
        ill, rng = self.rng.random() < 0.8, self.rng
        match kind:
            case "slow":
                return Answer(200, delay=rng.uniform(0.05, 0.3))
            case "flaky" if ill:
                return rng.choice((Answer(500), Answer(503), Answer(408), Reset()))
            case "throttling" if ill:
                return Answer(rng.choice((429, 503)), {"Retry-After": rng.choice(("1", "2"))})
            case "hanging":
                return Hang()
            case "resetting" if ill:
                return Reset()
            case _:
                return Answer(200)


@dataclass(slots=True)
class Run:
    """One scenario on a server."""

    scenario: Scenario
    server: NatsServer
    js: JetStreamApi
    ground: Ground
    rng: random.Random
    published: list[Published] = field(default_factory=list)
    numbers: Counter[str] = field(default_factory=Counter)

    @property
    def stream(self) -> str:
        return f"RANDOM{self.scenario.seed}"

    async def publish(self, triggers: list[Trigger]) -> None:
        for trigger in triggers:
            which = self.rng.randrange(trigger.documents)
            document = f"{trigger.name}-d{which}"
            number = self.numbers[document] = self.numbers[document] + 1
            task = {
                "triggerId": trigger.name,
                "database": "db",
                "collection": "docs",
                "documentId": document,
                "event": "update",
                "seq": number,
                "url": self.ground.url(trigger, which),
                "timeout": "10s" if trigger.host in ("well", "slow") else "1s",
                "payload": "x" * trigger.size,
            }
            policy = {"maxAttempts": trigger.attempts} | (
                {"initialBackoff": f"{trigger.backoff}s", "maxBackoff": "1s"} if trigger.backoff else {}
            )
            webhook_id = f"{document}-{number}"
            data, headers = json.dumps(task | {"retryPolicy": policy}).encode(), {"Nats-Msg-Id": webhook_id}

            async def stored(document: str = document, data: bytes = data, headers: dict[str, str] = headers) -> bool:
                try:
                    await self.js.publish(f"{self.stream}.db.docs.{document}", data, headers=headers)
                except PartiError:
                    return False
                return True

            await eventually(stored, 60, "a publish")
            self.published.append(Published(webhook_id, trigger.name, document, number, self.ground.clock.now()))

    def settings(self) -> list[str]:
        scenario = self.scenario
        values: dict[str, object] = {
            "deliver.stream": self.stream,
            "deliver.partitions": scenario.partitions,
            "deliver.lease": _LEASE,
            "deliver.allow_addresses": ",".join(one.allowed for each in self.ground.servers.values() for one in each),
            "deliver.schedule": ",".join(["200ms"] * 3 + ["500ms"] * 46),
            "deliver.block_for": scenario.block_for,
            "deliver.breaker_open": "500ms",
            "deliver.max_ack_pending": scenario.max_ack_pending,
            "deliver.triggers": ",".join(trigger.rules for trigger in scenario.triggers),
            "observe.log_level": "warning",
        }
        return ["-s", self.server.url, *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]

    async def letters(self) -> list[Rested]:
        with suppress(PartiError):
            found = DeadLetters(self.js, Names(self.stream)).letters()
            return [Rested(letter.id, letter.trigger, letter.reason, letter.attempts) async for letter in found]
        return []

    async def settled(self) -> bool:
        """Whether each task was accepted or rests; of `latest` the newest of each document."""
        orders = {trigger.name: trigger.order for trigger in self.scenario.triggers}
        newest = {(task.trigger, task.document): task.id for task in self.published}
        wanted = {
            task.id
            for task in self.published
            if orders[task.trigger] != "latest" or newest[task.trigger, task.document] == task.id
        }
        wanted -= {request.id for request in self.ground.seen if request.accepted}
        return not wanted or not wanted - {letter.id for letter in await self.letters()}

    async def unheard(self) -> dict[tuple[str, int], str]:
        """Attempts that ended without an answer, as the workers logged them, and how."""
        found: dict[tuple[str, int], str] = {}
        stream, sequence = Names(self.stream).attempts, 0
        with suppress(MessageNotFound, StreamNotFound):
            while True:
                stored = await self.js.msg_get(stream, seq=sequence + 1, next_by_subj=f"{stream}.>")
                sequence = stored.seq
                record = msgspec.json.decode(stored.data, type=AttemptRecord)
                if record.outcome in ("timeout", "network"):
                    found[record.id, record.attempt] = record.outcome
        return found


async def run_scenario(
    scenario: Scenario, server: NatsServer, js: JetStreamApi, *, spark: list[str] | None = None
) -> tuple[dict[str, Figure], list[str]]:
    """Figures of what was wrong, and words about it. `spark`: the extra arguments of that engine."""
    clock, rng = SystemClock(), random.Random(f"run {scenario.seed}")
    ground = Ground(scenario, rng)
    async with AsyncExitStack() as stack:
        await ground.open(stack)
        run = Run(scenario, server, js, ground, rng)
        await js.stream_create({"name": run.stream, "subjects": [f"{run.stream}.>"], "storage": "file"})
        tasks = [trigger for trigger in scenario.triggers for _ in range(trigger.tasks)]
        rng.shuffle(tasks)
        half = len(tasks) // 2
        await run.publish(tasks[:half])
        until = time.time() + (_STARTING_SPARK if spark else _STARTING) + scenario.heals
        program = ("parti.prove.delivery_main", f"{until:.3f}", str(scenario.descriptors))
        kind = SparkWorker if spark else Worker
        workers = [kind([*run.settings(), *(spark or ())], program) for _ in range(scenario.processes)]
        stack.push_async_callback(_kill, workers)
        troubles = Troubles(server, workers, rng, clock, 6 if spark else _LEASE)
        in_before = _messages_in(server)
        for worker in workers:
            await asyncio.to_thread(worker.start)
        publishing = asyncio.create_task(run.publish(tasks[half:]))
        for fault in scenario.faults:
            await troubles.make(fault)
        await publishing
        with suppress(NeverHappened):  # what has not arrived by then is lost
            await eventually(run.settled, 240.0 if spark else 90.0, "every task accepted or at rest")
        # A server that was started anew counts from 0; Spark asks for messages, with or without tasks.
        counted = spark is None and "server" not in scenario.faults
        sent = _messages_in(server) - in_before - (len(tasks) - half) if counted else 0
        codes = [await asyncio.to_thread(worker.stop) for worker in workers]
        faults = [*troubles.faults, *troubles.stalls()]
        unheard = await run.unheard()
        wrong, words = judge(
            scenario.triggers,
            run.published,
            sorted(ground.seen, key=lambda request: request.at),
            await run.letters(),
            faults,
            timeouts={attempt for attempt, outcome in unheard.items() if outcome == "timeout"},
            processes=scenario.processes,
            stall=ground.stall,
        )
        repeats = _repeats(run, faults, unheard, 1_000_000 if spark else 256)
        figures: dict[str, Figure] = {**wrong, "duplicates_unexplained": repeats, "exit_codes": sum(codes)}
        figures |= {"tasks": len(tasks), "requests": len(ground.seen)}
        figures["messages_per_request"] = round(sent / max(len(ground.seen), 1), 2)
        figures["well_p99"] = round(_slowest_well(run), 2) if not faults else 0.0
        with suppress(PartiError):
            for name in await js.stream_names():
                if name.removeprefix("KV_").startswith(run.stream):
                    await js.stream_delete(name)
        return figures, words


async def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        await asyncio.to_thread(worker.kill)


def _messages_in(server: NatsServer) -> int:
    return int(ask(f"{server.monitor_url}/varz").get("in_msgs", 0))


def _repeats(run: Run, faults: list[Fault], unheard: Collection[tuple[str, int]], in_flight: int) -> int:
    accepted: dict[str, list[Accepted]] = defaultdict(list)
    for request in prompt(run.ground.seen, unheard):
        if request.accepted:
            accepted[request.id].append(Accepted(request.at, request.epoch, request.attempt))
    return explain(accepted, faults, unheard, in_flight=in_flight)["unexplained"]


def _slowest_well(run: Run) -> float:
    """The 99th percentile, over tasks of the host that is always well, from the publishing to the acceptance."""
    well = run.scenario.triggers[-1].name
    first = {request.id: request.at for request in reversed(run.ground.seen) if request.accepted}
    begin = min(first.values(), default=0.0)  # a backlog waits for the first process
    waits = sorted(first[t.id] - max(t.at, begin) for t in run.published if t.trigger == well and t.id in first)
    return waits[int(len(waits) * 0.99)] if waits else 0.0


async def random_runs(ctx: RunContext, count: int, spark: list[str] | None) -> dict[str, Figure]:
    """So many situations from the run's seed on: what was wrong in all of them, and the worst of what is measured.

    `spark`: the arguments of that engine, the folder of its checkpoint last.
    """
    total: Counter[str] = Counter()
    worst = {"messages_per_request": 0.0, "well_p99": 0.0}
    words: list[str] = []
    async with NatsServer() as server:
        connection = await connect(ConnectOptions(servers=(server.url,)))
        try:
            with ctx.progress("random situations", total=count) as advance:
                for seed in range(ctx.seed, ctx.seed + count):
                    hungry = bool(ctx.options.get("hungry"))
                    scenario = draw(seed, spark=spark is not None, hungry=hungry)
                    own = [*spark[:-1], f"{spark[-1]}-{seed}"] if spark is not None else None  # a checkpoint of its own
                    figures, found = await run_scenario(scenario, server, JetStreamApi(connection), spark=own)
                    words += [str(scenario), *found] if found else []
                    for name, value in figures.items():
                        if name in worst:
                            worst[name] = max(worst[name], float(value))
                        else:
                            total[name] += int(value)
                    advance(1)
        finally:
            await connection.close()
    if words:
        print("\n".join(words), file=sys.stderr)
    return {"scenarios": count, **total, **worst}


def with_random(figures: dict[str, Figure], random: dict[str, Figure]) -> dict[str, Figure]:
    """Both parts of the proof in one: what both count is added up."""
    both = {name: int(figures[name]) + int(value) for name, value in random.items() if name in figures}
    return figures | random | both

"""Random delivery scenarios, one after the other: each is drawn from its seed, run by real processes and judged.

The hosts are real servers on loopback that fail for a while and are healthy afterwards. So every task must arrive in
the end, or be a dead letter because its own policy allows few attempts. Isolation is judged within a run: how much
longer the tasks of an always healthy host take beside the failing hosts than alone, once all is calm.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from parti.dead_letters import DeadLetterReader
from parti.delivery.names import DeliveryNames
from parti.delivery.recorder import AttemptRecord
from parti.errors import PartiError
from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.monitor import ask
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import RunContext
from parti_lab.prove.delivery_duplicates import Accepted, explain
from parti_lab.prove.delivery_faults import DeliveryFault, Troubles
from parti_lab.prove.delivery_ground import Ground
from parti_lab.prove.delivery_judge import KINDS, Circumstances, PublishedTask, RestedTask, judge, prompt
from parti_lab.prove.delivery_scenario import DeliveryScenario, Trigger, draw
from parti_lab.prove.delivery_spark import SPARK_TASKS, SharedSpark, SharedWorker
from parti_lab.prove.delivery_stage import subject_of
from parti_lab.prove.delivery_worker import Worker

_LEASE, _LEASE_SPARK = 3, 6
_IDLE = 2.0  # seconds in which we count the messages that processes send without a task
_WITHIN, _WITHIN_SPARK = 90.0, 240.0  # seconds until all tasks have arrived; a session takes minutes to start at worst
_FALLS = 0.9  # times the previous rate: below this, the rate is still falling
_ALONE = 20  # tasks that measure how long a host takes when it is alone
_ORDINARY = 15  # tasks of each trigger that measure the cost of a delivery without faults
_COSTS = {
    "well": "messages_per_delivery",
    "ill": "messages_per_attempt",
    "moved": "messages_per_attempt_moved",
}
"""Scenarios in which messages into the server are counted, and the figure of each."""


@dataclass(slots=True)
class DeliveryRun:
    """One scenario on a server."""

    scenario: DeliveryScenario
    server: NatsServer
    js: JetStreamApi
    ground: Ground
    rng: random.Random
    published: list[PublishedTask] = field(default_factory=list)
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
                    await self.js.publish(subject_of(self.stream, document), data, headers=headers)
                except PartiError:
                    return False
                return True

            await eventually(stored, 60, "a publish")
            self.published.append(PublishedTask(webhook_id, trigger.name, document, number, self.ground.clock.now()))

    def settings(self) -> dict[str, str]:
        scenario = self.scenario
        values: dict[str, object] = {
            "nats.servers": self.server.url,
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
        return {key: str(value) for key, value in values.items()}

    async def letters(self) -> list[RestedTask]:
        with suppress(PartiError):
            found = DeadLetterReader(self.js, self.stream).walk()
            return [RestedTask(x.extension.id, x.extension.trigger, x.reason, x.attempts) async for x in found]
        return []

    async def settled(self) -> bool:
        """Whether each task was accepted or is a dead letter; with `latest`, the newest of each document."""
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
        """Attempts that ended without an answer, and their outcome, from the workers' log."""
        found: dict[tuple[str, int], str] = {}
        stream, sequence = DeliveryNames(self.stream).attempts, 0
        with suppress(MessageNotFound, StreamNotFound):
            while True:
                stored = await self.js.msg_get(stream, seq=sequence + 1, next_by_subj=f"{stream}.>")
                sequence = stored.seq
                record = msgspec.json.decode(stored.data, type=AttemptRecord)
                if record.outcome in ("timeout", "network"):
                    found[record.id, record.attempt] = record.outcome
        return found

    async def refused(self) -> int:
        """Attempts without an endpoint: a refused connection costs as many messages as a request."""
        dead = {trigger.name for trigger in self.scenario.triggers if trigger.host == "dead"}
        return sum(task.partition("-")[0] in dead for task, _ in await self.unheard())

    async def superseded(self) -> int:
        """Tasks that a newer task replaced: each was processed without a request."""
        tried = {request.id for request in self.ground.seen} | {letter.id for letter in await self.letters()}
        latest = {trigger.name for trigger in self.scenario.triggers if trigger.order == "latest"}
        return sum(task.trigger in latest and task.id not in tried for task in self.published)

    async def idle(self) -> float:
        """Messages per second that processes send without a task, once earlier work is over: leases and pulls."""
        least = math.inf
        while True:
            before = _sent(self.server, self.js)
            await self.ground.clock.sleep(_IDLE)
            rate = (_sent(self.server, self.js) - before) / _IDLE
            if rate >= _FALLS * least:
                return min(rate, least)
            least = rate

    async def ordinary(self, idle: float) -> tuple[int, int]:
        """The messages and the deliveries they served, with all rules and without faults."""
        triggers = [each for each in self.scenario.triggers for _ in range(5 if each.rate == 5.0 else _ORDINARY)]
        began, before = self.ground.clock.now(), _sent(self.server, self.js)
        await self.publish(triggers)
        with suppress(NeverHappened):
            await eventually(self.settled, 60, "the tasks of hosts that are well")
        sent, took = _sent(self.server, self.js) - before, self.ground.clock.now() - began
        return max(0, int(sent - idle * took)), len(triggers)

    async def alone(self, within: float = 60.0) -> list[str]:
        """Deliver tasks of the always healthy host with no other load; returns their ids once all have arrived."""
        before = len(self.published)
        await self.publish([self.scenario.triggers[-1]] * _ALONE)
        with suppress(NeverHappened):
            await eventually(self.settled, within, "the tasks of a host that is alone")
        return [task.id for task in self.published[before:]]

    def slowest(self, ids: Collection[str]) -> float:
        """The 95th percentile of the time from publishing to acceptance, over tasks of the always healthy host."""
        first = {request.id: request for request in reversed(self.ground.seen) if request.accepted}
        # A backlog waits until its partition is being delivered; the first request of any trigger shows that.
        begins = {request.partition: request.at for request in reversed(self.ground.seen)}
        found = [(task, first[task.id]) for task in self.published if task.id in ids and task.id in first]
        waits = sorted(request.at - max(task.at, begins[request.partition]) for task, request in found)
        return waits[int(len(waits) * 0.95)] if waits else 0.0


async def run_scenario(
    scenario: DeliveryScenario, server: NatsServer, js: JetStreamApi, folder: Path, spark: SharedSpark | None = None
) -> tuple[dict[str, Figure], list[str]]:
    """Run one scenario, on Spark with its session; returns figures of what was wrong, and text about it."""
    rng = random.Random(f"run {scenario.seed}")
    ground = Ground(scenario, rng, hanging=folder / "names-hang" if spark is None else spark.hanging)
    async with AsyncExitStack() as stack:
        await ground.open(stack)
        run = DeliveryRun(scenario, server, js, ground, rng)
        await js.stream_create({"name": run.stream, "subjects": [f"{run.stream}.>"], "storage": "file"})
        tasks = [trigger for trigger in scenario.triggers for _ in range(trigger.tasks)]
        rng.shuffle(tasks)
        half = len(tasks) // 2
        # Spark's workers take as long to start as the rest of the run: if only hosts fail, start them first.
        warm = spark is not None and not scenario.faults
        if not warm:
            await run.publish(tasks[:half])
        workers = _workers(run, folder, spark)
        stack.push_async_callback(_discard, workers)
        troubles = Troubles(server, workers, rng, ground.clock, _LEASE if spark is None else _LEASE_SPARK)
        began, sent_before = ground.clock.now(), _sent(server, js)
        for worker in workers:
            await asyncio.to_thread(worker.start)
        before: list[str] = []
        if warm:
            before = await run.alone(_WITHIN_SPARK)
            ground.heals_at = math.inf
            await run.publish(tasks[:half])
        publishing = asyncio.create_task(run.publish(tasks[half:]))
        for fault in scenario.faults:
            await troubles.make(fault)
        await publishing
        well = {task.id for task in run.published if task.trigger == scenario.triggers[-1].name} - set(before)
        with suppress(NeverHappened):  # tasks that have not arrived by then are lost
            await eventually(run.settled, _WITHIN if spark is None else _WITHIN_SPARK, "every task accepted or at rest")
        sent, took = _sent(server, js) - sent_before, ground.clock.now() - began
        costs: dict[str, int] = {}
        if spark is None:  # Spark pulls with or without tasks
            attempts, idle = len(ground.seen), await run.idle()
            attempts += await run.refused() + await run.superseded()
            if "server" not in scenario.faults:  # a restarted server counts from 0
                kind = "moved" if scenario.faults else "ill"
                costs = {f"messages_{kind}": max(0, int(sent - idle * took)), f"tasks_{kind}": attempts}
            costs["messages_well"], costs["tasks_well"] = await run.ordinary(idle)
        alone = await run.alone()
        codes = [await asyncio.to_thread(worker.stop) for worker in workers]
        faults = [*troubles.faults, *troubles.stalls()]
        unheard = await run.unheard()
        wrong, words = judge(
            scenario.triggers,
            run.published,
            sorted(ground.seen, key=lambda request: request.at),
            await run.letters(),
            Circumstances(
                faults,
                timeouts={attempt for attempt, outcome in unheard.items() if outcome == "timeout"},
                processes=scenario.processes if spark is None else SPARK_TASKS,
                stall=ground.stall,
                forgetful=spark is not None,
            ),
        )
        repeats = _repeats(run, faults, unheard, 256 if spark is None else 1_000_000)
        figures: dict[str, Figure] = {**wrong, "duplicates_unexplained": repeats, "exit_codes": sum(codes)}
        figures |= {"tasks": len(run.published), "requests": len(ground.seen)}
        figures |= costs
        if not faults and not scenario.faults:  # a stop also makes others wait
            figures["well_alone"] = round(run.slowest(alone), 2)
            figures["well_beside_ill"] = round(run.slowest(well), 2)
            figures["stall"] = round(ground.stall, 2)
        with suppress(PartiError):
            for name in await js.stream_names():
                if name.removeprefix("KV_").startswith(run.stream):
                    await js.stream_delete(name)
        return figures, words


def _workers(run: DeliveryRun, folder: Path, spark: SharedSpark | None) -> list[Worker]:
    settings, scenario = run.settings(), run.scenario
    if spark is not None:
        settings["checkpoint"] = str(folder / f"checkpoint-{scenario.seed}")
        return [SharedWorker(spark, [word for pair in settings.items() for word in pair], run.rng)]
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    program = ("parti_lab.prove.delivery_main", str(run.ground.hanging), str(scenario.descriptors))
    return [Worker(words, program) for _ in range(scenario.processes)]


async def _discard(workers: list[Worker]) -> None:
    for worker in workers:
        await asyncio.to_thread(worker.discard)


def _sent(server: NatsServer, js: JetStreamApi) -> int:
    """Messages into the server without our own (publishes, and checks whether all tasks have arrived)."""
    return int(ask(f"{server.monitor_url}/varz").get("in_msgs", 0)) - int(js.connection.stats["out_msgs"])


def _repeats(
    run: DeliveryRun, faults: list[DeliveryFault], unheard: Collection[tuple[str, int]], in_flight: int
) -> int:
    accepted: dict[str, list[Accepted]] = defaultdict(list)
    for request in prompt(run.ground.seen, unheard):
        if request.accepted:
            accepted[request.id].append(Accepted(request.at, request.epoch, request.attempt))
    return explain(accepted, faults, unheard, in_flight=in_flight)["unexplained"]


async def random_runs(ctx: RunContext, count: int, *, spark: bool) -> dict[str, Figure]:
    """Run `count` scenarios from the run's seed on: the sum of all findings, and the worst of each measurement."""
    total: Counter[str] = Counter()
    delays: dict[bool, list[float]] = {False: [0.0], True: [0.0]}
    words: list[str] = []
    with tempfile.TemporaryDirectory(prefix="parti-prove-") as name:
        folder = Path(name)
        async with NatsServer() as server, AsyncExitStack() as stack:
            connection = await connect(ConnectOptions(servers=(server.url,)))
            stack.push_async_callback(connection.close)
            session = SharedSpark(folder) if spark else None
            if session is not None:
                stack.push_async_callback(asyncio.to_thread, session.close)
            with ctx.progress("random situations", total=count) as advance:
                for seed in range(ctx.seed, ctx.seed + count):
                    scenario = draw(seed, spark=spark, hungry=bool(ctx.options.get("hungry")))
                    figures, found = await run_scenario(scenario, server, JetStreamApi(connection), folder, session)
                    words += [str(scenario), *found] if found else []
                    print(f"{scenario}: {_sentence(figures)}", file=sys.stderr)
                    if "stall" in figures:
                        # On Spark every task waits for its batch, which waits for its slowest request.
                        delays[spark or scenario.crowded].append(_delay(figures))
                    total.update({key: int(value) for key, value in figures.items() if isinstance(value, int)})
                    advance(1)
    if words:
        print("\n".join(words), file=sys.stderr)
    costs: dict[str, Figure] = {}
    for kind, name in _COSTS.items():
        messages, tasks = total.pop(f"messages_{kind}", 0), total.pop(f"tasks_{kind}", 0)
        costs[name] = round(messages / max(tasks, 1), 2)
    waits = {"well_delay": round(max(delays[False]), 2), "well_delay_crowded": round(max(delays[True]), 2)}
    return {"scenarios": count, **total, **costs, **waits}


def _sentence(figures: dict[str, Figure]) -> str:
    """The measurements and findings of one scenario."""
    said = [f"{figures['requests']} requests of {figures['tasks']} tasks"]
    for kind in _COSTS:
        if tasks := int(figures.get(f"tasks_{kind}", 0)):
            said.append(f"{kind} {int(figures[f'messages_{kind}']) / tasks:.2f} messages")
    if "stall" in figures:
        said.append(f"delay {_delay(figures):.2f} s")
    wrong = {name: figures[name] for name in (*KINDS, "duplicates_unexplained", "exit_codes") if figures[name]}
    return ", ".join([*said, *(f"{name} {value}" for name, value in wrong.items())])


def _delay(figures: dict[str, Figure]) -> float:
    """Seconds by which failing hosts delay the healthy one, without the endpoints' own stalls."""
    return float(figures["well_beside_ill"]) - float(figures["well_alone"]) - float(figures["stall"])


def with_random(figures: dict[str, Figure], random: dict[str, Figure]) -> dict[str, Figure]:
    """Both parts of the proof in one; counts that both have are added up."""
    both = {name: int(figures[name]) + int(value) for name, value in random.items() if name in figures}
    return figures | random | both

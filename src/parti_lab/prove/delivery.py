"""`parti prove delivery`: endpoints, workers and the server fail; every task arrives in order or is a dead letter.

Real processes deliver to a real endpoint that answers with 5xx, 429, silence, resets, drips, garbage and huge bodies.
Meanwhile workers are killed, frozen and stopped, and the server is killed. Only the endpoint's log of accepted
requests and the dead letters are judged. A fault must explain each second acceptance (`delivery_duplicates`).
The endpoint does what docs/delivery.md asks of receivers: it refuses a request with an older epoch than it has seen.
A process may freeze between its last check of the lease and the write to the socket; only the receiver can refuse
such a request (`stale_refused`). A process that still held its lease would turn a task that is refused this way into
a dead letter, and the proof would find it there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from parti.clock import SystemClock
from parti.delivery import DeliverSection
from parti.errors import PartiError, UsageError
from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.http_server import FaultHttpServer
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.delivery_faults import TROUBLES, Troubles
from parti_lab.prove.delivery_quiet import quiet_phases
from parti_lab.prove.delivery_random import random_runs, with_random
from parti_lab.prove.delivery_stage import STREAM, WITHIN, DeliveryStage
from parti_lab.prove.delivery_worker import SparkWorker, Worker

_LEASE = 3


async def run(ctx: RunContext) -> dict[str, Figure]:
    rng, clock, engine = ctx.random(), SystemClock(), _ENGINES.get(str(ctx.options["engine"]))
    if engine is None:
        raise UsageError(f"engine {ctx.options['engine']!r}: choose {' or '.join(_ENGINES)}")
    rounds, partitions = int(ctx.options["rounds"]), int(ctx.options["partitions"])
    if ctx.quick:
        rounds = min(rounds, engine.quick)
    async with _open(rng) as (server, stage, options):
        figures: dict[str, Figure] = {"rounds": rounds}
        figures |= await quiet_phases(stage, options)
        stage.timeout = engine.timeout
        settings = _settings(server, stage.endpoint, 1 if engine.spark else partitions)
        workers = [engine.worker([*settings, *engine.settings(server)]) for _ in range(2 if rounds else 0)]
        troubles = Troubles(server, workers, rng, clock, engine.lease)
        if engine.spark:
            troubles.choose = lambda: _driver_at_work(stage, workers)
        try:
            with ctx.progress("delivery", total=rounds) as advance:
                for worker in workers:
                    await asyncio.to_thread(worker.start)
                for number in range(rounds):
                    publishing = asyncio.create_task(stage.publish(150))
                    await troubles.make(TROUBLES[number % len(TROUBLES)])
                    await publishing
                    advance(1)
            with suppress(NeverHappened):  # tasks that have not arrived by then are counted as lost
                await eventually(stage.settled, engine.within, "every task delivered or in the dead letters")
            figures["exit_codes"] = sum([await asyncio.to_thread(worker.stop) for worker in workers])
        finally:
            for worker in workers:
                await asyncio.to_thread(worker.kill)
        verdict = stage.history.verdict()
        names = ("lost", "duplicated", "inversions", "two_owners", "stale_accepted", "phantom")
        found: dict[str, Figure] = (
            figures
            | {"tasks": stage.published, "requests": sum(stage.requests.values()), "stale_refused": stage.stale_refused}
            | {name: getattr(verdict, name) for name in names}
            | await stage.duplicates([*troubles.faults, *troubles.stalls()], engine.in_flight)
            | await stage.judge()
        )
    scenarios = min(2, int(ctx.options["scenarios"])) if ctx.quick else int(ctx.options["scenarios"])
    return with_random(found, await random_runs(ctx, scenarios, spark=engine.spark))


@dataclass(frozen=True, slots=True)
class _Engine:
    """The differences between the engines that matter to the proof."""

    worker: type[Worker]
    in_flight: int
    """Tasks that one fault may repeat: with Spark a whole batch, which a driver finishes before it stops."""
    lease: int = _LEASE
    timeout: str = "500ms"
    within: float = WITHIN
    spark: bool = False
    quick: int = len(TROUBLES)
    """Rounds of the quick form. None with Spark: on a busy machine two drivers take minutes to start."""

    def settings(self, server: NatsServer) -> list[str]:
        if not self.spark:
            return []
        return [
            "--engine",
            "spark",
            "--master",
            "local[2]",
            "--checkpoint",
            str(server.store_dir.parent / "checkpoint"),
        ]


async def _driver_at_work(stage: DeliveryStage, workers: list[Worker]) -> Worker:
    """In three of four cases the driver that delivers, once one does: Spark starts slower than most faults last."""
    from parti.spark.pipeline.driver.lease import Standby, lease_key  # Spark is an extra, for this engine only

    before = sum(stage.requests.values())

    async def delivers() -> bool:
        return sum(stage.requests.values()) > before

    with suppress(NeverHappened):
        await eventually(delivers, WITHIN, "a driver delivers")
    if stage.rng.random() < 0.75:
        with suppress(PartiError):
            entry = await (await KeyValue.open(stage.js, Standby().bucket)).get(lease_key(f"deliver-{STREAM}"))
            for worker in workers:
                if f"-{worker.pid}-".encode() in entry.value:  # the name of a driver contains its process id
                    return worker
    return stage.rng.choice(workers)


_ENGINES = {
    "async": _Engine(Worker, DeliverSection().host_concurrency),
    # Spark keeps no attempt log that would show which answers came too late, so requests get more time.
    "spark": _Engine(SparkWorker, 1_000_000, lease=6, timeout="3s", within=300.0, spark=True, quick=0),
}


@asynccontextmanager
async def _open(rng: random.Random) -> AsyncIterator[tuple[NatsServer, DeliveryStage, ConnectOptions]]:
    async with NatsServer() as server, FaultHttpServer() as endpoint:
        options = ConnectOptions(servers=(server.url,))
        connection = await connect(options)
        try:
            js = JetStreamApi(connection)
            await js.stream_create({"name": STREAM, "subjects": [f"{STREAM}.>"], "storage": "file"})
            yield server, DeliveryStage(js, endpoint, rng, documents=40), options
        finally:
            await connection.close()


def _settings(server: NatsServer, endpoint: FaultHttpServer, partitions: int) -> list[str]:
    settings = {
        "deliver.stream": STREAM,
        "deliver.partitions": partitions,
        "deliver.lease": _LEASE,
        "deliver.allow_addresses": endpoint.allowed,
        "deliver.schedule": ",".join(["100ms"] * 3 + ["500ms"] * 40),
        "deliver.block_for": "500ms",
        "deliver.breaker_open": "500ms",
        "observe.log_level": "warning",
    }
    return ["-s", server.url, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))]


_COSTS = {
    # Messages into the server. Without faults, under any rules: an acknowledgement, a journal entry, a pull.
    "messages_per_delivery": "<= 3",
    # With failing hosts. A parked task costs three: it is stored, acknowledged, removed. A failed attempt also costs
    # three: the attempt log, a wake-up and its answer. Tasks that do not fit into memory are read a second time.
    "messages_per_attempt": "<= 4",
    # While processes are killed, frozen or stopped. Each start and each move costs about sixty, with or without tasks.
    "messages_per_attempt_moved": "<= 5",
}
GOALS = {
    "lost": "== 0",
    "inversions": "== 0",
    "two_owners": "== 0",
    "stale_accepted": "== 0",
    "phantom": "== 0",
    "duplicates_unexplained": "== 0",
    "dead_letters_missing": "== 0",
    "dead_letters_wrong": "== 0",
    "attempts_without_a_request": "== 0",
    "sockets_to_blocked": "== 0",
    "poison_blocked_others": "== 0",
    "exit_codes": "== 0",
    "attempts_forgotten": "== 0",
    "too_early": "== 0",
    "over_rate": "== 0",
    "over_concurrency": "== 0",
    "letters_wrong": "== 0",
    "buried_although_accepted": "== 0",
    **_COSTS,
    # Seconds by which failing hosts delay the healthy one. It may have to wait for requests in flight: one of
    # them takes a second, and a look-up that hangs takes three.
    "well_delay": "<= 1",
    "well_delay_crowded": "<= 5",
}


def _goals(options: Mapping[str, Any]) -> dict[str, str]:
    """The goals of an engine. Spark pulls with or without tasks, so its message counts have no goal.

    Spark also promises no delivery time: each task waits for the current batch, which waits for its slowest request and
    for Spark itself. The measured time is only a figure.
    """
    of_one = (*_COSTS, "well_delay", "well_delay_crowded")
    return {name: goal for name, goal in GOALS.items() if name not in of_one or options["engine"] != "spark"}


PROOF = Proof(
    name="delivery",
    help="Endpoints, workers and the server misbehave: every task arrives in order per document, or rests complete.",
    run=run,
    goals=GOALS,
    goals_of=_goals,
    options=(
        ExperimentOption(
            "rounds", 16, "rounds of 150 tasks, each with a kill, a freeze, a stop or a dead server; 0: none"
        ),
        ExperimentOption("partitions", 4, "of the two processes; with 1, one delivers and the other stands by"),
        ExperimentOption(
            "scenarios", 4, "random situations after the rounds: rules, hosts, sizes and faults by --seed"
        ),
        ExperimentOption(
            "hungry",
            False,
            "in all random situations, and not in one of ten: more hosts than a process has descriptors for",
        ),
        ExperimentOption("engine", "async", "what delivers: async, or spark (two drivers, one stands by)"),
    ),
)

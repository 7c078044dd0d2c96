"""`parti prove delivery`: endpoints, workers and the server misbehave, and every task arrives in order or rests.

Real processes deliver to a real endpoint that answers with 5xx, 429, silence, resets, drips, garbage and huge bodies.
Meanwhile workers are killed, frozen and stopped, and the server is killed. The endpoint's log of accepted requests and
the dead letters are all that is judged; what was accepted twice must be explained by a fault (`delivery_duplicates`).
The endpoint does what docs/delivery.md tells receivers to do: it refuses a request of an older epoch than it has seen.
A process may freeze in the very moment between its last look at the lease and the write to the socket; nobody but the
receiver can refuse what comes of that (`stale_refused`). A process that still held its lease would bury a task that is
refused so, and the dead letters would tell.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from parti.bench.goals import Figure
from parti.bench.report import Option, Proof, RunContext
from parti.clock import SystemClock
from parti.errors import PartiError, UsageError
from parti.prove.delivery_duplicates import Accepted, explain
from parti.prove.delivery_faults import TROUBLES, Fault, Troubles
from parti.prove.delivery_random import random_runs, with_random
from parti.prove.delivery_worker import SparkWorker, Worker
from parti.tasks import AddressGuard, DeadLetters, DeliverSection, Letter, TaskConsumer
from parti.tasks.names import Names
from parti.tasks.policy import Outcome
from parti.tasks.recorder import AttemptRecord
from parti.testing import NatsServer, NeverHappened, eventually
from parti.testing.history import Effect, History
from parti.testing.http_server import (
    Answer,
    Drip,
    FaultHttpServer,
    Garbage,
    Hang,
    Huge,
    Received,
    Reply,
    Reset,
    redirect,
)
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

STREAM = "PROVE"
_LEASE = 3
_WITHIN = 120.0
_FATAL = {"/redirect": "rejected", "/refused": "rejected", "/poison": "exhausted", "/tls": "exhausted"}
_BLOCKED = (
    "http://127.0.0.2/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:127.0.0.1]/",
    "http://10.0.0.1/",
    "http://2130706433/",
    "http://user@127.0.0.1/",
)


class Stage:
    """The stream, the endpoint, what was published and what has to come of it."""

    def __init__(self, js: JetStreamApi, endpoint: FaultHttpServer, rng: random.Random, documents: int) -> None:
        self.js = js
        self.endpoint = endpoint
        self.rng = rng
        self.history = History()
        self.letters = DeadLetters(js, Names(STREAM))
        self.expected: dict[str, tuple[str, bytes]] = {}
        """Tasks that have to end in the dead letters: id -> reason and data."""
        self.requests: Counter[str] = Counter()
        self.published = 0
        self.stale_refused = 0
        self.late: list[tuple[str, int]] = []  # id and attempt that came after a later one of its owner was accepted
        self.timeout = "500ms"
        """Of requests that may meet a fault; what is sure to be answered has time for it."""
        self.accepted: dict[str, list[Accepted]] = {}
        """By id: when and by whom it was accepted; more than once is a duplicate."""
        self._clock = SystemClock()
        self._epochs: dict[str, int] = {}
        self._documents = documents
        self._numbers: Counter[str] = Counter()
        self._left: set[str] = set()
        endpoint.otherwise(self._reply)

    def _reply(self, request: Received) -> Reply:
        """Faults at random; what is answered with 2xx is an effect."""
        webhook_id = request.headers["webhook-id"]
        self.requests[webhook_id] += 1
        slot, epoch = request.headers["x-parti-partition"], int(request.headers["x-parti-epoch"])
        if epoch < self._epochs.get(slot, 0):
            self.stale_refused += 1
            return Answer(409)
        self._epochs[slot] = epoch
        if request.path in _FATAL:
            location = "http://169.254.169.254/latest/meta-data/"
            return {"/redirect": redirect(location), "/refused": Answer(422, body=b"no" * 5000)}.get(
                request.path, Answer(503)
            )
        if self.rng.random() < 0.25:
            return self.rng.choice(_FAULTS)
        attempt = int(request.headers["x-parti-attempt"])
        before = self.accepted.get(webhook_id)
        if before and before[-1].epoch == epoch and attempt < before[-1].attempt:
            # A machine that stood still may read a request that was given up after its successor: the log will tell.
            self.late.append((webhook_id, attempt))
            return Answer(200)
        body = request.json()
        number, document = body["payload"]["n"], body["documentId"]
        self.history.effect(Effect(slot, document, "p", number, f"epoch-{epoch}", epoch))
        self._left.discard(webhook_id)
        this = Accepted(self._clock.now(), epoch, attempt)
        self.accepted.setdefault(webhook_id, []).append(this)
        # The status has decided: it is accepted, whether the body is too long or never ends.
        whim = self.rng.random()
        return Huge(size=1 << 20) if whim < 0.01 else Drip(size=100, interval=0.1) if whim < 0.02 else Answer(200)

    async def publish(self, count: int) -> None:
        """Tasks of random documents; one in twelve has to end in the dead letters."""
        for _ in range(count):
            document = f"doc-{self.rng.randrange(self._documents)}"
            number = self._numbers[document] = self._numbers[document] + 1
            webhook_id = f"{document}-{number}"
            path = self.rng.choice(list(_FATAL)) if self.rng.random() < 1 / 12 else "/hook"
            url = self.endpoint.url.replace("http:", "https:") if path == "/tls" else self.endpoint.url
            data = self._task(document, number, url + path)
            if path in _FATAL:
                self.expected[webhook_id] = (_FATAL[path], data)
            else:
                self._left.add(webhook_id)
            await self._store(document, webhook_id, data)
            if path not in _FATAL:
                self.history.published(document, "p", number)
            self.published += 1

    def _task(self, document: str, number: int, url: str) -> bytes:
        task: dict[str, Any] = {
            "triggerId": "prove",
            "database": "db",
            "collection": "docs",
            "documentId": document,
            "event": "update",
            "url": url,
            "timeout": self.timeout if url.endswith("/hook") else "10s",
            "payload": {"n": number},
        }
        if url.endswith(("/poison", "/tls")):
            task["retryPolicy"] = {"maxAttempts": 3, "initialBackoff": "50ms"}
        return json.dumps(task).encode()

    async def _store(self, document: str, webhook_id: str, data: bytes) -> None:
        """Publish until the server has it: the id makes a second try harmless."""

        async def stored() -> bool:
            try:
                await self.js.publish(f"{STREAM}.db.docs.{document}", data, headers={"Nats-Msg-Id": webhook_id})
            except PartiError:
                return False
            return True

        await eventually(stored, _WITHIN, "a publish")

    async def settled(self) -> bool:
        """Whether everything has arrived, or rests in the dead letters."""
        if self._left:
            return False
        letters, stored = Names(STREAM).dead_letters, 0
        try:
            async for page in self.js.stream_subjects(letters, f"{letters}.db.>"):  # others are markers of drivers
                stored += sum(page.values())
        except PartiError:
            return False
        return stored >= len(self.expected)

    async def judge(self) -> dict[str, int]:
        """What is wrong with the dead letters."""
        found: dict[str, Letter] = {}
        doubled = incomplete = unspent = 0
        async for letter in self.letters.letters():
            doubled += letter.id in found
            found[letter.id] = letter
            reason, data = self.expected.get(letter.id, ("", b""))
            tried = 3 if reason == "exhausted" else 1
            answered = letter.status >= 300 or letter.outcome == "tls"
            incomplete += not (
                letter.reason == reason and letter.data == data and letter.attempts == tried and answered
            )
            # A broken handshake is an attempt that the endpoint never saw as a request.
            unspent += letter.attempts > self.requests[letter.id] and letter.outcome != "tls"
        return {
            "dead_letters": len(found),
            "dead_letters_missing": len(self.expected.keys() - found.keys()),
            "dead_letters_wrong": incomplete + doubled,
            "attempts_without_a_request": unspent,
        }

    async def duplicates(self, faults: list[Fault], in_flight: int) -> dict[str, int]:
        """What was accepted twice, by what explains it."""
        unheard = {(record.id, record.attempt) for record in [r async for r in self._unheard()]}
        found = explain(self.accepted, faults, unheard, in_flight=in_flight)
        backwards = sum(attempt not in unheard for attempt in self.late)
        found["unexplained"] += backwards
        return {f"duplicates_{kind}": count for kind, count in found.items()} | {
            "read_late": len(self.late) - backwards
        }

    async def _unheard(self) -> AsyncIterator[AttemptRecord]:
        """The attempts that ended without an answer, as the workers logged them."""
        stream = Names(STREAM).attempts
        for outcome in (Outcome.TIMEOUT, Outcome.NETWORK):
            sequence = 0
            with suppress(MessageNotFound):
                while True:
                    stored = await self.js.msg_get(stream, seq=sequence + 1, next_by_subj=f"{stream}.{outcome.value}")
                    sequence = stored.seq
                    yield msgspec.json.decode(stored.data, type=AttemptRecord)


_FAULTS: tuple[Reply, ...] = (
    Answer(500),
    Answer(503, {"Retry-After": "0"}),
    Answer(429, {"Retry-After": "1"}),
    Answer(408),
    Hang(),
    Reset(),
    Drip(size=100, interval=0.1, status=503),
    Garbage(),
)


async def run(ctx: RunContext) -> dict[str, Figure]:
    rounds, partitions = len(TROUBLES) if ctx.quick else int(ctx.options["rounds"]), int(ctx.options["partitions"])
    rng, clock, engine = ctx.random(), SystemClock(), _ENGINES.get(str(ctx.options["engine"]))
    if engine is None:
        raise UsageError(f"engine {ctx.options['engine']!r}: choose {' or '.join(_ENGINES)}")
    async with _open(rng) as (server, stage, options):
        figures: dict[str, Figure] = {"rounds": rounds}
        figures |= await _quiet_phases(stage, options)
        stage.timeout = engine.timeout
        settings = _settings(server, stage.endpoint, 1 if engine.spark else partitions)
        workers = [engine.worker([*settings, *engine.settings(server)]) for _ in range(2)]
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
            with suppress(NeverHappened):  # what has not arrived by then is counted as lost
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
        spark = engine.settings(server) if engine.spark else None
        return with_random(found, await random_runs(ctx, 1 if ctx.quick else int(ctx.options["scenarios"]), spark))


@dataclass(frozen=True, slots=True)
class _Engine:
    """What is different between the engines, as the proof sees them."""

    worker: type[Worker]
    in_flight: int
    """Tasks that one fault may repeat: with Spark a whole batch, which the stop of a driver waits for."""
    lease: int = _LEASE
    timeout: str = "500ms"
    within: float = _WITHIN
    spark: bool = False

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


async def _driver_at_work(stage: Stage, workers: list[Worker]) -> Worker:
    """Three times of four the driver that delivers, once it does: Spark takes longer to start than most faults last."""
    from parti.spark.pipeline.lease import Standby, lease_key  # Spark is an extra: the other engine does without

    before = sum(stage.requests.values())

    async def delivers() -> bool:
        return sum(stage.requests.values()) > before

    with suppress(NeverHappened):
        await eventually(delivers, _WITHIN, "a driver delivers")
    if stage.rng.random() < 0.75:
        with suppress(PartiError):
            entry = await (await KeyValue.open(stage.js, Standby().bucket)).get(lease_key(f"deliver-{STREAM}"))
            for worker in workers:
                if f"-{worker.pid}-".encode() in entry.value:  # the name of a driver tells its process
                    return worker
    return stage.rng.choice(workers)


_ENGINES = {
    "async": _Engine(Worker, DeliverSection().host_concurrency),
    # It keeps no log of attempts that would tell which answers came too late: so they get more time.
    "spark": _Engine(SparkWorker, 1_000_000, lease=6, timeout="3s", within=300.0, spark=True),
}


@asynccontextmanager
async def _open(rng: random.Random) -> AsyncIterator[tuple[NatsServer, Stage, ConnectOptions]]:
    async with NatsServer() as server, FaultHttpServer() as endpoint:
        options = ConnectOptions(servers=(server.url,))
        connection = await connect(options)
        try:
            js = JetStreamApi(connection)
            await js.stream_create({"name": STREAM, "subjects": [f"{STREAM}.>"], "storage": "file"})
            yield server, Stage(js, endpoint, rng, documents=40), options
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


async def _quiet_phases(stage: Stage, options: ConnectOptions) -> dict[str, Figure]:
    """Without process faults: blocked addresses get no socket, and a poison document blocks only itself."""
    stream = "PROVEQUIET"
    await stage.js.stream_create({"name": stream, "subjects": [f"{stream}.>"], "storage": "memory"})
    config = msgspec.structs.replace(
        DeliverSection(), stream=stream, storage="memory", allow_addresses=(stage.endpoint.allowed,), jitter=0.0
    )
    guard = AddressGuard(config.allow_addresses)
    consumer = TaskConsumer(config, nats=options, guard=guard)
    running = asyncio.create_task(consumer.start())
    letters = DeadLetters(stage.js, Names(stream))
    try:
        await consumer.wait_ready()
        for number, url in enumerate(_BLOCKED):
            await stage.js.publish(f"{stream}.x", stage._task(f"blocked-{number}", 1, url))

        async def refused() -> bool:
            return len([letter async for letter in letters.letters()]) == len(_BLOCKED)

        await eventually(refused, _WITHIN, "the blocked addresses in the dead letters")
        opened = guard.opened
        blocked_others = await _poison(stage, stream)
    finally:
        await consumer.stop()
        await running
    return {"blocked_urls": len(_BLOCKED), "sockets_to_blocked": opened, "poison_blocked_others": blocked_others}


async def _poison(stage: Stage, stream: str) -> int:
    """How many tasks of other documents had not arrived when the poison task was given up."""
    arrived: set[str] = set()
    given_up = asyncio.Event()

    def hook(request: Received) -> Reply:
        arrived.add(request.headers["webhook-id"])
        return Answer(200)

    stage.endpoint.on("/quiet", hook)
    stage.endpoint.on("/dead", Answer(503))
    task = json.loads(stage._task("poison", 1, f"{stage.endpoint.url}/dead"))
    task["retryPolicy"] = {"maxAttempts": 4, "initialBackoff": "1s", "maxBackoff": "1s"}
    await stage.js.publish(f"{stream}.x", json.dumps(task).encode())
    others = 200
    for number in range(others):
        data = stage._task(f"other-{number % 20}", number, f"{stage.endpoint.url}/quiet")
        await stage.js.publish(f"{stream}.x", data)
    follower = stage._task("poison", 2, f"{stage.endpoint.url}/follower")
    stage.endpoint.on("/follower", lambda _request: given_up.set() or Answer(200))  # type: ignore[func-returns-value]
    await stage.js.publish(f"{stream}.x", follower)
    async with asyncio.timeout(_WITHIN):
        await given_up.wait()
    return others - len(arrived)


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
    "messages_per_request": "<= 12",
    "well_p99": "<= 15",
}

PROOF = Proof(
    name="delivery",
    help="Endpoints, workers and the server misbehave: every task arrives in order per document, or rests complete.",
    run=run,
    goals=GOALS,
    options=(
        Option("rounds", 16, "rounds of 150 tasks, each with a kill, a freeze, a stop or a dead server"),
        Option("partitions", 4, "of the two processes; with 1, one delivers and the other stands by"),
        Option("scenarios", 4, "random situations after the rounds: rules, hosts, sizes and faults by --seed"),
        Option("hungry", False, "in random situations: more hosts than a process has descriptors for"),
        Option("engine", "async", "what delivers: async, or spark (two drivers, one stands by)"),
    ),
)

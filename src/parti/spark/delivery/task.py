"""Delivery inside a Spark task: the policy, guard, signatures and dead letters of the TaskConsumer, in lanes.

A task of the stream gets at most one attempt per batch. If it must wait, it is parked in the checkpoint for the time
that its policy sets, with its document or alone: no batch waits for a retry. The worker process remembers from batch to
batch which hosts are down. A Spark task of a driver that was replaced sends and stores nothing.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from weakref import WeakKeyDictionary

import msgspec
import nats.errors

from parti.clock import SystemClock
from parti.config.deliver import DeliverSection
from parti.delivery.courier import Courier
from parti.delivery.endpoints import PREFIX, Endpoints, disabled_endpoints
from parti.delivery.engine_lock import spark_claim
from parti.delivery.errors import Reason
from parti.delivery.gate import Gate
from parti.delivery.guard import AddressGuard
from parti.delivery.journal import Try
from parti.delivery.letters import TaskLetters
from parti.delivery.names import DeliveryNames
from parti.delivery.order import RuleBook, TaskOrder
from parti.delivery.pending import Pending, TaskReader
from parti.delivery.policy import UNSPENT, AttemptOutcome, DeliveryAttempt, decide, retry_policy
from parti.delivery.recency import is_older
from parti.delivery.recorder import DeliveryRecorder
from parti.delivery.secrets import SecretStore
from parti.delivery.transport import HttpTransport
from parti.errors import PartiError
from parti.observe.metrics import NO_METRICS
from parti.outcomes import Again, Bury, Decision, Retry
from parti.spark.pipeline.executor.message import MessageRows, RowMessage
from parti.spark.pipeline.executor.outcomes import ParkedRows
from parti.spark.pipeline.executor.policy import AlreadyDeadLettered, ParkAlone, ParkKey
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.epoch_marker import StaleEpoch, marker_subject, read_marker
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

_LOOK_EVERY = 1.0
_PATIENCE = 2.0  # seconds that a batch, and all in it, waits for the limits of a trigger; then the task is parked
_STORE_AGAIN = 5.0  # seconds until a task whose dead letter could not be stored is retried


@dataclass(frozen=True, slots=True)
class Before:
    """What the TaskConsumer had done at takeover: all up to `high` except `open`, and what its journal `said`."""

    high: int = 0
    open: frozenset[int] = frozenset()
    said: frozenset[int] = frozenset()
    tries: Mapping[int, Try] = field(default_factory=dict)
    """How often it had tried tasks that were still open, and when they may be tried again."""

    def __contains__(self, sequence: int) -> bool:
        return (sequence <= self.high and sequence not in self.open) or sequence in self.said


@dataclass(frozen=True, slots=True)
class Deliver:
    """The handler of a delivery pipeline; immutable and picklable, with everything that a Spark task needs."""

    name: str
    config: DeliverSection
    nats: ConnectOptions = field(repr=False)
    replay: bool = False
    """Whether these tasks were delivered before: then none is too old, and the letters are separate."""
    last: int | None = None
    """For a replay: the last sequence to send."""
    until: float = math.inf
    """For a replay: nothing stored from this time on (seconds since 1970) is sent."""
    before: Before = field(default_factory=Before, repr=False)

    async def __call__(self, message: RowMessage) -> object:
        """None when the endpoint has accepted the task; else what the pipeline should do with its document."""
        if not self.covers(message.sequence, message.timestamp):
            return None
        try:
            return await (await _session(self, message.rows)).deliver(message)
        except PartiError as error:
            # NATS is unavailable: nothing may be released, and nothing counts as an attempt.
            return ParkKey(_STORE_AGAIN, str(error))

    def covers(self, sequence: int, timestamp: float) -> bool:
        """Whether this message is to be sent at all."""
        within = (self.last is None or sequence <= self.last) and timestamp < self.until
        return within and sequence not in self.before


@dataclass(frozen=True, slots=True)
class TaskRight:
    """The right of a Spark task to send: checked when the task starts; the epoch tells the receiver.

    The partition's name differs from those of the TaskConsumer, whose epochs are counted differently.
    """

    partition: str
    epoch: int

    def check(self) -> float:
        return math.inf


class AttemptLog:
    """The attempts of one Spark task in `<stream>_ATTEMPTS`, sent without waiting for the server: it may have gaps."""

    def __init__(self, config: DeliverSection, connection: Connection) -> None:
        self._connection = connection
        self._records: list[tuple[str, bytes]] = []
        self._recorder = DeliveryRecorder(config, NO_METRICS, SystemClock())
        self._recorder.write = lambda subject, data: self._records.append((subject, data))

    def __repr__(self) -> str:
        return f"<AttemptLog of {self._connection!r}>"

    async def attempted(self, held: Pending, attempt: DeliveryAttempt, seconds: float) -> None:
        self._recorder.attempted(held, attempt, seconds)
        while self._records:
            with suppress(nats.errors.Error):  # no connection, or a full one: delivery does not wait for the log
                await self._connection.publish(*self._records.pop())


class _Trigger(msgspec.Struct, rename="camel"):
    trigger_id: str
    lsn: str = ""
    seq: int = 0
    ts: int = 0


_TRIGGER = msgspec.json.Decoder(_Trigger)


def newest(delivery: Deliver, rows: MessageRows) -> dict[tuple[str, str], int]:
    """By document and trigger: the sequence of the newest task among these rows, by the document's own order."""
    found: dict[tuple[str, str], tuple[_Trigger, int]] = {}
    columns = zip(rows.keys, rows.values, rows.sequences, rows.timestamps, strict=True)
    for key, data, sequence, timestamp in columns:
        if not delivery.covers(sequence, timestamp):
            continue
        try:
            task = _TRIGGER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # not a task: it replaces none
        place = key, task.trigger_id
        if (best := found.get(place)) is None or not _precedes(task, sequence, *best):
            found[place] = task, sequence
    return {place: sequence for place, (_, sequence) in found.items()}


def _precedes(task: _Trigger, sequence: int, other: _Trigger, its_sequence: int) -> bool:
    """Whether `task` is the older one; the rows come in any order."""
    if sequence > its_sequence:
        return is_older(task, other)
    return not is_older(other, task)


class DeliverySession:
    """The parts that all messages of one Spark task share."""

    def __init__(
        self,
        delivery: Deliver,
        courier: Courier,
        gate: Gate,
        letters: TaskLetters,
        ends: Endpoints,
        log: AttemptLog | None = None,
    ) -> None:
        config = delivery.config
        self._delivery = delivery
        self._courier = courier
        self._gate = gate
        self._letters = letters
        self._endpoints = ends
        self._log = log
        self._reader = TaskReader(config, RuleBook(config.triggers, config.order))
        self._clock = SystemClock()
        self._rng = random.Random()
        self._rights: dict[str, TaskRight] = {}
        self._newest: WeakKeyDictionary[MessageRows, dict[tuple[str, str], int]] = WeakKeyDictionary()
        self.closing = False
        """Whether nothing more may be sent: requests in flight finish, the rest is handed back."""
        self.resources: AsyncGenerator[DeliverySession, None] | None = None
        """Keeps the resources open; the end of the task's event loop closes them."""

    def __repr__(self) -> str:
        return f"<DeliverySession {self._delivery.name} {self._gate!r}>"

    async def deliver(self, message: RowMessage) -> object:
        if self.closing:
            return ParkKey(0.0, "the driver stops")
        held = self._reader.read(
            message.data,
            message.headers,
            stream=message.rows.stream,
            subject=message.subject,
            sequence=message.sequence,
            time=message.timestamp,
        )
        # Each time that its document was parked because of this task was one attempt.
        held.attempts = message.rows.tally.parked.get(message.index, ParkedRows()).times
        tried = self._delivery.before.tries.get(message.sequence)
        if tried is not None:
            if not held.attempts and (left := tried.due - self._clock.wall()) > 0:
                return _later(held, left, "it was tried by the other engine, and waits", tried=False)
            held.attempts += tried.attempts
        if held.refusal is not None:
            refused = DeliveryAttempt(AttemptOutcome.REFUSED, error=str(held.refusal))
            return await self._bury(held, held.refusal.reason, refused)
        assert held.task is not None
        if held.rules.order is TaskOrder.LATEST and self._is_replaced(message, held.trigger):
            return None
        if self._endpoints.is_disabled(held.task):
            disabled = DeliveryAttempt(AttemptOutcome.REFUSED, error="the endpoint is disabled")
            return await self._bury(held, Reason.DISABLED, disabled)
        postponed = await self._gate.admit(held.host, held.trigger, held.rules)
        if postponed is not None:
            if self._age(held) >= self._delivery.config.max_task_age:
                expired = DeliveryAttempt(
                    AttemptOutcome.REFUSED, error="older than deliver.max_task_age when its turn came"
                )
                return await self._bury(held, Reason.EXPIRED, expired)
            return _later(held, postponed.wait, postponed.why, tried=False)
        attempt = await self._attempt(held, self._right(message))
        if attempt.outcome is AttemptOutcome.DELIVERED:
            return None
        match self._decide(held, attempt):
            case Bury(reason):
                if reason is Reason.GONE:
                    why = f"status {attempt.status}"
                    await self._endpoints.disable(held.task, held.host, why, self._clock.wall())
                return await self._bury(held, reason, attempt)
            case Again(wait):
                return _later(held, wait, attempt.error, tried=attempt.outcome not in UNSPENT)
            case _:
                return None

    def _right(self, message: RowMessage) -> TaskRight:
        partition = message.partition.id
        right = self._rights.get(partition)
        if right is None:
            right = self._rights[partition] = TaskRight(f"spark-{partition}", message.rows.epoch)
        return right

    def _is_replaced(self, message: RowMessage, trigger: str) -> bool:
        """Whether a newer task of the same document and trigger waits as well."""
        rows = message.rows
        found = self._newest.get(rows)
        if found is None:
            found = self._newest[rows] = newest(self._delivery, rows)
        return found.get((rows.keys[message.index], trigger), message.sequence) != message.sequence

    async def _attempt(self, held: Pending, right: TaskRight) -> DeliveryAttempt:
        spent: AttemptOutcome | None = None
        rest: float | None = None
        began = self._clock.now()
        try:
            attempt = await self._courier.attempt(held, right, self._gate.pace(held.trigger, held.rules))
            if attempt.outcome not in UNSPENT:
                spent = attempt.outcome
                held.attempts += 1
            else:
                rest = attempt.retry_after  # the host name did not resolve: the others need not try
        finally:
            self._gate.release(held.host, held.trigger, held.rules, spent, rest)
        if self._log is not None:
            await self._log.attempted(held, attempt, self._clock.now() - began)
        return attempt

    def _decide(self, held: Pending, attempt: DeliveryAttempt) -> Decision:
        assert held.task is not None
        config = self._delivery.config
        return decide(
            attempt,
            attempts=held.attempts,
            age=self._age(held),
            policy=retry_policy(held.task.retry_policy, config),
            config=config,
            rng=self._rng,
        )

    def _age(self, held: Pending) -> float:
        return 0.0 if self._delivery.replay else self._clock.wall() - held.first_seen

    async def _bury(self, held: Pending, reason: StrEnum, attempt: DeliveryAttempt) -> AlreadyDeadLettered:
        await self._letters.bury(held, reason, attempt)
        return AlreadyDeadLettered(f"{reason.value}: {attempt.error}")


def _later(held: Pending, wait: float, error: str, *, tried: bool) -> ParkAlone | Retry | ParkKey:
    """Its document waits with it, unless its policy lets later tasks pass."""
    if held.rules.order is TaskOrder.SKIP:
        return ParkAlone(wait, error, tried)
    return Retry(wait, error) if tried else ParkKey(wait, error)


_DESKS: dict[int, asyncio.Task[DeliverySession]] = {}
"""By event loop: each Spark task has its own."""
_GATES: dict[str, Gate] = {}
"""By pipeline: a worker process serves one Spark task after the other, and remembers which hosts are down."""


async def _session(delivery: Deliver, rows: MessageRows) -> DeliverySession:
    loop = asyncio.get_running_loop()
    opening = _DESKS.get(id(loop))
    if opening is None:
        opening = _DESKS[id(loop)] = loop.create_task(_open(delivery, rows.epoch, rows.tasks))
    return opening.result() if opening.done() else await asyncio.shield(opening)


async def _open(delivery: Deliver, epoch: int, tasks: int) -> DeliverySession:
    resources = _resources(delivery, epoch, tasks)
    try:
        session = await anext(resources)
    except BaseException:
        _DESKS.pop(id(asyncio.get_running_loop()), None)
        raise
    session.resources = resources
    return session


async def _fence(js: JetStreamApi, delivery: Deliver, epoch: int) -> Mapping[str, str]:
    """Headers by which the server refuses our letters once a later driver exists; `StaleEpoch` if one exists now."""
    if not epoch:
        return {}
    letters = DeliveryNames(delivery.config.stream).dead_letters
    marker = await read_marker(js, letters, marker_subject(letters, (f"{letters}.>",), delivery.name))
    if marker is None:
        return {}  # the stream was purged: only the lease keeps other drivers out
    if marker.epoch > epoch:
        raise StaleEpoch(f"a driver with epoch {marker.epoch} delivers {delivery.config.stream}; ours is {epoch}")
    return marker.expected


async def _listen(session: DeliverySession, bucket: KeyValue) -> None:
    """Check every second whether the driver wants to stop."""
    while not session.closing:
        await asyncio.sleep(_LOOK_EVERY)
        with suppress(PartiError):  # the next check will see it
            found = await spark_claim(bucket)
            session.closing = found is not None and found[0].closing


async def _resources(delivery: Deliver, epoch: int, tasks: int) -> AsyncGenerator[DeliverySession, None]:
    """An open session; its resources are closed when the loop closes its generators.

    Each of the `tasks` gets its share of a trigger's limits: together they respect them.
    """
    config, clock, names = delivery.config, SystemClock(), DeliveryNames(delivery.config.stream)
    guard = AddressGuard(config.allow_addresses, config.allow_ports)
    transport = HttpTransport(config, guard)
    connection = await connect(delivery.nats, name="parti-deliver")
    listening: asyncio.Task[None] | None = None
    try:
        js = JetStreamApi(connection)
        endpoints = Endpoints(bucket := await KeyValue.open(js, names.bucket))
        for name in await disabled_endpoints(bucket):
            endpoints.changed(f"{PREFIX}{name}", True)
        courier = Courier(config, transport, guard, SecretStore(clock, config.secrets_dir), clock)
        gate = _GATES.setdefault(delivery.name, Gate(config, clock, random.Random(), patience=_PATIENCE))
        gate.share = lambda: 1 / tasks
        fence = await _fence(js, delivery, epoch)
        letters = TaskLetters(js, names, f"{delivery.name}:" if delivery.replay else "", fence)
        await transport.open()
        session = DeliverySession(delivery, courier, gate, letters, endpoints, AttemptLog(config, connection))
        if epoch:
            listening = asyncio.create_task(_listen(session, bucket))
        yield session
    finally:
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        _DESKS.pop(id(asyncio.get_running_loop()), None)
        await transport.close()
        await connection.close()

"""The pipeline's lease: one driver runs, others wait, and a driver that lost its lease knows it by its own clock.

The decisions are the control plane's election (`parti.control.election`); this performs them, in a thread with an event
loop of its own, because Spark's driver is a blocking program. The term of the election is the epoch of the pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from parti import defaults
from parti.backoff import PATIENT
from parti.clock import SystemClock
from parti.control import election
from parti.control.election import Deposed, Elected, Election, LeaderRecord, ReadLeader, WriteLeader
from parti.control.lease import LeaseTerms
from parti.control.records import Unreadable, decode_leader, encode_leader
from parti.errors import Category, FatalError, PartiError, TransientError, UsageError
from parti.model import Member, WorkerId
from parti.observe.logs import get_logger
from parti.waiting import first_of
from parti.wire.api import JetStreamApi
from parti.wire.blocking import BlockingConnection
from parti.wire.connect import Connection, connect
from parti.wire.errors import MessageNotFound, StreamNotFound
from parti.wire.kv import KeyValue
from parti.wire.kv_model import Change, KeyNotFound
from parti.wire.options import ConnectOptions
from parti.wire.stored import StoredMessage

log = get_logger("spark.pipeline")


class DriverLeaseLost(FatalError):
    """Another driver runs the pipeline now, or may do so at any moment: do nothing more, and wait for the lease."""


@dataclass(frozen=True, slots=True)
class Standby:
    """How drivers of the same pipeline share it."""

    bucket: str = "parti-pipelines"
    ttl: float = defaults.LEASE_TTL  # seconds; the standby takes over this long after the last sign of life
    renew_every: float = defaults.LEASE_RENEWAL
    margin: float = defaults.LEASE_MARGIN
    replicas: int = 1  # of the bucket, when this makes it; 3 on a cluster

    @property
    def terms(self) -> LeaseTerms:
        return LeaseTerms(self.ttl, self.renew_every, self.margin)


def lease_key(pipeline: str) -> str:
    """The key of a pipeline's lease in the bucket."""
    return f"{pipeline}.leader"


class DriverLease:
    """Holds, or waits for, the lease of one pipeline. `start`, `acquire`, work, `close`."""

    def __init__(
        self,
        options: ConnectOptions,
        pipeline: str,
        standby: Standby,
        *,
        owner: str,
        on_lost: Callable[[], None],
    ) -> None:
        self.owner = owner
        self._connect = options
        self._key = lease_key(pipeline)
        self._standby = standby
        self._on_lost = on_lost
        self._clock = SystemClock()
        self._state = election.candidate(Member(WorkerId(owner), secrets.token_hex(4)), terms=standby.terms)
        self._elected = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ended = threading.Event()
        """The lease is to be given back, also by a thread that has hardly begun: it would be held for ever."""
        self._events: asyncio.Queue[election.Event] = asyncio.Queue()

    def __repr__(self) -> str:
        return f"<DriverLease {self._key} {self.owner} epoch={self._state.term} {'held' if self.held else 'waiting'}>"

    def __enter__(self) -> DriverLease:
        self._thread = threading.Thread(target=self._run, name="parti-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lease back, so that a standby need not wait for it to run out."""
        self._ended.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stop.set)
        if self._thread is not None:
            self._thread.join(self._standby.ttl)

    @property
    def held(self) -> bool:
        """Whether this driver may act now, by its own clock: also right after a freeze."""
        return self._state.may_lead(self._clock.now())

    @property
    def epoch(self) -> int:
        return self._state.term

    def acquire(self, timeout: float | None = None) -> int | None:
        """Wait for the lease; the epoch, or None when it did not come in time."""
        if not self._elected.wait(timeout):
            return None
        if self._failure is not None:
            raise self._failure
        return self._state.term

    def check(self) -> None:
        """LeaseLost unless the lease is held now."""
        if self._failure is not None:
            raise self._failure
        if not self.held:
            raise DriverLeaseLost(f"{self.owner} no longer holds the lease of the pipeline: another driver may run it")

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as error:  # handed to whoever waits in `acquire` or asks in `check`
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._failure = error if isinstance(error, PartiError) else UsageError(f"the lease ended: {error!r}")
            self._on_lost()
        finally:
            self._elected.set()

    async def _keep(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._ended.is_set():
            return
        connection = await self._connected()
        try:
            kv = await KeyValue.ensure(
                JetStreamApi(connection),
                self._standby.bucket,
                replicas=self._standby.replicas,
                marker_ttl=0,
                description="who runs which pipeline",
            )
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(kv))
                await self._elect(kv)
                watching.cancel()
        finally:
            with contextlib.suppress(PartiError, asyncio.TimeoutError):
                await connection.close()

    async def _connected(self) -> Connection:
        """A connection; NATS may come up later than a standby."""
        for wait in PATIENT.delays():
            try:
                return await connect(self._connect, name="parti-pipeline-lease")
            except TransientError as error:
                log.warning("pipeline.lease_waits", error=str(error))
            assert self._stop is not None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait)
                raise UsageError("stopped before the lease was held")
        raise AssertionError("an endless backoff ended")

    async def _watch(self, kv: KeyValue) -> None:
        """Every change of the record as an event; the election reads it by itself as well."""
        async for change in kv.watch(self._key):
            if isinstance(change, Change):
                await self._events.put(self._seen(change.value, change.revision))

    def _seen(self, value: bytes | None, revision: int) -> election.LeaderSeen:
        record = decode_leader(value) if value else None
        if isinstance(record, Unreadable):
            raise UsageError(f"the record {self._key!r} of bucket {self._standby.bucket} is not ours: {record.detail}")
        return election.LeaderSeen(self._clock.now(), record, revision)

    async def _elect(self, kv: KeyValue) -> None:
        assert self._stop is not None
        while not self._stop.is_set():
            await self._step(kv, election.Tick(self._clock.now()))
            wait = max(self._state.next_tick - self._clock.now(), 0.01)
            coming = asyncio.ensure_future(self._events.get())
            try:
                await first_of(coming, self._stop.wait(), timeout=min(wait, self._standby.renew_every))
            finally:
                came = not coming.cancel()
            if came:
                await self._step(kv, coming.result())
        await self._step(kv, election.Resign(self._clock.now()))

    async def _step(self, kv: KeyValue, event: election.Event) -> None:
        todo = [event]
        while todo:
            self._state, effects = election.step(self._state, todo.pop(0))
            for effect in effects:
                answer = await self._perform(kv, effect)
                if answer is not None:
                    todo.append(answer)

    async def _perform(self, kv: KeyValue, effect: election.Effect) -> election.Event | None:
        match effect:
            case ReadLeader():
                return await self._read(kv)
            case WriteLeader(record, expected):
                try:
                    if expected:
                        revision = await kv.update(self._key, encode_leader(record), expected)
                    else:
                        revision = await kv.create(self._key, encode_leader(record))
                except PartiError as error:
                    _log_or_raise("write", error)
                    return election.NotWritten(self._clock.now())
                return election.Written(self._clock.now(), record, revision)
            case Elected(term):
                log.info("pipeline.lease_won", owner=self.owner, epoch=term)
                self._elected.set()
            case Deposed(term, reason):
                tell = log.info if reason == "resigned" else log.warning
                tell("pipeline.lease_lost", owner=self.owner, epoch=term, reason=reason)
                self._elected.clear()
                self._on_lost()
        return None

    async def _read(self, kv: KeyValue) -> election.Event | None:
        try:
            entry = await kv.get(self._key)
        except KeyNotFound as missing:
            return election.LeaderSeen(self._clock.now(), None, missing.revision)
        except PartiError as error:
            _log_or_raise("read", error)
            return None
        return self._seen(entry.value, entry.revision)


def _log_or_raise(op: str, error: PartiError) -> None:
    """What may pass by itself is tried again. What a person has to mend, such as a permission, ends the lease."""
    if error.category is Category.POLICY:
        raise error
    log.info("pipeline.lease_again", op=op, error=str(error))


def state_of(lease: DriverLease) -> Election:
    """The election as the lease sees it, for tests and status pages."""
    return lease._state


def check_nobody_holds(options: ConnectOptions, bucket: str, pipeline: str, ttl: float) -> None:
    """UsageError while a driver holds the pipeline's lease; one that died without giving it back is waited for.

    For a driver that wants to run without a lease: nothing would fence it from the other one.
    """
    request = {"last_by_subj": f"$KV.{bucket}.{lease_key(pipeline)}"}
    deadline, revision = SystemClock().now() + 2 * ttl, None
    with BlockingConnection.open(options, name="parti-pipeline-lease") as connection:
        while True:
            try:
                found = StoredMessage.from_json(connection.api(f"STREAM.MSG.GET.KV_{bucket}", request)["message"])
            except (MessageNotFound, StreamNotFound):
                return
            record = decode_leader(found.data) if found.data else None
            if not isinstance(record, LeaderRecord) or record.leader is None:
                return
            if revision is not None and found.seq != revision:
                raise UsageError(
                    f"driver {record.leader.worker} runs pipeline {pipeline} behind the lease in bucket {bucket}: "
                    "stop it first, or keep the setting standby"
                )
            revision = found.seq
            if SystemClock().now() > deadline:
                return  # not renewed for twice its time: whoever had it is gone
            threading.Event().wait(0.2)

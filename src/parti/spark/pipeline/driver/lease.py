"""The pipeline's lease: one driver runs, others wait, and a driver that lost its lease knows it by its own clock.

The election (`parti.wire.kv_election`) runs in a thread with its own event loop, because Spark's driver is blocking
code. Its term is the epoch of the pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from parti import defaults
from parti.backoff import PATIENT
from parti.clock import SystemClock
from parti.control.lease import LeaseTerms
from parti.control.records import Unreadable
from parti.errors import Category, FatalError, PartiError, TransientError, UsageError
from parti.model import Member, WorkerId
from parti.observe.logs import get_logger
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection, connect
from parti.wire.errors import StreamNotFound
from parti.wire.kv import KeyValue
from parti.wire.kv_election import RESIGNED, KvElection, LeaderKey, renewing_leader
from parti.wire.options import ConnectOptions

log = get_logger("spark.pipeline")


class DriverLeaseLost(FatalError):
    """Another driver runs the pipeline now, or may do so at any moment: do nothing more, and wait for the lease."""


@dataclass(frozen=True, slots=True)
class Standby:
    """How drivers of the same pipeline share it."""

    bucket: str = "parti-pipelines"
    ttl: float = defaults.LEASE_TTL  # seconds; the standby takes over this long after the last renewal
    renew_every: float = defaults.LEASE_RENEWAL
    margin: float = defaults.LEASE_MARGIN
    replicas: int = 1  # of the bucket, if this creates it; 3 on a cluster

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
        self._pipeline = pipeline
        self._standby = standby
        self._on_lost = on_lost
        self._election: KvElection | None = None
        self._elected = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ended = threading.Event()
        """Set to release the lease, also in a thread that has just started: otherwise it would be held forever."""

    def __repr__(self) -> str:
        return f"<DriverLease {self._pipeline} {self.owner} epoch={self.epoch} {'held' if self.held else 'waiting'}>"

    def __enter__(self) -> DriverLease:
        self._thread = threading.Thread(target=self._run, name="parti-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease, so that a standby need not wait for it to expire."""
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
        return self._election is not None and self._election.leading

    @property
    def epoch(self) -> int:
        return self._election.term if self._election is not None else 0

    def acquire(self, timeout: float | None = None) -> int | None:
        """Wait for the lease; returns the epoch, or None after the timeout."""
        if not self._elected.wait(timeout):
            return None
        if self._failure is not None:
            raise self._failure
        return self.epoch

    def check(self) -> None:
        """Raise `DriverLeaseLost` unless the lease is held now."""
        if self._failure is not None:
            raise self._failure
        if not self.held:
            raise DriverLeaseLost(f"{self.owner} no longer holds the lease of the pipeline: another driver may run it")

    def _run(self) -> None:
        try:
            asyncio.run(self._keep())
        except BaseException as error:  # raised again in `acquire` or `check`
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
            self._election = KvElection(
                LeaderKey(kv, lease_key(self._pipeline), unreadable=self._refuse),
                Member(WorkerId(self.owner), secrets.token_hex(4)),
                self._standby.terms,
                SystemClock(),
                elected=self._won,
                deposed=self._lost,
                failed=_log_or_raise,
            )
            await self._election.run(self._stop)
        finally:
            with contextlib.suppress(PartiError, asyncio.TimeoutError):
                await connection.close()

    async def _connected(self) -> Connection:
        """A connection; NATS may start later than a standby."""
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

    def _refuse(self, unreadable: Unreadable) -> NoReturn:
        key = f"{lease_key(self._pipeline)!r} of bucket {self._standby.bucket}"
        raise UsageError(f"the record {key} is not ours: {unreadable.detail}")

    def _won(self, term: int) -> None:
        log.info("pipeline.lease_won", owner=self.owner, epoch=term)
        self._elected.set()

    def _lost(self, term: int, reason: str) -> None:
        write_log = log.info if reason == RESIGNED else log.warning
        write_log("pipeline.lease_lost", owner=self.owner, epoch=term, reason=reason)
        self._elected.clear()
        self._on_lost()


def _log_or_raise(error: PartiError) -> None:
    """Transient errors are retried. Errors that a person must fix, such as a permission, end the lease."""
    if error.category is Category.POLICY:
        raise error
    log.info("pipeline.lease_again", error=str(error))


def check_nobody_holds(options: ConnectOptions, bucket: str, pipeline: str, ttl: float) -> None:
    """Raise UsageError while a driver holds the pipeline's lease; waits for the lease of a dead driver to expire.

    For a driver that wants to run without a lease: nothing would fence it from the other one.
    """
    asyncio.run(_check_nobody_holds(options, bucket, pipeline, ttl))


async def _check_nobody_holds(options: ConnectOptions, bucket: str, pipeline: str, ttl: float) -> None:
    async with await connect(options, name="parti-pipeline-lease") as connection:
        try:
            kv = await KeyValue.open(JetStreamApi(connection), bucket)
        except StreamNotFound:
            return
        # Not renewed for twice its time: its holder is dead.
        found = await renewing_leader(LeaderKey(kv, lease_key(pipeline)), SystemClock(), 2 * ttl)
    if found is not None and found.leader is not None:
        raise UsageError(
            f"driver {found.leader.worker} runs pipeline {pipeline} behind the lease in bucket {bucket}: stop it "
            "first, or keep the setting standby"
        )

"""The manager: joins a worker to its namespace, renews its lease, and moves its partitions safely."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from typing import Any, Literal, Self

from parti.backoff import FOREVER, retry
from parti.clock import Clock, SystemClock
from parti.config.control import ControlConfig
from parti.control.assign import Strategy, strategy_named
from parti.control.reconcile import at_rest
from parti.errors import ConfigError, PartiError, UsageError
from parti.manager.agent import Agent
from parti.manager.bus import Bus
from parti.manager.degraded import Degraded
from parti.manager.fence import ManagedFence
from parti.manager.hooks import HookRunner, Hooks, ManagerState
from parti.manager.host import Host, Plane
from parti.manager.kv_store import Store
from parti.manager.layouts.choose import capacity_of, check_layout, overlap_check, plane_for
from parti.manager.lease_keeper import Ending
from parti.manager.observer import Observer
from parti.manager.predecessors import Predecessors
from parti.manager.setup import Setup
from parti.manager.sources import PartitionSource, StaticSource
from parti.manager.stream_identity import StreamIdentity, StreamReplaced
from parti.manager.sweep import sweep
from parti.model import Member, Partition, PartitionId, Retention, WorkerId
from parti.observe.health import HealthCheck
from parti.observe.logs import get_logger
from parti.observe.metrics import NO_METRICS, Metrics
from parti.waiting import first_of
from parti.wire.api import JetStreamApi
from parti.wire.connect import Connection
from parti.wire.filters import SubjectFilter
from parti.worker import WorkerConsumer, WorkerFailed

_LEASE_CALLS = 6  # a call may take 1/6 of the TTL, so that a lost one leaves time for a retry


class Manager:
    """One worker of a namespace. After `start()` it is a live member; `stop()` hands its partitions over and leaves.

    Promises: each partition has one owner and one epoch at a time; a planned move loses, repeats and reorders nothing;
    a worker that lost its lease starts nothing more, even if it was frozen meanwhile; a crash repeats at most what was
    in flight and what was done since the last position record. `consumer` is a WorkerConsumer, or any object with
    `update_worker_consumer(worker_id, partitions)`; positions and handoffs without loss need a WorkerConsumer.
    """

    def __init__(
        self,
        config: ControlConfig,
        nc: Connection,
        source: PartitionSource | Iterable[Partition | str],
        strategy: Strategy | str | None = None,
        *,
        consumer: Any,
        hooks: Hooks | None = None,
        metrics: Metrics = NO_METRICS,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self._nc = nc
        self._clock = clock or SystemClock()
        self._source: PartitionSource = StaticSource(source) if isinstance(source, Iterable) else source
        chosen = strategy if strategy is not None else config.strategy
        self._strategy: Strategy = strategy_named(chosen) if isinstance(chosen, str) else chosen
        self._consumer = consumer
        self._metrics = metrics
        self._hooks = HookRunner(hooks or Hooks())
        self._observer = Observer(self._hooks, metrics)
        self._fence = ManagedFence()
        self._js = JetStreamApi(nc, timeout=max(0.25, config.heartbeat_ttl / _LEASE_CALLS))
        self._store: Store | None = None
        self._stream: StreamIdentity | None = None
        self._replaced = ""
        self._retention = Retention.LIMITS
        self._agent: Agent | None = None
        self._main: asyncio.Task[None] | None = None
        self._degraded = Degraded(config, nc, self._hooks, self._observer, metrics, self._clock)
        self._stopping = False
        self._failure: WorkerFailed | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._former = Predecessors()
        self._bus = Bus(nc, config.namespace, lambda: self._agent)
        self._instance = config.instance or f"process-{secrets.token_hex(6)}"
        if isinstance(consumer, WorkerConsumer):
            if consumer.config.pull_timeout >= config.heartbeat_ttl:
                raise ConfigError(
                    f"worker.pull_timeout ({consumer.config.pull_timeout:g}s) must be below control.heartbeat_ttl "
                    f"({config.heartbeat_ttl:g}s): a frozen worker's pull would swallow the next owner's messages"
                )
            if consumer.config.inactive_threshold < 2 * config.heartbeat_ttl:
                raise ConfigError(
                    f"worker.inactive_threshold ({consumer.config.inactive_threshold:g}s) must be at least twice "
                    f"control.heartbeat_ttl ({config.heartbeat_ttl:g}s): the server would remove a durable before "
                    "anybody knows that its worker is gone"
                )
            check_layout(config.layout, consumer, self._source)
            if isinstance(self._source, StaticSource):
                self._source.check_with(overlap_check(consumer, self._source))
            consumer.use_fence(self._fence)
            consumer.use_namespace(config.namespace)
        elif not callable(getattr(consumer, "update_worker_consumer", None)):
            raise UsageError(f"a consumer needs update_worker_consumer; {type(consumer).__name__} has none")

    def __repr__(self) -> str:
        owns, leader = len(self.owned()), "yes" if self.is_leader else "no"
        return f"<Manager {self.worker_id or '-'} {self.state.value} owns={owns} leader={leader}>"

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> WorkerId | None:
        """The stable worker id; None while it has none."""
        member = self._agent.member if self._agent is not None else None
        return member.worker if member is not None else None

    @property
    def is_leader(self) -> bool:
        return self._agent is not None and self._agent.leading

    @property
    def assignment(self) -> tuple[PartitionId, ...]:
        """The partitions that the stored assignment gives to this worker."""
        return self.assigned() or ()

    @property
    def term(self) -> int:
        """The term of the current assignment."""
        return self._agent.assignment.term if self._agent is not None else 0

    def owned(self) -> frozenset[PartitionId]:
        """The partitions that this worker may process now."""
        if self._main is not None and self._main.done():
            return frozenset()
        plane = self._agent.plane if self._agent is not None else None
        return plane.owned() if plane is not None else frozenset()

    def assigned(self) -> tuple[PartitionId, ...] | None:
        """Like `assignment`, but None before the first assignment was seen."""
        agent = self._agent
        if agent is None or agent.member is None or not agent.live.is_set() or not agent.assignment.term:
            return None
        return agent.assignment.of(agent.member.worker)

    def leading(self) -> bool:
        return self.is_leader

    def unassigned(self) -> tuple[PartitionId, ...]:
        """On the leader: the partitions that no worker has capacity for. On followers: none."""
        leads = self._agent is not None and self._agent.leading and not self._stopping
        leadership = self._agent.leadership if self._agent is not None and leads else None
        return leadership.leader.unassigned if leadership is not None and leadership.leader is not None else ()

    def claims_known(self) -> int:
        return len(self._agent.claims) if self._agent is not None else 0

    @property
    def state(self) -> ManagerState:
        """The state of this worker."""
        agent = self._agent
        if self._stopping:
            return ManagerState.SHUTDOWN
        if agent is None:
            return ManagerState.INIT
        if self._degraded.active:
            return ManagerState.DEGRADED
        if not agent.live.is_set():
            return ManagerState.CLAIMING_ID
        assigned = self.assigned()
        if assigned is None:
            return ManagerState.WAITING_ASSIGNMENT
        return ManagerState.STABLE if set(assigned) == self.owned() else ManagerState.REBALANCING

    def converged(self) -> bool:
        """As far as this member knows: every partition is at its assigned worker and caught up, and none is moving."""
        agent = self._agent
        if agent is None or not agent.assignment.owners or agent.members is None:
            return False
        leader = agent.leadership.leader if agent.leading and agent.leadership is not None else None
        if leader is not None and not leader.converged:
            return False
        return at_rest(agent.assignment, agent.claims, agent.members)

    async def wait_for(self, what: ManagerState | Literal["converged"], timeout: float | None = None) -> None:
        """Return when this worker is in the state, or the whole namespace has converged; else raise TimeoutError."""

        def reached() -> bool:
            return self.converged() if what == "converged" else self.state is what

        async with asyncio.timeout(timeout):
            await self._observer.wait_until(reached)

    def health_check(self) -> HealthCheck:
        """For `/readyz`: fails while this worker is not a live member, or degraded. Having no partition is healthy.

        On the leader it also fails while its partition source fails or is refused, or partitions cannot be placed.
        """

        def problem() -> str | None:
            if (ended := self._ended_by()) is not None:
                return ended
            state = self.state
            waiting = (ManagerState.INIT, ManagerState.CLAIMING_ID, ManagerState.SHUTDOWN, ManagerState.DEGRADED)
            if state in waiting:
                return f"the manager is {state.value}"
            if self._replaced and not self.converged():
                return f"starting over: {self._replaced}"
            self._replaced = ""
            leadership = self._agent.leadership if self._agent is not None and self._agent.leading else None
            if leadership is None:
                return None
            if leadership.feed.problem is not None:
                return leadership.feed.problem
            lacking = self.unassigned()
            return f"{len(lacking)} partitions cannot be placed, such as {lacking[0]}" if lacking else None

        return HealthCheck("manager", problem)

    def liveness_check(self) -> HealthCheck:
        """For `/healthz`: fails when the manager has ended, by a bug or because its worker gave up."""
        return HealthCheck("manager-alive", self._ended_by, live=True)

    def _ended_by(self) -> str | None:
        if self._failure is not None:
            return str(self._failure)
        if self._main is None or not self._main.done() or self._main.cancelled():
            return None
        bug = self._main.exception()
        return f"the manager ended: {bug!r}" if bug is not None else None

    # -- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, timeout: float | None = 30.0) -> None:
        """When this returns, the worker is a live member. It may not have partitions yet: see `wait_for`.

        A server that does not reply for a while delays it and is logged; the call fails only after `timeout`.
        """
        if self._main is not None:
            raise UsageError("this manager was started before: make a new one")
        # On first use pyarrow imports pandas if present, which takes a second or two: do it before we own anything.
        await asyncio.to_thread(SubjectFilter, ("warm.up",))
        last = "no answer"

        def delayed(tries: int, wait: float, error: PartiError) -> None:  # noqa: ARG001
            nonlocal last
            last = str(error)
            get_logger("control").warning("manager.start_delayed", op="start", result="retry", tries=tries, error=last)

        try:
            async with asyncio.timeout(timeout):
                await retry(self._open_store, backoff=FOREVER, clock=self._clock, on_retry=delayed)
        except TimeoutError:
            raise TimeoutError(f"NATS did not let this worker start within {timeout:g} s: {last}") from None
        self._observer.watch(self)
        self._main = asyncio.get_running_loop().create_task(self._run(), name="parti-manager")
        await self._bus.listen()
        try:
            async with asyncio.timeout(timeout):
                await first_of(self._observer.wait_until(self._is_live), self._main)
        except TimeoutError:
            await self.stop()
            raise TimeoutError(
                f"no worker id became free within {timeout:g} s: raise control.worker_id_max, or stop a worker"
            ) from None
        if self._main.done():
            await self._main

    async def _open_store(self) -> None:
        config = self.config
        self._store = self._store or await Store.open(
            self._js,
            config.namespace,
            replicas=config.bucket_replicas,
            storage=config.bucket_storage,
            metrics=self._metrics,
        )
        await self._settle_stream()

    def ended(self) -> asyncio.Task[None]:
        """Wait for the manager's own task. It ends after `stop()`; it raises on an unexpected bug, or WorkerFailed when
        the worker can no longer work."""
        if self._main is None:
            raise UsageError("this manager was not started")
        return self._main

    def _is_live(self) -> bool:
        return self._agent is not None and self._agent.live.is_set()

    async def _settle_stream(self) -> None:
        """When this returns, the stream's identity is known, and the store counts only positions written for it."""
        settings = self._consumer.config if isinstance(self._consumer, WorkerConsumer) else None
        if settings is None:
            return
        assert self._store is not None
        if self._stream is None:
            self._stream = StreamIdentity(
                self._js,
                self._store,
                self._clock,
                settings.stream,
                template=settings.subject_template,
                layout=self.config.layout,
                ttl=self.config.heartbeat_ttl,
            )
        replaced = await self._stream.settle(start_over=self.config.on_stream_replaced == "start-over")
        if replaced is not None:
            self._replaced = str(replaced)
            self._observer.stream_replaced(replaced)
        info = await self._js.stream_info(settings.stream)
        self._retention = Retention(info["config"]["retention"])

    async def _begin_with_other_stream(self) -> None:
        self._former = self._former.without_positions()
        try:
            await self._settle_stream()
        except StreamReplaced:
            raise
        except PartiError as error:
            self._observer.failed(error)  # the next member detects it again, and retries

    async def _run(self) -> None:
        """Run one member after the other: after a fenced member a new one starts, until `stop`."""
        async with asyncio.TaskGroup() as group:
            helpers = [
                group.create_task(self._hooks.run()),
                group.create_task(self._degraded.run(self._hold_judgement)),
                group.create_task(self._supervise()),
                group.create_task(
                    sweep(self._js, self.config, self._consumer, self._retention, lambda: self._agent, self._clock)
                ),
            ]
            try:
                while not self._stopping:
                    agent = self._new_agent()
                    self._agent = self._fence.agent = agent
                    self._observer.touched()
                    ending = await agent.run()
                    if ending is Ending.STOPPED:
                        break
                    self._former = agent.former
                    if agent.stream_is_gone:
                        await self._begin_with_other_stream()
            except Exception as bug:
                await self._broke(bug)
                raise
            finally:
                for helper in helpers:
                    helper.cancel()
        await self._hooks.drain()
        if self._failure is not None:
            raise self._failure

    async def _broke(self, bug: Exception) -> None:
        """A bug ended the member: all its work must end too, because its lease is no longer renewed."""
        get_logger("control").error("manager.broke", error=repr(bug))
        if self._agent is not None and self._agent.plane is not None:
            await self._agent.plane.abandon()

    async def _supervise(self) -> None:
        """A worker that can no longer work hands its partitions to others and leaves; `ended()` then raises."""
        if not isinstance(self._consumer, WorkerConsumer):
            return
        reason = await self._consumer.gave_up()
        get_logger("control").error("manager.gave_up", worker=self.worker_id, owned=len(self.owned()), reason=reason)
        self._failure = WorkerFailed(reason)
        self._observer.failed(self._failure)
        if self._stopping:
            return
        self._stopping = True
        self._observer.touched()
        # Not in this task: ending the member's run cancels it.
        self._leaving = asyncio.get_running_loop().create_task(self._leave(returning=False), name="parti-gave-up")

    async def _leave(self, *, returning: bool) -> None:
        agent = self._agent
        if agent is None:
            return
        broken = isinstance(self._consumer, WorkerConsumer) and bool(self._consumer.health().broken)
        try:
            async with asyncio.timeout(self.config.shutdown_timeout):
                if not returning and not broken:
                    await agent.leave()
        except TimeoutError:
            get_logger("control").warning("manager.leave_timeout", owned=len(self.owned()))
        await agent.stop(returning=returning)

    def _new_agent(self) -> Agent:
        assert self._store is not None
        setup = Setup(
            self._store,
            self.config,
            self._clock,
            self._metrics,
            self._observer,
            source=self._source,
            check=overlap_check(self._consumer, self._source),
            strategy=self._strategy,
            plane=self._plane,
            start_cursor=self._start_cursor,
            nudge=self._bus.nudge,
            instance=self._instance,
            capacity=capacity_of(self.config.layout, self._consumer),
            max_deliver=getattr(getattr(self._consumer, "config", None), "max_deliver", 3),
            stream_gone=self._stream.gone if self._stream is not None else None,
        )
        blocked = self._consumer.blocked_by() if isinstance(self._consumer, WorkerConsumer) else None
        return Agent(setup, self._former, blocked)

    def _plane(self, host: Host, member: Member) -> Plane:
        return plane_for(self.config.layout, host, member, self._consumer, self._retention, self._source)

    async def _start_cursor(self) -> int:
        """The start position of a partition that never had an owner."""
        settings = getattr(self._consumer, "config", None)
        if getattr(settings, "start", "all") != "new":
            return 0
        info = await self._js.stream_info(settings.stream)  # type: ignore[union-attr]
        return int(info["state"]["last_seq"])

    def _hold_judgement(self, until: float) -> None:
        if self._agent is not None:
            self._agent.roster.hold_judgement_until = until

    async def stop(self, *, returning: bool = False) -> None:
        """Hand every partition over, then leave; after this returns, no handler runs or will start.

        `returning`: this worker will be back within one TTL (a restart), so its id keeps its partitions meanwhile.
        """
        if self._main is None:
            return
        self._stopping = True
        self._observer.touched()
        try:
            if self._leaving is not None:
                await self._leaving
            elif not self._main.done():
                await self._leave(returning=returning)
            await self._main
        finally:
            await self._bus.close()

    # -- talking ------------------------------------------------------------------------------------------------------

    async def refresh_partitions(self) -> None:
        """Ask the leader, in any process, to read the source again and rebalance at once."""
        if self.is_leader and self._agent is not None and self._agent.leadership is not None:
            await self._agent.leadership.refresh()
        else:
            await self._bus.ask_to_refresh()

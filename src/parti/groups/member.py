"""One instance of a member: joins, pulls, recovers, follows the record, and leaves nothing behind.

A supervising task makes every decision and all API calls; connection callbacks only put signals into its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from typing import Any, Generic

from parti.errors import Category, FatalError, PartiError
from parti.groups.core import STOP_WITHIN
from parti.groups.distribution import partition_filters, partitions_of
from parti.groups.errors import GroupChanged, GroupError, InvalidGroup
from parti.groups.events import EventKind, MemberState
from parti.groups.leaving import MemberLeaving
from parti.groups.signals import look_again
from parti.groups.store import R
from parti.waiting import first_of
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ApiError, ConsumerCreateFailed, ConsumerNotFound
from parti.wire.kv_model import Change, Operation

_TELL_AGAIN = 10.0  # seconds after which a member that still cannot join reports it again
SERVER_FAILED = 500  # such as for a consumer that is created while its predecessor's files are being removed


class GroupConsumer(MemberLeaving[R], Generic[R]):
    """A joined instance with its `state` and its `events`; `wait()` returns when it has ended, or raises its error."""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.stream}/{self.group}/{self.member} {self.state.value} "
            f"partitions={list(self._owned)} in_hand={len(self._in_flight.in_hand)}>"
        )

    # -- what the kinds differ in ---------------------------------------------------------------------------------

    @abstractmethod
    async def _join(self, filters: tuple[str, ...]) -> dict[str, Any] | None:
        """Create or find the consumer and return its info; None to retry later."""

    @abstractmethod
    async def _changed(self, before: R) -> None:
        """The record was replaced by another valid one."""

    async def _let_partitions_go(self) -> bool:
        """The member owns no partition: it must not block partitions of others. False: check again later."""
        return True

    async def _group_deleted(self) -> None:
        """The record is gone; the member ends after this."""

    # -- the public side -------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._in_flight.in_hand)

    async def drain(self, timeout: float = STOP_WITHIN) -> bool:
        """Take no more messages, finish those in flight, release the pin; the instance stays joined until `stop()`.

        False when a handler still ran after `timeout` seconds.
        """
        drained = asyncio.Event()
        finished = True

        async def draining() -> None:
            nonlocal finished
            finished = await self._drain(timeout)
            self._be(MemberState.DRAINING)
            drained.set()

        self._signal(draining)
        await first_of(drained.wait(), self._ended.wait())  # an instance that has ended sets no event any more
        return finished

    async def stop(self, timeout: float = STOP_WITHIN) -> None:
        """Leave: finish the messages in flight (for at most `timeout` seconds), acknowledge them, release the pin.

        After this returns nothing of this instance runs, and a successor starts at once. Calling it again is allowed.
        """
        self._stop_within = timeout
        self._ending = True
        self._stopping.set()
        self._signal(look_again)
        await self._ended.wait()

    async def wait(self) -> None:
        """Return when the member has ended: stopped, or its group deleted. Raises the error if it failed."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def __aenter__(self) -> GroupConsumer[R]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # -- the supervising task --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start, and return after the first attempt to join; raises if joining is impossible."""
        if self.record.old_names:
            self._tell(EventKind.OLD_NAMES, detail=f"the record uses the old names {', '.join(self.record.old_names)}")
        self._task = asyncio.create_task(self._run(), name=f"parti-group-{self.member}")
        await self._tried.wait()
        if self._failure is not None:
            await self.wait()

    async def _run(self) -> None:
        following, beating = (
            asyncio.create_task(self._follow_record()),
            asyncio.create_task(self._freeze_detector.run()),
        )
        try:
            await self._supervise()
        except PartiError as error:
            self._fail(error)
        except Exception as error:
            self._fail(FatalError(f"a bug ended the member: {type(error).__name__}: {error}"))
            raise
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await (
                self._finish()
            )  # while in-progress acks are sent: a message finished after `ack_wait` must still belong to this instance
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            self._ended.set()
            self._tried.set()

    async def _supervise(self) -> None:
        await self._converge()
        self._tried.set()
        while not self._ending:
            signal = await self._next_signal()
            try:
                outcome = signal() if signal is not None else None
                if outcome is not None:
                    await outcome
            except PartiError as error:
                if not self._may_pass(error):
                    raise
                self._retry(error)
            if not self._ending:
                await self._converge()

    async def _converge(self) -> None:
        """Bring the actual state to the wanted state; waits out transient errors, any other error ends the member."""
        if self.state is MemberState.DRAINING:
            return
        try:
            if not self._puller.pulling:
                await self._begin(partition_filters(self.record, self.member))
            elif self._in_flight.holding and self._puller.pin is not None:
                await self._settle_pin()
        except PartiError as error:
            if not self._may_pass(error):
                raise
            self._retry(error)

    def _may_pass(self, error: PartiError) -> bool:
        """Whether a retry can help. A member that was joined once gives up only when its group has changed."""
        if isinstance(error, GroupError):
            return False
        server_failed = isinstance(error, ApiError) and error.code >= SERVER_FAILED
        return error.retriable or error.category is Category.TRANSIENT or server_failed or bool(self._own.filters)

    async def _begin(self, wanted: tuple[str, ...]) -> None:
        """Get the right consumer, and pull from it."""
        if not wanted:
            if self.state is not MemberState.WAITING:
                self._be(MemberState.WAITING)
                self._tell(EventKind.WAITING, detail="the record gives this member no partition")
                self._waits = self._backoff()
            if self._wake_at is None and not await self._let_partitions_go():
                self._later(next(self._waits))
            return
        if self._wake_at is not None:
            return
        if self.state is not MemberState.STARTING:
            self._be(MemberState.JOINING)
        info = await self._join(wanted)
        if info is None:
            return
        self._limits.follow(info["config"])
        if info["created"] != self._own.created:
            self._in_flight.drop()  # redelivered to the current owner of the partition; running handlers continue
        self._own.created, self._given_back, self._unread = info["created"], 0, 0
        await self._puller.start(self._own.stream, self._own.name, self._limits)
        self._own.filters, self._waits = wanted, self._backoff()
        self._gain(partitions_of(self.record, self.member))
        self._be(MemberState.STANDBY)
        self._tell(EventKind.JOINED, partitions=self._owned)
        self._signal(look_again)  # the pin may have survived an outage, and with it the messages in flight
        await self._clear_stray(info)

    async def _make(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """The consumer with this configuration, created if missing; None when it is already deleted again.

        Reads the consumer's info, because a restarted server answers the create of an existing consumer with another
        `created` (measured on 2.15.1), which would make it look like another consumer.
        """
        try:
            await self._api.consumer_create(self._own.stream, config, action="create")
        except ConsumerCreateFailed:
            # Created during a deletion, the consumer may have lost its folder on the server: it works, but each further
            # create fails (10012) until it is deleted again.
            found = await self._own.found()
            if found is None or filters_of(found["config"]) != filters_of(config):
                raise
            return found
        try:
            return await self._api.consumer_info(self._own.stream, self._own.name)
        except ConsumerNotFound:
            self._later(0)
            return None

    def _retry(self, why: PartiError) -> None:
        self._later(next(self._waits))
        if self._puller.pulling:
            return
        self._be(MemberState.JOINING)
        last = self.events.recent[-1] if self.events.recent else None
        detail = f"cannot join: {why}"
        # A waiting member reports its reason, but the same reason does not flood the log.
        if (
            last is None
            or (last.kind, last.detail) != (EventKind.CONSUMER_LOST, detail)
            or self._clock.wall() > last.at + _TELL_AGAIN
        ):
            self._tell(EventKind.CONSUMER_LOST, detail=detail)

    # -- signals ---------------------------------------------------------------------------------------------------

    async def _follow_record(self) -> None:
        try:
            async with contextlib.aclosing(self._store.watch(self.stream, self.group)) as changes:
                async for change in changes:
                    if isinstance(change, Change) and change.revision != self._revision:
                        self._signal(lambda changed=change: self._recorded(changed))  # type: ignore[misc]
        except PartiError as error:
            self._signal(lambda failed=error: self._fail(failed))  # type: ignore[misc]

    async def _recorded(self, change: Change) -> None:
        self._revision = change.revision
        if change.operation is not Operation.PUT or change.value is None:
            self._tell(EventKind.GROUP_DELETED)
            await self._drain(self._drain_within)
            await self._group_deleted()
            self._ending = True
            return
        try:
            record = self._store.decode(change.value)
        except (GroupError, InvalidGroup) as error:
            self._tell(EventKind.RECORD_INVALID, detail=str(error))
            return
        before, self.record = self.record, record
        await self._changed(before)

    def _refuse_change(self, what: str) -> None:
        self._fail(
            GroupChanged(f"{what} of group {self.group!r} on {self.stream!r} changed while it was in use: join again")
        )

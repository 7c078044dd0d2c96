"""Leaving: finish what runs, return what did not start, and delete a consumer only when no other instance needs it.

A consumer is identified by its name, which instances in other languages share. So a consumer is not deleted if its
`created` differs from the one pulled from, if another instance holds its pin or one of its messages, or if another
instance pulls from it: the reference never recreates a consumer that was deleted under it (docs/evidence/groups.md#g9).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Generic

from parti.backoff import FAST
from parti.errors import PartiError
from parti.groups.common import holder, pinned_id
from parti.groups.events import EventKind, MemberState
from parti.groups.message import GroupMessage
from parti.groups.names import PRIORITY_GROUP
from parti.groups.pinned import Pinned
from parti.groups.store import R
from parti.observe import group_metrics as m
from parti.observe.logs import get_logger
from parti.waiting import first_of

log = get_logger("groups")
_PATIENCE = 2.0  # seconds for each call to the server while leaving
_CANCEL_WITHIN = 1.0  # for cancelled handlers to end; one that does not is left behind
SECOND_LOOK = 0.1  # between two pulls of the reference there is a gap of a few milliseconds
_OTHERS = replace(FAST, base=0.003, cap=0.05)  # other instances mostly end within milliseconds


class MemberLeaving(Pinned[R], Generic[R]):
    """The part of an instance that drains, returns messages and deletes consumers."""

    _given_back = 0
    """Messages that the server still counts as pending, and that this instance held since it joined."""
    _unread = 0
    """Messages that the server sent to a withdrawn pull: never received here, but counted as pending too."""
    _drained_pin: str | None = None
    """The pin when the last drain ended."""
    _unreturned: Sequence[GroupMessage] = ()
    """Messages of the last drain; they become free when the consumer is deleted, or when they are handed back."""

    async def _drain(self, timeout: float, *, unpin: bool = True) -> bool:
        """Start nothing more, finish and settle what runs, release the pin; returns whether all handlers ended in time.

        Handlers that take longer than a part of the pin's TTL get a pull beside them, so that consumer and pin stay
        alive whatever `ack_wait` is; messages that arrive are kept and handed back at the end. A handler that still
        runs after `timeout` is cancelled and its message handed back.
        """
        self._in_flight.suspend()
        began = self._clock.now()
        pin = self._drained_pin = await self._withdraw()
        finished = await self._idle(min(timeout, self._limits.pin_ttl / 3))
        if not finished and (left := timeout - (self._clock.now() - began)) > 0:
            log.info("group.draining", member=self.member, running=self._in_flight.running, within=round(left, 1))
            if self._own.filters and self._limits.acks and not self._own.uncertain:
                await self._shortly(self._puller.start(self._own.stream, self._own.name, self._limits, pin=pin))
            finished = await self._idle(left)
            pin = self._drained_pin = await self._withdraw() or pin
        if not finished:
            self._in_flight.cancel("it did not end in time", keep=True)
            await self._in_flight.idle(_CANCEL_WITHIN)
        self._given_back += self._in_flight.count_under(self._own.created)
        self._unreturned = self._in_flight.drop()
        if unpin:
            self._hand_back(self._unreturned)
        await self._shortly(self._puller.flush())
        self._own.pin = None
        await self._shortly(self._look_back(pin, unpin=unpin))
        return finished

    async def _look_back(self, pin: str | None, *, unpin: bool) -> None:
        """After this no pull of this instance waits at the server, and the server has pinned none because of one.

        The server forgets withdrawn pulls only when the consumer's info is requested. The pin is released if this
        instance still has it: another instance that has it by now must not lose it.
        """
        info = await self._own.info()
        if info is None:
            return
        ours = pin is not None and pinned_id(info) == pin
        if pin is not None and ours:
            self._unread = self._puller.undelivered(pin, int(info["delivered"]["consumer_seq"]))
        await self._clear_stray(info)
        if ours and unpin:
            await self._api.consumer_unpin(self._own.stream, self._own.name, PRIORITY_GROUP)

    async def _idle(self, timeout: float) -> bool:
        """Wait for the handlers; `stop()` shortens the wait to its own limit."""
        if await self._in_flight.idle(0):
            return True
        idle = asyncio.create_task(self._in_flight.idle(timeout))
        try:
            await first_of(idle, self._stopping.wait())
            if not idle.done():
                await first_of(idle, timeout=self._stop_within)
            return idle.done() and idle.result()
        finally:
            idle.cancel()

    async def _withdraw(self) -> str | None:
        """Stop pulling; returns the last pin."""
        pulled = self._puller.pulling
        await self._shortly(self._puller.withdraw())
        self._puller.stop()
        return self._puller.final_pin if pulled else None

    async def _remove_ours(self, pin: str | None) -> bool:
        """Delete the consumer if this instance was pinned and the consumer is still the one it pulled from.

        False when the consumer stays, because another instance is pinned. That instance at once gets the messages that
        were not started here; only this instance can hand them back.
        """
        gone = False
        try:
            gone = pin is not None and await self._await_others_and_delete(pin)
        finally:
            if not gone:
                await self._return_rest(pin)
        return gone

    async def _await_others_and_delete(self, pin: str) -> bool:
        """Delete the consumer once no other instance of the member has its messages in flight.

        Deleted earlier, the next owner of their partitions would start them too. The wait ends when they are done, or
        when none was done for `ack_wait` and no pull waits. `stop()` does not wait for that: then the consumer stays,
        without messages of this instance.
        """
        deadline = self._clock.now() + self._drain_within + self._limits.ack_wait
        quiet_since, last = self._clock.now(), -1
        waits = _OTHERS.delays()
        while (info := await self._own.info()) is not None:
            if holder(info) not in (None, pin):
                return False
            now, others = self._clock.now(), int(info["num_ack_pending"]) - self._given_back - self._unread
            if others != last:
                quiet_since, last = now, others
            # In flight at an instance that died, or at the reference, which never requests more time.
            lapsed = now - quiet_since > self._limits.ack_wait and not info.get("num_waiting")
            if others <= 0 or lapsed or now > deadline:
                await self._delete_consumer()
                break
            if self._stopping.is_set():
                return False
            await self._clock.sleep(next(waits))
        return True

    async def _return_rest(self, pin: str | None) -> None:
        if pin is None and not self._unreturned:
            return
        self._hand_back(self._unreturned)
        self._unreturned = ()
        await self._shortly(self._puller.flush())
        await self._shortly(self._look_back(pin, unpin=True))

    async def _remove_unused(self) -> None:
        """Delete the consumer if no other instance uses it: it would only block its partitions until it lapses."""
        if self._own.created and await self._is_unused(self._own.created):
            await self._delete_consumer()

    async def _is_unused(self, created: str) -> bool:
        """Whether no instance pulls from this consumer, holds its pin or one of its messages."""
        freed = self._given_back + self._unread if created == self._own.created else 0
        for wait in (0.0, SECOND_LOOK):  # the reference has no open pull for a moment after each one
            await self._clock.sleep(wait)
            info = await self._own.found()
            if info is None or info["created"] != created or holder(info) or info.get("num_waiting"):
                return False
            if int(info["num_ack_pending"]) > freed:
                return False
        return True

    async def _remove_outdated(self) -> int | None:
        """The group was deleted or recreated: delete its consumer too, if it is the one that this instance pulled from.

        Returns the sequence up to which everything was done, which cannot be read afterwards.
        """
        with contextlib.suppress(PartiError):
            if (info := await self._own.info()) is not None:
                await self._delete_consumer()
                return int(info["ack_floor"]["stream_seq"])
        return None

    async def _delete_consumer(self) -> None:
        await self._shortly(self._api.consumer_delete(self._own.stream, self._own.name))

    @staticmethod
    async def _shortly(act: Awaitable[None]) -> None:
        """Try it; leaving must not hang on an unreachable server, and whatever is left behind lapses by itself."""
        with contextlib.suppress(PartiError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await act

    async def _finish(self) -> None:
        failed = self._failure is not None
        with contextlib.suppress(PartiError):
            await self._drain(self._stop_within)
            await self._leave()
        await self._in_flight.close()
        await self._puller.close()
        self._lose(self._owned)
        self._be(MemberState.FAILED if failed else MemberState.STOPPED)
        self._tell(EventKind.FAILED if failed else EventKind.STOPPED, detail=str(self._failure or ""))
        self._metrics.leave(m.IN_HAND, m.PENDING, m.PARTITIONS, m.PINNED)
        self.events.close()

    @abstractmethod
    async def _leave(self) -> None:
        """All messages in flight are settled and the pin is released: remove what is no longer needed."""

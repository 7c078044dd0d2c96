"""Letting go: finish what runs, give back what did not start, and remove a consumer only when that harms nobody.

A consumer goes by its name, and instances in other languages use the same one. So none is deleted whose `created` is
not the one that we pulled from, none under which somebody holds the pin or a message, and none that somebody pulls
from: the reference never makes a consumer anew that was deleted under it (docs/evidence/groups.md#g9).
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
_PATIENCE = 2.0  # for each call to the server while leaving
_CANCEL_WITHIN = 1.0  # for handlers to end when they are cancelled; one that does not is left behind
SECOND_LOOK = 0.1  # a pull of the reference ends and the next one comes within a few milliseconds
_OTHERS = replace(FAST, base=0.003, cap=0.05)  # others mostly end within milliseconds


class MemberLeaving(Pinned[R], Generic[R]):
    """The part of an instance that ends things."""

    _given_back = 0
    """Messages that the server still counts as pending, and that were ours since we joined."""
    _unread = 0
    """Messages that the server sent to a pull that we had withdrawn: it has them, and counts them as pending too."""
    _drained_pin: str | None = None
    """The pin that we had when the last drain ended."""
    _unreturned: Sequence[GroupMessage] = ()
    """Those of the last drain; they are free when the consumer goes, or when they are handed back."""

    async def _drain(self, timeout: float, *, unpin: bool = True) -> bool:
        """Start nothing more, finish what runs, settle it, give the pin back; whether all handlers ended in time.

        Handlers that take longer than a part of the pin's life get a pull beside them, so that consumer and pin stay
        whatever `ack_wait` is; what comes is kept and handed back at the end. A handler that still runs after `timeout`
        is cancelled and its message handed back.
        """
        self._in_flight.suspend()
        began = self._clock.now()
        pin = self._drained_pin = await self._withdraw()
        finished = await self._idle(min(timeout, self._limits.pin_ttl / 3))
        if not finished and (left := timeout - (self._clock.now() - began)) > 0:
            log.info("group.draining", member=self.member, running=self._in_flight.running, within=round(left, 1))
            if self._held and self._limits.acks and not self._uncertain:
                await self._shortly(self._puller.start(self._queue_stream, self._consumer, self._limits, pin=pin))
            finished = await self._idle(left)
            pin = self._drained_pin = await self._withdraw() or pin
        if not finished:
            self._in_flight.cancel("it did not end in time", keep=True)
            await self._in_flight.idle(_CANCEL_WITHIN)
        self._given_back += self._in_flight.count_under(self._created)
        self._unreturned = self._in_flight.drop()
        if unpin:
            self._hand_back(self._unreturned)
        await self._shortly(self._puller.flush())
        self._pin = None
        await self._shortly(self._look_back(pin, unpin=unpin))
        return finished

    async def _look_back(self, pin: str | None, *, unpin: bool) -> None:
        """After this no pull of ours waits at the server, and it counts nobody as pinned because of one.

        It forgets withdrawn pulls when it is asked for the consumer's info, and not before. The pin is given back when
        it is still ours: whoever has it by now must not lose it.
        """
        info = await self._info_of_ours()
        if info is None:
            return
        ours = pin is not None and pinned_id(info) == pin
        if pin is not None and ours:
            self._unread = self._puller.undelivered(pin, int(info["delivered"]["consumer_seq"]))
        await self._clear_stray(info)
        if ours and unpin:
            await self._api.consumer_unpin(self._queue_stream, self._consumer, PRIORITY_GROUP)

    async def _idle(self, timeout: float) -> bool:
        """Wait for the handlers; `stop()` makes the wait as short as it says."""
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
        """Pull no more; the pin that we had at the end of it."""
        pulled = self._puller.pulling
        await self._shortly(self._puller.withdraw())
        self._puller.stop()
        return self._puller.final_pin if pulled else None

    async def _remove_ours(self, pin: str | None) -> bool:
        """We are done: delete the consumer if we were pinned and it still is the one that we pulled from.

        False when it stays, because it is another instance's turn, or was all the time. Whoever that is gets at once
        what we had and did not start; nobody else may give it back.
        """
        gone = False
        try:
            gone = pin is not None and await self._await_others_and_delete(pin)
        finally:
            if not gone:
                await self._return_rest(pin)
        return gone

    async def _await_others_and_delete(self, pin: str) -> bool:
        """Messages that another instance of the member still has in hand are waited for: with the consumer gone, the
        next owner of their partitions would start them too. They end, or come to nobody for `ack_wait`. Whoever stops
        us does not wait for that: then the consumer stays, without anything of ours.
        """
        deadline = self._clock.now() + self._drain_within + self._limits.ack_wait
        quiet_since, last = self._clock.now(), -1
        waits = _OTHERS.delays()
        while (info := await self._info_of_ours()) is not None:
            if holder(info) not in (None, pin):
                return False
            now, others = self._clock.now(), int(info["num_ack_pending"]) - self._given_back - self._unread
            if others != last:
                quiet_since, last = now, others
            # In hand of an instance that died, or of the reference, which asks for no more time.
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
        """Nobody else uses the consumer: it would only keep its partitions from others until it lapses."""
        if self._created and await self._is_unused(self._created):
            await self._delete_consumer()

    async def _is_unused(self, created: str) -> bool:
        """Nobody pulls from this consumer, is pinned to it or has a message of it: its last user has ended."""
        freed = self._given_back + self._unread if created == self._created else 0
        for wait in (0.0, SECOND_LOOK):  # the reference has no pull open for a moment after each
            await self._clock.sleep(wait)
            info = await self._found()
            if info is None or info["created"] != created or holder(info) or info.get("num_waiting"):
                return False
            if int(info["num_ack_pending"]) > freed:
                return False
        return True

    async def _remove_outdated(self) -> int | None:
        """The group is gone or another one: its consumer goes with it, when it is the one that we pulled from.

        Returns up to where everything was done, which nobody can ask for afterwards.
        """
        with contextlib.suppress(PartiError):
            if (info := await self._info_of_ours()) is not None:
                await self._delete_consumer()
                return int(info["ack_floor"]["stream_seq"])
        return None

    async def _delete_consumer(self) -> None:
        await self._shortly(self._api.consumer_delete(self._queue_stream, self._consumer))

    @staticmethod
    async def _shortly(act: Awaitable[None]) -> None:
        """Try it; leaving must not hang on a server that is gone, and what is left behind lapses by itself."""
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
        """Everything in hand is settled and the pin is given back: remove what nobody needs any more."""

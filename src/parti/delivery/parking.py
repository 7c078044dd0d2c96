"""How a document gets into the park and out of it: what is stored, in which order, and what is known of its head."""

from __future__ import annotations

from parti.clock import by_clock
from parti.delivery.context import DeliveryContext
from parti.delivery.document import Document, Mode, alone_key, is_alone, place
from parti.delivery.feed import Feed
from parti.delivery.line import Line
from parti.delivery.names import ORIGIN
from parti.delivery.park import Park, came_due
from parti.delivery.pending import Pending, Wake
from parti.delivery.retrying import RetryWhileOwner
from parti.delivery.sleepers import ParkedDocument, Sleepers
from parti.wire.stored import StoredMessage


class Parking:
    """For one partition. After a method that parks returns, a crash loses no document, attempt count or due time."""

    def __init__(
        self, tools: DeliveryContext, park: Park, wakes: Feed, surely: RetryWhileOwner, sleepers: Sleepers
    ) -> None:
        self._tools = tools
        self._park = park
        self._wakes = wakes
        self._surely = surely
        self.sleepers = sleepers

    def __repr__(self) -> str:
        return f"<Parking {self.sleepers!r}>"

    def enter(self, key: str) -> ParkedDocument:
        """The entry of a document that this process parks itself."""
        if key not in self.sleepers.parked:
            self._park.begin(key)  # nothing of it is parked, else there would be an entry
        return self.sleepers.entry(key)

    async def learn(self, lane: Document) -> None:
        """Find out up to which task of the document everything is parked or was handled before.

        A task that comes again with a lower sequence, because its acknowledgement was lost with the previous owner,
        must not go behind the parked ones: it was delivered before they were parked. This also holds when the park
        became empty before it comes (`AlreadyDone`).
        """
        if lane.through or is_alone(lane.key):
            return
        parked = self.sleepers.parked.get(lane.key)
        lane.through = parked.through if parked is not None else 0
        if not lane.through and (last := await self._surely(lambda: self._park.last(lane.key))) is not None:
            lane.through = place(last.headers.get(ORIGIN, ""), self._tools.config.stream)

    async def head(self, lane: Document) -> StoredMessage | None:
        return await self._surely(lambda: self._park.first(lane.key))

    def read(self, lane: Document, stored: StoredMessage) -> Pending:
        """A parked task of the document, as it was when it came."""
        held = self._park.read(self._tools.reader, stored)
        held.key, held.park_sequence, held.received = lane.key, stored.seq, self._tools.clock.now()
        return held

    async def learn_head(self, lane: Document) -> None:
        """Find out how often the parked head was tried, and until when it waits: the wake-up at hand may be an old one.

        What this process stored itself is known. After a takeover the previous owner's last record counts: the wake-up
        still to come, if there is one. So no task is tried early, and none of its attempts is forgotten.
        """
        parked, wake, clock = self.sleepers.parked.setdefault(lane.key, ParkedDocument()), lane.wake, self._tools.clock
        if parked.known:
            return
        if wake is not None:
            parked.tried(wake.head, wake.attempts, came_due(wake.due, clock))
        if (said := await self._surely(lambda: self._park.said(lane.key, noted=parked.noted))) is not None:
            parked.tried(said.head, said.attempts, by_clock(clock, said.due))
        parked.known = True

    async def put_aside(self, head: Pending, line: Line) -> None:
        """Only this task waits outside, as a document of its own."""
        key = alone_key(head)
        self.enter(key).born = head.first_seen
        await self._surely(lambda: self._park.append(head, key))
        self.sleepers.wait_outside(key, line)

    async def go_outside(self, lane: Document, head: Pending, line: Line) -> None:
        """Park the document without a wake-up: the next owner looks at every document that has none.

        The wake-up that called it holds its head's attempts. It stays in flight, and is redelivered to the next owner;
        when too many are in flight, a note is written instead.
        """
        lane.busy = True
        parked = self.enter(lane.key)
        parked.through, parked.born = parked.through or lane.through, head.first_seen
        before, stays = lane.wake, False
        if lane.mode is Mode.DRAINING:
            if before is not None and parked.head == head.id and parked.attempts:
                stays = before.head == head.id and before.attempts == head.attempts and not self._wakes.is_crowded
                if not stays:
                    await self._surely(lambda: self._park.note(lane.key, head.id, head.attempts))
                    parked.noted = True
            self.unread(lane)
        self.sleepers.wait_outside(lane.key, line)
        if not stays:
            self.answered(lane, before)
        elif lane.wake is before:
            lane.called = False
        lane.mode, lane.busy = Mode.PARKED, False

    def answered(self, lane: Document, wake: Wake | None) -> None:
        """This wake-up is used up; one that came meanwhile is not."""
        if lane.wake is wake:
            lane.called = False
            if wake is not None:
                self._wakes.done(wake.sequence)
                lane.wake = None

    async def park(self, lane: Document, head: Pending, wait: float) -> None:
        """Store the wake-up first: a crash in between leaves an extra wake-up, never a document that nobody wakes."""
        lane.busy = True
        before = lane.wake
        await self._surely(lambda: self._park.wake_after(lane.key, wait, head.id, head.attempts))
        parked = self.enter(lane.key)
        parked.through = parked.through or lane.through
        parked.known = True
        parked.tried(head.id, head.attempts, head.due)
        if lane.mode is Mode.DRAINING:
            self.unread(lane)
            await self.forget_note(lane)
        self.answered(lane, before)
        lane.mode = Mode.PARKED
        lane.busy = False

    async def forget_note(self, lane: Document) -> None:
        parked = self.sleepers.parked.get(lane.key)
        if parked is not None and parked.noted:
            await self._surely(lambda: self._park.forget_note(lane.key))
            parked.noted = False

    def unread(self, lane: Document) -> None:
        """Remove the parked head from memory; in the park it does not change."""
        if lane.reading is not None:
            held = lane.reading
            self._tools.gate.unhold(held.host, held.size, held.trigger, held.rules)
            lane.reading = None

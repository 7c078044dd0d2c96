"""What happens to a member, told as values: to callbacks, to whoever waits, and to the log."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum

from parti.observe.logs import get_logger

log = get_logger("groups")
_REMEMBERED = 1_000


class MemberState(StrEnum):
    """Where an instance stands."""

    STARTING = "starting"
    WAITING = "waiting"
    """The member owns no partition: it is not listed, or beyond the number of partitions."""
    JOINING = "joining"
    """The member owns partitions, and its consumer is not there yet: another member still has them, or an outage."""
    STANDBY = "standby"
    """Pulling; another instance of the member is pinned, or nothing has come yet."""
    ACTIVE = "active"
    """Pinned: this instance gets the member's messages."""
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class EventKind(StrEnum):
    """The turns in a member's life."""

    ASSIGNED = "assigned"
    """Partitions were gained; `partitions` are all that are owned now."""
    REVOKED = "revoked"
    """Partitions were lost; `partitions` are the lost ones. All their messages in hand are settled."""
    WAITING = "waiting"
    BLOCKED = "blocked"
    """Another member's consumer still has one of the partitions."""
    JOINED = "joined"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    CONSUMER_LOST = "consumer_lost"
    FROZEN = "frozen"
    """The process stood still for so long that its pin may be gone: everything not started was dropped."""
    TEMPLATE_DIFFERS = "template_differs"
    """Another instance made the consumer with other settings; they are followed."""
    RECORD_INVALID = "record_invalid"
    """The record was overwritten with something unreadable; the last good one stays in force."""
    OLD_NAMES = "old_names"
    GROUP_DELETED = "group_deleted"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One turn."""

    kind: EventKind
    at: float
    """Unix seconds."""
    partitions: tuple[int, ...] = ()
    detail: str = ""


Listener = Callable[[GroupEvent], None]


class GroupEvents:
    """The last events, and those to come. A listener that raises is reported and stops nobody."""

    def __init__(self, *, stream: str, group: str, member: str) -> None:
        self.recent: deque[GroupEvent] = deque(maxlen=_REMEMBERED)
        self._fields = {"stream": stream, "group": group, "member": member}
        self._listeners: list[Listener] = []
        self._waiting: set[asyncio.Queue[GroupEvent | None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<GroupEvents {len(self.recent)} last={self.recent[-1].kind.value if self.recent else '-'}>"

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` of every event from now on; the returned function ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def follow(self) -> AsyncIterator[GroupEvent]:
        """The events from now on, until the member has ended."""
        if self._closed:
            return
        queue: asyncio.Queue[GroupEvent | None] = asyncio.Queue(maxsize=_REMEMBERED)
        self._waiting.add(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._waiting.discard(queue)

    def tell(self, event: GroupEvent) -> None:
        self.recent.append(event)
        write = log.warning if event.kind in _WARN else log.info
        write(f"group.{event.kind.value}", partitions=list(event.partitions), detail=event.detail, **self._fields)
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("group.listener_failed", kind=event.kind.value, **self._fields)
        for queue in self._waiting:
            _offer(queue, event)

    def close(self) -> None:
        self._closed = True
        for queue in self._waiting:
            _offer(queue, None)


def _offer(queue: asyncio.Queue[GroupEvent | None], event: GroupEvent | None) -> None:
    if queue.full():
        queue.get_nowait()  # whoever does not keep up misses the oldest, and memory stays bounded
    queue.put_nowait(event)


_WARN = frozenset(
    {
        EventKind.CONSUMER_LOST,
        EventKind.FROZEN,
        EventKind.TEMPLATE_DIFFERS,
        EventKind.RECORD_INVALID,
        EventKind.OLD_NAMES,
        EventKind.FAILED,
    }
)

"""A member's events as values, for callbacks, iterators and the log."""

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
    """The state of an instance."""

    STARTING = "starting"
    WAITING = "waiting"
    """The member owns no partition: it is not listed, or there are more members than partitions."""
    JOINING = "joining"
    """The member owns partitions, but has no consumer yet: another member still has them, or NATS is unreachable."""
    STANDBY = "standby"
    """Pulling; another instance of the member is pinned, or no message has arrived yet."""
    ACTIVE = "active"
    """Pinned: this instance receives the member's messages."""
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class EventKind(StrEnum):
    """Kinds of events of a member."""

    ASSIGNED = "assigned"
    """Partitions were gained; `partitions` are all owned ones."""
    REVOKED = "revoked"
    """Partitions were lost; `partitions` are the lost ones. All their messages in flight are settled."""
    WAITING = "waiting"
    BLOCKED = "blocked"
    """Another member's consumer still has one of the partitions."""
    JOINED = "joined"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    CONSUMER_LOST = "consumer_lost"
    FROZEN = "frozen"
    """The process was frozen for so long that its pin may be gone: everything not started was dropped."""
    TEMPLATE_DIFFERS = "template_differs"
    """Another instance created the consumer with other settings; this instance uses them."""
    RECORD_INVALID = "record_invalid"
    """The record was overwritten with unreadable data; the last valid record stays in force."""
    SOURCE_STUCK = "source_stuck"
    """The work queue of an elastic group gets no more messages from its stream; `detail` says why."""
    SOURCE_RESUMED = "source_resumed"
    OLD_NAMES = "old_names"
    GROUP_DELETED = "group_deleted"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One event."""

    kind: EventKind
    at: float
    """Unix seconds."""
    partitions: tuple[int, ...] = ()
    detail: str = ""


Listener = Callable[[GroupEvent], None]


class GroupEvents:
    """The most recent events, and a subscription to later ones. A listener that raises is logged and stops no other."""

    def __init__(self, *, stream: str, group: str, member: str) -> None:
        self.recent: deque[GroupEvent] = deque(maxlen=_REMEMBERED)
        self._fields = {"stream": stream, "group": group, "member": member}
        self._listeners: list[Listener] = []
        self._waiting: set[asyncio.Queue[GroupEvent | None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<GroupEvents {len(self.recent)} last={self.recent[-1].kind.value if self.recent else '-'}>"

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` for every event from now on; the returned function unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    async def follow(self) -> AsyncIterator[GroupEvent]:
        """All events from now on, until the member has ended."""
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
        queue.get_nowait()  # a reader that does not keep up misses the oldest events; memory stays bounded
    queue.put_nowait(event)


_WARN = frozenset(
    {
        EventKind.CONSUMER_LOST,
        EventKind.SOURCE_STUCK,
        EventKind.FROZEN,
        EventKind.TEMPLATE_DIFFERS,
        EventKind.RECORD_INVALID,
        EventKind.OLD_NAMES,
        EventKind.FAILED,
    }
)

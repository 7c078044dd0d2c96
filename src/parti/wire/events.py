"""Connection events, reported to every part that must resync after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from parti.observe.logs import get_logger

log = get_logger("wire")


class ConnectionEventKind(StrEnum):
    """The kinds of connection events."""

    DISCONNECTED = "disconnected"
    RECONNECTED = "reconnected"
    CLOSED = "closed"
    ERROR = "error"
    LAME_DUCK = "lame_duck"


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """One event; `error` is the reason if the client knows it, `server` is the address without secrets."""

    kind: ConnectionEventKind
    server: str = ""
    error: Exception | None = None


Listener = Callable[[ConnectionEvent], None]


class Events:
    """Listeners are called in the order they were added; one that raises is reported and never stops the others.

    nats-py calls back inside its read loop: an exception that escapes there ends the loop while the client still
    reports itself connected, and every later request times out (docs/evidence/jetstream.md#j18).
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}
        self._count = 0

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` from now on; the returned function removes it."""
        self._count += 1
        key = self._count
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def tell(self, event: ConnectionEvent) -> None:
        for listener in list(self._listeners.values()):
            try:
                listener(event)
            except Exception:
                log.exception("connection.listener_failed", kind=event.kind.value, server=event.server)

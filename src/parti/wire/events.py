"""What happens to a connection, told to whoever must resync because of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from parti.observe.logs import get_logger

log = get_logger("wire")


class ConnectionEventKind(StrEnum):
    """The turns in a connection's life."""

    DISCONNECTED = "disconnected"
    RECONNECTED = "reconnected"
    CLOSED = "closed"
    ERROR = "error"
    LAME_DUCK = "lame_duck"


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """One turn; `error` says why when the client knows, `server` is the address without secrets."""

    kind: ConnectionEventKind
    server: str = ""
    error: Exception | None = None


Listener = Callable[[ConnectionEvent], None]


class Events:
    """Listeners are told in the order they came; one that raises is reported and never stops the others.

    nats-py calls back from inside its read loop: an exception that escapes there ends the loop while the client still
    calls itself connected, and every later request times out (docs/evidence/jetstream.md#j18).
    """

    def __init__(self) -> None:
        self._listeners: dict[int, Listener] = {}
        self._count = 0

    def add_listener(self, listener: Listener) -> Callable[[], None]:
        """From now on `listener` is told; the returned function ends that."""
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

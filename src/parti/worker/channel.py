"""The worker's channel to its consumer: the connection, the pull on it, and whether it has to begin anew.

The session opens, begins and ends it. Whoever changes the consumer says here what that means for the pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from parti.errors import PartiError, TransientError
from parti.wire.live import LiveConnection
from parti.wire.options import ConnectOptions
from parti.wire.pull import LivePull


class Interrupted(TransientError):
    """The pull loop is to attach anew, because of something we did ourselves; no failure."""


class FellBehind(Interrupted):
    """The backlog is better read by range."""


class Channel:
    """Open or not, pulling or not. What is written while it is not open is not sent: it comes again after a reset."""

    def __init__(self) -> None:
        self.connection: LiveConnection | None = None
        self.pull: LivePull | None = None
        self.stale = True
        """The consumer has to be set to our position before anything is pulled."""
        self.next_sequence: int | None = None
        """The consumer's own sequence of the next delivery; None when it is not known."""
        self.running = asyncio.Event()
        """Set while there is something to pull for."""
        self.quiet = asyncio.Event()
        """Set while nothing is pulled."""
        self.quiet.set()
        self._trouble: asyncio.Future[PartiError] | None = None

    def __repr__(self) -> str:
        return f"<Channel {'pulling' if self.pulling else 'not pulling'}{' stale' if self.stale else ''}>"

    @property
    def pulling(self) -> bool:
        return self.pull is not None

    # -- the session's ------------------------------------------------------------------------------------------------

    async def open(self, options: ConnectOptions, name: str, *, anew: bool) -> None:
        """When this returns the connection is up; `anew`: not the one there was."""
        if anew:
            await self.close()
        if self.connection is None or self.connection.lost.done():
            self.connection = None
            self.stale = True
            self.connection = await LiveConnection.open(options, name=name)

    async def close(self) -> None:
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    def begin(self, pull: LivePull) -> asyncio.Future[PartiError]:
        """Pull; the future tells of the first trouble."""
        self._trouble = asyncio.get_running_loop().create_future()
        self.pull = pull
        pull.start()
        self.quiet.clear()
        return self._trouble

    def end(self) -> None:
        """Nothing comes any more; the next pull begins with a reset."""
        self.stop_pull()
        self.stale = True
        self._trouble = None
        self.quiet.set()

    def stop_pull(self) -> None:
        if self.pull is not None:
            self.pull.stop()
            self.pull = None

    def report(self, error: PartiError) -> None:
        """The pull is in trouble."""
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(error)

    # -- everybody's --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Cut it off: what was not sent yet never is."""
        if self.connection is not None:
            self.connection.abort()

    def write(self, frames: Iterable[bytes]) -> None:
        """Send these, joined."""
        if self.connection is not None and (joined := b"".join(frames)):
            self.connection.write(joined)

    def kick(self) -> None:
        """Look again whether there is room to ask for more."""
        if self.pull is not None:
            self.pull.kick()

    def resume(self) -> None:
        """Pull, now or as soon as it is possible."""
        self.running.set()
        self.kick()

    def pause(self) -> None:
        """Stop pulling until `resume`; what is in hand goes on. Messages on their way come again later."""
        if self.running.is_set():
            self.running.clear()
            self.interrupt(Interrupted("paused"))

    def interrupt(self, reason: PartiError) -> None:
        """Attach anew at once."""
        self.stale = True
        self.report(reason)

"""The `async for` form: the user takes messages from an iterator and settles each one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from parti.errors import UsageError
from parti.model import Lease
from parti.outcomes import Ack, Outcome, Reject, Retry, describe
from parti.worker.message import Message


class Received:
    """A message that blocks its lane until it is settled. `async with` settles it by how the block ends."""

    __slots__ = ("_outcome", "message")

    def __init__(self, message: Message, outcome: asyncio.Future[Outcome]) -> None:
        self.message = message
        self._outcome = outcome

    def __repr__(self) -> str:
        return f"<Received {self.message!r} {'settled' if self.settled else 'open'}>"

    @property
    def settled(self) -> bool:
        return self._outcome.done()

    def ack(self) -> None:
        """Done."""
        self.settle(Ack())

    def retry(self, after: float | None = None, error: str = "") -> None:
        """Retry the same message later."""
        self.settle(Retry(after, error))

    def reject(self, reason: str = "") -> None:
        """Send it to the dead-letter stream."""
        self.settle(Reject(reason))

    def settle(self, outcome: Outcome) -> None:
        """Set its outcome, once. After the worker was closed this has no effect."""
        if self._outcome.cancelled():
            return
        if self._outcome.done():
            raise UsageError(f"{self.message!r} was settled before")
        self._outcome.set_result(outcome)

    async def __aenter__(self) -> Message:
        return self.message

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Without an error: Ack, unless it was settled inside. With one: Retry, and the loop continues."""
        if self.settled:
            return isinstance(error, Exception)
        if error is None:
            self.ack()
        elif isinstance(error, Exception):
            self.retry(error=describe(error))
            return True
        return False


class MessageStream:
    """Yields the worker's messages; ends when the worker is closed.

    Several tasks may iterate over one stream. It never holds more than the worker's open messages.
    """

    def __init__(self, may_start: Callable[[Lease], bool]) -> None:
        """`may_start`: the fence; a message that waited here beyond its lease is not yielded."""
        self._may_start = may_start
        self._waiting: asyncio.Queue[Received | None] = asyncio.Queue()
        self._ended = False

    def __repr__(self) -> str:
        return f"<MessageStream waiting={self._waiting.qsize()}{' ended' if self._ended else ''}>"

    async def handle(self, message: Message) -> Outcome:
        """The worker's handler."""
        received = Received(message, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(received)
        return await received._outcome

    def end(self) -> None:
        """End every iteration after the messages that are waiting."""
        self._ended = True
        self._waiting.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        while True:
            received = await self._waiting.get()
            if received is None:
                self._waiting.put_nowait(None)  # for the other iterating tasks
                raise StopAsyncIteration
            if not received.settled and self._may_start(received.message.lease):
                return received  # messages the worker gave up are skipped

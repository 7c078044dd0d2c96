"""Handlers: any callable that takes a message. A plain function runs in a thread, so that it cannot stop the loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from parti.errors import UsageError
from parti.worker.message import Message
from parti.worker.outcomes import Outcome

AsyncHandler = Callable[[Message], Awaitable[Outcome]]
PlainHandler = Callable[[Message], Outcome]
Handler = AsyncHandler | PlainHandler

_THREADS = 32  # a plain handler that needs more of them at once waits for most of its time: write it async


class AdaptedHandler:
    """A handler to await, whatever the user gave. `close()` frees its threads."""

    def __init__(self, handler: Handler, *, concurrency: int) -> None:
        if not callable(handler):
            raise UsageError(f"a handler is a function that takes a message, not {type(handler).__name__}")
        self.in_thread = not is_async(handler)
        self._threads: ThreadPoolExecutor | None = None
        self._calls: set[Future[Any]] = set()
        self.call: Callable[[Message], Awaitable[Any]]
        if self.in_thread:
            self._threads = ThreadPoolExecutor(min(concurrency, _THREADS), thread_name_prefix="parti-handler")
            self._plain = handler
            self.call = self._in_thread
        else:
            self.call = handler  # type: ignore[assignment]  # is_async has looked

    def __repr__(self) -> str:
        return f"<AdaptedHandler {'thread' if self.in_thread else 'async'}>"

    def close(self) -> None:
        """Start no further call in a thread; one that is running cannot be stopped and ends by itself."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def still(self) -> bool:
        """Whether no call runs in a thread; what is awaited ends with its task, a thread cannot be made to end."""
        return all(call.done() for call in list(self._calls))

    async def _in_thread(self, message: Message) -> Any:
        assert self._threads is not None
        call = self._threads.submit(self._plain, message)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        result = await asyncio.wrap_future(call)
        return await result if inspect.isawaitable(result) else result


def is_async(handler: Any) -> bool:
    """Whether calling it gives something to await: a coroutine function, a partial of one, or an object with one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)

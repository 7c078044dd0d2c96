"""Handlers: any callable that takes a message. A plain function runs in a thread, so that it cannot block the loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from parti.errors import UsageError
from parti.model import Lease
from parti.outcomes import Outcome
from parti.worker.errors import LeaseOver
from parti.worker.message import Message

AsyncHandler = Callable[[Message], Awaitable[Outcome]]
PlainHandler = Callable[[Message], Outcome]
Handler = AsyncHandler | PlainHandler

_THREADS = 32  # a plain handler that needs more threads at once mostly waits: write it async


class _Failed(Exception):
    """Wraps any error of a plain handler: a future cannot carry StopIteration, and SystemExit would end the loop."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(raised)
        self.raised = raised


class _Threads:
    """A few threads that never keep the process alive: a handler that hangs in one must not block the exit."""

    def __init__(self, most: int) -> None:
        self.may_start: Callable[[Lease], bool] | None = None
        self._most = most
        self._jobs: queue.SimpleQueue[tuple[Future[Any], PlainHandler, Message] | None] = queue.SimpleQueue()
        self._started = 0
        self._idle = 0
        self._lock = threading.Lock()

    def submit(self, handler: PlainHandler, message: Message) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            elif self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=f"parti-handler_{self._started}", daemon=True).start()
        self._jobs.put((future, handler, message))
        return future

    def close(self) -> None:
        """Start no further call; a thread ends when its current call does."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in range(self._most):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, handler, message = job
            if future.set_running_or_notify_cancel():
                try:
                    if self.may_start is not None and not self.may_start(message.lease):
                        raise LeaseOver("the lease ended while the call waited for a thread")
                    future.set_result(handler(message))
                except BaseException as error:
                    future.set_exception(_Failed(error))
            with self._lock:
                self._idle += 1
            del job, future, handler, message


class AdaptedHandler:
    """Makes any handler of the user awaitable. `close()` frees its threads."""

    def __init__(self, handler: Handler, *, concurrency: int) -> None:
        if not callable(handler):
            raise UsageError(f"a handler is a function that takes a message, not {type(handler).__name__}")
        self.in_thread = not is_async(handler)
        self._threads: _Threads | None = None
        self._calls: set[Future[Any]] = set()
        self._left: set[Future[Any]] = set()
        self.on_left: Callable[[Message], None] | None = None
        """Called with a message whose call continues in its thread although nothing waits for it any more."""
        self.call: Callable[[Message], Awaitable[Any]]
        if self.in_thread:
            self._threads = _Threads(min(concurrency, _THREADS))
            self._plain: PlainHandler = handler  # type: ignore[assignment]  # is_async has looked
            self.call = self._in_thread
        else:
            self.call = handler  # type: ignore[assignment]  # is_async has looked

    def __repr__(self) -> str:
        return f"<AdaptedHandler {'thread' if self.in_thread else 'async'}>"

    def use_fence(self, may_start: Callable[[Lease], bool]) -> None:
        """Check this before a call starts in its thread: it may have waited for a free thread beyond the lease."""
        if self._threads is not None:
            self._threads.may_start = may_start

    def close(self) -> None:
        """Start no further call in a thread; one that is running cannot be stopped and ends by itself."""
        if self._threads is not None:
            self._threads.close()

    @property
    def still(self) -> bool:
        """Whether no call runs in a thread. An awaited call ends with its task; a thread cannot be forced to end."""
        return all(call.done() for call in list(self._calls))

    @property
    def left(self) -> int:
        """Number of calls in threads that nothing waits for any more."""
        return len(self._left)

    async def _in_thread(self, message: Message) -> Any:
        assert self._threads is not None
        call = self._threads.submit(self._plain, message)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            result = await asyncio.wrap_future(call)
        except _Failed as failed:
            raise failed.raised from None
        except asyncio.CancelledError:
            if not call.done():
                self._left.add(call)
                call.add_done_callback(self._left.discard)
                if self.on_left is not None:
                    self.on_left(message)
            raise
        return await result if inspect.isawaitable(result) else result


def is_async(handler: Any) -> bool:
    """Whether a call returns an awaitable: a coroutine function, a partial of one, or an object with one."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)

"""The asyncio event loop of one simulated process: runs the shipped coroutines in virtual time on one machine.

Every callback becomes an event of the world. So a frozen process stops in the middle of any operation while its clock
continues, a dead one never continues, and the same seed gives the same order of callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from parti.testing.sim.network import Network
    from parti.testing.sim.world import SimMachine, World

T = TypeVar("T")

_LATE: Final = 1e-9  # seconds: rounding must not make a timer fire before its time
_LAST_TURNS: Final = 200  # of a loop that ends: tasks still running after that are left to the garbage collector


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one process. `network` connects it to the simulated server."""

    virtual_time = True

    def __init__(self, world: World, host: SimMachine, clock: Callable[[], float], rate: float) -> None:
        self.network: Network | None = None
        self.ending = False
        self._world = world
        self._host = host
        self._clock = clock
        self._rate = rate
        self._ready: deque[asyncio.Handle] = deque()
        self._due = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<SimLoop {self._host.name} tasks={len(self._tasks)}>"

    # -- time ---------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._clock()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._wake()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if self.ending:  # no more waiting
            self._ready.append(handle)
        else:
            self._world.after(max(0.0, when - self.time()) / self._rate + _LATE, self._host, self._fire, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their time comes."""

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if not handle.cancelled():
            self._ready.append(handle)
            self._wake()

    def _wake(self) -> None:
        if not self._due and not self.ending:
            self._due = True
            self._world.at(self._world.now, self._host, self._turn)

    def _turn(self) -> None:
        """One iteration, as in asyncio: callbacks that become ready during it run in the next one."""
        self._due = False
        ready = self._ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
        if ready:
            self._wake()

    # -- tasks --------------------------------------------------------------------------------------------------------

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]  # of all its words asyncio uses these
        self, work: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = asyncio.Task(work, loop=self, name=name, context=context)
        self._tasks.add(task)  # asyncio itself keeps no reference to a task that is not awaited
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(self, executor: Any, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Runs at once: there are no threads here."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        future.set_result(work(*args))
        return future

    async def create_connection(self, made: Callable[[], Any], *address: Any, **options: Any) -> Any:  # type: ignore[override]
        """A connection to the simulated server, whatever the address."""
        del address, options
        if self.network is None or self.ending:
            raise ConnectionRefusedError("this process has no network")
        return await self.network.connect(made)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An unexpected exception fails the run: a bug must not hide behind a promise that held by luck."""
        error = context.get("exception")
        if not self.ending and not self._host.dead:
            self._world.bug(self._host, f"{context.get('message')}: {error!r}", error)

    # -- from outside -------------------------------------------------------------------------------------------------

    def enter(self, act: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run this as a callback of this loop."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            act(*args)
        finally:
            events._set_running_loop(before)

    def end(self) -> None:
        """The run is over: end everything that still runs, so that nothing is left for the next run."""
        self.ending = True
        self.enter(self._last_turns, ())
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if (work := task.get_coro()) is not None:
                with contextlib.suppress(Exception):  # a task that waits in its own clean-up cannot be ended
                    work.close()
        self._tasks.clear()
        self._ready.clear()

    def _last_turns(self) -> None:
        for _ in range(_LAST_TURNS):
            for task in [each for each in self._tasks if not each.cancelling()]:
                task.cancel()
            if not self._ready:
                break
            self._turn()

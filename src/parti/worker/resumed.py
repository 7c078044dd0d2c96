"""After a stall, a process checks its lease before any waiting handler resumes.

A timer that detects the stall runs first only if the process was waiting. If it was stopped between two callbacks, or
blocked by a handler, other callbacks are already due and would run before any timer. So each resumption of a runner in
the middle of a message checks the lease. A handler that never waits pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any


class Resumed(Coroutine[Any, Any, None]):
    """Runs a coroutine as a task does. `stale` is called before each resumption; an error it returns is raised."""

    __slots__ = ("_inner", "_send", "_stale")

    def __init__(self, inner: Coroutine[Any, Any, None], stale: Callable[[], BaseException | None]) -> None:
        self._inner = inner
        self._send = inner.send
        self._stale = stale

    def __repr__(self) -> str:
        return f"<Resumed {self._inner!r}>"

    def send(self, value: Any) -> Any:
        error = self._stale()
        return self._send(value) if error is None else self._inner.throw(error)

    def throw(self, *error: Any) -> Any:
        return self._inner.throw(*error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

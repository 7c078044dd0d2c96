"""Waits for a condition that has no event to wait for."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

from parti.clock import Deadline, SystemClock
from parti.errors import PartiError
from parti.testing.errors import NeverHappened

T = TypeVar("T")

PATIENCE = 60.0  # a machine at load 20 is 20 times slower; a condition that never becomes true is rare
_FIRST_PAUSE = 0.002  # most conditions become true within a few milliseconds
_LONGEST_PAUSE = 0.05  # ... and waiting for the others must not use up a core


@overload
async def eventually(
    predicate: Callable[[], Awaitable[T]], timeout: float = PATIENCE, what: str = "the condition"
) -> T: ...


@overload
async def eventually(predicate: Callable[[], T], timeout: float = PATIENCE, what: str = "the condition") -> T: ...


async def eventually(
    predicate: Callable[[], T | Awaitable[T]], timeout: float = PATIENCE, what: str = "the condition"
) -> T:
    """Return the first true result of `predicate` (plain or async); `NeverHappened` after `timeout` seconds."""
    deadline = Deadline.after(SystemClock(), seconds=timeout)
    pause = _FIRST_PAUSE
    while True:
        result = predicate()
        value: T = await result if inspect.isawaitable(result) else result
        if value:
            return value
        if deadline.expired:
            raise NeverHappened(_message(what, timeout, value))
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def eventually_blocking(predicate: Callable[[], T], timeout: float = PATIENCE, what: str = "the condition") -> T:
    """`eventually` for code without an event loop."""
    deadline = Deadline.after(SystemClock(), seconds=timeout)
    pause = _FIRST_PAUSE
    never = threading.Event()
    while True:
        value = predicate()
        if value:
            return value
        if deadline.expired:
            raise NeverHappened(_message(what, timeout, value))
        never.wait(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


async def insist(action: Callable[[], Awaitable[T]], timeout: float = PATIENCE, what: str = "the call") -> T:
    """The result of `action`, repeated while the error may be temporary: a cluster in an election answers 503 at once.

    Only for actions that may run twice, because the first try may have succeeded in spite of its error.
    """
    errors: list[PartiError] = []

    async def answered() -> list[T]:
        try:
            return [await action()]
        except PartiError as error:
            _note(errors, error)
            return []

    try:
        return (await eventually(answered, timeout, what))[0]
    except NeverHappened as never:
        raise never from errors[-1]


def insist_blocking(action: Callable[[], T], timeout: float = PATIENCE, what: str = "the call") -> T:
    """`insist` for code without an event loop."""
    errors: list[PartiError] = []

    def answered() -> list[T]:
        try:
            return [action()]
        except PartiError as error:
            _note(errors, error)
            return []

    try:
        return eventually_blocking(answered, timeout, what)[0]
    except NeverHappened as never:
        raise never from errors[-1]


def _note(errors: list[PartiError], error: PartiError) -> None:
    if not error.retriable:
        raise error
    errors[:] = [error]


def _message(what: str, timeout: float, last: object) -> str:
    return f"{what} did not come true within {timeout:g} s; last seen: {last!r}"

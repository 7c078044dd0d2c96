"""Waiting for the first of several tasks: tasks started here end here, tasks of others continue."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from parti.waiting import first_of, stop_signals


async def test_the_first_one_ends_the_wait_and_what_was_started_for_it_is_cancelled() -> None:
    never, ended = asyncio.Event(), []

    async def slow() -> None:
        try:
            await never.wait()
        finally:
            ended.append("slow")

    others = asyncio.create_task(never.wait())
    assert await first_of(slow(), asyncio.sleep(0), others) == [False, True, False]
    assert ended == ["slow"]
    assert not others.done()
    others.cancel()


async def test_an_exception_of_its_own_is_raised_and_one_of_others_is_theirs() -> None:
    async def fails() -> None:
        raise ValueError("told to")

    with pytest.raises(ValueError, match="told to"):
        await first_of(fails(), asyncio.Event().wait())
    theirs = asyncio.create_task(fails())
    assert await first_of(theirs, asyncio.Event().wait()) == [True, False]
    with pytest.raises(ValueError, match="told to"):
        await theirs


async def test_a_timeout_ends_the_wait_with_nothing() -> None:
    assert await first_of(asyncio.Event().wait(), timeout=0.0) == [False]


async def test_signals_set_the_event_and_are_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with stop_signals(signal.SIGUSR1) as asked:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(asked.wait(), 10)
    assert signal.getsignal(signal.SIGUSR1) == before

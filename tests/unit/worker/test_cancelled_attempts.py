"""An attempt that is cancelled at any await leaves nothing behind: no trial, and no count of a run that never was."""

from __future__ import annotations

import asyncio

import pytest

from parti.config.worker import WorkerConfig
from parti.model import Lease, Partition, Tried
from parti.outcomes import Bury, Done
from parti.worker import Outcome
from parti.worker.attempts import Attempts
from parti.worker.lanes import Runner, Why
from parti.worker.ledger import PartitionState
from parti.worker.message import Message, make_message
from support.inbox import bare_runtime

_TURNS = 3
"""Turns of the loop that each await takes, so that a cancellation can come in front of, inside and behind it."""


async def turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class Trial:
    """Suspects one at a time: whoever entered and did not leave keeps all others out."""

    def __init__(self) -> None:
        self.inside: set[int] = set()

    async def enter(self, message: Message) -> Bury | Done | float | None:
        await turns()
        self.inside.add(message.sequence)
        return None

    async def buried(self, message: Message) -> None:
        await turns()

    def leave(self, message: Message) -> None:
        self.inside.discard(message.sequence)


async def serve(cancel_after: int, tried_before: int) -> tuple[Trial, PartitionState, bool]:
    """One attempt, cancelled after so many turns of the loop; whether it had ended by then."""

    async def handle(message: Message) -> Outcome:
        await turns()
        return None

    config = WorkerConfig(stream="S", subject_template="s.{partition}", max_deliver=3)
    bugs: list[BaseException] = []
    attempts = Attempts(bare_runtime(config, handler=handle), let_go=lambda _: None, on_bug=bugs.append)
    state = PartitionState(Partition(("a",)), Lease(Partition(("a",)).id, 1))
    state.wary = trial = Trial()
    state.tries.tell = turns
    if tried_before:
        state.tries.resume([Tried(1, tried_before)])
    message = make_message("s.a", state.partition, "", 1, b"", lease=state.lease)
    message._lane = state.lane("")
    runner = Runner()

    async def attempt() -> None:
        await attempts.serve(message, runner)

    runner.task = task = asyncio.create_task(attempt())
    for _ in range(cancel_after):
        await asyncio.sleep(0)
    ended = task.done()
    runner.cancel(Why.DRAIN)
    await asyncio.gather(task, return_exceptions=True)
    await attempts.halt()
    assert bugs == []
    return trial, state, ended


@pytest.mark.parametrize("tried_before", [0, 1, 2])
def test_cancelled_at_any_await_it_leaves_its_trial_and_takes_its_count_back(tried_before: int) -> None:
    moments = 0
    for cancel_after in range(1, 60):
        trial, state, ended = asyncio.run(serve(cancel_after, tried_before))
        if ended:
            break
        moments += 1
        counted = state.tries.failed.get(1)
        assert trial.inside == set(), f"cancelled after {cancel_after} turns it keeps others out"
        assert (counted.attempts if counted else 0) == tried_before, f"cancelled after {cancel_after} turns it counts"
    assert moments >= (3 if tried_before == 2 else 2) * _TURNS, "the last attempt is told before it starts"

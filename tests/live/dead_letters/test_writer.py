"""Writing dead letters on a real server: stored once, before the message is acknowledged, and as complete as fits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from parti.backoff import Backoff
from parti.clock import SystemClock
from parti.dead_letters import DeadLetter, DeadLetterReader, DeadLetterWriter, ensure_stream, until_stored
from parti.errors import PartiError, TransientError, UsageError
from parti.model import Lease, PartitionId
from parti.outcomes import Bury, DeadLetterReason
from parti.testing import NatsServer
from parti.wire.api import JetStreamApi, expectations
from parti.wire.connect import connect
from parti.wire.errors import WrongLastSequence
from parti.wire.options import ConnectOptions

QUICK = Backoff(base=0.001, cap=0.002, max_tries=2)
NO = Bury(DeadLetterReason.REJECTED, "no good")


@pytest.fixture
async def js(server: NatsServer, name: str) -> AsyncIterator[JetStreamApi]:
    async with await connect(ConnectOptions(servers=(server.url,))) as connection:
        api = JetStreamApi(connection)
        await api.stream_create({"name": name, "subjects": [f"{name}.>"], "storage": "memory"})
        yield api


def message(name: str, sequence: int = 1, **other: Any) -> Any:
    """What a consumer has in hand."""
    fields = {"subject": f"{name}.a", "data": b"one", "headers": {"Kind": "order"}, "attempt": 2, "timestamp": 12.5}
    return SimpleNamespace(
        **fields | {"sequence": sequence, "worker_id": "w1", "lease": Lease(PartitionId("a"), 3)} | other
    )


async def letters(js: JetStreamApi, stream: str) -> list[DeadLetter]:
    return [letter async for letter in DeadLetterReader(js, stream).walk()]


async def test_a_message_has_one_letter_however_many_bury_it(js: JetStreamApi, name: str) -> None:
    for consumer in ("parti-w1", "parti-w2"):
        await DeadLetterWriter(js, name, consumer, "parti").bury(message(name), NO)
    (letter,) = await letters(js, name)
    assert (letter.reason, letter.attempts, letter.consumer, letter.epoch) == ("rejected", 2, "parti-w1", 3)
    await DeadLetterWriter(js, name, "others").bury(message(name), NO)
    assert len(await letters(js, name)) == 2, "another reader of the stream has letters of its own"


async def test_a_letter_that_left_is_no_reason_to_let_the_next_one_go(js: JetStreamApi, name: str) -> None:
    writer = DeadLetterWriter(js, name, "c")
    await writer.bury(message(name), NO)
    await js.msg_delete(f"{name}_DLQ", 1)
    for _ in range(2):
        await writer.bury(message(name), NO)
    assert [letter.sequence for letter in await letters(js, name)] == [2]


async def test_a_dead_letter_stream_that_was_deleted_is_made_again(js: JetStreamApi, name: str) -> None:
    writer = DeadLetterWriter(js, name, "c")
    await writer.bury(message(name), NO)
    await js.stream_delete(f"{name}_DLQ")
    failed: list[PartiError] = []
    await until_stored(
        lambda: writer.bury(message(name, 2), NO),
        clock=SystemClock(),
        backoff=QUICK,
        on_failure=lambda error, _: failed.append(error),
    )
    assert len(await letters(js, name)) == 1
    assert failed


async def test_the_letters_of_an_owner_that_was_followed_are_refused(js: JetStreamApi, name: str) -> None:
    await ensure_stream(js, name)
    fence = f"{name}_DLQ.parti-fence.p"
    marker = await js.publish(fence, b"1", headers={"Parti-Reason": "fence"})
    expected = expectations(last_subject_seq=marker.seq, last_subject_filter=fence)
    writer = DeadLetterWriter(js, name, "c", fence=expected)
    await writer.bury(message(name), NO)
    await js.publish(fence, b"2", headers={"Parti-Reason": "fence"})
    with pytest.raises(WrongLastSequence):
        await writer.bury(message(name, 2), NO)
    assert len(await letters(js, name)) == 1


class Stubborn:
    """Something that fails so often before it works."""

    def __init__(self, failures: int, error: type[PartiError] = TransientError) -> None:
        self.left, self.error = failures, error

    async def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise self.error("not now")
        return "stored"


async def test_what_must_be_stored_is_tried_until_it_is_and_each_failure_is_told() -> None:
    told: list[str] = []
    done = await until_stored(
        Stubborn(5), clock=SystemClock(), backoff=QUICK, on_failure=lambda error, wait: told.append(f"{error}")
    )
    assert (done, told) == ("stored", ["not now"] * 5), "not only as often as the backoff of other calls says"


async def test_only_a_final_error_or_a_cancellation_ends_it() -> None:
    with pytest.raises(UsageError):
        await until_stored(
            Stubborn(9, UsageError), clock=SystemClock(), on_failure=lambda *_: None, final=(UsageError,)
        )
    task = asyncio.create_task(
        until_stored(Stubborn(10**9), clock=SystemClock(), backoff=QUICK, on_failure=lambda *_: tried.set())
    )
    tried = asyncio.Event()
    await tried.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

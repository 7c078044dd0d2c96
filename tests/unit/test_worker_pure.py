"""The pure parts of the worker: outcomes, batch size, ledger, metadata, template. No server, no clock."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.clock import SystemClock
from parti.config.worker import WorkerConfig
from parti.errors import ConfigError, UsageError
from parti.model import Lease, Partition, PartitionId
from parti.outcomes import Ack, Again, Bury, DeadLetterReason, Done, Reject, Retry, RetryPolicy, clean
from parti.testing import eventually
from parti.worker.batching import BatchSize
from parti.worker.durable import Memory
from parti.worker.handler import AdaptedHandler
from parti.worker.ledger import Ledger, PartitionState
from parti.worker.message import make_message
from parti.worker.routing import Routes, SubjectTemplate, consumer_name
from parti.worker.updates import Coalescer, Wanted


def test_an_outcome_decides_what_follows() -> None:
    policy = RetryPolicy(3, (2.0, 5.0))
    assert policy.decide(None, 1) == policy.decide(Ack(), 9) == Done()
    assert policy.decide(Retry(), 1) == Again(2.0, "")
    assert policy.decide(Retry(), 2) == Again(5.0, "")
    assert policy.decide(Retry(after=0), 2) == Again(0, "")
    assert policy.decide(Retry(error="x"), 3) == Bury(DeadLetterReason.MAX_DELIVER, "x")
    assert policy.decide(Reject("why"), 1) == Bury(DeadLetterReason.REJECTED, "why")


def test_the_last_delay_repeats_when_there_are_more_attempts_than_delays() -> None:
    policy = RetryPolicy(10, (1.0, 2.0))
    waits = [policy.decide(Retry(), attempt) for attempt in range(1, 6)]
    assert [wait.delay for wait in waits if isinstance(wait, Again)] == [1.0, 2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf")])
def test_a_time_that_cannot_be_waited_for_is_refused(after: float) -> None:
    with pytest.raises(UsageError):
        Retry(after=after)


@given(st.text())
def test_an_error_text_always_fits_into_one_header_line(text: str) -> None:
    shown = clean(text)
    assert len(shown) <= 1000
    assert shown.isprintable() or not shown


def test_the_batch_size_follows_what_the_handlers_manage() -> None:
    sizes = BatchSize(50, limit=400)
    sizes.adapt(0.0)
    for step in range(1, 8):
        sizes.done = 1000
        sizes.adapt(step * 0.1)
    assert sizes.size == 400
    for step in range(8, 20):
        sizes.done = 1
        sizes.adapt(step * 0.1)
    assert sizes.size == 10
    sizes.done = 0
    assert not sizes.adapt(100.0), "a pause says nothing about the handlers"


def ledger_with(*names: str) -> tuple[Ledger, dict[str, PartitionState]]:
    template = SubjectTemplate("s.{partition}")
    ledger = Ledger(Routes(template, [Partition((name,)) for name in names]))
    states = {name: PartitionState(Partition((name,)), Lease(Partition((name,)).id, 0)) for name in names}
    ledger.states.update({state.id: state for state in states.values()})
    return ledger, states


def take(ledger: Ledger, state: PartitionState, sequence: int) -> None:
    message = make_message("s", state.partition, "k", sequence, b"", lease=state.lease)
    message._lane = state.main
    state.open[sequence] = message
    state.received_through = max(state.received_through, sequence)
    ledger.in_hand += 1
    ledger.high = max(ledger.high, sequence)


def test_the_floor_is_just_below_the_oldest_message_in_hand() -> None:
    ledger, states = ledger_with("a", "b")
    for sequence in (1, 3, 5):
        take(ledger, states["a"], sequence)
    for sequence in (2, 4):
        take(ledger, states["b"], sequence)
    assert ledger.floor() == 0
    ledger.let_go(states["a"].open[1])
    assert (ledger.floor(), ledger.cursor(states["a"].id), ledger.cursor(states["b"].id)) == (1, 2, 1)
    for state in states.values():
        for message in list(state.open.values()):
            ledger.let_go(message)
    assert (ledger.floor(), ledger.in_hand) == (5, 0)
    assert ledger.cursor(states["b"].id) == 4, "what others got says nothing before the filters were seen to be there"
    ledger.verified = ledger.high
    assert ledger.cursor(states["b"].id) == 5, "an idle partition is as far as its consumer"


def test_a_partition_that_catches_up_is_only_as_far_as_it_was_read() -> None:
    ledger, states = ledger_with("a")
    state = states["a"]
    ledger.high = 100
    state.received_through, state.target = 40, 90
    assert ledger.cursor(state.id) == 40
    take(ledger, state, 95)
    state.received_through = 40
    state.held.append(state.open[95])
    assert ledger.cursor(state.id) == 40, "what is held lies above a part that was not read"
    assert ledger.floor() == 94


@given(
    st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, 2**60), max_size=5),
    st.integers(0, 2**60),
    st.lists(st.integers(1, 2**60), max_size=20),
)
def test_what_the_metadata_remembers_survives_the_round_trip(
    catching: dict[str, int], high: int, left: list[int]
) -> None:
    memory = Memory(catching, high if left else 0, tuple(left))  # type: ignore[arg-type]
    assert Memory.read({"metadata": memory.metadata()}) == memory


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '["x"]', "null", '{"a": "b"}'])
def test_malformed_metadata_counts_as_nothing_remembered(text: str) -> None:
    assert Memory.read({"metadata": {"parti.catching": text, "parti.left": text}}).left == ()


def test_consumer_names_are_refused_instead_of_mapped_onto_each_other() -> None:
    assert consumer_name("processor", "instance-123") == "processor-instance-123"
    for bad in ("worker.tool", "a*", "a b", "a\n"):
        with pytest.raises(ConfigError):
            consumer_name("p", bad)


def test_the_filter_of_nobody_matches_no_partition_and_differs_between_workers() -> None:
    template = SubjectTemplate("o.*.{partition}.>")
    assert template.nothing("w1") != template.nothing("w2")
    assert "*" not in template.nothing("w1")


@pytest.mark.parametrize(
    "change",
    [
        {"subject_template": "fixed"},
        {"retry_delays": ()},
        {"retry_delays": ("soon",)},
        {"pull_timeout": 1.0, "idle_heartbeat": 1.0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        WorkerConfig(stream="s", **change)  # type: ignore[arg-type]


async def test_of_the_updates_of_one_window_the_last_is_handed_out_and_all_callers_are_told() -> None:
    coalescer = Coalescer(window=0.01, interval=0.0, clock=SystemClock())
    template = SubjectTemplate("s.{partition}")
    wanted = [Wanted("w", Routes(template, [Partition((str(n),))])) for n in range(5)]
    waiters = [coalescer.put(each) for each in wanted]
    batch = await coalescer.take()
    assert batch.wanted is wanted[-1]
    batch.settle(None)
    await asyncio.gather(*waiters)
    assert not coalescer.pending


async def test_a_handler_in_a_thread_is_not_still_before_its_call_has_ended_whatever_became_of_the_task() -> None:
    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def handle(_: object) -> None:
        loop.call_soon_threadsafe(entered.set)
        leave.wait(60)

    handler = AdaptedHandler(handle, concurrency=1)
    assert handler.still
    task = asyncio.ensure_future(
        handler.call(make_message("s.p", Partition(("p",)), "", 1, b"", lease=Lease(PartitionId("p"), 1)))
    )
    await entered.wait()
    task.cancel()
    await asyncio.wait({task})
    handler.close()
    assert not handler.still, "the thread cannot be made to end"
    leave.set()
    await eventually(lambda: handler.still, 60, "the call has ended")

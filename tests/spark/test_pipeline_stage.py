"""The handler stage of a task, on real Arrow batches and without Spark: order, outcomes, retries, limits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.outcomes import Ack, Again, Reject, Retry
from parti.spark.pipeline import Emit, Retries
from parti.spark.pipeline.batch_calls import rebatched
from parti.spark.pipeline.blocks import PARKED, completed, unpacked
from parti.spark.pipeline.message import RowMessage
from parti.spark.pipeline.outcomes import RowShape
from parti.spark.pipeline.policy import AlreadyDeadLettered, ParkAlone, ParkKey
from parti.spark.pipeline.source import PayloadKey
from parti.spark.pipeline.stage import HandlerStage
from parti.wire.outgoing import HEADERS
from parti.worker.message import Message

QUICK = Retries(attempts=3, delays=(0.01,), then="stop")
PARK = Retries(attempts=1, delays=(0.01,), then="park", park_delays=(60.0,))


def batch(keys: list[str], first: int = 1, **more: Any) -> pa.RecordBatch:
    count = len(keys)
    sequences = np.arange(first, first + count)
    columns = {
        "key": pa.array(keys, pa.string()),
        "value": pa.array([b"%d" % number for number in sequences.tolist()], pa.binary()),
        "subject": pa.array([f"in.{key}" for key in keys]),
        "partition": pa.array(np.zeros(count, dtype=np.int32)),
        "sequence": pa.array(sequences),
        "timestamp": pa.array(np.full(count, int(time.time() * 1e6))).cast(pa.timestamp("us", tz="UTC")),
    } | more
    return pa.RecordBatch.from_pydict(columns)


def batches(count: int, keys: int, size: int = 500) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, size):
        yield batch([f"k{number % keys}" for number in range(start, min(start + size, count))], start + 1)


def outcomes(handler: Callable[..., Any], parts: Iterable[pa.RecordBatch], **stage: Any) -> list[Any]:
    retries, name = stage.pop("retries", QUICK), stage.pop("name", "test")
    shape = RowShape(results=stage.pop("with_results", False), parking=retries.then == "park")
    parts = (completed(part) if "parked_until" in part.schema.names else part for part in parts)
    made = HandlerStage(handler, name, "IN", retries=retries, shape=shape, **stage).run(iter(parts))
    return [row for part in made for row in part.to_pylist()]


def in_order(seen: list[tuple[str, int]]) -> bool:
    highest: dict[str, int] = {}
    for key, sequence in seen:
        if sequence <= highest.get(key, 0):
            return False
        highest[key] = sequence
    return True


def test_every_message_has_one_outcome_row_in_stream_order() -> None:
    rows = outcomes(lambda message: None, batches(2_000, 7))
    assert [row["sequence"] for row in rows] == list(range(1, 2_001))
    assert {row["outcome"] for row in rows} == {"done"}
    assert {row["attempts"] for row in rows} == {1}
    assert rows[0]["stream"], rows[0]["key"] == ("IN", "k0")


def test_a_handler_sees_a_message_of_the_worker_plane() -> None:
    seen: list[Message] = []
    headers = pa.array([[{"key": "a", "value": b"1"}], None], HEADERS)
    list(HandlerStage(seen.append, "test", "IN", epoch=7, owner="me").run(iter([batch(["x", "y"], headers=headers)])))
    first, second = seen
    assert isinstance(first, Message)
    assert (first.subject, first.key, first.sequence, first.data) == ("in.x", "x", 1, b"1")
    assert (first.lease.epoch, first.worker_id, first.attempt, first.delivered) == (7, "me", 1, 0)
    assert (first.headers, second.headers) == ({"a": "1"}, {})
    assert (first.partition.id, abs(first.timestamp - time.time()) < 60) == ("0", True)


def test_a_message_without_a_key_is_kept_in_order_by_its_subject() -> None:
    keys = pa.array([None, "k", None], pa.string())
    rows = outcomes(lambda message: None, [batch(["a", "b", "a"], key=keys)])
    assert [row["key"] for row in rows] == ["in.a", "k", "in.a"]


@pytest.mark.parametrize("plain", [True, False])
def test_a_message_that_fails_is_tried_again_and_holds_only_its_own_key(plain: Any) -> None:
    seen: list[tuple[str, int]] = []
    failed: set[int] = set()

    def work(message: RowMessage) -> Any:
        if message.sequence % 10 == 0 and message.attempt < 3:
            failed.add(message.sequence)
            raise OSError("not now")
        seen.append((message.key, message.sequence))
        return Ack()

    async def work_async(message: RowMessage) -> Any:
        await asyncio.sleep(0)
        return work(message)

    rows = outcomes(work if plain else work_async, batches(1_000, 20, size=100))
    assert in_order(seen)
    assert len(seen) == 1_000
    assert {row["sequence"] for row in rows if row["attempts"] == 3} == failed
    assert {row["outcome"] for row in rows} == {"done"}


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.sampled_from("abcde"), min_size=1, max_size=60),
    fails=st.sets(st.integers(1, 60)),
    waits=st.lists(st.floats(0, 0.003), min_size=60, max_size=60),
    size=st.integers(1, 20),
    concurrency=st.integers(1, 6),
)
def test_async_lanes_keep_order_whatever_waits_and_fails(
    keys: Any, fails: Any, waits: Any, size: Any, concurrency: Any
) -> None:
    seen: list[tuple[str, int]] = []
    running: set[str] = set()

    async def work(message: RowMessage) -> Any:
        assert message.key not in running, "two messages of one key at once"
        running.add(message.key)
        assert len(running) <= concurrency
        await asyncio.sleep(waits[message.sequence - 1])
        running.discard(message.key)
        if message.sequence in fails and message.attempt == 1:
            return Retry(after=0.001)
        seen.append((message.key, message.sequence))
        return None

    parts = [batch(keys[at : at + size], at + 1) for at in range(0, len(keys), size)]
    rows = outcomes(work, parts, concurrency=concurrency, window=10)
    assert in_order(seen)
    assert sorted(sequence for _, sequence in seen) == list(range(1, len(keys) + 1))
    assert [row["sequence"] for row in rows] == list(range(1, len(keys) + 1))


def test_lanes_overlap_the_waits_of_different_keys() -> None:
    waiting: set[str] = set()
    everybody = asyncio.Event()

    async def work(message: RowMessage) -> None:
        waiting.add(message.key)
        if len(waiting) == 50:
            everybody.set()
        async with asyncio.timeout(60):
            await everybody.wait()

    rows = outcomes(work, batches(200, 50, size=20))
    assert {row["attempts"] for row in rows} == {1}


def test_a_plain_handler_that_waits_is_moved_to_threads_and_stays_in_order() -> None:
    lock = threading.Lock()
    seen: list[tuple[str, int]] = []
    threads: set[int] = set()

    def work(message: RowMessage) -> None:
        threading.Event().wait(0.001)
        with lock:
            threads.add(threading.get_ident())
            seen.append((message.key, message.sequence))

    # A name of its own: this process remembers that the handlers of this pipeline wait.
    rows = outcomes(work, batches(1_500, 40), concurrency=8, name="waits")
    assert len(threads) > 2
    assert in_order(seen)
    assert [row["sequence"] for row in rows] == list(range(1, 1_501))


def test_stop_leaves_the_rest_untried() -> None:
    seen: list[int] = []

    def work(message: RowMessage) -> None:
        seen.append(message.sequence)
        if message.sequence == 300:
            raise ValueError("broken for good")

    rows = outcomes(work, batches(3_000, 3_000, size=1_000), retries=Retries(attempts=2, delays=(0.0,), then="stop"))
    by_outcome = {row["sequence"]: row["outcome"] for row in rows}
    assert by_outcome[300] == "failed"
    assert rows[299]["error"] == "ValueError: broken for good"
    assert by_outcome[3_000] == "skipped"
    assert max(seen) < 3_000


def test_a_parked_message_holds_the_later_ones_of_its_key_and_no_other() -> None:
    def work(message: RowMessage) -> None:
        if message.sequence == 5:
            raise ValueError("later")

    rows = outcomes(work, [batch(list("ababababab")), batch(list("abab"), 11)], retries=PARK)
    parked = {row["sequence"] for row in rows if row["outcome"] == "parked"}
    assert parked == {5, 7, 9, 11, 13}
    held = {row["sequence"]: row for row in rows}
    assert (held[5]["parked_times"], held[7]["parked_times"], held[5]["value"], held[1]["value"]) == (1, 0, b"5", None)
    assert held[5]["parked_until"] == held[13]["parked_until"] > time.time() + 30


def test_a_parked_key_that_is_due_goes_on_and_one_that_is_not_waits() -> None:
    seen: list[int] = []
    until = pa.array([time.time() - 1, time.time() + 60, 0.0, 0.0])
    again = batch(["due", "not", "due", "not"], parked_until=until, parked_times=pa.array([1, 1, 0, 0], pa.int32()))
    rows = outcomes(lambda message: seen.append(message.sequence), [again], retries=PARK)
    assert seen == [1, 3]
    assert [row["outcome"] for row in rows] == ["done", "parked", "done", "parked"]
    assert [row["parked_times"] for row in rows][1] == 1


def test_an_async_handler_that_hangs_is_cancelled_and_tried_again() -> None:
    async def work(message: RowMessage) -> None:
        if message.sequence == 2 and message.attempt == 1:
            await asyncio.Event().wait()

    rows = outcomes(work, [batch(list("aaa"))], retries=Retries(attempts=2, delays=(0.0,), timeout=0.1, then="stop"))
    assert [row["attempts"] for row in rows] == [1, 2, 1]


def test_a_plain_handler_that_hangs_is_interrupted_and_tried_again() -> None:
    def work(message: RowMessage) -> None:
        if message.sequence == 2 and message.attempt == 1:
            threading.Event().wait(60)

    rows = outcomes(work, [batch(list("aaa"))], retries=Retries(attempts=2, delays=(0.0,), timeout=0.1, then="stop"))
    assert [row["attempts"] for row in rows] == [1, 2, 1]
    assert {row["outcome"] for row in rows} == {"done"}


@pytest.mark.slow
def test_a_handler_deaf_to_its_timeout_ends_the_worker_process() -> None:
    code = """
import signal, sys
sys.path.insert(0, {folder!r})
from test_pipeline_stage import batch, outcomes, Retries
def deaf(message):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    import threading; threading.Event().wait(60)
outcomes(deaf, [batch(["a"])], retries=Retries(timeout=0.2, then="stop"))
"""
    made = subprocess.run(
        [sys.executable, "-c", code.format(folder=os.path.dirname(__file__))],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert made.returncode == -9
    assert b"ran on past its 0.2 s" in made.stderr


def test_the_wait_of_retries_is_bounded_by_the_budget() -> None:
    rows = outcomes(
        lambda message: Retry(after=1000.0, error="busy"), [batch(["a"])], retries=Retries(budget=5.0, then="stop")
    )
    assert (rows[0]["outcome"], rows[0]["error"], rows[0]["attempts"]) == ("failed", "busy", 1)


def test_what_is_no_outcome_counts_as_a_failure() -> None:
    rows = outcomes(lambda message: True, [batch(["a"])])
    assert rows[0]["outcome"] == "failed"
    assert "the handler returned bool" in rows[0]["error"]


def test_results_travel_with_their_rows_for_sinks_of_spark() -> None:
    def work(message: RowMessage) -> Any:
        return Emit(b"r%d" % message.sequence, more=(Emit("second"),)) if message.sequence % 2 else None

    rows = outcomes(work, batches(4, 2), with_results=True)
    assert [row["results"] and [result["value"] for result in row["results"]] for row in rows] == [
        [b"r1", b"second"],
        None,
        [b"r3", b"second"],
        None,
    ]


def test_batch_functions_get_calls_of_the_same_size_however_the_messages_arrived() -> None:
    sizes: list[list[int]] = []
    for size in (7, 100, 1_000):
        calls: list[int] = []
        outcomes(
            lambda table, calls=calls: calls.append(table.num_rows),
            batches(1_000, 5, size=size),
            kind="arrow",
            batch_rows=300,
        )
        sizes.append(calls)
    assert sizes == [[300, 300, 300, 100]] * 3
    assert [part.num_rows for part in rebatched(batches(10, 2, size=3), 4)] == [4, 4, 2]


def test_a_batch_function_that_fails_is_cut_until_the_bad_message_stands_alone() -> None:
    good: list[int] = []

    def work(table: pa.Table) -> None:
        if 13 in table.column("sequence").to_pylist():
            raise ValueError("thirteen")
        good.extend(table.column("sequence").to_pylist())

    retries = Retries(attempts=1, delays=(0.0,), then="park", park_delays=(60.0,))
    rows = outcomes(work, batches(32, 4, size=32), kind="arrow", retries=retries)
    found = {row["sequence"]: row["outcome"] for row in rows}
    assert {sequence for sequence, outcome in found.items() if outcome == "parked"} == {13, 17, 21, 25, 29}
    assert sorted(good) == [sequence for sequence in range(1, 33) if found[sequence] == "done"]


def test_a_batch_function_over_pandas_gives_results_by_sequence() -> None:
    def work(frame: Any) -> Any:
        return frame.assign(value=frame["value"] + b"!")[["sequence", "value"]]

    rows = outcomes(work, batches(3, 3), kind="pandas", with_results=True)
    assert [row["results"][0]["value"] for row in rows] == [b"1!", b"2!", b"3!"]


def test_a_rejected_message_is_never_tried_again() -> None:
    calls: list[int] = []

    def work(message: RowMessage) -> Any:
        calls.append(message.sequence)
        return Reject("no")

    decision = Retries(then="park").decide(Reject("no"), attempt=1, waited=0.0, parked=0)
    assert decision.outcome == "dead-lettered"  # type: ignore[union-attr]
    assert decision.error == "no"  # type: ignore[union-attr]


def test_a_parked_message_is_dead_lettered_when_its_drives_are_used_up() -> None:
    policy = Retries(attempts=1, then="park", park_limit=2, park_delays=(10.0, 60.0))
    ends = [policy.decide(Retry(error="x"), attempt=1, waited=0.0, parked=parked) for parked in range(3)]
    assert [(end.outcome.value, end.park_for) for end in ends] == [  # type: ignore[union-attr]
        ("parked", 10.0),
        ("parked", 60.0),
        ("dead-lettered", 0.0),
    ]


def test_rows_that_nobody_keeps_hold_what_is_counted_and_name_what_failed() -> None:
    def work(message: RowMessage) -> None:
        if message.sequence == 2:
            raise ValueError("two")

    retries = Retries(attempts=1, delays=(0.0,), then="stop")
    stage = HandlerStage(work, "test", "IN", retries=retries, shape=RowShape(counted=True))
    rows = [row for part in stage.run(iter([batch(["a", "b", "c"])])) for row in part.to_pylist()]
    assert len(rows) == 1
    assert (rows[0]["messages"], rows[0]["dead"], rows[0]["parked"], rows[0]["failed"]) == (3, 0, 0, 1)
    assert rows[0]["first_failed"] == "2 in.b ValueError: two"


def test_a_parked_message_waits_as_long_as_its_handler_asks_and_a_postponed_one_loses_no_attempt() -> None:
    policy = Retries(attempts=1, then="park", park_delays=(10.0,))
    asked = policy.decide(Retry(after=7.0), attempt=1, waited=0.0, parked=0)
    assert (asked.outcome.value, asked.park_for, asked.counted) == ("parked", 7.0, True)  # type: ignore[union-attr]
    later = policy.decide(ParkKey(3.0, "down"), attempt=1, waited=0.0, parked=2)
    assert (later.outcome.value, later.park_for, later.counted) == ("parked", 3.0, False)  # type: ignore[union-attr]
    elsewhere = Retries(attempts=2).decide(ParkKey(3.0), attempt=1, waited=0.0, parked=0)
    assert elsewhere == Again(3.0, "")  # where nothing is parked it is a retry like any other


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_message_that_is_set_aside_lets_later_ones_of_its_key_pass_until_it_is_due(kind: Any) -> None:
    seen: list[int] = []

    def work(message: RowMessage) -> Any:
        seen.append(message.sequence)
        return ParkAlone(60.0, "later") if message.sequence == 1 and len(seen) < 4 else None

    async def work_async(message: RowMessage) -> Any:
        await asyncio.sleep(0)
        return work(message)

    handler = work if kind == "plain" else work_async
    rows = outcomes(handler, [batch(["a", "a", "b"])], retries=PARK)
    assert sorted(seen) == [1, 2, 3]
    assert [row["outcome"] for row in rows] == ["parked", "done", "done"]
    (kept,) = [row for row in rows if row["outcome"] == "parked"]
    assert (kept["parked_times"], kept["parked_alone"]) == (1, True)
    assert kept["parked_until"] > time.time() + 30

    def again(until: float) -> list[Any]:
        columns = {"parked_until": [until, 0.0, 0.0], "parked_times": [1, 0, 0], "parked_alone": [True, False, False]}
        made = batch(["a", "a", "b"], **{name: pa.array(values) for name, values in columns.items()})
        return outcomes(handler, [made], retries=PARK)

    seen.clear()
    rows = again(kept["parked_until"])
    assert sorted(seen) == [2, 3]
    assert [row["outcome"] for row in rows] == ["parked", "done", "done"]
    assert (rows[0]["parked_until"], rows[0]["parked_times"], rows[0]["parked_alone"]) == (
        kept["parked_until"],
        1,
        True,
    )
    seen[:] = [0, 0, 0, 0]
    assert [row["outcome"] for row in again(time.time() - 1)] == ["done"] * 3
    assert seen.index(1) < seen.index(2)


def test_a_message_set_aside_is_left_alone_when_the_pipeline_stops_before_it() -> None:
    def work(message: RowMessage) -> Any:
        return Reject("no") if message.sequence == 4 else Retry(error="down")

    columns = {"parked_until": [0.0, time.time() + 60], "parked_times": [0, 2], "parked_alone": [False, True]}
    made = batch(["a", "b"], **{name: pa.array(values) for name, values in columns.items()})
    stage = HandlerStage(
        work,
        "test",
        "IN",
        retries=Retries(attempts=1, delays=(0.0,), then="stop"),
        shape=RowShape(parking=True),
    )
    rows = [row for part in stage.run(iter([completed(made)])) for row in part.to_pylist()]
    assert [row["outcome"] for row in rows] == ["failed", "parked"]


def test_where_nothing_is_parked_a_message_set_aside_is_a_retry_like_any_other() -> None:
    decided = Retries(attempts=2).decide(ParkAlone(3.0), attempt=1, waited=0.0, parked=0)
    assert decided == Again(3.0, "")
    parking = PARK.decide(ParkAlone(3.0, "down", tried=False), attempt=1, waited=0.0, parked=0)
    assert (parking.counted, parking.alone) == (False, True)  # type: ignore[union-attr]


def test_a_batch_function_leaves_alone_what_waits_alone() -> None:
    seen: list[int] = []
    columns = {"parked_until": [time.time() + 60, 0.0], "parked_times": [1, 0], "parked_alone": [True, False]}
    made = batch(["a", "a"], **{name: pa.array(values) for name, values in columns.items()})

    def work(table: pa.Table) -> None:
        seen.extend(table.column("sequence").to_pylist())

    rows = outcomes(work, [made], kind="arrow", retries=PARK)
    assert seen == [2]
    assert [row["outcome"] for row in rows] == ["parked", "done"]


def test_rows_that_nobody_keeps_bring_what_is_parked_as_one_block() -> None:
    async def work(message: RowMessage) -> Any:
        return Retry(5.0, "down") if message.sequence in (2, 3) else None

    stage = HandlerStage(work, "test", "IN", retries=PARK, shape=RowShape(counted=True, parking=True))
    began = time.time()
    (made,) = stage.run(iter([batch(["a", "b", "c", "b"])]))
    (row,) = made.to_pylist()
    assert (row["messages"], row["parked"], row["dead"], row["failed"]) == (4, 3, 0, 0)
    (parked,) = unpacked(iter([made]))
    assert parked.schema == PARKED
    found = parked.to_pylist()
    assert [(one["sequence"], one["key"], one["value"], one["parked_times"]) for one in found] == [
        (2, "b", b"2", 1),
        (3, "c", b"3", 1),
        (4, "b", b"4", 0),
    ]
    assert row["due"] == min(one["parked_until"] for one in found) >= began + 5
    assert found[0]["parked_until"] == found[2]["parked_until"]
    (empty,) = stage.run(iter([batch(["a"])]))
    assert empty.to_pylist()[0]["block"] is None


def test_a_message_that_the_handler_put_to_rest_counts_as_dead_lettered_without_a_letter() -> None:
    rows = outcomes(lambda message: AlreadyDeadLettered("gone") if message.sequence == 2 else None, batches(3, 3))
    assert [row["outcome"] for row in rows] == ["done", "dead-lettered", "done"]
    assert rows[1]["error"] == "gone"


def test_a_key_of_several_fields_is_not_that_of_others_with_the_same_text() -> None:
    values = [b'{"a":"ab","b":"c"}', b'{"a":"a","b":"bc"}', b'{"a":"ab","b":"c","x":1}', b'{"a":"ab"}']
    keyed = PayloadKey("a,b", 8).rekeyed(batch(["s"] * 4, value=pa.array(values, pa.binary())))
    assert keyed.column("key").to_pylist() == ["2:ab1:c", "1:a2:bc", "2:ab1:c", None]

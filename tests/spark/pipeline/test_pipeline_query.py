"""Pipelines on a real Spark and a real server: order, outcomes, policies and sinks of both plans."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.cloudpickle import register_pickle_by_value

from parti.dead_letters import DeadLetter, DeadLetterReader, read_letter
from parti.errors import FatalError
from parti.outcomes import Reject
from parti.spark.pipeline import Emit, Outcomes, Pipeline, Results, Retries
from parti.spark.pipeline.driver.lease import Standby
from parti.testing import eventually_blocking
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.wire.requests import headers_size
from parti.wire.stored import StoredMessage
from support.spark_streams import Stream

pytestmark = pytest.mark.spark
register_pickle_by_value(sys.modules[__name__])  # tasks cannot import test modules

PLANS = pytest.mark.parametrize("plan", ["fused", "shuffled"])


class Log:
    """What handlers did, whichever process they ran in: one line a call, appended whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, message: Any, text: str = "") -> None:
        with self.path.open("ab", buffering=0) as file:
            file.write(f"{message.key} {message.sequence} {message.attempt} {text}\n".encode())

    def calls(self) -> list[tuple[str, int]]:
        if not self.path.exists():
            return []
        return [(line.split()[0], int(line.split()[1])) for line in self.path.read_text().splitlines()]

    def inversions(self) -> int:
        """Calls below the highest of their key, in the order in which they were made."""
        highest: dict[str, int] = defaultdict(int)
        wrong = 0
        for key, sequence in self.calls():
            wrong += sequence < highest[key]
            highest[key] = max(highest[key], sequence)
        return wrong


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "calls")


@pytest.fixture
def make(stream: Any, tmp_path: Path) -> Callable[..., Pipeline]:
    """A pipeline over the test's stream that ends when all is done."""

    def made(handler: Callable[..., Any], **more: Any) -> Pipeline:
        settings: dict[str, Any] = {
            "name": f"p-{stream.name}",
            "stream": stream.name,
            "handler": handler,
            "key": "2",
            "checkpoint": str(tmp_path / "checkpoint"),
            "trigger": "available-now",
            "nats": ConnectOptions(servers=(stream.url,)),
            "retries": Retries(attempts=2, delays=(0.01,)),
        }
        return Pipeline(**(settings | more))

    return made


def run(pipeline: Pipeline, spark: Any) -> Any:
    running = pipeline.start(spark)
    with running:
        assert running.wait(100)
    return running


def rows(spark: Any, folder: Path) -> list[Any]:
    return list(spark.read.parquet(str(folder)).orderBy("sequence").collect())


def stored(stream: Any, name: str) -> list[StoredMessage]:
    last = stream.connection.api(f"STREAM.INFO.{name}")["state"]["last_seq"]
    found = []
    for sequence in range(1, last + 1):
        answer = stream.connection.api(f"STREAM.MSG.GET.{name}", {"seq": sequence})
        found.append(StoredMessage.from_json(answer["message"]))
    return found


def make_results(stream: Any, **config: Any) -> str:
    name = f"{stream.name}-out"
    body = {"name": name, "subjects": [f"{name}.>"], "allow_direct": True, "allow_atomic": True, "storage": "file"}
    stream.connection.api(f"STREAM.CREATE.{name}", body | config)
    return name


@PLANS
def test_each_message_is_handled_once_and_in_order_for_its_key(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, tmp_path: Path, plan: Any
) -> None:
    stream.publish(600, subject="k{0}")
    stream.publish(600, subject="k7")
    made = make(log.note, plan=plan, batch_size=500, outcomes=Outcomes(parquet=str(tmp_path / "outcomes")))
    running = run(made, spark)
    assert running.plan.kind == plan
    assert sorted(sequence for _, sequence in log.calls()) == list(range(1, 1_201))
    assert log.inversions() == 0
    found = rows(spark, tmp_path / "outcomes")
    assert [(row.sequence, row.outcome, row.attempts) for row in found] == [(n, "done", 1) for n in range(1, 1_201)]
    assert {row.batch for row in found} == {0, 1, 2}
    assert (running.totals.messages, running.totals.done, running.totals.batches) == (1_200, 1_200, 3)


@PLANS
def test_async_handlers_overlap_and_results_are_stored_in_order(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, plan: Any
) -> None:
    for _ in range(10):
        stream.publish(30, subject="k{0}")
    out = make_results(stream)

    async def work(message: Any) -> Any:
        await asyncio.sleep(0.01)
        return Emit(str(message.sequence))

    run(make(work, plan=plan, results=Results(subject=f"{out}.{{key}}"), key="subject", batch_size=100), spark)
    found = stored(stream, out)
    assert sorted(int(message.data) for message in found) == list(range(1, 301))
    highest: dict[str, int] = {}
    for message in found:
        assert int(message.data) > highest.get(message.subject, 0)
        highest[message.subject] = int(message.data)


@PLANS
def test_a_replayed_batch_stores_each_result_once(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, tmp_path: Path, plan: Any
) -> None:
    stream.publish(200, subject="k{0}")
    out = make_results(stream)
    broken = tmp_path / "broken"
    broken.touch()

    def sink(frame: Any, number: int) -> None:
        frame.write.format("noop").mode("append").save()
        if number == 1 and broken.exists():
            raise OSError("the disk is full")

    made = make(
        lambda message: Emit(message.data),
        plan=plan,
        batch_size=100,
        results=Results(subject=f"{out}.{{key}}", parquet=str(tmp_path / "results")),
        outcomes=Outcomes(write=sink),
    )
    with pytest.raises(FatalError, match="the disk is full"):
        run(made, spark)
    broken.unlink()
    run(made, spark)
    assert Counter(message.data for message in stored(stream, out)) == Counter(b"m%d" % n for n in range(1, 201))
    found = rows(spark, tmp_path / "results")
    assert [(row.sequence, bytes(row.value)) for row in found] == [(n, b"m%d" % n) for n in range(1, 201)]
    assert sorted(path.name for path in (tmp_path / "results").glob("*")) == ["batch=0", "batch=1"]


def test_results_are_stored_once_also_when_the_stream_has_forgotten_their_ids(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, tmp_path: Path
) -> None:
    stream.publish(50, subject="k{0}")
    out = make_results(stream, duplicate_window=100_000_000)
    broken = tmp_path / "broken"
    broken.touch()

    def sink(frame: Any, number: int) -> None:
        frame.write.format("noop").mode("append").save()
        if broken.exists():
            raise OSError("not yet")

    made = make(
        lambda message: Emit(message.data), results=Results(subject=f"{out}.{{key}}"), outcomes=Outcomes(write=sink)
    )
    with pytest.raises(FatalError, match="not yet"):
        run(made, spark)
    assert len(stored(stream, out)) == 50
    broken.unlink()
    run(made, spark)
    assert Counter(message.data for message in stored(stream, out)) == Counter(b"m%d" % n for n in range(1, 51))


@PLANS
def test_what_no_handler_takes_rests_in_the_dead_letter_stream_with_its_reason(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, plan: Any
) -> None:
    stream.publish(10, subject="k{0}", headers={"trace": "abc"})

    def work(message: Any) -> Any:
        if message.sequence == 3:
            return Reject("not for us")
        if message.sequence == 7:
            raise ValueError(f"seven at attempt {message.attempt}")
        return None

    running = run(make(work, plan=plan), spark)
    assert (running.totals.done, running.totals.dead_lettered) == (8, 2)
    letters = [read_letter(message) for message in stored(stream, f"{stream.name}_DLQ")]
    by_sequence = {letter.original_sequence: letter for letter in letters}
    assert (by_sequence[3].reason, by_sequence[3].error, by_sequence[3].attempts) == ("rejected", "not for us", 1)
    assert (by_sequence[7].reason, by_sequence[7].attempts) == ("max_deliver", 2)
    assert by_sequence[7].error == "ValueError: seven at attempt 2"
    assert (by_sequence[7].subject, by_sequence[7].data) == (f"{stream.name}.k7", b"m7")
    assert by_sequence[7].headers["trace"] == "abc"


def test_messages_as_large_as_the_server_takes_rest_whole_in_the_dead_letter_stream(
    make: Callable[..., Pipeline], spark: Any, stream: Stream
) -> None:
    limit, sent = 1 << 20, []
    for below in (0, 1, 300, 800, 1_700, 3_000):
        for headers in ({}, {"trace": "t" * 400}, {"trace": "t" * 64_000}):
            data = "d" * (limit - below - headers_size(headers))
            stream.publish(1, payload=data, headers=headers)
            sent.append((data.encode(), headers))

    async def letters() -> list[DeadLetter]:
        async with await connect(ConnectOptions(servers=(stream.url,))) as connection:
            return [letter async for letter in DeadLetterReader(JetStreamApi(connection), stream.name).walk()]

    running = run(make(lambda message: Reject("no")), spark)
    assert running.totals.dead_lettered == len(sent)
    found = sorted(asyncio.run(letters()), key=lambda letter: letter.original_sequence)
    assert [(letter.data, letter.headers) for letter in found] == sent
    assert sum(letter.extension.parts > 0 for letter in found) >= len(sent) // 2, "most did not fit"


@PLANS
def test_a_killed_python_worker_loses_and_doubles_nothing(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, tmp_path: Path, plan: Any
) -> None:
    for _ in range(10):
        for key in range(5):
            stream.publish(60, subject=f"k{key}")
    out = make_results(stream)
    killed = tmp_path / "killed"

    def work(message: Any) -> Any:
        if message.sequence == 1_500 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Emit(message.data)

    run(make(work, plan=plan, results=Results(subject=f"{out}.{{key}}")), spark)
    assert killed.exists()
    found = stored(stream, out)
    assert Counter(message.data for message in found) == Counter(b"m%d" % n for n in range(1, 3_001))
    highest: dict[str, int] = defaultdict(int)
    for message in found:
        assert int(message.data[1:]) > highest[message.subject]
        highest[message.subject] = int(message.data[1:])


def test_a_parked_key_waits_as_a_whole_and_is_driven_again_although_nothing_new_comes(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, tmp_path: Path
) -> None:
    stream.publish(20, subject="k1")
    stream.publish(20, subject="k2")
    fixed = tmp_path / "fixed"

    def work(message: Any) -> None:
        if message.sequence == 5 and not fixed.exists():
            raise OSError("the other side is down")
        log.note(message)

    retries = Retries(attempts=1, delays=(0.01,), then="park", park_delays=(0.5,))
    made = make(work, retries=retries, trigger="50ms", batch_size=15)
    with made.start(spark) as running:
        eventually_blocking(lambda: running.totals.parked == 16, 90, "the key is parked")
        eventually_blocking(lambda: len(log.calls()) == 24, 60, "the other key is done")
        stream.publish(5, subject="k1")
        eventually_blocking(lambda: running.totals.parked == 21, 60, "a later message waits behind the parked one")
        fixed.touch()
        eventually_blocking(lambda: len(log.calls()) == 45, 60, "all is done")
        assert running.totals.parked == 0 or running.wait(0) is False
    assert log.inversions() == 0
    assert sorted(sequence for _, sequence in log.calls()) == list(range(1, 46))


@PLANS
def test_a_stop_lets_the_batch_under_way_end_and_be_committed(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, plan: Any
) -> None:
    stream.publish(40, subject="k{0}")

    async def work(message: Any) -> None:
        log.note(message)
        await asyncio.sleep(0.3)

    made = make(
        work,
        plan=plan,
        trigger="100ms",
        key="subject",
        concurrency=4,
        grace=120.0,
        commit="durable",
        durable="position",
    )
    with made.start(spark):
        eventually_blocking(lambda: bool(log.calls()), 90, "the batch is under way")
    assert sorted(sequence for _, sequence in log.calls()) == list(range(1, 41))
    assert (
        stream.connection.api(f"CONSUMER.INFO.{stream.name}.position")["num_pending"] == 0
    )  # the server knows of the last batch, too
    stream.publish(2, subject="k{0}")
    run(make(work, plan=plan, key="subject"), spark)
    assert sorted(sequence for _, sequence in log.calls()) == list(range(1, 43))


def test_a_stop_without_grace_interrupts_the_batch_and_the_next_run_replays_it(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, tmp_path: Path
) -> None:
    stream.publish(4, subject="k{0}")
    free = tmp_path / "free"

    async def work(message: Any) -> None:
        log.note(message)
        while not free.exists():  # noqa: ASYNC110 - the test is another process
            await asyncio.sleep(0.05)

    made = make(work, trigger="100ms", key="subject", grace=0.0)
    with made.start(spark):
        eventually_blocking(lambda: len(log.calls()) == 4, 90, "the batch is under way")
    free.touch()
    run(make(work, key="subject"), spark)
    assert sorted(sequence for _, sequence in log.calls()) == [1, 1, 2, 2, 3, 3, 4, 4]


MARKERS = "mapreduce.fileoutputcommitter.marksuccessfuljobs"


@pytest.mark.parametrize("markers", ["true", "false"])
def test_parked_messages_outlive_the_query(
    make: Callable[..., Pipeline],
    spark: Any,
    stream: Stream,
    log: Log,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    markers: Any,
) -> None:
    spark.conf.set(MARKERS, markers)  # many clusters leave out the file _SUCCESS
    request.addfinalizer(lambda: spark.conf.unset(MARKERS))
    stream.publish(6, subject="k1")
    fixed = tmp_path / "fixed"

    def work(message: Any) -> None:
        if not fixed.exists():
            raise OSError("down")
        log.note(message)

    retries = Retries(attempts=1, delays=(0.01,), then="park", park_delays=(0.1,))
    assert run(make(work, retries=retries, commit="none"), spark).totals.parked == 6
    stream.connection.api(f"STREAM.PURGE.{stream.name}")
    fixed.touch()
    with make(work, retries=retries, trigger="50ms").start(spark):
        eventually_blocking(lambda: len(log.calls()) == 6, 90, "they are done, though the stream has lost them")
    assert [sequence for _, sequence in log.calls()] == [1, 2, 3, 4, 5, 6]


def test_the_position_stays_with_the_pipeline_when_it_is_run_with_a_lease_and_without(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log
) -> None:
    """A standby is added, taken away, and added again with a bucket that was recreated: nothing is handled twice."""
    bucket = f"leases-{stream.name}"

    def work(message: Any) -> None:
        log.note(message, str(message.lease.epoch))

    total = 0
    for mode in ("plain", "leased", "plain", "recreated", "leased", "plain"):
        if mode == "recreated":
            stream.connection.api(f"STREAM.DELETE.KV_{bucket}")
        stream.publish(5, subject="k{0}")
        total += 5
        standby = None if mode == "plain" else Standby(bucket=bucket, ttl=3.0, renew_every=0.5)
        run(make(work, standby=standby, plan="fused"), spark)
        assert sorted(sequence for _, sequence in log.calls()) == list(range(1, total + 1)), mode
    epochs = [int(line.split()[3]) for line in log.path.read_text().splitlines()]
    assert epochs == sorted(epochs)  # a sink that compares them refuses nobody


@pytest.mark.parametrize("leased", [False, True])
def test_a_driver_that_ended_while_it_wrote_its_first_plan_keeps_nobody_from_going_on(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, tmp_path: Path, leased: bool
) -> None:
    begun = tmp_path / "checkpoint" / "epoch-0000000001" / "offsets" / ".0.36b3a5c5-afc1-42e3.tmp"
    begun.parent.mkdir(parents=True)
    begun.write_text("v1")
    stream.publish(5, subject="k{0}")
    standby = Standby(bucket=f"leases-{stream.name}", ttl=3.0, renew_every=0.5) if leased else None
    run(make(log.note, standby=standby, plan="fused"), spark)
    assert sorted(sequence for _, sequence in log.calls()) == [1, 2, 3, 4, 5]


def test_a_driver_without_a_lease_is_refused_while_another_one_holds_it(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log
) -> None:
    standby = Standby(bucket=f"leases-{stream.name}", ttl=3.0, renew_every=0.3)
    with make(log.note, standby=standby, trigger="100ms").start(spark) as running:
        stream.publish(5, subject="k{0}")
        eventually_blocking(lambda: len(log.calls()) == 5, 90, "it runs")
        with pytest.raises(FatalError, match=f"{running.owner} runs pipeline .* stop it first"):
            run(make(log.note), spark)


@pytest.mark.parametrize("partition_by", ["token:3", "token:2"])
def test_a_partition_token_that_splits_keys_does_not_break_their_order(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, partition_by: Any
) -> None:
    """Token 2 is the key; token 3 is a partition that has nothing to do with it."""
    for _ in range(4):
        stream.publish(300, subject="k7.{0}")
    run(make(log.note, plan="shuffled", key="2", partition_by=partition_by), spark)
    assert len(log.calls()) == 1200
    assert log.inversions() == 0


def test_stop_fails_the_query_and_commits_nothing_of_the_batch(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log, tmp_path: Path
) -> None:
    stream.publish(10, subject="k{0}")
    fixed = tmp_path / "fixed"

    def work(message: Any) -> None:
        if message.sequence == 4 and not fixed.exists():
            raise ValueError("four")
        log.note(message)

    made = make(work, retries=Retries(attempts=1, delays=(0.0,), then="stop"))
    with pytest.raises(FatalError, match=r"1 messages of batch 0 failed, first 4 .*ValueError: four"):
        run(made, spark)
    fixed.touch()
    run(made, spark)
    assert {sequence for _, sequence in log.calls()} == set(range(1, 11))


def test_the_key_may_be_a_field_of_the_payload(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, log: Log
) -> None:
    payload = '{{"customer": {{"id": {0}}}}}'
    stream.publish(40, subject="a", payload=payload)
    stream.publish(1, subject="b", payload="no json")
    stream.publish(1, subject="c", payload='{{"customer": null}}')
    run(make(log.note, plan="shuffled", key="payload:customer.id", partitions=8), spark)
    keys = {sequence: key for key, sequence in log.calls()}
    assert (keys[1], keys[40]) == ("1", "40")
    assert (keys[41], keys[42]) == (f"{stream.name}.b", f"{stream.name}.c")


@PLANS
def test_batch_functions_run_in_both_plans(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, tmp_path: Path, plan: Any
) -> None:
    stream.publish(100, subject="k{0}")

    def work(table: pa.Table) -> pa.Table:
        values = [value.decode() + "!" for value in table.column("value").to_pylist()]
        return pa.table({"sequence": table.column("sequence"), "value": values})

    run(make(work, kind="arrow", plan=plan, results=Results(parquet=str(tmp_path / "out"))), spark)
    assert [bytes(row.value) for row in rows(spark, tmp_path / "out")] == [b"m%d!" % n for n in range(1, 101)]


def test_a_work_queue_is_emptied_as_its_messages_are_done(
    make_stream: Callable[..., Stream], spark: Any, tmp_path: Path, log: Log
) -> None:
    stream = make_stream(retention="workqueue")
    stream.publish(30, subject="k{0}")
    nats = ConnectOptions(servers=(stream.url,))
    made = Pipeline(
        name="queue",
        stream=stream.name,
        handler=log.note,
        key="2",
        checkpoint=str(tmp_path / "c"),
        trigger="available-now",
        commit="purge",
        nats=nats,
    )
    run(made, spark)
    assert len(log.calls()) == 30
    assert stream.state()["messages"] == 0


def test_the_measured_cost_of_the_handler_decides_at_the_next_start(
    make: Callable[..., Pipeline], spark: Any, stream: Stream, tmp_path: Path
) -> None:
    stream.publish(300, subject="k{0}")

    def work(message: Any) -> None:
        until = time.perf_counter() + 0.0005
        while time.perf_counter() < until:
            pass

    assert run(make(work), spark).plan.kind == "fused"
    stream.publish(10, subject="k{0}")
    second = run(make(work), spark)
    assert second.plan.kind == "shuffled"
    assert "measured" in second.plan.reason
    assert json.loads((tmp_path / "checkpoint/epoch-0000000000/cost.json").read_text())["handler_us"] > 400

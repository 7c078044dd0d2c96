"""Delivery on Spark: the promises of the TaskConsumer, kept by a pipeline."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from parti.clock import SystemClock
from parti.config.deliver import DeliverSection
from parti.dead_letters import DeadLetter, DeadLetterReader
from parti.delivery import AddressGuard, TaskConsumer
from parti.delivery.courier import Courier
from parti.delivery.engine_lock import spark_claim
from parti.delivery.gate import Gate
from parti.delivery.guard import AddrInfo
from parti.delivery.names import DeliveryNames
from parti.delivery.order import RuleBook
from parti.delivery.pending import TaskReader
from parti.delivery.policy import AttemptOutcome
from parti.delivery.recorder import AttemptRecord
from parti.delivery.secrets import SecretStore
from parti.delivery.transport import HttpTransport
from parti.errors import ConfigError, UsageError
from parti.spark import delivery_task
from parti.spark.delivery import Span, delivery_pipeline
from parti.spark.delivery_engine import Announcer
from parti.spark.delivery_task import Deliver, DeliverySession, TaskRight
from parti.spark.pipeline import Pipeline
from parti.spark.pipeline.fence import fence_subject, raise_fence
from parti.spark.pipeline.lease import Standby
from parti.spark.pipeline.query import PipelineFailed
from parti.spark.pipeline.stage import HandlerStage
from parti.testing import eventually_blocking
from parti.testing.http_server import Answer, FaultHttpServer, ReceivedRequest
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.errors import MessageNotFound
from parti.wire.kv import KeyValue
from parti.wire.options import ConnectOptions

pytestmark = pytest.mark.spark


@pytest.fixture
def endpoint() -> Iterator[FaultHttpServer]:
    """An endpoint that answers while the test's own thread waits for Spark."""
    loop, made = asyncio.new_event_loop(), FaultHttpServer()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(made.__aenter__(), loop).result(60)
        yield made
        asyncio.run_coroutine_threadsafe(made.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture
def make(stream: Any, endpoint: FaultHttpServer, tmp_path: Path) -> Callable[..., Pipeline]:
    """A delivery pipeline over the test's stream that ends when nothing more is due."""

    def made(span: Span | None = None, **changes: Any) -> Pipeline:
        config = msgspec.structs.replace(
            DeliverSection(),
            **({"stream": stream.name, "allow_addresses": (endpoint.allowed,), "jitter": 0.0} | changes),
        )
        pipeline = delivery_pipeline(
            config,
            ConnectOptions(servers=(stream.url,)),
            checkpoint=str(tmp_path / ("checkpoint" if span is None else "replay")),
            span=span,
            trigger="available-now",
            outcomes=str(tmp_path / "outcomes"),
        )
        assert (pipeline.standby is None) == (span is not None)
        # A lease that a loaded machine does not outlast, in a bucket of the test's own.
        patient = Standby(bucket=f"{stream.name}-drivers", ttl=60.0, renew_every=2.0, margin=0.5)
        return replace(pipeline, standby=patient if span is None else None)

    return made


def task(endpoint: FaultHttpServer, document: str, number: int, path: str = "/hook") -> dict[str, Any]:
    return {
        "triggerId": "t1",
        "database": "shop",
        "collection": "orders",
        "documentId": document,
        "event": "update",
        "url": endpoint.url + path,
        "payload": {"n": number},
    }


def publish(
    stream: Any, endpoint: FaultHttpServer, document: str, number: int, path: str = "/hook", trigger: str = "t1"
) -> None:
    made = task(endpoint, document, number, path) | {"triggerId": trigger}
    text = json.dumps(made).replace("{", "{{").replace("}", "}}")
    stream.publish(1, subject=f"shop.orders.{document}", payload=text)


def run(pipeline: Pipeline, spark: Any) -> Any:
    with pipeline.start(spark) as running:
        assert running.wait(240)
        return running.totals, running.parked_due


def letters(stream: Any) -> list[DeadLetter]:
    async def gather() -> list[DeadLetter]:
        connection = await connect(ConnectOptions(servers=(stream.url,)))
        try:
            found = DeadLetterReader(JetStreamApi(connection), stream.name).walk()
            return [letter async for letter in found]
        finally:
            await connection.close()

    return asyncio.run(gather())


def word(stream: Any) -> tuple[str, int] | None:
    """What the engine spark has left for the other: its checkpoint, and how much is parked there."""

    async def read() -> tuple[str, int] | None:
        connection = await connect(ConnectOptions(servers=(stream.url,)))
        try:
            found = await spark_claim(await KeyValue.open(JetStreamApi(connection), DeliveryNames(stream.name).bucket))
            return None if found is None else (found[0].checkpoint, found[0].parked)
        finally:
            await connection.close()

    return asyncio.run(read())


def config_of(pipeline: Pipeline) -> DeliverSection:
    assert isinstance(pipeline.handler, Deliver)
    return pipeline.handler.config


def arrived(endpoint: FaultHttpServer, path: str = "/hook") -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for body in endpoint.bodies(path):
        found.setdefault(body["documentId"], []).append(body["payload"]["n"])
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tasks_arrive_in_order_and_what_waits_is_parked_with_its_document_alone(
    make: Callable[..., Pipeline], spark: Any, stream: Any, endpoint: FaultHttpServer, tmp_path: Path
) -> None:
    endpoint.on("/bad", Answer(503), Answer(200))
    endpoint.on("/no", Answer(422, body=b"never"))
    endpoint.on("/late", Answer(503), Answer(200))
    publish(stream, endpoint, "held", 1, "/bad")
    publish(stream, endpoint, "passed", 1, "/late", trigger="t2")
    for number in range(1, 6):
        for document in ("a", "b", "held"):
            publish(stream, endpoint, document, number)
    publish(stream, endpoint, "passed", 2, trigger="t2")
    publish(stream, endpoint, "a", 6, "/no")
    stream.publish(1, subject="shop.orders.x", payload="no json")
    made = make(schedule=("1s",) * 3, triggers=("t2: order=skip",))
    totals, due = run(made, spark)
    assert (totals.done, totals.dead_lettered, totals.parked) == (11, 2, 7)
    assert due is not None
    # The other engine, and a driver with another folder, would pass what waits here.
    assert word(stream) == (made.checkpoint, 7)
    with pytest.raises(UsageError, match="7 tasks"):
        asyncio.run(TaskConsumer(config_of(made), nats=made.nats).start())
    with pytest.raises(UsageError, match="go on with that folder"):
        delivery_pipeline(config_of(made), made.nats, checkpoint=str(tmp_path / "other"))
    assert arrived(endpoint) == {document: list(range(1, 6)) for document in ("a", "b")} | {"passed": [2]}
    while due is not None:  # what is due by now comes with the next run, in order behind its head
        totals, due = run(made, spark)
    assert arrived(endpoint) == {document: list(range(1, 6)) for document in ("a", "b", "held")} | {"passed": [2]}
    assert arrived(endpoint, "/late") == {"passed": [1, 1]}
    assert word(stream) == (made.checkpoint, 0)
    tries = [(r.headers["x-parti-attempt"], r.headers["webhook-id"]) for r in endpoint.received if r.path == "/bad"]
    assert [attempt for attempt, _ in tries] == ["1", "2"]
    assert len({webhook_id for _, webhook_id in tries}) == 1
    buried = {letter.reason: letter for letter in letters(stream)}
    assert set(buried) == {"rejected", "malformed"}
    assert (buried["rejected"].extension.status, buried["rejected"].extension.response) == (422, b"never")
    rows = spark.read.parquet(str(tmp_path / "outcomes")).collect()
    assert {row.outcome for row in rows} == {"done", "dead-lettered", "parked"}
    position = stream.connection.api(f"CONSUMER.INFO.{stream.name}.TriggerDeliveryWorker")
    assert position["num_pending"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_that_finds_the_other_engine_at_work_sends_nothing(
    make: Callable[..., Pipeline], spark: Any, stream: Any, endpoint: FaultHttpServer
) -> None:
    publish(stream, endpoint, "a", 1)
    made = make()
    asyncio.run(stored(stream, f"$KV.{stream.name}_DELIVER.slot.0", b'{"member":"other","nonce":"x"}'))
    with pytest.raises(PipelineFailed, match=r"slot\.0.*stop it first"):
        run(made, spark)
    assert not endpoint.received
    assert word(stream) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_driver_stands_by_and_goes_on_where_the_first_has_stopped(
    make: Callable[..., Pipeline], spark: Any, stream: Any, endpoint: FaultHttpServer
) -> None:
    for number in range(1, 6):
        publish(stream, endpoint, "a", number)
    made = replace(make(), trigger="0s")
    with made.start(spark) as first:
        eventually_blocking(lambda: first.totals.done == 5, 180.0, "the first driver has delivered")
        with made.start(spark) as second:
            publish(stream, endpoint, "a", 6)
            eventually_blocking(lambda: first.totals.done == 6, 180.0, "the first driver delivers on")
            assert not second.started.is_set()
            first.stop()
            for number in range(7, 11):
                publish(stream, endpoint, "a", number)
            eventually_blocking(lambda: len(set(arrived(endpoint)["a"])) == 10, 180.0, "the second driver delivers")
    # The batch before the stop may not be committed: then the second driver repeats it, in order and as its own.
    seen = [(r.json()["payload"]["n"], int(r.headers["x-parti-epoch"])) for r in endpoint.received]
    assert list(dict.fromkeys(number for number, _ in seen)) == list(range(1, 11))
    first_epoch = seen[0][1]
    assert [epoch for _, epoch in seen] == sorted(epoch for _, epoch in seen)
    assert {epoch for number, epoch in seen if number > 6} == {first_epoch + 1}


def drive(pipeline: Pipeline, rows: list[dict[str, Any]], epoch: int = 0, tasks: int = 1) -> list[dict[str, Any]]:
    """One batch through the handler stage, as a Spark task runs it; rows that come back may be driven again."""
    names = ("value", "subject", "sequence", "timestamp", "parked_until", "parked_times", "parked_alone")
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows], schema=_READ)
    columns = table.append_column("key", pa.nulls(len(rows), pa.string())).append_column(
        "partition", pa.nulls(len(rows), pa.int32())
    )
    assert pipeline.payload_key is not None
    batch = pipeline.payload_key.rekeyed(columns.to_batches()[0])
    named: dict[str, Any] = {"retries": pipeline.retries, "shape": pipeline.shape, "epoch": epoch, "tasks": tasks}
    stage = HandlerStage(pipeline.handler, pipeline.name, pipeline.stream, **named)
    return [row for part in stage.run(iter([batch])) for row in part.to_pylist()]


_READ = pa.schema(
    {
        "value": pa.binary(),
        "subject": pa.string(),
        "sequence": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
        "parked_until": pa.float64(),
        "parked_times": pa.int32(),
        "parked_alone": pa.bool_(),
    }
)


def rows(endpoint: FaultHttpServer, count: int, path: str) -> list[dict[str, Any]]:
    """The first messages of a stream: one task each of as many documents."""
    now = datetime.now(UTC)
    return [
        {
            "value": json.dumps(task(endpoint, f"d{number}", number, path)).encode(),
            "subject": f"x.d{number}",
            "sequence": number,
            "timestamp": now,
        }
        for number in range(1, count + 1)
    ]


def test_a_host_that_is_down_spends_no_attempts(make: Callable[..., Pipeline], endpoint: FaultHttpServer) -> None:
    endpoint.on("/down", Answer(503))
    made = make(host_concurrency=1, breaker_calls=3, breaker_open=3600.0)
    found = drive(made, rows(endpoint, 30, "/down"))
    assert {row["outcome"] for row in found} == {"parked"}
    assert len(endpoint.received) == 3
    assert sorted(row["parked_times"] for row in found) == [0] * 27 + [1] * 3
    assert all(row["parked_until"] > time.time() + 3000 for row in found if not row["parked_times"])


def test_of_what_a_trigger_may_do_each_of_several_spark_tasks_has_its_part(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer
) -> None:
    times: list[float] = []

    def reply(_request: ReceivedRequest) -> Answer:
        times.append(time.monotonic())
        return Answer(200, delay=0.05)

    endpoint.on("/hook", reply)
    found = drive(make(triggers=("t1: rate=40 concurrency=4",)), rows(endpoint, 20, "/hook"), tasks=4)
    assert {row["outcome"] for row in found} == {"done"}
    assert max(sum(first <= other < first + 1 for other in times) for first in times) <= 11
    assert min(later - earlier for earlier, later in pairwise(times)) >= 0.045  # one at once


def test_attempts_are_logged(make: Callable[..., Pipeline], endpoint: FaultHttpServer, stream: Any) -> None:
    endpoint.on("/down", Answer(503))
    drive(make(), rows(endpoint, 2, "/down") + rows(endpoint, 1, "/hook"))

    async def logged() -> list[tuple[int, str, int]]:
        connection = await connect(ConnectOptions(servers=(stream.url,)))
        try:
            js, name, found = JetStreamApi(connection), DeliveryNames(stream.name).attempts, []
            with suppress(MessageNotFound):
                for sequence in range(1, 9):
                    record = msgspec.json.decode((await js.msg_get(name, seq=sequence)).data, type=AttemptRecord)
                    found.append((record.attempt, record.outcome, record.status))
            return found
        finally:
            await connection.close()

    assert asyncio.run(logged()) == [(1, "server_error", 503)] * 2  # "failures" is the default


def test_attempts_are_counted_from_batch_to_batch_until_the_policy_ends(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer, stream: Any
) -> None:
    endpoint.on("/down", Answer(503, {"Retry-After": "0"}))
    made = make(schedule=("0s", "0s"))
    found = rows(endpoint, 1, "/down")
    for _ in range(3):
        found = drive(made, found)
    assert [row["outcome"] for row in found] == ["dead-lettered"]
    assert [request.headers["x-parti-attempt"] for request in endpoint.received] == ["1", "2", "3"]
    (letter,) = letters(stream)
    assert (letter.reason, letter.attempts, letter.extension.status) == ("exhausted", 3, 503)


def test_an_endpoint_that_is_gone_is_not_called_by_the_next_batch(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer, stream: Any
) -> None:
    endpoint.on("/gone", Answer(410))
    made = make()
    drive(made, rows(endpoint, 1, "/gone"))
    drive(made, rows(endpoint, 2, "/gone")[1:])
    assert len(endpoint.received) == 1
    assert [letter.reason for letter in letters(stream)] == ["gone", "disabled"]


def test_a_replay_sends_its_part_alone_with_the_ids_of_the_first_time(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer, stream: Any
) -> None:
    endpoint.on("/no", Answer(422))
    tasks = rows(endpoint, 30, "/no")
    drive(make(), tasks[10:12])
    first = {request.json()["payload"]["n"]: request.headers["webhook-id"] for request in endpoint.received}
    found = drive(make(Span("11", "12")), tasks)
    assert [row["sequence"] for row in found if row["outcome"] == "dead-lettered"] == list(range(1, 13))
    again = {r.json()["payload"]["n"]: r.headers["webhook-id"] for r in list(endpoint.received)[2:]}
    assert {number: again[number] for number in first} == first
    assert max(again) == 12
    sources = [letter.origin for letter in letters(stream)]
    assert sources.count(f"{stream.name}:11") == 2  # the letter of the replay is its own


def test_with_latest_the_newest_is_sent_in_place_of_those_that_wait_with_it(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer
) -> None:
    endpoint.on("/bad", Answer(503, {"Retry-After": "0"}), Answer(200))
    made = make(triggers=("t1: order=latest",), schedule=("0s", "0s"))
    first, second, third, other = rows(endpoint, 4, "/bad")
    for row, document in ((first, "a"), (second, "a"), (third, "a"), (other, "b")):
        row["value"] = json.dumps(task(endpoint, document, row["sequence"], "/bad")).encode()
    other["value"] = json.dumps(
        task(endpoint, "a", 4) | {"triggerId": "t2"}
    ).encode()  # another trigger waits for its turn
    parked = drive(made, [first, second])
    assert [(row["sequence"], row["outcome"]) for row in parked] == [(1, "done"), (2, "parked")]
    found = drive(made, [*[row for row in parked if row["outcome"] == "parked"], third, other])
    assert [row["outcome"] for row in found] == ["done"] * 3
    assert [body["payload"]["n"] for body in endpoint.bodies("/bad")] == [2, 3]
    assert arrived(endpoint) == {"a": [4]}


def test_with_skip_a_task_that_failed_comes_later_and_those_behind_it_go_on(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer
) -> None:
    endpoint.on("/bad", Answer(503, {"Retry-After": "0"}), Answer(503, {"Retry-After": "0"}), Answer(200))
    made = make(triggers=("t1: order=skip",), schedule=("0s",) * 5)
    tasks = rows(endpoint, 4, "/hook")
    for row in tasks:
        path = "/bad" if row["sequence"] == 1 else "/hook"
        row["value"] = json.dumps(task(endpoint, "a", row["sequence"], path)).encode()
    # A trigger that blocks waits with its document, and what is set aside does not hold it up.
    tasks[3]["value"] = json.dumps(task(endpoint, "a", 4) | {"triggerId": "t2"}).encode()
    first = drive(made, tasks[:2])
    assert [(row["sequence"], row["outcome"]) for row in first] == [(1, "parked"), (2, "done")]
    second = drive(made, [first[0], tasks[2]])
    assert [(row["sequence"], row["outcome"], row["parked_times"]) for row in second] == [
        (1, "parked", 2),
        (3, "done", 0),
    ]
    third = drive(made, [second[0], tasks[3]])
    assert [row["outcome"] for row in third] == ["done", "done"]
    assert arrived(endpoint) == {"a": [2, 3, 4]}
    assert [request.headers["x-parti-attempt"] for request in endpoint.received if request.path == "/bad"] == list(
        "123"
    )


def test_a_driver_that_stops_finishes_what_is_in_flight_and_hands_back_the_rest_without_an_attempt(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_task, "_LOOK_EVERY", 0.0)
    made = make(host_concurrency=1)
    announcer = made.companion
    assert isinstance(announcer, Announcer)
    announcer.begins(made)
    announcer.closes(made)
    found = drive(made, rows(endpoint, 2_000, "/hook"), epoch=1)
    done = [row["sequence"] for row in found if row["outcome"] == "done"]
    handed_back = [row for row in found if row["outcome"] == "parked"]
    assert len(done) + len(handed_back) == 2_000
    assert handed_back
    assert len(endpoint.received) == len(done)
    assert {row["parked_times"] for row in handed_back} == {0}
    announcer.begins(made)  # the next driver sends again
    drive(made, handed_back[:3], epoch=2)
    assert len(endpoint.received) == len(done) + 3


def test_a_replay_is_not_replaced_by_what_comes_behind_its_end(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer
) -> None:
    tasks = rows(endpoint, 3, "/hook")
    for row in tasks:
        row["value"] = json.dumps(task(endpoint, "a", row["sequence"])).encode()
    drive(make(Span("1", "2"), triggers=("t1: order=latest",)), tasks)
    assert arrived(endpoint) == {"a": [2]}


def test_requests_carry_the_drivers_epoch_and_a_driver_that_was_followed_sends_and_buries_nothing(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer, stream: Any
) -> None:
    endpoint.on("/no", Answer(422))
    made, options = make(), ConnectOptions(servers=(stream.url,))
    letters_of = f"{stream.name}_DLQ"
    subject = fence_subject(letters_of, (f"{letters_of}.>",), made.name)
    raise_fence(options, letters_of, subject, epoch=4, owner="first")
    drive(made, rows(endpoint, 1, "/no"), epoch=4)
    (request,) = endpoint.received
    assert request.headers["x-parti-epoch"] == "4"
    assert request.headers["x-parti-partition"].startswith("spark-")
    assert [letter.reason for letter in letters(stream)] == ["rejected"]  # the marker is none
    raise_fence(options, letters_of, subject, epoch=5, owner="second")
    found = drive(made, rows(endpoint, 2, "/no")[1:], epoch=4)
    assert [row["outcome"] for row in found] == ["parked"]
    assert len(endpoint.received) == 1
    assert len(letters(stream)) == 1


def test_what_would_break_the_order_is_refused(make: Callable[..., Pipeline], stream: Any) -> None:
    with pytest.raises(ConfigError, match="order=sometimes"):
        make(triggers=("t1: order=sometimes",))
    make()  # makes the streams
    stream.connection.api(f"STREAM.INFO.{stream.name}_PARK")
    stream.connection.send(f"PUB {stream.name}_PARK.q.0.document 0\r\n\r\n".encode())
    while not stream.connection.api(f"STREAM.INFO.{stream.name}_PARK")["state"]["messages"]:
        pass
    with pytest.raises(UsageError, match="parked"):
        make()
    with pytest.raises(ConfigError, match="allow_addresses"):
        make(allow_addresses=("no address",))
    stream.connection.api(f"STREAM.CREATE.{stream.name}_LANES", {"name": f"{stream.name}_LANES", "subjects": ["lanes"]})
    with pytest.raises(UsageError, match="in partitions"):
        make()


def test_what_the_other_engine_has_done_above_the_durables_position_is_not_sent_again(
    make: Callable[..., Pipeline], endpoint: FaultHttpServer, stream: Any
) -> None:
    make()  # makes the durable and the bucket
    created = stream.connection.api(f"STREAM.INFO.{stream.name}")["created"]
    consumer = stream.connection.api(f"CONSUMER.INFO.{stream.name}.TriggerDeliveryWorker")["created"]
    checkpoint = {"created": f"{created} {consumer}", "high": 4, "open": [2]}
    entry = [f"{created} {consumer}", [6]]
    for subject, value in ((f"$KV.{stream.name}_DELIVER.done.0", checkpoint), (f"{stream.name}_PARK.d.0", entry)):
        asyncio.run(stored(stream, subject, json.dumps(value).encode()))
    drive(make(), rows(endpoint, 7, "/hook"))
    assert sorted(body["payload"]["n"] for body in endpoint.bodies("/hook")) == [2, 5, 7]


async def stored(stream: Any, subject: str, data: bytes) -> None:
    connection = await connect(ConnectOptions(servers=(stream.url,)))
    try:
        await JetStreamApi(connection).publish(subject, data)
    finally:
        await connection.close()


@pytest.mark.parametrize("end", ["tomorrow", "12:99"])
def test_an_end_that_is_none_is_said_at_once(end: str) -> None:
    with pytest.raises(UsageError, match="no sequence"):
        _ = Span("1", end).until


async def test_a_look_up_that_is_late_rests_its_host_and_spends_no_attempt() -> None:
    let_go = threading.Event()

    def look_up(_host: str) -> list[AddrInfo]:
        let_go.wait(60)
        raise OSError("nobody waits any more")

    config = msgspec.structs.replace(DeliverSection(), dns_timeout=0.1)
    guard, clock = AddressGuard(), SystemClock()
    transport, gate = HttpTransport(config, guard, lookup=look_up), Gate(config, clock, random.Random(1))
    courier = Courier(config, transport, guard, SecretStore(clock, ""), clock)
    session = DeliverySession(Deliver("d", config, ConnectOptions()), courier, gate, None, None)  # type: ignore[arg-type]
    task = {
        "triggerId": "t",
        "database": "d",
        "collection": "c",
        "documentId": "x",
        "event": "e",
        "url": "http://a.test/",
    }
    data = json.dumps(task).encode()
    held = TaskReader(config, RuleBook((), "block")).read(data, {}, stream="S", subject="S.x", sequence=1, time=1.0)
    await transport.open()
    try:
        assert await gate.admit(held.host, "t", held.rules) is None
        attempt = await session._attempt(held, TaskRight("spark-0", 1))
        assert (attempt.outcome, held.attempts) == (AttemptOutcome.LOCAL, 0)
        postponed = await gate.admit(held.host, "t", held.rules)
        assert postponed is not None
        assert (postponed.why, postponed.wait > 0) == ("breaker", True)
    finally:
        let_go.set()
        await transport.close()

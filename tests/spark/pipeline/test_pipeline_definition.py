"""Pipelines defined in files, the choice of the plan, and the output of `parti run --explain`; no Spark is started."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from parti.cli import main
from parti.errors import ConfigError
from parti.outcomes import Ack, RetryPolicy
from parti.spark import Emit, Pipeline
from parti.spark.pipeline.driver.load import load
from parti.spark.pipeline.driver.plan import PlanFacts, PlanKind, choose
from parti.spark.pipeline.driver.source import PayloadKey
from parti.spark.pipeline.executor.failures import first_cause
from parti.wire.options import ConnectOptions

APP = """
from parti.spark import Pipeline

def handle(message):
    return None

async def look_up(message):
    return None

pipeline = Pipeline(name="orders", stream="ORDERS", handler=handle, checkpoint="c")
number = 7
"""
PIPELINE = """
[pipeline]
name = "orders"
stream = "ORDERS"
subjects = ["orders.>"]
handler = "pipeline_app:look_up"
key = "orders.*"
checkpoint = "checkpoints/orders"
batch_size = 5000
grace = "30s"

[retries]
attempts = 5
delays = ["100ms", "1s"]
timeout = "30s"
then = "park"

[results]
subject = "enriched.{key}"

[standby]
ttl = "8s"

[nats]
servers = ["nats://a:4222", "nats://b:4222"]
user = "me"

[spark]
"sql.shuffle.partitions" = 4
executor.memory = "2g"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "pipeline_app.py").write_text(APP)
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    yield tmp_path
    sys.modules.pop("pipeline_app", None)


def test_a_file_says_everything_about_a_pipeline(folder: Any) -> None:
    made = load("pipeline.toml")
    assert (made.name, made.stream, made.subjects, made.batch_size) == ("orders", "ORDERS", ("orders.>",), 5000)
    assert (made.handler.__name__, made.grace) == ("look_up", 30.0)
    assert (made.retries.attempts, made.retries.delays, made.retries.timeout) == (5, (0.1, 1.0), 30.0)
    assert (made.retries.then, made.results.subject) == ("park", "enriched.{key}")
    assert made.standby is not None
    assert made.standby.ttl == 8.0
    assert made.nats.servers == ("nats://a:4222", "nats://b:4222")
    assert made.spark == {"spark.sql.shuffle.partitions": "4", "spark.executor.memory": "2g"}
    assert made.source_options() == {
        "stream": "ORDERS",
        "commit": "none",
        "numPartitions": "64",
        "subjects": "orders.>",
        "maxOffsetsPerTrigger": "5000",
        "keyTokens": "orders.*",
        "startingOffsets": "earliest",
    }


def test_a_module_may_hold_the_pipeline_and_the_command_line_the_server(folder: Any) -> None:
    nats = ConnectOptions(servers=("nats://c:4222",))
    assert load("pipeline_app:pipeline", nats).nats == nats


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("[pipelines]\nname = 'x'", r"unknown table \[pipelines\]: did you mean 'pipeline'"),
        ("[pipeline]\nname = 'x'", r"\[pipeline\] lacks stream"),
        ("[pipeline]\nstraem = 'x'", r"\[pipeline\] has no key 'straem': did you mean 'stream'"),
        ("[pipeline]\nbatch_size = 'many'", r"batch_size = 'many': Expected"),
        ("[pipeline", r"pipeline.toml: Expected"),
        (
            "[spark]\nmaster='x'\n[pipeline]\nname='a'\nstream='b'\ncheckpoint='c'\nhandler='pipeline_app:handle'",
            "write master in",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named(folder: Any, line: Any, wrong: Any) -> None:
    (folder / "pipeline.toml").write_text(line)
    with pytest.raises(ConfigError, match=wrong):
        load("pipeline.toml")


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("pipeline_app:number", "is a int: name a parti.spark.Pipeline"),
        ("pipeline_app:missing", "has no 'missing'"),
        ("no_such_module:pipeline", "No module named 'no_such_module'"),
        ("pipeline", "neither a .toml file nor module:attribute"),
        ("missing.toml", "cannot read missing.toml"),
    ],
)
def test_what_is_no_pipeline_is_refused(folder: Any, what: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load(what)


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ({"name": "a b"}, "pipeline name 'a b'"),
        ({"checkpoint": ""}, "name a checkpoint folder"),
        ({"partitions": 0}, "at least 1"),
        ({"trigger": "soon"}, "soon"),
        ({"handler": 5}, "the handler is int"),
        ({"key": "payload:id", "partition_by": "2"}, "partition is that of the key"),
        ({"grace": -1.0}, "grace -1.0 must not be negative"),
        ({"key": "payload:"}, "name a field"),
        ({"key": "payload:a,b..c"}, "name a field"),
        ({"key": "payload:a,a.b.c"}, "name a field"),
        ({"key": "payload:a.b,a"}, "name a field"),
    ],
)
def test_a_pipeline_that_cannot_work_is_refused_when_it_is_made(more: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Pipeline(**({"name": "p", "stream": "S", "handler": print, "checkpoint": "c"} | more))


@pytest.mark.parametrize(
    ("facts", "plan"),
    [
        (PlanFacts(2, "plain"), PlanKind.FUSED),
        (PlanFacts(16, "plain"), PlanKind.FUSED),
        (PlanFacts(2, "plain", measured_us=50.0), PlanKind.SHUFFLED),
        (PlanFacts(1, "plain", measured_us=50.0), PlanKind.FUSED),
        (PlanFacts(2, "async"), PlanKind.SHUFFLED),
        (PlanFacts(1, "async"), PlanKind.FUSED),
        (PlanFacts(2, "plain", parking=True), PlanKind.SHUFFLED),
        (PlanFacts(2, "async", wanted="fused"), PlanKind.FUSED),
        (PlanFacts(2, "plain", parking=True, wanted="fused"), PlanKind.SHUFFLED),
    ],
)
def test_the_cheaper_plan_is_chosen_unless_something_else_decides(facts: Any, plan: Any) -> None:
    chosen = choose(facts)
    assert chosen.kind is plan
    assert chosen.tasks == (1 if plan is PlanKind.FUSED else facts.cores)


def test_explain_says_plan_order_failures_and_fence(folder: Any) -> None:
    made = CliRunner().invoke(main, ["run", "pipeline.toml", "--explain", "--json", "--master", "local[2]"])
    assert made.exit_code == 0, made.output
    told_of = json.loads(made.output)
    assert told_of["plan"] == "shuffled"
    assert told_of["why"].startswith("parked messages join the batch")
    assert "messages go to 2 tasks by partition, in stream order" in told_of["order"]
    assert "the key is parked and driven again after 10 s, 60 s, 300 s" in told_of["failures"]
    assert "publishes are fenced by epoch" in told_of["standby"]
    assert "look_up, async: lanes by key" in told_of["handler"]


def test_run_without_a_pipeline_says_what_to_give() -> None:
    made = CliRunner().invoke(main, ["run"], standalone_mode=True)
    assert made.exit_code == 2
    assert "--demo" in made.output


def test_a_result_is_an_ack_to_the_worker_plane() -> None:
    assert isinstance(Emit(b"x"), Ack)
    assert type(RetryPolicy().decide(Emit(b"x"), 1)).__name__ == "Done"
    assert [result.data for result in Emit("a", more=(Emit("b", more=(Emit("c"),)), Emit("d"))).all()] == [
        b"a",
        b"b",
        b"c",
        b"d",
    ]


@pytest.mark.parametrize(
    ("payload", "key"),
    [
        (b'{"a": {"b": "x"}}', "x"),
        (b'{"z": 1, "a": {"b": 5, "c": 6}}', "5"),
        (b'{"a": {"b": null}}', None),
        (b'{"a": {}}', None),
        (b'{"a": null}', None),
        (b'{"a": {"b": [1]}}', None),
        (b"[1]", None),
        (b"\xff", None),
        (b"", None),
    ],
)
def test_a_key_from_the_payload_is_read_or_left_unset(payload: Any, key: Any) -> None:
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(["s"]),
            "value": pa.array([payload], pa.binary()),
            "subject": pa.array(["in.s"]),
            "partition": pa.array([0], pa.int32()),
        }
    )
    row = PayloadKey("a.b", 8).rekeyed(batch).to_pylist()[0]
    assert row["key"] == key
    assert 0 <= row["partition"] < 8


def test_of_a_long_error_the_cause_is_told() -> None:
    text = """An error occurred while calling o1.save.
: org.apache.spark.SparkException: Job aborted due to stage failure: Lost task 0.0
Traceback (most recent call last):
  File "x.py", line 1, in <module>
parti.wire.errors.publish.WrongLastSequence: row 0 to 'out.x': wrong last sequence: 7
	at org.apache.spark.Some.thing(Some.scala:1)
Driver stacktrace:
Caused by: org.apache.spark.api.python.PythonException: Traceback"""
    assert first_cause(RuntimeError(text)) == "WrongLastSequence: row 0 to 'out.x': wrong last sequence: 7"
    assert first_cause(OSError("the disk is full")) == "OSError: the disk is full"
    assert len(first_cause(RuntimeError("x" * 10_000))) < 2_000


@pytest.mark.parametrize(
    ("key", "by", "whole"),
    [
        ("subject", "2", True),
        ("subject", "token:2", True),
        ("2,3", None, True),
        ("2,3", "3", True),
        ("2,3", "orders.*.*", True),
        ("2,3", "token:3", True),
        ("2,3", "token:1", None),
        ("payload:id", None, True),
    ],
)
def test_it_is_known_whether_a_key_has_one_partition(key: Any, by: Any, whole: Any) -> None:
    made = Pipeline(name="p", stream="S", handler=print, checkpoint="c", key=key, partition_by=by)
    assert made.keys_are_whole is whole


@pytest.mark.parametrize(("key", "by"), [("2", "3"), ("2", "2,3"), ("2", "subject"), ("orders.*", "orders.x.*")])
def test_a_partition_by_that_splits_a_key_is_refused(key: Any, by: Any) -> None:
    with pytest.raises(ConfigError, match=f"partition_by {re.escape(by)} splits the key"):
        Pipeline(name="p", stream="S", handler=print, checkpoint="c", key=key, partition_by=by)


@pytest.mark.parametrize(("key", "by"), [("2", "token:x"), ("0", "2"), ("a.>", "2")])
def test_a_malformed_partition_by_is_refused_with_the_pipelines_name(key: Any, by: Any) -> None:
    with pytest.raises(ConfigError, match=f"pipeline p: key {re.escape(key)}, partition_by {by}: "):
        Pipeline(name="p", stream="S", handler=print, checkpoint="c", key=key, partition_by=by)

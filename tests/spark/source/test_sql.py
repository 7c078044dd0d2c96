"""SQL on JetStream: tables, views and inserts, with what Spark adds to a user's options, and errors in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.errors import PySparkException

from parti.testing import NatsServer
from support.spark_streams import Stream

pytestmark = pytest.mark.spark


@dataclass
class Sql:
    """Runs a statement in which names stand for what is the test's own."""

    spark: Any
    names: dict[str, str]

    def __call__(self, statement: str) -> list[Any]:
        return list(self.spark.sql(statement.format(**self.names)).collect())


@pytest.fixture
def sql(spark: Any, stream: Any, name: str) -> Iterator[Sql]:
    """Run a statement; {t} is a table of the test's own, {v} a view, {o} the options of its stream."""
    names = {"t": f"t_{name.replace('-', '_')}", "v": f"v_{name.replace('-', '_')}", "n": stream.name}
    names["o"] = f"OPTIONS (servers '{stream.url}', stream '{stream.name}')"

    yield Sql(spark, names)
    spark.sql(f"DROP TABLE IF EXISTS {names['t']}")
    spark.sql(f"DROP VIEW IF EXISTS {names['v']}")


def sentence(call: Callable[[], object]) -> str:
    """What Spark prints of an error; ours is a line of it without frames."""
    with pytest.raises(PySparkException) as caught:
        call()
    text = str(caught.value)
    assert "Traceback" not in text
    return text


def test_a_catalog_table_is_read_written_and_streamed_with_the_options_it_was_made_with(
    spark: Any, stream: Stream, sql: Sql
) -> None:
    stream.publish(10)
    sql("CREATE TABLE {t} USING jetstream {o}")
    table = sql.names["t"]
    assert sql("SELECT count(*) AS n FROM {t}")[0].n == 10
    assert spark.table(table).count() == 10
    assert sql("SELECT count(*) AS n FROM {t} WITH (startingOffsets '8')")[0].n == 3
    assert spark.read.option("startingOffsets", "8").table(table).count() == 3
    sql("INSERT INTO {t} (subject, value) VALUES ('{n}.sql', CAST('a' AS BINARY)), ('{n}.sql', CAST('b' AS BINARY))")
    frame = spark.sql(f"SELECT '{stream.name}.py' AS subject, CAST('c' AS BINARY) AS value")
    frame.write.format("jetstream").options(**stream.options()).mode("append").save()
    found = sql("SELECT CAST(value AS STRING) AS v FROM {t} WHERE sequence > 10 ORDER BY sequence")
    assert sorted(row.v for row in found) == ["a", "b", "c"]
    assert spark.readStream.table(table).isStreaming


def test_a_temporary_view_is_read_and_written_with_lower_cased_options_of_both_sides(stream: Stream, sql: Sql) -> None:
    stream.publish(10)
    sql(
        "CREATE TEMPORARY VIEW {v} (subject string, value binary) USING jetstream OPTIONS "
        f"(SERVERS '{stream.url}', stream '{stream.name}', startingOffsets '4', maxInFlight '1000')"
    )
    assert sql("SELECT count(*) AS n FROM {v}")[0].n == 7
    sql("INSERT INTO {v} VALUES ('{n}.sql', CAST('a' AS BINARY))")
    # Not by a second SELECT of the view: Spark plans the range of a view once, as it does for a DataFrame.
    found = stream.connection.api(f"STREAM.MSG.GET.{stream.name}", {"seq": 11})["message"]
    assert (found["subject"], found["data"]) == (f"{stream.name}.sql", "YQ==")


def test_what_sql_cannot_do_is_refused_in_one_sentence(spark: Any, stream: Stream, sql: Sql) -> None:
    assert "LOCATION out" in sentence(lambda: sql("CREATE TABLE {t} USING jetstream {o} LOCATION '/tmp/x'"))
    columns = "CREATE TABLE {t} (value binary, subject string) USING jetstream {o}"
    sql(columns)
    assert "Leave the columns out" in sentence(lambda: sql("SELECT * FROM {t}"))
    assert "Leave the columns out" in sentence(lambda: sql("INSERT INTO {t} VALUES (CAST('a' AS BINARY), '{n}.a')"))
    sql("DROP TABLE {t}")
    sql("CREATE TABLE {t} USING jetstream {o}")
    overwrite = "INSERT OVERWRITE {t} (subject, value) VALUES ('{n}.a', CAST('a' AS BINARY))"
    assert "cannot be overwritten" in sentence(lambda: sql(overwrite))
    assert stream.state()["messages"] == 0
    reader = spark.read.format("jetstream").options(**stream.options())
    assert "has no path: name the stream" in sentence(lambda: reader.load("somewhere").count())
    writer = spark.sql("SELECT 'a' AS value, 'b' AS subject").write.format("jetstream").options(**stream.options())
    assert "has no path" in sentence(lambda: writer.mode("append").save("somewhere"))


def test_errors_are_one_sentence_with_the_option_and_what_to_do(spark: Any, stream: Stream, name: str) -> None:
    stream.publish(10)

    def read(schema: str | None = None, **options: str) -> Callable[[], object]:
        reader = spark.read.format("jetstream").options(**stream.options(**options))
        return lambda: (reader.schema(schema) if schema else reader).load().count()

    assert "startingOffsets 8 lies behind endingOffsets 3" in sentence(read(startingOffsets="8", endingOffsets="3"))
    assert "option startingTimestamp" in sentence(read(startingTimestamp="2999-01-01"))
    assert "option retryBudget: 0s leaves no time" in sentence(read(retryBudget="0s"))
    assert "malformed nkey seed" in sentence(read(**{"nats.nkeySeed": "SUxx"}))
    assert "has no column 'Value': did you mean 'value'" in sentence(read(schema="Value binary"))
    assert "column sequence is of type bigint, not string" in sentence(read(schema="sequence string"))
    assert "stream not found" in sentence(read(stream="NO"))


def test_headers_are_never_null_however_a_message_is_read(spark: Any, stream: Stream) -> None:
    stream.publish(3)
    stream.connection.send(f"HPUB {stream.name}.empty 12 12\r\nNATS/1.0\r\n\r\n\r\n".encode())
    stream.publish(1, headers={"a": "1"})
    for more in ({}, {"maxRecordsPerPartition": "2"}):
        frame = spark.read.format("jetstream").options(**stream.options(includeHeaders="true", **more)).load()
        assert [row.n for row in frame.selectExpr("sequence", "size(headers) AS n").orderBy("sequence").collect()] == [
            0, 0, 0, 0, 1,
        ]  # fmt: skip


def test_a_missing_permission_is_named_with_its_subject(spark: Any, name: str) -> None:
    config = """
    authorization { users = [
      { user: admin, password: pw }
      { user: app, password: pw, permissions: { publish: ["$JS.API.STREAM.INFO.>"], subscribe: ["_INBOX.>"] } }
    ] }
    """
    with NatsServer(config=config) as server:
        from parti.wire.blocking import BlockingConnection
        from parti.wire.options import ConnectOptions

        admin = ConnectOptions(servers=(server.client_url(user="admin", password="pw"),))
        with BlockingConnection.open(admin) as connection:
            connection.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{name}.>"]})
            for _ in range(5):
                connection.request(f"{name}.a", b"x")
        options = {"servers": server.url, "stream": name, "nats.user": "app", "nats.password": "pw"}
        text = sentence(lambda: spark.read.format("jetstream").options(**options).load().count())
        assert "Permissions Violation for Publish" in text
        assert "$JS.API.CONSUMER" in text or "$JS.API.DIRECT" in text

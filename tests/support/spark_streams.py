"""A stream that Spark reads, and a query over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from parti.testing import insist_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions


class Stream:
    """A stream on a test's server, and the operations that tests need on it."""

    def __init__(self, url: str, name: str) -> None:
        self.url = url
        self.name = name
        self.connection = BlockingConnection.open(ConnectOptions(servers=tuple(url.split(","))))

    def create(self, **config: Any) -> None:
        """Create the stream on the subjects `<name>.>`."""
        defaults = {"name": self.name, "subjects": [f"{self.name}.>"], "allow_direct": True, "storage": "file"}
        insist_blocking(lambda: self.connection.api(f"STREAM.CREATE.{self.name}", defaults | config))

    def publish(
        self, count: int, subject: str = "k{0}", payload: str = "m{0}", headers: dict[str, str] | None = None
    ) -> int:
        """Publish `count` more messages; all are stored when this returns. Returns the stream's last sequence."""
        first = int(self.state()["last_seq"]) + 1
        block = b""
        if headers:
            block = b"NATS/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()).encode() + b"\r\n"
        frames = bytearray()
        for sequence in range(first, first + count):
            name = f"{self.name}.{subject.format(sequence)}"
            data = payload.format(sequence).encode()
            if block:
                frames += f"HPUB {name} {len(block)} {len(block) + len(data)}\r\n".encode() + block + data + b"\r\n"
            else:
                frames += f"PUB {name} {len(data)}\r\n".encode() + data + b"\r\n"
        self.connection.send(bytes(frames))
        last = first + count - 1
        while self.state()["last_seq"] < last:  # the server answers after storing the messages that it read before
            pass
        return last

    def heard(self) -> None:
        """Store one acknowledged message: afterwards the cluster's stream receives what this connection publishes."""
        insist_blocking(lambda: self.connection.request(f"{self.name}.heard", b""), what="a leader takes messages")

    def reconnect(self) -> None:
        """Connect to another server of the cluster, after one was killed."""
        self.connection.close()
        self.connection = BlockingConnection.open(ConnectOptions(servers=tuple(self.url.split(","))))

    def state(self) -> dict[str, Any]:
        """The stream's state, from the server."""
        return dict(insist_blocking(lambda: self.connection.api(f"STREAM.INFO.{self.name}"))["state"])

    def options(self, **more: Any) -> dict[str, str]:
        """Options of the format `jetstream` that read this stream."""
        return {"servers": self.url, "stream": self.name} | {key: str(value) for key, value in more.items()}


class Query:
    """A streaming read into Parquet, so that its output survives the query; one `run` is one AvailableNow query."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder

    def start(self, options: dict[str, str], *, schema: str | None = None, **trigger: Any) -> Any:
        """Start a query with this trigger on the folder's checkpoint."""
        reader = self.spark.readStream.format("jetstream").options(**options)
        frame = (reader.schema(schema) if schema else reader).load()
        return (
            frame.writeStream.format("parquet")
            .option("checkpointLocation", str(self.folder / "checkpoint"))
            .option("path", str(self.folder / "out"))
            .trigger(**trigger)
            .start()
        )

    def run(self, options: dict[str, str], *, schema: str | None = None, **trigger: Any) -> Any:
        """Run a query to its end and return it; a failure is raised."""
        query = self.start(options, schema=schema, **(trigger or {"availableNow": True}))
        try:
            assert query.awaitTermination(90)
        finally:
            query.stop()
        return query

    def rows(self) -> list[Any]:
        """The output so far, ordered by sequence."""
        if not (self.folder / "out" / "_spark_metadata").exists():
            return []
        reader = self.spark.read.schema("sequence bigint, subject string, value binary")  # empty batches have no schema
        return list(reader.parquet(str(self.folder / "out")).orderBy("sequence").collect())

    def sequences(self) -> list[int]:
        return [row.sequence for row in self.rows()]

"""One Spark session for all tests, and streams filled with real messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from parti.spark import session
from parti.testing import NatsCluster, NatsServer
from support.spark_streams import Query, Stream

SETTINGS: dict[str, Any] = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session of the whole test run: two cores on loopback, four tries a task."""
    warehouse = str(tmp_path_factory.mktemp("spark") / "warehouse")
    running = session("parti-tests", master="local[2]", **SETTINGS | {"spark.sql.warehouse.dir": warehouse})
    running.sparkContext.setLogLevel("ERROR")
    yield running
    running.stop()


@pytest.fixture
def stream(server: NatsServer, name: str) -> Iterator[Stream]:
    """An empty stream on the shared server."""
    made = Stream(server.url, name)
    made.create()
    yield made
    made.connection.close()


@pytest.fixture
def make_stream(server: NatsServer, name: str) -> Iterator[Callable[..., Stream]]:
    """Makes the test's stream with a configuration of its own."""
    made: list[Stream] = []

    def make(**config: Any) -> Stream:
        made.append(Stream(server.url, name))
        made[-1].create(**config)
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


@pytest.fixture
def stream_on(name: str) -> Iterator[Callable[..., Stream]]:
    """Makes the test's stream on a server of the test's own, or reaches it again after a restart of the server."""
    made: list[Stream] = []

    def make(server: NatsServer, *, exists: bool = False, **credentials: str) -> Stream:
        made.append(Stream(server.client_url(**credentials), name))
        if not exists:
            made[-1].create()
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


@pytest.fixture
def stream_on_cluster(name: str) -> Iterator[Callable[[NatsCluster], Stream]]:
    """Makes the test's stream with three replicas."""
    made: list[Stream] = []

    def make(cluster: NatsCluster) -> Stream:
        made.append(Stream(",".join(cluster.urls), name))
        made[-1].create(num_replicas=3)
        return made[-1]

    yield make
    for one in made:
        one.connection.close()


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> Query:
    """A streaming query with a checkpoint and an output of the test's own."""
    return Query(spark, tmp_path)

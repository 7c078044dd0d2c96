"""The source where only the network is shared: separate executors, a NATS cluster, and spark-pipelines."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from parti.java import find_java
from parti.testing import NatsCluster, eventually_blocking
from support.spark_streams import Query, Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

JOB = Path(__file__).with_name("cluster_job.py")
SPARK_HOME = Path(pyspark.__path__[0])


def environment(folder: Path) -> dict[str, str]:
    java = find_java()
    assert java is not None
    return os.environ | {
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder / "work"),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYSPARK_PYTHON": sys.executable,
    }


def run_job(master: str, stream: Stream, folder: Path, *more: str) -> dict[str, object]:
    command = [sys.executable, str(JOB), master, stream.url, stream.name, str(folder), *more]
    done = subprocess.run(command, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_executors_in_processes_of_their_own_read_everything_once_and_audit_it(stream: Stream, tmp_path: Path) -> None:
    stream.publish(1000)
    lost = {"lost": [f"sequence 500 of key {stream.name}.k500"]}  # the audit is not told of that one
    seen = run_job("local-cluster[2,1,1024]", stream, tmp_path, "audit")
    assert seen == {"rows": 1000, "distinct": 1000, "executors": 2, "audit": lost}


def test_a_standalone_master_with_two_workers_reads_everything_once(stream: Stream, tmp_path: Path) -> None:
    stream.publish(1000)
    with standalone(tmp_path) as master:
        seen = run_job(master, stream, tmp_path)
    assert seen == {"rows": 1000, "distinct": 1000, "executors": 2, "audit": {}}


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """The url of a master on loopback that two workers have joined; all three are gone afterwards."""
    started: list[subprocess.Popen[str]] = []

    def start(kind: str, *arguments: str) -> subprocess.Popen[str]:
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}", "--host", "127.0.0.1"]
        process = subprocess.Popen(
            [*command, "--webui-port", "0", *arguments],
            env=environment(folder),
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    def line_with(process: subprocess.Popen[str], pattern: str) -> str:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(pattern, line):
                return found[1]
        raise AssertionError(f"{process.args!r} ended without a line like {pattern}")

    try:
        master = start("master.Master", "--port", "0")
        url = line_with(master, r"Starting Spark master at (spark://\S+)")
        for _ in range(2):
            worker = start("worker.Worker", "-c", "1", "-m", "1g", url)
            line_with(worker, r"(Successfully registered with master)")
        yield url
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.communicate(timeout=60)


@pytest.mark.cluster
def test_a_replicated_stream_is_read_on_while_its_leader_is_killed(
    query: Query, cluster: NatsCluster, stream_on_cluster: Callable[[NatsCluster], Stream]
) -> None:
    stream = stream_on_cluster(cluster)
    stream.heard()
    stream.publish(500)
    options = stream.options(startingOffsets="earliest", maxOffsetsPerTrigger=100)
    running = query.start(options, processingTime="100 milliseconds")
    try:
        eventually_blocking(lambda: len(query.sequences()) >= 200, 90, "the query is under way")
        leader = cluster.wait_for_leader(stream.name)
        cluster.kill(leader)
        cluster.wait_for_leader(stream.name)
        stream.reconnect()
        stream.heard()
        last = stream.publish(500)
        eventually_blocking(lambda: len(query.sequences()) >= last, 90, "all is read")
        assert query.sequences() == list(range(1, last + 1))
        assert running.isActive
        cluster.restart(leader)
    finally:
        running.stop()


SPEC = """
name: streams
storage: file://{folder}/storage
catalog: spark_catalog
database: default
libraries:
  - glob:
      include: transformations/**
"""
TABLES = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession, functions as F

spark = SparkSession.active()


@dp.table
def messages():
    options = {options}
    return spark.readStream.format("jetstream").options(**options).load()


@dp.materialized_view
def counts():
    return spark.read.table("messages").agg(F.count("*").alias("n"), F.max("sequence").alias("last"))
"""


def test_the_source_is_found_inside_spark_pipelines(spark: Any, stream: Stream, tmp_path: Path) -> None:
    stream.publish(100)
    (tmp_path / "transformations").mkdir()
    (tmp_path / "storage").mkdir()
    (tmp_path / "spark-pipeline.yml").write_text(SPEC.format(folder=tmp_path))
    tables = TABLES.format(options=stream.options(startingOffsets="earliest"))
    (tmp_path / "transformations" / "tables.py").write_text(tables)
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("spark-pipelines")),
            "run",
            "--conf",
            "spark.ui.enabled=false",
            "--conf",
            f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}",
        ],
        env=environment(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (row,) = spark.read.parquet(str(tmp_path / "warehouse" / "counts")).collect()
    assert (row.n, row.last) == (100, 100)

"""Every example runs as its own docstring says, on a real server and a real Spark, and does what it promises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from parti.testing import NatsServer, eventually_blocking
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader
from support.spark_streams import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"

# One process, so that Spark starts once; each script runs as if it stood on the command line.
RUN = """
import json, runpy, sys
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
"""


def environment(url: str) -> dict[str, str]:
    left_out = [name for name in os.environ if name.startswith(("SPARK_", "PYSPARK_")) and not name.endswith("_OPTS")]
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"NATS_URL": url}


def payloads(url: str, stream: str) -> list[bytes]:
    reader = RangeReader(ConnectOptions(servers=(url,)))
    try:
        batches = reader.read(stream, 0, reader.state(stream).last_seq, columns=("data",))
        return [value for batch in batches for value in batch.column("data").to_pylist()]
    finally:
        reader.close()


def published_later(stream: Stream, since: str) -> bool:
    """Publish one more message, and say whether it is two seconds younger than `since`."""
    stream.publish(1, subject="clock", payload="null")
    return datetime.fromisoformat(stream.state()["last_ts"]) - datetime.fromisoformat(since) > timedelta(seconds=2)


def test_there_is_no_example_that_is_not_run() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {
        "stream_to_parquet.py",
        "stream_to_stream.py",
        "windowed_counts.py",
        "pipeline",
        "ordered",  # tests/spark/pipeline/test_pipeline_example.py
        "webhook_receiver.py",  # tests/live/delivery/test_deliver_example.py
    }


@pytest.fixture
def outputs(server: NatsServer) -> Iterator[Any]:
    """Streams that the examples write to; the connection is a new one at the end, as an idle one is cut by then."""
    for action in ("CREATE", "DELETE"):
        with BlockingConnection.open(ConnectOptions(servers=(server.url,))) as connection:
            for name in ("PRICED", "COUNTS"):
                body = {"name": name, "subjects": [f"{name.lower()}.>"]} if action == "CREATE" else None
                connection.api(f"STREAM.{action}.{name}", body)
        if action == "CREATE":
            yield


@pytest.mark.usefixtures("outputs")
def test_the_scripts_keep_a_table_enrich_a_stream_and_count_in_windows(
    make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream()
    stream.publish(30, subject="shop{0}", payload='{{"item": "nut", "count": {0}}}', headers={"trace": "t"})
    first = stream.state()["last_ts"]
    eventually_blocking(lambda: published_later(stream, first), 60, "a message of a later window")
    last = stream.state()["last_seq"]
    windows = ["--window", "1 second", "--late", "0 seconds"]
    arguments = [
        ["stream_to_parquet.py", stream.name, str(tmp_path / "orders"), "--once"],
        ["stream_to_parquet.py", stream.name, str(tmp_path / "orders"), "--once"],
        ["stream_to_stream.py", stream.name, "PRICED", str(tmp_path / "priced"), "--once"],
        [
            "windowed_counts.py",
            stream.name,
            "counts.a",
            str(tmp_path / "c"),
            "--once",
            *windows,
        ],
    ]
    calls = [[str(EXAMPLES / script), *rest] for script, *rest in arguments]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(calls)],
        env=environment(stream.url),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    table = pq.read_table(tmp_path / "orders" / "table").to_pydict()
    assert sorted(table["sequence"]) == list(range(1, last + 1))

    # What is no order has no item, and so no price.
    priced = [json.loads(value) for value in payloads(stream.url, "PRICED")]
    assert sorted(row["total"] for row in priced) == pytest.approx([round(n * 0.05, 2) for n in range(1, 31)])

    counts = [json.loads(value) for value in payloads(stream.url, "COUNTS")]
    shops = {row["key"]: row["count"] for row in counts}
    assert {key for key in shops if "shop" in key} == {f"{stream.name}.shop{n}" for n in range(1, 31)}
    assert all(shops[f"{stream.name}.shop{n}"] == 1 for n in range(1, 31))


def test_the_declarative_pipeline_keeps_its_tables_up_to_date(
    make_stream: Callable[..., Stream], tmp_path: Path
) -> None:
    stream = make_stream()
    stream.publish(40, subject="shop{0}")
    project = tmp_path / "pipeline"
    shutil.copytree(EXAMPLES / "pipeline", project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text().replace("file:///var/tmp/orders-pipeline", (project / "storage").as_uri())
    spec.write_text(text + f'  orders.stream: "{stream.name}"\n')
    program = Path(sys.executable).parent / "spark-pipelines"
    done = subprocess.run(
        [str(program), "run", "--conf", "spark.python.unix.domain.socket.enabled=true"],
        env=environment(stream.url) | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
        cwd=project,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    tables = project / "spark-warehouse"
    assert pq.read_table(tables / "orders").num_rows == 40
    assert pq.read_table(tables / "orders_by_subject").num_rows == 40

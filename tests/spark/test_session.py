"""`parti.spark.session`: its settings are applied, and parti reaches executors that are separate processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from parti.errors import ConfigError
from parti.spark import session
from parti.spark.session import build_zip, retrying, submitted
from parti.testing import NatsServer

pytestmark = pytest.mark.spark


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("local", "local[1,4]"),
        ("local[*]", "local[*,4]"),
        ("local[2]", "local[2,4]"),
        ("local[2,1]", "local[2,1]"),
        ("local-cluster[2,1,1024]", "local-cluster[2,1,1024]"),
        ("spark://127.0.0.1:7077", "spark://127.0.0.1:7077"),
    ],
)
def test_a_task_on_one_machine_gets_as_many_tries_as_on_a_cluster(master: Any, expected: Any) -> None:
    assert retrying(master) == expected


def test_a_program_knows_whether_spark_submit_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    assert not submitted()
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "34567")  # its --master counts then
    assert submitted()


def test_a_setting_that_is_none_of_sparks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'shuffle' is no Spark setting"):
        session(shuffle=2)


def test_a_session_that_runs_already_is_used_and_given_what_it_can_take(spark: Any) -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    changed: dict[str, Any] = {"spark.sql.shuffle.partitions": 3}
    assert session("another", **changed) is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"  # one of those that can be changed
    spark.conf.set("spark.sql.shuffle.partitions", before)


def test_the_archive_for_executors_has_both_packages_and_no_leftovers(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build_zip(tmp_path)).namelist()
    assert {"parti/__init__.py", "parti/spark/sink/writers.py", "pyspark_jetstream/__init__.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("/")]


def test_a_task_does_not_import_the_asyncio_client() -> None:
    """Spark gives a Python process 10 s to start, on a busy machine too; nats-py alone took a second of them there."""
    code = "import sys, pyspark_jetstream, parti.spark.sink.writers\n"
    code += "import parti.spark.source.stream_reader, parti.spark.source.batch_reader\n"
    code += "print(sorted({'nats', 'aiohttp', 'prometheus_client', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_load_is_checked_without_numpy_and_arrow() -> None:
    """Spark asks for the columns in a process of its own, which needs neither: they are half of what it costs."""
    code = "import sys, pyspark_jetstream\n"
    code += "options = {'stream': 'S', 'startingTimestamp': '2026-01-01', 'keyTokens': '2', 'numPartitions': '7'}\n"
    code += "print(len(pyspark_jetstream.DefaultSource(options).schema()))\n"
    code += "print(sorted({'numpy', 'pyarrow', 'pandas', 'nats'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["7", "[]"], done.stderr


def run(code: str, folder: Path) -> Any:
    """Run a driver of its own; its last line is JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_a_local_session_listens_on_loopback_only_and_has_the_settings_that_matter(
    server: NatsServer, tmp_path: Path, name: str
) -> None:
    found = run(
        """
import json, os
from parti.spark import session
spark = session("t", "local[2]", fast_checkpoints=True, **{"spark.sql.shuffle.partitions": 3})
keys = ["spark.driver.host", "spark.python.unix.domain.socket.enabled", "spark.sql.shuffle.partitions"]
jvm = spark.sparkContext._gateway.proc.pid
sockets = set()
inodes = set()
for fd in os.listdir(f"/proc/{jvm}/fd"):
    try: inodes.add(os.readlink(f"/proc/{jvm}/fd/{fd}"))
    except OSError: pass
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes: sockets.add(parts[1].split(":")[0])
state = spark.conf.get("spark.sql.streaming.stateStore.providerClass")
print(json.dumps([{k: spark.conf.get(k) for k in keys}, spark.sparkContext.master, sorted(sockets), state]))
""",
        tmp_path,
    )
    settings, master, listening, state = found
    assert settings == {
        "spark.driver.host": "127.0.0.1",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": "3",
    }
    assert master == "local[2,4]"
    assert state.endswith("RocksDBStateStoreProvider")
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set(listening) <= loopback


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_on_a_cluster_executors_get_parti_from_the_driver_and_write_to_the_stream(
    server: NatsServer, tmp_path: Path, name: str
) -> None:
    found = run(
        f"""
import json
from parti.spark import session
from parti.wire.blocking import BlockingConnection
from parti.wire.options import ConnectOptions
connection = BlockingConnection.open(ConnectOptions(servers=({server.url!r},)))
connection.api("STREAM.CREATE.{name}", {{"name": "{name}", "subjects": ["{name}.>"]}})
spark = session("t", "local-cluster[2,1,1024]", **{{"spark.ui.enabled": "false", "spark.executor.memory": "1g"}})

def where(part):
    import os, parti
    yield (os.getpid(), parti.__file__)

origins = spark.sparkContext.parallelize(range(4), 4).mapPartitions(where).collect()
rows = spark.range(2000, numPartitions=4).selectExpr("cast(id as string) as value")
rows.write.format("jetstream").mode("append").options(servers={server.url!r}, subject="{name}.a").save()
stored = connection.api("STREAM.INFO.{name}")["state"]["messages"]
read = spark.read.format("jetstream").options(servers={server.url!r}, stream="{name}").load().count()
print(json.dumps([sorted({{file for _, file in origins}}), stored, read]))
""",
        tmp_path,
    )
    files, stored, read = found
    assert all("parti.zip" in file for file in files)
    assert stored == read == 2000

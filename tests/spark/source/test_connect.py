"""Spark Connect: the same source and sink through a remote session, which is another process with its own Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PROGRAM = """
import sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.remote("local[1]").getOrCreate()
options = {"servers": sys.argv[1], "stream": sys.argv[2]}
events = spark.read.format("jetstream").options(**options).load()
print("read", events.count())
events.select("subject", "value").limit(2).write.format("jetstream").options(**options).mode("append").save()
spark.stop()
"""


def test_a_remote_session_reads_and_writes(stream: Any) -> None:
    stream.publish(20)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, stream.url, stream.name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "read 20" in ran.stdout
    assert stream.state()["messages"] == 22

"""`parti bench spark-cost`: CPU time of a whole process tree, including processes that have ended."""

from __future__ import annotations

import os
import subprocess
import sys

from parti_lab.bench.spark_cost import BENCH, _figures, cpu_of_tree

BURN = "import time\nwhile time.process_time() < {0}: pass\n"
NESTED = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(0.3)!r}])\n"
STAYING = NESTED + "print('ready', flush=True)\nsys.stdin.read()\n"


def test_what_ended_below_a_process_is_counted_and_a_branch_can_be_left_out() -> None:
    before = cpu_of_tree(os.getpid())
    with subprocess.Popen([sys.executable, "-c", STAYING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert cpu_of_tree(child.pid) >= 0.2  # all of it of a grandchild that is gone
        whole, rest = cpu_of_tree(os.getpid()), cpu_of_tree(os.getpid(), without=frozenset({child.pid}))
        assert whole - rest >= 0.2
        assert whole - before >= 0.2
        child.communicate()


def test_figures_are_medians_per_million_and_ratios_to_kafka() -> None:
    def runs(*client: float, **server: float) -> list[dict[str, float]]:
        return [{"client": each} | server for each in client]

    found = _figures(
        {
            "batch": runs(1.0, 0.5, 9.0, nats=1.5, kafka=0.1),
            "kafka_batch": runs(2.0, 2.0, 2.0, nats=0.1, kafka=0.25),
            "batch_start": runs(0.2, nats=0.0),
        },
        500_000,
    )
    assert found == {
        "batch_client_s_per_m": 2.0,
        "batch_server_s_per_m": 3.0,
        "kafka_batch_client_s_per_m": 4.0,
        "kafka_batch_server_s_per_m": 0.5,
        "batch_start_client_s": 0.2,
        "batch_start_server_s": 0.0,
        "batch_of_kafka": 0.5,
    }


def test_without_a_broker_there_is_nothing_to_be_below() -> None:
    assert BENCH.goals_of is not None
    assert BENCH.goals_of({"kafka": ""}) == {}
    assert set(BENCH.goals_of({"kafka": "127.0.0.1:9092"})) == {"batch_of_kafka", "value_of_kafka", "stream_of_kafka"}

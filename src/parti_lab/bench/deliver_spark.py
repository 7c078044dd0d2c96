"""The engine spark of `parti bench deliver`: deliveries per second and per CPU-second of driver, JVM and workers."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from parti.config.deliver import DeliverSection
from parti.errors import UsageError
from parti.wire.options import ConnectOptions
from parti_lab.bench.deliver_bare import bare_at_once
from parti_lab.bench.goals import Figure

_CORES = 2
_SETTINGS: dict[str, Any] = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": _CORES}
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(
    config: DeliverSection, options: ConnectOptions, port: int, count: int, *, bare: int, turns: int
) -> dict[str, Figure]:
    """Deliver the `count` tasks of the stream, `turns` times, with `bare` requests of each bare loop in between.

    Returns the best of each, because disturbances only slow a run down.
    """
    from parti.spark.delivery import Span, delivery_pipeline
    from parti.spark.session import session

    spark = session("parti-bench-deliver", master=f"local[{_CORES}]", fast_checkpoints=True, **_SETTINGS)
    spark.sparkContext.setLogLevel("ERROR")
    per_second = per_cpu = bare_per_cpu = 0.0
    try:
        for turn in range(turns + 1):
            tasks = count if turn else count // 2  # the first turn warms up the JVM and the workers
            if turn:
                bare_per_cpu = max(bare_per_cpu, bare_at_once(_CORES, bare, port))
            with tempfile.TemporaryDirectory() as folder:
                span = Span("1", str(tasks))
                pipeline = delivery_pipeline(config, options, checkpoint=folder, span=span, trigger="available-now")
                cpu = _cpu(os.getpid())
                with pipeline.start(spark) as running:
                    running.wait()
                    totals = running.totals
                cpu = _cpu(os.getpid()) - cpu
            if totals.parked or totals.done < tasks:
                raise UsageError(f"{totals.done} of {tasks} tasks were delivered, {totals.parked} are parked")
            if turn:
                per_second = max(per_second, tasks / sum(batch["seconds"] for batch in totals.by_batch))
                per_cpu = max(per_cpu, tasks / cpu)
    finally:
        spark.stop()
    return {
        "spark_tasks": count,
        "spark_per_s": round(per_second),
        "spark_per_cpu_s": round(per_cpu),
        "bare_at_once_per_cpu_s": round(bare_per_cpu),
        "spark_of_bare": round(per_cpu / bare_per_cpu, 3),
    }


def _cpu(root: int) -> float:
    """CPU-seconds of this process and its Java and Python descendants; not of the server and the sink."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            text = (entry / "stat").read_text()
            name, rest = text.partition("(")[2].rpartition(")")[0], text.rpartition(")")[2].split()
            ours = name.startswith(("java", "python")) and b"deliver_sink" not in (entry / "cmdline").read_bytes()
            parents[int(entry.name)] = int(rest[1])
            seconds[int(entry.name)] = sum(map(int, rest[11:15])) / _TICKS if ours else 0.0
    return sum(spent for pid, spent in seconds.items() if _below(pid, root, parents))


def _below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid and pid != root:
        pid = parents.get(pid, 0)
    return pid == root

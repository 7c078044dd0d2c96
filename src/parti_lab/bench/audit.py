"""`parti bench audit`: time and memory of an audit of ten million messages, and whether it finds every planted fault.

Messages and effects are Parquet as the pipeline writes it, with known numbers of planted faults. The time includes the
start of Spark; memory is the sum of this process, the JVM and all Python workers.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from parti.audit import Effects, Published, Report, audit
from parti.audit.session import audit_session
from parti.progress import Advance
from parti.spark.quiet import without_chatter
from parti_lab.bench.footprint import Footprint
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import Benchmark, ExperimentOption, RunContext

_CHUNK: Final = 500_000
_KEYS: Final = 20_000
_PARTITIONS: Final = 2_000
_BEGAN: Final = 1_760_000_000_000_000  # microseconds: an arbitrary day
_EVERY: Final = 10  # microseconds between two publishes
PLANTED: Final = {"lost": 49, "duplicated": 99, "out_of_order_key": 71, "two_owners": 13, "stale_owner": 17}


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Which messages get which fault; each at most one."""

    lost: np.ndarray[Any, Any]
    duplicated: np.ndarray[Any, Any]
    late: np.ndarray[Any, Any]
    other_owner: np.ndarray[Any, Any]
    stale: np.ndarray[Any, Any]

    @classmethod
    def of(cls, count: int, seed: int) -> AuditPlan:
        rng = np.random.default_rng(seed)
        # In the second half, where every epoch is 2, and far enough from the end that the key has later messages.
        places = rng.choice(np.arange(count // 2 + 1, count - 3 * _KEYS), sum(PLANTED.values()), replace=False)
        return cls(*np.split(places, np.cumsum(list(PLANTED.values()))[:-1]))


def write(folder: Path, count: int, seed: int, advance: Advance) -> None:
    """Published messages and their effects, with the planted faults."""
    plan = AuditPlan.of(count, seed)
    (folder / "published").mkdir()
    (folder / "effects").mkdir()
    for number, start in enumerate(range(1, count + 1, _CHUNK)):
        sequence = np.arange(start, min(start + _CHUNK, count + 1), dtype=np.int64)
        stored = _BEGAN + sequence * _EVERY
        columns = {
            "sequence": sequence,
            "timestamp": _time(stored),
            "subject": _words("orders.k{}", _key(sequence), _KEYS),
        }
        pq.write_table(pa.table(columns), folder / "published" / f"{number}.parquet")
        pq.write_table(_effects(sequence, count, plan), folder / "effects" / f"{number}.parquet")
        advance(len(sequence))


def _effects(sequence: Any, count: int, plan: AuditPlan) -> pa.Table:
    kept = np.concatenate((sequence[~np.isin(sequence, plan.lost)], sequence[np.isin(sequence, plan.duplicated)]))
    first = np.arange(len(kept)) < len(kept) - np.isin(sequence, plan.duplicated).sum()
    key = _key(kept)
    partition = key % _PARTITIONS
    took = 50 + key % 400
    latency = 2_000 + (partition % 37) * 300 + took  # equal within a key, so that keys keep their order
    # Late: after the next message of its key, which is published one round of all keys later.
    latency = latency + np.where(np.isin(kept, plan.late), _KEYS * _EVERY + 5, 0)
    finished = _BEGAN + kept * _EVERY + latency + np.where(first, 0, 1_000_000)
    epoch = np.where(kept * 2 <= count, 1, 2) - np.isin(kept, plan.stale)
    # Stale effects come from the owner of their epoch, as from a worker that was frozen.
    owner = (partition + epoch) % 7 + np.where(np.isin(kept, plan.other_owner), 100, 0)
    return pa.table(
        {
            "stream": pa.repeat("BENCH", len(kept)),
            "sequence": kept,
            "partition": pa.array(partition.astype(np.int32)),
            "key": _words("k{}", key, _KEYS),
            "outcome": pa.repeat("done", len(kept)),
            "attempts": pa.array(np.where(first, 1, 2).astype(np.int32)),
            "latency": latency / 1e6,
            "took": took / 1e6,
            "epoch": epoch,
            "owner": _words("w-{}", owner, 110),
            "finished": _time(finished),
        }
    )


def _key(sequence: Any) -> Any:
    return sequence * 7919 % _KEYS


def _words(template: str, numbers: Any, count: int) -> pa.Array:
    names = pa.array([template.format(number) for number in range(count)])
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), names)


def _time(micros: Any) -> pa.Array:
    return pa.array(micros).cast(pa.timestamp("us", tz="UTC"))


def wrong_counts(report: Report) -> str:
    """The planted faults that were not counted exactly, as text; empty when all were."""
    (side,) = report.sides
    found = {name: side.count(name) for name in PLANTED}
    wrong = [f"{name} {found[name]} of {planted}" for name, planted in PLANTED.items() if found[name] != planted]
    if side.count("unknown"):
        wrong.append(f"unknown {side.count('unknown')} of 0")
    return ", ".join(wrong)


@without_chatter()
def run(ctx: RunContext) -> dict[str, Figure]:
    """Write the files, then audit them once with a cold start, as a user would."""
    count = 500_000 if ctx.quick else int(ctx.options["messages"])
    folder = Path(tempfile.mkdtemp(prefix="parti-bench-"))
    try:
        with ctx.progress("audit", total=count + 1) as advance:
            write(folder, count, ctx.seed, advance)
            with Footprint() as footprint:
                began = time.perf_counter()
                with audit_session("local[2]") as spark:
                    started = time.perf_counter()
                    report = audit(
                        spark,
                        Published(stream="BENCH", path=str(folder / "published")),
                        Effects(path=str(folder / "effects")),
                    )
                    ended = time.perf_counter()
            advance(1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = wrong_counts(report)
    return {
        "messages": count,
        "keys": _KEYS,
        "partitions": _PARTITIONS,
        "audit_s": round(ended - began, 2),
        "session_start_s": round(started - began, 2),
        "messages_per_s": round(count / (ended - started)),
        "peak_mb": round(footprint.peak / 1e6),
        "cpu_s": round(footprint.cpu_s, 1),
        "faults_planted": sum(PLANTED.values()),
        "kinds_miscounted": len(wrong.split(", ")) if wrong else 0,
        "miscounted": wrong,
    }


BENCH = Benchmark(
    name="audit",
    help="The audit of messages and effects in Parquet with planted faults: seconds, memory, and whether it finds all.",
    run=run,
    goals={"audit_s": "<= 25", "peak_mb": "< 2000", "kinds_miscounted": "== 0"},
    options=(ExperimentOption("messages", 10_000_000, "messages, and about as many effects"),),
)

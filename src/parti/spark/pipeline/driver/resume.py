"""Exactly once beyond the duplicate window: which results of a replayed batch the stream already holds.

A stream remembers message ids for its duplicate window, two minutes by default. A batch that is replayed after a longer
outage would be stored twice. But the stored results have their ids in the headers, and cannot be older than the plan of
the batch. So that part of the stream is read once, before the query starts.
"""

from __future__ import annotations

import time

import pyarrow as pa

from parti.observe.logs import get_logger
from parti.spark.pipeline.driver.epochs import Replay
from parti.spark.source.offsets import Position
from parti.wire.options import ConnectOptions
from parti.wire.ranges import RangeReader
from parti.wire.target import Target

log = get_logger("spark.pipeline")

_SKEW = 60.0  # seconds that the clocks of driver and server may differ


def known_results(connect: ConnectOptions, target: Target, replay: Replay | None, *, scope: str) -> frozenset[str]:
    """Ids of results of this batch that are stored; empty while the stream itself remembers them."""
    if replay is None or time.time() - replay.planned_at < target.duplicate_window / 2:
        return frozenset()
    prefix = f"{scope}:".encode()
    found: set[str] = set()
    reader = RangeReader(connect, name="parti-pipeline-resume")
    try:
        state = reader.state(target.stream)
        since = Position(int((replay.planned_at - _SKEW) * 1e9), is_time=True)
        after = since.first_sequence(reader, state) - 1
        for batch in reader.read(target.stream, after, state.last_seq, columns=("headers",)):
            found.update(_ids(batch, prefix, replay))
    finally:
        reader.close()
    if found:
        log.info("pipeline.results_known", batch=replay.batch, results=len(found))
    return frozenset(found)


def _ids(batch: pa.RecordBatch, prefix: bytes, replay: Replay) -> list[str]:
    named = (
        entry["value"].decode()
        for headers in batch.column("headers").to_pylist()
        for entry in headers or ()
        if entry["key"] == "Nats-Msg-Id" and entry["value"].startswith(prefix)
    )
    return [name for name in named if replay.first < int(name.rsplit(":", 2)[1]) <= replay.last]

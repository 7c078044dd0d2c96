"""Messages packed into blocks for a shuffle, on real Arrow batches and without Spark."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.spark.pipeline.executor import blocks
from parti.spark.pipeline.executor.blocks import BLOCK_BYTES, PARKED, Packing, unpacked
from parti.wire.outgoing import HEADERS


def batch(first: int, partitions: list[int | None], *, size: int = 3, headers: bool = False) -> pa.RecordBatch:
    count = len(partitions)
    columns = {
        "key": pa.array([None if number is None else f"k{number}" for number in partitions], pa.string()),
        "value": pa.array([b"%d" % (first + index) + b"x" * size for index in range(count)], pa.binary()),
        "subject": pa.array([f"in.{number}" for number in partitions]),
        "partition": pa.array(partitions, pa.int32()),
        "sequence": pa.array(range(first, first + count), pa.int64()),
        "timestamp": pa.array([first] * count, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
    }
    if headers:
        columns["headers"] = pa.array([[{"key": "a", "value": b"%d" % first}]] * count, HEADERS)
    return pa.RecordBatch.from_pydict(columns)


@settings(max_examples=25, deadline=None)
@given(
    ranges=st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=3), min_size=1, max_size=3),
    tasks=st.integers(1, 5),
    seed=st.integers(0, 1 << 32),
)
def test_each_task_gets_the_messages_of_its_partitions_whole_and_in_stream_order(
    ranges: Any, tasks: Any, seed: Any
) -> None:
    rng = random.Random(seed)
    sent, rows, sequence = [], [], 1
    for sizes in ranges:  # a reading task each
        parts = []
        for size in sizes:
            parts.append(batch(sequence, [rng.choice([None, *range(7)]) for _ in range(size)]))
            sequence += size
        sent += [row for part in parts for row in part.to_pylist()]
        rows += [row for made in Packing(tasks).pack(iter(parts)) for row in made.to_pylist()]
    rng.shuffle(rows)  # Spark promises no order behind a shuffle
    found = []
    for task in range(tasks):
        mine = sorted((row for row in rows if row["task"] == task), key=lambda row: row["first"])
        blocks = pa.RecordBatch.from_pylist(mine, pa.schema([("block", pa.binary())]))
        handled = [row for part in unpacked(iter([blocks])) for row in part.to_pylist()]
        assert all(one["sequence"] < two["sequence"] for one, two in pairwise(handled))
        assert {(row["partition"] or 0) % tasks for row in handled} <= {task}
        found += handled
    assert sorted(found, key=lambda row: row["sequence"]) == sent


def test_a_task_gathers_small_batches_and_no_more_than_its_share_of_memory() -> None:
    many = [batch(1 + 10 * number, list(range(10))) for number in range(100)]
    assert len(list(Packing(8).pack(iter(many)))) == 1
    large = [batch(1 + number, [number], size=BLOCK_BYTES // 4) for number in range(12)]
    made = list(Packing(8).pack(iter(large)))
    assert len(made) == 3
    assert max(part.nbytes for part in made) < 2 * BLOCK_BYTES


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 599), max_size=8), heavy=st.integers(1, 500), parking=st.booleans())
def test_blocks_are_the_same_however_their_messages_arrived(cuts: Any, heavy: Any, parking: Any) -> None:
    parts = [batch(1, [number % 7 for number in range(heavy)]), batch(heavy + 1, [3] * 5, size=400)]
    parts.append(batch(heavy + 6, [number % 5 for number in range(600 - heavy)]))
    whole = pa.concat_batches(parts)
    ends = sorted({*cuts, whole.num_rows})
    packing = Packing(2, parking=parking)
    with pytest.MonkeyPatch.context() as small:
        small.setattr(blocks, "_ROWS", 40)
        small.setattr(blocks, "BLOCK_BYTES", 1_000)
        at_once = list(packing.pack(iter([whole])))
        assert len(at_once) > 600 // 80
        assert list(packing.pack(whole.slice(start, end - start) for start, end in pairwise([0, *ends]))) == at_once


def test_parked_messages_and_new_ones_have_the_same_columns_wherever_they_come_from() -> None:
    # Spark hands over its own names of time zones and of list elements, and the source gives no headers.
    entry = pa.struct([("key", pa.string()), ("value", pa.binary())])
    names = {"timestamp": pa.timestamp("us", tz="Etc/UTC"), "headers": pa.list_(pa.field("element", entry))}
    theirs = pa.schema([field.with_type(names.get(field.name, field.type)) for field in PARKED])
    row = batch(1, [3], headers=True).to_pylist()[0] | {"parked_until": 7.5, "parked_times": 2, "parked_alone": True}
    parked = pa.RecordBatch.from_pylist([row], theirs)
    packing = Packing(1, parking=True)
    both = [part for source in ([parked], [batch(5, [3])]) for made in packing.pack(iter(source)) for part in (made,)]
    old, new = unpacked(iter(both))
    assert old.schema == new.schema == PARKED
    assert old.to_pylist() == [row]
    assert (new.to_pylist()[0]["headers"], new.to_pylist()[0]["parked_until"]) == (None, 0.0)

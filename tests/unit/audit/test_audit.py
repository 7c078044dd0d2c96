"""The tasks of the audit, run without Spark: exact counts of planted faults, bounded structures, texts and pages."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.audit import AuditRules
from parti.audit.effects import Reading, hashed
from parti.audit.measures import Spread, Tempo
from parti.audit.order import Highest
from parti.audit.packing import Merge, packets, unpack
from parti.audit.presence import BLOCK, SeenSequences
from parti.audit.run import _Sums
from parti.audit.scan import ReadEffects, ReadPublished, judge
from parti.audit.slo import slos, update_counts
from parti.errors import ConfigError, UsageError

PLACES = 3
Effect = Mapping[str, Any]


def effects_of(count: int, keys: int = 10, partitions: int = 5) -> list[dict[str, Any]]:
    """A clean run: each message once, in order."""
    return [
        {
            "sequence": sequence,
            "finished": sequence * 1_000,
            "partition": f"p{sequence % keys % partitions}",
            "key": f"k{sequence % keys}",
            "epoch": 1,
            "owner": "w-1",
            "latency": 0.01,
        }
        for sequence in range(1, count + 1)
    ]


def audited(published: Sequence[int], effects: Sequence[Effect], batch: int = 7) -> _Sums:
    """What the tasks say, their rows brought together as Spark does it."""
    first, last = min(published), max(published)
    table = pa.table({"sequence": list(published), "timestamp": [sequence * 1e-3 for sequence in published]})
    rows = list(ReadPublished(first, last, PLACES)(iter(table.to_batches(max_chunksize=batch))))
    told = pa.Table.from_pylist([dict(effect) | {"finished": effect["finished"] / 1e6} for effect in effects])
    rows += ReadEffects("S", first, last, PLACES, 0)(iter(told.to_batches(max_chunksize=batch)))
    sums = _Sums()
    for place in range(PLACES):
        mine = [row for row in rows if row.column("place")[0].as_py() == place]
        for found in judge(iter(sorted(mine, key=lambda row: row.column("low")[0].as_py()))):
            sums.add(*(found.column(name)[0].as_py() for name in ("kind", "side", "data")))
    return sums


def counts(sums: _Sums) -> dict[str, int]:
    weight, courses = sums.weights[0], sums.judged[0].courses
    return {
        "lost": weight.lost,
        "unknown": weight.unknown,
        "duplicated": sums.facts[0].effects - weight.done,
        "key": sum(course.key_inversions for course in courses),
        "partition": sum(course.inversions for course in courses),
        "two_owners": sum(course.two_owners for course in courses),
        "stale": sum(course.stale for course in courses),
    }


CLEAN = dict.fromkeys(("lost", "unknown", "duplicated", "key", "partition", "two_owners", "stale"), 0)


def test_a_clean_run_has_no_fault() -> None:
    sums = audited(range(1, 501), effects_of(500))
    assert counts(sums) == CLEAN
    assert sums.weights[0].published == sums.weights[0].done == 500
    assert sums.judged[0].latency.total == 500


def test_lost_messages_are_counted_and_named() -> None:
    gone = {5, 77, 400}
    sums = audited(range(1, 501), [e for e in effects_of(500) if e["sequence"] not in gone])
    assert counts(sums) == CLEAN | {"lost": 3}
    assert sums.weights[0].examples["lost"] == sorted(gone)


def test_a_repeat_is_a_repeat_and_never_an_inversion() -> None:
    effects = effects_of(500)
    again = [effects[n] | {"finished": 600_000 + n} for n in (3, 4, 10)]
    assert counts(audited(range(1, 501), effects + again)) == CLEAN | {"duplicated": 3}


def test_a_swap_within_a_key_is_one_inversion_of_key_and_partition() -> None:
    effects = effects_of(500)
    effects[20]["finished"], effects[30]["finished"] = effects[30]["finished"], effects[20]["finished"]
    sums = audited(range(1, 501), effects)
    assert counts(sums)["key"] == 1
    assert [sequence for _, sequence in sums.judged[0].examples["key_inversions"]] == [21]


def test_a_swap_of_two_keys_of_a_partition_is_an_inversion_of_the_partition_only() -> None:
    effects = effects_of(500)
    effects[20]["finished"], effects[25]["finished"] = effects[25]["finished"], effects[20]["finished"]
    assert counts(audited(range(1, 501), effects)) == CLEAN | {"partition": 1}


def test_a_second_owner_in_an_epoch_is_found_in_each_of_its_effects() -> None:
    effects = effects_of(500)
    for number in (100, 105, 300):
        effects[number]["owner"] = "w-2"
    assert counts(audited(range(1, 501), effects)) == CLEAN | {"two_owners": 3}


def test_an_effect_of_an_older_epoch_after_a_newer_one_is_stale() -> None:
    effects = effects_of(500)
    for effect in effects[250:]:
        effect["epoch"], effect["owner"] = 2, "w-2"
    effects[400]["epoch"], effects[400]["owner"] = 1, "w-1"
    assert counts(audited(range(1, 501), effects)) == CLEAN | {"stale": 1}


def test_without_a_lease_a_restart_is_no_second_owner() -> None:
    effects = [e | {"epoch": 0, "owner": "a" if e["sequence"] < 200 else "b"} for e in effects_of(500)]
    assert counts(audited(range(1, 501), effects)) == CLEAN


def test_an_effect_of_a_message_that_nobody_published_is_unknown_and_hides_no_loss() -> None:
    published = [sequence for sequence in range(1, 501) if sequence != 50]
    effects = [e for e in effects_of(500) if e["sequence"] != 60]
    assert counts(audited(published, effects)) == CLEAN | {"lost": 1, "unknown": 1}


def test_a_parked_message_waits_and_is_not_lost_until_it_is_done() -> None:
    effects = [e | {"outcome": "done"} for e in effects_of(500)]
    effects[9]["outcome"] = "parked"
    effects[19]["outcome"] = "parked"
    effects.append(effects[19] | {"outcome": "dead-lettered", "finished": 900_000})
    sums = audited(range(1, 501), effects)
    assert sums.weights[0].waiting == 1
    assert sums.weights[0].lost == 0
    assert sums.facts[0].buried == 1


def test_effects_without_a_partition_are_judged_by_key() -> None:
    effects = [{k: v for k, v in e.items() if k != "partition"} for e in effects_of(500)]
    effects[20]["finished"], effects[30]["finished"] = effects[30]["finished"], effects[20]["finished"]
    assert counts(audited(range(1, 501), effects)) == CLEAN | {"key": 1}


def test_effects_of_another_stream_or_range_do_not_count() -> None:
    effects = [e | {"stream": "S"} for e in effects_of(100)]
    others = [e | {"stream": "T"} for e in effects_of(100)] + [effects[0] | {"sequence": 5_000}]
    assert counts(audited(range(1, 101), effects + others)) == CLEAN


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_inversions_are_first_effects_below_the_highest_of_their_key_whatever_the_packets(rng: random.Random) -> None:
    effects = effects_of(rng.randint(20, 120), keys=rng.randint(1, 6), partitions=rng.randint(1, 3))
    times = [effect["finished"] for effect in effects]
    rng.shuffle(times)
    for effect, finished in zip(effects, times, strict=True):
        effect["finished"] = finished
    effects += [effect | {"finished": effect["finished"] + 500} for effect in rng.sample(effects, 5)]
    rng.shuffle(effects)
    found = counts(audited(range(1, len(times) + 1), effects, batch=rng.randint(1, 60)))
    assert found == CLEAN | {
        "duplicated": 5,
        "key": plainly(effects, "key"),
        "partition": plainly(effects, "partition"),
    }


def plainly(effects: Sequence[Effect], group: str) -> int:
    """The definition, word by word."""
    highest: dict[str, int] = {}
    seen: set[int] = set()
    inversions = 0
    for effect in sorted(effects, key=lambda effect: effect["finished"]):
        sequence, name = effect["sequence"], effect[group]
        if sequence not in seen:
            inversions += sequence < highest.get(name, -1)
            highest[name] = max(highest.get(name, -1), sequence)
            seen.add(sequence)
    return inversions


@given(st.lists(st.integers(0, 3 * BLOCK), max_size=60))
def test_a_set_of_sequences_knows_what_is_new_across_blocks(values: list[int]) -> None:
    seen, known = SeenSequences(), set()
    for start in range(0, len(values), 9):
        part = values[start : start + 9]
        expected = []
        for value in part:
            expected.append(value not in known)
            known.add(value)
        assert seen.add_first(np.array(part, dtype=np.int64)).tolist() == expected


def test_the_highest_of_a_group_is_that_of_all_rows_before() -> None:
    highest = Highest()
    assert highest.before(np.array([7, 7, 3, 7]), np.array([5, 9, 1, 2])).tolist() == [-1, 5, -1, 9]
    assert highest.before(np.array([3, 1, 7]), np.array([0, 4, 10])).tolist() == [1, -1, 9]
    assert highest.before(np.array([7, 1]), np.array([0, 0])).tolist() == [10, 4]


def test_packets_come_out_in_order_and_what_is_held_stays_small() -> None:
    rng = np.random.default_rng(1)
    merge, out, held = Merge(), [], 0
    merge._enough = 1_000
    count = 20_000
    at = np.arange(count) + rng.integers(0, 300, count)
    rows: list[tuple[int, bytes]] = []
    for start in range(0, count, 500):
        part = slice(start, start + 500)
        columns = dict.fromkeys(("sequence", "key", "owner", "finished", "epoch", "latency"), at[part])
        columns |= {"at": at[part], "partition": np.full(500, hashed("p"))}
        rows += [(low, data) for _, low, data in packets(columns, 1)]
    for low, data in sorted(rows, key=lambda row: row[0]):
        for columns in merge.add(low, unpack(data)):
            out += columns["at"].tolist()
        merge._enough = 1_000
        held = max(held, merge._count)
    out += [value for columns in merge.finish() for value in columns["at"].tolist()]
    assert out == sorted(at.tolist())
    assert held < 4_000


def test_percentiles_are_right_within_three_percent_and_add_up() -> None:
    values = np.random.default_rng(2).lognormal(9, 2, 50_000).astype(np.int64)
    whole, half = Spread(), Spread()
    whole.feed(values[:20_000])
    half.feed(values[20_000:])
    whole.add(half)
    for share in (0.5, 0.95, 0.99):
        assert whole.percentile(share) == pytest.approx(np.percentile(values, 100 * share) / 1e6, rel=0.03)
    assert whole.largest == values.max()
    assert sum(count for _, _, count in whole.bars()) == 50_000


def test_a_time_line_of_a_year_keeps_a_bounded_number_of_buckets_and_every_count() -> None:
    tempo, other = Tempo(), Tempo()
    year = 365 * 86_400 * 1_000_000
    tempo.feed(np.linspace(0, year, 100_000).astype(np.int64))
    other.feed(np.array([5, 6]))
    tempo.add(other)
    assert len(tempo.counts) <= 2_048
    assert sum(tempo.counts.values()) == 100_002
    assert tempo.between(0, year + 1, 10).sum() == 100_002


def test_columns_of_many_types_mean_the_same() -> None:
    plain = pa.RecordBatch.from_pylist([{"sequence": 1, "finished": 2.5, "partition": 3, "key": "k", "epoch": None}])
    coded = pa.RecordBatch.from_pydict(
        {
            "sequence": pa.array([1], pa.int32()),
            "finished": pa.array([2_500_000_000], pa.timestamp("ns", tz="UTC")),
            "partition": pa.array(["3"]).dictionary_encode(),
            "key": pa.array(["k"], pa.large_string()),
            "epoch": pa.array([0], pa.int16()),
        }
    )
    first, second = (Reading("S", 1, 1).columns(batch) for batch in (plain, coded))
    assert {name: column.tolist() for name, column in first.items()} == {
        name: column.tolist() for name, column in second.items()
    }


def test_objectives_that_nothing_measured_stay_open() -> None:
    took = Spread()
    open_ones = {slo.name: slo.met for slo in slos(took, 0.05, None)}
    assert list(open_ones.values()) == [None, False, None]
    took.feed(np.full(1_000, 2_000))
    assert [slo.met for slo in slos(took, 0.0, (999.0, 1_000.0))] == [True, True, True]
    assert slos(took, 0.0, (998.0, 1_000.0))[2].met is False


def test_updates_are_summed_over_the_metrics_pages_of_all_workers(tmp_path: Path) -> None:
    lines = '# TYPE parti_worker_consumer_updates counter\nparti_worker_consumer_updates_total{result="%s"} %d\n'
    pages = []
    for number, (result, count) in enumerate((("success", 9), ("failure", 1), ("noop", 5))):
        pages.append(tmp_path / f"{number}.txt")
        pages[-1].write_text(lines % (result, count))
    assert update_counts(tuple(map(str, pages))) == (9.0, 10.0)
    assert update_counts(()) is None
    with pytest.raises(ConfigError, match="cannot read metrics"):
        update_counts((str(tmp_path / "none"),))


@pytest.mark.parametrize("rules", [{"order": "day"}, {"duplicates": -1}])
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AuditRules(**rules)

"""Two partitions that share a subject are found, with any wildcards, and nothing else is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import ConfigError, OverlappingPartitions
from parti.model import Partition
from parti.overlap import SubjectTrie, refuse_overlaps
from parti.subjects import overlaps
from parti.worker.routing import Routes, SubjectTemplate

tokens = st.sampled_from(["a", "b", "c", "*"])
subjects = st.tuples(st.lists(tokens, min_size=0, max_size=4), st.sampled_from(["", ">"])).map(
    lambda found: ".".join([*found[0], *([found[1]] if found[1] else [])]) or "a"
)


@given(st.lists(subjects, min_size=1, max_size=8))
def test_the_trie_agrees_with_comparing_each_with_each(given_subjects: list[str]) -> None:
    shared = any(overlaps(one, other) for one, other in combinations(given_subjects, 2))
    owned = [(f"p{n}", (subject,)) for n, subject in enumerate(given_subjects)]
    if not shared:
        refuse_overlaps(owned)
        return
    with pytest.raises(OverlappingPartitions) as refused:
        refuse_overlaps(owned)
    first, second = (int(name.removeprefix("p")) for name in refused.value.partitions)
    assert overlaps(given_subjects[first], given_subjects[second])
    assert refused.value.subjects == (given_subjects[first], given_subjects[second])


@given(subjects, st.lists(subjects, max_size=6))
def test_what_the_trie_finds_really_overlaps(asked: str, stored: list[str]) -> None:
    trie = SubjectTrie()
    for n, subject in enumerate(stored):
        trie.add(f"p{n}", subject)
    found = trie.overlapping(asked)
    assert (found is not None) == any(overlaps(asked, subject) for subject in stored)
    assert found is None or overlaps(asked, found[1])


def test_the_error_names_both_partitions_and_both_subjects() -> None:
    with pytest.raises(ConfigError, match=r"eu and eu\.1 share subjects \(t\.eu\.>, t\.eu\.1\.>\)"):
        Routes(SubjectTemplate("t.{partition}.>"), [Partition(("eu",)), Partition(("eu", "1"))])


def test_one_partition_may_have_subjects_that_overlap_each_other() -> None:
    refuse_overlaps([("a", ("x.*", "x.1")), ("b", ("y",))])


def steps(work: Callable[[], object]) -> int:
    """How many lines `work` executes: what a clock measures, without the machine's other work in it."""
    count = 0

    def line(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def one_key(count: int) -> list[Partition]:
    return [Partition((f"p{n}",)) for n in range(count)]


def one_or_two_keys(count: int) -> list[Partition]:
    return [Partition((f"p{n}",) if n % 2 else ("eu", f"p{n}")) for n in range(count)]


@pytest.mark.parametrize("partitions", [one_key, one_or_two_keys])
@pytest.mark.parametrize("template", ["t.{partition}.>", "t.{partition}.*", "t.*.{partition}.*.>", "*.{partition}.a"])
def test_routes_of_wildcard_templates_cost_each_partition_the_same_however_many_there_are(
    template: str, partitions: Callable[[int], list[Partition]]
) -> None:
    def made(count: int) -> int:
        own = partitions(count)
        return steps(lambda: Routes(SubjectTemplate(template), own))

    assert made(800) < 5 * made(200), "four times as many take about four times as long, not sixteen times"


def test_looking_for_overlaps_costs_each_partition_the_same_however_many_there_are() -> None:
    def looked(count: int) -> int:
        owned = [(f"eu.{n}", (f"t.eu.{n}.>", f"u.*.{n}")) for n in range(count)]
        return steps(lambda: refuse_overlaps(owned))

    assert looked(2_000) < 5 * looked(500)
    with pytest.raises(OverlappingPartitions, match=r"eu\.9999 and eu "):
        refuse_overlaps([*((f"eu.{n}", (f"t.eu.{n}.>",)) for n in range(9999, 0, -1)), ("eu", ("t.eu.>",))])

"""Two partitions that share a subject are found, whatever their wildcards, and nothing else is refused."""

from __future__ import annotations

from itertools import combinations
from time import perf_counter

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


def test_ten_thousand_partitions_are_looked_through_quickly() -> None:
    began = perf_counter()
    refuse_overlaps((f"eu.{n}", (f"t.eu.{n}.>", f"u.*.{n}")) for n in range(10_000))
    assert perf_counter() - began < 5.0, "each with each would take minutes"
    with pytest.raises(OverlappingPartitions, match=r"eu\.9999 and eu "):
        refuse_overlaps([*((f"eu.{n}", (f"t.eu.{n}.>",)) for n in range(9999, 0, -1)), ("eu", ("t.eu.>",))])

"""Subjects: wildcards as the server understands them, and the partition of a key as the server computes it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.errors import ConfigError
from parti.subjects import (
    covers,
    fnv1a,
    matches,
    normalize_filters,
    overlaps,
    partition_of,
    validate_subject,
    validate_token,
)

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "partition-vectors.json").read_text())["vectors"]

tokens = st.sampled_from(["a", "b"])
literals = st.lists(tokens, min_size=1, max_size=4).map(".".join)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.sampled_from(["a", "b", "*"]), max_size=3))
    if not parts or draw(st.booleans()):
        parts.append(">")
    return ".".join(parts)


# Every subject of up to five tokens over two letters: patterns have at most four tokens, so five decide everything.
ALL = [".".join(parts) for size in range(1, 6) for parts in product("ab", repeat=size)]


def matched(pattern: str) -> set[str]:
    return {subject for subject in ALL if matches(pattern, subject)}


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*", "a", True),
        ("*.b.>", "a.b.c.d", True),
        ("a*.b", "ab.b", False),
        ("a*.b", "a*.b", True),
    ],
)
def test_a_pattern_matches_as_on_the_server(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


@given(patterns(), patterns())
def test_patterns_overlap_exactly_when_they_share_a_subject(first: str, second: str) -> None:
    assert overlaps(first, second) == bool(matched(first) & matched(second))
    assert overlaps(first, second) == overlaps(second, first)


@given(patterns(), patterns())
def test_a_pattern_covers_another_exactly_when_it_matches_all_of_its_subjects(wide: str, narrow: str) -> None:
    assert covers(wide, narrow) == (matched(narrow) <= matched(wide))


@given(st.lists(st.one_of(patterns(), literals), max_size=6))
def test_normalized_filters_match_the_same_subjects_and_none_covers_another(given_filters: list[str]) -> None:
    normal = normalize_filters(given_filters)
    assert set().union(*map(matched, normal)) == set().union(*map(matched, given_filters))
    assert list(normal) == sorted(set(normal))
    assert not any(covers(a, b) for a in normal for b in normal if a != b)
    assert normalize_filters(normal) == normal


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("", "empty"),
        ("a..b", "token 2 is empty"),
        (".a", "token 1 is empty"),
        ("a.", "token 2 is empty"),
        ("a.b c", "token 2 contains a blank"),
        ("a\r\nPUB x", "token 1 contains a blank"),
        ("a.>.b", "only at the end"),
        ("a.*", "wildcard"),
        (">", "wildcard"),
    ],
)
def test_a_wrong_subject_is_refused_and_the_token_is_named(subject: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate_subject(subject)


@pytest.mark.parametrize("subject", ["a", "a.b-c_d", "käse.🧀", "$KV.bucket.key", "a*.>b", "x" * 1000])
def test_a_right_subject_is_returned_unchanged(subject: str) -> None:
    assert validate_subject(subject) == subject


def test_a_token_has_no_dot() -> None:
    assert validate_token("ORDERS") == "ORDERS"
    with pytest.raises(ConfigError, match="single token"):
        validate_token("a.b", what="stream")


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{'+'.join(vector['tokens'])}%{vector['partitions']}")
def test_the_partition_of_a_key_is_the_servers(vector: dict[str, object]) -> None:
    assert partition_of(vector["tokens"], vector["partitions"]) == vector["partition"]  # type: ignore[arg-type]


def test_the_hash_is_fnv1a_of_32_bits() -> None:
    """The published test vectors of FNV-1a."""
    assert fnv1a(b"") == 0x811C9DC5
    assert fnv1a(b"a") == 0xE40C292C
    assert fnv1a(b"foobar") == 0xBF9CF968


def test_a_partition_count_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        partition_of(["a"], 0)

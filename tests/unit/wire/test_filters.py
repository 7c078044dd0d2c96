"""Filters on whole columns agree with `subjects.matches` on each subject."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parti.errors import ConfigError
from parti.subjects import matches
from parti.wire.filters import SubjectFilter

# Letters that mean something in a regular expression, and tokens that hold wildcards without being one.
tokens = st.one_of(
    st.sampled_from(["a", "b", "ab", "a*", ">a", "$KV", "a+", "[a]", "(", "\\d", "^a", "a|b", "käse", "🧀", "-"]),
    st.text("ab$^[](){}|\\+?-_/", min_size=1, max_size=3),
)
subjects = st.lists(tokens, min_size=1, max_size=4).map(".".join)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.one_of(tokens, st.just("*")), max_size=3))
    if not parts or draw(st.booleans()):
        parts.append(">")
    return ".".join(parts)


@given(st.lists(st.one_of(patterns(), subjects), max_size=5), st.lists(subjects, max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_mask_is_true_exactly_where_a_pattern_matches(filters: list[str], column: list[str]) -> None:
    mask = SubjectFilter(filters).mask(pa.array(column, pa.string()))
    assert mask.tolist() == [not filters or any(matches(p, subject) for p in filters) for subject in column]


@given(st.lists(subjects, min_size=1, max_size=6), st.integers(1, 4))
@settings(deadline=None)
def test_patterns_made_from_the_subjects_themselves_match_them(column: list[str], width: int) -> None:
    """Random patterns rarely match; these always match at least once."""
    for subject in column:
        parts = subject.split(".")
        parts[min(width, len(parts)) - 1] = "*"
        pattern = ".".join(parts)
        mask = SubjectFilter([pattern]).mask(pa.array(column, pa.string()))
        assert mask[column.index(subject)]
        assert mask.tolist() == [matches(pattern, each) for each in column]


@pytest.mark.parametrize("filters", [(), (">",), ("a.>", ">")])
def test_no_filter_and_the_full_wildcard_match_everything(filters: tuple[str, ...]) -> None:
    chosen = SubjectFilter(filters)
    assert chosen.matches_all
    assert chosen.mask(pa.array(["a", "b.c"], pa.string())).tolist() == [True, True]


def test_a_malformed_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"subject filter 'a\.\.b'"):
        SubjectFilter(["a..b"])


def test_a_filter_shows_its_patterns() -> None:
    assert repr(SubjectFilter(["b", "a.*", "a.x"])) == "SubjectFilter(a.*, b)"
    assert repr(SubjectFilter()) == "SubjectFilter(>)"

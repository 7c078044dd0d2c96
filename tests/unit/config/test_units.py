"""Durations and sizes: values with a unit are parsed exactly, and values without one are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parti.config.units import format_duration, format_size, parse_duration, parse_size
from parti.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6s", 6.0),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1m30s", 90.0),
        ("1.5h", 5400.0),
        (" 75 ms ", 0.075),
        ("0", 0.0),
        ("0s", 0.0),
        ("100us", 1e-4),
        ("100µs", 1e-4),
        ("2D", 172_800.0),
        ("100ms", 0.1),
    ],
)
def test_a_duration_with_a_unit_becomes_seconds(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("16MB", 16_000_000), ("1GiB", 2**30), ("512B", 512), ("0", 0), ("1.5KiB", 1536), ("2 tb", 2 * 10**12)],
)
def test_a_size_with_a_unit_becomes_bytes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["6", "6.5", "", " ", "s", "6 parsecs", "-5s", "1e3s", "6s7", "nan", "6s,", "٣s"])
def test_a_text_that_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match='"500ms"'):
        parse_duration(text)


@pytest.mark.parametrize("text", ["16", "", "MB", "1s", "-1MB", "0.3B", "16MB!"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_a_number_without_a_unit_is_told_so() -> None:
    with pytest.raises(ConfigError, match="it has no unit"):
        parse_duration("30")


@given(st.integers(min_value=0, max_value=10**15))
def test_a_formatted_duration_parses_back_to_the_same_value(microseconds: int) -> None:
    seconds = microseconds / 1_000_000
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=2**62))
def test_a_formatted_size_parses_back_to_the_same_value(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.text(max_size=30))
def test_any_text_is_a_duration_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert parse_duration(text) >= 0


def test_formatting_uses_the_largest_whole_unit() -> None:
    durations = [format_duration(seconds) for seconds in (0.2, 5.0, 120.0, 90.0, 3600.0, 0.0)]
    assert durations == ["200ms", "5s", "2m", "90s", "1h", "0s"]
    assert [format_size(n) for n in (16_000_000, 2**30, 1536, 7)] == ["16MB", "1GiB", "1536B", "7B"]


def test_a_negative_or_infinite_duration_cannot_be_shown() -> None:
    for seconds in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            format_duration(seconds)


def test_a_duration_or_size_beyond_all_reason_is_refused() -> None:
    with pytest.raises(ConfigError, match="too large"):
        parse_duration("9" * 400 + "h")
    with pytest.raises(ConfigError, match="too large"):
        parse_size("9" * 400 + "TB")

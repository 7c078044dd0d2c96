"""Durations and sizes as text: "6s", "500ms", "1m30s", "16MB", "1GiB". A number without a unit is refused.

Durations become float seconds, sizes become integer bytes. `format_duration` and `format_size` write a text that parses
back to the same value.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Final

from parti.errors import ConfigError

# Exact factors: 0.1 s written as "100ms" must compare equal to 0.1.
_SECONDS: Final[dict[str, Fraction]] = {
    "d": Fraction(86_400),
    "h": Fraction(3_600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1_000),
    "us": Fraction(1, 1_000_000),
    "ns": Fraction(1, 1_000_000_000),
}
_BYTES: Final[dict[str, int]] = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
}
_SIZE_NAMES: Final = ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB")
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
LARGEST: Final = 2**63  # the range of the server's counters; seconds and bytes above it are typing errors
_LONGEST: Final = 100  # characters; Python itself refuses numbers of more than 4,300 digits, with a different error


def parse_duration(text: str) -> float:
    """Seconds of "6s", "500ms", "1m30s", "1.5h" or "0"; anything else is a `ConfigError`."""
    return float(_total(text, _SECONDS, "a duration", '"500ms", "6s", "2m" or "1h"'))


def parse_size(text: str) -> int:
    """Bytes of "16MB" (16,000,000), "1GiB" (2^30), "512B" or "0"; anything else is a `ConfigError`."""
    size = _total(text, {unit: Fraction(n) for unit, n in _BYTES.items()}, "a size", '"512KiB", "16MB" or "1GiB"')
    if size.denominator != 1:
        raise ConfigError(f"{text!r} is no whole number of bytes")
    return int(size)


def _total(text: str, factors: dict[str, Fraction], what: str, examples: str) -> Fraction:
    if len(text) > _LONGEST:
        raise ConfigError(f"{text[:20]!r}...: it is too large; write {examples}")
    cleaned = text.strip().lower().replace("µ", "u")
    if cleaned == "0":
        return Fraction(0)
    total, position = Fraction(0), 0
    while position < len(cleaned):
        part = _PART.match(cleaned, position)
        factor = factors.get(part[2]) if part else None
        if part is None or factor is None:
            hint = "it has no unit" if re.fullmatch(r"[\d.]+", cleaned) else f"it is not {what}"
            raise ConfigError(f"{text!r}: {hint}; write {examples}")
        total += Fraction(part[1]) * factor
        if total >= LARGEST:
            raise ConfigError(f"{text!r}: it is too large")
        position = part.end()
    if not position:
        raise ConfigError(f"{text!r}: it is empty; write {examples}")
    return total


def format_duration(seconds: float) -> str:
    """The shortest text with one unit that parses back to exactly this value, such as "200ms" or "2m"."""
    if not math.isfinite(seconds) or seconds < 0:
        raise ConfigError(f"{seconds} is no duration")
    if seconds == 0:
        return "0s"
    exact = Fraction(repr(float(seconds)))
    for unit, factor in _SECONDS.items():
        if (exact / factor).denominator == 1:
            return f"{exact / factor}{unit}"
    return f"{float(exact / _SECONDS['ns']):.15g}ns"


def format_size(size: int) -> str:
    """The largest unit that divides the size, such as "16MB" or "1GiB"."""
    for name in _SIZE_NAMES:
        if size and size % _BYTES[name.lower()] == 0:
            return f"{size // _BYTES[name.lower()]}{name}"
    return f"{size}B"

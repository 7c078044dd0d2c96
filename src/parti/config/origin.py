"""Where a value came from, as errors and `parti config show` print it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Source(StrEnum):
    """The sources of a value; a later one overrides an earlier one."""

    DEFAULT = "default"
    CONTEXT = "nats context"
    FILE = "file"
    ENV = "env"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Origin:
    """`str(origin)` is "default", "file parti.toml:3", "env PARTI_RETRY__RETRY_BASE" or "flag"."""

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.detail}".rstrip()


DEFAULT: Final = Origin(Source.DEFAULT)

_TABLE: Final = re.compile(r"\s*\[\s*([A-Za-z0-9_.-]+)\s*\]\s*(?:#.*)?")
_ASSIGNMENT: Final = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*=")


def toml_lines(text: str) -> dict[str, int]:
    """Line numbers of plain `[table]` headers and `key = value` lines, by dotted name.

    tomllib drops positions. This scan serves messages only: keys that it cannot locate (quoted keys, inline tables) are
    left out, and the message then names only the file.
    """
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _TABLE.fullmatch(line):
            table = f"{header[1]}."
            lines.setdefault(header[1], number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(table + assignment[1], number)
    return lines

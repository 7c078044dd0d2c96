"""The position of a query that is a member of a group, as readable JSON in Spark's checkpoint.

    {"stream": "ORDERS-billing", "created": "...", "sequence": 4711, "started": 4000, "lease": 1763220000000000000,
     "partitions": "0-3,8"}

Within one lease it is a position like any other. A new lease, as after a change of the membership, starts again at
`started`: a new partition may have messages far below the position of the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from parti.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GroupOffset:
    """All messages of these partitions with `started` < sequence <= `sequence` are done, if they existed."""

    stream: str
    created: str
    sequence: int
    started: int
    lease: int
    partitions: str

    def to_json(self) -> dict[str, Any]:
        """As Spark stores it; always in the same order, because Spark compares offsets as text."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any], *, stream: str) -> GroupOffset:
        """Read an offset back; one of another stream, or of a query that was in no group, is refused."""
        if found.get("stream") != stream or "lease" not in found:
            raise ConfigError(
                f"the checkpoint belongs to {found.get('stream') or found!r}"
                f"{'' if 'lease' in found else ', read outside of any group'}, not to a member's read of {stream!r}: "
                "start with a new checkpoint folder"
            )
        return cls(
            stream,
            str(found["created"]),
            int(found["sequence"]),
            int(found["started"]),
            int(found["lease"]),
            str(found["partitions"]),
        )

    def begin_of(self, end: GroupOffset) -> int:
        """The sequence behind which the batch that Spark calls `self` to `end` begins."""
        return self.sequence if (self.lease, self.created) == (end.lease, end.created) else end.started

    @property
    def owned(self) -> tuple[int, ...]:
        return read_partitions(self.partitions)


def write_partitions(partitions: Iterable[int]) -> str:
    """Numbers in rising order as text, runs of them shortened: `0-3,8`."""
    runs: list[str] = []
    for _, run in groupby(enumerate(sorted(partitions)), lambda place: place[1] - place[0]):
        numbers = [number for _, number in run]
        runs.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(runs)


def read_partitions(text: str) -> tuple[int, ...]:
    """The numbers that `write_partitions` wrote."""
    found: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)

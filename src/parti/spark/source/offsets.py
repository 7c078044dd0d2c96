"""A query's position in a stream, as readable JSON; and how a position that a user names becomes a sequence.

    {"stream": "ORDERS", "created": "2026-01-31T08:15:00.123456789Z", "sequence": 4711, "started": 0}

`sequence` is the last one that the query has read. `created` tells a stream from a later one of the same name.
`started` is the sequence after which the query began. Spark does not record it: when a query dies in its first batch,
Spark asks again for the initial offset and replays the batch from there, so that with `latest` the whole batch would be
skipped. The end of the batch is in the checkpoint, and through `started` so is its beginning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from parti.errors import ConfigError
from parti.wire.errors import MessageNotFound
from parti.wire.stored import parse_time

if TYPE_CHECKING:  # it imports NumPy and Arrow, which nobody needs to check options
    from parti.wire.ranges import RangeReader, StreamState


@dataclass(frozen=True, slots=True)
class Offset:
    """A position in one incarnation of a stream."""

    stream: str
    created: str
    sequence: int
    started: int

    def to_json(self) -> dict[str, Any]:
        """As Spark stores it; always in the same order, because Spark compares offsets as text."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any], *, stream: str) -> Offset:
        """Read an offset back; an offset of another stream or of another source is refused."""
        if found.get("stream") != stream:
            raise ConfigError(
                f"the checkpoint belongs to {found.get('stream') or found!r}, not to stream {stream!r}: "
                "start with a new checkpoint folder, or name the stream it was made with"
            )
        try:
            return cls(stream, str(found["created"]), int(found["sequence"]), int(found["started"]))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"the checkpoint holds no JetStream offset but {found!r}") from None

    def begin_of(self, end: Offset) -> int:
        """The sequence after which the batch that Spark calls `self` to `end` starts."""
        if self.created != end.created:
            return 0  # the stream was recreated in between, and the loss of the old one is allowed
        return self.sequence if self.started == end.started else end.started


@dataclass(frozen=True, slots=True)
class Position:
    """A user's position in a stream; `first_sequence` gives the first message at or after it."""

    at: Literal["earliest", "latest"] | int
    is_time: bool = False
    """Whether `at` is a time in nanoseconds since 1970 instead of a sequence."""

    @classmethod
    def parse(cls, text: str) -> Position:
        """From `earliest`, `latest`, or a sequence."""
        match text.lower():
            case "earliest":
                return cls("earliest")
            case "latest":
                return cls("latest")
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"{text!r} is neither earliest nor latest nor a sequence from 1 on")
        return cls(int(text))

    @classmethod
    def parse_ending(cls, text: str) -> Position:
        """From `latest`, or a sequence: a read that ends where the stream begins would read nothing."""
        position = cls.parse(text)
        if position.at == "earliest":
            raise ValueError("a read cannot end at earliest: write latest, or a sequence")
        return position

    @classmethod
    def parse_time(cls, text: str) -> Position:
        """From an ISO 8601 time (without a zone: UTC) or milliseconds since 1970."""
        if text.isdecimal():
            return cls(int(text) * 1_000_000, is_time=True)
        try:
            return cls(parse_time(text), is_time=True)
        except ValueError:
            raise ValueError(f"{text!r} is neither an ISO 8601 time nor milliseconds since 1970") from None

    def first_sequence(self, reader: RangeReader, state: StreamState) -> int:
        """The first sequence at or after this position; the one after the last when there is none yet."""
        if self.at == "earliest":
            return state.first_seq or 1
        if self.at == "latest":
            return state.last_seq + 1
        return _first_since(reader, state, self.at) if self.is_time else self.at

    def is_open(self, first: int, state: StreamState) -> bool:
        """Whether this position, now at `first`, is the stream's start: messages removed before reading are no loss."""
        return self.at == "earliest" or (self.is_time and first <= state.first_seq)


def _first_since(reader: RangeReader, state: StreamState, time_ns: int) -> int:
    """The first sequence stored at or after `time_ns`, by asking the stream's leader for ~log2(n) messages.

    Direct Get has `start_time` in one call, but any replica may answer it, and a lagging one would place the start too
    early or the end too late. One request takes 0.14 ms, so a billion messages are searched in 5 ms.
    """
    low = max(state.first_seq, 1)
    high = found = state.last_seq + 1
    while low < high:
        middle = (low + high) // 2
        try:
            request = {"seq": middle, "next_by_subj": ">"}
            message = reader.connection.api(f"STREAM.MSG.GET.{state.name}", request)["message"]
        except MessageNotFound:
            high = middle
            continue
        if parse_time(message["time"]) >= time_ns:
            high, found = middle, int(message["seq"])
        else:
            low = int(message["seq"]) + 1
    return found

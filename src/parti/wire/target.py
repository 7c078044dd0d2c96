"""The stream that a publisher writes to: found by name or by subject, with what it allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from parti.wire.blocking import BlockingConnection
from parti.wire.errors import StreamNotFound


@dataclass(frozen=True, slots=True)
class Target:
    """What a publisher must know of a stream before it sends."""

    stream: str
    subjects: tuple[str, ...]
    allow_atomic: bool
    max_msg_size: int
    """Bytes of a message with its headers; -1 for no limit."""
    duplicate_window: float
    """Seconds for which the stream remembers message ids; a replay after that is stored again."""

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> Target:
        config = info["config"]
        return cls(
            stream=config["name"],
            subjects=tuple(config.get("subjects") or ()),
            allow_atomic=bool(config.get("allow_atomic")),
            max_msg_size=int(config.get("max_msg_size") or -1),
            duplicate_window=int(config.get("duplicate_window") or 0) / 1e9,
        )


def target_named(connection: BlockingConnection, stream: str) -> Target:
    """The stream of this name; StreamNotFound when there is none."""
    return Target.from_info(connection.api(f"STREAM.INFO.{stream}"))


def target_of(connection: BlockingConnection, subject: str) -> Target:
    """The stream that takes this subject; StreamNotFound when none does."""
    names = connection.api("STREAM.NAMES", {"subject": subject}).get("streams") or ()
    if not names:
        raise StreamNotFound(
            f"no stream takes subject {subject!r}: create one that does, or correct the subject", code=404
        )
    return target_named(connection, names[0])

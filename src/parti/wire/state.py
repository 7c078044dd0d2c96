"""The state of a stream, as reported by its leader."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from parti.wire.digits import Ints

_STREAM_LIMITS = ("max_age", "max_msgs", "max_bytes")
# With one of these, messages are normally removed one by one: superseded, expired, or done.
_ONE_BY_ONE = ("allow_msg_ttl", "allow_msg_schedules")


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a range read must know about its stream, as reported by the stream's leader."""

    name: str
    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    created: str
    retention: str
    storage: str
    replicas: int
    allow_direct: bool
    subjects: tuple[str, ...]
    last_time: datetime | None
    num_deleted: int = 0
    """How many sequences between the first and the last are missing."""
    loses: bool = True
    """Whether a message removed from the front may be one that still has to be read.

    Not on a work queue, where it is done. Not on a stream without own limits whose messages are superseded by later
    ones of their subject, or expire, one by one: inside the stream that looks the same as a deletion.
    """
    leader: str | None = None
    """The server that leads the stream."""
    deleted: Ints | None = field(default=None, compare=False, repr=False)
    """The deleted sequences in order; None if not requested."""

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> StreamState:
        config, state = info["config"], info["state"]
        last_time = state.get("last_ts", "")
        limited = any(int(config.get(limit) or 0) > 0 for limit in _STREAM_LIMITS)
        fading = int(config.get("max_msgs_per_subject") or 0) > 0 or any(config.get(each) for each in _ONE_BY_ONE)
        deleted = state.get("deleted")
        return cls(
            name=config["name"],
            first_seq=state["first_seq"],
            last_seq=state["last_seq"],
            messages=state["messages"],
            bytes=state["bytes"],
            created=info["created"],
            retention=config["retention"],
            storage=config["storage"],
            replicas=config["num_replicas"],
            allow_direct=bool(config.get("allow_direct")),
            subjects=tuple(config.get("subjects") or ()),
            last_time=None if last_time.startswith("0001") or not last_time else datetime.fromisoformat(last_time),
            num_deleted=int(state.get("num_deleted") or 0),
            loses=config["retention"] != "workqueue" and (limited or not fading),
            leader=(info.get("cluster") or {}).get("leader"),
            deleted=None if deleted is None else np.array(deleted, dtype=np.int64),
        )

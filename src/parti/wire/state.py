"""What a stream's leader says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np

from parti.wire.digits import Ints

_STREAM_LIMITS = ("max_age", "max_msgs", "max_bytes")
# With one of these, messages go one by one in the normal course: superseded, expired, or done.
_ONE_BY_ONE = ("allow_msg_ttl", "allow_msg_schedules")


@dataclass(frozen=True, slots=True)
class StreamState:
    """What a range read must know of its stream, as the stream's leader said it."""

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
    """How many sequences between the first and the last are not there."""
    loses: bool = True
    """Whether what goes from the front may be a message that somebody has yet to read.

    Not on a work queue, where it is work done. Not on a stream without limits of its own whose messages are superseded
    by later ones of their subject, or expire, one by one: inside the stream nobody could tell it from a deletion.
    """
    leader: str | None = None
    """The server that leads the stream."""
    deleted: Ints | None = field(default=None, compare=False, repr=False)
    """Those sequences in order; None when nobody asked for them."""

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

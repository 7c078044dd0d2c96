"""What a stream's leader says of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any


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

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> StreamState:
        config, state = info["config"], info["state"]
        last_time = state.get("last_ts", "")
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
        )

"""A member's consumer: what the caller may choose, and the exact configuration for the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal

from parti.groups.errors import BadTemplate
from parti.groups.names import PRIORITY_GROUP, GroupKind

_NANOSECONDS = 1_000_000_000
_SHORTEST_TTL = 1.0  # the reference's minimum of the pin's TTL
_OWNED = frozenset(
    {
        "name",
        "durable_name",
        "filter_subject",
        "filter_subjects",
        "priority_groups",
        "priority_policy",
        "priority_timeout",
        "deliver_subject",
        "deliver_group",
        "flow_control",
        "idle_heartbeat",
    }
)
"""Fields that the group sets itself; callers may not set them."""
_MOST_PENDING = 65_536  # messages that a member may hold in memory; the server's own default is 1,000


def nanoseconds(seconds: float) -> int:
    """As Go computes it: `4.1` is 4,100,000,000; truncation would give one less, and with it another consumer."""
    return round(seconds * _NANOSECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerTemplate:
    """The choices for a member's consumer. All instances of one member, in any language, should use the same.

    The group itself decides name, filters and everything about pinning.
    """

    ack_wait: float = 5.0  # the reference's default; a crashed instance is replaced after this
    max_ack_pending: int = 1  # strictly one after the other; more only together with lanes
    ack_policy: Literal["explicit", "none"] = "explicit"
    """`none` is for static groups whose handler may lose messages; `all` makes no sense with lanes."""
    max_deliver: int | None = None  # unlimited: a message that the server gives up on would be lost without a trace
    backoff: tuple[float, ...] = ()
    headers_only: bool = False
    num_replicas: int = 0  # as the stream's
    mem_storage: bool = False
    inactive_threshold: float | None = None
    """Static groups only; an elastic member's consumer is always deleted after `ack_wait` without a pull."""
    start_sequence: int | None = None
    """Static groups only, and only when the member's durable is first created; an elastic group's start is set when the
    group is created."""
    start_time: datetime | None = None
    new_only: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Any other field of a consumer's configuration, with the server's names and values (durations in nanoseconds):
    `description`, `metadata`, `sample_freq`, `max_waiting`, `max_batch`, `deliver_policy`, and fields of later servers.
    Only the group's own fields are refused."""

    def __post_init__(self) -> None:
        self._check_extra()
        if self.ack_wait <= 0:
            raise BadTemplate(f"ack_wait is {self.ack_wait}: use a positive number of seconds")
        if not 1 <= self.max_ack_pending <= _MOST_PENDING:
            raise BadTemplate(f"max_ack_pending is {self.max_ack_pending}: use 1 to {_MOST_PENDING} (kept in memory)")
        starts = [self.start_sequence is not None, self.start_time is not None, self.new_only]
        if sum(starts) > 1:
            raise BadTemplate("start_sequence, start_time and new_only exclude each other: give one")
        if self.start_sequence is not None and self.start_sequence < 1:
            raise BadTemplate(f"start_sequence is {self.start_sequence}: sequences begin at 1")

    def _check_extra(self) -> None:
        if owned := sorted(_OWNED & self.extra.keys()):
            raise BadTemplate(f"extra sets {', '.join(owned)}: that is the group's own, leave it out")
        named = {each.name for each in fields(self)} | {"opt_start_seq", "opt_start_time"}
        if twice := sorted(named & self.extra.keys()):
            raise BadTemplate(f"extra sets {', '.join(twice)}: the template has a field for it, use that")
        if "deliver_policy" in self.extra and self._start() != {"deliver_policy": "all"}:
            raise BadTemplate("extra sets deliver_policy beside another start: give one")

    @property
    def pin_ttl(self) -> float:
        """Seconds after which a silent instance loses the pin."""
        return max(self.ack_wait, _SHORTEST_TTL)

    def check_kind(self, kind: GroupKind) -> None:
        """Refuse settings that this kind of group does not support, before anything is sent."""
        if kind is GroupKind.STATIC:
            return
        if self.ack_policy != "explicit":
            raise BadTemplate("an elastic group needs explicit acks: a message is removed when it is acknowledged")
        if self._start() != {"deliver_policy": "all"} or self.extra.get("deliver_policy", "all") != "all":
            raise BadTemplate("an elastic member starts where its group is: choose the start when the group is created")
        if self.inactive_threshold is not None:
            raise BadTemplate("an elastic member's inactive_threshold is its ack_wait: leave it out")

    def config(self, kind: GroupKind, name: str, filters: tuple[str, ...]) -> dict[str, Any]:
        """The configuration as the reference sends it; the server refuses any difference (10148)."""
        elastic = kind is GroupKind.ELASTIC
        optional: dict[str, Any] = {
            "max_deliver": self.max_deliver,
            "backoff": [nanoseconds(wait) for wait in self.backoff] or None,
            "headers_only": self.headers_only or None,
            "inactive_threshold": self._inactive(elastic),
            "mem_storage": self.mem_storage or None,
        }
        return {
            "name" if elastic else "durable_name": name,
            **self._start(),
            "ack_policy": self.ack_policy,
            "ack_wait": nanoseconds(self.ack_wait),
            "replay_policy": "instant",
            "max_ack_pending": self.max_ack_pending,
            "num_replicas": self.num_replicas,
            "filter_subjects": list(filters),
            "priority_policy": "pinned_client",
            "priority_timeout": nanoseconds(self.pin_ttl),
            "priority_groups": [PRIORITY_GROUP],
            **{name: value for name, value in optional.items() if value is not None},
            **self.extra,
        }

    def _inactive(self, elastic: bool) -> int | None:
        seconds = self.ack_wait if elastic else self.inactive_threshold
        return nanoseconds(seconds) if seconds is not None else None

    def _start(self) -> dict[str, Any]:
        if self.start_sequence is not None:
            return {"deliver_policy": "by_start_sequence", "opt_start_seq": self.start_sequence}
        if self.start_time is not None:
            moment = self.start_time.astimezone(UTC).isoformat().replace("+00:00", "Z")
            return {"deliver_policy": "by_start_time", "opt_start_time": moment}
        return {"deliver_policy": "new" if self.new_only else "all"}

"""The records of groups in the reference's format; a write never changes anything that was not edited.

Go compares what it reads with what it holds, and quits on a difference: `null` rewritten as `[]` ends every running Go
member (docs/evidence/groups.md#g11). So an edit replaces the edited field's bytes and keeps all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from parti.groups.errors import OldRecord, RecordUnreadable

T = TypeVar("T")

_ORDER = (
    "max_members",
    "filters",
    "partitioning_filters",
    "max_buffered_msg",
    "max_buffered_bytes",
    "members",
    "member_mappings",
)
_OLD_NAMES = ("filter", "partitioning_wildcards", "partitioning-wildcards", "msg-buffer-size", "member-mappings")
_LARGEST = 1 << 20  # partitions; far more than a consumer's filters can carry, and few enough to iterate over


@dataclass(frozen=True, slots=True)
class MemberMapping:
    """The partitions of one member, in the order listed."""

    member: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartitioningFilter:
    """Which subjects are included, and which of their `*` tokens make the key; no index means the whole subject."""

    filter: str
    wildcards: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembership:
    """Shared by both kinds: the number of partitions, and their owners."""

    max_members: int
    members: tuple[str, ...] = ()
    mappings: tuple[MemberMapping, ...] = ()
    old_names: tuple[str, ...] = ()
    """Field names of an earlier format in the stored record; empty for the current format."""

    @property
    def member_names(self) -> tuple[str, ...]:
        """Every member the record lists, sorted."""
        return tuple(sorted({*self.members, *(mapping.member for mapping in self.mappings)}))


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRecord(GroupMembership):
    """A static group: its stream carries the partition as the first token of its subjects."""

    filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRecord(GroupMembership):
    """An elastic group: a work queue sources the stream and adds the partition token."""

    partitioning_filters: tuple[PartitioningFilter, ...] | None = None
    """None and an empty tuple mean the same, and are written back as read: `null` and `[]`."""
    max_buffered_msgs: int = 0
    max_buffered_bytes: int = 0

    def same_stream(self, other: ElasticRecord) -> bool:
        """Whether both describe the same work queue: equal in everything but the membership, which alone may change."""
        return (
            self.max_members == other.max_members
            and (self.partitioning_filters or ()) == (other.partitioning_filters or ())
            and _limit(self.max_buffered_msgs) == _limit(other.max_buffered_msgs)
            and _limit(self.max_buffered_bytes) == _limit(other.max_buffered_bytes)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactRecord(ElasticRecord):
    """An elastic group in the compact layout: the same fields, in a bucket that no other language reads."""


def _limit(value: int) -> int:
    return 0 if value < 0 else value  # the server turns 0 into -1; both mean no limit


def encode(record: StaticRecord | ElasticRecord) -> bytes:
    """The record as Go writes it: compact, in its order of fields, with `<`, `>` and `&` escaped."""
    fields: dict[str, Any] = {"max_members": record.max_members}
    if isinstance(record, StaticRecord):
        if record.filters:
            fields["filters"] = list(record.filters)
    else:
        filters = record.partitioning_filters
        fields["partitioning_filters"] = None if filters is None else [_filter_json(each) for each in filters]
        if record.max_buffered_msgs:
            fields["max_buffered_msg"] = record.max_buffered_msgs
        if record.max_buffered_bytes:
            fields["max_buffered_bytes"] = record.max_buffered_bytes
    if record.members:
        fields["members"] = list(record.members)
    if record.mappings:
        fields["member_mappings"] = _mappings_json(record.mappings)
    return _go_json(fields)


def _filter_json(each: PartitioningFilter) -> dict[str, Any]:
    # Go writes no list when no indexes were given, and compares on a later create: `[]` would be another group.
    return {"filter": each.filter, "partitioning_wildcards": list(each.wildcards) or None}


def _mappings_json(mappings: Iterable[MemberMapping]) -> list[dict[str, Any]]:
    return [{"member": each.member, "partitions": list(each.partitions)} for each in mappings]


def _go_json(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode()


def edit_membership(raw: bytes, *, members: Sequence[str] = (), mappings: Sequence[MemberMapping] = ()) -> bytes:
    """`raw` with this membership; every other field keeps its bytes, and unknown fields stay."""
    fields = _fields(raw)
    if old := [name for name in _OLD_NAMES if name in fields]:
        raise OldRecord(
            f"the record was written by an earlier version (fields {', '.join(old)}): it cannot be changed safely; "
            "delete the group and create it again"
        )
    _put(fields, "members", _go_json(list(members)) if members else None)
    _put(fields, "member_mappings", _go_json(_mappings_json(mappings)) if mappings else None)
    return b"{" + b",".join(_go_json(name) + b":" + value for name, value in fields.items()) + b"}"


def _put(fields: dict[str, bytes], name: str, value: bytes | None) -> None:
    if value is None:
        fields.pop(name, None)
    elif name in fields:
        fields[name] = value
    else:
        # After the last field that Go writes before it, as Go would have written it.
        before = {known for known in _ORDER[: _ORDER.index(name)] if known in fields}
        names = list(fields)
        at = max((names.index(known) + 1 for known in before), default=0)
        items = list(fields.items())
        items.insert(at, (name, value))
        fields.clear()
        fields.update(items)


def _fields(raw: bytes) -> dict[str, bytes]:
    return {name: bytes(value) for name, value in _decoded(raw, dict[str, msgspec.Raw]).items()}


def _decoded(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordUnreadable(f"the group's record is no JSON object: {error}") from None


def decode_static(raw: bytes) -> StaticRecord:
    """The record, not yet validated; raises `RecordUnreadable`."""
    found = _Reader(raw)
    filters = found.strings("filters")
    if not filters and (single := found.text("filter")):
        filters = (single,)
    return StaticRecord(**found.membership(), filters=filters)


def decode_compact(raw: bytes) -> ElasticRecord:
    """The record of a compact group, not yet validated; raises `RecordUnreadable`."""
    return _decode_elastic(raw, CompactRecord)


def decode_elastic(raw: bytes) -> ElasticRecord:
    """The record, not yet validated; raises `RecordUnreadable`."""
    return _decode_elastic(raw, ElasticRecord)


def _decode_elastic(raw: bytes, kind: type[ElasticRecord]) -> ElasticRecord:
    found = _Reader(raw)
    filters: tuple[PartitioningFilter, ...] | None = None
    listed = found.value("partitioning_filters", list)
    if listed is not None:
        filters = tuple(found.partitioning_filter(each) for each in listed)
    elif single := found.text("filter"):
        wildcards = found.value("partitioning_wildcards", list) or found.value("partitioning-wildcards", list) or []
        filters = (PartitioningFilter(single, found.integers("partitioning_wildcards", wildcards)),)
    return kind(
        **found.membership(),
        partitioning_filters=filters,
        max_buffered_msgs=found.number("max_buffered_msg") or found.number("msg-buffer-size"),
        max_buffered_bytes=found.number("max_buffered_bytes"),
    )


class _Reader:
    """Typed reads of a record that another program may have written."""

    def __init__(self, raw: bytes) -> None:
        self._found = _decoded(raw, dict[str, Any])

    def value(self, name: str, kind: type) -> Any:
        value = self._found.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise RecordUnreadable(f"the record's field {name} is {value!r}, which is no {kind.__name__}")
        return value

    def text(self, name: str) -> str:
        return self.value(name, str) or ""

    def number(self, name: str) -> int:
        return self.value(name, int) or 0

    def strings(self, name: str) -> tuple[str, ...]:
        values = self.value(name, list) or []
        if not all(isinstance(value, str) for value in values):
            raise RecordUnreadable(f"the record's field {name} holds something that is no text: {values!r}")
        return tuple(values)

    def integers(self, name: str, values: object) -> tuple[int, ...]:
        fine = isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
        if not fine:
            raise RecordUnreadable(f"the record's field {name} is {values!r}, which is no list of whole numbers")
        assert isinstance(values, list)
        return tuple(values)

    def partitioning_filter(self, each: object) -> PartitioningFilter:
        if not isinstance(each, dict) or not isinstance(each.get("filter"), str):
            raise RecordUnreadable(f"the record's partitioning_filters hold {each!r}, which names no filter")
        return PartitioningFilter(
            each["filter"], self.integers("partitioning_wildcards", each.get("partitioning_wildcards") or [])
        )

    def membership(self) -> dict[str, Any]:
        largest = self.number("max_members")
        if largest > _LARGEST:
            raise RecordUnreadable(f"the record's max_members is {largest}: more than {_LARGEST} cannot work")
        mappings = []
        for each in self.value("member_mappings", list) or self.value("member-mappings", list) or []:
            if not isinstance(each, dict) or not isinstance(each.get("member"), str):
                raise RecordUnreadable(f"the record's member_mappings hold {each!r}, which names no member")
            mappings.append(MemberMapping(each["member"], self.integers("partitions", each.get("partitions") or [])))
        return {
            "max_members": largest,
            "members": self.strings("members"),
            "mappings": tuple(mappings),
            "old_names": tuple(name for name in _OLD_NAMES if name in self._found),
        }

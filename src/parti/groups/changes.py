"""Changes of an elastic group's membership as pure functions: preview and real change give the same result or error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from parti.groups.errors import GroupIsMapped, NoMembersGiven
from parti.groups.names import check_member, check_members
from parti.groups.records import ElasticRecord, MemberMapping
from parti.groups.rules import check_mappings
from parti.groups.store import NewMembership

MembershipChange = Callable[[ElasticRecord], NewMembership]
"""Returns a record's new membership; raises if the change is not allowed."""


def adding(members: Iterable[str]) -> MembershipChange:
    """Add these members; blank names are ignored, existing members change nothing."""
    wanted = check_members(name for name in members if name.strip())
    if not wanted:
        raise NoMembersGiven("no member to add: give at least one name")

    def add(record: ElasticRecord) -> NewMembership:
        _refuse_mapped(record)
        if set(wanted) <= set(record.members):
            return NewMembership(record.members)
        return NewMembership(tuple(sorted({*record.members, *wanted})))

    return add


def dropping(members: Iterable[str]) -> MembershipChange:
    """Remove these members; unknown names are ignored."""
    unwanted = set(members)
    if not unwanted:
        raise NoMembersGiven("no member to drop: give at least one name")

    def drop(record: ElasticRecord) -> NewMembership:
        _refuse_mapped(record)
        if not unwanted & set(record.members):
            return NewMembership(record.members)
        return NewMembership(tuple(sorted(set(record.members) - unwanted)))

    return drop


def mapping_to(mappings: Sequence[MemberMapping]) -> MembershipChange:
    """Explicit partitions for each member; the list of members is removed."""
    if not mappings:
        raise NoMembersGiven("no mapping given: map every partition, or delete the mappings")
    for mapping in mappings:
        check_member(mapping.member)

    def replace(record: ElasticRecord) -> NewMembership:
        check_mappings(mappings, record.max_members)
        return NewMembership((), tuple(mappings))

    return replace


def unmapping() -> MembershipChange:
    """Remove the mappings; a list of members stays."""
    return lambda record: NewMembership(record.members)


def _refuse_mapped(record: ElasticRecord) -> None:
    if record.mappings:
        raise GroupIsMapped("the group has mappings: change those, or delete them first")

"""The errors of groups: one class per rule, so that callers need not parse messages."""

from __future__ import annotations

from typing import ClassVar

from parti.errors import Category, ConfigError, FatalError, TransientError


class GroupError(FatalError):
    """The state of a consumer group does not allow the call; the message says what to do."""

    category: ClassVar[Category] = Category.POLICY


class GroupNotFound(GroupError):
    """No group of this name exists on the stream: create it, or correct the name."""

    category: ClassVar[Category] = Category.NOT_FOUND


class GroupExists(GroupError):
    """A group of this name exists with other settings: use those, or delete it first."""


class GroupChanged(GroupError):
    """Settings that may never change were changed while members ran: restart the members with the new group."""


class RecordUnreadable(GroupError):
    """The group's record is not JSON, or has an unknown shape: repair it, or delete and recreate the group."""


class OldRecord(GroupError):
    """The record has field names of an earlier format: it can be read, but not changed; recreate the group."""


class NotListed(GroupError):
    """The member is not in the group's record: add it there, or join under a listed name."""


class GroupIsMapped(GroupError):
    """The group has explicit mappings, so members cannot be added or dropped: change the mappings instead."""


class WorkQueueMissing(GroupError):
    """The record exists, its work-queue stream does not: create the group again, which adds what is missing."""


class NameCollision(GroupError):
    """Another group or client already uses a stream or consumer name that this one needs: choose other names."""


class ForeignConsumer(GroupError):
    """A consumer with the member's name does not belong to this group: rename the member, or remove that consumer."""


class WriteContended(TransientError):
    """Other writers changed the record between every read and write: try again later."""


class InvalidGroup(ConfigError):
    """The group's settings break a rule: the subclass says which one."""


class BadName(InvalidGroup):
    """A name is not valid for a stream, group or member."""


class BadMaxMembers(InvalidGroup):
    """A group has at least one partition."""


class MembersAndMappings(InvalidGroup):
    """Members and mappings exclude each other."""


class NoMembersGiven(InvalidGroup):
    """The call needs at least one member or mapping."""


class TooManyMappings(InvalidGroup):
    """There are more mappings than partitions."""


class MappingRepeatsMember(InvalidGroup):
    """Two mappings name the same member."""


class MappingOutOfRange(InvalidGroup):
    """A mapping names a partition that does not exist."""


class MappingRepeatsPartition(InvalidGroup):
    """A partition is mapped twice."""


class MappingIncomplete(InvalidGroup):
    """A partition is not mapped to any member."""


class BadFilter(InvalidGroup):
    """A filter is empty or not a valid subject."""


class FilterWithoutWildcard(InvalidGroup):
    """A partitioning filter has neither a `*` nor a `>` at its end, so all messages would share one partition."""


class TooManyWildcards(InvalidGroup):
    """A filter has more wildcard indexes than `*` tokens."""


class WildcardRepeated(InvalidGroup):
    """A wildcard index is given twice."""


class WildcardOutOfRange(InvalidGroup):
    """A wildcard index is not between 1 and the number of `*` tokens."""


class FiltersOverlap(InvalidGroup):
    """Two filters match the same subject, which the server refuses (10147 for sources, 10138 for consumers)."""


class BadLimit(InvalidGroup):
    """A buffer limit is out of range."""


class BadTemplate(InvalidGroup):
    """The consumer template requests something that a group does not support."""


class NoActiveInstance(GroupError):
    """No instance of the member is joined, so none can step down."""

    category: ClassVar[Category] = Category.NOT_FOUND


class OwnershipLost(GroupError):
    """The message may belong to another instance by now: undo what was prepared, and do not retry."""

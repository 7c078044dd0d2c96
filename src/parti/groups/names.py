"""Valid names of groups, and the names derived from them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from parti.groups.errors import BadName

PRIORITY_GROUP: Final = "PCG"
"""The priority group of every member's consumer."""

# The record's key is `<stream>.<group>`, so both must be valid in a key (ADR-8) and in a stream name: no '/'.
_KEY_TOKEN = re.compile(r"[-_=a-zA-Z0-9]+")
_MEMBER = re.compile(r"[^\s.*>/\\\x00-\x1f\x7f]+")
_LONGEST = 255  # the server's limit for names


class GroupKind(StrEnum):
    """The kinds of groups. A compact group is an elastic one that only parti's members can read."""

    STATIC = "static"
    ELASTIC = "elastic"
    COMPACT = "compact"

    @property
    def bucket(self) -> str:
        """The key-value bucket that holds the records of this kind."""
        return f"{self.value}-consumer-groups"


def check_stream(name: str) -> str:
    return _check(name, _KEY_TOKEN, "stream", "letters, digits, '-', '_' and '='")


def check_group(name: str) -> str:
    return _check(name, _KEY_TOKEN, "group", "letters, digits, '-', '_' and '='")


def check_member(name: str) -> str:
    return _check(name, _MEMBER, "member", "no blanks, and none of . * > / \\")


def check_members(names: Iterable[str]) -> tuple[str, ...]:
    """The names sorted and without repeats, as an elastic group stores them."""
    return tuple(sorted({check_member(name) for name in names}))


def given_members(names: Iterable[str]) -> tuple[str, ...]:
    """The names as given, without repeats: on create, Go compares a static group's members in order."""
    return tuple(dict.fromkeys(check_member(name) for name in names))


def can_exist(name: str) -> bool:
    """Whether a stream or consumer can have this name; the reference also writes records of impossible groups."""
    return bool(_MEMBER.fullmatch(name)) and len(name) <= _LONGEST


def _check(name: str, pattern: re.Pattern[str], what: str, allowed: str) -> str:
    if not name:
        raise BadName(f"the {what} name is empty: give one")
    if not pattern.fullmatch(name):
        raise BadName(f"{name!r} cannot be a {what} name: use {allowed}")
    if len(name) > _LONGEST:
        raise BadName(f"the {what} name {name[:20]!r}... has {len(name)} characters: the server takes {_LONGEST}")
    return name


def record_key(stream: str, group: str) -> str:
    return f"{stream}.{group}"


def split_key(key: str) -> tuple[str, str]:
    """Stream and group of a key. A stream name contains no dot, so everything after the first dot is the group."""
    stream, _, group = key.partition(".")
    return stream, group


def work_queue(stream: str, group: str) -> str:
    """The stream that an elastic group reads."""
    return f"{stream}-{group}"


def static_consumer(group: str, member: str) -> str:
    """The durable of a static member, on the source stream. An elastic member's consumer has the member's name."""
    return f"{group}-{member}"

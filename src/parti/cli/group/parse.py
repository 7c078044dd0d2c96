"""Parses command-line values for groups: mappings, wildcard indexes, durations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click

from parti.config.units import parse_duration
from parti.errors import ConfigError
from parti.groups.records import MemberMapping, PartitioningFilter


def mappings(texts: Sequence[str]) -> list[MemberMapping]:
    """Each from `member:p1,p2`; a member may have no partition (`member:`)."""
    found = []
    for text in texts:
        member, colon, listed = text.rpartition(":")
        if not colon:
            raise click.BadParameter(f"{text!r} is no mapping: write member:partition,partition, such as m1:0,2")
        found.append(MemberMapping(member, integers(listed, "mapping")))
    return found


def integers(text: str, what: str) -> tuple[int, ...]:
    """From `1,2` or `1 2`; an empty text is an empty list."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise click.BadParameter(f"{text!r} in {what}: write whole numbers separated by commas") from None


def partitioning(filters: Sequence[str], wildcards: Sequence[str]) -> list[PartitioningFilter] | None:
    """Each filter with its indexes. Filters beyond the lists of indexes hash the whole subject."""
    if len(wildcards) > len(filters):
        raise click.BadParameter(f"{len(wildcards)} times --wildcards for {len(filters)} times --filter: give one each")
    if not filters:
        return None
    lists = [integers(text, "--wildcards") for text in wildcards] + [()] * (len(filters) - len(wildcards))
    return [PartitioningFilter(each, indexes) for each, indexes in zip(filters, lists, strict=True)]


def seconds(_ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """A duration with a unit."""
    if text is None:
        return None
    try:
        return parse_duration(text)
    except (ConfigError, ValueError) as error:
        raise click.BadParameter(str(error), param=param) from None


def moment(_ctx: click.Context, param: click.Parameter, text: str | None) -> datetime | None:
    """An ISO 8601 time; without a zone it is UTC."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no time: write 2026-01-31T08:00:00Z", param=param) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)

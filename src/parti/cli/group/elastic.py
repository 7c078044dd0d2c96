"""`parti group elastic`: groups whose members may come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import click

from parti.cli.group import parse
from parti.cli.group.aliases import AliasGroup
from parti.cli.group.session import group_argument, members_argument, run, stream_argument
from parti.cli.group.verbs import add_shared, record_json
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.groups.changes import MembershipChange, adding, dropping, mapping_to, unmapping
from parti.groups.distribution import assignment
from parti.groups.names import GroupKind
from parti.groups.records import ElasticRecord
from parti.groups.rules import check_elastic_record

Change = tuple[MembershipChange, Callable[..., Awaitable[object]]]
"""The new membership, and the call that writes it, given the groups, the stream and the group."""

_dry_run = click.option("--dry-run", is_flag=True, help="Only show which partitions would move.")


def _group(kind: GroupKind, help_text: str) -> AliasGroup:
    """The commands of one kind of elastic group."""

    @click.command("create")
    @stream_argument
    @click.argument("group")
    @click.argument("max_members", type=int)
    @click.option("--filter", "filters", multiple=True, metavar="SUBJECT", help="Subjects that take part; repeatable.")
    @click.option(
        "--wildcards", multiple=True, metavar="1,2",
        help="Which '*' of the filter make the key; one for each --filter, in order. Left out: the whole subject.",
    )  # fmt: skip
    @click.option("--max-buffered-msgs", default=0, show_default=True, help="Limit of the work queue; 0 is none.")
    @click.option("--max-buffered-bytes", default=0, show_default=True, help="Limit of the work queue; 0 is none.")
    @click.option("--start-seq", type=click.IntRange(1), help="Skip what is older; the default replays all.")
    @click.option("--start-time", callback=parse.moment, metavar="TIME", help="The same by time: 2026-01-31T08:00Z.")
    @json_option
    @with_config
    def create(
        loaded: LoadedConfig,
        stream: str,
        group: str,
        max_members: int,
        filters: tuple[str, ...],
        wildcards: tuple[str, ...],
        max_buffered_msgs: int,
        max_buffered_bytes: int,
        start_seq: int | None,
        start_time: datetime | None,
        as_json: bool,
    ) -> None:
        """Create a group of MAX_MEMBERS partitions, and its work queue. The same settings again are accepted."""
        partitioning = parse.partitioning(filters, wildcards)
        stored = run(
            loaded,
            kind,
            lambda groups: groups.create(
                stream,
                group,
                max_members=max_members,
                filters=partitioning,
                max_buffered_msgs=max_buffered_msgs,
                max_buffered_bytes=max_buffered_bytes,
                start_sequence=start_seq,
                start_time=start_time,
            ),
        )
        if as_json:
            print_json(record_json(stored, stream, group, kind))
        else:
            click.echo(f"elastic group {group} on {stream}: {max_members} partitions, work queue {stream}-{group}")

    @_changing(kind, "add", members_argument)
    def add(members: tuple[str, ...]) -> Change:
        """Add members; the partitions are shared out again."""
        return adding(members), lambda groups, *place: groups.add_members(*place, members)

    @_changing(kind, "drop", members_argument)
    def drop(members: tuple[str, ...]) -> Change:
        """Drop members; their partitions go to the others."""
        return dropping(members), lambda groups, *place: groups.drop_members(*place, members)

    @_changing(kind, "create-mapping", click.argument("mappings", nargs=-1, required=True, metavar="MEMBER:P1,P2..."))
    def create_mapping(mappings: tuple[str, ...]) -> Change:
        """Set the partitions of each member; the list of members is dropped."""
        wanted = parse.mappings(mappings)
        return mapping_to(wanted), lambda groups, *place: groups.set_mappings(*place, wanted)

    @_changing(kind, "delete-mapping")
    def delete_mapping() -> Change:
        """Delete the mappings; the group then has no members until some are added."""
        return unmapping(), lambda groups, *place: groups.delete_mappings(*place)

    made = AliasGroup(kind.value, help=help_text)
    made.add(create)
    made.add(add)
    made.add(drop)
    made.add(create_mapping, "cm", "createmapping")
    made.add(delete_mapping, "dm", "deletemapping")
    add_shared(made, kind)
    return made


def _changing(
    kind: GroupKind, name: str, *arguments: Callable[..., Any]
) -> Callable[[Callable[..., Change]], click.Command]:
    """A command that changes ownership: its function returns the new record, and the call that writes it."""

    def command(change: Callable[..., Change]) -> click.Command:
        def execute(loaded: LoadedConfig, stream: str, group: str, dry_run: bool, as_json: bool, **given: Any) -> None:
            _carry_out(kind, loaded, (stream, group), change(**given), dry_run=dry_run, as_json=as_json)

        made = json_option(with_config(execute))
        for decorate in (_dry_run, *arguments, group_argument, stream_argument):
            made = decorate(made)
        return click.command(name, help=change.__doc__)(made)

    return command


def _carry_out(
    kind: GroupKind, loaded: LoadedConfig, place: tuple[str, str], change: Change, *, dry_run: bool, as_json: bool
) -> None:
    preview, act = change

    async def both(groups: Any) -> tuple[ElasticRecord, ElasticRecord]:
        before: ElasticRecord = (await groups.get(*place)).record
        if dry_run:
            wanted = preview(before)
            after = replace(before, members=wanted.members, mappings=wanted.mappings)
            check_elastic_record(after)
            return before, after
        await act(groups, *place)
        return before, (await groups.get(*place)).record

    before, after = run(loaded, kind, both)
    old, new = assignment(before), assignment(after)
    was = {partition: name for name, owned in old.items() for partition in owned}
    moves = {p: (was.get(p), name) for name, owned in new.items() for p in owned if was.get(p) != name}
    if as_json:
        shown = [{"partition": p, "from": source, "to": target} for p, (source, target) in sorted(moves.items())]
        print_json(
            {"executed": not dry_run, "members": {name: list(owned) for name, owned in new.items()}, "moves": shown}
        )
        return
    rows = [[plain(name), plain(",".join(map(str, owned)) or "none")] for name, owned in sorted(new.items())]
    print_table(["MEMBER", "PARTITIONS"], rows)
    verb = "would move" if dry_run else "move"
    note(f"{len(moves)} of {after.max_members} partitions {verb}")


elastic = _group(GroupKind.ELASTIC, "Groups on any stream; a work queue adds the partition number.")
compact = _group(
    GroupKind.COMPACT, "Elastic groups with fewer filters: faster when behind, readable by parti's members only."
)

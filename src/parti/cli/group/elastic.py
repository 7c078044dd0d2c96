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
from parti.groups.distribution import assignment
from parti.groups.names import GroupKind, check_members
from parti.groups.records import ElasticRecord
from parti.groups.rules import check_elastic_record

Act = Callable[[Any], Awaitable[object]]


_dry_run = click.option("--dry-run", is_flag=True, help="Only show which partitions would move.")


def _group(kind: GroupKind, help_text: str) -> AliasGroup:
    """The commands of one kind of elastic groups."""

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

    @click.command("add")
    @stream_argument
    @group_argument
    @members_argument
    @_dry_run
    @json_option
    @with_config
    def add(
        loaded: LoadedConfig, stream: str, group: str, members: tuple[str, ...], dry_run: bool, as_json: bool
    ) -> None:
        """Add members; the partitions are shared anew."""

        def preview(record: ElasticRecord) -> ElasticRecord:
            return _with(record, members=tuple(sorted({*record.members, *check_members(members)})))

        _change(
            kind,
            loaded,
            stream,
            group,
            preview,
            lambda groups: groups.add_members(stream, group, members),
            dry_run,
            as_json,
        )

    @click.command("drop")
    @stream_argument
    @group_argument
    @members_argument
    @_dry_run
    @json_option
    @with_config
    def drop(
        loaded: LoadedConfig, stream: str, group: str, members: tuple[str, ...], dry_run: bool, as_json: bool
    ) -> None:
        """Drop members; their partitions go to the others."""

        def preview(record: ElasticRecord) -> ElasticRecord:
            return _with(record, members=tuple(sorted(set(record.members) - set(members))))

        _change(
            kind,
            loaded,
            stream,
            group,
            preview,
            lambda groups: groups.drop_members(stream, group, members),
            dry_run,
            as_json,
        )

    @click.command("create-mapping")
    @stream_argument
    @group_argument
    @click.argument("mappings", nargs=-1, required=True, metavar="MEMBER:P1,P2...")
    @_dry_run
    @json_option
    @with_config
    def create_mapping(
        loaded: LoadedConfig, stream: str, group: str, mappings: tuple[str, ...], dry_run: bool, as_json: bool
    ) -> None:
        """Set the partitions of each member; the list of members is dropped."""
        wanted = parse.mappings(mappings)

        def preview(record: ElasticRecord) -> ElasticRecord:
            return _with(record, mappings=tuple(wanted))

        _change(
            kind,
            loaded,
            stream,
            group,
            preview,
            lambda groups: groups.set_mappings(stream, group, wanted),
            dry_run,
            as_json,
        )

    @click.command("delete-mapping")
    @stream_argument
    @group_argument
    @_dry_run
    @json_option
    @with_config
    def delete_mapping(loaded: LoadedConfig, stream: str, group: str, dry_run: bool, as_json: bool) -> None:
        """Delete the mappings; the group then has no members until some are added."""
        _change(
            kind, loaded, stream, group, lambda record: _with(record, members=record.members),
            lambda groups: groups.delete_mappings(stream, group), dry_run, as_json,
        )  # fmt: skip

    made = AliasGroup(kind.value, help=help_text)
    made.add(create)
    made.add(add)
    made.add(drop)
    made.add(create_mapping, "cm", "createmapping")
    made.add(delete_mapping, "dm", "deletemapping")
    add_shared(made, kind)
    return made


def _with(record: ElasticRecord, **membership: Any) -> ElasticRecord:
    changed = replace(record, **{"members": (), "mappings": ()} | membership)
    check_elastic_record(changed)
    return changed


def _change(
    kind: GroupKind,
    loaded: LoadedConfig,
    stream: str,
    group: str,
    preview: Callable[[ElasticRecord], ElasticRecord],
    act: Act,
    dry_run: bool,
    as_json: bool,
) -> None:
    async def both(groups: Any) -> tuple[ElasticRecord, ElasticRecord]:
        before: ElasticRecord = (await groups.get(stream, group)).record
        if dry_run:
            return before, preview(before)
        await act(groups)
        return before, (await groups.get(stream, group)).record

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

"""The verbs that both kinds of groups have: ls, info, describe, delete, member-info, step-down, consume."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from parti.cli.group.aliases import AliasGroup
from parti.cli.group.consume import consume_command
from parti.cli.group.session import group_argument, member_argument, run, stream_argument
from parti.cli.output import json_option, note, plain, print_json, print_table
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.groups.common import DeletePlan, MemberInfo
from parti.groups.describe import describe as describe_group
from parti.groups.names import GroupKind
from parti.groups.records import ElasticRecord, GroupMembership
from parti.groups.store import Stored

_COLUMNS = (
    "GROUP", "PARTITION", "OWNER", "PINNED", "STATE", "ACK-FLOOR", "LAST-SEQ", "LAG", "LAG-SECONDS", "INFLIGHT",
    "REDELIVERED",
)  # fmt: skip


def record_json(stored: Stored[Any], stream: str, group: str, kind: GroupKind) -> dict[str, Any]:
    """A record as JSON, with the field names of the wire format."""
    record: GroupMembership = stored.record
    found: dict[str, Any] = {
        "kind": kind.value,
        "stream": stream,
        "group": group,
        "revision": stored.revision,
        "max_members": record.max_members,
    }
    if isinstance(record, ElasticRecord):
        found["partitioning_filters"] = [
            {"filter": each.filter, "partitioning_wildcards": list(each.wildcards)}
            for each in record.partitioning_filters or ()
        ]
        found |= {"max_buffered_msg": record.max_buffered_msgs, "max_buffered_bytes": record.max_buffered_bytes}
    else:
        found["filters"] = list(getattr(record, "filters", ()))
    return found | {
        "members": list(record.members),
        "member_mappings": [{"member": each.member, "partitions": list(each.partitions)} for each in record.mappings],
        "old_names": list(record.old_names),
    }


def warn_old(record: GroupMembership) -> None:
    if record.old_names:
        note(
            f"Warning: this group was written by an earlier version (fields {', '.join(record.old_names)}); it can be "
            "read, but not changed: delete it and create it again"
        )


def add_shared(to: AliasGroup, kind: GroupKind) -> None:
    """Add the shared verbs to the commands of one kind."""

    @click.command("ls")
    @stream_argument
    @json_option
    @with_config
    def ls(loaded: LoadedConfig, stream: str, as_json: bool) -> None:
        """List the groups on a stream."""
        names = run(loaded, kind, lambda groups: groups.names(stream))
        if as_json:
            print_json(names)
            return
        for name in names:
            click.echo(name)

    @click.command("info")
    @stream_argument
    @group_argument
    @json_option
    @with_config
    def info(loaded: LoadedConfig, stream: str, group: str, as_json: bool) -> None:
        """Show a group's record, its members, and which of them are active."""

        async def look(groups: Any) -> tuple[Stored[Any], list[MemberInfo]]:
            return await groups.get(stream, group), await groups.members(stream, group)

        stored, members = run(loaded, kind, look)
        warn_old(stored.record)
        shown = record_json(stored, stream, group, kind)
        if as_json:
            print_json(shown | {"active": [each.member for each in members if each.active], "state": members})
            return
        keep = {name: value for name, value in shown.items() if name not in ("members", "member_mappings", "old_names")}
        print_table(["field", "value"], [[plain(name), plain(value)] for name, value in keep.items()])
        rows = [[plain(m.member), plain(_list(m.partitions)), _state(m), str(m.pending)] for m in members]
        print_table(["MEMBER", "PARTITIONS", "STATE", "PENDING"], rows)

    @click.command("describe")
    @stream_argument
    @group_argument
    @json_option
    @with_config
    def describe(loaded: LoadedConfig, stream: str, group: str, as_json: bool) -> None:
        """Show owner, state and lag of every partition."""
        rows = run(loaded, kind, lambda groups: describe_group(groups, stream, group))
        if as_json:
            print_json([dataclasses.asdict(row) for row in rows])
            return
        cells = [dataclasses.astuple(row)[: len(_COLUMNS)] for row in rows]
        print_table(_COLUMNS, [[plain("-" if cell is None else cell) for cell in row] for row in cells])
        if rows and (waiting := rows[0].next_to_source) is not None:
            click.echo(f"The work queue has not taken message {waiting} of {stream}, and what follows it.", err=True)

    @click.command("delete")
    @stream_argument
    @group_argument
    @click.option("-f", "--force", "--execute", "execute", is_flag=True, help="Do it without asking.")
    @click.option("--dry-run", is_flag=True, help="Only show what would be deleted.")
    @json_option
    @with_config
    def delete(loaded: LoadedConfig, stream: str, group: str, execute: bool, dry_run: bool, as_json: bool) -> None:
        """Delete a group with its own consumers or work queue. Shows the plan and asks; -f acts without asking.

        With --json it does not ask: it shows the plan, and with -f what was done.
        """
        plan: DeletePlan = run(loaded, kind, lambda groups: groups.plan_delete(stream, group))
        if not execute and not dry_run and not as_json:
            _tell_plan(plan, "will delete")
            if not _agreed():
                raise click.ClickException("nothing was deleted: answer y, or give -f")
            execute = True
        if execute and not dry_run:
            plan = run(loaded, kind, lambda groups: groups.delete(stream, group))
        if as_json:
            print_json({"executed": execute and not dry_run, **dataclasses.asdict(plan)})
        else:
            _tell_plan(plan, "would delete" if dry_run else "deleted")

    @click.command("member-info")
    @stream_argument
    @group_argument
    @member_argument
    @click.option("--check", is_flag=True, help="Exit 1 when no instance of the member is active, for scripts.")
    @json_option
    @with_config
    def member_info(loaded: LoadedConfig, stream: str, group: str, member: str, check: bool, as_json: bool) -> None:
        """Show one member: whether it is listed, active and pinned, and what it owns."""
        found = run(loaded, kind, lambda groups: groups.member_info(stream, group, member))
        if as_json:
            print_json(found)
        else:
            listed = "is" if found.listed else "is NOT"
            click.echo(f"member {member} {listed} part of the group; partitions {_list(found.partitions) or 'none'}")
            click.echo(f"member {member} {'is active' if found.active else 'has NO active instance'}")
        if check and not found.active:
            raise click.exceptions.Exit(1)

    @click.command("step-down")
    @stream_argument
    @group_argument
    @member_argument
    @json_option
    @with_config
    def step_down(loaded: LoadedConfig, stream: str, group: str, member: str, as_json: bool) -> None:
        """Take the pin from the member's active instance, so that another one takes over."""
        run(loaded, kind, lambda groups: groups.step_down(stream, group, member))
        if as_json:
            print_json({"stream": stream, "group": group, "member": member, "stepped_down": True})
        else:
            click.echo(f"member {member} of {group} stepped down")

    to.add(ls, "list")
    to.add(info)
    to.add(describe)
    to.add(delete, "rm")
    to.add(member_info, "memberinfo", "minfo")
    to.add(step_down, "stepdown", "sd")
    to.add(consume_command(kind), "join")


def _tell_plan(plan: DeletePlan, verb: str) -> None:
    click.echo(f"{verb} the {plan.kind} group {plan.group} on {plan.stream} (record revision {plan.revision})")
    for name in plan.streams:
        click.echo(f"{verb} the work queue {name} with {plan.messages} messages that were not processed")
    for name in plan.consumers:
        click.echo(f"{verb} the consumer {name}")


def _agreed() -> bool:
    """The answer of a person or a pipe; no answer means no."""
    try:
        return click.confirm("delete it? all its members stop consuming")
    except click.Abort:
        return False


def _list(numbers: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in numbers)


def _state(member: MemberInfo) -> str:
    if not member.active:
        return "[yellow]absent[/yellow]"
    return "[green]active[/green]" if member.pinned else "standby"

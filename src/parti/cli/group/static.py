"""`parti group static`: groups whose membership never changes."""

from __future__ import annotations

import click

from parti.cli.group import parse
from parti.cli.group.aliases import AliasGroup
from parti.cli.group.session import run, stream_argument
from parti.cli.group.verbs import add_shared, record_json
from parti.cli.output import json_option, print_json
from parti.cli.settings import with_config
from parti.config import LoadedConfig
from parti.groups.names import GroupKind
from parti.groups.records import MemberMapping

_KIND = GroupKind.STATIC


@click.group(cls=AliasGroup)
def static() -> None:
    """Groups on a stream whose subjects begin with the partition number."""


@click.group("create", cls=AliasGroup)
def create() -> None:
    """Create a group with a list of members, or with the partitions of each."""


_filter = click.option("--filter", "filters", multiple=True, metavar="SUBJECT", help="Without the partition.")


@create.command("balanced")
@stream_argument
@click.argument("group")
@click.argument("max_members", type=int)
@click.argument("members", nargs=-1, required=True)
@_filter
@json_option
@with_config
def balanced(
    loaded: LoadedConfig, stream: str, group: str, max_members: int, members: tuple[str, ...], filters: tuple[str, ...],
    as_json: bool,
) -> None:  # fmt: skip
    """Create a group whose MAX_MEMBERS partitions are shared evenly. The same settings again are accepted."""
    _create(loaded, stream, group, max_members, list(members), [], list(filters), as_json)


@create.command("mapped")
@stream_argument
@click.argument("group")
@click.argument("max_members", type=int)
@click.argument("mappings", nargs=-1, required=True, metavar="MEMBER:P1,P2...")
@_filter
@json_option
@with_config
def mapped(
    loaded: LoadedConfig, stream: str, group: str, max_members: int, mappings: tuple[str, ...],
    filters: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Create a group with explicit partitions for each member."""
    _create(loaded, stream, group, max_members, [], parse.mappings(mappings), list(filters), as_json)


def _create(
    loaded: LoadedConfig,
    stream: str,
    group: str,
    max_members: int,
    members: list[str],
    mappings: list[MemberMapping],
    filters: list[str],
    as_json: bool,
) -> None:
    stored = run(
        loaded,
        _KIND,
        lambda groups: groups.create(
            stream, group, max_members=max_members, members=members, mappings=mappings, filters=filters
        ),
    )
    if as_json:
        print_json(record_json(stored, stream, group, _KIND))
    else:
        click.echo(f"static group {group} on {stream}: members {', '.join(stored.record.member_names)}")


static.add(create)
add_shared(static, _KIND)

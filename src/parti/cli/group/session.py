"""One connection per command, and the arguments and completions that all verbs share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from parti.cli.connected import run_connected
from parti.config import LoadedConfig, load_config
from parti.errors import PartiError
from parti.groups.elastic_groups import ElasticGroups
from parti.groups.names import GroupKind
from parti.groups.static_groups import StaticGroups
from parti.wire.connect import Connection

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Groups = ElasticGroups | StaticGroups
_COMPLETE_WITHIN = 1.0  # a shell that waits longer for a suggestion feels broken


def run(loaded: LoadedConfig, kind: GroupKind, act: Callable[[Any], Awaitable[T]]) -> T:
    """The result of `act` with the groups of this kind over one connection."""

    def groups(connection: Connection) -> Groups:
        if kind is GroupKind.STATIC:
            return StaticGroups(connection)
        return ElasticGroups(connection, compact=kind is GroupKind.COMPACT)

    return run_connected(loaded, lambda connection: act(groups(connection)))


def stream_argument(command: F) -> F:
    return click.argument("stream", shell_complete=_streams)(command)


def group_argument(command: F) -> F:
    return click.argument("group", shell_complete=_groups)(command)


def member_argument(command: F) -> F:
    return click.argument("member", shell_complete=_members)(command)


def members_argument(command: F) -> F:
    return click.argument("members", nargs=-1, required=True, shell_complete=_members)(command)


def _kind(ctx: click.Context) -> GroupKind:
    while ctx.parent is not None and ctx.info_name not in list(GroupKind):
        ctx = ctx.parent
    return GroupKind(ctx.info_name) if ctx.info_name in list(GroupKind) else GroupKind.ELASTIC


def _suggest(ctx: click.Context, incomplete: str, names: Callable[[Any], Awaitable[list[str]]]) -> list[CompletionItem]:
    flags: dict[str, object] = {}
    if ctx.params.get("server"):
        flags["nats.servers"] = ctx.params["server"]
    try:
        loaded = load_config(ctx.params.get("config_file"), flags=flags)

        async def within(groups: Any) -> list[str]:
            async with asyncio.timeout(_COMPLETE_WITHIN):
                return await names(groups)

        found = run(loaded, _kind(ctx), within)
    except (PartiError, TimeoutError):
        return []  # no server, no suggestion: a shell has no place for an error
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def _streams(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _suggest(ctx, incomplete, lambda groups: groups.api.stream_names())


def _groups(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _suggest(ctx, incomplete, lambda groups: groups.names(ctx.params["stream"]))


def _members(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    async def names(groups: Any) -> list[str]:
        return list((await groups.get(ctx.params["stream"], ctx.params["group"])).record.member_names)

    return _suggest(ctx, incomplete, names)

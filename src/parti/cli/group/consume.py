"""`consume`: join a group and print its messages, until Ctrl-C, SIGTERM, or the requested number of messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from parti.cli.group.parse import seconds
from parti.cli.group.session import group_argument, member_argument, stream_argument
from parti.cli.output import json_option, note, print_json
from parti.cli.settings import log_quietly, with_config
from parti.config import LoadedConfig, ObserveSection
from parti.errors import ConfigError, NoResponders, RequestTimeout
from parti.groups.automatic import AutomaticMembership
from parti.groups.elastic import elastic_consume
from parti.groups.errors import OwnershipLost
from parti.groups.events import GroupEvent
from parti.groups.in_flight import HandlerOptions, Order
from parti.groups.member import GroupConsumer
from parti.groups.message import GroupMessage
from parti.groups.names import GroupKind
from parti.groups.options import MemberOptions
from parti.groups.static import static_consume
from parti.groups.template import ConsumerTemplate
from parti.observe.health import ObservabilityServer
from parti.observe.prometheus import PrometheusMetrics
from parti.outcomes import Retry
from parti.waiting import first_of, stop_signals
from parti.wire.configured import configured_options
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

_FINISH_WITHIN = 8.0  # below the 10 s that a supervisor waits after SIGTERM


@dataclass(frozen=True, slots=True)
class JoinArguments:
    """The arguments of a `consume`."""

    kind: GroupKind
    stream: str
    group: str
    member: str
    template: ConsumerTemplate
    order: Order = Order.STRICT
    sleep: float = 0.02
    count: int | None = None
    automatic: AutomaticMembership | None = None


async def consume_until(
    options: ConnectOptions,
    joining: JoinArguments,
    *,
    show: Callable[[GroupMessage], None],
    on_event: Callable[[GroupEvent], None],
    until: asyncio.Event,
    observe: ObserveSection | None = None,
) -> int:
    """Join and print messages until `until` is set or enough came; returns their number, or raises the member's error.

    Meanwhile metrics and health are served at the address in `observe`.
    """
    seen = 0

    async def handler(message: GroupMessage) -> Retry | None:
        nonlocal seen
        if joining.count is not None and seen >= joining.count:
            return Retry(after=3600.0)  # enough messages: leaving hands this one back at once
        show(message)
        if joining.sleep:
            await asyncio.sleep(joining.sleep)
        # Printed even if another instance may own it by now: if it is redelivered here, it is acknowledged as done.
        with contextlib.suppress(OwnershipLost, NoResponders, RequestTimeout):
            await message.double_ack()
        seen += 1
        if joining.count is not None and seen >= joining.count:
            until.set()
        return None

    metrics = PrometheusMetrics()
    members = MemberOptions(
        template=joining.template, handlers=HandlerOptions(order=joining.order), on_event=on_event, metrics=metrics
    )
    async with await connect(options) as connection:
        consumer: GroupConsumer[Any]
        place = (joining.stream, joining.group, joining.member)
        if joining.kind is GroupKind.STATIC:
            consumer = await static_consume(connection, *place, handler, members)
        else:
            compact = joining.kind is GroupKind.COMPACT
            consumer = await elastic_consume(
                connection, *place, handler, members, automatic=joining.automatic, compact=compact
            )
        watched = ObservabilityServer.configured(
            observe or ObserveSection(), metrics.registry, [consumer.health_check()], metrics
        )
        try:
            if watched is not None:
                await watched.start()
            await first_of(consumer.wait(), until.wait())
        finally:
            await consumer.stop(timeout=_FINISH_WITHIN)
            if watched is not None:
                await watched.stop()
    return seen


def consume_command(kind: GroupKind) -> click.Command:
    """The `consume` command for one kind of group."""

    @click.command("consume")
    @stream_argument
    @group_argument
    @member_argument
    @click.option("--sleep", default="20ms", show_default=True, callback=seconds, help="Processing time of a message.")
    @click.option("--ack-wait", default="2s", show_default=True, callback=seconds, help="As `cg` uses it.")
    @click.option("--max-ack-pending", default=1, show_default=True, help="More than 1 only makes sense with lanes.")
    @click.option(
        "--order",
        type=click.Choice([each.value for each in Order]),
        default=Order.STRICT.value,
        show_default=True,
        help="What must happen one after the other.",
    )
    @click.option("--count", type=click.IntRange(1), help="Stop after so many messages.")
    @click.option("--automatic", is_flag=True, help="Join the membership too, and leave it at the end (elastic).")
    @click.option("--listed", is_flag=True, help="With --automatic: keep a list of members, to which `cg add` can add.")
    @json_option
    @with_config
    def consume(
        loaded: LoadedConfig,
        stream: str,
        group: str,
        member: str,
        sleep: float,
        ack_wait: float,
        max_ack_pending: int,
        order: str,
        count: int | None,
        automatic: bool,
        listed: bool,
        as_json: bool,
    ) -> None:
        """Join as an instance of a member and print its messages; each is acknowledged with confirmation.

        Ends at Ctrl-C or SIGTERM after the message in flight, with exit code 0; exit code 1 if the group fails.
        """
        if automatic and kind is GroupKind.STATIC:
            raise ConfigError("a static group's members never change: leave --automatic out")
        if listed and not automatic:
            raise ConfigError("--listed says how --automatic writes the members: give both")
        log_quietly(loaded)
        joining = JoinArguments(
            kind,
            stream,
            group,
            member,
            ConsumerTemplate(ack_wait=ack_wait, max_ack_pending=max_ack_pending),
            Order(order),
            sleep,
            count,
            AutomaticMembership(listed=listed) if automatic else None,
        )
        options = configured_options(loaded).options
        seen = asyncio.run(_until_signal(options, joining, as_json, loaded.config.observe))
        if not as_json:
            note(f"{seen} messages")

    return consume


async def _until_signal(options: ConnectOptions, joining: JoinArguments, as_json: bool, observe: ObserveSection) -> int:
    with stop_signals() as until:
        return await consume_until(
            options,
            joining,
            show=_show_json if as_json else show_text,
            on_event=_event_json if as_json else lambda event: note(event_text(event)),
            until=until,
            observe=observe,
        )


def show_text(message: GroupMessage) -> None:
    click.echo(f"[{message.number}] {message.subject} seq={message.sequence} {message.data.decode(errors='replace')}")


def event_text(event: GroupEvent) -> str:
    owned = f" partitions={','.join(map(str, event.partitions))}" if event.partitions else ""
    return f"{event.kind.value}{owned}{' ' + event.detail if event.detail else ''}"


def _show_json(message: GroupMessage) -> None:
    print_json(
        {
            "type": "message",
            "partition": message.number,
            "subject": message.subject,
            "sequence": message.sequence,
            "delivered": message.delivered,
            "data": message.data.decode(errors="replace"),
        }
    )


def _event_json(event: GroupEvent) -> None:
    print_json({"type": "event", "kind": event.kind, "partitions": event.partitions, "detail": event.detail})

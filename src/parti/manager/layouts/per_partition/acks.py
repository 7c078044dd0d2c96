"""Confirmed acks: the consumer has applied every ack of a slot's owner before the slot is released.

An ack is sent without waiting for a reply, so it can get lost. On limits nothing depends on it: the claim carries the
position. A work queue and an interest stream keep the message, and deliver it again when the consumer is recreated
(servers below 2.14). So before a release the last ack is sent as a request, and every message that the consumer's ack
floor does not cover is acknowledged again.
"""

from __future__ import annotations

import asyncio
import contextlib

from parti.errors import PartiError, UnknownOutcome
from parti.manager.layouts.per_partition.durable import SlotDurable
from parti.manager.layouts.per_partition.flow import SlotFlow
from parti.model import Retention
from parti.wire.acks import ACK
from parti.wire.live import LiveConnection

_EACH = 0.5  # seconds for one reply: a consumer that changes its leader sends none (docs/evidence/cluster.md#c7)
_BUDGET = 2.0  # seconds in total, part of the prepare timeout: this must not make a release fail


class AcksUnconfirmed(UnknownOutcome):
    """The consumer did not confirm the acks. The position is in the claim, so at worst done messages stay stored."""


async def confirm(connection: LiveConnection, flow: SlotFlow, durable: SlotDurable, retention: Retention) -> None:
    """When this returns, every ack of the slot since its last reset is applied; AcksUnconfirmed within two seconds."""
    try:
        async with asyncio.timeout(_BUDGET):
            await _confirmed(connection, flow, durable, retention)
    except (TimeoutError, PartiError) as error:
        reason = str(error) or f"no answer within {_BUDGET:g} s"
        raise AcksUnconfirmed(f"acks of {durable.name} are not confirmed: {reason}") from error


async def _confirmed(connection: LiveConnection, flow: SlotFlow, durable: SlotDurable, retention: Retention) -> None:
    """A reply confirms every earlier ack on this connection, unless the consumer's leader changed.

    So acks above the ack floor are sent once more, and once is enough: with one lane per key the floor stays below a
    message that is still in its handler, even if many messages above it are done.
    """
    await _answered(connection, flow.acks_above(0)[-1:])
    if retention is not Retention.LIMITS:
        floor = await durable.floor()
        if floor < flow.last_acked:
            await _answered(connection, flow.acks_above(floor))


async def _answered(connection: LiveConnection, replies: list[bytes]) -> None:
    while replies and not await _ack_answered(connection, replies):
        if connection.lost.done():
            raise connection.lost.result()


async def _ack_answered(connection: LiveConnection, replies: list[bytes]) -> bool:
    """Acknowledge these, the last one as a request: the consumer replies after it has applied it."""
    answered = asyncio.Event()
    inbox = connection.new_inbox()
    sid = connection.subscribe(inbox, lambda _: answered.set())
    try:
        for reply in replies[:-1]:
            connection.publish(reply.decode(), ACK)
        connection.publish(replies[-1].decode(), ACK, inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EACH):
                await answered.wait()
        return answered.is_set()
    finally:
        connection.unsubscribe(sid)

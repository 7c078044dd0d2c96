"""Acks that are certain: what a slot's owner acknowledged has been applied by the consumer before the slot is released.

An ack is sent without waiting for an answer, so one can get lost on its way. On limits nothing depends on it: the
position travels in the claim. A work queue and an interest stream keep the message, and whoever makes the consumer anew
(servers below 2.14) is given it again. So before a release the last ack is asked for with an answer, and what the
consumer's ack floor does not cover is acknowledged again.
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

_EACH = 0.5  # seconds for one answer: a consumer that changes its leader gives none (docs/evidence/cluster.md#c7)
_BUDGET = 2.0  # seconds altogether, a part of the prepare timeout: a release must not fail because of this


class AcksUnconfirmed(UnknownOutcome):
    """The consumer did not confirm the acks. The position is in the claim, so only storage may be left behind."""


async def confirm(connection: LiveConnection, flow: SlotFlow, durable: SlotDurable, retention: Retention) -> None:
    """When this returns every ack of the slot since its last reset is applied; AcksUnconfirmed within two seconds."""
    try:
        async with asyncio.timeout(_BUDGET):
            await _confirmed(connection, flow, durable, retention)
    except (TimeoutError, PartiError) as error:
        reason = str(error) or f"no answer within {_BUDGET:g} s"
        raise AcksUnconfirmed(f"acks of {durable.name} are not confirmed: {reason}") from error


async def _confirmed(connection: LiveConnection, flow: SlotFlow, durable: SlotDurable, retention: Retention) -> None:
    """An answer says that everything before it on this connection is applied, unless the consumer's leader changed.

    So what the ack floor does not cover is sent once more, and that is enough: with lanes of keys the floor stays
    below a message that is still in its handler, however much above it is done.
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
    """Acknowledge these, the last one with an answer, which the consumer gives after it has applied it."""
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

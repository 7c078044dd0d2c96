"""Acks that are certain: what a slot's owner acknowledged has been applied by the consumer before the slot is released.

An ack is sent without waiting for an answer, so one can get lost on its way. On limits nothing depends on it: the
position travels in the claim. A work queue and an interest stream keep the message, and whoever makes the consumer anew
(servers below 2.14) is given it again. So before a release the last ack is asked for with an answer, and what the
consumer's ack floor does not cover is acknowledged again.
"""

from __future__ import annotations

import asyncio

from parti.errors import PartiError, UnknownOutcome
from parti.manager.slot_durable import SlotDurable
from parti.manager.slot_flow import SlotFlow
from parti.model import Retention
from parti.wire.live import LiveConnection

_TRIES = 5  # a leadership change of the consumer takes one or two


class AcksUnconfirmed(UnknownOutcome):
    """The consumer did not confirm the acks. The position is in the claim, so only storage may be left behind."""


async def confirm(
    connection: LiveConnection, flow: SlotFlow, durable: SlotDurable, retention: Retention, *, timeout: float
) -> None:
    """When this returns every ack of the slot since its last reset is applied; AcksUnconfirmed after some tries."""
    last = flow.last_acked
    waiting = flow.acks_above(0)[-1:]
    for _ in range(_TRIES):
        if not waiting:
            return
        try:
            await _ack_answered(connection, waiting, timeout)
            if retention is Retention.LIMITS:
                return
            floor = await durable.floor()
        except (TimeoutError, PartiError) as error:
            if connection.lost.done():
                raise AcksUnconfirmed(f"acks of {durable.name} are not confirmed: {error}") from error
            continue
        if floor >= last:
            return
        waiting = flow.acks_above(floor)
    raise AcksUnconfirmed(f"acks of {durable.name} are not confirmed after {_TRIES} tries")


async def _ack_answered(connection: LiveConnection, replies: list[bytes], timeout: float) -> None:
    """Acknowledge these, the last one with an answer, which the consumer gives after it has applied it."""
    answered = asyncio.Event()
    inbox = connection.new_inbox()
    sid = connection.subscribe(inbox, lambda _: answered.set())
    try:
        for reply in replies[:-1]:
            connection.publish(reply.decode(), b"+ACK")
        connection.publish(replies[-1].decode(), b"+ACK", inbox)
        async with asyncio.timeout(timeout):
            await answered.wait()
    finally:
        connection.unsubscribe(sid)

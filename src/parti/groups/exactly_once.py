"""Exactly once: prepare the effects, have the server confirm the acknowledgement, then commit; or roll back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from parti.errors import NoResponders
from parti.groups.errors import OwnershipLost
from parti.groups.message import GroupMessage
from parti.observe.logs import get_logger
from parti.outcomes import Outcome, Retry, describe

log = get_logger("groups")


class Transaction(Protocol):
    """The effects of one message on a system of record with two-phase commit."""

    async def prepare(self) -> None:
        """After this, `commit` cannot fail because of the content."""
        ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


Process = Callable[[GroupMessage], Awaitable[Transaction]]
Handler = Callable[[GroupMessage], Awaitable[Outcome]]


def exactly_once(process: Process) -> Handler:
    """A handler that commits a message's effects only after the server has confirmed its acknowledgement.

    `process` does the work and returns the open transaction. If the acknowledgement fails, because this process was
    frozen or its membership changed, another instance gets the message and the transaction is rolled back. One case
    remains, a crash between acknowledgement and commit: the system of record must finish prepared transactions.
    """

    async def handler(message: GroupMessage) -> Outcome:
        transaction = await process(message)
        try:
            await transaction.prepare()
        except Exception as error:
            await transaction.rollback()
            return Retry(error=describe(error))
        try:
            await message.double_ack()
        except (OwnershipLost, NoResponders) as error:
            await transaction.rollback()
            log.warning("group.rolled_back", sequence=message.sequence, error=str(error))
            return Retry(after=0.0, error=str(error))
        except BaseException:
            await transaction.rollback()
            raise
        await transaction.commit()
        return None

    return handler

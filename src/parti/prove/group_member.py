"""One instance of a group member as a process of its own, for `parti prove group`: each message becomes one effect."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from parti.config import LogLevel, ObserveSection
from parti.errors import PartiError
from parti.groups import (
    ConsumerTemplate,
    GroupKind,
    GroupMessage,
    HandlerOptions,
    MemberOptions,
    Order,
    elastic_consume,
    static_consume,
)
from parti.observe.logs import configure_logging
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

EFFECTS = "effects"


async def run(
    url: str, kind: GroupKind, stream: str, group: str, member: str, instance: str, ack_wait: float, in_flight: int
) -> None:
    """Join, and publish an effect for each message, until SIGTERM. More than one in flight means lanes by key."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await connect(ConnectOptions(servers=(url,), name=instance)) as connection:
        api = JetStreamApi(connection, timeout=2)

        async def handler(message: GroupMessage) -> None:
            producer, counter = message.data.decode().split("-")
            effect = {
                "partition": str(message.number),
                "key": message.subject.split(".")[-1],
                "producer": producer,
                "counter": int(counter),
                "owner": instance,
                "epoch": message.lease.epoch,
            }
            await api.publish(f"{EFFECTS}.{member}", json.dumps(effect).encode())

        options = MemberOptions(
            template=ConsumerTemplate(ack_wait=ack_wait, max_ack_pending=in_flight),
            handlers=HandlerOptions(order=Order.STRICT if in_flight == 1 else Order.KEY),
        )
        consume = elastic_consume if kind is GroupKind.ELASTIC else static_consume
        consumer = await consume(connection, stream, group, member, handler, options)
        print("joined", flush=True)
        ended = asyncio.create_task(consumer.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        await consumer.stop()
        await ended


def main() -> None:
    url, kind, stream, group, member, instance, ack_wait, in_flight = sys.argv[1:]
    configure_logging(ObserveSection(log_level=LogLevel.ERROR))
    try:
        asyncio.run(run(url, GroupKind(kind), stream, group, member, instance, float(ack_wait), int(in_flight)))
    except PartiError as error:
        sys.exit(f"{instance}: {error}")


if __name__ == "__main__":
    main()

"""One instance of a group member as its own process, for `parti prove group`: each message becomes one effect.

The effect is stored when the handler *starts*. So the sink's order is the order of starts, and a message that two
instances start shows as a duplicate, however long its handlers take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from dataclasses import asdict, dataclass

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
from parti.waiting import first_of, stop_signals
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions

EFFECTS = "effects"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberJoin:
    """The member that the process joins as; its only argument, as JSON."""

    url: str
    kind: GroupKind
    stream: str
    group: str
    member: str
    instance: str
    ack_wait: float
    in_flight: int = 1
    handler: float = 0.0
    """Seconds that a handler runs after its effect."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> MemberJoin:
        fields = json.loads(text)
        return cls(**fields | {"kind": GroupKind(fields["kind"])})


async def run(joining: MemberJoin) -> None:
    """Join, and publish an effect per message, until SIGTERM. With more than one in flight, there is a lane per key."""
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals(signal.SIGTERM))
        connection = await connect(ConnectOptions(servers=(joining.url,), name=joining.instance))
        stack.push_async_callback(connection.close)
        api = JetStreamApi(connection, timeout=2)

        async def handler(message: GroupMessage) -> None:
            producer, counter = message.data.decode().split("-")
            effect = {
                "partition": str(message.number),
                "key": message.subject.split(".")[-1],
                "producer": producer,
                "counter": int(counter),
                "owner": joining.instance,
                "epoch": message.lease.epoch,
            }
            await api.publish(f"{EFFECTS}.{joining.member}", json.dumps(effect).encode())
            if joining.handler:
                await asyncio.sleep(joining.handler)

        options = MemberOptions(
            template=ConsumerTemplate(ack_wait=joining.ack_wait, max_ack_pending=joining.in_flight),
            handlers=HandlerOptions(order=Order.STRICT if joining.in_flight == 1 else Order.KEY),
        )
        consume = elastic_consume if joining.kind is GroupKind.ELASTIC else static_consume
        consumer = await consume(connection, joining.stream, joining.group, joining.member, handler, options)
        print("joined", flush=True)
        await first_of(consumer.wait(), stop.wait())
        await consumer.stop()
        await consumer.wait()


def main() -> None:
    joining = MemberJoin.decode(sys.argv[1])
    configure_logging(ObserveSection(log_level=LogLevel.ERROR))
    try:
        asyncio.run(run(joining))
    except PartiError as error:
        sys.exit(f"{joining.instance}: {error}")


if __name__ == "__main__":
    main()

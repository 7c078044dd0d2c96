"""The handler of the example: adds the customer's region to each order, in order per customer.

`parti run examples/ordered/pipeline.toml` runs it on Spark. `WorkerConsumer` runs the same function with a latency of
milliseconds. An order that is not valid JSON goes to the dead-letter stream; a lookup that fails is retried.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any

from parti.spark import Emit
from parti.worker import Message, Reject

REGIONS = ("north", "south", "east", "west")
_CACHE = 10_000  # customers that a worker process remembers

_known: OrderedDict[str, str] = OrderedDict()


async def region_of(customer: str) -> str:
    """Simulates a call to a customer service that takes some milliseconds, with a cache."""
    if customer not in _known:
        await asyncio.sleep(0.002)
        _known[customer] = REGIONS[sum(customer.encode()) % len(REGIONS)]
        while len(_known) > _CACHE:
            _known.popitem(last=False)
    return _known[customer]


async def enrich(message: Message) -> Any:
    """Emit the order with the region of its customer, for the consumers of the result stream."""
    try:
        order = json.loads(message.data)
    except ValueError as error:
        return Reject(f"no JSON: {error}")
    enriched = {
        "order": order["order"],
        "customer": order["customer"],
        "happened": order["happened"],
        "cents": order["cents"],
        "lines": len(order["lines"]),
        "region": await region_of(order["customer"]),
    }
    return Emit(json.dumps(enriched))

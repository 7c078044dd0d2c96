"""The handler of the example: each order gets its customer's region and a running total, in order for each customer.

`parti run examples/ordered/pipeline.toml` runs it on Spark; `WorkerConsumer` runs the same function where milliseconds
count. An order that is no JSON is rejected and rests in the dead-letter stream; a lookup that fails is tried again.
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
    """Stands for a call to a customer service: some milliseconds, and worth a cache."""
    if customer not in _known:
        await asyncio.sleep(0.002)
        _known[customer] = REGIONS[sum(customer.encode()) % len(REGIONS)]
        while len(_known) > _CACHE:
            _known.popitem(last=False)
    return _known[customer]


async def enrich(message: Message) -> Any:
    """The order with its region, for whoever reads on."""
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

"""Who filters a subject of a work queue that we want (10100): the durable of an owner that is gone, or somebody else's.

A work queue keeps what is not acknowledged whatever becomes of a consumer, so that a durable which nobody uses any more
is deleted as a whole. Taking single filters off it would be a read and a write without a lock between several workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from parti.manager.old_names import OldNames
from parti.observe.logs import get_logger
from parti.subjects import overlaps
from parti.wire.api import JetStreamApi
from parti.wire.api_consumers import filters_of
from parti.wire.errors import ConsumerDoesNotExist, ConsumerNotFound
from parti.worker.errors import ForeignDurable
from parti.worker.routing import consumer_stem
from parti.worker.seal import Seal


@dataclass(frozen=True, slots=True)
class OwnDurables:
    """How the durables of our namespace are told from those of others."""

    prefix: str
    namespace: str
    old: OldNames
    own: str
    """Ours, in use."""
    own_old: str = ""
    """What ours would have been called by an earlier version."""

    def worker_of(self, info: dict[str, Any]) -> str | None:
        """The worker id of a durable of this namespace; empty for one of a partition; None for what is not ours."""
        seal = Seal.read(info["config"])
        ours = seal is not None and seal.namespace == self.namespace
        stem = consumer_stem(self.prefix, self.namespace)
        return seal.worker if ours and seal and info["name"].startswith(stem) else None

    async def is_old(self, info: dict[str, Any]) -> bool:
        """Whether an earlier version of this namespace made it."""
        return info["name"].startswith(f"{self.prefix}-") and await self.old.is_ours(info)


async def clear_conflicts(
    js: JetStreamApi, stream: str, subjects: Collection[str], ours: OwnDurables, *, in_use: Callable[[str], bool]
) -> int:
    """After this returns no durable of a gone worker of this namespace filters these subjects; how many went for it.

    Call it only for partitions whose claim names us: nobody else may own them. `in_use`: whether somebody else holds a
    worker id; such a worker drops the filter itself. `ForeignDurable` when a consumer that is not of this namespace has
    a subject.
    """
    removed = 0
    for info in await js.consumer_list(stream):
        name, config = info["name"], info["config"]
        filters = filters_of(config)
        if name == ours.own or (filters and not any(overlaps(one, two) for one in filters for two in subjects)):
            continue
        worker = ours.worker_of(info)
        if worker is None and not await ours.is_old(info):
            seal = Seal.read(config)
            whose = f"of namespace {seal.namespace!r}" if seal is not None else "not made by this namespace"
            raise ForeignDurable(name, stream, f"it is {whose}, and has subjects of this work queue")
        worker = worker or name.removeprefix(f"{ours.prefix}-")
        if name != ours.own_old and in_use(worker):
            continue
        with contextlib.suppress(ConsumerNotFound, ConsumerDoesNotExist):
            await js.consumer_delete(stream, name)
        removed += 1
        get_logger("control").info("durable.removed", consumer=name, reason="its subjects are ours now", worker=worker)
    return removed

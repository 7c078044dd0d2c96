"""Resolves filter conflicts on a work queue (10100): deletes a dead owner's durable, reports one of another namespace.

A work queue keeps unacknowledged messages when a consumer is deleted, so an unused durable is deleted as a whole.
Removing single filters from it would be an unlocked read-modify-write by several workers.
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
    """How the durables of this namespace are distinguished from all others."""

    prefix: str
    namespace: str
    old: OldNames
    own: str
    """The name of this member's own durable."""
    own_old: str = ""
    """The name that an earlier version would have given to it."""

    def worker_of(self, info: dict[str, Any]) -> str | None:
        """The worker id of a durable of this namespace; empty for a partition's durable; None for any other durable."""
        seal = Seal.read(info["config"])
        ours = seal is not None and seal.namespace == self.namespace
        stem = consumer_stem(self.prefix, self.namespace)
        return seal.worker if ours and seal and info["name"].startswith(stem) else None

    async def is_old(self, info: dict[str, Any]) -> bool:
        """Whether an earlier version of parti created this durable for this namespace."""
        return info["name"].startswith(f"{self.prefix}-") and await self.old.is_ours(info)


async def clear_conflicts(
    js: JetStreamApi, stream: str, subjects: Collection[str], ours: OwnDurables, *, in_use: Callable[[str], bool]
) -> int:
    """After this, no durable of a dead worker of this namespace filters these subjects; returns the number deleted.

    Call it only for partitions whose claim names this worker as owner. `in_use`: whether another process holds a worker
    id; such a worker drops the filter itself. Raises `ForeignDurable` when a consumer outside this namespace filters
    one of the subjects.
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

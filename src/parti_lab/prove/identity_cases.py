"""The cases of `parti prove identity`: streams, durables and namespaces that were changed or exchanged.

Each case returns the values that should have been handled and never were; an empty list is a pass. Where a stranger
must be refused, an error that says so is a pass; `Wrong` reports a failure that is not a lost message.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from parti.dead_letters import DeadLetterReader
from parti.errors import PartiError
from parti.testing import eventually, insist
from parti_lab.prove.identity_fleet import Bench, Group, settle

A, B = "IDENT-A", "IDENT-B"


class Wrong(Exception):
    """A promise was broken, but no message was lost."""


async def two_namespaces(bench: Bench) -> list[str]:
    """Two applications on one stream: each handles everything, once."""
    await bench.make(A)
    first, second = Group(bench, A, "one"), Group(bench, A, "two")
    await first.join()
    await second.join()
    values = await bench.publish(A, 120)
    lost = [*(await first.got(values)), *(await second.got(values, 3.0))]
    await settle()
    _once(first, second)
    return lost


async def made_anew_stopped(bench: Bench) -> list[str]:
    """The stream was deleted and recreated while no worker ran: every message of the new one is handled."""
    group = await _began(bench)
    await group.leave()
    await _made_anew(bench)
    if bench.retention == "interest":
        await group.join()
    values = await bench.publish(A, 60)
    if not group.managers:
        await group.join()
    return await group.got(values)


async def made_anew_running(bench: Bench) -> list[str]:
    """The stream is recreated under a running fleet, then partitions move: every message of the new one is handled."""
    group = await _began(bench)
    await _made_anew(bench)
    if bench.retention == "interest":
        await _interest(bench)
    values = await bench.publish(A, 60)
    lost = await group.got(values)
    await group.join(1)
    await group.leave(1)
    more = await bench.publish(A, 60)
    return lost + await group.got(more)


async def made_anew_and_moved(bench: Bench) -> list[str]:
    """The stream is recreated, and a worker leaves at once: the next owner knows that the positions are void."""
    group = await _began(bench)
    await _made_anew(bench)
    await group.leave(1)
    if bench.retention == "interest":
        await _interest(bench)
    return await group.got(await bench.publish(A, 60))


async def other_stream(bench: Bench) -> list[str]:
    """The namespace is used for another stream: it is refused, or every message of that stream is handled."""
    group = await _began(bench)
    await group.leave()
    await bench.make(B)
    other = Group(bench, B)
    values: list[str] = []
    if bench.retention != "interest":
        values = await bench.publish(B, 60)
    try:
        await other.join()
    except PartiError:
        return []  # refused with an error: nothing was lost silently
    if bench.retention == "interest":
        values = await bench.publish(B, 60)
    return await other.got(values)


async def stranger_joins(bench: Bench) -> list[str]:
    """A worker of another stream joins a running namespace: it must not get partitions that it cannot serve."""
    group = await _began(bench)
    await bench.make(B)
    stranger = Group(bench, B)
    try:
        with contextlib.suppress(PartiError):
            async with asyncio.timeout(10.0):
                await stranger.join(1)
    except TimeoutError:
        pass
    return await group.got(await bench.publish(A, 60))


async def filters_edited(bench: Bench) -> list[str]:
    """Somebody edits the filters of our durables: they are restored, and messages that came meanwhile are handled."""
    group = await _began(bench)
    for info in await bench.consumers(A):
        config = dict(info["config"])
        filters = list(config.pop("filter_subjects", None) or [config.pop("filter_subject", "")])
        kept = filters[: len(filters) // 2] or [f"{A}._edited_.{info['name']}"]
        await bench.js.consumer_update(A, config | {"filter_subjects": kept})
    lost = await group.got(await bench.publish(A, 60), 20.0)
    await settle()
    _once(group)
    return lost


async def deleted_with_start_new(bench: Bench) -> list[str]:
    """`start = "new"`, durables deleted: what was published since is handled, from each partition's position."""
    group = await _began(bench, start="new")
    for info in await bench.consumers(A):
        await bench.js.consumer_delete(A, info["name"])
    lost = await group.got(await bench.publish(A, 60), 20.0)
    await settle()
    _once(group)
    return lost


async def letters_again(bench: Bench) -> list[str]:
    """Letters of a recreated stream are no duplicates of the old stream's, though the sequences are the same."""
    await bench.make(A)
    group = Group(bench, A)
    await group.join(1)
    await bench.publish(A, 6, word="reject")
    await _letters(bench, 6)
    await group.leave()
    await _made_anew(bench)
    if bench.retention == "interest":
        await group.join(1)
    await bench.publish(A, 6, word="reject")
    if not group.managers:
        await group.join(1)
    found = await _letters(bench, 12)
    return [f"{12 - found} letters"] if found < 12 else []


async def foreign_durable(bench: Bench) -> list[str]:
    """A foreign durable has the name that ours would have: it is refused or avoided, never changed."""
    group = await _began(bench)
    names = [info["name"] for info in await bench.consumers(A)]
    await group.leave()
    for name in names:
        with contextlib.suppress(PartiError):
            await bench.js.consumer_delete(A, name)
    name = sorted(names)[0]
    theirs = {
        "name": name,
        "durable_name": name,
        "ack_policy": "explicit",
        "filter_subjects": [f"{A}.theirs.x"],
        "metadata": {"owner": "somebody"},
    }
    before = await bench.js.consumer_create(A, theirs)
    values = await bench.publish(A, 30) if bench.retention != "interest" else []
    with contextlib.suppress(PartiError, TimeoutError):
        async with asyncio.timeout(8.0):
            await group.join()
    await group.got(values, 5.0)
    after = await bench.js.consumer_info(A, name)
    changed = [k for k in ("filter_subjects", "metadata") if before["config"].get(k) != after["config"].get(k)]
    if changed:
        raise Wrong(f"the durable {name} of somebody else was changed: {', '.join(changed)}")
    return []


async def restored_older(bench: Bench) -> list[str]:
    """The stream is restored from a backup without the last handled messages: later publishes are handled."""
    group = await _began(bench)
    await group.leave()
    store = bench.server.store_dir / "jetstream" / "$G" / "streams" / A
    backup = bench.folder / f"backup-{bench.layout}-{bench.retention}"
    await asyncio.to_thread(bench.server.terminate)
    await asyncio.to_thread(shutil.copytree, store, backup)
    await asyncio.to_thread(bench.server.start)
    await group.join()
    later = await bench.publish(A, 60)
    await group.got(later)
    await group.leave()
    await asyncio.to_thread(bench.server.terminate)
    await asyncio.to_thread(_put_back, backup, store)
    await asyncio.to_thread(bench.server.start)
    await insist(lambda: bench.js.stream_info(A), what="the restored stream")
    if bench.retention == "interest":
        await group.join()
    values = await bench.publish(A, 30)  # fewer than were handled: the last sequence is below the positions
    if not group.managers:
        await group.join()
    lost = await group.got(values)
    return lost + await group.got(await bench.publish(A, 60))


async def purged(bench: Bench) -> list[str]:
    """Messages above the positions were purged: the rest is handled, and the fleet continues."""
    group = await _began(bench)
    await group.leave()
    values = await bench.publish(A, 60)
    last = int((await bench.js.stream_info(A))["state"]["last_seq"])
    await bench.js.request(f"STREAM.PURGE.{A}", {"seq": last - 29})
    await group.join()
    return await group.got(values[30:])


Case = Callable[[Bench], Awaitable[list[str]]]
CASES: Final[dict[str, tuple[Case, tuple[str, ...]]]] = {
    # name -> (case, the retentions that it applies to): a work queue refuses a second namespace, and an interest
    # stream keeps nothing for a consumer that is deleted or has no filter.
    "two_namespaces": (two_namespaces, ("limits", "interest")),
    "made_anew_stopped": (made_anew_stopped, ("limits", "workqueue", "interest")),
    "made_anew_running": (made_anew_running, ("limits", "workqueue", "interest")),
    "made_anew_and_moved": (made_anew_and_moved, ("limits", "workqueue", "interest")),
    "other_stream": (other_stream, ("limits", "workqueue", "interest")),
    "stranger_joins": (stranger_joins, ("limits", "workqueue")),
    "filters_edited": (filters_edited, ("limits", "workqueue")),
    "deleted_with_start_new": (deleted_with_start_new, ("limits", "workqueue")),
    "letters_again": (letters_again, ("limits", "workqueue", "interest")),
    "foreign_durable": (foreign_durable, ("limits", "workqueue")),
    "restored_older": (restored_older, ("limits", "workqueue")),
    "purged": (purged, ("limits", "workqueue")),
}


async def _began(bench: Bench, start: str = "all") -> Group:
    """A running fleet that has handled some messages."""
    await bench.make(A)
    group = Group(bench, A, start=start)
    await group.join()
    lost = await group.got(await bench.publish(A, 60))
    if lost:
        raise Wrong(f"{len(lost)} of 60 were not handled before the case began")
    return group


async def _made_anew(bench: Bench) -> None:
    await bench.js.stream_delete(A)
    await bench.make(A)


async def _interest(bench: Bench) -> None:
    """Wait until our consumers are back: before that, an interest stream keeps nothing."""

    async def there() -> bool:
        with contextlib.suppress(PartiError):
            return bool(await bench.consumers(A))
        return False

    _: bool = await eventually(there, 20.0, "a consumer on the stream recreated")
    await asyncio.sleep(2.0)


async def _letters(bench: Bench, count: int) -> int:
    letters = DeadLetterReader(bench.js, A)

    async def enough() -> bool:
        return await letters.count() >= count

    with contextlib.suppress(Exception):
        _: bool = await eventually(enough, 12.0, f"{count} letters")
    return await letters.count()


def _once(*groups: Group) -> None:
    for group in groups:
        if group.repeated():
            raise Wrong(f"{group.repeated()} values were handled more than once in {group.namespace}")


def _put_back(backup: Path, store: Path) -> None:
    shutil.rmtree(store)
    shutil.copytree(backup, store)

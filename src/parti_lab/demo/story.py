"""The steps of the demonstration, in order, with progress bars."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from parti.audit import Report
from parti.testing import eventually
from parti.testing.history import HistoryVerdict
from parti_lab.demo.effects import EffectLog
from parti_lab.demo.pipeline import DemoPipeline
from parti_lab.prove.fleet import STREAM
from parti_lab.prove.herd import Herd, HerdShape, herd

_TTL = 5.0
_IN_HAND = 2_000  # maximum number of messages that a worker holds
_LOOK = 0.25  # seconds between two reads of the counts


@dataclass(frozen=True, slots=True)
class Told:
    """The result."""

    workers: HistoryVerdict
    """Verdict of the sink's own judge, which saw every effect as it came: a second opinion."""
    refused: int
    report: Report
    events: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every promise held, and both judges saw the same number of effects."""
        (workers, _) = self.report.sides
        agree = workers.effects == self.workers.effects and workers.count("duplicated") == self.workers.duplicated
        return self.report.ok and self.workers.ok(duplicates=self.workers.effects) and agree

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "audit": self.report.figures(),
            "second_opinion": str(self.workers),
            "stale_effects_refused": self.refused,
            "events": list(self.events),
        }


async def tell(
    folder: Path, console: Console, rng: random.Random, *, partitions: int, workers: int, rate: int, seconds: int
) -> Told:
    """Run all steps; after this returns, everything it started has ended."""
    shape = HerdShape(
        workers=workers,
        partitions=partitions,
        rate=float(rate),
        ttl=_TTL,
        takes=0.0,
        log_level="error",
        worker={"max_subjects": partitions, "max_ack_pending": _IN_HAND},
        metrics=str(folder / "metrics"),
    )
    (folder / "metrics").mkdir(exist_ok=True)
    story = _Story(console, rng)
    effects = EffectLog(folder / "effects", STREAM)
    async with herd(shape, rng, fenced_sink=True, record=effects.take) as group:
        story.say(f"nats-server on {group.urls[0]}, {partitions:,} partitions")
        starting = asyncio.create_task(asyncio.to_thread(DemoPipeline.open, group.urls[0], folder))
        await group.add(workers)
        await group.settled()
        story.say(f"{workers} worker processes own them all; starting Spark")
        pipeline = await starting
        try:
            story.say(f"Spark runs the pipeline: {pipeline.plan}")
            await group.flow()
            with story.bars(group, pipeline, rate * seconds):
                await story.faults(group, seconds)
                verdict = await group.finish(120.0)
                effects.close()
                last = (await group.js.stream_info(STREAM))["state"]["last_seq"]
                await eventually(lambda: pipeline.handled >= last, 180.0, "the pipeline has handled everything")
                await asyncio.sleep(2 * _LOOK)
            story.say(f"auditing {last:,} messages against what workers and pipeline did")
            # One worker crashes and one freezes: each may have had this many messages in flight.
            report = await asyncio.to_thread(
                pipeline.audit, folder / "effects", folder / "metrics", repeats=2 * _IN_HAND
            )
        finally:
            await asyncio.to_thread(pipeline.close)
    return Told(verdict, group.sink.refused, report, tuple(story.events))


class _Story:
    def __init__(self, console: Console, rng: random.Random) -> None:
        self.events: list[str] = []
        self._console = console
        self._rng = rng

    def say(self, what: str) -> None:
        self.events.append(what)
        self._console.print(what)

    async def faults(self, group: Herd, seconds: int) -> None:
        """A crash, a join and a freeze, spread over the time of the load."""
        pause = seconds / 5
        await asyncio.sleep(pause)
        victim = self._rng.choice(group.running())
        owned = len(victim.owned)
        victim.kill()
        self.say(f"SIGKILL of {victim.worker}, which owned {owned} partitions")
        await asyncio.sleep(pause)
        (joined,) = await group.add(1)
        self.say(f"{joined.worker} joins")
        await asyncio.sleep(pause)
        frozen = self._rng.choice([worker for worker in group.running() if worker is not joined])
        frozen.freeze()
        self.say(f"SIGSTOP of {frozen.worker}, which owns {len(frozen.owned)} partitions")
        await asyncio.sleep(2 * _TTL)
        frozen.thaw()
        self.say(f"SIGCONT of {frozen.worker}, {2 * _TTL:g} s later: its lease has run out")
        await asyncio.sleep(max(seconds - 3 * pause - 2 * _TTL, pause))
        await group.settled(180.0)

    @contextmanager
    def bars(self, group: Herd, pipeline: DemoPipeline, total: int) -> Iterator[None]:
        """Three bars while the block runs: published, done by workers, done by the pipeline."""
        columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as progress:
            tasks = [progress.add_task(name, total=total) for name in ("published", "workers", "pipeline on Spark")]
            watching = asyncio.ensure_future(self._watch(progress, tasks, group, pipeline, total))
            try:
                yield
            finally:
                watching.cancel()

    async def _watch(
        self, progress: Progress, tasks: list[TaskID], group: Herd, pipeline: DemoPipeline, total: int
    ) -> None:
        while True:
            published = group.traffic.published
            counts = (published, group.sink.history.effects, pipeline.handled)
            for task, count in zip(tasks, counts, strict=True):
                progress.update(task, completed=count, total=max(total, published))
            await asyncio.sleep(_LOOK)

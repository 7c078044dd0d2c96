"""What happens in the demonstration, in order, with a bar that shows how far everybody is."""

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

from parti.demo.pipeline import DemoPipeline, Judged
from parti.prove.herd import Herd, Shape, herd
from parti.testing import eventually
from parti.testing.history import Verdict

_TTL = 5.0
_LOOK = 0.25  # seconds between two looks at the counts


@dataclass(frozen=True, slots=True)
class Told:
    """How it ended."""

    published: int
    workers: Verdict
    refused: int
    pipeline: Judged
    events: tuple[str, ...]
    report: Path | None = None

    @property
    def ok(self) -> bool:
        """Every promise held; a crash and a freeze may repeat what was in hand."""
        return self.workers.ok(duplicates=self.published) and self.pipeline.ok

    def rows(self) -> dict[str, tuple[int, int]]:
        """Word -> figure of the workers, figure of the pipeline."""
        workers, pipeline = self.workers, self.pipeline
        return {
            "published": (workers.published, pipeline.published),
            "effects": (workers.effects, pipeline.outcomes),
            "lost": (workers.lost, pipeline.lost),
            "out of order": (workers.inversions, pipeline.inversions),
            "repeated": (workers.duplicated, pipeline.repeated),
            "two owners in an epoch": (workers.two_owners, 0),
            "stale effects accepted": (workers.stale_accepted, 0),
            "stale effects refused": (self.refused, 0),
        }

    def figures(self) -> dict[str, Any]:
        rows = self.rows()
        return {
            "workers": {name: pair[0] for name, pair in rows.items()},
            "pipeline": {name: pair[1] for name, pair in rows.items()} | {"latency_p50_s": self.pipeline.latency_p50},
            "events": list(self.events),
        }


async def tell(
    folder: Path, console: Console, rng: random.Random, *, partitions: int, workers: int, rate: int, seconds: int
) -> Told:
    """Run the whole story; everything it started is gone when this returns."""
    shape = Shape(
        workers=workers,
        partitions=partitions,
        rate=float(rate),
        ttl=_TTL,
        takes=0.0,
        log_level="error",
        worker={"max_subjects": partitions, "max_ack_pending": 2_000},
    )
    story = _Story(console, rng)
    async with herd(shape, rng, fenced_sink=True) as group:
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
                last = (await group.js.stream_info("PROVE"))["state"]["last_seq"]
                await eventually(lambda: pipeline.handled >= last, 180.0, "the pipeline has handled everything")
                await asyncio.sleep(2 * _LOOK)
            story.say("auditing")
            judged = await asyncio.to_thread(pipeline.judge, int(last))
        finally:
            await asyncio.to_thread(pipeline.close)
    return Told(verdict.published, verdict, group.sink.refused, judged, tuple(story.events))


class _Story:
    def __init__(self, console: Console, rng: random.Random) -> None:
        self.events: list[str] = []
        self._console = console
        self._rng = rng

    def say(self, what: str) -> None:
        self.events.append(what)
        self._console.print(what)

    async def faults(self, group: Herd, seconds: int) -> None:
        """A crash, a join and a freeze, spread over the time that load flows."""
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

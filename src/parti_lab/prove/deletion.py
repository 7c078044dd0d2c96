"""`parti prove deletion`: the consumers of running workers are deleted repeatedly.

See docs/requirements.md#r-101.

Each trial deletes one worker's durable through the API, at a random moment under load. It measures the time until
that worker has handled a message published after the deletion. In the end every message must have been handled
exactly once and in order: a recreated consumer starts at the positions of its partitions, not at the stream's start.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass, field
from uuid import uuid4

from parti.errors import PartiError
from parti.observe.prometheus import PrometheusMetrics
from parti.testing import NatsServer, NeverHappened, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti.worker import Message, Partition, WorkerConfig, WorkerConsumer
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext

_PARTITIONS = 8  # of each worker
_GIVE_UP = 15.0  # seconds after which a trial counts as not recovered
_SETTLE = 20.0
_PAUSE = 0.02  # seconds between two bursts of the load


@dataclass(slots=True)
class DeletionEffects:
    """The effects of all handlers, in order."""

    handled: dict[int, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    inversions: int = 0
    waiting: dict[str, tuple[int, asyncio.Future[float]]] = field(default_factory=dict)

    async def handle(self, message: Message) -> None:
        sequence, partition = message.sequence, message.partition.id
        self.handled[sequence] = self.handled.get(sequence, 0) + 1
        if self.last.get(partition, 0) > sequence:
            self.inversions += 1
        self.last[partition] = sequence
        wanted = self.waiting.get(message.worker_id)
        if wanted is not None and sequence > wanted[0] and not wanted[1].done():
            wanted[1].set_result(time.monotonic())

    def after(self, worker: str, sequence: int) -> asyncio.Future[float]:
        """A future with the time at which the worker first handles a message above this sequence."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.waiting[worker] = (sequence, future)
        return future


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Delete consumers, wait for their recovery, judge."""
    trials = int(ctx.options["trials"]) // (10 if ctx.quick else 1)
    workers, rate = int(ctx.options["workers"]), float(ctx.options["rate"])
    rng, stream = ctx.random(), f"prove-{uuid4().hex[:8]}"
    effects, metrics = DeletionEffects(), PrometheusMetrics()
    async with NatsServer() as server, await connect(ConnectOptions(servers=(server.url,))) as connection:
        js = JetStreamApi(connection)
        await js.stream_create({"name": stream, "subjects": [f"{stream}.>"], "storage": "file", "allow_direct": True})
        config = WorkerConfig(stream=stream, subject_template=f"{stream}.{{partition}}", update_coalescing_window=0.0)
        fleet = [WorkerConsumer(js, config, effects.handle, metrics=metrics) for _ in range(workers)]
        try:
            for number, worker in enumerate(fleet):
                mine = [Partition((f"{number}-{n}",)) for n in range(_PARTITIONS)]
                await worker.update_worker_consumer(f"w{number}", mine)
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                group.create_task(_load(js, stream, workers, rate, rng, stop))
                times = await _trials(ctx, js, stream, workers, trials, effects, rng)
                stop.set()
            last = int((await js.stream_info(stream))["state"]["last_seq"])
            with contextlib.suppress(NeverHappened):  # what is still missing is counted as lost
                await eventually(lambda: len(effects.handled) >= last, _SETTLE)
        finally:
            for worker in fleet:
                await worker.close()
    recreated = metrics.registry.get_sample_value(
        "parti_worker_consumer_recreations_total", {"result": "success", "reason": "not_found"}
    )
    return _figures(times, effects, last) | {"recreations": int(recreated or 0), "workers": workers}


async def _load(
    js: JetStreamApi, stream: str, workers: int, rate: float, rng: random.Random, stop: asyncio.Event
) -> None:
    """Publish to random partitions until stopped."""
    while not stop.is_set():
        count = max(1, int(rate * _PAUSE))
        subjects = [f"{stream}.{rng.randrange(workers)}-{rng.randrange(_PARTITIONS)}" for _ in range(count)]
        await asyncio.gather(*(js.publish(subject, b"x") for subject in subjects))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE):
                await stop.wait()


async def _trials(
    ctx: RunContext,
    js: JetStreamApi,
    stream: str,
    workers: int,
    trials: int,
    effects: DeletionEffects,
    rng: random.Random,
) -> list[float]:
    """The recovery time of each trial; infinite for one that did not recover."""
    times: list[float] = []
    with ctx.progress("deletion", total=trials) as advance:
        while len(times) < trials:
            await asyncio.sleep(rng.expovariate(1 / 0.03))  # a Poisson process: deletions do not line up with anything
            worker = f"w{rng.randrange(workers)}"
            started = time.monotonic()
            try:
                await js.consumer_delete(stream, f"parti-{worker}")
            except PartiError:
                continue  # the consumer was just being recreated; the next trial comes soon
            last = int((await js.stream_info(stream))["state"]["last_seq"])
            recovered = effects.after(worker, last)
            # The load goes to all workers; this message makes certain that this worker gets one.
            await js.publish(f"{stream}.{worker.removeprefix('w')}-0", b"x")
            try:
                async with asyncio.timeout(_GIVE_UP):
                    times.append(await recovered - started)
            except TimeoutError:
                times.append(float("inf"))
            advance(1)
    return times


def _figures(times: list[float], effects: DeletionEffects, last: int) -> dict[str, Figure]:
    ordered = sorted(times)
    recovered = [value for value in ordered if value != float("inf")]

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4) if ordered else float("nan")

    return {
        "trials": len(times),
        "recovered_share": round(len(recovered) / max(len(times), 1), 5),
        "p50_s": at(0.50),
        "p95_s": at(0.95),
        "p99_s": at(0.99),
        "messages": last,
        "lost": sum(1 for sequence in range(1, last + 1) if sequence not in effects.handled),
        "duplicates": sum(count - 1 for count in effects.handled.values()),
        "inversions": effects.inversions,
    }


PROOF = Proof(
    name="deletion",
    help="Consumers deleted from outside, under load: how fast workers recover, and that nothing is lost or repeated.",
    run=run,
    goals={
        "p50_s": "< 2",
        "p95_s": "< 5",
        "p99_s": "< 10",
        "recovered_share": ">= 0.995",
        "lost": "<= 0",
        "duplicates": "<= 0",
        "inversions": "<= 0",
    },
    options=(
        ExperimentOption("trials", 500, "deletions"),
        ExperimentOption("workers", 3, "workers, one of which loses its consumer in each trial"),
        ExperimentOption("rate", 500.0, "messages a second meanwhile"),
    ),
)

"""`parti prove pipeline`: drivers, executors and workers of ordered pipelines are killed, frozen and woken at random.

Real processes on a real server. Two drivers share each pipeline behind its lease; messages are published all the while,
and every result is stored in a second stream. In each trial something goes wrong: Python workers, the driver or an
executor get SIGKILL, the server is killed and started again, or the driver that runs is frozen past its lease, at any
point of a batch, and woken when the other has taken over. The judge reads nothing but the result stream: each message
once, in order for its key, no owner twice in an epoch, nothing of a stale epoch behind a later one. Each plan is tried
with a plain and an async handler. The control, which handles ranges without a shuffle, must fail before this judge.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from parti.bench.goals import Figure
from parti.bench.load import create_stream, delete_stream
from parti.bench.report import Advance, Option, Proof, RunContext
from parti.prove.pipeline_process import PipelineDriver
from parti.prove.spark_process import WITHIN
from parti.testing import NatsServer, eventually_blocking
from parti.testing.history import Effect, History, Verdict
from parti.wire.errors import StreamNotFound
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import Rows, chunk_id, chunks
from parti.wire.publisher import Publisher
from parti.wire.ranges import RangeReader

SOURCE, SINK = "PIPEIN", "PIPEOUT"
_KEYS = 50
_TTL = 3.0
Fault = Literal["workers", "driver", "zombie", "server", "executor"]
_FAULTS: tuple[Fault, ...] = ("workers", "zombie", "driver", "server")
_MODES = (("shuffled", "async"), ("fused", "plain"), ("shuffled", "plain"), ("fused", "async"))
_CLUSTER = "local-cluster[2,1,1024]"


class _Scene:
    """One pipeline with its streams and its two drivers, and what is known of them."""

    def __init__(self, server: NatsServer, folder: Path, rng: random.Random, **mode: Any) -> None:
        self.server = server
        self.options = ConnectOptions(servers=(server.url,))
        self.rng = rng
        self.history = History()
        self.published = 0
        self.read = 0
        self.counts: Counter[str] = Counter()
        self._config = {"url": server.url, "folder": str(folder), "source": SOURCE, "sink": SINK, "ttl": _TTL} | mode
        for stream in (SOURCE, SINK, f"{SOURCE}_DLQ", "KV_parti-pipelines"):
            try:
                delete_stream(self.options, stream)
            except StreamNotFound:
                continue
        create_stream(self.options, SOURCE, "file")
        create_stream(self.options, SINK, "file", duplicate_window=int(3600e9), allow_atomic=True)
        self._reader = RangeReader(self.options, patience=60.0)
        self.drivers: list[PipelineDriver] = []
        self._owner = ""

    def staff(self, count: int = 2) -> None:
        """After this returns, so many drivers are there, the oldest first."""
        for gone in [driver for driver in self.drivers if not driver.alive]:
            self.counts["failures"] += len(gone.failures)
            gone.end()
            self.drivers.remove(gone)
        fresh = [PipelineDriver(self._config) for _ in range(count - len(self.drivers))]
        for driver in fresh:
            driver.wait_ready()
        self.counts["driver_starts"] += len(fresh)
        self.drivers += fresh

    def publish(self, count: int) -> None:
        """Put more numbered messages into the source, each on the subject of a random key."""
        numbers = range(self.published, self.published + count)
        keys = [f"k{self.rng.randrange(_KEYS)}" for _ in numbers]
        rows = Rows(
            pa.array([b"%d" % number for number in numbers], pa.binary()),
            pa.array([f"{SOURCE}.{key}".encode() for key in keys], pa.binary()),
        )
        with Publisher(self.options) as publisher:
            for number, chunk in enumerate(chunks([rows])):
                publisher.publish(chunk, chunk_id(f"prove-{self.published}", number, chunk))
            publisher.flush()
        for number, key in zip(numbers, keys, strict=True):
            self.history.published(key, "p", number)
        self.published += count

    def handled(self) -> int:
        """Take in the results that came since; how many there are in all."""
        last = self._reader.state(SINK).last_seq
        for batch in self._reader.read(SINK, self.read, last, columns=("subject", "data")):
            subjects, values = batch.column("subject").to_pylist(), batch.column("data").to_pylist()
            for subject, value in zip(subjects, values, strict=True):
                if ".parti-fence." not in subject:
                    self._effect(subject.rpartition(".")[2], value)
        self.read = max(self.read, last)
        return self.counts["results"]

    def _effect(self, key: str, value: bytes) -> None:
        number, partition, epoch, owner = value.decode().split()
        self.counts["results"] += 1
        self._owner = owner
        self.counts["epochs"] = max(self.counts["epochs"], int(epoch))
        self.history.effect(Effect(partition, key, "p", int(number), owner, int(epoch)))

    def wait_handled(self, count: int, what: str) -> None:
        eventually_blocking(lambda: self._handled_or_restaffed() >= count, WITHIN, what)

    def _handled_or_restaffed(self) -> int:
        if not any(driver.alive for driver in self.drivers):
            self.staff(1)
        return self.handled()

    def fault(self, fault: Fault) -> None:
        """Something goes wrong; a driver is killed or frozen while it is the one that runs."""
        match fault:
            case "workers":
                hit = sum(driver.kill_workers(self.rng) for driver in self.drivers)
            case "executor":
                hit = sum(driver.kill_executor(self.rng) for driver in self.drivers)
            case "driver":
                hit = self._active().kill()
            case "zombie":
                hit = self._zombie()
            case "server":
                self.server.kill()
                threading.Event().wait(self.rng.uniform(0.1, 2.0))
                self.server.start()
                hit = 1
        self.counts[f"{fault}_hits"] += bool(hit)

    def _zombie(self) -> int:
        """Freeze the driver that runs past its lease, and wake it when the other one runs or is about to."""
        active = self._active()
        frozen = active.freeze()
        threading.Event().wait(_TTL * self.rng.uniform(1.5, 4.0))
        active.thaw(frozen)
        return 1

    def _active(self) -> PipelineDriver:
        """The driver whose result came last: owners are called by host and process."""
        alive = [driver for driver in self.drivers if driver.alive]
        return next((driver for driver in alive if f"-{driver.pid}-" in self._owner), alive[0])

    def verdict(self) -> Verdict:
        self.handled()
        return self.history.verdict()

    def close(self) -> None:
        for driver in self.drivers:
            driver.end()
        self._reader.close()


def run(ctx: RunContext) -> dict[str, Figure]:
    """Every mode with its faults, a cluster of two executors, and the control."""
    trials = 2 if ctx.quick else int(ctx.options["trials"])
    messages = int(ctx.options["messages"])
    modes = _MODES[:1] if ctx.quick else _MODES
    rng, totals, wrong = ctx.random(), Counter[str](), Counter[str]()
    with (
        tempfile.TemporaryDirectory(prefix="parti-prove-") as text,
        NatsServer() as server,
        ctx.progress("pipeline", total=trials * len(modes) + 2) as advance,
    ):
        for number, (plan, handler) in enumerate(modes):
            mode = {"plan": plan, "handler": handler, "master": "local[2]", "per_trigger": messages // 4}
            faults = [_FAULTS[trial % len(_FAULTS)] for trial in range(trials)]
            _scene(server, Path(text) / str(number), rng, mode, faults, messages, totals, wrong, advance)
        if not ctx.quick:
            mode = {"plan": "shuffled", "handler": "async", "master": _CLUSTER, "per_trigger": messages // 4}
            _scene(server, Path(text) / "cluster", rng, mode, ["executor"], messages, totals, wrong, advance)
        control = _control(server, Path(text) / "control", rng, messages)
        advance(1)
    return {
        **totals,
        **{name: wrong[name] for name in ("lost", "duplicated", "inversions", "two_owners", "stale_accepted")},
        "control_inversions": control.inversions,
        "control_lost": control.lost,
    }


def _scene(
    server: NatsServer,
    folder: Path,
    rng: random.Random,
    mode: dict[str, Any],
    faults: list[Fault],
    messages: int,
    totals: Counter[str],
    wrong: Counter[str],
    advance: Advance,
) -> None:
    folder.mkdir()
    scene = _Scene(server, folder, rng, **mode)
    try:
        for fault in faults:
            scene.staff(2 if mode["master"].startswith("local[") else 1)
            before = scene.handled()
            scene.publish(messages)
            # A moment by progress and a moment by time: anywhere in a batch, between sink and commit, or between two.
            scene.wait_handled(before + rng.randrange(messages), "some results")
            threading.Event().wait(rng.uniform(0.0, 0.3))
            scene.fault(fault)
            scene.wait_handled(scene.published, f"every result after {fault}")
            advance(1)
        verdict = scene.verdict()
    finally:
        scene.close()
    totals.update({name: scene.counts[name] for name in scene.counts if name != "epochs"})
    totals.update(messages=scene.published, trials=len(faults), epochs=scene.counts["epochs"])
    for name in ("lost", "duplicated", "inversions", "two_owners", "stale_accepted"):
        wrong[name] += getattr(verdict, name)


def _control(server: NatsServer, folder: Path, rng: random.Random, messages: int) -> Verdict:
    """The same judge over ranges without a shuffle: it has to find inversions, or it proves nothing."""
    folder.mkdir()
    mode = {"plan": "ranges", "handler": "plain", "master": "local[2]", "per_trigger": messages}
    scene = _Scene(server, folder, rng, **mode)
    try:
        scene.publish(messages)  # before the driver starts, so that one batch has them all
        scene.staff(1)
        scene.wait_handled(scene.published, "the results of the control")
        return scene.verdict()
    finally:
        scene.close()


PROOF = Proof(
    name="pipeline",
    help="Ordered pipelines under kills, freezes and restarts: each result once, in order, from one owner an epoch.",
    run=run,
    goals={
        "lost": "== 0",
        "duplicated": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "stale_accepted": "== 0",
        "control_inversions": ">= 1",
    },
    options=(Option("trials", 8, "faults of each mode"), Option("messages", 4_000, "messages of a trial")),
)

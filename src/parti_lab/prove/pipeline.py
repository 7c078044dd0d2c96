"""`parti prove pipeline`: drivers, executors and workers of ordered pipelines are killed, frozen and resumed at random.

Real processes on a real server. Two drivers share each pipeline through its lease; messages are published all the
time, and every result is stored in a second stream. Each trial has one fault: Python workers, the driver or an
executor get SIGKILL, the server is killed and restarted, or the active driver is frozen past its lease, at any point
of a batch or exactly between its sink and its commit, and resumed after the other has taken over. The judge reads
only the result stream: each message once, in order for its key, no owner twice in an epoch, no result of a stale
epoch after a later one. Each plan is tried with a plain and an async handler, on one machine and on a standalone
cluster with two executors. The control, which handles ranges without a shuffle, must fail before this judge.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from parti.errors import TransientError
from parti.progress import Advance
from parti.testing import NatsServer, eventually_blocking
from parti.testing.history import Effect, History, HistoryVerdict
from parti.wire.epoch_marker import MARKER_TOKEN
from parti.wire.errors import StreamNotFound
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import Rows, chunk_id, chunks
from parti.wire.publisher import Publisher
from parti.wire.ranges import RangeReader
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import create_stream, delete_stream
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.pipeline_cluster import StandaloneCluster, standalone
from parti_lab.prove.pipeline_driver import PAUSE
from parti_lab.prove.pipeline_process import PipelineDriver
from parti_lab.prove.spark_process import WITHIN, ProofBroken

SOURCE, SINK = "PIPEIN", "PIPEOUT"
_KEYS = 50
_IN_VAIN = 5  # drivers in a row that end without a result, after which the proof fails
_TTL = 3.0
Fault = Literal["workers", "driver", "zombie", "commit", "server", "executor"]
_FAULTS: tuple[Fault, ...] = ("workers", "zombie", "driver", "commit", "server")
_MODES = (("shuffled", "async"), ("fused", "plain"), ("shuffled", "plain"), ("fused", "async"))
_ON_CLUSTER: tuple[tuple[str, str, tuple[Fault, ...]], ...] = (
    ("shuffled", "async", ("executor", "commit", "workers", "driver", "zombie")),
    ("fused", "plain", ("executor", "driver", "commit")),
)


class _Scene:
    """One pipeline with its streams, its two drivers and their known state."""

    def __init__(
        self,
        server: NatsServer,
        folder: Path,
        rng: random.Random,
        mode: dict[str, Any],
        cluster: StandaloneCluster | None = None,
    ) -> None:
        self.server = server
        self._folder = folder
        self._cluster = cluster
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
        self._restaffed_at = -1
        self._in_vain = 0

    def staff(self, count: int = 2) -> None:
        """After this returns, `count` drivers are running, the oldest first."""
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
        """Publish `count` more numbered messages to the source, each on the subject of a random key."""
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
        """Read the results that arrived since the last call; returns how many there are in all."""
        try:
            self._reader.check()
            last = self._reader.state(SINK).last_seq
        except TransientError:  # the server is restarting
            return self.counts["results"]
        for batch in self._reader.read(SINK, self.read, last, columns=("subject", "data")):
            subjects, values = batch.column("subject").to_pylist(), batch.column("data").to_pylist()
            for subject, value in zip(subjects, values, strict=True):
                if f".{MARKER_TOKEN}." not in subject:
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
        """Wait for `count` results; there is no time limit while results keep arriving."""
        while self._handled_or_restaffed() < count:
            self._wait_for_more(what)

    def _wait_for_more(self, what: str) -> None:
        before = self.counts["results"]
        eventually_blocking(lambda: self._handled_or_restaffed() > before, WITHIN, what)

    def _handled_or_restaffed(self) -> int:
        if not any(driver.alive for driver in self.drivers):
            self._in_vain = 0 if self.counts["results"] > self._restaffed_at else self._in_vain + 1
            if self._in_vain > _IN_VAIN:
                last = [failure for driver in self.drivers for failure in driver.failures][-1:]
                raise ProofBroken(f"{self._in_vain} drivers ended one after the other, none did anything: {last}")
            self._restaffed_at = self.counts["results"]
            self.staff(1)
        return self.handled()

    def fault(self, fault: Fault) -> None:
        """Apply the fault; a driver is killed or frozen while it is the active one."""
        match fault:
            case "workers":
                places = self.drivers if self._cluster is None else [self._cluster]
                hit = sum(place.kill_workers(self.rng) for place in places)
            case "executor":
                assert self._cluster is not None
                hit = self._cluster.kill_executor(self.rng)
            case "driver":
                hit = self._active().kill()
            case "zombie":
                hit = self._zombie(self._active())
            case "commit":
                hit = self._zombie(self._stopped_before_commit())
            case "server":
                self.server.kill()
                threading.Event().wait(self.rng.uniform(0.1, 2.0))
                self.server.start()
                hit = 1
        self.counts[f"{fault}_hits"] += bool(hit)

    def _zombie(self, active: PipelineDriver) -> int:
        """Freeze the active driver past its lease, and resume it when the other one is active or about to be."""
        frozen = active.freeze()
        threading.Event().wait(_TTL * self.rng.uniform(1.5, 4.0))
        active.thaw(frozen)
        return 1

    def _stopped_before_commit(self) -> PipelineDriver:
        """A driver that stopped itself after the results of a batch were stored and before its commit."""
        for driver in self.drivers:
            driver.paused.clear()
        (self._folder / PAUSE).touch()
        self.publish(100)  # so that there is a batch in which to stop
        eventually_blocking(lambda: any(driver.paused.is_set() for driver in self.drivers), WITHIN, "a driver stops")
        return next(driver for driver in self.drivers if driver.paused.is_set())

    def _active(self) -> PipelineDriver:
        """The driver of the latest result: an owner's name contains its host and process id."""
        alive = [driver for driver in self.drivers if driver.alive]
        return next((driver for driver in alive if f"-{driver.pid}-" in self._owner), alive[0])

    def verdict(self) -> HistoryVerdict:
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
        ctx.progress("pipeline", total=trials * len(modes) + (0 if ctx.quick else 8) + 1) as advance,
    ):
        for number, (plan, handler) in enumerate(modes):
            faults = [_FAULTS[trial % len(_FAULTS)] for trial in range(trials)]
            mode = _mode(plan, handler, "local[2]", messages // 4, pauses="commit" in faults)
            scene = _Scene(server, _made(Path(text) / str(number)), rng, mode)
            _play(scene, faults, messages, totals, wrong, advance)
        if not ctx.quick:
            with standalone(Path(text) / "spark") as cluster:
                for plan, handler, several in _ON_CLUSTER:
                    mode = _mode(plan, handler, cluster.url, messages // 4, pauses=True)
                    scene = _Scene(server, _made(Path(text) / f"cluster-{plan}"), rng, mode, cluster)
                    _play(scene, list(several), messages, totals, wrong, advance)
        control = _control(server, Path(text) / "control", rng, messages)
        advance(1)
    return {
        **totals,
        **{name: wrong[name] for name in ("lost", "duplicated", "inversions", "two_owners", "stale_accepted")},
        "control_inversions": control.inversions,
        "control_lost": control.lost,
    }


def _mode(plan: str, handler: str, master: str, per_trigger: int, *, pauses: bool) -> dict[str, Any]:
    """The settings of a mode's drivers."""
    return {"plan": plan, "handler": handler, "master": master, "per_trigger": per_trigger, "pauses": pauses}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _play(
    scene: _Scene,
    faults: list[Fault],
    messages: int,
    totals: Counter[str],
    wrong: Counter[str],
    advance: Advance,
) -> None:
    """Apply one fault after the other under load, then judge."""
    rng = scene.rng
    try:
        for fault in faults:
            scene.staff()
            before = scene.handled()
            scene.publish(messages)
            # A random progress, then a random time: anywhere in a batch, between sink and commit, or between batches.
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


def _control(server: NatsServer, folder: Path, rng: random.Random, messages: int) -> HistoryVerdict:
    """Ranges without a shuffle before the same judge: it must find inversions, or the proof proves nothing."""
    scene = _Scene(server, _made(folder), rng, _mode("ranges", "plain", "local[2]", messages, pauses=False))
    try:
        scene.publish(messages)  # before the driver starts, so that one batch contains all of them
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
    options=(
        ExperimentOption("trials", 10, "faults of each mode"),
        ExperimentOption("messages", 4_000, "messages of a trial"),
    ),
)

"""`parti prove spark`: a Spark driver or its workers are killed at random moments; nothing is lost or duplicated.

Real processes on a real server. Messages are published all the time; one query of the driver writes them to Parquet,
another publishes them to a second stream. In each trial either the driver (JVM and Python) or some of its task
workers get SIGKILL during a batch; a dead driver is restarted on the same checkpoints. After each trial the Parquet
table must equal the input exactly, and the second stream must hold each message once, in order for each subject.
At the end ranges of the input are read several times in several ways, and must give the same bytes.

Then come generated cases (`spark_generated`): streams, readers and faults are drawn, and each case is judged against
a plain reader that asks the leader for one message after the other. The log names a case that fails; run it again
with the same `--seed` and `--first-case`.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from parti.testing import NatsServer
from parti.wire.options import ConnectOptions
from parti.wire.outgoing import Rows, chunk_id, chunks
from parti.wire.publisher import Publisher
from parti.wire.ranges import RangeReader
from parti_lab.bench.goals import Figure
from parti_lab.bench.load import create_stream
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.spark_case import WRONG
from parti_lab.prove.spark_driver import digest
from parti_lab.prove.spark_process import Driver

SOURCE, SINK = "PROVEIN", "PROVEOUT"
_KEYS = 20


class SparkExperiment:
    """The streams, their input and their output."""

    def __init__(self, options: ConnectOptions, folder: Path, rng: random.Random) -> None:
        self.options = options
        self.folder = folder
        self.rng = rng
        self.expected: dict[int, tuple[str, bytes]] = {}
        self._reader = RangeReader(options)
        self._published = 0

    def publish(self, count: int) -> None:
        """Publish `count` more messages to the input; each payload is a number followed by random bytes."""
        numbers = range(self._published, self._published + count)
        values = [b"%d " % number + self.rng.randbytes(self.rng.randint(0, 200)) for number in numbers]
        subjects = [f"{SOURCE}.k{self.rng.randrange(_KEYS)}" for _ in numbers]
        rows = Rows(pa.array(values, pa.binary()), pa.array([subject.encode() for subject in subjects], pa.binary()))
        with Publisher(self.options) as publisher:
            for number, chunk in enumerate(chunks([rows])):
                publisher.publish(chunk, chunk_id(f"prove-{self._published}", number, chunk))
            publisher.flush()
        for number, subject, value in zip(numbers, subjects, values, strict=True):
            self.expected[number + 1] = (subject, value)
        self._published += count

    @property
    def copied(self) -> int:
        return self._reader.state(SINK).messages

    def wait_copied(self, at_least: int, driver: Driver) -> None:
        """Return when the second stream holds `at_least` messages; a driver that ends meanwhile is restarted."""
        driver.wait_for(lambda: self.copied, at_least, f"messages in {SINK}")

    def wait_parquet(self, driver: Driver) -> None:
        """Return when the table has as many rows as the input; more is an error that `check` will count."""

        def rows() -> int:
            return sum(int(pq.read_metadata(path).num_rows) for path in self._files())

        driver.wait_for(rows, len(self.expected), "rows in Parquet")

    def check(self) -> Counter[str]:
        """Counts of what is wrong with the outputs; empty if nothing is."""
        wrong: Counter[str] = Counter()
        rows = [row for path in self._files() for row in pq.ParquetFile(path).read().to_pylist()]
        found = Counter(row["sequence"] for row in rows)
        wrong["parquet_lost"] = len(self.expected.keys() - found.keys())
        wrong["parquet_duplicated"] = sum(count - 1 for count in found.values())
        wrong["parquet_wrong"] = sum(
            1 for row in rows if self.expected.get(row["sequence"]) != (row["subject"], bytes(row["value"]))
        )
        stored = list(self._stored())
        counted = Counter(value for _, value in stored)
        values = Counter(value for _, value in self.expected.values())
        wrong["stream_lost"] = sum((values - counted).values())
        wrong["stream_duplicated"] = sum((counted - values).values())
        wrong["stream_out_of_order"] = _inversions(stored)
        return wrong

    def replays(self, driver: Driver, ranges: int) -> int:
        """How many reads of the same range differ: by consumer and by Direct Get, twice each, and twice by Spark."""
        differ = 0
        for _ in range(ranges):
            first = self.rng.randint(1, len(self.expected))
            last = min(len(self.expected), first + self.rng.randint(1, 3000))
            hashes = {self._hash(first, last, path) for path in ("consumer", "direct") for _ in range(2)}
            hashes |= {driver.replay(first, last) for _ in range(2)}
            differ += len(hashes) - 1
        return differ

    def close(self) -> None:
        self._reader.close()

    def _hash(self, first: int, last: int, path: Any) -> str:
        columns = ("sequence", "subject", "data", "headers")
        batches = self._reader.read(SOURCE, first - 1, last, columns=columns, path=path)
        return digest(tuple(row.values()) for batch in batches for row in batch.to_pylist())

    def _stored(self) -> Iterator[tuple[str, bytes]]:
        last = self._reader.state(SINK).last_seq
        for batch in self._reader.read(SINK, 0, last, columns=("subject", "data")):
            yield from zip(batch.column("subject").to_pylist(), batch.column("data").to_pylist(), strict=True)

    def _files(self) -> list[Path]:
        """The files of the table: those in its commit log, which every reader of the table uses."""
        log = self.folder / "parquet" / "_spark_metadata"
        commits = [path for path in log.glob("[0-9]*") if not path.name.endswith(".tmp")] if log.exists() else []
        compact = max((int(path.stem) for path in commits if path.suffix == ".compact"), default=-1)
        used = [path for path in commits if path.suffix == ".compact" and int(path.stem) == compact]
        used += [path for path in commits if path.suffix == "" and int(path.name) > compact]
        files: set[str] = set()
        for path in used:
            files |= {json.loads(line)["path"] for line in path.read_text().splitlines()[1:] if line.startswith("{")}
        return [Path(file.removeprefix("file://")) for file in sorted(files)]


def _inversions(stored: list[tuple[str, bytes]]) -> int:
    """Messages stored after a later one of their subject."""
    highest: dict[str, int] = {}
    wrong = 0
    for subject, value in stored:
        number = int(value.split(b" ", 1)[0])
        wrong += number < highest.get(subject, -1)
        highest[subject] = max(number, highest.get(subject, -1))
    return wrong


def run(ctx: RunContext) -> dict[str, Figure]:
    """Run all trials on one pair of checkpoints; the figures count what went wrong in any of them."""
    trials = min(int(ctx.options["trials"]), 2) if ctx.quick else int(ctx.options["trials"])
    if not trials:
        return {**dict.fromkeys(_WRONG, 0), **_generated(ctx)}
    messages = int(ctx.options["messages"]) // (2 if ctx.quick else 1)
    rng = ctx.random()
    figures: Counter[str] = Counter(trials=trials, driver_kills=0, worker_kills=0, batches_replayed=0)
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="parti-prove-") as text, NatsServer() as server:
        folder, options = Path(text), ConnectOptions(servers=(server.url,))
        create_stream(options, SOURCE, "file")
        create_stream(options, SINK, "file", duplicate_window=int(3600e9))
        config = {
            "url": server.url,
            "folder": text,
            "source": SOURCE,
            "sink": SINK,
            "per_trigger": max(messages // 5, 2),
        }
        driver, experiment = Driver(config), SparkExperiment(options, folder, rng)
        try:
            with ctx.progress("spark", total=trials) as advance:
                for trial in range(trials):
                    _trial(experiment, driver, rng, trial, messages, figures)
                    wrong |= experiment.check()
                    advance(1)
                wrong["replays_that_differ"] = experiment.replays(driver, 1 if ctx.quick else 5)
        finally:
            driver.close()
            experiment.close()
    generated = _generated(ctx)
    figures["messages"] = len(experiment.expected)
    figures["driver_starts"] = driver.starts
    figures["query_failures"] = len(driver.failures)
    return {**figures, **{name: wrong[name] for name in _WRONG}, **generated}


def _generated(ctx: RunContext) -> dict[str, int]:
    """Cases played in this process and cases on a real Spark, counted together."""
    from parti_lab.prove.spark_generated import case_driver, run_cases  # Spark is an extra

    played, staged = int(ctx.options["cases"]), int(ctx.options["spark_cases"])
    first, replicas = int(ctx.options["first_case"]), int(ctx.options["replicas"])
    if ctx.quick:
        played, staged = min(played, 12), min(staged, 1)
    found = run_cases(ctx, cases=played, first=first, replicas=replicas)
    if staged:
        with tempfile.TemporaryDirectory(prefix="parti-cases-") as folder, case_driver(Path(folder)) as driver:
            found.update(run_cases(ctx, cases=staged, first=first, replicas=replicas, driver=driver))
    return {name: found[name] for name in ("cases", "spark_cases", "rows", "losses_told", "faults", *_CASES)}


def _trial(
    experiment: SparkExperiment, driver: Driver, rng: random.Random, trial: int, messages: int, figures: Counter[str]
) -> None:
    driver.ensure()
    before = experiment.copied
    experiment.publish(messages)
    # A random progress, then a random time: anywhere in a batch, between batches, or while a driver still starts.
    experiment.wait_copied(before + rng.randrange(messages), driver)
    threading.Event().wait(rng.uniform(0.0, 0.4))
    if trial % 2 or rng.random() < 0.2:
        figures["driver_kills"] += bool(driver.kill())
        figures["batches_replayed"] += _open_batches(experiment.folder)
    else:
        figures["worker_kills"] += driver.kill_workers(rng)
    experiment.wait_copied(len(experiment.expected), driver)
    experiment.wait_parquet(driver)


def _open_batches(folder: Path) -> int:
    """Batches with offsets but no commit in a checkpoint: the next driver runs them again."""
    found = 0
    for checkpoint in folder.glob("check-*"):
        planned, done = ({path.name for path in (checkpoint / kind).glob("[0-9]*")} for kind in ("offsets", "commits"))
        found += len({name for name in planned - done if name.isdigit()})
    return found


_WRONG = (
    "parquet_lost",
    "parquet_duplicated",
    "parquet_wrong",
    "stream_lost",
    "stream_duplicated",
    "stream_out_of_order",
    "replays_that_differ",
)
_CASES = tuple(f"cases_{kind}" for kind in WRONG)
GOALS = dict.fromkeys((*_WRONG, *_CASES), "== 0")

PROOF = Proof(
    name="spark",
    help="Spark driver and workers killed at random: Parquet equals the input, the sink stream holds each once.",
    run=run,
    goals=GOALS,
    options=(
        ExperimentOption("trials", 30, "kills"),
        ExperimentOption("messages", 2_000, "messages of a trial"),
        ExperimentOption("cases", 200, "generated cases that are played without a Spark"),
        ExperimentOption("spark_cases", 20, "generated cases on a real Spark"),
        ExperimentOption("first_case", 0, "number of the first generated case"),
        ExperimentOption("replicas", 1, "of the streams of generated cases: with 3 on a cluster of three servers"),
    ),
)

"""The generator of `parti prove spark`: the stream, its changes, its reader and its options. Pure: a seed is a case.

Each part is drawn independently, so combinations come up that nobody thought of. A case that fails is repeated with
`--seed` and `--case`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["plain", "mirror", "filtered", "sourced"]
Sizes = Literal["tiny", "mixed", "large"]

FEATURES = ("headers", "odd", "ttl", "counter", "schedule", "per_subject", "compressed", "sealed", "sequence")
FAULTS = {"none": 4, "workers": 5, "driver": 1, "server": 5, "leader": 5}
"""Nothing; SIGKILL of task workers; of the driver and its JVM; of the server; a step-down of the stream's leader. The
number is the weight of each: a new driver costs as much as ten cases that share one."""
WRONG = (
    "missing",
    "silent",
    "doubled",
    "altered",
    "alien",
    "false_alarms",
    "inexact",
    "replays_that_differ",
    "raised",
)
"""The possible findings: a stored message was not read; a loss was not reported; a message came twice, was changed, or
never existed; a false loss; a loss with wrong numbers; a replay that differs; an error."""


@dataclass(frozen=True, slots=True)
class Act:
    """One change of the stream; `share` is a fraction of its messages, `count` a number."""

    name: str
    share: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.name}({self.share or self.count:g})"


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The stream that is read, and its content when the reader starts."""

    kind: Kind
    retention: str
    storage: str
    replicas: int
    direct: bool
    messages: int
    subjects: int
    sizes: Sizes
    features: frozenset[str]
    mirrors: tuple[str, ...]
    """Its mirrors, which answer Direct Get in its name: `full`, `filtered`; they keep messages deleted from it."""
    acts: tuple[Act, ...]


@dataclass(frozen=True, slots=True)
class ReaderPlan:
    """The reader, and what happens meanwhile: acts by the step that they precede."""

    streaming: bool
    trigger: Literal["now", "once", "processing"]
    options: dict[str, str]
    filtered: bool
    start: Literal["earliest", "sequence", "timestamp"]
    acts: tuple[tuple[int, Act], ...]
    crashes: tuple[int, ...]
    """Batches after which the driver crashes before it commits them."""
    retries: int
    """Percentage of tasks whose first try is thrown away."""
    fault: str
    """The fault during the read, on a real Spark: see `FAULTS`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case, reproducible from the run's seed and its `number`."""

    number: int
    stream: StreamPlan
    reader: ReaderPlan

    def __str__(self) -> str:
        s, r = self.stream, self.reader
        how = f"{'stream ' + r.trigger if r.streaming else 'batch'} from {r.start}"
        extra = [*sorted(s.features), *(f"mirror:{each}" for each in s.mirrors), *map(str, s.acts)]
        meanwhile = [f"{step}:{act}" for step, act in r.acts] + [f"crash:{each}" for each in r.crashes]
        return (
            f"case {self.number}: {s.kind} {s.retention} {s.storage} R{s.replicas} {'direct ' if s.direct else ''}"
            f"{s.messages} of {s.sizes} [{' '.join(extra)}], {how}{' filtered' if r.filtered else ''} "
            f"{r.options} [{' '.join(meanwhile)}] fault {r.fault}"
        )


def draw(seed: int, number: int, *, replicas: int = 1) -> Case:
    """The case of this number; equal seeds give equal cases."""
    rng = random.Random(f"{seed}:{number}")
    stream = _stream(rng, replicas)
    return Case(number, stream, _reader(rng, stream))


def _stream(rng: random.Random, replicas: int) -> StreamPlan:
    kind: Kind = rng.choices(("plain", "mirror", "filtered", "sourced"), (7, 1, 1, 1))[0]
    retention = rng.choices(("limits", "interest", "workqueue"), (8, 1, 1))[0] if kind == "plain" else "limits"
    some = frozenset(name for name in FEATURES if rng.random() < 0.2) - ({"sealed"} if retention != "limits" else set())
    if kind != "plain" or retention != "limits":
        some -= {"sealed", "ttl", "counter", "schedule", "per_subject"}
    if "counter" in some:
        some -= {"ttl", "schedule", "headers", "sealed"}  # a sealed stream refuses messages, a counter must not
    if "sealed" in some:
        some -= {"schedule"}  # for the same reason as above
    # A mirror of a work queue removes messages from it: then the expected content of a read is unknown.
    mirrors = 0 if retention == "workqueue" else rng.choice((0, 1, 2))
    messages = rng.choice((0, 1, 7, 200, 499, 501, 900, 900, 2_500, 2_500))
    return StreamPlan(
        kind=kind,
        retention=retention,
        storage=rng.choice(("file", "memory")),
        replicas=replicas,
        direct=retention == "workqueue" or rng.random() < 0.8,
        messages=messages,
        subjects=rng.choice((1, 3, 40)),
        sizes=rng.choices(("tiny", "mixed", "large"), (6, 3, 1))[0],
        features=some,
        mirrors=tuple(rng.choices(("full", "filtered"), k=mirrors)),
        acts=tuple(_act(rng, ("delete", "run", "purge_subject", "gap", "front", "tail")) for _ in range(_few(rng))),
    )


def _few(rng: random.Random) -> int:
    return rng.choices((0, 1, 2, 3), (4, 3, 2, 1))[0]


def _act(rng: random.Random, names: tuple[str, ...]) -> Act:
    match rng.choice(names):
        case "gap":
            return Act("gap", count=rng.choice((600, 5_000, 100_000)))
        case "publish":
            return Act("publish", count=rng.choice((1, 30, 700)))
        case "flood":
            return Act("flood", count=rng.choice((40, 700)))
        case "storm" | "aging" as name:
            return Act(name, count=rng.choice((2_000, 8_000)))
        case "remake":
            return Act("remake", count=rng.choice((0, 5, 600)))
        case name:
            return Act(name, share=rng.choices((0.01, 0.1, 0.4, 0.9, 1.0), (3, 3, 3, 1, 1))[0])


def _reader(rng: random.Random, stream: StreamPlan) -> ReaderPlan:
    streaming = rng.random() < 0.6
    options: dict[str, Any] = {"includeHeaders": "true"}
    if rng.random() < 0.5:
        options["maxRecordsPerPartition"] = rng.choice((1 if stream.messages < 100 else 37, 300, 1_000))
    if rng.random() < 0.4:
        options |= {"minPartitions": rng.choice((1, 3, 7)), "minRecordsPerPartition": rng.choice((1, 50))}
    if streaming and rng.random() < 0.5:
        options["maxOffsetsPerTrigger"] = rng.choice((25 if stream.messages < 100 else 250, 1_000, 60_000))
    elif streaming and rng.random() < 0.4:
        # Never thousands of batches: each one is a Spark job.
        sizes = ("200KB", "2MB", "20MB") if stream.sizes == "large" else ("20KB", "200KB", "2MB")
        options["maxBytesPerTrigger"] = rng.choice(sizes)
    options["failOnDataLoss"] = "true" if rng.random() < 0.6 else "false"
    names: tuple[str, ...] = ("publish", "delete", "run", "purge_subject", "front", "limit", "bytes", "tail", "storm")
    names += ("flood", "flood", "aging", "aging", *["age"] * 4)
    if stream.retention == "limits" and not stream.mirrors:
        names += ("remake",) * 6
    if "sealed" in stream.features or stream.kind != "plain":
        names = ()
    # A memory stream on one server does not survive its restart. A replicated mirror of a stream with gaps may have no
    # leader any more after an election ("expected sequence does not match store", nats-server 2.15.1).
    mortal = stream.storage == "memory" if stream.replicas == 1 else stream.kind in ("mirror", "filtered")
    faults = [name for name in FAULTS if not (mortal and name in ("server", "leader"))]
    return ReaderPlan(
        streaming=streaming,
        trigger=rng.choices(("processing", "now", "once"), (3, 3, 1))[0],
        options={key: str(value) for key, value in options.items()},
        filtered=rng.random() < 0.3,
        start=rng.choices(("earliest", "sequence", "timestamp"), (5, 2, 1))[0],
        acts=_meanwhile(rng, names) if names else (),
        crashes=tuple(number for number in range(4) if streaming and rng.random() < 0.2),
        retries=rng.choice((0, 0, 30)),
        fault=rng.choices(faults, [FAULTS[name] for name in faults])[0],
    )


def _meanwhile(rng: random.Random, names: tuple[str, ...]) -> tuple[tuple[int, Act], ...]:
    steps = sorted(rng.choice((1, 2, 3, 5, 9)) for _ in range(_few(rng)))
    return tuple((step, _act(rng, names)) for step in steps)

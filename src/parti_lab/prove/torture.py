"""`parti prove torture`: random fault scenarios against a fleet; the seed alone decides each scenario.

Scenario N of a run with `--seed S` has the seed S + N, so a failed one is repeated by `--seed <its seed> --scenarios 1`
(and the same restrictions). With `--keep FOLDER` each failed scenario writes a file with its shape, schedule, counts,
examples and the logs of its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from bisect import bisect_left
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from parti.errors import PartiError
from parti.testing import NatsServer, NeverHappened, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.cluster_faults import Servers
from parti_lab.prove.sink import percentile
from parti_lab.prove.torture_faults import TortureFaults
from parti_lab.prove.torture_fleet import TortureFleet
from parti_lab.prove.torture_judge import Judgement, TortureLedger
from parti_lab.prove.torture_scenario import Restrict, TortureFault, TortureScenario, draw
from parti_lab.prove.torture_sink import TortureSink
from parti_lab.prove.torture_traffic import STREAM, TortureTraffic
from parti_lab.prove.torture_watch import TortureWatch, WatchedLetters
from parti_lab.prove.traffic import make_stream

_GIVE_UP: Final = 20.0  # seconds without an effect of a partition, after which it counts as not recovered
_COMPLETE: Final = 45.0  # seconds for the backlog after the load has ended; a healthy fleet needs one or two
_BEYOND_TTL: Final = 3.0
_SLOW: Final = "slow server"
_BROKEN: Final = (
    "lost",
    "inversions",
    "stale_started",
    "two_owners",
    "unexplained",
    "letters_unexpected",
    "violations",
    "unacked",
    "slow",
    "late_exits",
    "bad_exits",
    "died",
    "errors",
)


@dataclass
class TortureReport:
    """The result of one scenario."""

    scenario: TortureScenario
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, Any] = field(default_factory=dict)
    recoveries: list[float] = field(default_factory=list)
    messages: int = 0
    starvation: float = 1.0
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def broken(self) -> dict[str, int]:
        return {name: self.counts[name] for name in _BROKEN if self.counts.get(name)}

    def line(self) -> str:
        """One line of text for a person."""
        words = " ".join(f"{name}={count}" for name, count in self.broken.items()) or "ok"
        worst = max(self.recoveries, default=0.0)
        return (
            f"seed {self.scenario.seed}: {words}; {self.messages} messages, recovery {worst:.1f} s, "
            f"starvation {self.starvation:.1f}, {self.seconds:.0f} s; {self.scenario.shape()}; "
            f"{self.scenario.schedule()}"
        )

    def whole(self) -> dict[str, Any]:
        return {
            "seed": self.scenario.seed,
            "shape": self.scenario.shape(),
            "schedule": self.scenario.schedule(),
            "broken": self.broken,
            "counts": self.counts,
            "recoveries": [round(r, 2) for r in self.recoveries],
            "starvation": round(self.starvation, 2),
            "examples": self.examples,
            "notes": self.notes,
            "logs": self.logs,
        }


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Run one scenario after the other."""
    options = ctx.options
    restrict = Restrict.parse(
        faults=str(options["faults"]),
        replicas=int(options["replicas"]),
        quick=ctx.quick,
        retention=str(options["retention"]),
        layout=str(options["layout"]),
        lanes=str(options["lanes"]),
        storage=str(options["storage"]),
        workers=int(options["workers"]),
        partitions=int(options["partitions"]),
        rate=float(options["rate"]),
        takes=float(options["takes"]),
        ttl=float(options["ttl"]),
    )
    count = min(3, int(options["scenarios"])) if ctx.quick else int(options["scenarios"])
    scenarios = [draw(ctx.seed + number, restrict) for number in range(count)]
    keep = Path(str(options["keep"])) if options["keep"] else None
    reports: list[TortureReport] = []
    with ctx.progress("scenarios", total=count) as advance:
        for scenario in scenarios:
            report = await torture(scenario, log_level=str(options["log_level"]))
            reports.append(report)
            if keep is not None:
                _keep(keep, report)
            advance(1)
    return _figures(reports)


async def torture(scenario: TortureScenario, *, log_level: str = "info") -> TortureReport:
    """Run one scenario, from starting its servers to its judgement."""
    report = TortureReport(scenario)
    began = time.monotonic()
    try:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parti-torture-")))
            servers = await _servers(stack, scenario)
            connection = await connect(ConnectOptions(servers=servers.urls, request_timeout=5.0))
            stack.push_async_callback(connection.close)
            js = JetStreamApi(connection)
            await make_stream(js, STREAM, scenario.retention, scenario.replicas, scenario.storage)
            ledger = TortureLedger()
            sink = await stack.enter_async_context(TortureSink(ledger))
            fleet = TortureFleet(scenario, servers, js, folder, ledger, sink)
            fleet.log_level = log_level
            try:
                await _tortured(scenario, stack, fleet, report)
            finally:
                report.logs = {f"{p.namespace}/{p.number}": list(p.log) for p in fleet.places}
                report.notes["self_exits"] = [*fleet.died, *fleet.at_start]
                report.notes["disturbances"] = [str(d) for d in ledger.disturbances]
    except (PartiError, NeverHappened, RuntimeError, TimeoutError) as error:
        report.counts["errors"] = 1
        report.examples["errors"] = f"{type(error).__name__}: {error}"
    report.seconds = time.monotonic() - began
    return report


async def _tortured(
    scenario: TortureScenario, stack: AsyncExitStack, fleet: TortureFleet, report: TortureReport
) -> None:
    ledger, ledgers = fleet.ledger, [fleet.ledger]
    await fleet.open(stack)
    traffic = TortureTraffic(fleet.js, scenario, ledgers, fleet.partitions)
    traffic.on_slow = lambda start, end: _slow(ledger, start, end)
    stack.callback(traffic.abandon)
    letters = WatchedLetters(fleet.js, ledgers)
    watch = TortureWatch(fleet.js, scenario, ledger, letters)
    stack.push_async_callback(watch.stop)
    faults = TortureFaults(fleet, traffic, stack)
    traffic.start()
    watch.start()
    started = time.monotonic()
    await eventually(lambda: len(ledger.times) == len(fleet.partitions), 40.0, "effects of every partition")
    slow: list[str] = []
    for bout in scenario.bouts:
        watch.positions = watch.positions and not any(fault.kind == "remake" for fault in bout)
        over = max(await asyncio.gather(*(faults.perform(fault) for fault in bout)))
        took, slowest = await _recovered(fleet, over)
        report.recoveries.append(took)
        bound = (scenario.ttl + _BEYOND_TTL) * watch.starved(over - 5.0)
        if took > min(bound, _GIVE_UP - 0.01):
            slow.append(f"{took:.1f} s > {bound:.1f} s for {slowest} after {_names(bout)}")
        if took >= _GIVE_UP:
            break  # judge the stall; more faults would only hide its cause
    await traffic.stop()
    await _complete(ledgers, letters, watch)
    with contextlib.suppress(PartiError):
        await watch.look()
    unacked = await _unacked(scenario, watch, ledger)
    present = await watch.present()
    # A position stays below the message that waits for its retry; other keys continue above it.
    waits = scenario.retry + scenario.timeout if scenario.lanes == "key" else 0.0
    before, after = (2.0 + waits) * watch.starved(started), scenario.ttl + 1
    judgements = [found.judge(present, before=before, after=after) for found in ledgers]
    report.messages = len(ledger.posted)
    report.starvation = watch.starved(started)
    report.counts |= _added(judgements) | {
        "violations": watch.violations,
        "unacked": len(unacked),
        "slow": len(slow),
        "late_exits": len(faults.late_exits),
        "bad_exits": len(faults.bad_exits),
        "died": len(fleet.died),
        "self_exits": len(fleet.died) + len(fleet.at_start),
        "looks": watch.looks,
        "skipped": len(faults.skipped),
    }
    report.examples |= {f"{n or ''}{k}": v for n, j in enumerate(judgements) for k, v in j.examples.items()}
    report.examples |= {"violations": watch.examples, "slow": slow, "late_exits": faults.late_exits}
    report.examples |= {"died": fleet.died, "bad_exits": faults.bad_exits}
    report.examples["unacked"] = [str(sequence) for sequence in unacked[:12]]
    report.notes |= {
        "consumers": await watch.consumers(),
        "violations": watch.counts,
        "skipped": faults.skipped,
        "exits": [round(e, 2) for e in faults.exits],
        "longest_publish_pause": round(traffic.longest_pause, 2),
        "stalled": round(fleet.stalled, 2),
        "second": len(ledgers) > 1,
    }


async def _servers(stack: AsyncExitStack, scenario: TortureScenario) -> Servers:
    if scenario.replicas == 1:
        server = await stack.enter_async_context(NatsServer())
        return Servers((server.url,), server=server)
    cluster = await stack.enter_async_context(NatsServer.cluster(3, advertise=False))
    return Servers(tuple(cluster.urls), cluster=cluster)


async def _recovered(fleet: TortureFleet, over: float) -> tuple[float, str]:
    """Seconds from the end of a bout until every partition had an effect again, and the partition that was last."""

    def first_since(partition: str) -> float:
        times = fleet.ledger.times.get(partition, [])
        at = bisect_left(times, over)
        return times[at] - over if at < len(times) else _GIVE_UP

    with contextlib.suppress(NeverHappened):
        await eventually(
            lambda: all(first_since(p) < _GIVE_UP for p in fleet.partitions),
            max(0.1, over + _GIVE_UP - time.monotonic()),
            "effects of every partition",
        )
    slowest = max(fleet.partitions, key=first_since)
    return first_since(slowest), slowest


async def _complete(ledgers: list[TortureLedger], letters: WatchedLetters, watch: TortureWatch) -> None:
    """Wait until nothing is outstanding, or no more effects arrive."""
    before, since = -1, time.monotonic()
    until = since + _COMPLETE
    while time.monotonic() < until:
        with contextlib.suppress(PartiError):
            await letters.read()
        left = sum(ledger.outstanding() for ledger in ledgers)
        if not left:
            return
        if left != before:
            before, since = left, time.monotonic()
        if time.monotonic() - since > 8.0 * watch.starved(since):
            return
        await asyncio.sleep(0.2)


async def _unacked(scenario: TortureScenario, watch: TortureWatch, ledger: TortureLedger) -> list[int]:
    """Sequences that stay in a work queue or an interest stream although they were handled."""
    if scenario.retention == "limits":
        return []
    since, left = time.monotonic(), list[int]()
    while time.monotonic() - since < 7.0 * watch.starved(since):
        with contextlib.suppress(PartiError):
            left = sorted((await watch.present()) & ledger.done)
            if not left:
                return []
        await asyncio.sleep(0.3)
    return left


def _slow(ledger: TortureLedger, start: float, end: float) -> None:
    """The server was slow to answer: leases may have expired meanwhile."""
    last = next((d for d in reversed(ledger.disturbances) if d.kind == _SLOW), None)
    if last is not None and start <= last.end:
        last.start, last.end = min(start, last.start), max(end, last.end)
    else:
        slow = ledger.disturb(_SLOW, start, "", explains=False)
        slow.end, slow.ends_leases = end, True


def _names(bout: tuple[TortureFault, ...]) -> str:
    return ", ".join(fault.kind.value for fault in bout)


def _added(judgements: list[Judgement]) -> dict[str, int]:
    names = [name for name in Judgement.__slots__ if name not in ("examples", "messages")]
    return {name: sum(int(getattr(j, name)) for j in judgements) for name in names}


def _keep(folder: Path, report: TortureReport) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "scenarios.log").open("a") as log:
        log.write(report.line() + "\n")
    if report.broken:
        (folder / f"seed-{report.scenario.seed}.json").write_text(json.dumps(report.whole(), indent=1, default=str))


def _figures(reports: list[TortureReport]) -> dict[str, Figure]:
    def total(name: str) -> int:
        return sum(report.counts.get(name, 0) for report in reports)

    failed = [report for report in reports if report.broken]
    recoveries = [seconds for report in reports for seconds in report.recoveries]
    planned = [report for report in reports if report.scenario.planned_only]
    return {
        "scenarios": len(reports),
        "failed": len(failed),
        "failed_seeds": " ".join(str(report.scenario.seed) for report in failed),
        "messages": sum(report.messages for report in reports),
        **{name: total(name) for name in _BROKEN},
        "lost_gone": total("lost_gone"),
        "stale_refused": total("stale_refused"),
        "repeats": total("repeats"),
        "repeats_planned": sum(report.counts.get("repeats", 0) for report in planned),
        "planned_only": len(planned),
        "letters": total("letters"),
        "looks": total("looks"),
        "self_exits": total("self_exits"),
        "recovery_p50_s": round(percentile(recoveries, 0.5), 2),
        "recovery_max_s": round(max(recoveries, default=0.0), 2),
        "starvation": round(max((report.starvation for report in reports), default=1.0), 2),
        "failures": json.dumps([{k: v for k, v in r.whole().items() if k != "logs"} for r in failed[:5]], default=str),
        "schedules": " || ".join(f"{r.scenario.seed}: {r.scenario.shape()}: {r.scenario.schedule()}" for r in reports),
    }


PROOF = Proof(
    name="torture",
    help="Random faults, retentions, layouts and lanes, each from its seed: nothing lost, reordered, stale or stuck.",
    run=run,
    goals={**dict.fromkeys(_BROKEN, "== 0"), "repeats_planned": "== 0"},
    options=(
        ExperimentOption("scenarios", 20, "how many; scenario N has the seed + N"),
        ExperimentOption(
            "faults", "", "only these, with commas: restart,kill,freeze,...; planned and records name groups"
        ),
        ExperimentOption("retention", "", "only limits, workqueue or interest"),
        ExperimentOption("layout", "", "only per-worker or per-partition"),
        ExperimentOption("lanes", "", "only partition or key"),
        ExperimentOption("storage", "", "only file or memory"),
        ExperimentOption("replicas", 0, "only 1 or 3"),
        ExperimentOption("workers", 0, "as many instead of those drawn"),
        ExperimentOption("partitions", 0, "as many instead of those drawn"),
        ExperimentOption("rate", 0.0, "messages a second instead of those drawn"),
        ExperimentOption("takes", 0.0, "mean seconds of a handler instead of those drawn"),
        ExperimentOption("ttl", 0.0, "lease TTL in seconds instead of the one drawn"),
        ExperimentOption("keep", "", "folder for the failed scenarios, with the logs of their processes"),
        ExperimentOption("log_level", "info", "of the processes' logs"),
    ),
)

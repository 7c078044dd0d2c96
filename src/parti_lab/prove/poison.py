"""`parti prove poison`: messages that hang, kill, block or bloat every process that handles them.

One poisonous message of each kind is published into a loaded fleet, one after the other. It must be a dead letter
after `max_deliver` lives, with a reason that says what it did; all other messages are handled in order, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from parti.errors import PartiError, UsageError
from parti.testing import NeverHappened, eventually
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.cluster_faults import Servers
from parti_lab.prove.poison_worker import ANY, POISON
from parti_lab.prove.torture_fleet import TortureFleet
from parti_lab.prove.torture_judge import Judgement, TortureLedger
from parti_lab.prove.torture_scenario import LANES, LAYOUTS, RETENTIONS, TortureScenario
from parti_lab.prove.torture_sink import TortureSink
from parti_lab.prove.torture_traffic import STREAM, TortureTraffic
from parti_lab.prove.torture_watch import TortureWatch, WatchedLetters
from parti_lab.prove.traffic import make_stream

REASONS: Final = {
    "exit": ("crash", "max_deliver"),
    "kill": ("crash",),
    "hang": ("timeout",),
    "base": ("crash", "max_deliver"),
    "block": ("crash", "timeout"),
    "memory": ("crash", "max_deliver"),
    ANY: ("crash", "max_deliver", "timeout"),
}
_MAX_DELIVER: Final = 3  # the default of worker.max_deliver
_BURIED_WITHIN: Final = 30.0
_QUICK: Final = ("kill", "hang", "exit")


@dataclass
class Trial:
    """The result of one fleet and its poisons."""

    name: str
    took: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lives: dict[str, int] = field(default_factory=dict)
    verdict: Judgement | None = None
    standstill: float = 0.0


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Try every layout and kind of lane, or the selected ones."""
    options = ctx.options
    rng = ctx.random()
    for name, words in (("layout", LAYOUTS), ("lanes", LANES), ("retention", RETENTIONS)):
        if options[name] and options[name] not in words:
            raise UsageError(f"--{name} {options[name]!r}: choose one of {', '.join(words)}")
    kinds = [kind.strip() for kind in str(options["kinds"]).split(",") if kind.strip()]
    kinds = kinds or list(_QUICK if ctx.quick else REASONS)
    if unknown := sorted(set(kinds) - set(REASONS)):
        raise UsageError(f"--kinds {', '.join(unknown)}: choose among {', '.join(REASONS)}")
    rng.shuffle(kinds)
    layouts = [str(options["layout"])] if options["layout"] else list(LAYOUTS)
    lanes = [str(options["lanes"])] if options["lanes"] else [rng.choice(LANES)] if ctx.quick else list(LANES)
    trials: list[Trial] = []
    with ctx.progress("poisons", total=len(layouts) * len(lanes) * len(kinds)) as advance:
        for layout in layouts:
            for lane in lanes:
                retention = str(options["retention"]) or rng.choice(RETENTIONS)
                scenario = _scenario(rng.randrange(1 << 30), retention, layout, lane)
                trials.append(await _poisoned(scenario, kinds))
                advance(len(kinds))
    return _figures(trials)


def _scenario(seed: int, retention: str, layout: str, lanes: str) -> TortureScenario:
    return TortureScenario(
        seed=seed,
        retention=retention,
        layout=layout,
        lanes=lanes,
        storage="file",
        replicas=1,
        workers=3,
        partitions=8,
        keys=3,
        rate=120.0,
        ttl=2.0,
        takes=0.003,
        retry=0.05,
        literal=False,
        timeout=1.0,
    )


async def _poisoned(scenario: TortureScenario, kinds: list[str]) -> Trial:
    trial = Trial(f"{scenario.retention} {scenario.layout} lanes={scenario.lanes}")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parti-poison-")))
        servers = await Servers.open(stack, 1)
        connection = await connect(ConnectOptions(servers=servers.urls, request_timeout=5.0))
        stack.push_async_callback(connection.close)
        js = JetStreamApi(connection)
        await make_stream(js, STREAM, scenario.retention, 1)
        ledger = TortureLedger()
        sink = await stack.enter_async_context(TortureSink(ledger))
        fleet = TortureFleet(scenario, servers, js, folder, ledger, sink)
        fleet.program, fleet.blocks = "parti_lab.prove.poison_worker", scenario.ttl + 1.5
        await fleet.open(stack)
        traffic = TortureTraffic(js, scenario, [ledger], fleet.partitions)
        stack.callback(traffic.abandon)
        letters = WatchedLetters(js, [ledger])
        watch = TortureWatch(js, scenario, ledger, letters)
        stack.push_async_callback(watch.stop)
        traffic.start()
        watch.start()
        await eventually(lambda: len(ledger.times) == len(fleet.partitions), 40.0, "effects of every partition")
        for number, kind in enumerate(kinds):
            await _one(trial, fleet, traffic, letters, kind, fleet.partitions[number % len(fleet.partitions)])
            if trial.missing:
                break  # it continues to do harm: later poisons would be blamed for it
        await traffic.stop()
        await _complete(ledger, letters)
        trial.lives = {kind_of(ledger, value): len(lives) for value, lives in sink.lives.items()}
        trial.verdict = ledger.judge(await watch.present(), before=2.0 * watch.starved(0.0), after=scenario.ttl + 1)
    return trial


async def _one(
    trial: Trial, fleet: TortureFleet, traffic: TortureTraffic, letters: WatchedLetters, kind: str, partition: str
) -> None:
    """Publish one poison, and wait for its dead letter; afterwards all workers must be running."""
    ledger = fleet.ledger
    traffic.plant(partition, POISON + kind)
    began = time.monotonic()

    async def buried() -> str:
        with contextlib.suppress(PartiError):
            await letters.read()
        return next((v for v in ledger.letters if kind_of(ledger, v) == kind), "")

    try:
        value = await eventually(buried, _BURIED_WITHIN, f"the letter of {kind}")
    except NeverHappened:
        trial.missing.append(kind)
        return
    trial.took[kind] = time.monotonic() - began
    if ledger.letters[value] not in REASONS[kind]:
        trial.wrong.append(f"{kind}: {ledger.letters[value]}")
    since = time.monotonic()
    with contextlib.suppress(NeverHappened):
        await eventually(
            lambda: all(times[-1] >= since for times in ledger.times.values()), 20.0, "effects of every partition"
        )
    trial.standstill = max(trial.standstill, time.monotonic() - since)


async def _complete(ledger: TortureLedger, letters: WatchedLetters) -> None:
    with contextlib.suppress(NeverHappened):
        await eventually(lambda: not ledger.outstanding(), 20.0, "everything handled")
    with contextlib.suppress(PartiError):
        await letters.read()
    await asyncio.sleep(0)


def kind_of(ledger: TortureLedger, value: str) -> str:
    """The kind of poison of a message; empty if it is none."""
    posted = ledger.posted.get(value)
    return posted.fate.removeprefix(POISON) if posted is not None and posted.fate.startswith(POISON) else ""


def _figures(trials: list[Trial]) -> dict[str, Figure]:
    verdicts = [trial.verdict for trial in trials if trial.verdict is not None]

    def total(name: str) -> int:
        return sum(int(getattr(verdict, name)) for verdict in verdicts)

    took = [seconds for trial in trials for seconds in trial.took.values()]
    examples = {f"{t.name}: {k}": v[:3] for t in trials if t.verdict is not None for k, v in t.verdict.examples.items()}
    return {
        "fleets": len(trials),
        "poisons": sum(len(trial.took) + len(trial.missing) for trial in trials),
        "not_quarantined": sum(len(trial.missing) for trial in trials),
        "wrong_reason": sum(len(trial.wrong) for trial in trials),
        "lives_max": max((n for trial in trials for kind, n in trial.lives.items() if kind != ANY), default=0),
        "lives_any_max": max((trial.lives.get(ANY, 0) for trial in trials), default=0),
        "messages": total("messages"),
        **{name: total(name) for name in ("lost", "inversions", "two_owners", "stale_started", "unexplained")},
        "letters_unexpected": total("letters_unexpected"),
        "repeats": total("repeats"),
        "quarantine_max_s": round(max(took, default=0.0), 2),
        "standstill_max_s": round(max((trial.standstill for trial in trials), default=0.0), 2),
        "missing": "; ".join(f"{trial.name}: {', '.join(trial.missing)}" for trial in trials if trial.missing),
        "wrong": "; ".join(f"{trial.name}: {', '.join(trial.wrong)}" for trial in trials if trial.wrong),
        "lives": "; ".join(f"{trial.name}: {trial.lives}" for trial in trials),
        "examples": str(examples) if examples else "",
    }


PROOF = Proof(
    name="poison",
    help="Messages that hang, kill, block or bloat their worker are quarantined; the fleet continues.",
    run=run,
    goals={
        "not_quarantined": "== 0",
        "wrong_reason": "== 0",
        "lives_max": f"<= {_MAX_DELIVER}",
        # A process killed by a message without any earlier sign could not record which message it was handling.
        "lives_any_max": f"<= {_MAX_DELIVER + 1}",
        "lost": "== 0",
        "inversions": "== 0",
        "two_owners": "== 0",
        "stale_started": "== 0",
        "unexplained": "== 0",
        "letters_unexpected": "== 0",
    },
    options=(
        ExperimentOption("kinds", "", "only these, with commas: exit, kill, hang, base, block, memory, any"),
        ExperimentOption("layout", "", "only per-worker or per-partition"),
        ExperimentOption("lanes", "", "only partition or key"),
        ExperimentOption("retention", "", "only limits, workqueue or interest; else drawn"),
    ),
)

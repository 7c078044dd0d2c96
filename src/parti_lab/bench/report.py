"""The one shape of a result, and what a benchmark or a proof has to be to be run by `parti bench` and `parti prove`.

A module defines one object and registers its name in `parti_lab.bench.BENCHMARKS` or `parti_lab.prove.PROOFS`:

    BENCH = Benchmark(
        name="range",
        help="Range reader against the raw socket and nats-py fetch.",
        run=run,                                        # def or async def run(ctx: RunContext) -> dict[str, Figure]
        goals={"ratio_raw": ">= 0.6"},
        options=(Option("messages", 200_000, "messages to read"),),
    )

    async def run(ctx: RunContext) -> dict[str, Figure]:
        with ctx.progress("publishing", total=ctx.options["messages"]) as advance:
            ...
            advance(1000)
        return {"ratio_raw": 0.81}
"""

from __future__ import annotations

import asyncio
import inspect
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from parti.errors import PartiError, UsageError
from parti.progress import Advance, ProgressFactory, no_progress
from parti_lab.bench.goals import Figure, Goal, missed
from parti_lab.bench.machine import machine

Runner = Callable[["RunContext"], "dict[str, Figure] | Awaitable[dict[str, Figure]]"]
"""Measures and returns figures by name; a plain or an async function."""


@dataclass(frozen=True, slots=True)
class ExperimentOption:
    """One extra option of a benchmark or proof: `--name VALUE`, typed as its default; a bool becomes a switch."""

    name: str
    default: int | float | str | bool
    help: str


@dataclass(frozen=True, slots=True)
class RunContext:
    """The input of a run: size, seed, options, and a progress display."""

    quick: bool = False
    """True requests a run that fits in 60 s."""
    seed: int = 0
    """The same seed gives the same inputs and the same fault schedule."""
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Each declared option by name, with defaults filled in."""
    show: ProgressFactory = no_progress

    def progress(self, description: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """A `with` block that yields `advance(steps)`; shown on stderr if it is a terminal."""
        return self.show(description, total)

    def random(self) -> random.Random:
        """A new source of randomness that starts from this run's seed."""
        return random.Random(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment that measures figures and has goals for them. Malformed goals are refused at definition."""

    kind: ClassVar[str] = "experiment"

    name: str
    help: str
    run: Runner
    goals: Mapping[str, str]
    options: tuple[ExperimentOption, ...] = ()
    goals_of: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    """The goals that a run with these options measures; the others are neither met nor missed, and its result does not
    name them. None: all."""

    def __post_init__(self) -> None:
        for goal in self.goals.values():
            Goal.parse(goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark(Experiment):
    """Speed: figures to compare between versions, machines and other clients."""

    kind: ClassVar[str] = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof(Experiment):
    """Whether a promise holds under real faults: lost, duplicated, out of order."""

    kind: ClassVar[str] = "prove"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON line of every `parti bench` and `parti prove`; its keys and their meaning never change."""

    name: str
    ok: bool
    figures: dict[str, Figure | None]
    goals: dict[str, str]
    machine: dict[str, str | int | float]
    seconds: float

    @property
    def missed(self) -> dict[str, str]:
        """The goals not met, each with the reason."""
        return missed({k: v for k, v in self.figures.items() if v is not None}, self.goals)

    def to_json(self) -> str:
        """One line; NaN and infinities become null, because JSON cannot express them."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Result:
        """Read a line that `to_json` wrote."""
        return msgspec.json.decode(line, type=cls)


def execute(experiment: Experiment, context: RunContext) -> Result:
    """Run it and judge it. `ok` is True only when every goal was measured and met.

    A `PartiError` ends the run as a result that is not ok, with the figure `error`; any other exception is a bug and
    is raised. The figures `seed` and `quick` are added, because a result without them cannot be repeated.
    """
    known = {option.name for option in experiment.options}
    if unknown := sorted(set(context.options) - known):
        raise UsageError(f"{experiment.kind} {experiment.name} has no option {', '.join(unknown)}")
    filled = {option.name: context.options.get(option.name, option.default) for option in experiment.options}
    context = RunContext(quick=context.quick, seed=context.seed, options=MappingProxyType(filled), show=context.show)
    goals = dict(experiment.goals_of(filled) if experiment.goals_of is not None else experiment.goals)
    started = time.perf_counter()
    try:
        figures = _measure(experiment.run, context)
        failed = False
    except PartiError as error:
        figures = {"error": f"{type(error).__name__}: {error}"}
        failed = True
    return Result(
        name=experiment.name,
        ok=not failed and not missed(figures, goals),
        figures={**figures, "seed": context.seed, "quick": context.quick},
        goals=goals,
        machine=machine(),
        seconds=round(time.perf_counter() - started, 3),
    )


def _measure(run: Runner, context: RunContext) -> dict[str, Figure]:
    outcome = run(context)
    if isinstance(outcome, dict):
        return outcome
    if not inspect.isawaitable(outcome):
        raise TypeError(f"{run!r} returned {type(outcome).__name__}, not figures by name")

    async def wait() -> dict[str, Figure]:
        return await outcome

    return asyncio.run(wait())

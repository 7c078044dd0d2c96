"""`parti bench NAME`."""

from __future__ import annotations

import click

from parti_lab.bench import BENCHMARKS
from parti_lab.bench.experiments import ExperimentGroup


@click.group(cls=ExperimentGroup, registry=BENCHMARKS, attribute="BENCH")
def bench() -> None:
    """Measure how fast parti is on this machine; exit 0 only when every goal is met."""

"""`parti prove NAME`."""

from __future__ import annotations

import click

from parti_lab.bench.experiments import ExperimentGroup
from parti_lab.prove import PROOFS


@click.group(cls=ExperimentGroup, registry=PROOFS, attribute="PROOF")
def prove() -> None:
    """Prove a promise of parti under real faults; exit 0 only when it held."""

"""Simulates a whole cluster in virtual time from one seed: the shipped code against every kind of fault.

The shipped code runs unchanged: the pure steps of `parti.control`, the planes of both layouts, positions, the worker
with its lanes, retries, dead letters and catch-up, the pull loop and the wire. Simulated are the server (`server`,
`stream`, `kv`), the network, the clocks and the machines (`world`, `loop`, `network`), the agent around the plane
(`process`, `leading`), the sockets of range reads, and the faults (`faults`).

    outcome = simulate(seed)
    assert outcome.ok, outcome.story()

Promises: the same seed gives the same history.

Flow: `run` -> `cluster` creates machines -> `world` advances time -> `faults` inject faults -> the history is judged.
"""

from parti.testing.sim.cluster import ClusterShape
from parti.testing.sim.faults import FaultPlan
from parti.testing.sim.run import SimOutcome, simulate

__all__ = ["ClusterShape", "FaultPlan", "SimOutcome", "simulate"]

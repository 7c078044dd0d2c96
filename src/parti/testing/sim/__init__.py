"""A whole cluster in virtual time from one seed: what ships, against everything that can go wrong.

Shipped code runs unchanged: the pure steps of `parti.control`, the planes of both layouts, positions, the worker with
its lanes, retries, dead letters and catch-up, the pull loop and the wire. Simulated are the server (`server`, `stream`,
`kv`), the network, the clocks and the machines (`world`, `loop`, `network`), the agent around the plane (`process`,
`leading`), the sockets of range reads, and what goes wrong (`faults`).

outcome = simulate(seed)
assert outcome.ok, outcome.story()

Promises: one seed is one history.

Flow: `run` -> `cluster` makes machines -> `world` moves time -> `faults` break things -> the history is judged.
"""

from parti.testing.sim.cluster import ClusterShape
from parti.testing.sim.faults import FaultPlan
from parti.testing.sim.run import SimOutcome, simulate

__all__ = ["ClusterShape", "FaultPlan", "SimOutcome", "simulate"]

"""A whole cluster in virtual time from one seed: the control plane's pure steps against everything that can go wrong.

outcome = simulate(seed)
assert outcome.ok, outcome.story()
"""

from parti.testing.sim.cluster import Shape
from parti.testing.sim.faults import Plan
from parti.testing.sim.run import Outcome, simulate

__all__ = ["Outcome", "Plan", "Shape", "simulate"]

"""Decisions of the control plane: pure steps over frozen values. No asyncio, no nats, no clock of its own.

Promises: the same events give the same decisions; no legal order of events gives a partition two owners in one epoch.

Flow: events (`signals`, `leader_signals`) -> `step` of `election`, `identity`, `reconcile`, `per_worker_partition` or
`per_partition` -> effects that `parti.manager` performs.
"""

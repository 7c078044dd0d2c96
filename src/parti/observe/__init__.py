"""Observability: structured logs, metrics behind a small interface, and the health endpoints.

Promises: no secret in any log line or label; a metric has a fixed set of labels.

Flow: `logs` and `metrics` receive events -> `prometheus` and `health` show them.
"""

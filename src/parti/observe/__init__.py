"""What operators see: structured logs, metrics behind a small seam, and the health endpoints.

Promises: no secret in any log line or label; a metric has a fixed set of labels.

Flow: `logs` and `metrics` take what happens -> `prometheus` and `health` show it.
"""

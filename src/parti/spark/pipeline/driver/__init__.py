"""The driver's half of the ordered pipeline: its definition, plan, batches, epochs and lease.

Promises: one driver at a time; each batch is planned once and replayed unchanged.

Flow: `definition` or `load` -> `query` behind its `lease` -> `source` -> `batches` by the `plan` -> `epochs`.
"""

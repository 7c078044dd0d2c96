"""The driver's half of the ordered pipeline: what it is, which plan it takes, its batches, epochs and lease.

Promises: one driver at a time; each batch is planned once and replayed as it was.

Flow: `definition` or `load` -> `query` behind its `lease` -> `source` -> `batches` by the `plan` -> `epochs`.
"""

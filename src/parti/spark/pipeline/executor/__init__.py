"""The executors' half of the ordered pipeline: messages in, outcome rows out.

Promises: one message of a key in flight, in stream order; results and letters are stored once.

Flow: rows -> `stage` -> `handlers` in `lanes` -> `policy` decides -> `publishing` -> `outcomes` as rows.
"""

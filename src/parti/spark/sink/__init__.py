"""The writing side of `format("jetstream")`.

Promises: a task returns only when the stream has stored each of its rows; a replay of a write is stored once.

Flow: rows -> `writers` on executors, under an identity from `write_identity` -> the stream.
"""

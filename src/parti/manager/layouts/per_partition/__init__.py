"""The per-partition layout: one durable per partition, whose position the server keeps.

Promises: a partition is released only after the server has applied every acknowledgement of its owner.

Flow: claims -> `plane` and its `states` -> `durable` is set to the position -> `flow` pulls -> `inbox` -> handlers ->
`progress` and `acks` -> the durable's position.
"""

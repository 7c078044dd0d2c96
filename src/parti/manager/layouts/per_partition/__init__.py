"""The per-partition layout: one durable per partition, whose position the server keeps.

Promises: a partition is released only when every acknowledgement of its owner has been applied by the server.

Flow: claims -> `plane` and its `states` -> `durable` is set to the position -> `flow` pulls -> `inbox` -> handlers ->
`progress` and `acks` -> the durable's position.
"""

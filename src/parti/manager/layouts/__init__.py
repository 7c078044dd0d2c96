"""The two layouts of a fleet's consumers, and user-supplied consumers, behind one interface (`parti.manager.host`).

Promises: a partition's messages start only at its owner, from the position that the claim carries, in both layouts.

Flow: claims -> `choose` picks the plane -> `per_worker` (one durable per worker), `per_partition` (one durable per
partition) or `foreign` (a user-supplied object) -> messages of owned partitions; positions flow back into the claims.
"""

"""The two layouts of a fleet's consumers, and consumers of the user's own, behind one interface (`parti.manager.host`).

Promises: a partition's messages start only at its owner, from the position that the claim carries, in both layouts.

Flow: claims -> `choose` picks the plane -> `per_worker` (one durable per worker), `per_partition` (one durable per
partition) or `foreign` (an object of the user's) -> messages of what is owned; positions flow back into the claims.
"""

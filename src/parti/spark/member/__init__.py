"""A Spark query as a member of a partitioned consumer group.

Promises: other members see one member that reads in order and acknowledges what its batches have done.

Flow: `lookup` finds the group -> `pin_holder` holds the member's consumer and pin -> `progress` decides what may be
read and acknowledges it -> `columns` and `offsets` show messages and positions as the group counts them.
"""

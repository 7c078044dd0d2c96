"""Delivery of tasks to HTTP endpoints as a Spark job.

Promises: those of `parti.delivery`: nothing lost, in order per document, one engine at a time.

Flow: `engine` ensures that no other engine delivers -> `job` builds the pipeline -> `task` delivers on executors.
"""

"""`make run`, `parti run --demo`: the main job on one machine, with things that go wrong on purpose.

Promises: it ends with the audit's verdict, and fails when that is not clean.

Flow: `command` -> `story` -> workers and `pipeline` -> `parti.audit`.
"""

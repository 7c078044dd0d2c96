"""`make run`, `parti run --demo`: the main job on one machine, with deliberate faults.

Promises: it ends with the audit's verdict, and fails when the verdict is not clean.

Flow: `command` -> `story` -> workers and `pipeline` -> `parti.audit`.
"""

"""The audit compares what was published with what took effect, from the data alone, in a few Spark jobs.

When `audit(...)` returns a report with `ok`, every message of the range took effect or is stored in the dead letters,
no key went backwards, and no partition had two owners in an epoch. The audit uses no counter of any worker.

Promises: see above; data that cannot be read is an error, never a pass.

Flow: `sources` -> `scan` -> `order`, `presence` and `effects` -> `assemble` -> `html`, `table`.
"""

from parti.audit.model import Finding, Report, Side
from parti.audit.run import AuditRules, audit
from parti.audit.sources import Effects, Published

__all__ = ["AuditRules", "Effects", "Finding", "Published", "Report", "Side", "audit"]

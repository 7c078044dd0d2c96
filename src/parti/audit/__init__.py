"""The audit: what was published against what took effect, judged from the data alone, as a few Spark jobs.

After `audit(...)` returned a report with `ok`, every message of the range took effect or rests in the dead letters, no
key went backwards, and no partition had two owners in an epoch. It trusts no counter of any worker.

Promises: see above; what cannot be read is an error, never a pass.

Flow: `sources` -> `scan` -> `order`, `presence` and `effects` -> `assemble` -> `html`, `table`.
"""

from parti.audit.model import Finding, Report, Side
from parti.audit.run import AuditRules, audit
from parti.audit.sources import Effects, Published

__all__ = ["AuditRules", "Effects", "Finding", "Published", "Report", "Side", "audit"]

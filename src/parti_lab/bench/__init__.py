"""Benchmarks: `parti bench NAME`. One module per benchmark, each with a module-level `BENCH`, registered here.

Promises: figures are ratios within one run, or name what they were measured on.

Flow: `command` -> one benchmark -> `report` -> JSON and HTML.
"""

from __future__ import annotations

from typing import Final

# Name on the command line -> module that defines BENCH. Only names, so that `parti --help` imports none of the modules.
BENCHMARKS: Final[dict[str, str]] = {
    "range": "parti_lab.bench.range",
    "pull": "parti_lab.bench.pull",
    "fleet": "parti_lab.bench.fleet",
    "assign": "parti_lab.bench.assign",
    "spark-read": "parti_lab.bench.spark_read",
    "spark-write": "parti_lab.bench.spark_write",
    "spark-cost": "parti_lab.bench.spark_cost",
    "pipeline": "parti_lab.bench.pipeline",
    "group": "parti_lab.bench.group",
    "deliver": "parti_lab.bench.deliver",
    "audit": "parti_lab.bench.audit",
}

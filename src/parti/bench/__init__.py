"""Benchmarks: `parti bench NAME`. One module a benchmark, each with a module-level `BENCH`; all register here."""

from __future__ import annotations

from typing import Final

# Name on the command line -> module that defines BENCH. Only names, so that `parti --help` imports none of them.
BENCHMARKS: Final[dict[str, str]] = {
    "range": "parti.bench.range",
    "pull": "parti.bench.pull",
    "fleet": "parti.bench.fleet",
    "assign": "parti.bench.assign",
    "spark-read": "parti.bench.spark_read",
    "spark-write": "parti.bench.spark_write",
    "spark-cost": "parti.bench.spark_cost",
    "pipeline": "parti.bench.pipeline",
    "group": "parti.bench.group",
    "deliver": "parti.bench.deliver",
    "audit": "parti.bench.audit",
}

"""The process that forks Spark's Python workers, in the proof of delivery: names can hang in them (`delivery_names`).

spark.python.daemon.module=parti_lab.prove.delivery_daemon
"""

from __future__ import annotations

import runpy

from parti_lab.prove.delivery_names import patch_lookups

if __name__ == "__main__":
    patch_lookups()
    runpy.run_module("pyspark.daemon", run_name="__main__")

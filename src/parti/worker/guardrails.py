"""Limits the number of subjects one consumer may filter: refuses more, and warns shortly before the limit.

See docs/requirements.md#r-103.
"""

from __future__ import annotations

from collections.abc import Collection

from parti.config.worker import WorkerConfig
from parti.observe import worker_metrics as m
from parti.worker.errors import MaxSubjectsExceeded
from parti.worker.recorder import Recorder

_NEARLY_FULL = 0.9  # of max_subjects


def check_subjects(subjects: Collection[str], config: WorkerConfig, recorder: Recorder) -> None:
    """Raises `MaxSubjectsExceeded`, before anything is sent, when there are more than `worker.max_subjects`."""
    limit = config.max_subjects
    if len(subjects) > limit:
        recorder.metrics.count(m.GUARDRAIL_VIOLATIONS, type="max_subjects")
        recorder.event("worker.update", op="update", result="refused", subjects=len(subjects), warn=True)
        raise MaxSubjectsExceeded(
            f"{len(subjects)} subjects are more than worker.max_subjects ({limit}): use more workers, or wider "
            "partitions with a wildcard in the template"
        )
    if len(subjects) >= _NEARLY_FULL * limit:
        recorder.metrics.count(m.THRESHOLD_WARNINGS)
        recorder.event("worker.subjects_near_cap", op="update", result="warning", subjects=len(subjects), warn=True)

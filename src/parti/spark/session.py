"""A SparkSession with the settings that matter for `format("jetstream")`, on one machine and on a cluster.

Each setting has its reason in `SETTINGS`; the caller can override all of them. On a cluster parti itself is shipped to
the executors: as a zip in `spark.submit.pyFiles`, which must also be on the driver's PYTHONPATH before the JVM starts,
because the driver-side planner processes see nothing else (docs/evidence/pipeline.md#p7).
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from parti.errors import ConfigError
from parti.java import OLDEST, find_java
from parti.spark.python_start import quick_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES: Final = ("parti", "pyspark_jetstream")
_ONE_MACHINE: Final = r"local(\[[^,]*(,\s*\d+)?\])?"
_ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_CHECKPOINTS: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

SETTINGS: Final[dict[str, str]] = {
    # 42 ms less per wave of Python tasks than over TCP (docs/evidence/spark.md#s14).
    "spark.python.unix.domain.socket.enabled": "true",
    # transformWithState refuses the default store, and large state does not fit in the heap.
    "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
    # Progress bars and results on one terminal mix up.
    "spark.ui.showConsoleProgress": "false",
}
LOOPBACK: Final[dict[str, str]] = {
    # A laptop's host name often resolves to an address that is no longer valid after a change of network.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}
FAST_CHECKPOINTS: Final[dict[str, str]] = {
    # 15 ms instead of 68 ms per batch on a local disk (docs/evidence/spark.md#s15). No checksums, no atomic rename:
    # development only.
    "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}


def session(
    app_name: str = "parti", master: str = "local[*]", *, fast_checkpoints: bool = False, **conf: Any
) -> SparkSession:
    """The running session, else a new one; `format("jetstream")` works in it, also on the executors.

    Most settings of a running session cannot be changed: a warning names those that are different there.

    `conf` takes Spark's names: `session("job", **{"spark.sql.shuffle.partitions": 2})`. On `local[N]` a failed task is
    tried four times as on a cluster; Spark's own default there is once, so that one killed worker ends a query.
    `fast_checkpoints` trades the checkpoint's checksums for speed: for development on a local disk only. Under
    `spark-submit` its `--master` is used and not `master`, and `--py-files` ships what executors need.
    """
    for name in conf:
        if not name.startswith("spark."):
            raise ConfigError(f"{name!r} is no Spark setting: their names begin with 'spark.'")
    _require_java()
    from pyspark.sql import SparkSession  # Spark is an extra: importing parti must not need it

    active = SparkSession.getActiveSession()
    if active is not None:
        for name, value in conf.items():
            if active.conf.isModifiable(name):
                active.conf.set(name, str(value))
        if unmet := [name for name, value in (SETTINGS | conf).items() if active.conf.get(name, None) != str(value)]:
            from parti.observe.logs import get_logger  # 0.1 s of CPU, in every Spark process that imports parti

            log = get_logger("spark.session")
            log.warning("spark.session_reused", app=active.sparkContext.appName, settings_that_do_not_count=unmet)
        return active
    settings = dict(SETTINGS)
    builder = SparkSession.builder.appName(app_name)
    if not submitted():
        builder = builder.master(retrying(master))
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            settings |= LOOPBACK
        if not re.fullmatch(_ONE_MACHINE, master):
            settings |= _shipped()
    if fast_checkpoints:
        settings |= FAST_CHECKPOINTS
    for name, value in (settings | conf).items():
        builder = builder.config(name, value)
    local = not submitted() and re.fullmatch(_ONE_MACHINE, master) is not None
    with _interrupt_kept(), quick_python(local=local):
        spark: SparkSession = builder.getOrCreate()
    from parti.spark.last_words import say_last_words

    say_last_words()
    return spark


@contextmanager
def _interrupt_kept() -> Iterator[None]:
    """Keeps the program's own SIGINT handler, if it has one.

    pyspark installs its own: it cancels all jobs and raises in the middle of a batch, which is then repeated.
    """
    before = signal.getsignal(signal.SIGINT)
    yield
    if before is None or before is signal.default_int_handler:
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)


def submitted() -> bool:
    """Whether `spark-submit` started this program: then there is a JVM, which knows where the job runs."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def retrying(master: str) -> str:
    """`local[N]` with four tries per task, as on a cluster; any other master unchanged."""
    match = re.fullmatch(r"local(?:\[([^,\]]+)\])?", master)
    return f"local[{match[1] or 1},4]" if match else master


def build_zip(folder: Path) -> Path:
    """The packages that executors need, as `parti.zip` in this folder; always under the same name."""
    target = folder / "parti.zip"
    root = Path(__file__).resolve().parents[2]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in PACKAGES:
            for source in sorted((root / package).rglob("*")):
                if source.is_file() and "__pycache__" not in source.parts:
                    archive.write(source, source.relative_to(root))
    return target


def _shipped() -> dict[str, str]:
    folder = tempfile.mkdtemp(prefix="parti-ship-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    archive = str(build_zip(Path(folder)))
    # The JVM reads it when it starts, and passes it to the planner processes.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = archive + (os.pathsep + before if before else "")
    spark = find_spec("pyspark")
    if spark is not None and spark.origin:  # local-cluster starts its executors from there
        os.environ.setdefault("SPARK_HOME", str(Path(spark.origin).parent))
    return {"spark.submit.pyFiles": archive}


def _require_java() -> None:
    java = find_java()
    if java is None or java.major < OLDEST:
        found = f"only {java.version} at {java.home}" if java else "none"
        raise ConfigError(f"Spark needs Java {OLDEST} or newer, found {found}: install one, or set JAVA_HOME to it")
    os.environ["JAVA_HOME"] = str(java.home)  # the first one found that is new enough

"""A real nats-server for tests and local use; it never outlives the process that started it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from parti.testing.binary import Version, find_binary
from parti.testing.child import spawn
from parti.testing.errors import PortTaken, ServerNotRunning, ServerStartFailed, StoreInUse
from parti.testing.ports import is_free, pick_port
from parti.testing.process import ServerProcess
from parti.testing.running import Running

if TYPE_CHECKING:
    from parti.testing.cluster import NatsCluster

_READY_WITHIN = 60.0  # starting takes 20 ms; a big store or a loaded machine takes longer
_PORT_TRIES = 10  # another process may take a picked port before the server binds it
_LOG_LINES = 200  # kept in memory for error messages, even after the log file is deleted


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The server's certificate and key; with `ca`, clients must present a certificate signed by it (mTLS)."""

    cert: Path
    key: Path
    ca: Path | None = None


class NatsServer(Running):
    """While the context is open, a nats-server with JetStream listens on `url`; afterwards it has ended.

    `kill()` and `restart()` keep the port and the store, so clients find the same server again. Without `store_dir` the
    store is a temporary directory, deleted by `stop()`. Every method blocks for some milliseconds; if an event loop
    must keep running meanwhile, call it through `asyncio.to_thread`.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        store_dir: Path | None = None,
        name: str | None = None,
        jetstream: bool = True,
        max_memory: int | None = None,
        max_storage: int | None = None,
        sync_interval: str | None = None,
        tls: TlsFiles | None = None,
        config: str = "",
    ) -> None:
        """Describe a server; nothing is started yet.

        `port` 0 picks a free one. `max_memory` and `max_storage` are JetStream's limits in bytes. `sync_interval` is
        the server's ("always", "10s"; its own default is 2 minutes). `config` is nats-server configuration text,
        appended to override earlier settings; it must not redirect the log, because readiness is read from it.
        """
        self.binary = find_binary()
        self.host = host
        self.name = name or f"parti-{secrets.token_hex(4)}"
        self._port = port
        self._given_store = Path(store_dir).absolute() if store_dir is not None else None
        self._jetstream = jetstream
        self._max_memory = max_memory
        self._max_storage = max_storage
        self._sync_interval = sync_interval
        self._tls = tls
        self._config = config
        self._work_dir: Path | None = None
        self._store_lock: int | None = None
        self._run: ServerProcess | None = None

    @staticmethod
    def cluster(size: int = 3, *, config: str = "", advertise: bool = True) -> NatsCluster:
        """Describe a cluster of `size` servers; see `NatsCluster`."""
        from parti.testing.cluster import NatsCluster  # a cluster consists of servers: importing it above is a cycle

        return NatsCluster(size, config=config, advertise=advertise)

    @property
    def running(self) -> bool:
        """Whether the process exists."""
        return self._run is not None and self._run.process.poll() is None

    @property
    def pid(self) -> int:
        return self._running_or_raise().process.pid

    @property
    def port(self) -> int:
        """The client port; fixed from the first start."""
        if self._port == 0:
            raise ServerNotRunning(f"{self.name} has no port before its first start")
        return self._port

    @property
    def url(self) -> str:
        """The address for clients, without credentials."""
        return self.client_url()

    @property
    def monitor_url(self) -> str:
        """The server's HTTP monitoring address, always on loopback; a new port after each start."""
        return f"http://127.0.0.1:{self._running_or_raise().monitor_port}"

    @property
    def store_dir(self) -> Path:
        """The directory of JetStream's files."""
        return self._given_store or self._work() / "store"

    @property
    def log_path(self) -> Path:
        """The server's log over all restarts; deleted by `stop()` (`log_tail()` is not)."""
        return self._work() / "server.log"

    @property
    def version(self) -> Version:
        return self.binary.version

    def client_url(self, *, user: str | None = None, password: str | None = None, token: str | None = None) -> str:
        """The address with these credentials."""
        scheme = "tls" if self._tls else "nats"
        reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        host = f"[{reachable}]" if ":" in reachable else reachable
        secret = quote(token, safe="") if token is not None else quote(user or "", safe="")
        if password is not None:
            secret += ":" + quote(password, safe="")
        return f"{scheme}://{secret}{'@' if secret else ''}{host}:{self.port}"

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log, available even after the server has ended."""
        return "\n".join(list(self._run.tail)[-lines:]) if self._run is not None else ""

    def require(self, oldest: tuple[int, ...], what: str) -> None:
        """After this returns, the server is at least `oldest`; else `ServerTooOld` names the feature that needs it."""
        self.binary.require(oldest, what)

    def start(self) -> None:
        """After this returns, clients can connect and (outside a cluster) JetStream answers."""
        if self.running:
            return
        first = self._work_dir is None
        try:
            self._start_on_some_port()
        except BaseException:
            if first:  # a failed restart keeps the store for the next try
                self._release()
            raise

    def terminate(self) -> None:
        """Shut the server down cleanly (SIGTERM, then SIGKILL if it hangs); store and port stay for `start()`."""
        if self._run is not None:
            self._run.end(signal.SIGTERM)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside the block the process is stopped and keeps its sockets; it answers nothing until the block ends."""
        run = self._running_or_raise()
        run.freeze()
        try:
            yield
        finally:
            run.thaw()  # not an error if the process has ended meanwhile

    def lose_consumer_files(self, stream: str, consumer: str) -> None:
        """The files of a consumer are gone at once; it works on, and refuses every change (`ConsumerFilesGone`).

        So does one that was created just while somebody deleted it. FileNotFoundError: no such files.
        """
        folder = self.store_dir / "jetstream" / "$G" / "streams" / stream / "obs" / consumer
        folder.rename(self._work() / f"lost-{secrets.token_hex(4)}")

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); after this returns it is dead. Store and port stay."""
        if self._run is not None:
            self._run.end(signal.SIGKILL)

    def wait(self) -> int:
        """Return the exit code as soon as the server has ended, by itself or through another method."""
        if self._run is None:
            raise ServerNotRunning(f"{self.name} was never started: start it first")
        return self._run.wait()

    def restart(self) -> None:
        """Shut the server down cleanly if it still runs, and start it on the same store and port."""
        self.terminate()
        self.start()

    def stop(self) -> None:
        """After this returns, the process and all its temporary files are gone."""
        self.terminate()
        self._release()

    def __repr__(self) -> str:
        state = f"pid={self._run.process.pid}" if self.running and self._run else "stopped"
        version = ".".join(map(str, self.version))
        return f"<NatsServer {self.name} {self.host}:{self._port} {state} v{version}>"

    def _start_on_some_port(self) -> None:
        for left in reversed(range(_PORT_TRIES if self._port == 0 else 1)):
            try:
                port = self._port or pick_port(self.host)
                self._start_on(port)
            except PortTaken:
                if left == 0:
                    raise
            except OSError as error:
                raise ServerStartFailed(f"{self.name} cannot start on {self.host}:{self._port}: {error}") from error
            else:
                self._port = port  # restarts keep it from now on
                return

    def _start_on(self, port: int) -> None:
        # The server binds its port only after it has opened the store: without this check, a second server on the same
        # store would touch the files of the first before it fails.
        if not is_free(self.host, port):
            raise PortTaken(self.host, port)
        self._lock_store()
        path = self._work() / "server.conf"
        path.write_text(self._config_text(port))
        tail = self._run.tail if self._run is not None else deque[str](maxlen=_LOG_LINES)
        self._run = ServerProcess(spawn([str(self.binary.path), "-c", str(path)]), self.log_path, tail)
        with _LIVE_LOCK:
            _LIVE.add(self)
        try:
            self._run.wait_ready(_READY_WITHIN)
        except BaseException:
            self.kill()
            raise

    def _config_text(self, port: int) -> str:
        quoted = json.dumps
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"server_name: {quoted(self.name)}",
            f"listen: {quoted(f'{host}:{port}')}",
            'http: "127.0.0.1:-1"',
        ]
        if self._jetstream:
            lines += ["jetstream {", f"  store_dir: {quoted(str(self.store_dir))}"]
            if self._max_memory is not None:
                lines.append(f"  max_memory_store: {self._max_memory}")
            if self._max_storage is not None:
                lines.append(f"  max_file_store: {self._max_storage}")
            if self._sync_interval is not None:
                lines.append(f"  sync_interval: {quoted(self._sync_interval)}")
            lines.append("}")
        if self._tls is not None:
            lines += [
                "tls {",
                f"  cert_file: {quoted(str(self._tls.cert))}",
                f"  key_file: {quoted(str(self._tls.key))}",
            ]
            if self._tls.ca is not None:
                lines += [f"  ca_file: {quoted(str(self._tls.ca))}", "  verify: true"]
            lines.append("}")
        return "\n".join([*lines, self._config, ""])

    def _work(self) -> Path:
        if self._work_dir is None:
            self._work_dir = Path(tempfile.mkdtemp(prefix="parti-nats-"))  # mode 0700: the config may hold passwords
        return self._work_dir

    def _lock_store(self) -> None:
        if self._given_store is None or self._store_lock is not None:
            return
        self._given_store.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._given_store, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise StoreInUse(
                f"another embedded server runs on {self._given_store}: stop it, or take another directory"
            ) from None
        self._store_lock = lock

    def _release(self) -> None:
        with _LIVE_LOCK:
            _LIVE.discard(self)
        if self._store_lock is not None:
            os.close(self._store_lock)
            self._store_lock = None
        if self._work_dir is not None:
            shutil.rmtree(self._work_dir, ignore_errors=True)
            self._work_dir = None

    def _running_or_raise(self) -> ServerProcess:
        if self._run is None or self._run.process.poll() is not None:
            raise ServerNotRunning(f"{self.name} is not running: start it first")
        return self._run


_LIVE: set[NatsServer] = set()
_LIVE_LOCK = threading.Lock()


def _stop_all() -> None:
    with _LIVE_LOCK:
        live = list(_LIVE)
    for server in live:
        server.stop()


def _forget_all() -> None:
    _LIVE.clear()  # a forked child must not end its parent's servers when it exits


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_all)

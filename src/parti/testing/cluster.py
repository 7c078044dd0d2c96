"""A real cluster of nats-servers on loopback, whose nodes can be killed and restarted."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from parti.testing.errors import NeverHappened, PortTaken, ServerNotRunning
from parti.testing.eventually import eventually_blocking
from parti.testing.monitor import NodeReport, leader_of, stream_label, what_lags
from parti.testing.ports import pick_port
from parti.testing.running import Running
from parti.testing.server import NatsServer

_CURRENT_WITHIN = 60.0  # electing the first meta leader takes 1 to 5 s; a loaded machine takes longer
_TRIES = 3


class NatsCluster(Running):
    """While the context is open, all nodes form one JetStream cluster with a leader; afterwards they have ended.

    Nodes are named `n0`, `n1`, ... With `advertise=False` clients only know the addresses they were given, so a client
    behind a `FaultProxy` stays behind it.
    """

    def __init__(self, size: int = 3, *, config: str = "", advertise: bool = True) -> None:
        self.size = size
        self.name = f"parti-{secrets.token_hex(4)}"
        self._config = config
        self._advertise = advertise
        self.servers: list[NatsServer] = []

    @property
    def urls(self) -> list[str]:
        """One address per node, including nodes that are down."""
        return [server.url for server in self.servers]

    def start(self) -> None:
        """After this returns, the cluster has a meta leader and every node has caught up with it."""
        for left in reversed(range(_TRIES)):
            self.servers = self._describe()
            try:
                self._each(NatsServer.start)
                self._wait_current(_CURRENT_WITHIN, all_run=True)
            # Another process took the port of a route; a server may notice that after it has reported itself ready.
            except (PortTaken, NeverHappened):
                self.stop()
                if left == 0:
                    raise
            except BaseException:
                self.stop()
                raise
            else:
                return

    def stop(self) -> None:
        """After this returns, all processes and all their temporary files are gone."""
        self._each(NatsServer.stop)

    def kill(self, index: int) -> None:
        """End one node as a crash would (SIGKILL)."""
        self.servers[index].kill()

    def terminate(self, index: int) -> None:
        """Shut one node down cleanly; its store stays for `restart`."""
        self.servers[index].terminate()

    def restart(self, index: int, *, wait: bool = True) -> None:
        """Start one node (again) on its store and port; with `wait`, until the whole cluster is current again."""
        self.servers[index].restart()
        if wait:
            self.wait_current()

    def wait_current(self, timeout: float = _CURRENT_WITHIN) -> None:
        """Return when every stream and consumer of the running nodes has a leader and all its replicas are current."""
        self._wait_current(timeout, all_run=False)

    def _wait_current(self, timeout: float, *, all_run: bool) -> None:
        seen: list[str] = []

        def current() -> bool:
            ended = [server for server in self.servers if not server.running] if all_run else []
            if ended:
                raise NeverHappened(f"{ended[0].name} ended while the cluster formed: {ended[0].log_tail()}")
            seen[:] = what_lags(self._reports(), self.size)
            return not seen

        try:
            eventually_blocking(current, timeout, f"cluster {self.name} being current")
        except NeverHappened as error:
            error.add_note("; ".join(seen))
            raise

    def meta_leader(self) -> int | None:
        """The node that leads the cluster's metadata, or None while there is none."""
        return self._leader("meta")

    def leader_of(self, stream: str, account: str = "$G") -> int | None:
        """The node that leads `stream`, or None if there is no leader."""
        return self._leader(stream_label(account, stream))

    def wait_for_leader(self, stream: str, *, account: str = "$G", timeout: float = _CURRENT_WITHIN) -> int:
        """The node that leads `stream`, as soon as there is one; the leader may need a moment more until it answers."""
        found = eventually_blocking(
            lambda: [leader] if (leader := self.leader_of(stream, account)) is not None else [],
            timeout,
            f"stream {stream} has a leader",
        )
        return found[0]

    def __repr__(self) -> str:
        return f"<NatsCluster {self.name} running={len(self._running())}/{self.size}>"

    def _describe(self) -> list[NatsServer]:
        routes: list[int] = []
        while len(routes) < self.size:
            port = pick_port()
            if port not in routes:
                routes.append(port)
        all_routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
        return [
            NatsServer(
                name=f"n{index}",
                config=f"cluster {{\n  name: {self.name}\n"
                f'  listen: "127.0.0.1:{port}"\n  routes: [{all_routes}]\n'
                f"  no_advertise: {str(not self._advertise).lower()}\n}}\n{self._config}",
            )
            for index, port in enumerate(routes)
        ]

    def _each(self, action: Callable[[NatsServer], None]) -> None:
        if not self.servers:
            return
        with ThreadPoolExecutor(len(self.servers)) as pool:
            done = [pool.submit(action, server) for server in self.servers]
        for future in done:
            future.result()

    def _running(self) -> list[NatsServer]:
        return [server for server in self.servers if server.running]

    def _reports(self) -> dict[str, NodeReport]:
        reports = {}
        for server in self.servers:
            with contextlib.suppress(ServerNotRunning):  # the node may die at any moment
                reports[server.name] = NodeReport.of(server.monitor_url)
        return reports

    def _leader(self, label: str) -> int | None:
        node = leader_of(self._reports(), label)
        return int(node.removeprefix("n")) if node is not None else None

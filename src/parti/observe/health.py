"""Health checks, and the small web server that shows them together with the metrics.

- `/healthz`: should the process keep running? Runs the checks marked `live`; 503 asks the supervisor for a restart.
- `/readyz`: can it work now? Runs every check; 503 takes it out of rotation, and says which check failed.
- `/metrics`: the registry, in the Prometheus or OpenMetrics text format, as the scraper requests.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from parti.config.sections import ObserveSection
from parti.errors import ConfigError, PartiError, UsageError
from parti.observe.catalog import READY
from parti.observe.metrics import NO_METRICS, Metrics

CHECK_TIMEOUT: Final = 2.0  # below the 3 s and more that supervisors allow a probe: the answer names the hanging check

Probe = Callable[[], "str | Awaitable[str | None] | None"]
"""Returns None when healthy, else the reason as text; may be async; an exception counts as a failure."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One named check. `live` checks also count for /healthz: use it only where a restart would help."""

    name: str
    probe: Probe
    live: bool = False


async def run_checks(checks: Iterable[HealthCheck], *, timeout: float = CHECK_TIMEOUT) -> dict[str, str]:
    """Run all checks concurrently; returns the failing ones by name, with the reason. Never raises, never hangs."""
    failing: dict[str, str] = {}

    async def ask(check: HealthCheck) -> None:
        try:
            async with asyncio.timeout(timeout):
                answer = check.probe()
                reason = await answer if inspect.isawaitable(answer) else answer
        except TimeoutError:
            reason = f"no answer within {timeout:g}s"
        except PartiError as error:
            reason = str(error)
        except Exception as error:  # a broken check is a failing check; its text may hold a secret: show only its type
            reason = f"the check raised {type(error).__name__}"
        if reason is not None:
            failing[check.name] = reason

    async with asyncio.TaskGroup() as group:
        for check in checks:
            group.create_task(ask(check))
    return dict(sorted(failing.items()))


class ObservabilityServer:
    """Serves /metrics, /healthz and /readyz from `start()` until `stop()`; port 0 takes any free port.

    Usable as `async with ObservabilityServer(...) as server`. After `stop()` returns the port is free again.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        checks: Iterable[HealthCheck] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        metrics: Metrics = NO_METRICS,
    ) -> None:
        self._registry = registry
        self._checks = tuple(checks)
        names = [check.name for check in self._checks]
        if len(set(names)) != len(names):
            raise UsageError(f"two health checks share a name: {', '.join(sorted(names))}")
        self._host, self._port = host, port
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    @classmethod
    def configured(
        cls, settings: ObserveSection, registry: CollectorRegistry, checks: Iterable[HealthCheck], metrics: Metrics
    ) -> ObservabilityServer | None:
        """The server at `observe.listen`, or None when that is "off"."""
        if settings.listen == "off":
            return None
        host, port = settings.address()
        return cls(registry, checks, host=host, port=port, metrics=metrics)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on; available only while it runs."""
        if self._runner is None or not self._runner.addresses:
            raise UsageError("the observability server is not running: call start() first")
        host, port = self._runner.addresses[0][:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self) -> None:
        """Listen. After this returns, scrapes are answered."""
        if self._runner is not None:
            raise UsageError("the observability server is already running")
        app = web.Application()
        app.add_routes(
            [web.get("/metrics", self._scrape), web.get("/healthz", self._healthz), web.get("/readyz", self._readyz)]
        )
        runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            await runner.cleanup()
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {self._host}:{self._port} (observe.listen): {reason}") from error
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner

    async def stop(self) -> None:
        """Stop listening and close open connections; calling it again does nothing."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def __aenter__(self) -> ObservabilityServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __repr__(self) -> str:
        state = self.url if self._runner is not None else "stopped"
        return f"<ObservabilityServer {state} checks={len(self._checks)}>"

    async def _scrape(self, request: web.Request) -> web.Response:
        await self._ask(self._checks)  # so that a scrape shows the current readiness
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        live = tuple(check for check in self._checks if check.live)
        return _answer(live, await run_checks(live))

    async def _readyz(self, _: web.Request) -> web.Response:
        return _answer(self._checks, await self._ask(self._checks))

    async def _ask(self, checks: tuple[HealthCheck, ...]) -> dict[str, str]:
        failing = await run_checks(checks)
        self._metrics.set(READY, 0 if failing else 1)
        return failing


def _answer(checks: tuple[HealthCheck, ...], failing: dict[str, str]) -> web.Response:
    body = {
        "status": "failing" if failing else "ok",
        "checks": {check.name: "failing" if check.name in failing else "ok" for check in checks},
        "failing": failing,
    }
    return web.json_response(body, status=503 if failing else 200)

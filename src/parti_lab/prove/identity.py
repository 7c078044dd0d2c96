"""`parti prove identity`: positions, durables and letters belong to one stream and one namespace, and parti checks it.

Streams are recreated, restored and exchanged, durables edited, deleted and taken by others, namespaces share a
stream. Every message in a stream is handled, or a stranger is refused with an error; nothing is skipped silently.
"""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from parti.errors import PartiError, UsageError
from parti.testing import NatsServer, NeverHappened
from parti.wire.api import JetStreamApi
from parti.wire.connect import connect
from parti.wire.options import ConnectOptions
from parti_lab.bench.goals import Figure
from parti_lab.bench.report import ExperimentOption, Proof, RunContext
from parti_lab.prove.identity_cases import CASES, Wrong
from parti_lab.prove.identity_fleet import Bench
from parti_lab.prove.torture_scenario import LAYOUTS, RETENTIONS


async def run(ctx: RunContext) -> dict[str, Figure]:
    """Run each case in each layout and retention that it fits; a quick run draws one combination per case."""
    options = ctx.options
    rng = ctx.random()
    names = [name.strip() for name in str(options["cases"]).split(",") if name.strip()] or list(CASES)
    if unknown := sorted(set(names) - set(CASES)):
        raise UsageError(f"--cases {', '.join(unknown)}: choose among {', '.join(CASES)}")
    for name, words in (("layout", LAYOUTS), ("retention", RETENTIONS)):
        if options[name] and options[name] not in words:
            raise UsageError(f"--{name} {options[name]!r}: choose one of {', '.join(words)}")
    todo: list[tuple[str, str, str]] = []
    for name in names:
        layouts = [str(options["layout"])] if options["layout"] else list(LAYOUTS)
        retentions = [r for r in CASES[name][1] if options["retention"] in ("", r)]
        if ctx.quick and retentions:
            layouts, retentions = [rng.choice(layouts)], [rng.choice(retentions)]
        todo += [(name, layout, retention) for layout in layouts for retention in retentions]
    lost = 0
    failed: list[str] = []
    with ctx.progress("cases", total=len(todo)) as advance:
        for name, layout, retention in todo:
            missing, why = await _case(name, layout, retention)
            lost += missing
            if why:
                failed.append(f"{name} ({layout}, {retention}): {why}")
            advance(1)
    return {"cases": len(todo), "failed": len(failed), "lost": lost, "failures": "; ".join(failed)}


async def _case(name: str, layout: str, retention: str) -> tuple[int, str]:
    """Run one case on its own server; returns how many messages were lost, and what was wrong."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parti-identity-")))
        server = await stack.enter_async_context(NatsServer())
        connection = await connect(ConnectOptions(servers=(server.url,), request_timeout=5.0))
        stack.push_async_callback(connection.close)
        bench = Bench(server, JetStreamApi(connection), layout, retention, folder=folder)
        try:
            lost = await bench.run(CASES[name][0])
        except (Wrong, PartiError, NeverHappened, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}"
    return len(lost), f"{len(lost)} lost, such as {lost[0]}" if lost else ""


PROOF = Proof(
    name="identity",
    help="Streams recreated, restored or exchanged, durables of others, two namespaces: nothing is skipped in silence.",
    run=run,
    goals={"failed": "== 0", "lost": "== 0", "cases": ">= 1"},
    options=(
        ExperimentOption("cases", "", f"only these, with commas: {', '.join(CASES)}"),
        ExperimentOption("layout", "", "only per-worker or per-partition"),
        ExperimentOption("retention", "", "only limits, workqueue or interest"),
    ),
)

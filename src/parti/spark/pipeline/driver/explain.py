"""Describes a pipeline: which plan and why, what runs where, and what is guaranteed."""

from __future__ import annotations

from collections.abc import Iterator

from parti.config.units import parse_duration
from parti.dead_letters import dead_letter_stream
from parti.spark.pipeline.driver.definition import Pipeline
from parti.spark.pipeline.driver.plan import Plan, PlanKind
from parti.worker.handler import is_async


def explain(pipeline: Pipeline, cores: int, measured_us: float | None = None) -> list[tuple[str, str]]:
    """What would run on this number of cores, as pairs of a word and its explanation."""
    plan = pipeline.planned(cores, measured_us)
    return [
        ("pipeline", f"{pipeline.name}, on {pipeline.master} with {cores} cores"),
        ("plan", str(plan.kind)),
        ("why", f"{plan.reason}; on {cores} cores a message takes about {_estimates(plan)}"),
        ("source", " ".join(_source(pipeline))),
        ("order", _order(pipeline, plan)),
        ("handler", _handler(pipeline)),
        ("failures", _failures(pipeline)),
        ("results", "; ".join(_results(pipeline)) or "none"),
        ("outcomes", pipeline.outcomes.parquet or ("by a callable" if pipeline.outcomes.write else "counted only")),
        ("position", f"{pipeline.checkpoint}, one folder an epoch; told to JetStream: {_commit(pipeline)}"),
        ("standby", _standby(pipeline)),
    ]


def _estimates(plan: Plan) -> str:
    return f"{plan.fused_us} us fused and {plan.shuffled_us} us shuffled"


def _source(pipeline: Pipeline) -> Iterator[str]:
    yield f"stream {pipeline.stream}"
    if pipeline.group is not None:
        yield f"as member {pipeline.member} of group {pipeline.group}, while it has the pin: its partitions,"
    if pipeline.subjects:
        yield f"subjects {', '.join(pipeline.subjects)}"
    yield f"from {pipeline.start_at if pipeline.group is None else 'where the group is'};"
    yield f"at most {pipeline.batch_size or 'all'} messages a batch,"
    if pipeline.trigger == "available-now":
        yield "what is there and then the end"
    elif parse_duration(pipeline.trigger):
        yield f"a batch every {pipeline.trigger}"
    else:
        yield "batch after batch without a pause"


def _order(pipeline: Pipeline, plan: Plan) -> str:
    into = f"hashed into {pipeline.partitions}" if pipeline.group is None else "in the group's"
    key = f"by {pipeline.key}, {into} partitions"
    if plan.kind is PlanKind.FUSED:
        return f"{key}; one task reads in stream order and runs the handler itself"
    return f"{key}; messages go to {plan.tasks} tasks by partition, in stream order"


def _handler(pipeline: Pipeline) -> str:
    name = getattr(pipeline.handler, "__qualname__", type(pipeline.handler).__name__)
    if pipeline.kind != "message":
        return f"{name}, called with whole batches as {pipeline.kind}"
    if is_async(pipeline.handler):
        return f"{name}, async: lanes by key, at most {pipeline.concurrency} at once in a task"
    return f"{name}, plain: called in a row; moved to threads when it is seen to wait"


def _failures(pipeline: Pipeline) -> str:
    retries = pipeline.retries
    tries = f"{retries.attempts} attempts within {retries.budget:g} s"
    match retries.then:
        case "dead-letter":
            return f"{tries}, then to {dead_letter_stream(pipeline.stream)}"
        case "park":
            waits = ", ".join(f"{wait:g} s" for wait in retries.park_delays)
            return f"{tries}, then the key is parked and driven again after {waits}"
        case "stop":
            return f"{tries}, then the query stops; its batch is not committed"


def _results(pipeline: Pipeline) -> Iterator[str]:
    results = pipeline.results
    if results.subject:
        yield f"published to {results.subject} by the tasks, each stored once"
    if results.parquet:
        yield f"Parquet in {results.parquet}, one folder a batch"
    if results.write:
        yield "by a callable, once for each batch and again when it is replayed"


def _commit(pipeline: Pipeline) -> str:
    return pipeline.commit if pipeline.group is None else "as the group asks for it"


def _standby(pipeline: Pipeline) -> str:
    if pipeline.standby is None:
        return "none: one driver, no lease"
    return f"lease of {pipeline.standby.ttl:g} s in bucket {pipeline.standby.bucket}; publishes are fenced by epoch"

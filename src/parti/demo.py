"""`make run`: an embedded nats-server, a stream of 2,000 subjects, and a Spark job that reads all of it back.

It checks what it shows: the job must see every message that the server acknowledged, or the run fails.
"""

from __future__ import annotations

import json
import sys
import time

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from parti.bench.load import create_stream, fill
from parti.testing import NatsServer
from parti.wire.options import ConnectOptions

STREAM = "events"


@click.command()
@click.option("--messages", default=200_000, show_default=True, help="Messages to publish.")
@click.option("--subjects", default=2_000, show_default=True, help="Subjects to spread them over.")
@click.option("--partitions", default=8, show_default=True, help="Partitions of the key space.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout.")
def main(messages: int, subjects: int, partitions: int, as_json: bool) -> None:
    """Publish to an embedded server, read back with Spark, print a summary per partition."""
    console = Console(stderr=True)
    with NatsServer() as server:
        options = ConnectOptions(servers=(server.url,))
        console.print(f"nats-server {'.'.join(map(str, server.version))} on {server.url}")
        create_stream(options, STREAM, "file")
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"publishing {messages:,} messages on {subjects:,} subjects", total=messages)
            rate = fill(options, STREAM, messages, 128, subjects, advance=lambda n: progress.advance(task, n))
        console.print(f"published {messages:,} messages on {subjects:,} subjects, {rate:,.0f}/s")
        rows, seconds = _summarise(server.url, partitions, console)
    read = sum(row["messages"] for row in rows)
    if as_json:
        click.echo(json.dumps({"published": messages, "read": read, "seconds": round(seconds, 2), "partitions": rows}))
    else:
        Console().print(_table(rows))
    if read != messages:
        console.print(f"[red]FAILED[/red]: {messages:,} messages were published and {read:,} read")
        sys.exit(1)
    console.print(f"Spark read {read:,} of {messages:,} messages in {seconds:.1f} s: nothing lost")


def _summarise(url: str, partitions: int, console: Console) -> tuple[list[dict[str, int]], float]:
    # Imported late: the first bytes of output should not wait for Spark.
    from pyspark.sql import functions as f

    from parti.spark import session

    console.print("starting Spark ...")
    spark = session("parti demo", master="local[2]")
    try:
        frame = (
            spark.read.format("jetstream")
            .option("servers", url)
            .option("stream", STREAM)
            .option("numPartitions", partitions)
            .load()
        )
        started = time.perf_counter()
        summary = (
            frame.groupBy("partition")
            .agg(
                f.count("*").alias("messages"),
                f.countDistinct("subject").alias("subjects"),
                f.min("sequence").alias("first_sequence"),
                f.max("sequence").alias("last_sequence"),
                f.sum(f.length("value")).alias("bytes"),
            )
            .orderBy("partition")
        )
        rows = [row.asDict() for row in summary.collect()]
        return rows, time.perf_counter() - started
    finally:
        spark.stop()


def _table(rows: list[dict[str, int]]) -> Table:
    names = ("partition", "messages", "subjects", "first_sequence", "last_sequence", "bytes")
    table = Table(*(name.replace("_", " ") for name in names), title=f"stream {STREAM!r} by partition")
    for row in rows:
        table.add_row(*(f"{row[name]:,}" for name in names))
    return table


if __name__ == "__main__":
    main()

"""An error that Spark prints has our sentence in its first line; a program that it ends has it in its last line."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

from parti.errors import ConfigError
from parti.spark.last_words import LastWords, say_last_words, sentence_of
from support.spark_streams import Stream


@pytest.fixture
def ended_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], Any]], tuple[list[str], str]]:
    """What a program prints that ends here: the lines, and the text of Spark's error."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)

    def run(program: Callable[[], Any]) -> tuple[list[str], str]:
        say_last_words()
        say_last_words()  # of two sessions
        with pytest.raises(PySparkException) as caught:
            program()
        capsys.readouterr()
        sys.excepthook(type(caught.value), caught.value, caught.value.__traceback__)
        return capsys.readouterr().err.rstrip().splitlines(), str(caught.value)

    return run


def test_a_refused_option_is_the_first_and_the_last_line(
    spark: Any, stream: Stream, ended_by: Callable[[Callable[[], Any]], tuple[list[str], str]]
) -> None:
    reader = spark.read.format("jetstream").options(**stream.options(retryBudget="0s"))
    lines, text = ended_by(lambda: reader.load().collect())
    assert lines[-1].startswith("ConfigError: option retryBudget: 0s leaves no time at all")
    assert lines[-1] in text.splitlines()[0]


def test_an_error_of_a_streaming_query_is_the_first_and_the_last_line(
    spark: Any, stream: Stream, ended_by: Callable[[Callable[[], Any]], tuple[list[str], str]], tmp_path: Path
) -> None:
    options = stream.options(startingOffsets="77")

    def program() -> None:
        frame = spark.readStream.format("jetstream").options(**options).load()
        query = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
        query.awaitTermination()

    lines, text = ended_by(program)
    assert lines[-1].startswith("ConfigError: startingOffsets 77 lies beyond the last sequence 0")
    assert lines[-1] in text.splitlines()[0]


def test_an_error_in_a_task_is_the_last_line_below_java_frames(
    spark: Any, stream: Stream, ended_by: Callable[[Callable[[], Any]], tuple[list[str], str]]
) -> None:
    row = spark.createDataFrame([(f"{stream.name}.k", None)], "subject string, value binary")
    writer = row.write.format("jetstream").options(**stream.options()).mode("append")
    lines, text = ended_by(writer.save)
    assert "value is null" in lines[-1]
    assert lines[-1] in text


def test_errors_that_are_not_ours_or_are_ours_alone_are_left_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    hook = LastWords()
    for error in (ValueError("a value"), ConfigError("option x: correct it")):
        assert sentence_of(error) is None
        hook(type(error), error, None)
        assert capsys.readouterr().err == "".join(traceback.format_exception(error))

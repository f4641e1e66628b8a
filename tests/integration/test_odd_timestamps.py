"""A producer may give its records any number as a timestamp: nothing stops at one, and it is shown
as what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import SOURCES, keyed
from tests.support.commands import here
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River
from tests.support.topics import ANY_TIME, CheckedProducer, consume, create_topics
from watersmeet.audit.show import utc
from watersmeet.core.times import LAST_EVENT_TIME_MS, time_text
from watersmeet.engine.spark import SparkEngine

MICROSECONDS = 1_768_780_800_123_456
NANOSECONDS = 1_768_780_800_123_456_789
TIMES = (MICROSECONDS, NANOSECONDS, LAST_EVENT_TIME_MS + 1, 5_000, 2**63 - 1)
NEGATIVE = (-1, -5_000, -(2**63))
"""Nothing vouches for the event time of a record with one: it is refused in any case."""


@pytest.mark.long
@pytest.mark.parametrize("lake", [EMBEDDED, FOLDER])
def test_timestamps_beyond_every_calendar_stop_nothing_and_are_shown_as_out_of_range(
    kafka: str,
    tmp_path: Path,
    on_spark: Callable[[River], River],
    lake: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Spark, its tasks read and write even so few records."""
    monkeypatch.setattr(SparkEngine, "here_offsets", -1)
    monkeypatch.setattr(SparkEngine, "here_bytes", -1)
    topics = {source: f"odd-{lake}-{source}-of-any-time" for source in SOURCES}
    # Made with it: Kafka needs a moment to follow what is altered later.
    create_topics(kafka, *topics.values(), partitions=2, **ANY_TIME)
    overrides: dict[str, Any] = {
        **{f"sources__{source}__topic": topic for source, topic in topics.items()},
        "publish__late_topic": f"odd-{lake}-late",
        "publish__quarantine_topic": f"odd-{lake}-quarantine",
    }
    river = on_spark(River.make(kafka, tmp_path, f"odd-{lake}", lake=lake, **overrides))
    producer = CheckedProducer(kafka)
    last = keyed("end", LAST_EVENT_TIME_MS)  # it is due when no calendar goes on
    for source in SOURCES:
        records = [(b"{", time) for time in NEGATIVE]
        for n, time in enumerate(TIMES):
            values = (keyed("a", 1_000 + n), b"{", keyed("late", 10), keyed("z", 100_000))
            records += [(value, time) for value in values]
        for value, time in [*records, (last, LAST_EVENT_TIME_MS + 1)]:
            producer.produce(river.topic(source), value, partition=0, timestamp=time)
            river.cases[0].values[source].append(value)
            river.cases[0].arrivals.append(source)
    assert producer.flush(30) == 0
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
    sent = {
        min(message.timestamp()[1], (2**63 - 1) // 1000)
        for message in consume(kafka, f"odd-{lake}-quarantine", 2)
    }
    assert sent >= {MICROSECONDS, LAST_EVENT_TIME_MS + 1, 5_000}

    for command in (
        ["status"],
        ["explain", "a"],
        ["verify"],
        ["redrive", "--reason", "undecodable"],
    ):
        assert json.loads(here(river, *command, "--json")) is not None
        assert here(river, *command)
    page = tmp_path / "report.html"
    here(river, "report", "--out", str(page))
    text = unescape(page.read_text())
    assert "40 records have a timestamp of Kafka's that no calendar has" in text
    assert "1970-01-01" in text


@pytest.mark.parametrize("ms", [MICROSECONDS, NANOSECONDS, LAST_EVENT_TIME_MS + 1, -(10**16), -1])
def test_a_time_that_no_calendar_has_is_shown_as_the_number_that_it_is(ms: int) -> None:
    assert utc(ms) == f"{ms} ms (out of range)"


def test_the_first_and_the_last_time_that_a_calendar_has_are_shown_as_times() -> None:
    assert (utc(0), utc(LAST_EVENT_TIME_MS)) == (
        "1970-01-01 00:00:00.000Z",
        "9999-12-31 23:59:59.999Z",
    )
    assert utc(None) == "-"


def test_a_time_is_written_to_its_millisecond_up_to_the_last() -> None:
    assert [time_text(ms) for ms in (0, LAST_EVENT_TIME_MS)] == [
        "1970-01-01T00:00:00.000Z",
        "9999-12-31T23:59:59.999Z",
    ]

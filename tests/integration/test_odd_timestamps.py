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
from tests.support.quality import expected, suite_file
from tests.support.rivers import CATALOG, EMBEDDED, FOLDER, Losses, River
from tests.support.topics import ANY_TIME, CheckedProducer, consume, create_topics, make_again
from watersmeet.core.times import LAST_EVENT_TIME_MS, time_text, utc
from watersmeet.engine.spark import SparkEngine

MICROSECONDS = 1_768_780_800_123_456
NANOSECONDS = 1_768_780_800_123_456_789
TIMES = (MICROSECONDS, NANOSECONDS, LAST_EVENT_TIME_MS + 1, 5_000, 2**63 - 1)
FAR = 300_000_000_000_000
"""In the year 11476: Python has no such time."""
NEGATIVE = (-1, -5_000, -(2**63))
"""Nothing vouches for the event time of a record with one: it is refused in any case."""


@pytest.mark.long
@pytest.mark.parametrize(
    "lake", [EMBEDDED, FOLDER, pytest.param(CATALOG, marks=pytest.mark.nightly)]
)
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


@pytest.fixture
def far(kafka: str, tmp_path: Path) -> River:
    """A river of one partition whose records all have a timestamp of the year 11476."""
    topics = {source: f"far-{tmp_path.name}-{source}".replace("_", "-") for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=1, **ANY_TIME)
    suite = suite_file(
        tmp_path,
        "bronze",
        "bronze_tracking",
        expected("expect_column_values_to_be_null", "there is none", column="kafka_timestamp"),
    )
    overrides: dict[str, Any] = {
        **{f"sources__{source}__topic": topic for source, topic in topics.items()},
        "publish__quarantine_topic": f"far-{tmp_path.name}-quarantine",
        "quality": {"suites": [suite]},
    }
    river = River.make(kafka, tmp_path, f"far-{tmp_path.name}", partitions=1, **overrides)
    send_far(river, b"{", keyed("a", 1_000), keyed("b", 100_000), keyed("late", 10))
    river.finish()
    return river


def send_far(river: River, *values: bytes) -> None:
    producer = CheckedProducer(river.kafka)
    for source in SOURCES:
        for value in values:
            producer.produce(river.topic(source), value, partition=0, timestamp=FAR)
    assert producer.flush(30) == 0


def asked(river: River, *command: str, exit_code: int = 0) -> Any:
    return json.loads(here(river, *command, "--json", exit_code=exit_code))


@pytest.mark.nightly
@pytest.mark.long
def test_a_record_of_the_year_11476_is_redriven_once(far: River) -> None:
    redrive = ("redrive", "--reason", "undecodable")
    assert asked(far, *redrive, "--apply")["sent"] == 2
    send_far(far, keyed("c", 100_000))
    in_kafka = asked(far, *redrive, "--apply")
    assert (in_kafka["sent"], [row["before"] for row in in_kafka["records"]]) == (0, [1, 1])
    far.finish()
    assert [row["before"] for row in asked(far, *redrive)["records"]] == [1, 1]


@pytest.mark.nightly
@pytest.mark.long
def test_a_topic_with_records_of_the_year_11476_may_move(far: River) -> None:
    for source in SOURCES:
        make_again(far.kafka, far.topic(source), 1, config=ANY_TIME)
    assert asked(far, "validate")["ok"] is True


@pytest.mark.nightly
@pytest.mark.long
def test_every_command_answers_of_records_of_the_year_11476(far: River) -> None:
    for command in (
        ["status"],
        ["explain", "a"],
        ["explain", "late"],
        ["verify", "--full"],
        ["rebuild", "--into", "again"],
        ["verify", "--against", "again"],
        ["validate"],
        ["forget", "a", "--apply"],
        ["forget", "late", "--apply"],
        ["verify"],
    ):
        assert asked(far, *command) is not None
    checked = asked(far, "check", exit_code=3)["results"]
    assert [result["trouble"] for result in checked if result["trouble"]] == []
    [failed] = [result for result in checked if not result["success"]]
    [shown] = {example["kafka_timestamp"] for example in failed["examples"]}
    assert shown == f"{FAR} ms (out of range)"
    page = far.folder / "report.html"
    here(far, "report", "--out", str(page))
    far.config["keep"] = dict.fromkeys(("bronze", "silver", "late", "quarantine"), "1h")
    far.write()
    here(far, "maintain")
    far.finish()
    assert asked(far, "verify") is not None


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

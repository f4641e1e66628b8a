"""No record stops a source, whatever is in it: what cannot be read of a record is that record's own
fate."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.cases import heartbeat, keyed
from tests.support.raw_producer import produce_raw
from tests.support.rivers import River
from tests.support.topics import dead_letters, produce
from watersmeet.ask.status import status
from watersmeet.audit.validate import check_kafka, check_keys
from watersmeet.lake import tables
from watersmeet.operations.redrive import Redrive, redriven_in_bronze

pytestmark = [pytest.mark.promise("R9"), pytest.mark.fault("hostile")]

NOT_UTF_8 = [(b"first", b"1"), (b"\xff\xfe", b"2"), (b"last", b"3")]

CLAIMS = 8_000
CLAIMS_S = 5.0
"""Of the processor; they take a fiftieth of it."""


def test_a_header_whose_name_is_not_utf_8_stops_no_source_and_costs_no_record(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(
        kafka, tmp_path, "raw-names", partitions=1, publish__quarantine_topic="raw-names-letters"
    )
    tracking, orders = (river.topic(source) for source in ("tracking", "orders"))
    produce_raw(kafka, tracking, keyed("a", 10), NOT_UTF_8)
    produce_raw(kafka, tracking, b"{", NOT_UTF_8)
    produce_raw(kafka, tracking, keyed("b", 20), [(b"good", b"1")])
    produce(kafka, orders, [(0, keyed("a", 10))])
    for topic in (tracking, orders):
        produce(kafka, topic, [(0, heartbeat(10_000))])
    river.finish()
    found = (
        river.reader.select(tables.bronze("tracking"), ["offset", "reason", "headers"])
        .sort_by("offset")
        .to_pylist()
    )
    assert [(row["offset"], row["reason"], row["headers"]) for row in found] == [
        (0, None, None),
        (1, "undecodable", None),
        (2, None, [{"key": "good", "value": b"1"}]),
        (3, None, None),
    ]
    merged = river.reader.select(tables.SILVER, ["merge_key", "status"]).to_pylist()
    assert sorted(row["merge_key"] for row in merged if row["status"] == "timed_out") == ["a", "b"]
    [letter] = dead_letters(kafka, "raw-names-letters", 1)
    assert (letter.offset, letter.reason, letter.value) == (1, "undecodable", b"{")
    assert river.broken_promises() == []
    produce_raw(kafka, tracking, keyed("c", 30), NOT_UTF_8)
    assert status(river.reader, river.settings)["partitions"][0]["sources"]["tracking"]["lag"] == 1
    assert [*check_kafka(river.settings), *check_keys(river.settings, river.reader)[0]] == []


def test_what_a_record_says_of_a_redrive_stops_no_redrive(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "raw-redrive", partitions=1)
    tracking = river.topic("tracking")
    produce_raw(kafka, tracking, b"{", NOT_UTF_8)
    for said in (b"9" * 5000, "²".encode(), b"", b"-1", b"\xff", b"99999999999999999999"):
        produce_raw(
            kafka,
            tracking,
            keyed("a", 10),
            [(b"watersmeet.redriven", tracking.encode() + b"/0/" + said)],
        )
    produce(kafka, river.topic("orders"), [(0, keyed("a", 10))])
    river.finish("bronze")
    produce_raw(kafka, tracking, keyed("b", 20), NOT_UTF_8)
    redrive = Redrive(river.reader, river.settings, "undecodable")
    assert [row["before"] for row in redrive.run(apply=False)["records"]] == [0, 0]
    assert redrive.run(apply=True)["sent"] == 1
    assert redrive.run(apply=True)["sent"] == 0


@pytest.mark.promise("N50")
def test_only_a_record_with_the_bytes_of_the_refused_one_counts_as_redriven(
    kafka: str, tmp_path: Path
) -> None:
    """Whatever any producer says of itself: read, unread, before and after the record was
    redriven."""
    river = River.make(kafka, tmp_path, "claimed", partitions=1)
    tracking = river.topic("tracking")
    own = (b"of", b"1")
    claim = (b"watersmeet.redriven", tracking.encode() + b"/0/0")

    def lie() -> None:
        produce_raw(kafka, tracking, keyed("a", 10), [own, claim])
        produce_raw(kafka, tracking, b"{", [claim])
        produce_raw(kafka, tracking, b"{", [own, own, claim])
        produce_raw(kafka, tracking, b"{", [own, claim], key=b"another")

    produce_raw(kafka, tracking, b"{", [own])
    lie()
    produce(kafka, river.topic("orders"), [(0, keyed("a", 10))])
    river.finish("bronze")
    lie()
    wanted = Redrive(river.reader, river.settings, "undecodable")
    before = wanted.run(apply=False)["records"][0]
    assert (before["found"], before["before"]) == (4, 0)
    assert wanted.run(apply=True)["sent"] == 4
    lie()
    assert wanted.run(apply=True)["sent"] == 0
    river.finish("bronze")
    redriven = wanted.run(apply=False)["records"][0]
    assert (redriven["found"], redriven["before"]) == (4 + 6 + 4, 4), (
        "what was refused again counts as one of its own"
    )


@pytest.mark.promise("N50")
def test_thousands_of_claims_of_one_record_cost_what_one_does(kafka: str, tmp_path: Path) -> None:
    """Each hashed what came before it, so that 8,000 took minutes, of the run's own `keep`, too."""
    river = River.make(kafka, tmp_path, "claims", partitions=1)
    tracking = river.topic("tracking")
    produce_raw(kafka, tracking, b"{", [])
    claim = (b"watersmeet.redriven", tracking.encode() + b"/0/0")
    produce_raw(kafka, tracking, b"{", [claim] * CLAIMS)
    produce(kafka, river.topic("orders"), [(0, keyed("a", 10))])
    river.finish("bronze")
    began = time.process_time()
    found = list(redriven_in_bronze(river.reader, river.settings.inputs[0], {0: (1, 2)}))
    assert time.process_time() - began < CLAIMS_S
    assert found == []


def test_any_timestamp_that_a_producer_sends_is_kept_as_far_as_a_column_can(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "raw-times", partitions=1)
    tracking, orders = (river.topic(source) for source in ("tracking", "orders"))
    for at_ms in (-(2**61), -1, 1):
        produce_raw(kafka, tracking, keyed("a", 10), [], timestamp=at_ms)
    produce(kafka, orders, [(0, keyed("a", 10))])
    river.finish()
    found = river.reader.select(tables.bronze("tracking"), ["offset", "kafka_timestamp"]).sort_by(
        "offset"
    )
    assert found["kafka_timestamp"].to_pylist() == [-((2**63 - 1) // 1000), -1, 1]

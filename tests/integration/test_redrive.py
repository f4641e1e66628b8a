"""Redrive on a real broker: refused records are sent to their source again, as they came, each
once, whatever is killed."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.support.cases import heartbeat, keyed
from tests.support.commands import here
from tests.support.effort import first_then_nightly
from tests.support.rivers import River, RunProcess, in_chunks
from tests.support.topics import CheckedProducer, consume, produce
from watersmeet.errors import ConfigurationError, KafkaRequestError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.operations.redrive import Redrive

pytestmark = pytest.mark.long

FUTURE = "event_time_in_future"
BEGINNING_MS = 1_000
"""When Kafka says that it took the records that are refused for their time: so they lie a day and
more in its future."""
LATER_MS = 5_000
TIME_MS = 200_000_000


def refuse(
    river: River, source: str, count: int, *, at_ms: int = BEGINNING_MS, **more: str
) -> None:
    """Sends records to both partitions that are refused for their time as long as Kafka's own
    timestamp is so early."""
    producer = CheckedProducer(river.kafka)
    for n in range(count):
        headers: list[tuple[str, str | bytes | None]] = [("n", str(n).encode()), ("none", None)]
        value = keyed(f"{source}-{at_ms}-{n}", TIME_MS + n, **more)
        topic = river.config["sources"][source]["topic"]
        producer.produce(
            topic,
            value,
            f"key {n}".encode() if n % 2 else None,
            n % 2,
            timestamp=at_ms,
            headers=headers,
        )
    assert producer.flush(30) == 0


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """Of tracking three records that were refused for their time, of orders two; of each one that
    is no JSON, and one read."""
    river = River.make(kafka, tmp_path, re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:])
    for source, count in (("tracking", 3), ("orders", 2)):
        name = river.config["sources"][source]["topic"]
        produce(kafka, name, [(0, keyed("read", TIME_MS - 10)), (1, b"{")])
        refuse(river, source, count)
    river.finish()
    return river


def redrive(
    river: River, *, apply: bool = True, reason: str = FUTURE, since_ms: int | None = None
) -> dict[str, Any]:
    return Redrive(river.reader, river.settings, reason, since_ms).run(apply=apply)


def counts(found: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    return {row["source"]: (row["found"], row["before"], row["after"]) for row in found["records"]}


def sent_again(river: River) -> list[tuple[str, int, Any]]:
    """By source and partition, every record of a source topic that says that it was redriven."""
    return [
        (source, message.partition(), message)
        for source, of_source in river.config["sources"].items()
        for message in consume(river.kafka, of_source["topic"], 2)
        if dict(message.headers() or []).get("watersmeet.redriven")
    ]


def said(river: River) -> Counter[str]:
    return Counter(
        dict(message.headers())["watersmeet.redriven"].decode()
        for _, _, message in sent_again(river)
    )


def test_without_apply_it_says_how_many_and_sends_nothing(river: River) -> None:
    found = redrive(river, apply=False)
    assert counts(found) == {"tracking": (3, 0, 0), "orders": (2, 0, 0)}
    assert (found["applied"], found["sent"], sent_again(river)) == (False, 0, [])


def test_records_are_sent_as_they_came_and_meet_the_rules_like_any_other(river: River) -> None:
    before = {
        (source, m.partition(), m.offset()): m
        for source, of_source in river.config["sources"].items()
        for m in consume(river.kafka, of_source["topic"], 2)
    }
    found = redrive(river)
    assert counts(found) == {"tracking": (3, 0, 3), "orders": (2, 0, 2)}
    assert found["sent"] == 5
    for source, partition, message in sent_again(river):
        *headers, (name, place) = message.headers()
        topic, of_partition, offset = place.decode().rsplit("/", 2)
        original = before[source, partition, int(offset)]
        assert (topic, int(of_partition), name) == (
            original.topic(),
            original.partition(),
            "watersmeet.redriven",
        )
        assert (message.key(), message.value(), headers) == (
            original.key(),
            original.value(),
            original.headers(),
        )
        assert message.timestamp()[1] > TIME_MS
    for source in ("tracking", "orders"):
        produce(
            river.kafka,
            river.config["sources"][source]["topic"],
            [(p, heartbeat(TIME_MS + 10**6)) for p in (0, 1)],
        )
    river.finish()
    merged = river.reader.select(tables.SILVER, ["merge_key", "status"]).to_pylist()
    expected = {
        f"{source}-{BEGINNING_MS}-{n}"
        for source, count in (("tracking", 3), ("orders", 2))
        for n in range(count)
    }
    assert {row["merge_key"] for row in merged if row["status"] == "timed_out"} == expected | {
        "read"
    }
    assert river.broken_promises() == []


@pytest.mark.promise("N8")
@pytest.mark.fault("lost")
def test_no_record_is_sent_twice_before_or_after_it_was_read_or_passed_over_or_the_lake_lost(
    river: River,
) -> None:
    redrive(river)
    first = said(river)
    assert redrive(river)["sent"] == 0, "not read yet"
    refuse(river, "tracking", 2, at_ms=LATER_MS)
    assert json.loads(answer(river, "reset", "--to", "latest", "--yes", "--json"))["done"] is True
    assert redrive(river)["sent"] == 0, "passed over"
    assert json.loads(answer(river, "reset", "--to", "earliest", "--yes", "--json"))["done"] is True
    river.finish()
    found = redrive(river)
    assert counts(found) == {"tracking": (5, 3, 5), "orders": (2, 2, 2)}, (
        "read; and two that are new"
    )
    shutil.rmtree(river.folder / "lake")
    river.config["publish"]["topic"] += "-anew"
    river.finish()
    assert counts(redrive(river)) == {"tracking": (5, 5, 5), "orders": (2, 2, 2)}, (
        "the lake was lost"
    )
    assert max(said(river).values()) == 1
    assert len(said(river)) == len(first) + 2


def answer(river: River, *words: str) -> str:
    """What a command says."""
    return here(river, *words)


@pytest.mark.nightly
@pytest.mark.promise("N8")
@pytest.mark.fault("retention")
def test_what_was_redriven_is_known_for_as_long_as_the_refused_record_is_kept(river: River) -> None:
    redrive(river)
    river.config["keep"] = {"bronze": "1s"}
    river.write()
    river.finish()
    for n in (1, 2, 3):
        for of_source in river.config["sources"].values():
            late = [(p, keyed("later", TIME_MS + n * 10**6)) for p in (0, 1)]
            produce(
                river.kafka,
                of_source["topic"],
                [*late, *((p, heartbeat(TIME_MS + n * 10**6 + 1000)) for p in (0, 1))],
            )
        river.finish()

    def in_bronze() -> Counter[str]:
        names = [tables.bronze(source) for source in river.config["sources"]]
        rows = [
            row
            for name in names
            for row in river.reader.select(name, ["headers", "merge_key"]).to_pylist()
        ]
        said = [{header["key"]: header["value"] for header in row["headers"] or ()} for row in rows]
        return Counter(
            "redriven" if "watersmeet.redriven" in headers else "other" for headers in said
        )

    before = in_bronze()
    answer(river, "maintain")
    after = in_bronze()
    assert after["redriven"] == before["redriven"] == 5
    assert after["other"] < before["other"] - 4
    assert redrive(river)["sent"] == 0
    assert river.broken_promises() == []
    river.config["keep"]["quarantine"] = "1s"
    river.write()
    for _ in range(2):  # first the refused records go, then what says that they were redriven
        answer(river, "maintain")
    assert in_bronze()["redriven"] == 0
    assert redrive(river)["sent"] == 0
    assert river.broken_promises() == []


def test_only_records_that_kafka_took_since_then_are_sent(river: River) -> None:
    refuse(river, "orders", 2, at_ms=LATER_MS)
    river.finish()
    assert counts(redrive(river, since_ms=BEGINNING_MS + 1)) == {
        "tracking": (0, 0, 0),
        "orders": (2, 0, 2),
    }
    assert counts(redrive(river)) == {"tracking": (3, 0, 3), "orders": (4, 2, 4)}


def test_a_record_that_is_refused_again_is_one_of_its_own(river: River) -> None:
    assert redrive(river, reason="undecodable")["sent"] == 2
    river.finish()
    assert counts(redrive(river, reason="undecodable")) == {
        "tracking": (2, 1, 2),
        "orders": (2, 1, 2),
    }
    assert max(said(river).values()) == 1


@pytest.mark.promise("N8")
@pytest.mark.fault("kill")
@pytest.mark.parametrize(
    ("point", "count", "is_out"),
    first_then_nightly(
        [
            ("publisher.produce", 2, 0),
            ("publisher.committed", 1, 3),
            ("publisher.begin", 1, 0),
            ("publisher.commit", 1, 0),
            ("publisher.commit", 2, 3),
        ],
        2,
    ),
)
def test_a_redrive_that_is_killed_is_finished_by_the_next_and_sends_nothing_twice(
    river: River, point: str, count: int, is_out: int
) -> None:
    process = RunProcess(
        river.file,
        "--reason",
        FUTURE,
        "--apply",
        point=point,
        count=count,
        program=in_chunks(1),
        command="redrive",
    )
    process.await_held()
    process.kill()
    found = redrive(river)
    assert (found["sent"], sum(row["after"] for row in found["records"])) == (5 - is_out, 5)
    assert sorted(said(river).values()) == [1] * 5
    river.finish()
    assert river.broken_promises() == []


@pytest.mark.promise("N8")
@pytest.mark.fault("owners")
def test_of_two_redrives_at_once_the_later_one_sends_and_the_earlier_one_ends(river: River) -> None:
    earlier = RunProcess(
        river.file, "--reason", FUTURE, "--apply", point="publisher.commit", command="redrive"
    )
    earlier.await_held()
    assert redrive(river)["sent"] == 5
    earlier.let_go()
    assert earlier.wait() == 1
    assert "has been taken over by another process" in earlier.said()
    assert sorted(said(river).values()) == [1] * 5


def test_behind_an_open_transaction_nothing_is_sent_since_nobody_knows_what_was(
    river: River, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = river.config["sources"]["tracking"]["topic"]
    other = Producer({"bootstrap.servers": str(river.kafka), "transactional.id": f"other-{topic}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(topic, heartbeat(TIME_MS), partition=0)
    other.flush(30)
    redrive_of_all = Redrive(river.reader, river.settings, FUTURE)
    monkeypatch.setattr(redrive_of_all, "_cluster", Cluster(river.settings.kafka, settling_s=0))
    with pytest.raises(
        KafkaRequestError, match=r"\[0\] has an open transaction of another producer at offset"
    ):
        redrive_of_all.run(apply=True)
    other.commit_transaction(30)
    assert redrive(river)["sent"] == 5


def test_a_reason_that_there_is_none_of_is_bad_usage(river: River) -> None:
    with pytest.raises(
        ConfigurationError,
        match="no record is refused as `late`; use too_large, undecodable, no_key",
    ):
        redrive(river, reason="late")


def test_the_command_says_what_it_does_to_people_and_programs(river: River) -> None:
    words = ["redrive", "--reason", FUTURE]
    found = json.loads(answer(river, *words, "--since", "1970-01-01T00:00:00Z", "--json"))
    assert (found["since"], [row["found"] for row in found["records"]]) == (0, [3, 2])
    assert "5 records refused as event_time_in_future would be sent again" in answer(river, *words)
    assert "5 records refused as event_time_in_future were sent again" in answer(
        river, *words, "--apply"
    )

"""Repartition on a real broker: each record once, where its key belongs, in lockstep, whatever is
killed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.support.cases import SOURCES, expected_late, expected_messages, heartbeat, keyed
from tests.support.effort import first_then_nightly
from tests.support.lakes import late_of
from tests.support.lives import points_reached
from tests.support.repartitioning import Copy, Counts, Raw, as_cases, confluence, copied, raws
from tests.support.rivers import River, RunProcess, until
from tests.support.tenants import merge_of
from tests.support.topics import (
    CheckedProducer,
    add_partitions,
    committed,
    create_topics,
    delete_records,
    delete_topic,
    make_again,
    produce,
    published,
)
from watersmeet.audit.validate import check_kafka, check_keys
from watersmeet.audit.verify import verify
from watersmeet.core.repartition import InputPartition, RepartitionProgress, murmur2
from watersmeet.errors import (
    ConfigurationError,
    DataLossError,
    ForeignMessageError,
    TopicChangedError,
)
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.monitoring.events import Event, LagObserved
from watersmeet.monitoring.metrics import Metrics
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.redrive import Redrive
from watersmeet.repartition import topics
from watersmeet.repartition.command import repartition
from watersmeet.repartition.topics import OriginTopics
from watersmeet.running.lineage import sending
from watersmeet.settings import LineageSettings

pytestmark = pytest.mark.long


def name_of(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")


def rows(river: River, **more: Any) -> list[dict[str, Any]]:
    """What a repartition of what there is answers."""
    return repartition(river.settings, Reporter(), threading.Event(), once=True, **more)


def once(river: River, **more: Any) -> dict[str, Any]:
    """The same by source; each has one topic that it comes from."""
    return {row["source"]: row for row in rows(river, **more)}


def found_in(river: River, source: str) -> dict[int, list[Copy]]:
    return copied(str(river.kafka), river.config["sources"][source]["topic"], river.partitions)


# -- each record once, in its place, in lockstep


@pytest.mark.promise("N4")
@pytest.mark.fault("cuts")
@pytest.mark.parametrize(
    ("counts", "partitions"),
    first_then_nightly([(((2, 3, 1), (1, 1)), 3), ((3, 4), 4), ((4, 3), 2), ((1, 1), 1)], 2),
)
def test_every_record_is_written_once_as_it_came_in_lockstep_to_the_partition_of_its_key(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest, counts: Counts, partitions: int
) -> None:
    """However small the batches are, and in as many starts as there may be."""
    river = confluence(
        kafka, tmp_path, name_of(request), counts, partitions, max_offsets_per_batch=40
    )
    inputs = raws(river, counts)
    for raw in inputs.values():
        raw.flow(1, 0)
    told = {row["from"]: row for row in rows(river)}
    assert {topic: row["read"] for topic, row in told.items()} == inputs["tracking"].sizes | inputs[
        "orders"
    ].sizes
    for row in told.values():
        assert row["records"] == sum(row["read"].values())
    for source, raw in inputs.items():
        assert found_in(river, source) == raw.expected(partitions)
        raw.flow(2, 1000)
    rows(river)
    before = {source: found_in(river, source) for source in SOURCES}
    for source, raw in inputs.items():
        assert {p: Counter(copies) for p, copies in before[source].items()} == {
            p: Counter(copies) for p, copies in raw.expected(partitions).items()
        }
    assert {row["records"] for row in rows(river)} == {0}
    assert {source: found_in(river, source) for source in SOURCES} == before


def test_a_key_goes_where_another_producer_with_javas_partitioner_sends_it(
    kafka: str, request: pytest.FixtureRequest
) -> None:
    topic = name_of(request)
    create_topics(kafka, topic, partitions=7)
    producer = Producer({"bootstrap.servers": kafka, "partitioner": "murmur2"})
    keys = [f"{'é' * (n % 3)}{'k' * n}{n}".encode() for n in range(40)]
    found: dict[bytes | None, int | None] = {}
    for key in keys:
        producer.produce(
            topic,
            b"",
            key,
            on_delivery=lambda _, message: found.update({message.key(): message.partition()}),
        )
    assert producer.flush(30) == 0
    assert found == {key: murmur2(key) % 7 for key in keys}


# -- kills


POINTS = [
    ("publisher.begin", 1),
    ("publisher.produce", 1),
    ("publisher.produce", 2),
    ("publisher.commit", 1),
    ("publisher.commit", 2),
    ("publisher.committed", 1),
    ("publisher.committed", 3),
]


@pytest.mark.promise("N4")
@pytest.mark.fault("kill")
@pytest.mark.parametrize(
    "counts", [((2, 3), (1, 2)), pytest.param((3, 2), marks=pytest.mark.nightly)]
)
def test_a_repartition_killed_anywhere_is_finished_by_the_next_with_nothing_lost_or_repeated(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest, counts: Counts
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), counts, 4, max_offsets_per_batch=30)
    inputs = raws(river, counts)
    for raw in inputs.values():
        raw.flow(1, 0)
    for point, count in POINTS:
        process = river.run("--once", point=point, count=count, command="repartition")
        process.await_held()
        process.kill()
    river.finish_repartition()
    for source, raw in inputs.items():
        assert found_in(river, source) == raw.expected(4)


@pytest.mark.nightly
@pytest.mark.promise("N4")
@pytest.mark.fault("kill")
@pytest.mark.parametrize("counts", [((2, 1), (1, 1)), (3, 2)])
def test_killed_at_any_moment_while_records_keep_coming_nothing_is_lost_or_written_twice(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest, counts: Counts
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), counts, 2, max_offsets_per_batch=50)
    inputs, rng = raws(river, counts), random.Random(7)

    def begin(n: int) -> RunProcess:
        """One more repartition, and records for it: the last can be told to stop only after it
        began, which these show."""
        process = river.run(command="repartition")
        for raw in inputs.values():
            raw.flow(n, 1000 * n)
        return process

    for n in range(4):
        process = begin(n)
        ends = {source: rng.randrange(1, 100) + 60 * n for source in SOURCES}
        until(partial(has_come_to, river, ends), "some records")
        process.kill()
    process = begin(4)
    until(
        lambda: all(
            size(river, s) >= sum(map(len, raw.expected(2).values())) for s, raw in inputs.items()
        ),
        "all records",
    )
    assert process.stop() == 0, process.said()
    for source, raw in inputs.items():
        for p, copies in found_in(river, source).items():
            assert Counter(copies) == Counter(raw.expected(2)[p])
            for place in {copy.origin._replace(offset=0) for copy in copies}:
                offsets = [
                    copy.origin.offset for copy in copies if copy.origin._replace(offset=0) == place
                ]
                assert offsets == sorted(offsets)


def size(river: River, source: str) -> int:
    """How many messages a topic has, about."""
    topic = river.config["sources"][source]["topic"]
    cluster = Cluster(river.settings.kafka)
    if topic not in cluster.partition_counts([topic]):
        return 0
    return sum(map(len, found_in(river, source).values()))


def has_come_to(river: River, ends: dict[str, int]) -> bool:
    """Whether a topic has so many messages."""
    return any(size(river, source) >= end for source, end in ends.items())


@pytest.mark.promise("N4")
@pytest.mark.fault("owners")
def test_the_later_of_two_writes_on_and_the_earlier_one_ends(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), (2, 2), 3)
    inputs = raws(river, (2, 2))
    for raw in inputs.values():
        raw.flow(1, 0)
    earlier = river.run(point="publisher.commit", command="repartition")
    earlier.await_held()
    once(river)
    earlier.let_go()
    assert earlier.wait() == 1
    assert "has been taken over by another process" in earlier.said()
    for source, raw in inputs.items():
        assert found_in(river, source) == raw.expected(3)


# -- what the topics may be


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """Repartitioned once, with a few records of each source: from two and one partitions to
    three."""
    river = confluence(kafka, tmp_path, name_of(request), (2, 1), 3)
    for raw in raws(river, (2, 1)).values():
        raw.flow(1, 0, records=6)
    once(river)
    return river


def origin(river: River, source: str = "tracking") -> str:
    return str(river.config["sources"][source]["repartition"]["from"])


def target(river: River, source: str = "tracking") -> str:
    return str(river.config["sources"][source]["topic"])


def test_the_topic_that_is_read_may_get_more_partitions_at_any_time(river: River) -> None:
    add_partitions(river.kafka, origin(river), 4)
    produce(river.kafka, origin(river), [(3, keyed("new", 5000)), (0, keyed("old", 5001))])
    told = once(river)["tracking"]
    assert (told["records"], told["read"][3]) == (2, 1)


@pytest.mark.promise("N4")
@pytest.mark.fault("topics")
def test_a_topic_that_is_added_is_read_from_its_first_record_on_and_then_belongs_to_the_others(
    river: River,
) -> None:
    first, other, origins = (
        origin(river),
        f"{origin(river)}-more",
        river.config["sources"]["tracking"]["repartition"],
    )
    before = found_in(river, "tracking")
    create_topics(river.kafka, other, partitions=1)
    produce(river.kafka, other, [(0, keyed("old", 10)), (0, keyed("new", 5000))])
    produce(river.kafka, first, [(0, keyed("between", 4000))])
    origins["from"] = [first, other]
    river.write()
    told = {row["from"]: row["records"] for row in rows(river) if row["source"] == "tracking"}
    assert told == {first: 1, other: 2}
    added = [
        copy
        for p, copies in found_in(river, "tracking").items()
        for copy in copies[len(before[p]) :]
    ]
    assert sorted((copy.origin.topic, copy.origin.offset) for copy in added) == [
        (first, 7),
        (other, 0),
        (other, 1),
    ]
    assert {row["records"] for row in rows(river)} == {0}

    for wrong in (first, other):
        origins["from"] = wrong
        river.write()
        left = other if wrong == first else first
        with pytest.raises(
            ConfigurationError,
            match=rf"written from {left} \(.*\), and `from` names {wrong}; name that topic, too",
        ):
            rows(river)
    origins["from"] = [other, first]  # their order says nothing
    river.write()
    produce(river.kafka, other, [(0, keyed("more", 6000))])
    assert {row["from"]: row["records"] for row in rows(river) if row["source"] == "tracking"} == {
        first: 0,
        other: 1,
    }


def test_a_message_that_a_redrive_sent_says_nothing_of_what_was_written(river: River) -> None:
    """Nor may it be taken for somebody else's."""
    before = found_in(river, "tracking")
    producer = CheckedProducer(river.kafka)
    for p in range(river.partitions):
        headers: list[tuple[str, str | bytes | None]] = [
            ("watersmeet.origin", b"x/0/0"),
            ("watersmeet.redriven", b"y/0/1"),
        ]
        producer.produce(target(river), b"{", partition=p, headers=headers)
    assert producer.flush(30) == 0
    assert once(river)["tracking"]["records"] == 0
    assert all(copies[:-1] == before[p] for p, copies in found_in(river, "tracking").items())


def test_a_message_that_names_no_record_is_refused(river: River) -> None:
    place = InputPartition(origin(river), 0)
    progress = RepartitionProgress({origin(river): origin(river) + " (1.2)"}, {place: 1}, {})
    producer = CheckedProducer(river.kafka)
    headers: list[tuple[str, str | bytes | None]] = [*progress.headers()]
    producer.produce(target(river), b"{}", partition=1, headers=headers)
    assert producer.flush(30) == 0
    with pytest.raises(ForeignMessageError, match=r"offset \d+ that has no watersmeet.origin"):
        once(river)


def test_a_topic_that_others_write_to_is_refused(river: River) -> None:
    produce(river.kafka, target(river), [(1, b"{}")])
    with pytest.raises(
        ForeignMessageError,
        match=r"\[1\] ends with a message at offset \d+ that has no watersmeet.next_offsets",
    ):
        once(river)


def test_a_partition_that_was_emptied_is_refused_since_it_may_have_said_more(river: River) -> None:
    delete_records(
        river.kafka, target(river), 1, Cluster(river.settings.kafka).bounds(target(river), 3)[1][1]
    )
    with pytest.raises(
        TopicChangedError, match=r"\[1\] ends at offset \d+ and holds no message any more"
    ):
        once(river)


def test_offsets_that_kafka_has_deleted_stop_it_unless_that_is_accepted(river: River) -> None:
    produce(river.kafka, origin(river), [(0, keyed("gone", 5000)), (0, keyed("there", 5001))])
    first = Cluster(river.settings.kafka).bounds(origin(river), 2)[0][1] - 1
    delete_records(river.kafka, origin(river), 0, first)
    with pytest.raises(
        DataLossError, match=rf"{origin(river)}\[0\] from {first - 1} to {first - 1}"
    ):
        once(river)
    river.config["kafka"]["on_data_loss"] = "continue"
    river.write()
    assert once(river)["tracking"]["records"] == 1


@pytest.mark.promise("C25")
@pytest.mark.fault("topics")
def test_a_topic_that_moved_with_records_and_offsets_is_the_same(river: River) -> None:
    """Also at the next start, when messages of before and after the move say where it stands."""
    make_again(river.kafka, origin(river), 2)
    assert once(river)["tracking"]["records"] == 0
    produce(river.kafka, origin(river), [(0, keyed("after", 5000))])
    assert once(river)["tracking"]["records"] == 1
    assert once(river)["tracking"]["records"] == 0


@pytest.mark.promise("C25")
@pytest.mark.fault("topics")
def test_nothing_is_written_of_a_topic_that_was_made_again_under_way(river: River) -> None:
    """It has more records than were read: its offsets go on as if it were the one before."""
    before = found_in(river, "tracking")
    produce(river.kafka, origin(river), [(0, keyed("next", 5000))])

    def made_again(point: str) -> None:
        if point == "publisher.begin":
            delete_topic(river.kafka, origin(river))
            create_topics(river.kafka, origin(river), partitions=2)
            produce(river.kafka, origin(river), [(0, keyed("other", n)) for n in range(9)])

    with points_reached(made_again), pytest.raises(TopicChangedError, match="made again while it"):
        once(river)
    assert found_in(river, "tracking") == before
    with pytest.raises(ConfigurationError, match="was written from "):
        once(river)


def other_topic(river: River) -> str:
    create_topics(river.kafka, f"{origin(river)}-2", partitions=2)
    river.config["sources"]["tracking"]["repartition"]["from"] = other = f"{origin(river)}-2"
    return (
        rf"was written from {origin(river).removesuffix('-2')} \(.*\), and `from` names {other}; "
        r"name that topic, too"
    )


def made_again(river: River) -> str:
    delete_topic(str(river.kafka), origin(river))
    until(
        lambda: not Cluster(river.settings.kafka).partition_counts([origin(river)]),
        "the end of the topic",
    )
    create_topics(river.kafka, origin(river), partitions=2)
    return rf"was written from {origin(river)} \(.*\), and `from` names {origin(river)} \("


def moved_with_other_values(river: River) -> str:
    make_again(river.kafka, origin(river), 2, lambda m: (b'{"k":"other","ts":1}', m.timestamp()[1]))
    return rf"was written from {origin(river)} \(.*\), and `from` names {origin(river)} \("


def moved_with_other_times(river: River) -> str:
    make_again(river.kafka, origin(river), 2, lambda m: (m.value(), m.timestamp()[1] + 1))
    return rf"was written from {origin(river)} \(.*\), and `from` names {origin(river)} \("


def no_topic(river: River) -> str:
    river.config["sources"]["tracking"]["repartition"]["from"] = "no-such-topic"
    return "there is no topic no-such-topic"


def other_count(river: River) -> str:
    for source in SOURCES:
        river.config["sources"][source]["repartition"]["partitions"] = 5
    return "has 3 partitions; name that number"


def nothing_to_do(river: River) -> str:
    for source in SOURCES:
        del river.config["sources"][source]["repartition"]
    return "none of them is repartitioned"


CHANGES = [
    other_topic,
    made_again,
    moved_with_other_values,
    moved_with_other_times,
    no_topic,
    other_count,
    nothing_to_do,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_configuration_that_does_not_fit_what_was_written_is_refused(
    river: River, change: Callable[[River], str]
) -> None:
    before = found_in(river, "tracking")
    sentence = change(river)
    river.write()
    with pytest.raises(ConfigurationError, match=sentence):
        once(river)
    assert found_in(river, "tracking") == before


def test_validate_says_what_is_missing_and_where_a_topic_would_refuse_records(river: River) -> None:
    assert check_kafka(river.settings) == []
    create_topics(
        river.kafka, f"{target(river)}-narrow", partitions=3, **{"max.message.bytes": "1000"}
    )
    river.config["sources"]["tracking"]["topic"] += "-narrow"
    river.write()
    found = {
        problem.what.removeprefix(target(river)): problem for problem in check_kafka(river.settings)
    }
    assert found[" has max.message.bytes=1000"].where == "sources.tracking.topic"
    no_topic(river)
    river.write()
    [problem] = check_kafka(river.settings)
    assert (problem.what, problem.where) == (
        "there is no topic no-such-topic",
        "sources.tracking.repartition.from",
    )


def test_an_origin_that_an_answer_lacks_is_missing_once_the_next_answer_lacks_it_too(
    river: River, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "CHECK_EVERY_S", 0.0)
    river.write()
    origins = OriginTopics(river.settings, "tracking")
    for _ in range(2):
        assert origins.poll()
        bounds = origins.bounds
        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "existing", lambda *_: {})
            assert origins.poll()
            assert origins.bounds == bounds
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "existing", lambda *_: {})
        with pytest.raises(ConfigurationError, match=f"there is no topic {origin(river)}"):
            origins.poll()


def test_kafkas_own_tools_show_how_much_is_written(river: River) -> None:
    group = f"watersmeet-{river.config['name']}-repartition"
    ends = {
        p: end for p, (_, end) in Cluster(river.settings.kafka).bounds(origin(river), 2).items()
    }
    assert committed(river.kafka, group, origin(river), 2) == ends


def test_metrics_and_lineage_follow_what_is_written_and_what_is_left(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), (2, 1), 3, max_offsets_per_batch=40)
    of_source = raws(river, (2, 1))
    for raw in of_source.values():
        raw.flow(1, 0)
    metrics, sent, events = Metrics(river.settings), tmp_path / "lineage.jsonl", list[Event]()
    with sending(
        river.settings.model_copy(update={"lineage": LineageSettings(file=str(sent))})
    ) as lineage:
        told = once(river, observers=[metrics, events.append, *lineage])
    written = {
        (event.topic, p): n
        for event in events
        if isinstance(event, LagObserved)
        for p, n in event.records.items()
    }
    assert set(written.values()) == {0}
    assert (
        max(n for event in events if isinstance(event, LagObserved) for n in event.records.values())
        > 0
    ), "there was something left"
    for source, row in told.items():
        labels = {"layer": "repartition", "topic": row["topic"], "outcome": "copied", "reason": ""}
        assert (
            metrics.registry.get_sample_value("watersmeet_records_total", labels)
            == row["records"]
            > 0
        )
        places = {"layer": "repartition", "topic": origin(river, source), "partition": "0"}
        assert metrics.registry.get_sample_value("watersmeet_lag_records", places) == 0
    found = [json.loads(line) for line in sent.read_text().splitlines()]
    assert {event["job"]["name"] for event in found} == {f"{river.config['name']}.repartition"}
    pairs = {(event["inputs"][0]["name"], event["outputs"][0]["name"]) for event in found}
    assert pairs == {(row["from"], row["topic"]) for row in told.values()}


def test_a_run_says_that_the_topic_is_made_by_a_repartition(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), (2, 1), 3)
    run = river.run("--once")
    assert run.wait() == 2
    assert "`watersmeet repartition` creates it: start that first" in run.said()


def test_the_command_says_what_was_written_to_people_and_programs(river: River) -> None:
    def answer(*words: str) -> str:
        program = [
            sys.executable,
            "-m",
            "watersmeet",
            "repartition",
            "--once",
            *words,
            "-c",
            str(river.file),
        ]
        return subprocess.run(
            program, capture_output=True, text=True, timeout=120, check=True, cwd=river.folder
        ).stdout

    [tracking, orders] = json.loads(answer("--json"))["sources"]
    assert (tracking["source"], tracking["from"], tracking["topic"]) == (
        "tracking",
        origin(river),
        target(river),
    )
    assert (orders["records"], set(orders["ends"]), set(orders["read"])) == (
        0,
        {"0", "1", "2"},
        {"0"},
    )
    assert target(river) in answer()


def test_validate_and_verify_name_a_record_of_another_source_that_is_not_where_its_key_belongs(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), (2, 1), 3)
    del river.config["sources"]["orders"]["repartition"]
    river.write()
    create_topics(kafka, target(river, "orders"), partitions=3)
    raw = Raw.of(kafka, origin(river), 2)
    raw.send(
        [(0, keyed("a", 1000)), (1, keyed("b", 1100)), (0, heartbeat(9000)), (1, heartbeat(9000))]
    )
    homes = {key: murmur2(key.encode()) % 3 for key in ("a", "b")}
    wrong = (homes["b"] + 1) % 3
    produce(
        kafka, target(river, "orders"), [(homes["a"], keyed("a", 1000)), (wrong, keyed("b", 1100))]
    )
    produce(kafka, target(river, "orders"), [(p, heartbeat(9000)) for p in range(3)])
    once(river)
    river.finish()
    [found] = verify(river.reader, river.settings, full=True)["problems"]
    [told] = check_keys(river.settings, river.reader)[0]
    for what, where in ((found["what"], found["where"]), (told.what, told.where)):
        assert what.startswith(
            f"the key 'b' belongs to partition {homes['b']}: this record never meets"
        )
        assert re.fullmatch(rf"{target(river, 'orders')}\[{wrong}\]@\d", where)


def test_what_was_refused_for_its_time_is_redriven_where_its_key_belongs_and_repartitioning_goes_on(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    river = confluence(kafka, tmp_path, name_of(request), (2, 2), 3)
    inputs = raws(river, (2, 2))
    for raw in inputs.values():  # Kafka's own timestamps are a day and more before
        raw.send([(n % 2, keyed(f"key {n}", 200_000_000 + n)) for n in range(8)])
    once(river)
    river.finish()
    assert (
        Redrive(river.reader, river.settings, "event_time_in_future").run(apply=True)["sent"] == 16
    )
    for source in SOURCES:
        produce(kafka, origin(river, source), [(p, heartbeat(300_000_000)) for p in (0, 1)])
    assert [row["records"] for row in once(river).values()] == [2, 2]
    river.finish()
    rows = river.reader.select(tables.MERGED, ["merge_key", "partition", "status"]).to_pylist()
    expected = {(f"key {n}", murmur2(f"key {n}".encode()) % 3, "timed_out") for n in range(8)}
    assert {tuple(row.values()) for row in rows} == expected
    assert river.broken_promises() == []
    with pytest.raises(
        ConfigurationError, match="--reason: tracking is repartitioned, and no key says where"
    ):
        Redrive(river.reader, river.settings, "undecodable")


@pytest.mark.promise("N6")
@pytest.mark.parametrize(
    ("of_partitions", "is_late"),
    [
        ([[("x", 1000), ("y", 0)], [("x", 1000), ("y", 0)]], []),
        ([[("x", 1000), ("y", 0)], [("y", 1000), ("x", 0)]], [("x", 0)]),
    ],
    ids=["alike", "crosswise"],
)
def test_a_record_is_late_by_repartition_only_where_its_tenant_lags_less_in_another_partition(
    kafka: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    of_partitions: list[list[tuple[str, int]]],
    is_late: list[tuple[str, int]],
) -> None:
    """What no order prevents (tests/property/test_repartition_tenants.py): each record is on time
    in its own partition."""
    river = confluence(kafka, tmp_path, name_of(request), (2, 1), 1)
    river.config["merge"] = merge_of((100, None, 2000))
    river.write()
    inputs = raws(river, (2, 1))
    for p, sent in enumerate(of_partitions):
        inputs["tracking"].send((p, keyed("a", time_ms, g=tenant)) for tenant, time_ms in sent)
    for raw in inputs.values():
        raw.beat(5000)
    once(river)
    river.finish()
    late = river.reader.select(tables.LATE, ["tenant", "event_time"])
    assert [tuple(row.values()) for row in late.to_pylist()] == is_late
    assert river.broken_promises() == []


# -- the whole pipeline


@pytest.mark.parametrize(
    ("counts", "partitions"), first_then_nightly([(((1, 2), (3,)), 3), ((3, 2), 4), ((4, 3), 2)])
)
def test_what_is_merged_of_repartitioned_topics_is_what_the_model_makes_of_them(
    kafka: str, tmp_path: Path, request: pytest.FixtureRequest, counts: Counts, partitions: int
) -> None:
    """And a key is never merged apart: the model's answer has it in one partition."""
    river = confluence(
        kafka,
        tmp_path,
        name_of(request),
        counts,
        partitions,
        max_offsets_per_batch=60,
        quarantine_limit="100%",
    )
    inputs = raws(river, counts)
    for n in range(2):
        for raw in inputs.values():
            raw.flow(n, 1000 * n)
        rows(river)
        river.finish()
    for raw in inputs.values():
        raw.beat(5000)
    rows(river)
    river.finish()
    cases = as_cases(
        kafka, {source: target(river, source) for source in SOURCES}, inputs, partitions
    )
    expected = expected_messages(cases)
    assert len(expected) > 20
    assert published(kafka, river.sink, partitions) == expected
    assert late_of(river.reader) == expected_late(cases)
    homes = {(message.key, message.partition) for message in expected}
    assert len(homes) == len({key for key, _ in homes})
    assert river.broken_promises() == []


def test_repartition_goes_on_where_retention_deletes_what_was_written_before_a_move(
    river: River,
) -> None:
    make_again(river.kafka, origin(river), 2)
    assert once(river)["tracking"]["records"] == 0
    produce(river.kafka, origin(river), [(0, keyed("after", 5000))])
    told = once(river)["tracking"]
    assert told["records"] == 1
    for p, read in told["read"].items():  # all of it is written
        delete_records(river.kafka, origin(river), p, read - (p == 0))
    produce(river.kafka, origin(river), [(0, keyed("later", 6000))])
    assert once(river)["tracking"]["records"] == 1

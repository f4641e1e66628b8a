"""`verify` on lakes of the merge model and a real broker: it accepts a healthy one, and finds each
promise broken by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake

from tests.audit.inputs import case_of, problems_in, richest_cases, settings_of, with_topics
from tests.support.cases import HOLE, SOURCES, Case, heartbeat, keyed, random_case
from tests.support.configurations import settings_for
from tests.support.model_lakes import ModelLake, Row, rewrite
from tests.support.topics import (
    CheckedProducer,
    Published,
    consume,
    create_topics,
    produce,
    produce_transaction,
)
from watersmeet.audit import evidence as audit_evidence
from watersmeet.audit import problems, verify_topics
from watersmeet.audit.evidence import read_evidence
from watersmeet.audit.problems import Report
from watersmeet.audit.verify import LOOKS, MOVING, check_tables, verify
from watersmeet.audit.verify_topics import read_topics
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import BatchPlan, Cursor
from watersmeet.core.silver import in_silver
from watersmeet.core.state import State
from watersmeet.errors import ConfigurationError, KafkaUnreachableError, WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import read_range
from watersmeet.lake import pieces, tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import batch_rows, decision_rows
from watersmeet.lake.published import topic_columns
from watersmeet.lake.table_reader import VersionGoneError
from watersmeet.running.planning import Planner
from watersmeet.settings import Settings

PLAIN = 18
"""So many partitions have the same known records; what is broken in one of them does not disturb
the others."""
RANDOM, IDLE, TRANSACTIONAL = range(PLAIN, PLAIN + 3), PLAIN + 3, PLAIN + 4
PARTITIONS = PLAIN + 5


MISSING = "the table does not exist, and without it the rows of this lake cannot be judged"


def plain_case() -> Case:
    """Clock 320: published are a (0), e (20), f (30) and b (60), open are c (300) and d (305),
    tracking@8 is late."""
    tracking = [
        *[keyed("a", 0), keyed("e", 20), keyed("f", 30), keyed("b", 60), heartbeat(55), b"{"],
        *[keyed("c", 300), keyed("d", 310), keyed("d", 150), keyed("c", 320), heartbeat(320)],
    ]
    case = case_of(tracking, [keyed("a", 10), keyed("d", 305), keyed("d", 315), heartbeat(320)])
    return replace(case, arrivals=[*SOURCES * 4, *["tracking"] * 7])


@dataclass
class River:
    """A healthy lake and its sink."""

    kafka: str
    settings: Settings

    def copy(self, folder: Path, **overrides: Any) -> Settings:
        """Another lake with the same content, to break."""
        shutil.copytree(str(self.settings.lake), folder / "lake", dirs_exist_ok=True)
        return settings_of(self.kafka, folder, "verified", **overrides)


@pytest.fixture(scope="module")
def river(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> River:
    settings = with_topics(kafka, tmp_path_factory.mktemp("verified"), "verified", PARTITIONS)
    cases = dict.fromkeys(range(PLAIN), plain_case()) | dict(
        zip(RANDOM, richest_cases(3), strict=True)
    )
    cases[IDLE] = case_of(
        [keyed("i", t) for t in (10, 50, 200, 400)],
        [keyed("i", 20)],
        IdleDecision(0, 200),
        IdleDecision(0, 400),
    )
    transactions = [keyed("t", 1), HOLE, HOLE, HOLE, keyed("t", 3), heartbeat(900)]
    cases[TRANSACTIONAL] = case_of(transactions, [keyed("t", 5), heartbeat(1000)])
    for source in SOURCES:
        produce(
            kafka,
            f"verified_{source}",
            [
                (p, v)
                for p, c in cases.items()
                for v in c.values[source]
                if HOLE not in c.values[source]
            ],
        )
    for values, commit in (
        ([keyed("t", 1)], True),
        ([keyed("t", 2)], False),
        ([keyed("t", 3), heartbeat(900)], True),
    ):
        produce_transaction(kafka, "verified_tracking", values, TRANSACTIONAL, commit=commit)
    lake = ModelLake(settings, cases)
    for share in (0.3, 0.7):
        lake.arrive(share)
        lake.merge()
    lake.arrive()
    lake.decide()
    lake.merge()
    lake.publish(name_of_sink(settings))
    return River(kafka, settings)


def name_of_sink(settings: Settings) -> str:
    """The sink as `published` has it."""
    return Cluster(settings.kafka).identified(settings.publish.topic)


def reader_of(settings: Settings) -> DeltaRsReader:
    return DeltaRsReader(Lake(settings))


def problems_of(settings: Settings, *, full: bool = True, **options: Any) -> list[tuple[str, str]]:
    found = verify(reader_of(settings), settings, full=full, **options)
    assert found["ok"] == (not found["problems"])
    assert all(
        problem.keys() == {"what", "where", "fix"} and problem["fix"]
        for problem in found["problems"]
    )
    return sorted((problem["where"], problem["what"]) for problem in found["problems"])


def the_same(found: Sequence[tuple[str, str]], expected: Sequence[tuple[str, str]]) -> None:
    """Places exactly; of what is wrong there, the words that matter."""
    assert [where for where, _ in found] == sorted(where for where, _ in expected), found
    left = list(found)
    for where, words in expected:
        match = next((each for each in left if each[0] == where and words in each[1]), None)
        assert match is not None, (where, words, left)
        left.remove(match)


@pytest.mark.parametrize("one_in", [1, 3], ids=["all keys", "a sample"])
def test_a_healthy_lake_keeps_every_promise(
    river: River, monkeypatch: pytest.MonkeyPatch, one_in: int
) -> None:
    if one_in > 1:
        monkeypatch.setattr(audit_evidence, "SAMPLED_RECORDS", 50)
        assert (
            read_evidence(reader_of(river.settings), river.settings, PARTITIONS, full=False).one_in
            > 1
        )
    assert problems_of(river.settings, full=one_in == 1) == []


def test_groups_of_any_size_find_the_same(
    river: River, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = river.copy(tmp_path)
    break_all(settings)
    monkeypatch.setattr(problems, "SHOWN", 100)
    whole = problems_of(settings)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4_000)
    assert problems_of(settings) == whole


def record(source: str, partition: int, offset: int) -> str:
    return f"bronze_{source}: verified_{source}[{partition}]@{offset}"


def row(partition: int, key: str, event_time: int) -> str:
    return f"silver: partition {partition}, key {key!r}, event_time {event_time}"


Change = Callable[[Row], Row | list[Row] | None]


def twice(found: Row) -> list[Row]:
    return [found, found]


def gone(found: Row) -> None:
    return None


def altered(**columns: Any) -> Change:
    return lambda found: {
        **found,
        **{name: value(found) if callable(value) else value for name, value in columns.items()},
    }


def other_values(found: Row) -> list[Row]:
    return [{**part, "value": "{}"} for part in found["tracking"]]


TRACE = "silver: the record"
SMALLEST = "epoch 0 and generation 0; the batch before it is 1 and ended at"

BREAKS: list[tuple[str, dict[str, Any], Change, list[tuple[str, str]]]] = [
    (
        "bronze_tracking",
        {"partition": 0, "offset": 4},
        twice,
        [(record("tracking", 0, 4), "in bronze 2 times")],
    ),
    (
        "bronze_tracking",
        {"partition": 1, "offset": 4},
        gone,
        [(record("tracking", 1, 4), "lacks a record that Kafka has")],
    ),
    (
        tables.MERGED,
        {"partition": 1, "merge_key": "d"},
        altered(tracking=other_values),
        [(row(1, "d", 305), "tracking@7 (310, {})")],
    ),
    (
        tables.LATE,
        {"partition": 2},
        gone,
        [
            (record("tracking", 2, 8), f"{TRACE} is missing"),
            (
                row(2, "d", 150),
                "the tables have nothing, and the merge model late from 150 to 310 of tracking@8",
            ),
        ],
    ),
    (
        tables.MERGED,
        {"partition": 2, "merge_key": "c"},
        altered(status="timed_out", valid=False, invalid_reason="predicate"),
        [
            (row(2, "c", 300), "from 60 to 320; its time is null, and it could be joined"),
            (row(2, "c", 300), "the tables have timed_out from 300 to 320, due 400 of tracking@6"),
            (row(2, "c", 300), "valid is False (predicate), and must be True (None)"),
        ],
    ),
    (
        tables.MERGED,
        {"partition": 3, "merge_key": "d"},
        altered(orders=lambda found: found["orders"][:1]),
        [
            (record("orders", 3, 2), f"{TRACE} is missing"),
            (row(3, "d", 305), "and the merge model open from 305 to 315"),
        ],
    ),
    (
        tables.MERGED,
        {"partition": 3, "merge_key": "e"},
        gone,
        [
            (record("tracking", 3, 1), f"{TRACE} is missing"),
            (
                row(3, "e", 20),
                "the tables have nothing, and the merge model timed_out from 20 to 20, due 120, "
                "closed at 121 of tracking@1",
            ),
            (
                "verified[3]@1: seq 1, '3/20/e'",
                "no row of silver has this message: closed_at 121, due 120, merge_key 'e'",
            ),
        ],
    ),
    (
        tables.MERGED,
        {"partition": 4, "merge_key": "c"},
        twice,
        [
            (record("tracking", 4, 6), f"{TRACE} appears 2 times"),
            (record("tracking", 4, 9), f"{TRACE} appears 2 times"),
            ("silver: partition 4, key 'c'", "2 open rows for one key"),
            (row(4, "c", 300), "2 rows with the same partition, key and event time"),
            (row(4, "c", 300), "and the merge model nothing"),
        ],
    ),
    (
        tables.MERGED,
        {"partition": 4, "merge_key": "d"},
        altered(event_time=304),
        [(row(4, "d", 304), "and the merge model open from 305 to 315")],
    ),
    (
        tables.MERGED,
        {"partition": 5, "merge_key": "f"},
        altered(status="open", valid=None),
        [
            (
                row(5, "f", 30),
                "the row is open although the clock is 320, and it can be joined until 130",
            ),
            (row(5, "f", 30), "the tables have open from 30 to 30"),
            (
                "verified[5]@2: seq 2, '5/30/f'",
                "no row of silver has this message: closed_at 131, due 130, merge_key 'f'",
            ),
        ],
    ),
    (
        tables.PROGRESS,
        {"partition": 6, "source": "orders", "clock": 320},
        altered(clock=321, head=321),
        [
            ("progress: batch 2, verified_orders[6]", "is 321, and bronze gives 320"),
            ("progress: batch 2, verified_orders[6]", f"the clock 321, {SMALLEST}"),
        ],
    ),
    (
        tables.PROGRESS,
        {"partition": 7, "clock": 320},
        altered(
            until_offset=lambda found: 3 if found["source"] == "orders" else found["until_offset"],
            head=lambda found: 315 if found["source"] == "orders" else found["head"],
            position=lambda found: 315 if found["source"] == "orders" else found["position"],
            clock=315,
        ),
        [
            (
                "progress: batch 2, verified_tracking[7]",
                "the position 320 with the head 320, the clock 315",
            ),
            (row(7, "c", 300), "and the merge model open from 300 to 300, due 400 of tracking@6"),
        ],
    ),
    (
        tables.PROGRESS,
        {"partition": 8, "batch": 1},
        gone,
        [
            (f"progress: batch {batch}, verified_{source}[8]", words)
            for source in SOURCES
            for batch, words in ((0, "the next one is missing"), (2, "the batch before it is 0"))
        ],
    ),
    (
        tables.PROGRESS,
        {"partition": 9, "source": "tracking", "clock": 320},
        altered(clock=321),
        [("progress: batch 2, verified_tracking[9]", f"the clock 321, {SMALLEST}")],
    ),
    (
        tables.PROGRESS,
        {"partition": 10, "clock": 320},
        altered(clock=321),
        [
            (f"progress: batch 2, verified_{source}[10]", f"the clock 321, {SMALLEST}")
            for source in SOURCES
        ],
    ),
    (
        tables.PROGRESS,
        {"partition": 11, "source": "orders", "clock": 320},
        altered(head=321),
        [("progress: batch 2, verified_orders[11]", "is 321, and bronze gives 320")],
    ),
    (
        tables.PROGRESS,
        {"partition": 12, "batch": 0},
        altered(clock=lambda found: found["clock"] + 1, head=lambda found: found["head"] + 1),
        [
            ("progress: batch 0, verified_orders[12]", "is 306, and bronze gives"),
            ("progress: batch 0, verified_tracking[12]", "is 21, and bronze gives"),
            ("progress: batch 0, verified_tracking[12]", "the position 20 with the head 21"),
        ],
    ),
    (
        tables.PROGRESS,
        {"partition": 13, "source": "orders", "batch": 1},
        altered(position=lambda found: found["position"] - 1),
        [("progress: batch 1, verified_orders[13]", "is 9, and bronze gives 10")],
    ),
    (
        tables.PROGRESS,
        {"partition": 14, "source": "tracking", "batch": 1},
        altered(from_offset=lambda found: found["from_offset"] + 1),
        [("progress: batch 1, verified_tracking[14]", "from offset 3 to the position 60")],
    ),
    (
        tables.MERGED,
        {"partition": 15, "merge_key": "b"},
        altered(batch=0),
        [(row(15, "b", 60), "the timed_out row is of batch 0, which takes the clock from")],
    ),
    (
        tables.PROGRESS,
        {"partition": 16, "source": "orders", "batch": 1},
        gone,
        [
            ("progress: batch 0, verified_orders[16]", "the next one is missing"),
            ("progress: batch 2, verified_orders[16]", "the batch before it is 0"),
        ],
    ),
]


def break_all(settings: Settings) -> None:
    for table in {table for table, _, _, _ in BREAKS}:
        mine = [(which, change) for name, which, change, _ in BREAKS if name == table]

        def broken(
            found: Row, mine: list[tuple[dict[str, Any], Change]] = mine
        ) -> Row | list[Row] | None:
            changes = [
                change
                for which, change in mine
                if all(found[name] == value for name, value in which.items())
            ]
            assert len(changes) < 2
            return changes[0](found) if changes else found

        rewrite(settings, table, broken)


@pytest.mark.promise("A1")
@pytest.mark.fault("damage")
def test_every_promise_that_is_broken_in_the_lake_is_found(
    river: River, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 50)
    settings = river.copy(tmp_path)
    break_all(settings)
    the_same(problems_of(settings), [problem for _, _, _, told in BREAKS for problem in told])


def test_a_tombstone_may_be_skipped_and_nothing_else(kafka: str, tmp_path: Path) -> None:
    skips = {f"sources__{source}__tombstone": "skip" for source in SOURCES}
    settings = with_topics(kafka, tmp_path, "skipping", 1, **skips)
    tracking = [None, keyed("a", 0), None, keyed("b", 90), b"{", None, heartbeat(400), None]
    cases = {0: case_of(tracking, [None, keyed("a", 10), heartbeat(400)])}
    for source in SOURCES:
        produce(kafka, f"skipping_{source}", [(0, value) for value in cases[0].values[source]])
    lake = ModelLake(settings, cases)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    lake.publish(name_of_sink(settings))
    assert problems_of(settings) == []
    unread = {"event_time": None, "merge_key": None}
    rewrite(
        settings,
        "bronze_tracking",
        lambda found: {**found, **unread} if found["offset"] == 3 else found,
    )
    found = problems_of(settings)
    assert (
        "bronze_tracking: skipping_tracking[0]@3",
        "a record with a value was neither read nor refused",
    ) in found


@pytest.mark.promise("A1")
@pytest.mark.fault("damage")
def test_rows_of_places_that_the_topics_lack_are_found(river: River, tmp_path: Path) -> None:
    """A partition, a topic or a source that is not there, in any table."""
    settings = river.copy(tmp_path)

    def stray(table: str, **columns: Any) -> str:
        rewrite(
            settings,
            table,
            lambda found: [found, {**found, **columns}] if found["partition"] == 0 else found,
        )
        return f"{table}: "

    for table in (tables.MERGED, tables.LATE, tables.PROGRESS):
        stray(table, partition=PARTITIONS)
    places = ["silver: ", stray(tables.bronze("tracking"), partition=PARTITIONS)]
    places += [
        stray(tables.PUBLISHED, partition=PARTITIONS),
        stray(tables.bronze("orders"), topic="elsewhere", offset=77),
    ]
    stray(tables.LATE, source="nobody")
    found = [
        where
        for where, what in problems_of(settings)
        if "rows that belong to no partition of the topics" in what
    ]
    assert {place[: place.index(": ") + 2] for place in found} == set(places)
    assert f"bronze_tracking: topic verified_tracking, partition {PARTITIONS}" in found
    for source, topic in ((None, None), *settings.inputs, ("nobody", "verified_tracking")):
        partition = 0 if source == "nobody" else PARTITIONS
        assert f"silver: source {source}, topic {topic}, partition {partition}" in found


# -- the sink


def broken_sink(messages: list[Any]) -> list[tuple[Any, ...]]:
    """A sink as (partition, key, value, timestamp, headers), with something wrong in every
    partition."""
    rows: list[tuple[Any, ...]] = []
    for p in range(PARTITIONS):
        mine = [
            (p, m.key(), m.value(), m.timestamp()[1], dict(m.headers()))
            for m in messages
            if m.partition() == p
        ]
        rows += BROKEN_SINKS[p](mine) if p < len(BROKEN_SINKS) else mine
    return rows


def with_seq(message: tuple[Any, ...], seq: int) -> tuple[Any, ...]:
    return (*message[:4], message[4] | {"watersmeet.seq": str(seq).encode()})


def of_an_earlier_version(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """It did not say when a timeout closed a merge record."""
    names = ("watersmeet.seq", "watersmeet.id")
    return (*message[:4], {name: message[4][name] for name in names})


BROKEN_SINKS: list[Callable[[list[Any]], list[Any]]] = [
    lambda m: [m[0], *m[2:]],
    lambda m: [m[0], m[1], m[1], *m[2:]],
    lambda m: [m[0], with_seq(m[2], 1), with_seq(m[1], 2), m[3]],
    lambda m: [m[0], (*m[1][:2], b"{}", *m[1][3:]), *m[2:]],
    lambda m: [*m, (*m[3][:4], {})],
    lambda m: m[:3],
    lambda m: [m[0], (*m[1][:3], 21, m[1][4]), *m[2:]],
    lambda m: [m[0], (*m[1][:4], m[1][4] | {"watersmeet.id": b"7/21/e"}), *m[2:]],
    lambda m: [m[0], with_seq(m[2], 1), with_seq(m[3], 2)],
    lambda m: [m[0], (*m[1][:4], m[1][4] | {"watersmeet.closed_at": b"122"}), *m[2:]],
    lambda m: [*map(of_an_earlier_version, m[:2]), *m[2:]],
]

IN_BROKEN_SINKS = [
    ("broken[0]@1: seq 2, '0/30/f'", "seq 2 after 0: a gap"),
    ("broken[0]: '0/20/e'", "missing in the sink"),
    ("broken[1]@2: seq 1, '1/20/e'", "seq 1 after 1: a repeat"),
    ("broken[2]@2: seq 2, '2/20/e'", "2/20/e is not in the order of publication"),
    ("broken[3]@1: seq 1, '3/20/e'", "value differs from the row of silver"),
    ("broken[4]@4", "not a message of Watersmeet"),
    ("broken[5]@2: seq 2, '5/30/f'", "the last message has seq 2, and 3 was published"),
    ("broken[6]@1: seq 1, '6/20/e'", "timestamp differs from the row of silver"),
    ("broken[7]@1: seq 1, '7/21/e'", "id differs from the row of silver"),
    ("broken[8]: '8/20/e'", "missing in the sink"),
    ("broken[8]@2: seq 2, '8/60/b'", "the last message has seq 2, and 3 was published"),
    ("broken[9]: '9/20/e'", "missing in the sink"),
    (
        "broken[9]@1: seq 1, '9/20/e'",
        "no row of silver has this message: closed_at 122, due 120, merge_key 'e'",
    ),
]


@pytest.mark.promise("A1")
@pytest.mark.fault("damage")
def test_every_promise_that_is_broken_in_the_sink_is_found(
    river: River, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 50)
    create_topics(river.kafka, "broken", partitions=PARTITIONS)
    producer = CheckedProducer(river.kafka)
    for p, key, value, timestamp, headers in broken_sink(
        consume(river.kafka, "verified", PARTITIONS)
    ):
        producer.produce(
            "broken", value, key, p, timestamp=timestamp, headers=list(headers.items())
        )
    assert producer.flush(30) == 0
    settings = river.copy(tmp_path, sink="broken")
    name = name_of_sink(settings)
    rewrite(settings, tables.PUBLISHED, altered(**topic_columns(name)))
    the_same(problems_of(settings, full=False), IN_BROKEN_SINKS)
    for delivery, forgiven in (
        ("at_least_once", ("a repeat",)),
        ("at_most_once", ("a gap", "missing in the sink", "was published")),
    ):
        lenient = settings_of(
            river.kafka, tmp_path, "verified", "broken", publish__delivery=delivery
        )
        left = [(where, words) for where, words in IN_BROKEN_SINKS if not words.endswith(forgiven)]
        the_same(problems_of(lenient, full=False), left)


def test_what_was_given_up_and_is_sent_again_behind_later_messages_breaks_no_promise(
    river: River, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `at_least_once` may leave a sink: no gap, and repeats with the same number and id."""
    monkeypatch.setattr(verify_topics, "read_range", partial(read_range, max_records=1))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1_000)
    create_topics(river.kafka, "repaired", partitions=PARTITIONS)
    producer = CheckedProducer(river.kafka)
    found = consume(river.kafka, "verified", PARTITIONS)
    for p in range(PARTITIONS):
        mine = [message for message in found if message.partition() == p]
        given_up = p % 3
        for m in [*mine[:given_up], *mine[given_up + 1 :], *mine[given_up:]]:
            key, value, time = m.key(), m.value(), m.timestamp()[1]
            producer.produce("repaired", value, key, p, timestamp=time, headers=m.headers())
    assert producer.flush(30) == 0
    settings = river.copy(tmp_path, sink="repaired")
    rewrite(settings, tables.PUBLISHED, altered(**topic_columns(name_of_sink(settings))))
    more = {"publish__delivery": "at_least_once"}
    assert problems_of(settings_of(river.kafka, tmp_path, "verified", "repaired", **more)) == []


def test_without_kafka_nothing_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_for(tmp_path)
    with pytest.raises(KafkaUnreachableError, match=r"127\.0\.0\.1:1"):
        verify(reader_of(settings), settings, timeout_s=0.5)


@pytest.mark.parametrize("is_gone", [False, True], ids=["it moves", "its versions go"])
def test_a_lake_that_never_stands_still_is_looked_at_so_often_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    looks = []

    def look(reader: DeltaRsReader, settings: Settings, *_: Any, **__: Any) -> Any:
        looks.append(settings)
        if is_gone:
            raise VersionGoneError(tables.SILVER, 3)
        return {"ok": False, "problems": [], "notes": ["one"]}, None

    monkeypatch.setattr("watersmeet.audit.verify._check_once", look)
    monkeypatch.setattr("watersmeet.audit.verify._is_changing", lambda _: True)
    settings = settings_for(tmp_path)
    if is_gone:
        with pytest.raises(WatersmeetError, match="removed during each of 10 looks"):
            verify(reader_of(settings), settings)
    else:
        assert verify(reader_of(settings), settings)["notes"] == ["one", MOVING]
    assert len(looks) == LOOKS


def test_a_lake_that_is_not_there_yet_breaks_nothing_and_is_not_made(
    river: River, tmp_path: Path
) -> None:
    settings = settings_of(river.kafka, tmp_path, "verified", "nowhere", kafka__start="latest")
    note = f"there is no lake at {Lake(settings).location}: nothing was checked"
    assert verify(reader_of(settings), settings) == {"ok": True, "problems": [], "notes": [note]}
    assert list(tmp_path.iterdir()) == []


def test_topics_with_messages_of_a_lake_that_is_not_there_are_kept_and_named(
    river: River, tmp_path: Path
) -> None:
    settings = river.settings.model_copy(update={"lake": str(tmp_path / "nowhere")})
    found = verify(reader_of(settings), settings, full=True)
    [problem] = found["problems"]
    assert problem["where"] == settings.publish.topic
    assert "`kafka.start: sink`" in problem["fix"]
    assert len(found["notes"]) == 1


@pytest.mark.promise("A1")
@pytest.mark.fault("lost")
def test_a_lake_with_rows_is_not_sound_without_the_tables_of_what_it_has_done(
    kafka: str, tmp_path: Path
) -> None:
    lake = ModelLake(with_topics(kafka, tmp_path, "bereft"), {0: plain_case()})
    lake.arrive()
    lake.merge()
    gone = [tables.PUBLISHED, tables.JOURNAL, tables.ERASED, tables.SILVER]
    for count, table in enumerate(gone, 1):
        shutil.rmtree(tmp_path / "lake" / table)
        found = problems_of(lake.settings)
        assert {where for where, what in found if what == MISSING} == set(gone[:count])


def test_a_lake_without_rows_needs_no_table_yet(river: River, tmp_path: Path) -> None:
    settings = settings_of(river.kafka, tmp_path, "verified", "nowhere", kafka__start="latest")
    ModelLake(settings, {0: plain_case()})
    shutil.rmtree(tmp_path / "lake" / tables.PUBLISHED)
    assert verify(reader_of(settings), settings) == {"ok": True, "problems": []}


# -- resets and recoveries


def test_clocks_of_all_batches_are_looked_at(tmp_path: Path) -> None:
    lake = ModelLake(settings_for(tmp_path), {0: plain_case()})
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        lake.arrive(share)
        lake.merge()
    assert problems_in(lake) == []
    rewrite(
        lake.settings,
        tables.PROGRESS,
        lambda found: {**found, "clock": 1} if found["batch"] == 2 else found,
    )
    for full in (False, True):
        assert [
            problem
            for problem in problems_in(lake, full=full)
            if problem.startswith("progress: batch 2, ")
            and ", the clock 1, " in problem
            and problem.endswith("the smallest head is 60")
        ] != []


@pytest.mark.parametrize("name", ["due", "closed_at"])
def test_a_wrong_time_of_closing_is_found_where_no_message_says_it(
    tmp_path: Path, name: str
) -> None:
    lake = ModelLake(settings_for(tmp_path), {0: plain_case()})
    lake.arrive()
    lake.merge()
    assert problems_in(lake) == []
    rewrite(
        lake.settings,
        tables.MERGED,
        lambda row: {**row, name: row[name] + 1} if row["merge_key"] == "b" else row,
    )
    found = problems_in(lake)
    assert sum("due 16" in problem and "closed at 16" in problem for problem in found) == 1


@pytest.mark.promise("A3")
@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize("records", [5, 1000])
def test_what_is_planned_from_bronze_is_what_bronze_gives(tmp_path: Path, records: int) -> None:
    """However batches are cut, with decisions of the idle policy."""
    cases = dict(enumerate([*richest_cases(3), *(random_case(seed) for seed in range(3))]))
    cases[6] = case_of(
        [keyed("i", t) for t in (10, 50, 200, 400)],
        [keyed("i", 20)],
        IdleDecision(0, 200),
        IdleDecision(0, 400),
    )
    lake = ModelLake(
        settings_for(tmp_path, merge__max_records_per_batch=records * 2 * len(cases)), cases
    )
    planner = Planner(
        lake.reader,
        lake.settings,
        State(0, dict.fromkeys(lake.tps, Cursor()), {}, lake.settings.merge.rules),
        2**24,
    )
    plans: list[BatchPlan] = []

    def drain() -> None:
        while (plan := planner.next()) is not None:
            planner.done(plan)
            plans.append(plan)

    for share in (0.2, 0.5, 1.0):
        lake.arrive(share)
        drain()
    decided = [
        (lake.tp_of(source, p), decision)
        for p, case in cases.items()
        for source, decisions in case.decisions.items()
        for decision in decisions
    ]
    planner.state = planner.state.deciding(decided)
    rows = [("idle", decision_rows(decided, 0, len(plans), 0))]
    drain()
    rows += [("batch", batch_rows(plan, 1 + plan.batch)) for plan in plans]
    for status, of_status in rows:
        of_silver = in_silver(of_status, status, lake.lake.schema(tables.SILVER))
        write_deltalake(lake.lake.address(tables.SILVER), of_silver, mode="append")
    evidence, report = read_evidence(lake.reader, lake.settings, len(cases)), Report()
    assert evidence.last_batch == len(plans) - 1
    check_tables(evidence, report)
    assert list(report["batches"].described()) == []


@pytest.mark.parametrize("first", [0, 4, 8])
def test_resets_and_a_recovery_are_no_broken_promises(tmp_path: Path, first: int) -> None:
    lake = ModelLake(settings_for(tmp_path), dict(enumerate(richest_cases(first + 4)[first:])))
    lake.recover(
        (p, r.key, r.event_time)
        for p, case in lake.cases.items()
        for r in case.merged().published_order()[:3]
    )
    for share, by in ((0.4, 3), (0.8, -6), (1.0, 0)):
        lake.arrive(share)
        lake.merge()
        if by:
            lake.arrive(min(1.0, share + 0.2))  # records are passed over that bronze has
            lake.jump(by)
    assert lake.number == 2
    assert {row["invalid_reason"] for row in lake.rows} == {None, "reset"}
    assert [problems_in(lake, generation=number) for number in range(3)] == [[], [], []]


@pytest.mark.promise("A3")
@pytest.mark.fault("jumps")
@pytest.mark.parametrize(
    "sources",
    [(), pytest.param(("tracking",), marks=pytest.mark.long), ("orders",)],
    ids=["all", "tracking", "orders"],
)
@pytest.mark.parametrize("is_recovered", [False, True], ids=["a later start", "a recovery"])
def test_a_jump_back_before_a_lakes_beginning_breaks_no_promise(
    tmp_path: Path, is_recovered: bool, sources: tuple[str, ...]
) -> None:
    """What it reads for the first time was not there for what was merged before it."""
    lake = ModelLake(settings_for(tmp_path), dict(enumerate(richest_cases(3))))
    if is_recovered:
        out = [
            (p, r.key, r.event_time)
            for p, case in lake.cases.items()
            for r in case.merged().published_order()[:4]
        ]
        lake.recover(out, dict.fromkeys(lake.tps, 7))
    else:
        lake.start(7)
    lake.arrive(0.7)
    lake.merge()
    assert any(row["status"] == "timed_out" for row in lake.rows)
    lake.jump(-1000, *sources)
    lake.arrive(0.8)
    lake.merge()
    assert problems_in(lake) == []
    lake.jump(2)
    lake.arrive()
    lake.merge()
    assert problems_in(lake) == []
    lake.jump(-5)
    lake.merge()
    assert problems_in(lake) == []


def test_after_a_reset_an_open_row_may_have_the_place_of_a_finished_one(tmp_path: Path) -> None:
    case = case_of(
        [keyed("a", 10), heartbeat(500), keyed("a", 10)], [heartbeat(500), heartbeat(20)]
    )
    case = replace(case, arrivals=["tracking", "tracking", "orders", "tracking", "orders"])
    lake = ModelLake(settings_for(tmp_path), {0: case})
    lake.arrive(0.6)
    lake.merge()
    lake.jump(0)
    lake.arrive()
    lake.merge()
    assert sorted(row["status"] for row in lake.rows) == ["open", "timed_out"]
    assert problems_in(lake) == []


def test_what_a_jump_back_reads_again_must_be_there(kafka: str, tmp_path: Path) -> None:
    """In bronze, although the start passed it over, and in an outcome."""
    settings = with_topics(kafka, tmp_path, "again")
    case = case_of(
        [keyed(key, time) for key, time in zip("abcdef", range(0, 600, 100), strict=True)],
        [heartbeat(1000)],
    )
    for source in SOURCES:
        produce(kafka, f"again_{source}", [(0, value) for value in case.values[source]])
    lake = ModelLake(settings, {0: case})
    lake.start(1)
    lake.arrive()
    lake.merge()
    lake.jump(-1000)
    lake.merge()
    assert problems_of(settings) == []
    rewrite(
        settings, tables.bronze("tracking"), lambda found: None if found["offset"] == 0 else found
    )
    rewrite(settings, tables.MERGED, lambda found: None if found["merge_key"] == "b" else found)
    of_record = "bronze_tracking: again_tracking[0]@"
    missing = [f"{of_record}0", f"{of_record}0", f"{of_record}1", row(0, "a", 0), row(0, "b", 100)]
    assert [where for where, _ in problems_of(settings)] == [
        f"generation 1, {where}" for where in missing
    ]


def test_every_generation_is_looked_at_where_all_is_wanted_and_else_the_newest(
    kafka: str, tmp_path: Path
) -> None:
    settings = with_topics(kafka, tmp_path, "generations")
    case = case_of(
        [keyed(key, time) for key, time in zip("abcdef", range(0, 600, 100), strict=True)],
        [heartbeat(1000)],
    )
    for source in SOURCES:
        produce(kafka, f"generations_{source}", [(0, value) for value in case.values[source]])
    lake = ModelLake(settings, {0: case})
    lake.arrive()
    lake.merge()
    lake.jump(-3)
    lake.merge()
    assert problems_of(settings) == []
    first = DeltaRsReader(Lake(settings)).summary(
        tables.MERGED, [], {"rows": ("count", "*")}, [[("batch", "=", 0)]]
    )
    assert first["rows"].to_pylist() == [6]
    rewrite(
        settings,
        tables.MERGED,
        lambda found: None if (found["merge_key"], found["batch"]) == ("b", 0) else found,
    )
    found = verify(reader_of(settings), settings, full=True)["problems"]
    assert {problem["where"] for problem in found} == {
        f"generation 0, {where}"
        for where in ("bronze_tracking: generations_tracking[0]@1", row(0, "b", 100))
    }
    assert verify(reader_of(settings), settings, full=True, generation=0)["problems"] == found
    assert verify(reader_of(settings), settings, full=False)["ok"]
    assert verify(reader_of(settings), settings, full=True, generation=1)["ok"]
    with pytest.raises(ConfigurationError, match="no generation 2; the newest is 1"):
        verify(reader_of(settings), settings, generation=2)


def sink_problems(lake: ModelLake) -> list[tuple[str, str]]:
    """What is found in the sink alone."""
    report = Report()
    sink = read_topics(lake.reader, lake.settings, 1, [lake.settings.publish.topic])
    check_tables(read_evidence(lake.reader, lake.settings, 1), report, sink)
    return [(problem.where, problem.what) for problem in report["sink"].problems]


def test_a_record_in_two_messages_is_found_in_whatever_generations_they_are(
    kafka: str, tmp_path: Path
) -> None:
    settings = with_topics(kafka, tmp_path, "two_messages")
    beats = [
        keyed(key, time)
        for key, time in (("a", 0), ("b", 150), ("c", 300), ("d", 450), ("e", 600), ("f", 1000))
    ]
    lake = ModelLake(settings, {0: case_of(beats, [heartbeat(1000)])})
    sink = name_of_sink(settings)
    lake.arrive()
    lake.merge()
    lake.publish(sink, most=2)
    lake.jump(-4)
    lake.merge()
    lake.publish(sink)
    assert sink_problems(lake) == []

    def with_the_first(found: Row) -> Row:
        more = (
            [{**part, "offset": 0} for part in found["tracking"]]
            if found["merge_key"] == "d"
            else []
        )
        return {**found, "tracking": [*found["tracking"], *more]}

    rewrite(settings, tables.MERGED, with_the_first)
    [(where, what)] = [each for each in sink_problems(lake) if "messages" in each[1]]
    assert where == "silver: two_messages_tracking[0]@0"
    assert what == "the record is in 2 messages"


def test_after_a_jump_back_the_sink_is_compared_from_there_on(kafka: str, tmp_path: Path) -> None:
    """What was published before the jump is neither missing nor unknown; what comes after it is
    compared again."""
    settings = with_topics(kafka, tmp_path, "jumped")
    beats = [
        keyed(key, time)
        for key, time in (("a", 0), ("b", 150), ("c", 300), ("d", 450), ("e", 600), ("f", 1000))
    ]
    lake = ModelLake(settings, {0: case_of(beats, [heartbeat(1000)])})
    lake.arrive()
    lake.merge()
    lake.publish(name_of_sink(settings))
    lake.jump(-3)
    lake.merge()
    assert problems_in(lake) == []
    assert sink_problems(lake) == []


@pytest.mark.parametrize("is_reset", [False, True], ids=["a recovery", "a jump back"])
def test_what_sorts_behind_the_last_message_before_a_new_beginning_is_compared(
    kafka: str, tmp_path: Path, is_reset: bool
) -> None:
    """Also where it has the same event time, and a larger key."""
    name = f"order_{is_reset}".lower()
    settings = with_topics(kafka, tmp_path, name)
    values = [
        keyed(key, time)
        for key, time in (("a", 0), ("b", 150), ("c", 150), ("d", 150), ("e", 600), ("f", 1000))
    ]
    lake = ModelLake(settings, {0: case_of(values, [heartbeat(1000)])})
    sink = name_of_sink(settings)
    if is_reset:
        lake.arrive()
        lake.merge()
        lake.publish(sink, most=2)
        lake.jump(-4)
    else:
        for seq, (key, time) in enumerate([("a", 1), ("b", 150)]):
            message = Published(0, key.encode(), time, b"lost", seq, f"0/{time}/{key}")
            closing = {"closed_at": time + 101, "tenant": "", "due": time + 100}
            lake.closing[0, message.id] = {"event_time": time, "merge_key": key, **closing}
            lake.send([message])
        lake.recover([(0, "b", 150)], dict.fromkeys(lake.tps, 0))
    lake.arrive()
    lake.merge()
    lake.publish(sink)
    assert [(m.seq, m.key) for m in lake.out[0]] == list(enumerate([b"a", b"b", b"c", b"d", b"e"]))
    assert problems_in(lake) == []
    assert sink_problems(lake) == []

    def renamed(found: Row) -> Row:
        return {**found, "merge_key": "cc"} if found["merge_key"] == "c" else found

    rewrite(settings, tables.MERGED, renamed)
    (unknown, _), (missing, _) = found = sink_problems(lake)
    assert [what for _, what in found] == [
        "no row of silver has this message: closed_at 251, due 250, merge_key 'c'",
        "a row of silver is missing in the sink, which has later ones",
    ]
    assert unknown.endswith("seq 2, '0/150/c'")
    assert missing == f"{name}[0]: '0/150/cc'"

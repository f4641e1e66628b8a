"""Gold on a real broker: per partition one gapless sequence in order, whatever is cut, crashed,
emptied or made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic
from typing import Any

import orjson
import pytest
from confluent_kafka import Message, Producer

from tests.laws.conftest import IN_FOLDERS_OF_BOTH, QUICK, MakeLake, one_of
from tests.support.cases import (
    SOURCES,
    Case,
    as_record,
    expected_messages,
    heartbeat,
    keyed,
    rich_cases,
)
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake
from tests.support.topics import client_options, consume, delete_records, delete_topic
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.table_reader import Where
from watersmeet.running.lake_sequence import LakeSequence
from watersmeet.running.publication_plan import Unpublished
from watersmeet.running.transaction_size import TransactionSize

PARTITIONS = 6
EMPTIED = 2
"""The partition of the sink that retention empties."""


def notes(lake: CaseLake) -> list[dict[str, Any]]:
    columns = [
        "topic_id",
        "partition",
        "first_seq",
        "last_seq",
        "last_event_time",
        "last_key",
        "sink_offset",
    ]
    found = lake.reader.select(tables.PUBLISHED, columns).to_pylist()
    return sorted(found, key=lambda row: (row["topic_id"], row["partition"], row["first_seq"]))


def extended(case: Case, beyond_ms: int) -> None:
    """More of every source: a record, and heartbeats by which everything before times out."""
    for source in SOURCES:
        case.values[source] += [
            keyed("later", beyond_ms, source=source),
            heartbeat(beyond_ms + 500),
        ]
        case.arrivals += [source] * 2


@dataclass
class River:
    """A lake and its sink, and what was seen of them on the way."""

    lake: CaseLake
    seen: dict[str, Any] = field(default_factory=dict)


kind = one_of(IN_FOLDERS_OF_BOTH)


@pytest.fixture(scope="module")
def river(new_lake: MakeLake, kafka: str, kind: str) -> River:
    """Published in three steps, the second of them cut off; then a partition is emptied, and then
    the sink is made again."""
    sink = f"laws-gold-{kind}"
    river = River(
        new_lake(rich_cases(PARTITIONS, 3300), bootstrap=kafka, publish__topic=sink, name=sink)
    )
    lake, seen = river.lake, river.seen
    lake.arrive(0.6)
    lake.merge(lake.quick)
    seen["publications"] = lake.publish()
    seen["first"], seen["first expected"] = lake.messages(), finished(lake)

    lake.arrive()
    lake.merge(lake.quick)
    with pytest.raises(CrashError):
        lake.publish(dying_at(lake.engine, "append", tables.PUBLISHED))
    seen["unnoted"] = notes(lake)
    seen["again"] = lake.publish()
    seen["second"], seen["second expected"] = lake.messages(), expected_messages(lake.cases)
    seen["messages"] = consume(kafka, sink, PARTITIONS)
    seen["notes"] = notes(lake)
    seen["positions"] = {p: positions(case) for p, case in lake.cases.items()}

    ends = [message.offset() for message in seen["messages"] if message.partition() == EMPTIED]
    delete_records(kafka, sink, EMPTIED, max(ends) + 2)  # with the marker of the transaction
    seen["emptied"] = [m for m in lake.messages() if m.partition == EMPTIED]
    for case in lake.cases.values():
        extended(case, 10**6)
    lake.arrive()
    lake.merge(lake.quick)
    lake.publish()
    seen["refilled"], seen["third expected"] = lake.messages(), expected_messages(lake.cases)

    delete_topic(kafka, sink)
    lake.publish()
    seen["made again"] = lake.messages()
    return river


def finished(lake: CaseLake) -> list[tuple[int, int, str]]:
    """Silver's finished records in the order of publication: partition, event time, key."""
    found = lake.reader.select(
        tables.SILVER, ["partition", "event_time", "merge_key"], [[("status", "=", "timed_out")]]
    )
    return sorted(
        (tuple(row.values()) for row in found.to_pylist()),
        key=lambda row: (row[0], row[1], row[2].encode()),
    )


def positions(case: Case) -> dict[str, list[tuple[int, int]]]:
    """By source, the (offset, position) of each record that has one."""
    found = {}
    for source in SOURCES:
        records = [
            as_record(source, offset, value) for offset, value in enumerate(case.values[source])
        ]
        mine = [record for record in records if record is not None]
        running = accumulate((record.event_time for record in mine), max)
        found[source] = [
            (record.offset, position) for record, position in zip(mine, running, strict=True)
        ]
    return found


def test_what_silver_has_finished_is_published_in_order_with_gapless_numbers(river: River) -> None:
    found = [(m.partition, int(m.id.split("/")[1]), m.key.decode()) for m in river.seen["first"]]
    assert found == river.seen["first expected"]
    assert len(found) > 20
    for p in range(PARTITIONS):
        seqs = [m.seq for m in river.seen["first"] if m.partition == p]
        assert seqs == list(range(len(seqs)))


def test_what_is_out_is_what_the_merge_model_says_byte_for_byte(river: River) -> None:
    assert river.seen["second"] == river.seen["second expected"]
    assert len(river.seen["second"]) > len(river.seen["first"])


def test_every_message_says_until_when_its_merge_record_could_be_joined_and_which_clock_closed_it(
    river: River,
) -> None:
    closings = {
        f"{p}/{row.event_time}/{row.key}": (str(row.closed_at), str(row.due))
        for p, case in river.lake.cases.items()
        for row in case.merged().timed_out
    }
    assert len(river.seen["messages"]) > 20
    for message in river.seen["messages"]:
        said = {name: content.decode() for name, content in message.headers()}
        names = "watersmeet.closed_at", "watersmeet.due"
        assert tuple(said[name] for name in names) == closings[said["watersmeet.id"]]


def test_what_is_out_but_not_noted_is_noted_by_the_next_start_and_not_sent_again(
    river: River,
) -> None:
    assert river.seen["again"] == []
    assert len(river.seen["unnoted"]) == len(river.seen["publications"][0])
    ends = {(m.partition(), m.offset()): m for m in river.seen["messages"]}
    for p in range(PARTITIONS):
        rows = [row for row in river.seen["notes"] if row["partition"] == p]
        assert [row["first_seq"] for row in rows] == [
            0,
            *[row["last_seq"] + 1 for row in rows[:-1]],
        ][: len(rows)]
        for row in rows:
            message = ends[p, row["sink_offset"]]
            headers = dict(message.headers())
            assert int(headers["watersmeet.seq"]) == row["last_seq"]
            assert (
                headers["watersmeet.id"].decode()
                == f"{p}/{row['last_event_time']}/{row['last_key']}"
            )
        seqs = [m.seq for m in river.seen["second"] if m.partition == p]
        assert sum(row["last_seq"] - row["first_seq"] + 1 for row in rows) == len(seqs)


def test_the_last_message_of_a_transaction_says_from_which_offsets_a_lost_lake_is_taken_up(
    river: River,
) -> None:
    lasts = {
        (row["partition"], row["last_seq"]): row["last_event_time"] for row in river.seen["notes"]
    }
    times: dict[tuple[int, int], set[int]] = {}
    for message in river.seen["messages"]:
        headers, p = dict(message.headers()), message.partition()
        place = p, int(headers["watersmeet.seq"])
        time = int(headers["watersmeet.id"].decode().split("/")[1])
        if "watersmeet.min_offsets" in headers:
            found = orjson.loads(headers["watersmeet.min_offsets"])
            reached = {
                s: [o for o, position in mine if position >= time]
                for s, mine in river.seen["positions"][p].items()
            }
            assert found == {source: offsets[0] for source, offsets in reached.items()}
            times.setdefault((p, time), set()).add(place[1])
        assert place not in lasts or "watersmeet.min_offsets" in headers
    assert len(lasts) > PARTITIONS
    assert set(times) == {(p, time) for (p, _), time in lasts.items()}, "no other message says it"


@pytest.mark.promise("B4")
@pytest.mark.fault("retention")
def test_a_partition_that_retention_has_emptied_goes_on_where_it_was(river: River) -> None:
    assert river.seen["emptied"] == []
    before = {m.id for m in river.seen["second"] if m.partition == EMPTIED}
    expected = [m for m in river.seen["third expected"] if m.id not in before]
    assert river.seen["refilled"] == expected
    assert any(m.partition == EMPTIED for m in expected)


@pytest.mark.promise("B4")
@pytest.mark.fault("topics")
def test_a_sink_that_was_made_again_gets_the_whole_sequence_byte_for_byte(river: River) -> None:
    assert river.seen["made again"] == river.seen["third expected"]
    assert len({row["topic_id"] for row in notes(river.lake)}) == 2


def test_a_drained_lake_publishes_nothing(river: River) -> None:
    version = river.lake.reader.version(tables.PUBLISHED)
    assert river.lake.publish() == []
    assert river.lake.reader.version(tables.PUBLISHED) == version


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_has_come_while_gold_stood_still_is_planned_in_parts(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        [keyed(f"{n}", since + n) for n in range(of)] for since, of in ((0, 10), (2000, 400))
    )
    tracking = [*few, heartbeat(1000), *many, heartbeat(10**6)]
    arrivals = [*["tracking"] * 11, "orders", *["tracking"] * 401, "orders"]
    values: dict[str, list[bytes | None]]
    values = {"tracking": [*tracking], "orders": [heartbeat(1000), heartbeat(10**6)]}
    lake = new_lake({0: Case(values, 100, arrivals)})
    sequence, size = LakeSequence(lake.owner(), lake.settings, 1), TransactionSize(10, 10)
    planned, select = [0], Unpublished._select

    def counted(self: Unpublished, where: Where) -> Any:
        rows = select(self, where)
        planned.append(rows.num_rows)
        return rows

    monkeypatch.setattr(Unpublished, "_select", counted)
    lake.arrive(12 / len(arrivals))
    lake.merge()
    assert sequence.pending({}, size)
    assert planned[-1] == 10
    lake.arrive()
    lake.merge()
    sequence.now_s = lambda: monotonic() + 3600
    assert sequence.pending({}, size)
    assert 10 <= max(planned) < 100


@pytest.mark.promise("N13")
@pytest.mark.fault("kill")
@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_without_transactions_what_is_missing_before_the_last_message_is_sent_again(
    new_lake: MakeLake, kafka: str, kind: str, delivery: str
) -> None:
    """As where a broker refuses a message, or a producer gives it up, and none of those behind
    it; also where the next start has another `delivery`."""
    seqs: dict[str, dict[int, list[int]]] = {}
    whole: list[Message] = []
    for sink in (f"laws-gold-whole-{kind}-{delivery}", f"laws-gold-gaps-{kind}-{delivery}"):
        overrides = {"publish__topic": sink, "publish__delivery": "at_least_once"}
        lake = new_lake(rich_cases(PARTITIONS, 3300), bootstrap=kafka, **overrides)
        lake.arrive(0.6)
        lake.merge()
        lake.publish()
        before = consume(kafka, sink, PARTITIONS)
        if seqs:
            producer = Producer(client_options(kafka))
            ends = {p: len(found) for p, found in seqs_of(before).items()}
            for message in whole:
                if seq_of(message) >= ends[message.partition() or 0] and seq_of(message) % 3:
                    put_again(producer, sink, message)
            producer.flush()
        lake.arrive()
        lake.merge()
        publish = lake.settings.publish.model_copy(update={"delivery": delivery})
        lake.settings = lake.settings.model_copy(update={"publish": publish})
        for _ in range(2):
            lake.publish()
        whole = consume(kafka, sink, PARTITIONS)
        seqs[sink] = seqs_of(whole)
    one, other = seqs.values()
    assert {p: sorted({*found}) for p, found in other.items()} == one
    assert {p: found[-1:] for p, found in other.items()} == {p: f[-1:] for p, f in one.items()}
    assert sum(map(len, other.values())) > sum(map(len, one.values())), "some come again"


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_retention_has_deleted_before_it_was_noted_is_not_sent_again(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    sink = f"laws-gold-expired-{kind}"
    lake = new_lake(rich_cases(PARTITIONS, 3300), bootstrap=kafka, publish__topic=sink)
    lake.arrive(0.6)
    lake.merge()
    lake.publish()
    lake.arrive()
    lake.merge()
    with pytest.raises(CrashError):
        lake.publish(dying_at(lake.engine, "append", tables.PUBLISHED))
    found = seqs_of(consume(kafka, sink, PARTITIONS))
    bounds = Cluster(lake.settings.kafka).bounds(sink, PARTITIONS)
    for p in (p for p, seqs in found.items() if seqs):
        _, end = bounds[p]
        delete_records(kafka, sink, p, end - 2)  # behind the last message is a marker
    left = seqs_of(consume(kafka, sink, PARTITIONS))
    lake.publish()
    assert seqs_of(consume(kafka, sink, PARTITIONS)) == left
    assert any(left.values())


def seq_of(message: Message) -> int:
    return int(dict(message.headers() or [])["watersmeet.seq"] or b"")


def seqs_of(messages: Sequence[Message]) -> dict[int, list[int]]:
    """By partition, the numbers of messages as they follow each other."""
    found: dict[int, list[int]] = {p: [] for p in range(PARTITIONS)}
    for message in messages:
        found[message.partition() or 0].append(seq_of(message))
    return found


def put_again(producer: Producer, topic: str, message: Message) -> None:
    producer.produce(
        topic,
        message.value(),
        message.key(),
        message.partition() or 0,
        timestamp=message.timestamp()[1],
        headers=message.headers(),
    )

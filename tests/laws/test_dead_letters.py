"""Dead letters on a real broker: late and refused records as they came, each once, whatever is
crashed, forgotten or emptied."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.laws.conftest import MakeLake
from tests.laws.test_gold import extended
from tests.support.cases import BAD_VALUES, Case, expected_late, expected_quarantine, rich_cases
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import KAFKA_TIME_US, CaseLake, headers_of, key_of
from tests.support.topics import (
    CheckedProducer,
    Letter,
    consume,
    create_topics,
    dead_letters,
    delete_records,
    delete_topic,
    produce,
)
from watersmeet.errors import ForeignMessageError
from watersmeet.lake import pieces, tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.published import letter_ends
from watersmeet.running import dead_letters as sending
from watersmeet.running.dead_letters import DeadLetters

PARTITIONS = 4
EMPTIED = 2
TABLES = (tables.LATE, tables.QUARANTINE)


def letter(lake: CaseLake, reason: str, partition: int, source: str, offset: int) -> Letter:
    headers = tuple((one["key"], one["value"]) for one in headers_of(source, offset))
    value = lake.cases[partition].values[source][offset]
    topic = lake.settings.inputs_by_name[source].topic
    return Letter(
        partition,
        topic,
        offset,
        reason,
        key_of(source, offset),
        value,
        headers,
        KAFKA_TIME_US // 1000,
    )


@dataclass
class River:
    """A lake and its topics of dead letters, and what was seen of them on the way."""

    kafka: str
    lake: CaseLake
    seen: dict[str, Any] = field(default_factory=dict)

    def box(self, table: str, *, dying: bool = False) -> DeadLetters:
        engine = (
            dying_at(self.lake.engine, "append", tables.PUBLISHED) if dying else self.lake.engine
        )
        return DeadLetters(self.lake.owner(engine), self.lake.settings, PARTITIONS, table)

    def send(self) -> int:
        return sum(sum(self.box(table).drain()) for table in TABLES)

    def sent(self) -> dict[str, list[Letter]]:
        topics = self.lake.settings.publish.dead_letter_topics
        return {
            table: dead_letters(self.kafka, topic, PARTITIONS) for table, topic in topics.items()
        }

    def expected(self) -> dict[str, list[Letter]]:
        """What the tables hold, in order of partition, source and offset."""
        placed = self.lake.reader.select(tables.LATE, ["partition", "source", "offset"]).to_pylist()
        late = [letter(self.lake, "late", *row.values()) for row in placed]
        found = self.lake.reader.select(
            tables.QUARANTINE, ["reason", "partition", "source", "offset"]
        ).to_pylist()
        return {
            tables.LATE: in_order(late),
            tables.QUARANTINE: in_order(letter(self.lake, *row.values()) for row in found),
        }

    def arrive(self, share: float = 1.0) -> None:
        self.lake.arrive(share)
        self.lake.merge(self.lake.quick)


def in_order(found: Iterable[Letter]) -> list[Letter]:
    return sorted(found, key=lambda one: one[:3])


def each_source_in_order(found: dict[str, list[Letter]]) -> dict[str, list[Letter]]:
    """Sorted by where the records were; that leaves each topic-partition's in the order in which
    they are."""
    return {table: sorted(mine, key=lambda one: one[:2]) for table, mine in found.items()}


@pytest.fixture(scope="module")
def river(new_lake: MakeLake, kafka: str, kind: str) -> River:
    """Sent in steps: one cut off before its note, one after all notes were deleted; then a
    partition is emptied, and at last a topic is made again.
    """
    cases = rich_cases(PARTITIONS, 1656, wealth="late")
    for case in cases.values():
        case.values["orders"] += BAD_VALUES
        case.arrivals += ["orders"] * len(BAD_VALUES)
    topics = {f"publish__{table}_topic": f"laws-letters-{kind}-{table}" for table in TABLES}
    sources = ("tracking", "orders")
    of_sources = {
        f"sources__{source}__topic": f"laws-letters-{kind}-{source}" for source in sources
    }
    create_topics(kafka, *of_sources.values(), partitions=PARTITIONS)
    river = River(
        kafka, new_lake(cases, bootstrap=kafka, name=f"laws-letters-{kind}", **topics, **of_sources)
    )
    lake, seen = river.lake, river.seen
    river.arrive(0.4)
    seen["first count"], seen["first"], seen["first expected"] = (
        river.send(),
        river.sent(),
        river.expected(),
    )

    river.arrive(0.7)
    for table in TABLES:
        with pytest.raises(CrashError):
            list(river.box(table, dying=True).drain())
    seen["cut off"], seen["cut off expected"] = river.sent(), river.expected()
    seen["again"] = river.send()
    seen["notes"] = {
        topic: letter_ends(lake.reader, [("topic", "=", topic)])
        for topic in lake.settings.publish.dead_letter_topics.values()
    }

    lake.quick.delete(tables.PUBLISHED, (), Commit("test", 0, 1))
    river.arrive()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CHUNK_ROWS", 3)
        patch.setattr(sending, "CHUNKS", 2)
        seen["transactions"] = [count for table in TABLES for count in river.box(table).drain()]
    seen["second"], seen["second expected"] = river.sent(), river.expected()

    topic = lake.settings.publish.dead_letter_topics[tables.QUARANTINE]
    last = max(
        message.offset()
        for message in consume(kafka, topic, PARTITIONS)
        if message.partition() == EMPTIED
    )
    delete_records(kafka, topic, EMPTIED, last + 2)
    seen["emptied"] = [one for one in river.sent()[tables.QUARANTINE] if one.partition == EMPTIED]
    for case in lake.cases.values():
        extended(case, 10**6)
        case.values["tracking"] += [b"{", b"[1]"]
        case.arrivals += ["tracking"] * 2
    river.arrive()
    seen["third count"], seen["third"], seen["third expected"] = (
        river.send(),
        river.sent(),
        river.expected(),
    )

    delete_topic(kafka, topic)
    river.send()
    seen["made again"] = river.sent()
    return river


@pytest.mark.promise("N3")
@pytest.mark.fault("kill", oracle=True)
def test_each_late_and_refused_record_is_sent_once_as_it_came_in_order_of_offset(
    river: River,
) -> None:
    seen = river.seen
    assert each_source_in_order(seen["first"]) == seen["first expected"]
    assert seen["first count"] == sum(map(len, seen["first"].values()))
    assert each_source_in_order(seen["second"]) == seen["second expected"]
    late, refused = (seen["second"][table] for table in TABLES)
    assert [one[:3] for one in in_order(seen["third"][tables.LATE])] == sorted(
        (p, river.lake.settings.inputs_by_name[str(source)].topic, offset)
        for p, source, offset, *_ in expected_late(river.lake.cases)
    )
    assert len(late) > len(seen["first"][tables.LATE]) > 5
    assert len({one.reason for one in refused}) == 3
    assert len(refused) > len(seen["first"][tables.QUARANTINE])
    assert any(one.key is None for one in late)
    assert any(one.headers for one in late)
    assert any(one.value is None for one in refused)


def test_what_is_out_but_not_noted_is_noted_by_the_next_start_and_not_sent_again(
    river: River,
) -> None:
    assert each_source_in_order(river.seen["cut off"]) == river.seen["cut off expected"]
    assert river.seen["again"] == 0
    noted = {
        (topic, tp.input.topic, tp.partition): offset
        for topic, ends in river.seen["notes"].items()
        for tp, offset in ends.items()
    }
    lasts: dict[tuple[str, str, int], int] = {}
    for table, mine in river.seen["cut off"].items():
        for one in mine:
            lasts[
                river.lake.settings.publish.dead_letter_topics[table],
                one.source_topic,
                one.partition,
            ] = one.offset + 1
    assert noted == lasts


@pytest.mark.promise("N3")
@pytest.mark.fault("lost")
def test_without_its_notes_a_lake_goes_on_where_the_topics_stand_in_transactions_of_any_size(
    river: River,
) -> None:
    counts = [len(river.seen[step][table]) for step in ("second", "cut off") for table in TABLES]
    assert sum(river.seen["transactions"]) == sum(counts[:2]) - sum(counts[2:])
    assert len(river.seen["transactions"]) > 4
    assert max(river.seen["transactions"]) <= 6


@pytest.mark.promise("N3")
@pytest.mark.fault("retention")
def test_a_partition_that_retention_has_emptied_goes_on_where_it_was(river: River) -> None:
    assert river.seen["emptied"] == []
    before = {
        one[:3] for one in river.seen["second"][tables.QUARANTINE] if one.partition == EMPTIED
    }
    expected = [
        one for one in river.seen["third expected"][tables.QUARANTINE] if one[:3] not in before
    ]
    assert each_source_in_order(river.seen["third"])[tables.QUARANTINE] == expected
    assert sum(one.partition == EMPTIED for one in expected) == 2
    assert river.seen["third count"] >= 2 * PARTITIONS


def test_a_topic_that_was_made_again_gets_every_dead_letter_again(river: River) -> None:
    assert each_source_in_order(river.seen["made again"]) == river.seen["third expected"]
    assert len(river.seen["made again"][tables.QUARANTINE]) == len(
        expected_quarantine(river.lake.cases)
    )


def test_where_nothing_is_new_nothing_is_sent_noted_or_read(river: River) -> None:
    version = river.lake.reader.version(tables.PUBLISHED)
    assert river.send() == 0
    assert river.lake.reader.version(tables.PUBLISHED) == version


@pytest.mark.promise("N71")
@pytest.mark.fault("damage")
def test_what_somebody_else_says_of_where_a_topic_stands_repeats_nothing_and_skips_nothing_to_come(
    river: River, kafka: str
) -> None:
    topic, before = river.lake.settings.publish.dead_letter_topics[tables.QUARANTINE], river.sent()

    def say(next_offset: int) -> None:
        headers: list[tuple[str, str | bytes | None]] = [
            ("watersmeet.next_offsets", b'{"tracking":%d,"orders":%d}' % (next_offset, next_offset))
        ]
        producer = CheckedProducer(kafka)
        producer.produce(topic, b"foreign", partition=3, headers=headers)
        assert producer.flush(30) == 0

    say(0)
    assert sum(river.box(tables.QUARANTINE).drain()) == 0
    assert len(consume(kafka, topic, PARTITIONS)) == len(before[tables.QUARANTINE]) + 1
    say(2**62)
    with pytest.raises(
        ForeignMessageError, match=r"has no watersmeet\.next_offsets header of this lake"
    ):
        list(river.box(tables.QUARANTINE).drain())


def test_a_topic_that_others_write_to_is_refused(river: River, kafka: str) -> None:
    topic = river.lake.settings.publish.dead_letter_topics[tables.LATE]
    produce(kafka, topic, [(1, b"foreign")])
    with pytest.raises(
        ForeignMessageError, match=r"has no watersmeet\.next_offsets header of this lake"
    ):
        list(river.box(tables.LATE).drain())


def test_refused_records_of_each_source_are_sent_whichever_source_has_news(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    values: dict[str, list[bytes | None]] = {
        "tracking": [*BAD_VALUES[:1]],
        "orders": [*BAD_VALUES[:2]],
    }
    case = Case(values, 100, ["tracking", "orders", "orders"])
    name = f"laws-letters-each-{kind}"
    topics = {f"sources__{source}__topic": f"{name}-{source}" for source in values}
    create_topics(kafka, *topics.values(), partitions=PARTITIONS)
    topics["publish__quarantine_topic"] = f"{name}-quarantine"
    river = River(kafka, new_lake({0: case}, bootstrap=kafka, name=name, **topics))
    box = river.box(tables.QUARANTINE)
    for share in (1 / 3, 2 / 3, 1):
        river.lake.arrive(share)
        assert sum(box.drain()) == 1
        assert sum(box.drain()) == 0

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.kafka.waiting import await_end
from tests.support.cases import keyed
from tests.support.memory import peak_mib_of
from tests.support.rivers import until
from tests.support.timing import within
from tests.support.topics import CheckedProducer, create_topics, produce, produce_transaction
from watersmeet.core.reading import KAFKA
from watersmeet.errors import DataLossError, KafkaUnreachableError, TopicChangedError
from watersmeet.kafka.options import ListeningConsumer
from watersmeet.kafka.reading import BATCH_BYTES, Range, read_backwards, read_range, read_tails
from watersmeet.settings import KafkaSettings


@pytest.fixture(scope="module", autouse=True)
def compacting(kafka: str) -> str:
    """A topic that Kafka compacts while the other tests run: 20 records of one key, and one in a
    later segment."""
    eager = {
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "100",
    }
    create_topics(kafka, "compacting", partitions=1, **{"cleanup.policy": "compact", **eager})
    producer = CheckedProducer(kafka)
    for i in range(21):
        producer.produce(
            "compacting",
            b"%d" % i,
            b"same" if i < 20 else b"other",
            0,
            timestamp=1 + 1000 * (i == 20),
        )
        assert producer.flush(10) == 0
    return "compacting"


def rows(
    settings: KafkaSettings, topic: str, since: int, until: int, **options: Any
) -> list[dict[str, Any]]:
    found = []
    for batch in read_range(settings, Range(topic, 0, since, until), **options):
        assert batch.schema == KAFKA
        found += batch.to_pylist()
    return found


def values(
    settings: KafkaSettings, topic: str, since: int, until: int, **options: Any
) -> list[bytes]:
    return [row["value"] for row in rows(settings, topic, since, until, **options)]


def numbers(texts: Iterable[bytes]) -> list[int]:
    return [int(text) for text in texts]


def send(kafka: str, topic: str, count: int, *, first: int = 0) -> None:
    produce(kafka, topic, [(0, b"%d" % i) for i in range(first, first + count)])


def test_a_range_holds_its_offsets_and_no_others(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(i % 2, b"%d" % i) for i in range(100)])
    assert numbers(values(settings, topic, 10, 20)) == list(range(20, 40, 2))
    assert values(settings, topic, 49, 50) == [b"98"]
    assert values(settings, topic, 20, 20) == values(settings, topic, 20, 19) == []


@pytest.mark.parametrize("gets_on", [True, False])
def test_a_reader_waits_for_as_long_as_its_client_gets_on(
    kafka: str,
    settings: KafkaSettings,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    gets_on: bool,
) -> None:
    """Of a long aborted transaction no message comes out of the client."""
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 3)
    consume, now, passed_s = ListeningConsumer.consume, time.monotonic, count()
    silence = iter(range(1, 100))

    def is_silent(consumer: ListeningConsumer, *arguments: Any) -> list[Message]:
        second = next(silence, None)
        if second is None:
            return consume(consumer, *arguments)
        later = now() + next(passed_s)
        monkeypatch.setattr(time, "monotonic", lambda: later)
        monkeypatch.setattr(consumer, "next_offset", lambda *_: second if gets_on else 1)
        return []

    monkeypatch.setattr(ListeningConsumer, "consume", is_silent)
    if gets_on:
        assert values(settings, topic, 0, 3) == [b"0", b"1", b"2"]
    else:
        with pytest.raises(KafkaUnreachableError, match=f"topic {topic} does not answer"):
            values(settings, topic, 0, 3)


def test_a_client_says_how_far_it_has_fetched_aborted_messages(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    produce_transaction(kafka, topic, [b"%d" % i for i in range(20)], 0, commit=False)
    often = settings.model_copy(update={"options": {"statistics.interval.ms": "20"}})
    consumer = ListeningConsumer(often)
    assert consumer.next_offset(topic, 0) < 0
    consumer.assign([TopicPartition(topic, 0, 0)])

    def has_fetched() -> bool:
        assert not [m for m in consumer.consume(10, 0.02) if m.error() is None]
        return consumer.next_offset(topic, 0) == 21

    until(has_fetched, "the end of the transaction")
    consumer.close()


def test_batches_hold_at_most_max_records_and_are_filled(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1050)
    sizes = [
        batch.num_rows for batch in read_range(settings, Range(topic, 0, 0, 1050), max_records=100)
    ]
    assert sizes == [100] * 10 + [50]


def test_batches_of_large_records_hold_fewer(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    produce(kafka, topic, [(0, bytes(900_000)) for _ in range(100)])
    batches = list(read_range(settings, Range(topic, 0, 0, 100)))
    assert [offset for batch in batches for offset in batch["offset"].to_pylist()] == list(
        range(100)
    )
    assert max(batch.nbytes for batch in batches) <= BATCH_BYTES + 1_000_000


def test_of_large_records_that_pack_well_a_few_are_in_memory_at_a_time(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    """Of a hundred records of 7 MiB, which Kafka has packed into some hundred bytes each."""
    create_topics(kafka, topic, partitions=1)
    produce(kafka, topic, [(0, bytes(7 * 2**20)) for _ in range(100)], codec="zstd")
    peak_mib = _peak_mib_of(READS_ALL, settings, topic, 100)
    assert peak_mib < 500, f"{peak_mib:.0f} MiB"


READS_ALL = """
import sys
from watersmeet.kafka.reading import Range, read_range
from watersmeet.settings import KafkaSettings
kafka = KafkaSettings.model_validate_json(sys.argv[1])
count = int(sys.argv[3])
batches = read_range(kafka, Range(sys.argv[2], 0, 0, count))
assert sum(batch.num_rows for batch in batches) == count
"""


def _peak_mib_of(reading: str, settings: KafkaSettings, topic: str, count: int) -> float:
    """The most memory that a process takes which reads so many records of a partition."""
    command = [sys.executable, "-c", reading, settings.model_dump_json(), topic, str(count)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    peak_mib = peak_mib_of(process)
    assert process.returncode == 0
    return peak_mib


@pytest.mark.long
@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
def test_records_that_pack_well_are_not_all_fetched_ahead(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    """Eight hundred megabytes that Kafka has packed into one: 983 MiB, where one answer of a broker
    may have them all."""
    create_topics(kafka, topic, partitions=1)
    for begin in range(0, 16_000, 200):
        values = [
            keyed(f"k{n}", n, text="the same sentence again " * 2084)
            for n in range(begin, begin + 200)
        ]
        produce(kafka, topic, [(0, value) for value in values], codec="zstd")
    peak_mib = _peak_mib_of(READS_ALL, settings, topic, 16_000)
    assert peak_mib < 700, f"{peak_mib:.0f} MiB"


def test_a_record_is_as_kafka_has_it(kafka: str, settings: KafkaSettings, topic: str) -> None:
    create_topics(kafka, topic, partitions=1, **{"message.timestamp.after.max.ms": str(2**63 - 1)})
    producer = CheckedProducer(kafka)
    producer.produce(topic, b"", None, 0, timestamp=1_700_000_000_123)
    producer.produce(
        topic, None, b"k", 0, timestamp=1, headers=[("a", b"1"), ("a", None), ("é", b"\xff")]
    )
    producer.produce(topic, b"v", b"", 0, timestamp=2**61)
    assert producer.flush(30) == 0
    first, second = rows(settings, topic, 0, 2)
    assert (first["topic"], first["partition"], first["offset"], first["timestamp_type"]) == (
        topic,
        0,
        0,
        0,
    )
    assert first["kafka_timestamp"].timestamp() == 1_700_000_000.123
    assert (first["key"], first["value"], first["headers"]) == (None, b"", None)
    assert (second["key"], second["value"]) == (b"k", None)
    assert [(h["key"], h["value"]) for h in second["headers"]] == [
        ("a", b"1"),
        ("a", None),
        ("é", b"\xff"),
    ]
    [third] = read_range(settings, Range(topic, 0, 2, 3))
    assert third["kafka_timestamp"].cast(pa.int64()).to_pylist() == [(2**63 - 1) // 1000 * 1000]


def test_the_broker_may_have_set_the_timestamp(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1, **{"message.timestamp.type": "LogAppendTime"})
    before = time.time()
    send(kafka, topic, 1)
    [row] = rows(settings, topic, 0, 1)
    assert row["timestamp_type"] == 1
    assert before - 1 <= row["kafka_timestamp"].timestamp() <= time.time() + 1


@pytest.mark.promise("R10")
@pytest.mark.fault("retention")
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "aborted"])
def test_a_range_ends_although_its_last_offsets_hold_no_record(
    kafka: str, settings: KafkaSettings, topic: str, committed: bool
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 3)
    produce_transaction(kafka, topic, [b"3", b"4"], 0, commit=committed)
    await_end(settings, topic, 6)  # a marker is the last
    expected = [0, 1, 2, 3, 4] if committed else [0, 1, 2]
    assert numbers(values(settings, topic, 0, 6)) == expected
    assert values(settings, topic, 5, 6) == []
    send(kafka, topic, 1, first=6)
    assert numbers(values(settings, topic, 0, 6)) == expected
    assert values(settings, topic, 5, 6) == []
    assert numbers(values(settings, topic, 5, 7)) == [6]


@pytest.mark.promise("R10")
def test_what_is_not_committed_lies_beyond_the_end(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 2)
    producer = Producer({"bootstrap.servers": kafka, "transactional.id": topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"2", partition=0)
    producer.flush(30)
    send(kafka, topic, 1, first=3)
    await_end(settings, topic, 2)
    assert numbers(values(settings, topic, 0, 2)) == [0, 1]
    with pytest.raises(KafkaUnreachableError):
        values(settings, topic, 0, 4, timeout_s=0.5)
    producer.commit_transaction(30)
    await_end(settings, topic, 5)
    assert numbers(values(settings, topic, 0, 5)) == [0, 1, 2, 3]


@pytest.mark.promise("B2")
@pytest.mark.fault("retention")
def test_offsets_that_kafka_has_deleted_are_never_passed_over(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 10)
    admin = AdminClient({"bootstrap.servers": kafka})
    [done] = admin.delete_records([TopicPartition(topic, 0, 4)]).values()
    done.result(30)
    assert numbers(values(settings, topic, 4, 10)) == [4, 5, 6, 7, 8, 9]
    with pytest.raises(DataLossError, match=rf"{topic}\[0\] from 1 to 3") as lost:
        values(settings, topic, 1, 10)
    assert lost.value.missing == {0: (1, 4)}


def test_a_range_beyond_the_end_of_its_partition_is_another_topics(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 3)
    with pytest.raises(TopicChangedError, match="ends at offset 3, and 7 is to be read next"):
        values(settings, topic, 7, 9)


def test_a_broker_that_does_not_answer_is_told_in_time() -> None:
    away = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    with (
        within(3),
        pytest.raises(
            KafkaUnreachableError, match=r"no Kafka broker answers at 127\.0\.0\.1:1 \(.*refused"
        ),
    ):
        values(away, "any", 0, 1, timeout_s=1)


def test_a_reader_that_stops_halfway_leaves_the_next_one_undisturbed(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(p, b"%d" % p) for p in (0, 1) for _ in range(5000)])
    for _ in range(3):
        next(read_range(settings, Range(topic, 0, 0, 5000), max_records=10))
        whole = [
            b
            for batch in read_range(settings, Range(topic, 1, 0, 5000))
            for b in batch["value"].to_pylist()
        ]
        assert whole == [b"1"] * 5000


def test_records_are_told_from_offsets_that_hold_none(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 1)
    produce_transaction(kafka, topic, [b"gone"], 0, commit=False)
    await_end(settings, topic, 3)
    assert any(read_range(settings, Range(topic, 0, 0, 3), max_records=1))
    for since in (1, 3):
        assert not any(read_range(settings, Range(topic, 0, since, 3), max_records=1))


def test_messages_come_backwards_past_what_holds_no_record(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    send(kafka, topic, 100)
    produce_transaction(kafka, topic, [b"gone"] * 30, 0, commit=False)
    await_end(settings, topic, 131)
    found = [message.value() for message in read_backwards(settings, topic, 0)]
    assert numbers(found) == list(range(99, -1, -1))  # type: ignore[arg-type]


def test_the_tails_of_many_partitions_come_at_once(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=60)
    produce(kafka, topic, [(p, b"%d" % p) for p in range(0, 60, 2) for _ in range(20)])
    produce_transaction(kafka, topic, [b"out"], 10, commit=True)
    produce_transaction(kafka, topic, [b"gone"] * 100, 20, commit=False)
    produce_transaction(kafka, topic, [b"gone"], 21, commit=False)
    for partition, end in ((10, 22), (20, 121), (21, 2)):
        await_end(settings, topic, end, partition)
    with within(5):
        tails = read_tails(settings, topic, 60)
    assert sorted(tails) == list(range(0, 60, 2))
    assert {p: tails[p].value() for p in (0, 10, 20)} == {0: b"0", 10: b"out", 20: b"20"}


def test_a_range_ends_where_compaction_has_removed_its_last_records(
    settings: KafkaSettings, compacting: str
) -> None:
    deadline = time.monotonic() + 60
    while len(left := values(settings, compacting, 0, 20)) == 20 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert 0 < len(left) < 20
    assert values(settings, compacting, 0, 19)[:1] != [b"0"]


READS_BACKWARDS = """
import sys
from watersmeet.kafka.reading import read_backwards
from watersmeet.settings import KafkaSettings
kafka = KafkaSettings.model_validate_json(sys.argv[1])
assert sum(1 for _ in read_backwards(kafka, sys.argv[2], 0)) == int(sys.argv[3])
"""


@pytest.mark.long
@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
def test_of_large_records_that_are_read_backwards_a_few_are_in_memory_at_a_time(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    create_topics(kafka, topic, partitions=1, **{"max.message.bytes": "8000000"})
    produce(kafka, topic, [(0, bytes(100_000)) for _ in range(5_000)], codec="zstd")
    peak_mib = _peak_mib_of(READS_BACKWARDS, settings, topic, 5_000)
    assert peak_mib < 500, f"{peak_mib:.0f} MiB"

"""Where reading begins, what happens where Kafka has lost what was to be read, and taking up a lost lake or an emptied sink."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.audit.verify import verify
from pipelines.beginning import Beginning
from pipelines.errors import ConfigurationError, DataLossError, QuarantineLimitError
from tests.support.cases import SOURCES, expected_messages, keyed
from tests.support.rivers import River
from tests.support.topics import create_topics, produce, published


def delete_records(kafka: str, topic: str, before: int, partition: int = 0) -> None:
    """What retention does."""
    admin = AdminClient({"bootstrap.servers": kafka})
    for done in admin.delete_records([KafkaPartition(topic, partition, before)]).values():
        done.result(30)


def delete_topic(kafka: str, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka})
    for done in admin.delete_topics([topic], operation_timeout=30).values():
        done.result(30)


def offsets_of(spark: SparkSession, river: River, source: str = "tracking") -> list[int]:
    rows = Lake(spark, river.settings).read(tables.bronze(source)).where("partition = 0").select("offset").collect()
    return sorted(row.offset for row in rows)


def resets_of(spark: SparkSession, river: River) -> set[tuple[Any, ...]]:
    rows = Lake(spark, river.settings).read(tables.RESETS).select("source", "from_offset", "to_offset", "reason").collect()
    return {tuple(row) for row in rows}


def numbered(kafka: str, folder: Path, name: str, **overrides: Any) -> River:
    """Ten records on each topic, whose Kafka timestamps are 1000, 2000, ..."""
    river = River.make(kafka, folder, name, partitions=1, merge__max_future="365d", **overrides)
    for source in SOURCES:
        producer = Producer({"bootstrap.servers": kafka})
        for n in range(10):
            producer.produce(f"{name}-{source}", keyed("a", n), partition=0, timestamp=1000 * (n + 1))
        producer.flush()
    return river


@pytest.mark.parametrize(
    ("start", "tracking", "orders"),
    [
        ({"timestamp": "1970-01-01T00:00:03.500Z"}, 3, 3),
        ({"offsets": {"tracking": {0: 7}}}, 7, 0),
    ],
    ids=["timestamp", "offsets"],
)
def test_reading_begins_where_it_is_told_once_and_for_all(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path, start: dict[str, Any], tracking: int, orders: int
) -> None:
    name = f"begin-{next(iter(start))}"
    river = numbered(kafka, tmp_path, name, kafka__start=start)
    lake = Lake(spark, river.settings)
    shown = {row["source"]: row["from_offset"] for row in Beginning(lake, river.settings, 1).preview()}
    assert shown == {"tracking": tracking, "orders": orders}
    assert not lake.exists(tables.RESETS), "a preview changes nothing"
    river.finish("bronze")
    assert offsets_of(spark, river) == list(range(tracking, 10))
    assert offsets_of(spark, river, "orders") == list(range(orders, 10))
    reason = f"start: {river.settings.kafka.start}"
    assert ("tracking", 0, tracking, reason) in resets_of(spark, river)
    river.config["kafka"]["start"] = "earliest"
    river.write()
    river.finish("bronze")
    assert offsets_of(spark, river) == list(range(tracking, 10))


def test_an_offset_that_does_not_exist_yet_is_no_beginning(root_session: SparkSession, kafka: str, tmp_path: Path) -> None:
    river = numbered(kafka, tmp_path, "beyond", kafka__start={"offsets": {"tracking": {0: 11}}})
    with pytest.raises(ConfigurationError, match=r"beyond-tracking\[0\] ends at offset 10, and 11 is beyond"):
        river.finish("bronze")


def test_offsets_that_kafka_has_deleted_stop_the_run_or_are_kept_as_a_gap(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = numbered(kafka, tmp_path, "gone")
    river.finish()
    produce(kafka, "gone-tracking", [(0, keyed("b", 100 + n)) for n in range(5)])
    delete_records(kafka, "gone-tracking", 13)
    with pytest.raises(DataLossError, match=r"offsets of tracking that were not read yet: gone-tracking\[0\] from 10 to 12;"):
        river.finish()
    river.config["kafka"]["on_data_loss"] = "continue"
    river.write()
    river.finish()
    assert offsets_of(spark, river) == [*range(10), 13, 14]
    assert resets_of(spark, river) == {("tracking", 10, 13, "on_data_loss: continue")}
    assert verify(Lake(spark, river.settings), river.settings, full=True)["problems"] == []


def test_a_topic_made_again_is_not_read_as_the_same(root_session: SparkSession, kafka: str, tmp_path: Path) -> None:
    river = numbered(kafka, tmp_path, "again")
    river.finish("bronze")
    delete_topic(kafka, "again-tracking")
    create_topics(kafka, "again-tracking", partitions=1)
    produce(kafka, "again-tracking", [(0, keyed("b", n)) for n in range(30)])
    with pytest.raises(ConfigurationError, match=r"again-tracking was deleted and made again since the lake was begun"):
        river.finish("bronze")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("merge__timeout", "400ms", r"merge\.timeout: the lake was begun with `300 ms`, and `400 ms` would make another result"),
        ("sources__orders__event_time", "at", r"sources\.orders\.event_time: the lake was begun with `ts`"),
        ("sources__tracking__key", "id", r"sources\.tracking\.key: the lake was begun with `k`"),
        ("publish__valid", "size(orders) > 0", r"publish\.valid"),
    ],
)
def test_a_change_that_would_make_another_result_is_refused(
    root_session: SparkSession, kafka: str, changing: River, tmp_path: Path, field: str, value: str, says: str
) -> None:
    *outer, last = field.split("__")
    target = changing.config
    for step in outer:
        target = target[step]
    before = target.get(last)
    target[last] = value
    changing.write()
    try:
        with pytest.raises(ConfigurationError, match=says):
            changing.finish("silver")
    finally:
        target.update({last: before}) if before is not None else target.pop(last)
        changing.write()


@pytest.fixture(scope="module")
def changing(root_session: SparkSession, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> River:
    river = River.make(kafka, tmp_path_factory.mktemp("changing"), "changing", partitions=1)
    river.flow()
    river.finish("bronze", "silver")
    return river


def test_partitions_that_were_added_are_refused(root_session: SparkSession, kafka: str, tmp_path: Path) -> None:
    river = numbered(kafka, tmp_path, "grown")
    river.finish("bronze")
    admin = AdminClient({"bootstrap.servers": kafka})
    for done in admin.create_partitions([NewPartitions(f"grown-{source}", 2) for source in SOURCES]).values():
        done.result(30)
    with pytest.raises(ConfigurationError, match="the topics have 2 partitions, and had 1 when the lake was begun"):
        river.finish("bronze")


def test_a_lost_lake_is_taken_up_from_the_sink(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "lost", kafka__start="sink")
    for n in range(4):
        river.flow()
        if n in (1, 3):
            river.finish()
    shutil.rmtree(tmp_path / "lake")
    for _ in range(3):
        river.flow()
    river.finish()
    assert published(kafka, river.sink, river.partitions) == expected_messages(river.cases)
    lake = Lake(spark, river.settings)
    begun = lake.read(tables.RECOVERED).where("source IS NOT NULL AND offset > 0").count()
    held = lake.read(tables.RECOVERED).where("merge_key IS NOT NULL").count()
    assert begun == 2 * river.partitions, "nothing is read that is not needed"
    assert held > 0
    assert verify(lake, river.settings, full=True)["problems"] == []


def test_a_new_sink_gets_the_whole_sequence_and_one_that_retention_emptied_the_rest(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "emptied", partitions=1)
    for _ in range(3):
        river.flow()
    river.finish()
    before = published(kafka, river.sink, 1)
    assert before == expected_messages(river.cases)

    delete_topic(kafka, river.sink)
    river.finish()
    assert published(kafka, river.sink, 1) == before, "byte for byte"

    end = Lake(spark, river.settings).read(tables.PUBLISHED).agg(F.max("sink_offset")).collect()[0][0] + 2
    delete_records(kafka, river.sink, end)
    assert published(kafka, river.sink, 1) == []
    river.flow()
    river.flow()
    river.finish()
    assert published(kafka, river.sink, 1) == expected_messages(river.cases)[len(before) :]


def test_too_many_refused_records_stop_the_run_before_any_is_written(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "release", partitions=1)
    produce(kafka, "release-tracking", [(0, keyed("a", 5))] * 400 + [(0, b"{")] * 700)
    produce(kafka, "release-orders", [(0, keyed("a", 5))] * 600 + [(0, b"{")] * 500)
    with pytest.raises(
        QuarantineLimitError, match=r"tracking: 700 of 1100 records would go to quarantine, most of them as undecodable"
    ):
        river.finish("bronze")
    assert offsets_of(spark, river) == []
    river.config["kafka"]["quarantine_limit"] = "70%"
    river.write()
    river.finish("bronze")
    assert len(offsets_of(spark, river)) == len(offsets_of(spark, river, "orders")) == 1100

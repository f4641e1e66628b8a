"""Kafka has other records at offsets that bronze has read: told before anything is read behind
them, or accepted. Here bronze has others; `tests.faults.elections` has brokers lose their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.support.rivers import River
from tests.support.topics import create_topics, delete_records, produce, settings_of
from watersmeet.errors import NewLeaderError, RecordsReplacedError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.running.generations import preview

pytestmark = [pytest.mark.promise("C52"), pytest.mark.fault("topics")]


def change(river: River, where: str, **updates: str) -> None:
    """Bronze has something else in rows of tracking."""
    uri = river.reader.uri(tables.bronze("tracking"))
    DeltaTable(uri).update(updates, predicate=f"partition = 0 AND {where}")


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """A lake that has read 12 records of each topic-partition."""
    river = River.make(kafka, tmp_path, "".join(filter(str.isalnum, request.node.name)))
    for _ in range(4):
        river.flow(records=2)
    river.finish()
    return river


@pytest.mark.parametrize(
    "updates", [{"value": "x'00'"}, {"key": "x'00'"}, {"kafka_timestamp": "to_timestamp(5)"}]
)
def test_a_run_refuses_where_kafka_has_other_records_than_bronze(
    river: River, updates: dict[str, str]
) -> None:
    topic = river.topic("tracking")
    change(river, "offset >= 9", **updates)
    with pytest.raises(RecordsReplacedError, match=rf"tracking .*: {topic}\[0\] from 9 to 11;"):
        river.finish()
    with pytest.raises(RecordsReplacedError):
        preview(river.reader, river.settings, river.partitions)
    assert river.reader.select(tables.RESETS, ["reason"]).num_rows == 0


def test_what_kafka_has_instead_may_be_passed_over_and_sent_again(river: River) -> None:
    change(river, "offset >= 9", kafka_timestamp="to_timestamp(5)")
    river.config["kafka"]["on_data_loss"] = "continue"
    river.write()
    river.finish()
    columns = ["partition", "from_offset", "to_offset", "reason"]
    expected = [(0, 9, 12, "on_data_loss: continue")]
    for policy in ("stop", "continue"):
        [row] = river.reader.select(tables.RESETS, columns).to_pylist()
        assert [tuple(row.values())] == expected
        river.config["kafka"]["on_data_loss"] = policy
        river.write()
        river.flow(records=2)
        river.finish()
    assert river.broken_promises() == []


def test_records_that_are_gone_or_forgotten_or_too_large_differ_from_none(river: River) -> None:
    """Of these, bronze has no more than the time, or Kafka nothing."""
    change(river, "offset = 11", key="null", value="null")
    river.finish()
    change(river, "offset = 11", key="x'00'", reason="'too_large'")
    river.finish()
    change(river, "offset = 11", kafka_timestamp="to_timestamp(5)")
    with pytest.raises(RecordsReplacedError, match=r"\[0\] from 11 to 11"):
        river.finish()
    delete_records(river.kafka, river.topic("tracking"), 0, 12)
    river.finish()


def test_what_a_later_leader_has_appended_is_not_read(kafka: str) -> None:
    topic = "later-leader"
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(0, b"a"), (1, b"b")])
    cluster = Cluster(settings_of(kafka))
    epochs = cluster.leader_epochs(topic, 2)
    known = Range(topic, 0, 0, 1, epochs[0])
    assert [batch.num_rows for batch in read_range(cluster.kafka, known)] == [1]
    with pytest.raises(NewLeaderError, match=rf"{topic}\[0\] has another leader at offset 0"):
        list(read_range(cluster.kafka, Range(topic, 0, 0, 1, epochs[0] - 1)))

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.support.topics import create_topics, produce
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import KAFKA, ReadingRules
from watersmeet.core.types import columns_ddl
from watersmeet.engine import KafkaInput
from watersmeet.engine.tasks import FromKafka
from watersmeet.errors import is_retriable, root_cause
from watersmeet.kafka.reading import Range, share, split_ranges
from watersmeet.settings import KafkaSettings

SECRET = "hunter2!secret"
RULES = ReadingRules(event_times=(), max_future_ms=0)


@dataclass(frozen=True)
class AsTheyAre(KafkaInput):
    fails: bool = False

    def decode(self, batch: pa.RecordBatch) -> pa.Table:
        if self.fails:
            raise ValueError(f"a defect at {batch['offset'][0]}")
        return pa.Table.from_batches([batch])


def read(spark: SparkSession, source: KafkaInput, ranges: Sequence[Range]) -> DataFrame:
    tasks = spark.range(0, len(ranges), 1, len(ranges))
    return tasks.mapInArrow(FromKafka(source, ranges, KAFKA), columns_ddl(KAFKA))


@pytest.fixture
def as_they_are(kafka: str, topic: str) -> Callable[..., KafkaInput]:
    def made(
        servers: str = kafka, options: dict[str, str] | None = None, *, fails: bool = False
    ) -> KafkaInput:
        settings = KafkaSettings(bootstrap_servers=servers, options=options or {})
        return AsTheyAre(InputId("orders", topic), settings, RULES, fails=fails)

    return made


@pytest.mark.long
def test_an_error_is_recognised_on_the_driver_wherever_it_happens(
    kafka: str,
    root_session: SparkSession,
    as_they_are: Callable[..., KafkaInput],
    topic: str,
) -> None:
    create_topics(kafka, topic, partitions=1)
    produce(kafka, topic, [(0, b"x")])

    def in_a_worker(source: KafkaInput, since: int, match: str) -> Exception:
        with pytest.raises(Exception, match=match) as caught:
            read(root_session, source, [Range(topic, 0, since, since + 1)]).collect()
        return caught.value

    beyond = in_a_worker(as_they_are(), 5, r"watersmeet\.errors")
    assert root_cause(beyond).startswith(f"{topic}[0] ends at offset 1, and 5 is to be read next")
    assert not is_retriable(in_a_worker(as_they_are(fails=True), 0, "a defect at 0"))
    away = in_a_worker(as_they_are("127.0.0.1:1"), 0, r"watersmeet\.errors")
    assert is_retriable(away)
    assert root_cause(away).startswith("no Kafka broker answers at 127.0.0.1:1 (")


@pytest.mark.long
def test_ranges_are_read_as_a_batch_by_several_tasks_and_no_secret_shows(
    kafka: str,
    root_session: SparkSession,
    as_they_are: Callable[..., KafkaInput],
    topic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(0, b"%d" % i) for i in range(45_000)] + [(1, b"x")] * 3)
    ranges = [Range(topic, 0, 0, 45_000), Range(topic, 1, 1, 2), Range(topic, 1, 2, 2)]
    source = as_they_are(options={"sasl.password": SECRET})
    rows = read(root_session, source, split_ranges(ranges, 2))
    found = rows.selectExpr("spark_partition_id() AS task", "partition", "offset").toArrow()
    assert sorted(
        zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True)
    ) == [
        *((0, offset) for offset in range(45_000)),
        (1, 1),
    ]
    assert len(found["task"].unique()) == 3
    rows.explain("extended")
    assert SECRET not in capsys.readouterr().out


# -- who reads how much


@pytest.mark.parametrize(
    ("backlog", "limit", "expected"),
    [
        ({"0": 5, "1": 3}, 8, {"0": 5, "1": 3}),
        ({"0": 75, "1": 25}, 20, {"0": 14, "1": 5}),
        ({"0": 1_000_000, "1": 1, "2": 0}, 100, {"0": 99, "1": 1, "2": 0}),
        ({"0": 10, "1": 10, "2": 10}, 2, {"0": 1, "1": 1, "2": 1}),
        ({"0": 2**40, "1": 2**40}, 2**31, {"0": 2**30, "1": 2**30}),
        ({}, 5, {}),
    ],
)
def test_a_batch_is_shared_in_proportion_and_forgets_no_partition(
    backlog: dict[str, int], limit: int, expected: dict[str, int]
) -> None:
    assert share(backlog, limit) == expected


def test_a_share_keeps_to_the_limit_and_to_what_is_there() -> None:
    for limit in range(5, 300, 7):
        backlog = {"0": 1, "1": 2, "2": 3, "3": 250, "4": 40}
        taken = share(backlog, limit)
        assert sum(taken.values()) <= limit
        assert all(1 <= taken[p] <= backlog[p] for p in backlog)


@pytest.mark.parametrize(
    ("sizes", "parallelism", "expected"),
    [
        ([100_000], 2, [50_000, 50_000]),
        ([100_000, 100_000], 2, [100_000, 100_000]),
        ([30_000], 4, [30_000]),
        ([45_000], 4, [22_500, 22_500]),
        ([90_000, 10_000, 0], 2, [45_000, 45_000, 10_000]),
        ([0], 2, []),
    ],
)
def test_ranges_are_split_so_that_every_task_has_something_to_do(
    sizes: list[int], parallelism: int, expected: list[int]
) -> None:
    ranges = [Range("t", p, 2**40, 2**40 + size) for p, size in enumerate(sizes)]
    parts = split_ranges(ranges, parallelism)
    assert [part.size for part in parts] == expected
    for wanted in ranges:
        own = [part for part in parts if part.partition == wanted.partition]
        assert sum(part.size for part in own) == wanted.size
        assert all(a.until_offset == b.from_offset for a, b in pairwise(own))

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.support.topics import create_topics, produce
from watersmeet.core.reading import KAFKA
from watersmeet.core.types import columns_ddl
from watersmeet.errors import is_retriable, root_cause
from watersmeet.kafka.reading import Range, share, split_ranges
from watersmeet.kafka.source import DecodedTopic, kafka_source, register
from watersmeet.settings import KafkaSettings

SECRET = "hunter2!secret"
DEADLINE_S = 60
SCHEMA = columns_ddl(KAFKA)


def as_they_are(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


@pytest.fixture
def decoded(kafka: str) -> Callable[..., DecodedTopic]:
    def made(options: dict[str, str] | None = None, **other: Any) -> DecodedTopic:
        settings = KafkaSettings(bootstrap_servers=kafka, options=options or {})
        return DecodedTopic(**{"kafka": settings, "decode": as_they_are, "schema": SCHEMA, **other})

    return made


def fail(batch: pa.RecordBatch) -> pa.Table:
    raise ValueError(f"a defect at {batch['offset'][0]}")


@pytest.mark.long
def test_an_error_is_recognised_on_the_driver_wherever_it_happens(
    kafka: str,
    root_session: SparkSession,
    decoded: Callable[..., DecodedTopic],
    topic: str,
) -> None:
    create_topics(kafka, topic, partitions=1)
    produce(kafka, topic, [(0, b"x")])

    def in_a_worker(decoded: DecodedTopic, since: int, match: str) -> Exception:
        ranges = kafka_source(f"ranges_{topic}", decoded, [Range(topic, 0, since, since + 1)])
        with pytest.raises(Exception, match=match) as caught:
            root_session.read.format(register(root_session, ranges)).load().collect()
        return caught.value

    beyond = in_a_worker(decoded(), 5, r"watersmeet\.errors")
    assert root_cause(beyond).startswith(f"{topic}[0] ends at offset 1, and 5 is to be read next")
    assert not is_retriable(in_a_worker(decoded(decode=fail), 0, "a defect at 0"))
    away = in_a_worker(
        decoded(kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"), timeout_s=1.0),
        0,
        r"watersmeet\.errors",
    )
    assert is_retriable(away)
    assert root_cause(away).startswith("no Kafka broker answers at 127.0.0.1:1 (")


@pytest.mark.long
def test_ranges_are_read_as_a_batch_by_several_tasks_and_no_secret_shows(
    kafka: str,
    root_session: SparkSession,
    decoded: Callable[..., DecodedTopic],
    topic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_topics(kafka, topic, partitions=2)
    produce(kafka, topic, [(0, b"%d" % i) for i in range(45_000)] + [(1, b"x")] * 3)
    ranges = [Range(topic, 0, 0, 45_000), Range(topic, 1, 1, 2), Range(topic, 1, 2, 2)]
    source = kafka_source(
        f"ranges_{topic}", decoded({"sasl.password": SECRET}, parallelism=2), ranges
    )
    rows = root_session.read.format(register(root_session, source)).load()
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

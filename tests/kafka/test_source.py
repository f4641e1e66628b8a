from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from pipelines.core.reading import KAFKA
from pipelines.core.types import columns_ddl
from pipelines.errors import is_retriable, root_cause
from pipelines.kafka.ranges import share, split_ranges
from pipelines.kafka.reading import Range
from pipelines.kafka.source import DecodedTopic, kafka_ranges, kafka_source, register
from pipelines.settings import KafkaSettings
from tests.kafka.waiting import await_end
from tests.support.topics import create_topics, produce, produce_transaction

SECRET = "hunter2!secret"
SCHEMA = columns_ddl(KAFKA)


def as_they_are(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


class Stream:
    """Runs AvailableNow queries over one source, and keeps what each batch held."""

    def __init__(self, spark: SparkSession, folder: Path, name: str) -> None:
        self.spark, self.folder, self.name = spark, folder, name
        self.batches: list[dict[int, list[int]]] = []

    def run(
        self, decoded: DecodedTopic, start: Mapping[int, int], limit: int, checkpoint: str = "0"
    ) -> None:
        stream = self.spark.readStream.format(
            register(self.spark, kafka_source(self.name, decoded, start, limit))
        ).load()
        query = (
            stream.writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self.folder / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination(60)
        finally:
            query.stop()

    def _keep(self, rows: DataFrame, _: int) -> None:
        found: dict[int, list[int]] = {}
        for partition, offset in sorted(
            tuple(row) for row in rows.select("partition", "offset").collect()
        ):
            found.setdefault(partition, []).append(offset)
        self.batches.append(found)


@pytest.fixture
def stream(root_session: SparkSession, tmp_path: Path, topic: str) -> Iterator[Stream]:
    return Stream(root_session, tmp_path, f"kafka_{topic}")  # type: ignore[return-value]


@pytest.fixture
def decoded(kafka: str, topic: str) -> Callable[..., DecodedTopic]:
    def made(partitions: int, options: dict[str, str] | None = None, **other: Any) -> DecodedTopic:
        settings = KafkaSettings(bootstrap_servers=kafka, options=options or {})
        return DecodedTopic(
            **{
                "kafka": settings,
                "name": topic,
                "partitions": partitions,
                "decode": as_they_are,
                "schema": SCHEMA,
                **other,
            }
        )

    return made


@pytest.mark.long
def test_a_stream_goes_on_at_given_offsets_without_its_checkpoint_in_batches_within_the_limit(
    kafka: str, stream: Stream, decoded: Callable[..., DecodedTopic], topic: str
) -> None:
    create_topics(kafka, topic, partitions=3)
    produce(kafka, topic, [(p, b"x") for p, count in ((0, 37), (1, 6)) for _ in range(count)])
    produce_transaction(kafka, topic, [b"gone"], 1, commit=False)  # offsets 6 and 7 hold no record
    await_end(KafkaSettings(bootstrap_servers=kafka), topic, 8, partition=1)
    stream.run(decoded(3), {0: 7, 1: 0, 2: 0}, 20)
    assert [sum(map(len, batch.values())) <= 20 for batch in stream.batches] == [True] * len(
        stream.batches
    )
    assert len(stream.batches) in (2, 3)
    offsets = {p: [o for batch in stream.batches for o in batch.get(p, [])] for p in (0, 1)}
    assert offsets == {0: list(range(7, 37)), 1: list(range(6))}
    produce(kafka, topic, [(1, b"x")])
    stream.run(decoded(3), {0: 37, 1: 8, 2: 0}, 100, checkpoint="1")
    assert stream.batches[-1] == {1: [8]}


def fail(batch: pa.RecordBatch) -> pa.Table:
    raise ValueError(f"a defect at {batch['offset'][0]}")


@pytest.mark.long
def test_an_error_is_recognised_on_the_driver_wherever_it_happens(
    kafka: str, stream: Stream, decoded: Callable[..., DecodedTopic], topic: str
) -> None:
    create_topics(kafka, topic, partitions=1)
    produce(kafka, topic, [(0, b"x")])
    with pytest.raises(StreamingQueryException) as missing:
        stream.run(decoded(1, name="no-such-topic"), {0: 0}, 100)  # beside the driver
    assert root_cause(missing.value).startswith("topic no-such-topic does not exist at ")
    assert not is_retriable(missing.value)

    def in_a_worker(decoded: DecodedTopic, since: int, match: str) -> Exception:
        ranges = kafka_ranges(f"ranges_{topic}", decoded, [Range(topic, 0, since, since + 1)])
        with pytest.raises(Exception, match=match) as caught:
            stream.spark.read.format(register(stream.spark, ranges)).load().collect()
        return caught.value

    beyond = in_a_worker(decoded(1), 5, r"pipelines\.errors")
    assert root_cause(beyond).startswith(f"{topic}[0] ends at offset 1, and 5 is to be read next")
    assert not is_retriable(in_a_worker(decoded(1, decode=fail), 0, "a defect at 0"))
    away = in_a_worker(
        decoded(1, kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"), timeout_s=1.0),
        0,
        r"pipelines\.errors",
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
    source = kafka_ranges(
        f"ranges_{topic}", decoded(2, {"sasl.password": SECRET}, parallelism=2), ranges
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


def test_offsets_stay_exact_on_their_way_through_spark(
    decoded: Callable[..., DecodedTopic],
) -> None:
    far = {0: 2**62 + 1, 1: 2**53 + 1}
    reader = kafka_source("far", decoded(2), far, 10)({}).streamReader(None)  # type: ignore[arg-type]
    begin = json.loads(json.dumps(reader.initialOffset()))
    assert begin == {"0": 2**62 + 1, "1": 2**53 + 1}
    [task] = reader.partitions(begin, begin | {"1": 2**53 + 4})
    assert task.value == Range(decoded(2).name, 1, 2**53 + 1, 2**53 + 4)


@pytest.mark.parametrize(
    ("error", "is_silent"), [("EOFError", True), ("BrokenPipeError", True), ("ValueError", False)]
)
def test_a_stream_that_spark_hangs_up_on_ends_without_a_stack_trace(
    error: str, is_silent: bool
) -> None:
    """As Spark's own runner calls it: `stop` while the error passes through, and the error is told
    afterwards."""
    program = f"""
from pipelines.kafka.source import DecodedTopic, kafka_source
from pipelines.settings import KafkaSettings

topic = DecodedTopic(KafkaSettings(bootstrap_servers="none:1"), "t", 1, list, "value BINARY")
reader = kafka_source("hung_up", topic, {{0: 0}}, 1)({{}}).streamReader(None)
try:
    raise {error}
finally:
    reader.stop()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == -signal.SIGKILL, done.stderr == "") == (is_silent, is_silent), (
        done.stderr
    )

"""Kafka as a Python data source of Spark: offset ranges are read and decoded in the same worker,
and handed on as Arrow.

The settings live in the class that `kafka_source` makes, not in options of the reader, so that no
password shows in a plan.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from watersmeet.imports import leave_imports_alone
from watersmeet.kafka.cluster import TIMEOUT_S, Cluster
from watersmeet.kafka.ends import Topics, ends_of
from watersmeet.kafka.ranges import split_ranges
from watersmeet.kafka.reading import Range, read_range
from watersmeet.settings import KafkaSettings


@dataclass(frozen=True)
class DecodedTopic:
    """A topic of a cluster whose committed records are decoded from the columns of
    `core.reading.KAFKA` into `schema` (Spark DDL).
    """

    kafka: KafkaSettings
    decode: Callable[[pa.RecordBatch], pa.Table]
    schema: str
    parallelism: int = 1
    """Minimum number of tasks that read ranges that are large enough, also where there are fewer
    partitions.
    """
    timeout_s: float = TIMEOUT_S
    """Seconds that a broker may take to answer."""


def kafka_source(name: str, topic: DecodedTopic, ranges: Sequence[Range]) -> type[DataSource]:
    """Return a data source to be read as a batch, under `name` once it is registered: the records
    of these ranges.

    What fails in a worker reaches the driver as text: `errors.is_retriable` and `errors.root_cause`
    read it.
    """
    parts = split_ranges(ranges, topic.parallelism)
    return _data_source(name, topic.schema, lambda: _RangesReader(topic, parts))


def ends_source(name: str, topics: Topics) -> type[DataSource]:
    """Return a data source to be read as a stream, under `name` once it is registered.

    Its offsets are the ends of the topics, so it has a batch whenever Kafka has more. No batch has
    a row.
    """
    return _data_source(name, "topic STRING", lambda: _EndsReader(topics))


def register(spark: SparkSession, source: type[DataSource]) -> str:
    """Register a data source with a session, in place of an earlier one of its name, and return
    that name.
    """
    spark.dataSource.register(source)
    return source.name()


def _data_source(name_: str, schema_: str, reader_: Callable[[], Any]) -> type[DataSource]:
    class Kafka(DataSource):
        @classmethod
        def name(cls) -> str:
            """Return the name under which Spark knows the source."""
            return name_

        def schema(self) -> str:
            """Return the columns of a record, as Spark's DDL."""
            return schema_

        def reader(self, schema: StructType) -> Any:  # noqa: ARG002
            """Return the reader of a batch; `schema` is always the source's own."""
            return reader_()

        def streamReader(self, schema: StructType) -> Any:  # noqa: ARG002, N802
            """Return the reader of a stream; `schema` is always the source's own."""
            return reader_()

    return Kafka


class _RangesReader(DataSourceReader):
    def __init__(self, topic: DecodedTopic, ranges: Sequence[Range]) -> None:
        self._topic = topic
        self._ranges = ranges

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of offsets that Spark reads as one partition each."""
        return [InputPartition(part) for part in self._ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range, as Arrow batches."""
        leave_imports_alone()
        topic = self._topic
        for batch in read_range(topic.kafka, partition.value, timeout_s=topic.timeout_s):
            yield from topic.decode(batch).to_batches()


class _EndsReader(DataSourceStreamReader):
    """A reader that lives in a Python process beside the driver.

    Offsets are JSON objects, by topic, from the number of a partition to its end.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return what is not the end of any topic, so that there is a batch at once."""
        return {}

    def latestOffset(self, _: dict[str, Any], __: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the ends that Kafka has now, by topic and partition."""
        ends = ends_of(self._cluster, self._topics)
        return {topic: _named(by_partition) for topic, by_partition in ends.items()}

    def partitions(self, _: dict[str, Any], __: dict[str, Any]) -> Sequence[InputPartition]:
        """Return none: the batch itself reads Kafka."""
        return []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield nothing."""
        return iter(())

    def stop(self) -> None:
        """End the process without a word where Spark has hung up, as it does when it stops a query.

        The caller would only try to report that to Spark, fail, and leave a stack trace on the
        user's screen.
        """
        if isinstance(sys.exc_info()[1], (EOFError, BrokenPipeError, ConnectionResetError)):
            os.kill(os.getpid(), signal.SIGKILL)

    @cached_property
    def _cluster(self) -> Cluster:
        """The cluster to ask, made for the first question: a copy of the reader has none."""
        return Cluster(self._topics.kafka)


def _named(ends: Mapping[int, int]) -> dict[str, int]:
    """Return ends by the name of the partition, as JSON has it."""
    return {str(partition): end for partition, end in ends.items()}

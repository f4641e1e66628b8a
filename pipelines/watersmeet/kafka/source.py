"""Kafka as a Python data source of Spark: a worker reads a range and hands on what it decodes.

The settings live in the class that `kafka_source` makes, not in options of the reader, so that no
password shows in a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from watersmeet.imports import leave_imports_alone
from watersmeet.kafka.cluster import TIMEOUT_S
from watersmeet.kafka.reading import Range, read_range, split_ranges
from watersmeet.settings import KafkaSettings


@dataclass(frozen=True)
class DecodedTopic:
    """A topic whose committed records are decoded from `core.reading.KAFKA` into `schema` (DDL)."""

    kafka: KafkaSettings
    decode: Callable[[pa.RecordBatch], pa.Table]
    schema: str
    parallelism: int = 1
    """Minimum number of tasks that read large ranges, also with fewer partitions."""
    timeout_s: float = TIMEOUT_S
    """Seconds that a broker may take to answer."""


def kafka_source(name: str, topic: DecodedTopic, ranges: Sequence[Range]) -> type[DataSource]:
    """Return a data source of the records of these ranges, under `name` once it is registered.

    What fails in a worker reaches the driver as text: `watersmeet.errors` reads it.
    """
    parts = split_ranges(ranges, topic.parallelism)

    class Kafka(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> str:
            return topic.schema

        def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
            # `schema` is always the source's own.
            return _RangesReader(topic, parts)

    return Kafka


def register(spark: SparkSession, source: type[DataSource]) -> str:
    """Register a data source with a session, in place of one of its name; return the name."""
    spark.dataSource.register(source)
    return source.name()


class _RangesReader(DataSourceReader):
    def __init__(self, topic: DecodedTopic, ranges: Sequence[Range]) -> None:
        self._topic = topic
        self._ranges = ranges

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(part) for part in self._ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        leave_imports_alone()
        topic = self._topic
        for batch in read_range(topic.kafka, partition.value, timeout_s=topic.timeout_s):
            yield from topic.decode(batch).to_batches()

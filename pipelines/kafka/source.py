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
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pipelines.kafka.cluster import TIMEOUT_S, Cluster
from pipelines.kafka.ranges import share, split_ranges
from pipelines.kafka.reading import Range, read_range
from pipelines.settings import KafkaSettings


@dataclass(frozen=True)
class DecodedTopic:
    """The topic that a data source reads: the committed records of the topic `name`, decoded from
    the columns of `core.reading.KAFKA` into `schema` (Spark DDL).
    """

    kafka: KafkaSettings
    name: str
    partitions: int
    decode: Callable[[pa.RecordBatch], pa.Table]
    schema: str
    parallelism: int = 1
    """Minimum number of tasks that read a batch that is large enough, also where it has fewer
    partitions.
    """
    timeout_s: float = TIMEOUT_S
    """Seconds that a broker may take to answer."""


def kafka_source(
    name: str, topic: DecodedTopic, start_offsets: Mapping[int, int], max_offsets_per_batch: int
) -> type[DataSource]:
    """Return a data source to be read as a stream, under `name` once it is registered, from
    `start_offsets` of every partition on.

    A batch spans at most `max_offsets_per_batch` offsets, but at least one of every partition that
    has any. With AvailableNow it ends at what was committed when the query began. What fails in a
    worker reaches the driver as text: `errors.is_retriable` and `errors.root_cause` read it.
    """
    start = dict(start_offsets)
    return _data_source(
        name, topic.schema, lambda: _StreamReader(topic, start, max_offsets_per_batch)
    )


def kafka_ranges(name: str, topic: DecodedTopic, ranges: Sequence[Range]) -> type[DataSource]:
    """Return a data source to be read as a batch, under `name` once it is registered: the records
    of these ranges.
    """
    parts = split_ranges(ranges, topic.parallelism)
    return _data_source(name, topic.schema, lambda: _RangesReader(topic, parts))


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


def _read(topic: DecodedTopic, task: InputPartition) -> Iterator[pa.RecordBatch]:
    for batch in read_range(topic.kafka, task.value, timeout_s=topic.timeout_s):
        yield from topic.decode(batch).to_batches()


class _RangesReader(DataSourceReader):
    def __init__(self, topic: DecodedTopic, ranges: Sequence[Range]) -> None:
        self._topic = topic
        self._ranges = ranges

    def partitions(self) -> Sequence[InputPartition]:
        """Return the ranges of offsets that Spark reads as one partition each."""
        return [InputPartition(part) for part in self._ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range, as Arrow batches."""
        return _read(self._topic, partition)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader that lives in a Python process beside the driver; `read` runs in the workers, on a
    copy.

    Offsets are JSON objects from the partition's number to the next offset to be read: whole
    numbers stay exact in JSON.
    """

    def __init__(
        self, topic: DecodedTopic, start_offsets: Mapping[int, int], max_offsets_per_batch: int
    ) -> None:
        self._topic = topic
        self._limit = max_offsets_per_batch
        self._start = {str(p): offset for p, offset in sorted(start_offsets.items())}
        self._last: dict[str, int] | None = None
        """The end offsets of a query that handles what is available now, by partition."""

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Return, by partition, the offset at which the stream begins."""
        return self._start

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the maximum number of offsets of a batch."""
        return ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the ends of the topic: the stream ends there."""
        self._last = self._ends()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Return, by partition, the offset up to which the next batch reads, from `start` and
        within `limit`.
        """
        ends = self._last or self._ends()
        backlog = {p: max(ends[p] - offset, 0) for p, offset in start.items()}
        counts = share(backlog, limit.max_rows) if isinstance(limit, ReadMaxRows) else backlog
        return {p: offset + counts[p] for p, offset in start.items()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return the offsets of a batch in ranges, each of which Spark reads as one partition."""
        ranges = [Range(self._topic.name, int(p), since, end[p]) for p, since in start.items()]
        return [InputPartition(part) for part in split_ranges(ranges, self._topic.parallelism)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range, as Arrow batches."""
        return _read(self._topic, partition)

    def stop(self) -> None:
        """End the process without a word where Spark has hung up, as it does when it stops a query.

        The caller would only try to report that to Spark, fail, and leave a stack trace on the
        user's screen.
        """
        if isinstance(sys.exc_info()[1], (EOFError, BrokenPipeError, ConnectionResetError)):
            os.kill(os.getpid(), signal.SIGKILL)

    def _ends(self) -> dict[str, int]:
        bounds = self._cluster.bounds(self._topic.name, self._topic.partitions)
        return {str(p): end for p, (_, end) in bounds.items()}

    @cached_property
    def _cluster(self) -> Cluster:
        """The cluster to ask, made for the first question: the copies that the workers get have
        none.
        """
        return Cluster(self._topic.kafka, self._topic.timeout_s)

"""The pure functions of a batch of silver in the form in which an engine calls them.

An engine gives a function a table for each of its inputs: the records by input, the heads of
tenants, the messages read back, and rows of silver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import int64s
from pipelines.core.input_columns import input_numbers
from pipelines.core.inputs import names_of
from pipelines.core.merge import (
    NO_MESSAGES,
    Batch,
    late,
    late_again,
    merge,
    merge_in_chunks,
)
from pipelines.core.plan import TopicPartition
from pipelines.core.tenants import HEADS
from pipelines.engine import Input
from pipelines.errors import MissingRecordsError
from pipelines.lake import tables

_NO_HEADS = HEADS.empty_table()


@dataclass(frozen=True)
class MergeInputs:
    """The inputs of a batch beside rows of silver; those without rows are left out.

    `expected`: by topic-partition, the number of records with a time that the plan has seen.
    """

    records: Sequence[Input]
    heads: Sequence[Input]
    messages: Sequence[Input]
    expected: Mapping[TopicPartition, int]

    @property
    def rows(self) -> list[Input]:
        """All of them, in the order in which the functions take them."""
        return [*self.records, *self.heads, *self.messages]

    def functions(self, batch: Batch) -> MergeFunctions:
        """Return the functions that take these inputs."""
        counts = (len(self.records), len(self.heads), len(self.messages))
        return MergeFunctions(batch, self.expected, *counts)


@dataclass(frozen=True)
class MergeFunctions:
    """The functions of a batch, which take so many inputs of each kind."""

    batch: Batch
    expected: Mapping[TopicPartition, int]
    records: int
    heads: int
    messages: int

    def merge(self, *inputs: pa.Table) -> pa.Table:
        """Return what a batch changes in a partition; the last input are open and waiting rows."""
        records, heads, messages = self._split(inputs[:-1])
        return merge(records, inputs[-1], self.batch, messages, heads)

    def merge_in_chunks(
        self, chunks: Iterator[pa.Table], *inputs: pa.Table
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield each chunk of open and waiting rows, and what a batch changes in it."""
        records, heads, messages = self._split(inputs)
        return merge_in_chunks(records, chunks, self.batch, messages, heads)

    def late(self, *inputs: pa.Table) -> pa.Table:
        """Return the late records of a partition."""
        records, heads, _ = self._split(inputs)
        return late(records, self.batch, heads)

    def _split(self, inputs: Sequence[pa.Table]) -> tuple[pa.Table, pa.Table, pa.Table]:
        """Return the records, the heads and the messages.

        Raises MissingRecordsError if a topic-partition has fewer records than the plan has seen.
        """
        records = together(inputs[: self.records], self.batch)
        _check_complete(records, self.batch, self.expected)
        heads = [*inputs[self.records : self.records + self.heads], _NO_HEADS]
        messages = [*inputs[self.records + self.heads :], NO_MESSAGES]
        return records, heads[0], messages[0]


@dataclass(frozen=True)
class LateAgain:
    """The function that finds waiting rows that a new epoch makes late."""

    batch: Batch

    def __call__(self, *inputs: pa.Table) -> pa.Table:
        """Return their records; `inputs`: records by input, and the waiting rows."""
        return late_again(together(inputs[:-1], self.batch), inputs[-1], self.batch)


def together(records: Sequence[pa.Table], batch: Batch) -> pa.Table:
    """Return a batch's records of several inputs as one table."""
    return pa.concat_tables(records) if records else batch.record_schema().empty_table()


def _check_complete(
    records: pa.Table, batch: Batch, expected: Mapping[TopicPartition, int]
) -> None:
    partitions = int64s(records["partition"])
    offsets = int64s(records["offset"])
    inputs = batch.inputs
    numbers = int64s(pc.fill_null(input_numbers(records, inputs), -1))
    here = {*np.unique(partitions).tolist()}
    for tp, count in expected.items():
        if tp.partition in here:
            done = batch.plan.ranges[tp]
            is_its = (partitions == tp.partition) & (offsets < done.until_offset)
            existing = np.count_nonzero(is_its & (numbers == inputs.index(tp.input)))
            if existing < count:
                raise MissingRecordsError(
                    names_of(inputs)[tp.input],
                    tables.bronze(tp.input.source),
                    tp.partition,
                    f"{done.from_offset} to {done.until_offset - 1}",
                    existing,
                    count,
                )

"""The pure functions of a batch of silver in the form in which an engine calls them.

An engine gives a function a table for each of its inputs: the records by input, how many of them
the plan has counted, the heads of tenants, the messages read back, and rows of silver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import input_numbers, int64s
from watersmeet.core.inputs import InputId, names_of
from watersmeet.core.merge import (
    NO_MESSAGES,
    Batch,
    merge,
    merge_in_chunks,
)
from watersmeet.core.plan import TopicPartition
from watersmeet.core.positions import NotReadError
from watersmeet.core.tenants import HEADS
from watersmeet.errors import MissingRecordsError
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables

_NO_HEADS = HEADS.empty_table()

COUNTS: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("source", pa.string()),
        pa.field("topic", pa.string()),
        pa.field("records", pa.int64()),
    ]
)
"""The number of records of a topic-partition that have a time, as a plan has counted them."""


def counts_of(records: Mapping[TopicPartition, int]) -> pa.Table:
    """Return numbers of records as rows (`COUNTS`), without those of no record."""
    rows = [
        {"partition": tp.partition, **tp.input._asdict(), "records": count}
        for tp, count in records.items()
        if count
    ]
    return pa.Table.from_pylist(rows, COUNTS)


@dataclass(frozen=True)
class MergeFunctions:
    """The functions of a batch, which judge finished rows by expressions.

    `kinds`: those of their inputs beside rows of silver, in order.

    - `records`: of the batch, by input; `counts`: how many these have to be (`COUNTS`). They are an
      input, so that whoever merges a partition knows it, also where it has no record.
    - `heads`: of tenants. `messages`: those that were read back from the sink.
    - `waited`: for the first batch of an epoch, the records that wait and are late by its rules.
    """

    batch: Batch
    expressions: Expressions
    kinds: Sequence[str]

    def merge(self, *inputs: pa.Table) -> pa.Table:
        """Return what a batch writes of a partition; the last input are open and waiting rows."""
        records, *others = self._split(inputs[:-1])
        with _naming_what_is_lost():
            changed = merge(records, inputs[-1], self.batch, *others)
        return self.expressions.validated(changed)

    def merge_in_chunks(
        self, chunks: Iterator[pa.Table], *inputs: pa.Table
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield each chunk of open and waiting rows, and what a batch changes in it."""
        records, *others = self._split(inputs)
        with _naming_what_is_lost():
            for chunk, changed in merge_in_chunks(records, chunks, self.batch, *others):
                yield chunk, self.expressions.validated(changed)
                del chunk, changed  # not in memory while the next ones come

    def _split(self, inputs: Sequence[pa.Table]) -> tuple[pa.Table, pa.Table, pa.Table, pa.Table]:
        """Return the records, the messages, the heads, and the records that waited and are late.

        Raises MissingRecordsError if a topic-partition has fewer records than the plan has seen.
        """
        of_kind = defaultdict[str, list[pa.Table]](list)
        for kind, rows in zip(self.kinds, inputs, strict=True):
            of_kind[kind].append(rows)
        records = together(of_kind["records"], self.batch)
        for counts in of_kind["counts"]:
            _check_complete(records, self.batch, counts)
        heads = [*of_kind["heads"], _NO_HEADS]
        messages = [*of_kind["messages"], NO_MESSAGES]
        return records, messages[0], heads[0], together(of_kind["waited"], self.batch)


def together(records: Sequence[pa.Table], batch: Batch) -> pa.Table:
    """Return a batch's records of several inputs as one table."""
    return pa.concat_tables(records) if records else batch.record_schema().empty_table()


@contextmanager
def _naming_what_is_lost() -> Iterator[None]:
    try:
        yield
    except NotReadError as error:
        sources, missing, count = error.args
        raise MissingRecordsError(
            f"bronze of {sources} has lost records: {missing} of {count} that wait for their "
            "tenants were not read, and nothing was merged",
            fix="bring the files of bronze back, or look for what deletes them",
        ) from None


def _check_complete(records: pa.Table, batch: Batch, counts: pa.Table) -> None:
    partitions = int64s(records["partition"])
    offsets = int64s(records["offset"])
    inputs = batch.inputs
    numbers = int64s(pc.fill_null(input_numbers(records, inputs), -1))
    for count in counts.to_pylist():
        input_id = InputId(count["source"], count["topic"])
        partition = count["partition"]
        done = batch.plan.ranges[TopicPartition(input_id, partition)]
        is_its = (partitions == partition) & (offsets < done.until_offset)
        existing = np.count_nonzero(is_its & (numbers == inputs.index(input_id)))
        if existing < count["records"]:
            raise MissingRecordsError(
                f"bronze of {names_of(inputs)[input_id]} has lost records: {existing} of "
                f"{count['records']} were read of partition {partition}, offsets "
                f"{done.from_offset} to {done.until_offset - 1}, and nothing was merged",
                fix=f"bring the files of {tables.bronze(input_id.source)} back, or look for what "
                "deletes them",
            )

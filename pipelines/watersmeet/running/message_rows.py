"""Reads the finished rows of a publication, and makes their messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import times_ms
from watersmeet.core.message import (
    SAYS_CLOSING,
    as_read,
    in_message_order,
    message_values,
    messages,
)
from watersmeet.core.sequence import MessageTime
from watersmeet.engine import Engine
from watersmeet.expressions.publish import Expressions, warn
from watersmeet.lake import tables
from watersmeet.lake.epochs import Epochs
from watersmeet.lake.order import PLACE_COLUMNS
from watersmeet.lake.table_reader import Condition, Where
from watersmeet.running.publication_plan import Pending, TimeRange, Unpublished
from watersmeet.running.publications import Tails, end_of
from watersmeet.settings import Settings

Headers: TypeAlias = Mapping[MessageTime, list[tuple[str, bytes]]]
"""Additional headers of messages, by their time."""


@dataclass(frozen=True)
class MessageRows:
    """Reader of the rows and messages of one lake's publications.

    `finished`: all finished records of the newest generation.
    """

    engine: Engine
    settings: Settings
    epochs: Epochs
    finished: Unpublished

    def messages(
        self, backlog: Pending, tails: Tails, headers: Mapping[int, Headers]
    ) -> Iterator[pa.Table]:
        """Yield the messages of what is pending, each table for one partition.

        `headers`: additional ones, by partition.
        """
        ends = dict(tails)
        for chunk in backlog.chunks:
            rows = in_message_order(self.rows(chunk))
            for partition, time_range in chunk.items():
                partition_rows = _of_range(rows, partition, time_range)
                parts = self._with_headers(partition_rows, headers.get(partition, {}), time_range)
                for part, part_headers in parts:
                    made = messages(part, part["value"], ends.get(partition), part_headers)
                    if made.num_rows:
                        ends[partition] = end_of(made)
                        yield made

    def _with_headers(
        self, rows: pa.Table, headers: Headers, time_range: TimeRange
    ) -> Iterator[tuple[pa.Table, Headers]]:
        """Yield the rows of a partition in parts, each with the headers of its messages.

        In a transaction only the last message has headers, since all of its messages are published
        or none. Otherwise every message whose time has headers gets them.
        """
        if self.settings.publish.delivery != "exactly_once":
            yield rows, headers
            return
        # More of the last time may follow.
        last = rows.num_rows if time_range.end is not None else max(rows.num_rows - 1, 0)
        yield rows.slice(0, last), {}
        yield rows.slice(last), headers

    def rows(self, chunk: Mapping[int, TimeRange]) -> pa.Table:
        """Return the finished rows of a chunk with the `value` of their message.

        The value, and whether the message says when the record was closed (`SAYS_CLOSING`), follow
        the rules of the epoch that finished the row.
        """
        columns = ["partition", "last_event_time", *PLACE_COLUMNS, *self.settings.sources]
        where = self.finished.of_chunk(chunk)
        by_epoch = []
        until: list[Condition] = []
        for epoch in reversed(self.epochs):
            if len(self.epochs) > 1:
                batches = [("batch", ">=", epoch.from_batch), *until]
                epoch_where: Where = [[*term, *batches] for term in where]
            else:
                epoch_where = where
            rows = self.engine.reader.rows(tables.SILVER, columns, epoch_where)
            by_epoch.append(with_message_values(rows, epoch.settings))
            until = [("batch", "<", epoch.from_batch)]
        return pa.concat_tables(by_epoch)


def _of_range(rows: pa.Table, partition: int, time_range: TimeRange) -> pa.Table:
    """Return the rows of a partition whose messages have a time of the range."""
    is_its = pc.and_(
        pc.equal(rows["partition"], partition),
        pc.equal(rows[SAYS_CLOSING], time_range.says_closing),
    )
    partition_rows = rows.filter(is_its)
    times = times_ms(partition_rows[time_range.columns[0]])
    return partition_rows.filter(pa.array((times >= time_range.first) & (times <= time_range.last)))


def with_message_values(rows: pa.Table, settings: Settings) -> pa.Table:
    """Return rows of silver with the `value` (large_binary) of their message, and `SAYS_CLOSING`.

    Both follow the rules of the epoch that finished the row. An earlier epoch than the
    current one knew fewer fields of the values, so its messages have only those.
    """
    sources = settings.sources
    expressions = Expressions.of(settings)
    says_closing = pa.repeat(pa.scalar(settings.merge.says_closing), rows.num_rows)
    rows = rows.append_column(SAYS_CLOSING, says_closing)
    if expressions.value is None:
        read = as_read(rows, {name: source.read_type for name, source in sources.items()})
        return rows.append_column("value", message_values(read, list(sources)))
    read = as_read(rows, {name: source.value_type for name, source in sources.items()})
    outcome = expressions.messages(read)
    warn("publish.value", pc.sum(outcome.failed).as_py(), rows.num_rows, outcome.error)
    return rows.append_column("value", outcome.values)

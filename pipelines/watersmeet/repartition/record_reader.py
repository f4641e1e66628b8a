"""Reading of the records that are written next, while the previous ones are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import pyarrow as pa

from watersmeet.core.repartition import ROUTED, InputPartition, assign_partitions
from watersmeet.errors import unknown_schema_of
from watersmeet.kafka.reading import Range
from watersmeet.kafka.registry import rules_of
from watersmeet.kafka.workers import read_decoded
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

READ_BYTES: Final = 80 * 1024 * 1024
"""Approximate size of the records that are read at a time, while as many are written."""

_SHARES: Final = 1000
"""Number of equal shares that the amount read at a time is divided into."""

Records: TypeAlias = tuple[pa.Table, dict[InputPartition, int]]
"""Records of one topic, and the offset at which reading them ended, by input."""


@dataclass
class RecordReader:
    """Reads records of one source, with what decides where they go.

    `executor`: reads, in the background. `size`: how much is read at a time, which a transaction
    has to hold.
    """

    settings: Settings
    source: str
    executor: Executor
    size: TransactionSize = field(default_factory=lambda: TransactionSize(_SHARES, _SHARES))
    _given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    _waiting_since: float | None = None
    """Time (monotonic) since which a schema is waited for that the registry does not have."""

    def start(
        self, unread: Sequence[tuple[InputPartition, int, int]], inputs: int
    ) -> Future[list[Records]]:
        """Start reading inputs, each from an offset up to another, an equal share of each.

        `inputs`: the number of all inputs, of which these are some.
        """
        offsets = self.settings.kafka.max_offsets_per_batch * self.size.limit // self.size.largest
        share = max(1, offsets // inputs)
        ranges = [Range(*tp, since, min(since + share, end)) for tp, since, end in unread]
        return self.executor.submit(self._read, ranges, inputs)

    def result(self, reading: Future[list[Records]]) -> list[Records]:
        """Wait for a read, and return its records by topic. Raises what the read has raised.

        A schema that the registry lacks is given up once `registry.unknown_after` has passed.
        """
        try:
            records = reading.result()
        except Exception as failure:
            self._note_unknown_schema(failure)
            raise
        self._waiting_since = None
        return records

    def _note_unknown_schema(self, failure: Exception) -> None:
        after_ms = self.settings.sources[self.source].unknown_after_ms
        schema_id = unknown_schema_of(failure)
        if after_ms is None or schema_id is None:
            return
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since >= after_ms / 1000:
            self._given_up.add(schema_id)

    def _read(self, ranges: Sequence[Range], inputs: int) -> list[Records]:
        """Return the records of ranges, topic by topic, as far as there is room for them."""
        rules = rules_of(self.settings, self.source, self._given_up)
        decode = partial(assign_partitions, rules=rules)
        max_bytes = READ_BYTES * self.size.limit // self.size.largest
        records = []
        for topic in dict.fromkeys(offset_range.topic for offset_range in ranges):
            topic_ranges = [offset_range for offset_range in ranges if offset_range.topic == topic]
            share = max_bytes * len(topic_ranges) // inputs
            rows, reached = read_decoded(self.settings.kafka, topic_ranges, decode, ROUTED, share)
            ends = {InputPartition(topic, p): offset for p, offset in reached.items()}
            records.append((rows, ends))
        return records

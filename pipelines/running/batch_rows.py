"""Reads the rows that a batch of silver merges: records, open rows, and messages read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from pipelines.core.clocks import Clocks, lookahead
from pipelines.core.inputs import InputId
from pipelines.core.merge import MESSAGE_SCHEMA, RECORD_SCHEMA, Batch, may_change
from pipelines.core.plan import BatchPlan, Rules
from pipelines.core.reading import RECORD_BYTES
from pipelines.core.types import TENANT
from pipelines.engine import Engine, Selection, SilverRows
from pipelines.lake import tables
from pipelines.lake.generations import Generation
from pipelines.lake.inputs import of_topic
from pipelines.lake.recovered import MESSAGES, has_messages
from pipelines.lake.table_reader import Where, within
from pipelines.running.merge_functions import MergeInputs
from pipelines.running.planning import Planner
from pipelines.settings import Settings

MAX_KEYS = 5_000
"""Maximum number of keys of open rows in a query; with more of them, all open rows are read."""

_BRONZE_COLUMNS = [name for name in RECORD_SCHEMA.names if name != "source"]
_KEY = ["partition", *TENANT.names, "merge_key"]
_OPEN_TIMES = [*_KEY, "status", "event_time", "last_event_time", "due", "position"]


@dataclass
class BatchRows:
    """Reader of the rows of one lake's batches."""

    engine: Engine
    settings: Settings
    generation: Generation
    _unfinished_bytes: int | None = None
    """Maximum size (bytes) of the records of open rows; None: not measured yet."""

    def records(self, plan: BatchPlan, rules: Rules) -> list[Selection]:
        """Return, by input, every record of the batch's ranges that has a time.

        Those after each range that the clocks need are there, too. An input of which nothing is
        needed has no item.
        """
        beyond = lookahead(rules).records
        records = []
        for input_id in self.settings.inputs:
            ranges = {
                tp.partition: (done.from_offset, done.until_offset + beyond)
                for tp, done in plan.ranges.items()
                if tp.input == input_id and done.size + beyond
            }
            if ranges:
                records.append(self.between(input_id, ranges))
        return records

    def between(self, input_id: InputId, ranges: Mapping[int, tuple[int, int]]) -> Selection:
        """Return the records of bronze at these offsets that have a time."""
        timed: Where = [[*terms, ("event_time", "is not null", None)] for terms in within(ranges)]
        constants = {"source": input_id.source}
        where = of_topic(input_id, timed)
        return Selection(tables.bronze(input_id.source), _BRONZE_COLUMNS, where, constants)

    @cached_property
    def has_messages(self) -> bool:
        """True where messages were read back from the sink, which the merge must recognise."""
        return has_messages(self.engine.reader, self.generation)

    def inputs(self, batch: Batch, planner: Planner) -> MergeInputs:
        """Return what a batch reads beside rows of silver."""
        heads = planner.state.heads
        messages = []
        if self.has_messages:
            messages.append(Selection(tables.RECOVERED, MESSAGE_SCHEMA.names, MESSAGES))
        return MergeInputs(
            self.records(batch.plan, batch.rules),
            [heads] if heads.num_rows else [],
            messages,
            planner.records(batch.plan),
        )

    def open_rows(self, unfinished: SilverRows) -> Selection:
        """Return the columns of open and waiting rows that the merge takes."""
        columns = [*_OPEN_TIMES, *self.settings.sources, RECORD_BYTES.name]
        return Selection(tables.SILVER, columns, unfinished.where)

    def select_unfinished(self, batch: Batch, clocks: Clocks) -> SilverRows:
        """Return which open and waiting rows a batch may change, and their size.

        If they are large and few of them may change, only those with the keys that may.
        """
        unfinished = SilverRows(["open", "waiting"], 0)
        unfinished = replace(unfinished, size=self._measure(unfinished))
        if unfinished.size <= self.engine.merge_bytes:
            return unfinished
        keys = self._changing_keys(batch, clocks, unfinished)
        return unfinished if len(keys) > MAX_KEYS else replace(unfinished, keys=keys)

    def _measure(self, unfinished: SilverRows) -> int:
        """Return the size (bytes) of the records of these rows.

        It is measured when it may have grown beyond what a batch may have.
        """
        limit = self.engine.merge_bytes
        if self._unfinished_bytes is None or self._unfinished_bytes > limit:
            values = {"bytes": ("sum", RECORD_BYTES.name)}
            size = self.engine.reader.summary(tables.SILVER, [], values, unfinished.where)
            self._unfinished_bytes = size["bytes"][0].as_py() or 0
        size_bytes = self._unfinished_bytes
        if size_bytes <= limit:
            # A batch adds no more than this, except for single records that are larger.
            self._unfinished_bytes += limit
        return size_bytes

    def _changing_keys(self, batch: Batch, clocks: Clocks, unfinished: SilverRows) -> list[str]:
        """Return the keys of the rows that a batch may change."""
        rows = self.engine.reader.rows(tables.SILVER, _OPEN_TIMES, unfinished.where)
        is_changing = may_change(rows, self._keys(batch.plan), batch, clocks)
        return sorted(set(rows.filter(pa.array(is_changing))["merge_key"].to_pylist()))

    def _keys(self, plan: BatchPlan) -> pa.Table:
        """Return the partitions, tenants and keys of a batch's records."""
        keys = []
        for input_id in self.settings.inputs:
            ranges = {
                tp.partition: (done.from_offset, done.until_offset)
                for tp, done in plan.ranges.items()
                if tp.input == input_id
            }
            keyed: Where = [[*term, ("merge_key", "is not null", None)] for term in within(ranges)]
            table = tables.bronze(input_id.source)
            keys.append(self.engine.reader.rows(table, _KEY, of_topic(input_id, keyed)))
        return pa.concat_tables(keys)

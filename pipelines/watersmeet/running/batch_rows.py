"""Reads the rows that a batch of silver merges: records, open rows, and messages read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow.compute as pc

from watersmeet.core.clocks import lookahead
from watersmeet.core.columns import input_numbers, int64s
from watersmeet.core.inputs import InputId
from watersmeet.core.merge import MESSAGE_SCHEMA, RECORD_SCHEMA, Batch, released_keys
from watersmeet.core.plan import BatchPlan, Rules
from watersmeet.core.positions import late_by_now
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import ID, RECORD_IDS
from watersmeet.core.too_large import RECORD_COUNT
from watersmeet.core.types import PLACE, TENANT
from watersmeet.engine import Engine, Input, Selection, SilverRows
from watersmeet.lake import tables
from watersmeet.lake.history import Generation
from watersmeet.lake.inputs import by_input, of_topic
from watersmeet.lake.pieces import Chunk, near, of_few_rows
from watersmeet.lake.recovered import MESSAGES, has_messages
from watersmeet.lake.table_reader import RECORD_ID_BYTES, Where, between, within
from watersmeet.running.merge_functions import counts_of
from watersmeet.running.planning import Planner
from watersmeet.settings import Settings

MAX_KEYS = 5_000
"""Maximum number of keys of open rows in a query; with more of them, all open rows are read."""

_WAITING: Where = [[("status", "=", "waiting")]]

_BRONZE_COLUMNS = [name for name in RECORD_SCHEMA.names if name != "source"]
_KEY = ["partition", *TENANT.names, "merge_key"]
_OPEN_TIMES = [*_KEY, *PLACE, "status", "event_time", "last_event_time", "due", "position"]


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
        return self._of_bronze(input_id.source, of_topic(input_id, timed))

    def _of_bronze(self, source: str, where: Where) -> Selection:
        columns = [*_BRONZE_COLUMNS, ID.name] if self._has_ids else _BRONZE_COLUMNS
        return Selection(tables.bronze(source), columns, where, {"source": source})

    def _waited(self, batch: Batch) -> list[Selection]:
        """Return at least the records that wait and are late by the rules of an epoch, for the
        first batch of it: each is read by its own offset, and few others are.
        """
        if not batch.begins_epoch:
            return []
        columns = [*_KEY, *PLACE, "event_time", "position"]
        waiting = self.engine.reader.rows(tables.SILVER, columns, _WAITING)
        late = late_by_now(waiting, batch.rules)
        numbers = input_numbers(late, self.settings.inputs)
        chunks = list[Chunk]()
        for number, input_id in enumerate(self.settings.inputs):
            its = late.filter(pc.equal(numbers, number))
            places = int64s(its["partition"]), int64s(its["offset"])
            chunks += of_few_rows(input_id, tables.bronze(input_id.source), *places)
        return [self._of_bronze(chunk.input.source, near(chunk)) for chunk in chunks]

    @property
    def _has_ids(self) -> bool:
        return self.engine.lake.settings.has_ids

    @cached_property
    def has_messages(self) -> bool:
        """True where messages were read back from the sink, which the merge must recognise."""
        return has_messages(self.engine.reader, self.generation)

    def inputs(self, batch: Batch, planner: Planner) -> list[tuple[str, Input]]:
        """Return what a batch reads beside rows of silver, with its kind (`MergeFunctions`)."""
        counts = counts_of(planner.records(batch.plan))
        inputs: list[tuple[str, Input]] = [
            ("records", records) for records in self.records(batch.plan, batch.rules)
        ]
        inputs += [("counts", counts)] if counts.num_rows else []
        heads = planner.state.heads
        inputs += [("heads", heads)] if heads.num_rows else []
        if self.has_messages:
            inputs.append(("messages", Selection(tables.SILVER, MESSAGE_SCHEMA.names, MESSAGES)))
        return [*inputs, *(("waited", records) for records in self._waited(batch))]

    def open_rows(self, unfinished: SilverRows) -> Selection:
        """Return the columns of open and waiting rows that the merge takes."""
        columns = [*_OPEN_TIMES, *self.settings.sources, RECORD_BYTES.name, RECORD_COUNT.name]
        columns += [RECORD_IDS.name] if self._has_ids else []
        return Selection(tables.SILVER, columns, unfinished.where)

    def select_unfinished(self, batch: Batch, planner: Planner, records: int) -> SilverRows:
        """Return which open and waiting rows a batch of so many records may change, and their size.

        In two cases those are all that there are: it takes no longer to read them, or the batch has
        many keys. The first batch of an epoch judges each of them anew.
        """
        every = SilverRows(tables.UNFINISHED, 0)
        every = replace(every, size=self._measure(every))
        if every.size <= self.engine.few_bytes or records > MAX_KEYS or batch.begins_epoch:
            return every
        changing = self._changing(batch, planner, every)
        if changing is None:
            return every
        rows, size = self._count_and_size(changing)
        return replace(every, changing=changing, changing_bytes=size, has_changing=rows > 0)

    def merged(self, size: int) -> None:
        """Note that a batch was merged whose records have so many bytes."""
        if self._unfinished_bytes is not None:
            self._unfinished_bytes += size

    def _measure(self, unfinished: SilverRows) -> int:
        """Return the maximum size (bytes) of the records of these rows.

        It is measured when it may have grown beyond `few_bytes`.
        """
        if self._unfinished_bytes is None or self._unfinished_bytes > self.engine.few_bytes:
            _, self._unfinished_bytes = self._count_and_size(unfinished.every)
        return self._unfinished_bytes

    def _count_and_size(self, where: Where) -> tuple[int, int]:
        """Return how many rows meet a condition, and the size (bytes) of their records: a merge
        record names each that has an id, however small its value, unless it is too large.
        """
        values = {"rows": ("count", "*"), "bytes": ("sum", RECORD_BYTES.name)}
        [some] = self.engine.reader.summary(tables.SILVER, [], values, where).to_pylist()
        size = some["bytes"] or 0
        if self._has_ids and size:
            held = [[*term, (RECORD_BYTES.name, ">", 0)] for term in where]
            values = {"records": ("sum", RECORD_COUNT.name)}
            [named] = self.engine.reader.summary(tables.SILVER, [], values, held).to_pylist()
            size += RECORD_ID_BYTES * (named["records"] or 0)
        return some["rows"], size

    def _changing(self, batch: Batch, planner: Planner, unfinished: SilverRows) -> Where | None:
        """Return the condition for the rows that a batch may change; None where it has many keys.

        A row may change in three cases, and is then needed with all others of its key that wait:
        its key is among the batch's; it waits, and its clock has reached it; or it times out.
        """
        columns = [*_KEY, "event_time", "position"]
        waiting = self.engine.reader.rows(tables.SILVER, columns, _WAITING)
        keys = {*self._keys(batch.plan), *released_keys(waiting, planner.clocks)}
        if len(keys) > MAX_KEYS:
            return None
        latest = planner.state.after(batch.plan, planner.clocks).last_tenant_clocks()
        changing = [[*term, ("merge_key", "in", sorted(keys))] for term in unfinished.every]
        over = between("due", {p: (None, clock) for p, clock in latest.items()})
        return [*changing, *([("status", "=", "open"), *term] for term in over if latest)]

    def _keys(self, plan: BatchPlan) -> set[str]:
        keys = set[str]()
        for input_id, ranges in by_input(plan.offsets()).items():
            keyed: Where = [[*term, ("merge_key", "is not null", None)] for term in within(ranges)]
            table = tables.bronze(input_id.source)
            rows = self.engine.reader.rows(table, ["merge_key"], of_topic(input_id, keyed))
            keys.update(rows["merge_key"].to_pylist())
        return keys

"""Corrects late records: what a batch of silver settles, a note of the batch.

A late record is settled once every merge record that could hold it is closed. Then it makes a
correction, or is a late duplicate; both tables say which late records are behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.clocks import Clocks, clocks_of
from pipelines.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    int64s,
    looked_up,
    times_ms,
)
from pipelines.core.corrections import Settled, as_silver, correct, settled, with_validity
from pipelines.core.merge import LATE_SCHEMA, Batch
from pipelines.core.message import as_read, exceeds
from pipelines.core.plan import BatchPlan
from pipelines.core.repeated import DUPLICATE_SCHEMA
from pipelines.core.types import TENANT
from pipelines.engine import Engine
from pipelines.lake import tables
from pipelines.lake.epochs import Epochs, read_epochs
from pipelines.lake.generations import Generation
from pipelines.lake.table_reader import MAX_TERMS, Condition, Where
from pipelines.running.batch_rows import MAX_KEYS, BatchRows
from pipelines.running.batches import make_batch
from pipelines.running.planning import Planner
from pipelines.running.validation import validated
from pipelines.settings import Settings

HEADER_BYTES = 400
"""Maximum bytes of a correction's headers beside those of a message, except for its inputs' names:
further names, numbers and times."""

_PLACE = ["source", "topic", "partition", "offset"]
_NARROW = [*_PLACE, "event_time", *TENANT.names]


class Corrected(NamedTuple):
    """The corrections that a batch makes, and the late records that repeat a part."""

    corrections: pa.Table
    duplicates: pa.Table


NOTHING_CORRECTED = Corrected(DUPLICATE_SCHEMA.empty_table(), DUPLICATE_SCHEMA.empty_table())


@dataclass
class Correcting:
    """Corrects the late records of one generation of a lake.

    `rows`: the reader of the rows of its batches.
    """

    engine: Engine
    settings: Settings
    generation: Generation
    rows: BatchRows
    _first_u: Mapping[int, int] | None = field(default=None, repr=False)
    """By partition, the smallest `u` (ms) of late records that are not settled; None: unknown."""

    def of(self, plan: BatchPlan, planner: Planner) -> Corrected:
        """Return what a batch settles, which silver has and whose late records are noted.

        `planner`: the planner in the state before the batch.
        """
        if not tables.has_corrections(self.engine.lake.settings):
            return NOTHING_CORRECTED
        if plan.has_late or self._first_u is None:
            self._first_u = self._first_pending(planner.state.clocks)
        if all(clock <= self._first_u.get(p, MAX_TIME) for p, clock in plan.clocks.items()):
            return NOTHING_CORRECTED
        late = self._settled(plan, planner)
        self._first_u = None
        if not late.rows.num_rows:
            return NOTHING_CORRECTED
        batch = make_batch(self.engine, self.settings, plan, planner, self.generation)
        made = [
            correct(some, gaps, *self._candidates(some), batch) for some, gaps in self._shares(late)
        ]
        corrections = pa.concat_tables([corrections for corrections, _ in made])
        duplicates = pa.concat_tables([duplicates for _, duplicates in made])
        return Corrected(self._validated(corrections, batch), duplicates)

    # -- late records that are settled

    def _first_pending(self, clocks: Mapping[int, int]) -> dict[int, int]:
        """Return, by partition, the smallest `u` (ms) that may not be settled at these clocks."""
        rows = self._pending(["partition", "u"], clocks, {})
        first = rows.group_by("partition").aggregate([("u", "min")])
        return dict(
            zip(first["partition"].to_pylist(), times_ms(first["u_min"]).tolist(), strict=True)
        )

    def _pending(
        self, columns: list[str], before: Mapping[int, int], after: Mapping[int, int]
    ) -> pa.Table:
        """Return columns of late records whose `u` may lie between two states of the clocks.

        A tenant's clock is never further behind that of its partition than the largest lag.
        """
        lag_ms = max(epoch.settings.merge.tenant_max_lag_ms or 0 for epoch in self._epochs)
        partitions = range(1 + max(tp.partition for tp in self.generation.begin))
        floors = {p: before[p] - lag_ms if p in before else NULL_TIME for p in partitions}
        lowest = min(floors.values())
        terms: list[Condition] = [("generation", "=", self.generation.number)]
        terms.append(("u", ">=", lowest) if lowest != NULL_TIME else ("u", "is not null", None))
        if after:
            terms.append(("u", "<", max(after.values())))
        rows = self.engine.reader.rows(tables.LATE, columns, [terms])
        u = times_ms(rows["u"])
        of_rows = int64s(rows["partition"])
        is_pending: Booleans = u >= looked_up(of_rows, floors, NULL_TIME)
        if after:
            is_pending &= u < looked_up(of_rows, after, NULL_TIME)
        return rows.filter(pa.array(is_pending))

    def _settled(self, plan: BatchPlan, planner: Planner) -> Settled:
        """Return the late records that a batch settles."""
        late = self._pending(LATE_SCHEMA.names, planner.state.clocks, plan.clocks)
        late = self._not_behind(late, plan.batch)
        if not late.num_rows:
            return Settled(late, np.array([], np.int64))
        return settled(late, self._clocks_after(plan, planner), plan.clocks, planner.rules)

    def _not_behind(self, late: pa.Table, batch: int) -> pa.Table:
        """Return the late records that no earlier batch has settled."""
        if not late.num_rows:
            return late
        of_earlier: list[Condition] = [
            ("generation", "=", self.generation.number),
            ("batch", "<", batch),
        ]
        times = times_ms(late["event_time"])
        u = times_ms(late["u"])
        behind = [
            self.engine.reader.rows(table, _PLACE, [[*of_earlier, *terms]])
            for table, terms in (
                (tables.CORRECTIONS, [("u", ">=", int(u.min())), ("u", "<=", int(u.max()))]),
                (
                    tables.DUPLICATES,
                    [
                        ("is_late", "=", True),
                        ("event_time", ">=", int(times.min())),
                        ("event_time", "<=", int(times.max())),
                    ],
                ),
            )
        ]
        places = {place for rows in behind for place in zip(*_columns(rows, _PLACE), strict=True)}
        is_new = [place not in places for place in zip(*_columns(late, _PLACE), strict=True)]
        return late.filter(pa.array(is_new, pa.bool_()))

    def _clocks_after(self, plan: BatchPlan, planner: Planner) -> Clocks:
        """Return the clocks after a batch, with what they need of bronze."""
        records = []
        if planner.rules.lag_ms is not None:
            for selection in self.rows.records(plan, planner.rules):
                columns = [name for name in _NARROW if name != "source"]
                rows = self.engine.reader.rows(selection.table, columns, selection.where)
                for name, text in selection.constants.items():
                    rows = rows.append_column(name, pa.repeat(pa.scalar(text), rows.num_rows))
                records.append(rows.select(_NARROW))
        empty = LATE_SCHEMA.empty_table().select(_NARROW)
        every = pa.concat_tables([empty, *(rows.cast(empty.schema) for rows in records)])
        return clocks_of(planner.rules, plan, planner.idle, every, planner.state.heads)

    @cached_property
    def _epochs(self) -> Epochs:
        return read_epochs(self.engine.reader, self.settings)

    # -- what they correct

    def _shares(self, late: Settled) -> Iterator[tuple[Settled, Int64s]]:
        """Yield the late records in shares of whole keys, each with the gaps of their epochs."""
        gaps = np.array([epoch.settings.merge.window.gap_ms for epoch in self._epochs], np.int64)
        of_batch = self._epochs.numbers_of(int64s(late.rows["batch"]))
        keys = late.rows["merge_key"].combine_chunks().dictionary_encode()
        share_of = int64s(keys.indices) // MAX_KEYS
        for share in range(len(keys.dictionary) // MAX_KEYS + 1):
            is_its = share_of == share
            if is_its.any():
                some = late.rows.filter(pa.array(is_its))
                yield Settled(some, late.settled_at[is_its]), gaps[of_batch][is_its]

    def _candidates(self, late: Settled) -> tuple[pa.Table, pa.Table]:
        """Return the finished rows and the corrections that late records may belong to."""
        windows = [epoch.settings.merge.window for epoch in self._epochs]
        longest_ms = max(window.longest_ms for window in windows)
        gap_ms = max(window.gap_ms for window in windows)
        times = np.unique(times_ms(late.rows["event_time"]))
        keys = pc.unique(late.rows["merge_key"]).to_pylist()
        partitions = pc.unique(late.rows["partition"]).to_pylist()
        of_these: list[Condition] = [
            ("generation", "=", self.generation.number),
            ("partition", "in", sorted(partitions)),
            ("merge_key", "in", sorted(keys)),
        ]
        spans = [
            [("event_time", ">=", first), ("event_time", "<=", last)]
            for first, last in covering(times - longest_ms, times + gap_ms, MAX_TERMS)
        ]
        reader = self.engine.reader
        corrections = self.engine.lake.schema(tables.CORRECTIONS).names
        content = set(self.engine.lake.schema(tables.SILVER).names) - {"status", "position"}
        finished: Where = [[("status", "=", "timed_out"), *of_these, *span] for span in spans]
        corrected: Where = [[*of_these, *span] for span in spans]
        return (
            reader.rows(tables.SILVER, sorted(content), finished),
            reader.rows(tables.CORRECTIONS, corrections, corrected),
        )

    # -- their judgement

    def _validated(self, corrections: pa.Table, batch: Batch) -> pa.Table:
        """Return corrections judged by the rules of the batch that makes them."""
        publish = self.settings.publish
        max_bytes = publish.max_bytes - header_bytes(self.settings)
        rows = as_silver(corrections)
        if batch.max_bytes is not None:
            is_too_large = exceeds(as_read(rows, batch.read_types), batch.sources, max_bytes)
            reasons = pc.if_else(is_too_large, "too_large", pa.scalar(None, pa.string()))
            rows = rows.set_column(
                rows.column_names.index("invalid_reason"), "invalid_reason", reasons
            )
        silver = self.engine.lake.schema(tables.SILVER)
        rows = rows.select(silver.names).append_column("_row", pa.array(range(rows.num_rows)))
        own = publish.model_copy(update={"max_bytes": max_bytes})
        checked = self.engine.collect(validated(self.engine, self.engine.rows(rows), own))
        return with_validity(corrections, checked.sort_by("_row")["invalid_reason"].to_pylist())


def header_bytes(settings: Settings) -> int:
    """Return the maximum bytes of a correction's headers beside those of a message.

    They name the late record, and an id may do so, too.
    """
    names = max(len(source) + len(topic) for source, topic in settings.inputs)
    return HEADER_BYTES + 2 * names


def covering(firsts: Int64s, lasts: Int64s, count: int) -> list[tuple[int, int]]:
    """Return at most `count` spans that cover all of these, with as little between them as can be.

    `firsts` and `lasts` are in ascending order, and one or more.
    """
    gaps = firsts[1:] - lasts[:-1]
    widest = np.sort(np.argsort(-gaps, kind="stable")[: count - 1])
    cuts = [int(cut) + 1 for cut in widest if gaps[cut] > 0]
    return [
        (int(firsts[begin]), int(lasts[end - 1]))
        for begin, end in pairwise([0, *cuts, len(firsts)])
    ]


def _columns(rows: pa.Table, names: list[str]) -> list[list[object]]:
    return [rows[name].to_pylist() for name in names]

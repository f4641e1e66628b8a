"""Corrects late records: what a batch of silver settles, a note of the batch.

A late record is settled once every merge record that could hold it is closed. Then it makes a
correction, or is a late duplicate; both tables say which late records are behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.clocks import Clocks, clocks_of
from watersmeet.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    cuts,
    int64s,
    lengths,
    looked_up,
    numbered,
    times_ms,
)
from watersmeet.core.corrections import (
    LateRules,
    Settled,
    as_silver,
    correct,
    newest,
    settled,
    with_validity,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.merge import LATE_SCHEMA, Batch
from watersmeet.core.message import as_read, correction_header_bytes, exceeds
from watersmeet.core.plan import BatchPlan
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import DUPLICATE_SCHEMA
from watersmeet.core.types import TENANT
from watersmeet.engine import Engine, Rows
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables
from watersmeet.lake.chunks import sizes_at
from watersmeet.lake.epochs import Epochs, read_epochs, unsettled_from
from watersmeet.lake.generations import Generation
from watersmeet.lake.table_reader import MAX_TERMS, ROW_BYTES, Condition, Where, sizes_of
from watersmeet.running.batch_rows import MAX_KEYS, BatchRows
from watersmeet.running.batches import make_batch
from watersmeet.running.planning import Planner
from watersmeet.settings import Settings

CHUNK_BYTES = 32 * 1024 * 1024
"""Approximate maximum size of the corrections that are made at a time, as they are in memory."""

_PLACE = ["source", "topic", "partition", "offset"]
_KEY = ["partition", "tenant", "merge_key"]
_NARROW = [*_PLACE, "event_time", *TENANT.names]
_WITHOUT_VALUE = [name for name in LATE_SCHEMA.names if name != "value"]


class Corrected(NamedTuple):
    """The corrections that a batch makes, and the late records that repeat a part.

    `corrections`: rows for `Engine.append`; None where there are none.
    """

    corrections: Rows | None
    duplicates: pa.Table


class Near(NamedTuple):
    """The finished merge records that some late records may belong to, and the newest correction of
    each that has one: keys, times and sizes.
    """

    closed: pa.Table
    corrected: pa.Table


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

    @contextmanager
    def of(self, plan: BatchPlan, planner: Planner) -> Iterator[Corrected]:
        """Provide what a batch settles, which silver has and whose late records are noted.

        `planner`: the planner in the state before the batch.
        """
        late = self._due(plan, planner)
        duplicates = [DUPLICATE_SCHEMA.empty_table()]
        if not late.rows.num_rows:
            yield Corrected(None, *duplicates)
            return
        batch = make_batch(self.engine, self.settings, plan, planner, self.generation)
        made = self._made(late, batch, duplicates)
        with self.engine.prepared(tables.CORRECTIONS, made) as corrections:
            yield Corrected(corrections, pa.concat_tables(duplicates))

    def _due(self, plan: BatchPlan, planner: Planner) -> Settled:
        """Return the late records that a batch settles, without their values."""
        nothing = Settled(LATE_SCHEMA.empty_table(), np.array([], np.int64))
        if not tables.has_corrections(self.engine.lake.settings):
            return nothing
        if plan.has_late or self._first_u is None:
            self._first_u = self._first_pending(planner.state.clocks)
        if all(clock <= self._first_u.get(p, MAX_TIME) for p, clock in plan.clocks.items()):
            return nothing
        late = self._settled(plan, planner)
        self._first_u = None
        return late

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
        """Return columns of late records that may be settled between two states of the clocks."""
        partitions = range(1 + max(tp.partition for tp in self.generation.begin))
        floors = {
            p: unsettled_from(self._epochs, before[p]) if p in before else NULL_TIME
            for p in partitions
        }
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
        """Return the late records that a batch settles, without their values."""
        late = self._pending(_WITHOUT_VALUE, planner.state.clocks, plan.clocks)
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
        return without(late, *behind)

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

    def _made(self, late: Settled, batch: Batch, duplicates: list[pa.Table]) -> Iterator[pa.Table]:
        """Yield corrections by key, in pieces that fit into memory; collect the late duplicates.

        Where a key goes on in the next piece, its corrections up to then come from memory: the
        table does not have them yet.
        """
        late = _by_key(late)
        before = self.engine.lake.schema(tables.CORRECTIONS).empty_table()
        for share in map(self._with_values, self._shares(late)):
            near = self._near(share.rows, batch.plan.batch)
            for some in _chunks(share, near, before, self._rules(share.rows)):
                before = before.filter(_is_of_key(before, some.rows, 0))
                made = correct(
                    some,
                    self._rules(some.rows),
                    *self._candidates(some.rows, near, before),
                    batch,
                    corrected_before=self.generation.corrected_before,
                )
                corrections = validated_corrections(self.settings, made.corrections, batch)
                duplicates.append(made.duplicates)
                for rows in (corrections, made.too_many):
                    if rows.num_rows:
                        yield rows
                both = pa.concat_tables([before, corrections])
                both = both.filter(_is_of_key(both, some.rows, -1))
                before = both.take(newest(both))

    def _shares(self, late: Settled) -> Iterator[Settled]:
        """Yield late records in pieces that fit into memory with their values.

        Bronze says how large they are: in the files of `late` they are packed. Of those that bronze
        no longer has, that is all that is known.
        """
        reader = self.engine.reader
        by_input = defaultdict[InputId, list[tuple[int, int]]](list)
        for source, topic, partition, offset in _places(late.rows):
            by_input[InputId(source, topic)].append((partition, offset))
        sizes = {
            (*input_id, *place): size
            for input_id, places in by_input.items()
            for place, size in sizes_at(
                reader, input_id, tables.bronze(input_id.source), places
            ).items()
        }
        packed = reader.row_bytes(tables.LATE)
        of_rows = [sizes.get(place, packed) + ROW_BYTES for place in _places(late.rows)]
        for begin, end in cuts(of_rows, CHUNK_BYTES, MAX_KEYS):
            yield late.slice(begin, end)

    def _with_values(self, late: Settled) -> Settled:
        """Return late records with all columns of `late`."""
        return Settled(self._at(tables.LATE, LATE_SCHEMA.names, late.rows), late.settled_at)

    def _at(self, table: str, columns: list[str], late: pa.Table) -> pa.Table:
        """Return the rows of a table that are about these late records, in their order."""
        if not late.num_rows:
            return self.engine.lake.schema(table).empty_table().select(columns)
        offsets = sorted(set(late["offset"].to_pylist()))
        u = times_ms(late["u"])
        where: list[Condition] = [
            *self._of_generation(late),
            ("offset", ">=", offsets[0]),
            ("offset", "<=", offsets[-1]),
            ("offset", "in", offsets),
            ("u", ">=", int(u.min())),
            ("u", "<=", int(u.max())),
        ]
        rows = self.engine.reader.rows(table, columns, [where])
        numbers = {place: n for n, place in enumerate(_places(rows))}
        return rows.take(pa.array([numbers[place] for place in _places(late)], pa.int64()))

    def _of_generation(self, rows: pa.Table) -> list[Condition]:
        """Return the condition for rows of this generation in the partitions of others."""
        partitions = sorted(pc.unique(rows["partition"]).to_pylist())
        return [("generation", "=", self.generation.number), ("partition", "in", partitions)]

    def _rules(self, late: pa.Table) -> LateRules:
        """Return the rules of the epoch in which each of these was late."""
        numbers = self._epochs.numbers_of(int64s(late["batch"]))
        settings = [epoch.settings for epoch in self._epochs]
        gaps_ms = np.array([each.merge.window.gap_ms for each in settings], np.int64)
        max_versions = np.array([each.publish.max_versions for each in settings], np.int64)
        return LateRules(gaps_ms[numbers], max_versions[numbers])

    def _near(self, late: pa.Table, batch: int) -> Near:
        """Return which merge records late records may belong to, without their content.

        Corrections of the batch itself do not count: a crash may have left them.
        """
        windows = [epoch.settings.merge.window for epoch in self._epochs]
        longest_ms = max(window.longest_ms for window in windows)
        gap_ms = max(window.gap_ms for window in windows)
        times = np.unique(times_ms(late["event_time"]))
        spans = covering(times - longest_ms, times + gap_ms, MAX_TERMS)
        names = [*_KEY, "event_time", RECORD_BYTES.name]
        closed = self._rows(tables.SILVER, names, late, spans)
        names += ["id", "version", "source", "topic", "offset", "u"]
        versions: list[Condition] = [("batch", "<", batch), ("version", ">", 0)]
        corrected = self._rows(tables.CORRECTIONS, names, late, spans, *versions)
        return Near(closed, corrected.take(newest(corrected)))

    def _rows(
        self,
        table: str,
        columns: list[str],
        late: pa.Table,
        spans: Iterable[tuple[int, int]],
        *conditions: Condition,
    ) -> pa.Table:
        """Return columns of the finished merge records, or of the corrections, that have the keys
        of late records, begin in one of these spans, and meet further conditions.
        """
        of_these = [*self._of_generation(late), *conditions]
        of_these.append(("merge_key", "in", sorted(pc.unique(late["merge_key"]).to_pylist())))
        if table == tables.SILVER:
            of_these.append(("status", "=", "timed_out"))
        where: Where = [
            [*of_these, ("event_time", ">=", first), ("event_time", "<=", last)]
            for first, last in spans
        ]
        return self.engine.reader.rows(table, columns, where)

    def _candidates(
        self, late: pa.Table, near: Near, before: pa.Table
    ) -> tuple[pa.Table, pa.Table]:
        """Return the finished rows and the newest corrections that late records may belong to.

        `before`: corrections that the table does not have yet.
        """
        keys = pc.unique(late["merge_key"])
        closed, corrected = (
            rows.filter(pc.is_in(rows["merge_key"], keys)) for rows in (near.closed, near.corrected)
        )
        silver = self.engine.lake.schema(tables.SILVER)
        content = sorted(set(silver.names) - {"status", "position"})
        rows = silver.empty_table().select(content)
        if closed.num_rows:
            times = np.unique(times_ms(closed["event_time"]))
            rows = self._rows(tables.SILVER, content, closed, covering(times, times, MAX_TERMS))
        earlier = self._at(tables.CORRECTIONS, before.schema.names, corrected)
        return rows, pa.concat_tables([earlier.cast(before.schema), before])


def validated_corrections(settings: Settings, corrections: pa.Table, batch: Batch) -> pa.Table:
    """Return corrections judged by `publish`, the rules of the batch that makes them.

    `corrections`: as `core.corrections.correct` returns them.
    """
    max_bytes = settings.publish.max_bytes - correction_header_bytes(settings.inputs)
    rows = as_silver(corrections)
    if batch.max_bytes is not None:
        is_too_large = exceeds(as_read(rows, batch.read_types), batch.sources, max_bytes)
        reasons = pc.if_else(is_too_large, "too_large", pa.scalar(None, pa.string()))
        rows = rows.set_column(rows.column_names.index("invalid_reason"), "invalid_reason", reasons)
    expressions = Expressions.of(settings, max_bytes)
    checked = expressions.validated(rows)
    expressions.warn_of(checked)
    return with_validity(corrections, checked["invalid_reason"].to_pylist())


def without(late: pa.Table, *behind: pa.Table) -> pa.Table:
    """Return the late records that none of these tables has, by their coordinates."""
    places = {place for rows in behind for place in _places(rows)}
    is_new = [place not in places for place in _places(late)]
    return late.filter(pa.array(is_new, pa.bool_()))


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


def _places(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in _PLACE), strict=True)


def _keys(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in _KEY), strict=True)


def _by_key(late: Settled) -> Settled:
    """Return late records with those of a key one after the other, in their order."""
    order_by = [(name, "ascending") for name in [*_KEY, "_row"]]
    order = pc.sort_indices(numbered(late.rows), order_by)
    return Settled(late.rows.take(order), late.settled_at[int64s(order)])


def _is_of_key(rows: pa.Table, late: pa.Table, number: int) -> pa.Array:
    """Return True for each row that has the key of the late record of this number."""
    [key] = _keys(late.take([number % late.num_rows]))
    return pa.array([each == key for each in _keys(rows)], pa.bool_())


def _chunks(late: Settled, near: Near, before: pa.Table, rules: LateRules) -> Iterator[Settled]:
    """Yield late records by key in pieces whose corrections have about `CHUNK_BYTES`.

    A correction is counted with all that merge records near it have, and the late records of its
    key up to it: no more of the largest ones than a merge record may have versions.
    """
    content = Counter[tuple[Any, ...]]()
    for rows in (near.closed, near.corrected, before):
        for key, size in zip(_keys(rows), sizes_of(rows).tolist(), strict=True):
            content[key] += size
    sizes = lengths(late.rows["value"]) + ROW_BYTES
    needed = list[int]()
    total = Counter[tuple[Any, ...]]()
    largest = Counter[tuple[Any, ...]]()
    columns = sizes.tolist(), rules.max_versions.tolist()
    for key, size, most in zip(_keys(late.rows), *columns, strict=True):
        total[key] += size
        largest[key] = max(size, largest[key])
        needed.append(content[key] + min(total[key], most * largest[key]))
    for begin, end in cuts(needed, CHUNK_BYTES):
        yield late.slice(begin, end)

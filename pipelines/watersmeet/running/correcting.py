"""Corrects late records: what a batch of silver settles, in the commit of the batch.

A late record is settled once every merge record that could hold it is closed. Then it makes a
correction, or is a late duplicate; rows of silver say which late records are behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.clocks import Clocks
from watersmeet.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    cuts,
    groups,
    int64s,
    lengths,
    looked_up,
    numbered,
    row_values,
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
from watersmeet.core.merge import LATE_SCHEMA, Batch
from watersmeet.core.message import as_read, correction_header_bytes, exceeds
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.silver import in_silver, with_status
from watersmeet.engine import Engine
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables
from watersmeet.lake.history import Epochs, Generation, read_history, unsettled_from
from watersmeet.lake.table_reader import (
    ROW_BYTES,
    Bounds,
    Condition,
    Where,
    between,
    of_like_bounds,
    sizes_of,
)
from watersmeet.running.batch_rows import MAX_KEYS
from watersmeet.settings import Settings

CHUNK_BYTES = 32 * 1024 * 1024
"""Approximate maximum size of the corrections that are made at a time, as they are in memory."""

_PLACE = ["source", "topic", "partition", "offset"]
_KEY = ["partition", "tenant", "merge_key"]
_LATE = pa.schema([*LATE_SCHEMA, RECORD_BYTES]).empty_table().drop_columns("value")
_WITHOUT_VALUE = _LATE.column_names


class Near(NamedTuple):
    """The finished merge records that some late records may belong to, and the newest correction of
    each that has one: keys, times and sizes.
    """

    closed: pa.Table
    corrected: pa.Table


@dataclass
class Correcting:
    """Corrects the late records of one generation of a lake."""

    engine: Engine
    settings: Settings
    generation: Generation
    _first_u: Mapping[int, int] | None = field(default=None, repr=False)
    """By partition, the smallest `u` (ms) of late records that are not settled; None: unknown."""

    def settling(
        self, batch: Batch, clocks: Clocks, before: Mapping[int, int], own: pa.Table
    ) -> Settling:
        """Return what follows from a batch, whose own rows are written with it.

        `clocks`: those after the batch. `before`: by partition, the clock (ms) before it.
        """
        if not tables.has_corrections(self.engine.lake.settings):
            return Settling(self, batch, clocks, own)
        if self._first_u is None:
            self._first_u = self._first_pending(before)
        now = batch.plan.clocks
        has_pending = any(clock > self._first_u.get(p, MAX_TIME) for p, clock in now.items())
        if not (has_pending or batch.plan.has_late):
            return Settling(self, batch, clocks, own)
        self._first_u = None  # after this batch
        pending = self._pending(before, now) if has_pending else None
        return Settling(self, batch, clocks, own, [_LATE if pending is None else pending])

    def count_pending(self, clocks: Mapping[int, int]) -> int:
        """Return how many late records are still to be settled at these clocks (ms)."""
        return len(self._pending(clocks, {}))

    # -- late records that are settled

    def _first_pending(self, clocks: Mapping[int, int]) -> dict[int, int]:
        """Return, by partition, the smallest `u` (ms) that may not be settled at these clocks."""
        rows = self._unsettled(["partition", "u"], clocks, {})
        first = rows.group_by("partition").aggregate([("u", "min")])
        return dict(
            zip(first["partition"].to_pylist(), times_ms(first["u_min"]).tolist(), strict=True)
        )

    def _pending(self, before: Mapping[int, int], after: Mapping[int, int]) -> pa.Table:
        return self.not_behind(self._unsettled(_WITHOUT_VALUE, before, after))

    def _unsettled(
        self, columns: list[str], before: Mapping[int, int], after: Mapping[int, int]
    ) -> pa.Table:
        """Return columns of the late records that may not be settled at some clocks (ms), and are
        at others, where these are given.
        """
        partitions = {tp.partition for tp in self.generation.begin}
        floors = {p: unsettled_from(self._epochs, clock) for p, clock in before.items()}
        bounds = {p: (floors.get(p), after.get(p)) for p in partitions if not after or p in after}
        rows = self.engine.reader.rows(tables.LATE, columns, self._of_generation("u", bounds))
        u = times_ms(rows["u"])
        of_rows = int64s(rows["partition"])
        is_unsettled: Booleans = u >= looked_up(of_rows, floors, NULL_TIME)
        if after:
            is_unsettled &= u < looked_up(of_rows, after, NULL_TIME)
        return rows.filter(pa.array(is_unsettled))

    def not_behind(self, late: pa.Table) -> pa.Table:
        """Return the late records that no batch has settled."""
        if not late.num_rows:
            return late
        behind = [
            self.engine.reader.rows(
                table, _PLACE, self._of_generation(column, _bounds(late, column), *conditions)
            )
            for table, column, conditions in (
                (tables.CORRECTIONS, "u", ()),
                (tables.DUPLICATES, "event_time", (("is_late", "=", True),)),
            )
        ]
        return without(late, *behind)

    @cached_property
    def _epochs(self) -> Epochs:
        return read_history(self.engine.reader, self.settings).epochs

    # -- what they correct

    def made(self, late: Settled, new: pa.Table, batch: Batch) -> Iterator[pa.Table]:
        """Yield rows of silver for what late records make, in pieces that fit into memory.

        `new`: rows of the batch: its late records, and the merge records that it closes. Where a
        key goes on in the next piece, its corrections up to then come from memory.
        """
        schema = batch.changed_schema()
        late = _by_key(late)
        before = self.engine.lake.schema(tables.CORRECTIONS).empty_table()
        for share in (self._with_values(some, new) for some in _shares(late)):
            near = self._near(share.rows, new)
            for some in _chunks(share, near, before, self._rules(share.rows)):
                before = before.filter(_is_of_key(before, some.rows, 0))
                made = correct(
                    some,
                    self._rules(some.rows),
                    *self._candidates(some.rows, near, before, new),
                    batch,
                    corrected_before=self.generation.corrected_before,
                )
                corrections = validated_corrections(self.settings, made.corrections, batch)
                for rows in (corrections, made.not_corrected):
                    yield in_silver(rows, "correction", schema)
                yield in_silver(made.duplicates, "duplicate", schema)
                both = pa.concat_tables([before, corrections])
                both = both.filter(_is_of_key(both, some.rows, -1))
                before = both.take(newest(both))

    def _with_values(self, late: Settled, new: pa.Table) -> Settled:
        return Settled(self._at(tables.LATE, LATE_SCHEMA.names, late.rows, new), late.settled_at)

    def _at(
        self, view: str, columns: list[str], late: pa.Table, new: pa.Table | None = None
    ) -> pa.Table:
        """Return the rows of a view that are about these late records, in their order.

        `new`: rows that silver does not have yet.
        """
        if not late.num_rows:
            return self.engine.lake.schema(view).empty_table().select(columns)
        offsets = sorted(set(late["offset"].to_pylist()))
        of_these: list[Condition] = [
            ("offset", ">=", offsets[0]),
            ("offset", "<=", offsets[-1]),
            ("offset", "in", offsets),
        ]
        where = self._of_generation("u", _bounds(late, "u"), *of_these)
        rows = self.engine.reader.rows(view, columns, where)
        if new is not None:
            of_batch = with_status(new, "late").select(columns)
            rows = pa.concat_tables([rows, of_batch.cast(rows.schema)])
        numbers = {place: n for n, place in enumerate(row_values(rows, *_PLACE))}
        return rows.take(
            pa.array([numbers[place] for place in row_values(late, *_PLACE)], pa.int64())
        )

    def _of_generation(self, column: str, bounds: Bounds, *conditions: Condition) -> Where:
        """Return the condition for rows of this generation with a time in `[from, until)` of their
        partition (see `between`), which meet further conditions.
        """
        of_these = [("generation", "=", self.generation.number), *conditions]
        return [
            [*of_these, (column, "is not null", None), *term] for term in between(column, bounds)
        ]

    def _rules(self, late: pa.Table) -> LateRules:
        numbers = self._epochs.numbers_of(int64s(late["batch"]))
        settings = [epoch.settings for epoch in self._epochs]
        gaps_ms = np.array([each.merge.window.gap_ms for each in settings], np.int64)
        max_versions = np.array([each.publish.max_versions for each in settings], np.int64)
        return LateRules(gaps_ms[numbers], max_versions[numbers])

    def _near(self, late: pa.Table, new: pa.Table) -> Near:
        """Return which merge records late records may belong to, without their content.

        `new`: rows that silver does not have yet.
        """
        windows = [epoch.settings.merge.window for epoch in self._epochs]
        longest_ms = max(window.longest_ms for window in windows)
        gap_ms = max(window.gap_ms for window in windows)
        spans = _spans(times_ms(late["event_time"]), longest_ms, gap_ms)
        names = [*_KEY, "event_time", RECORD_BYTES.name]
        closed = self._rows(tables.SILVER, names, late, spans)
        of_batch = with_status(new, "timed_out").select(names)
        closed = pa.concat_tables([closed, of_batch.cast(closed.schema)])
        names += ["id", "version", "source", "topic", "offset", "u"]
        corrected = self._rows(tables.CORRECTIONS, names, late, spans, ("version", ">", 0))
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
        of_these = [("generation", "=", self.generation.number), *conditions]
        of_these += [
            (name, "in", sorted(pc.unique(late[name]).to_pylist()))
            for name in ("partition", "merge_key")
        ]
        if table == tables.SILVER:
            of_these.append(("status", "=", "timed_out"))
        where: Where = [
            [*of_these, ("event_time", ">=", first), ("event_time", "<=", last)]
            for first, last in spans
        ]
        return self.engine.reader.rows(table, columns, where)

    def _candidates(
        self, late: pa.Table, near: Near, before: pa.Table, new: pa.Table
    ) -> tuple[pa.Table, pa.Table]:
        """Return the finished rows and the newest corrections that late records may belong to.

        `before`: corrections that silver does not have yet. `new`: other rows of which that is so.
        """
        keys = pc.unique(late["merge_key"])
        closed, corrected = (
            rows.filter(pc.is_in(rows["merge_key"], keys)) for rows in (near.closed, near.corrected)
        )
        content = [n for n in self.engine.lake.schema(tables.MERGED).names if n != "status"]
        of_batch = with_status(new, "timed_out")
        rows = of_batch.filter(pc.is_in(of_batch["merge_key"], keys)).select(content)
        if closed.num_rows:
            spans = _spans(times_ms(closed["event_time"]))
            earlier = self._rows(tables.SILVER, content, closed, spans)
            rows = pa.concat_tables([earlier, rows.cast(earlier.schema)])
        earlier = self._at(tables.CORRECTIONS, before.schema.names, corrected)
        return rows, pa.concat_tables([earlier.cast(before.schema), before])


@dataclass
class Settling:
    """The rows of silver that are written with a batch and follow from it (`engine.Following`).

    - `own`: rows of the batch itself.
    - `pending`: late records that it may settle; without any list, it settles none.
    """

    correcting: Correcting
    batch: Batch
    clocks: Clocks
    own: pa.Table
    pending: list[pa.Table] = field(default_factory=list)
    keys: set[str] | None = field(init=False)
    """See `Following`."""
    _new: list[pa.Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note the keys of the late records, if there may be any."""
        pending = (rows["merge_key"].to_pylist() for rows in self.pending)
        self.keys = set(chain.from_iterable(pending)) if self.pending else None

    def see(self, rows: pa.Table) -> None:
        """See `Following`."""
        if self.keys is None:
            return
        late = with_status(rows, "late")
        late = late.filter(pc.is_valid(late["u"]))
        self.pending.append(late.select(_WITHOUT_VALUE).cast(_LATE.schema))
        self.keys.update(late["merge_key"].to_pylist())
        closed = with_status(rows, "timed_out")
        keys = pa.array(self.keys, closed["merge_key"].type)
        self._new += [late, closed.filter(pc.is_in(closed["merge_key"], keys))]

    def rows(self) -> Iterator[pa.Table]:
        """See `Following`."""
        yield self.own
        if self.keys is None:
            return
        late = pa.concat_tables(self.pending)
        clocks = self.batch.plan.clocks
        now = settled(late, self.clocks, clocks, self.batch.rules)
        if now.rows.num_rows:
            schema = self.batch.changed_schema()
            new = [
                schema.empty_table(),
                *(rows.select(schema.names).cast(schema) for rows in self._new),
            ]
            yield from self.correcting.made(now, pa.concat_tables(new), self.batch)


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


def _bounds(rows: pa.Table, column: str) -> dict[int, tuple[int, int]]:
    times = times_ms(rows[column])
    return {
        p: (int(times[numbers].min()), int(times[numbers].max()) + 1)
        for p, numbers in groups(int64s(rows["partition"])).items()
    }


def without(late: pa.Table, *behind: pa.Table) -> pa.Table:
    """Return the late records that none of these tables has, by their coordinates."""
    places = {place for rows in behind for place in row_values(rows, *_PLACE)}
    is_new = [place not in places for place in row_values(late, *_PLACE)]
    return late.filter(pa.array(is_new, pa.bool_()))


def _spans(times: Int64s, before_ms: int = 0, after_ms: int = 0) -> list[tuple[int, int]]:
    """Return few spans that cover so much before and after each of one or more times (ms), with as
    little between them as can be.
    """
    ends = ((time - before_ms, time + after_ms) for time in np.unique(times).tolist())
    bounds = dict(enumerate(ends))
    return [(bounds[alike[0]][0], bounds[alike[-1]][1]) for alike in of_like_bounds(bounds)]


def _shares(late: Settled) -> Iterator[Settled]:
    """Yield late records in pieces that fit into memory with their values."""
    for begin, end in cuts(sizes_of(late.rows).tolist(), CHUNK_BYTES, MAX_KEYS):
        yield late.slice(begin, end)


def _by_key(late: Settled) -> Settled:
    """Return late records with those of a key one after the other, in their order."""
    order_by = [(name, "ascending") for name in [*_KEY, "_row"]]
    order = pc.sort_indices(numbered(late.rows), order_by)
    return Settled(late.rows.take(order), late.settled_at[int64s(order)])


def _is_of_key(rows: pa.Table, late: pa.Table, number: int) -> pa.Array:
    [key] = row_values(late.take([number % late.num_rows]), *_KEY)
    return pa.array([each == key for each in row_values(rows, *_KEY)], pa.bool_())


def _chunks(late: Settled, near: Near, before: pa.Table, rules: LateRules) -> Iterator[Settled]:
    """Yield late records by key in pieces whose corrections have about `CHUNK_BYTES`.

    A correction is counted with all that merge records near it have, and the late records of its
    key up to it: no more of the largest ones than a merge record may have versions.
    """
    content = Counter[tuple[Any, ...]]()
    for rows in (near.closed, near.corrected, before):
        for key, size in zip(row_values(rows, *_KEY), sizes_of(rows).tolist(), strict=True):
            content[key] += size
    sizes = lengths(late.rows["value"]) + ROW_BYTES
    needed = list[int]()
    total = Counter[tuple[Any, ...]]()
    largest = Counter[tuple[Any, ...]]()
    columns = sizes.tolist(), rules.max_versions.tolist()
    for key, size, most in zip(row_values(late.rows, *_KEY), *columns, strict=True):
        total[key] += size
        largest[key] = max(size, largest[key])
        needed.append(content[key] + min(total[key], most * largest[key]))
    for begin, end in cuts(needed, CHUNK_BYTES):
        yield late.slice(begin, end)

"""Corrections: for each late record, once it is settled, the whole merge record with it.

The rules are those of `core.correction_model`, the oracle that these functions are compared with.
Event time and `due`, by which a late record finds its merge record, are those of the merge record
as it closed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.clocks import Clocks
from watersmeet.core.columns import (
    NULL_TIME,
    Int64s,
    int64s,
    lengths,
    looked_up,
    row_values,
    time_column,
    times_ms,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.merge import (
    Batch,
    Merged,
    parts_by_source,
    silver_schema,
    value_sizes,
    without_values,
)
from watersmeet.core.plan import Rules
from watersmeet.core.positions import Positioned
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import DUPLICATE_SCHEMA, RECORD_IDS
from watersmeet.core.sequence import (
    CORRECTED,
    EXCESS,
    TOO_MANY,
    Place,
    clock_of,
    late_born_id,
    message_id,
)
from watersmeet.core.too_large import RECORD_COUNT, has_no_parts
from watersmeet.core.types import schema_of

_NAMED: Final = schema_of(
    "generation int, partition int, tenant string, merge_key string, event_time timestamp, "
    "is_late_born boolean, version bigint, source string, topic string, offset bigint, position "
    "timestamp, u timestamp, settled_at timestamp, valid boolean, invalid_reason string, batch "
    "bigint, first_event_time timestamp, last_event_time timestamp"
)
_AFTER_PARTS: Final = schema_of(
    "due timestamp, closed_at timestamp, id string, has_message boolean"
)


def correction_schema(
    value_types: Mapping[str, pa.DataType],
    inputs: Iterable[InputId] = (),
    *,
    has_ids: bool = False,
) -> pa.Schema:
    """Return the columns of `corrections`; the arguments are those of `silver_schema`.

    A row is a correction: `source`, `topic`, `offset`, `position` and `u` are those of the late
    record that made it; `event_time`, `due` and `closed_at` those of the merge record as it closed,
    and `first_event_time` and `last_event_time` those of all its parts. `is_late_born`: a late
    record has opened the merge record. `id` is that of its message. `has_message`: False where it
    is not valid, and nothing that it would replace was. Where the merge record has as many versions
    as it may, the row is no correction: it has version 0, no parts, and `TOO_MANY` as reason; or
    `EXCESS`, where the merge record is too large, or would be with the late record.
    """
    silver = silver_schema(value_types, inputs, has_ids=has_ids)
    parts = [silver.field(source) for source in value_types]
    ids = [RECORD_IDS] if has_ids else []
    return pa.schema([*_NAMED, *parts, *_AFTER_PARTS, RECORD_BYTES, RECORD_COUNT, *ids])


class Settled(NamedTuple):
    """Late records that are settled, in the order of their corrections, and when they were (ms)."""

    rows: pa.Table
    settled_at: Int64s

    def slice(self, begin: int, end: int) -> Settled:
        """Return the late records from one number up to another."""
        return Settled(self.rows.slice(begin, end - begin), self.settled_at[begin:end])

    def ordered(self) -> pa.Table:
        """Return the rows with `settled_at`, so that they have the columns of their order."""
        return self.rows.append_column("settled_at", time_column(self.settled_at))


class LateRules(NamedTuple):
    """For each of some late records, rules of the epoch in which it was late: the gap (ms), and how
    many versions a merge record may have.
    """

    gaps_ms: Int64s
    max_versions: Int64s


class Made(NamedTuple):
    """What late records make when they are settled, in columns of `correction_schema`.

    `not_corrected` have a reason. `duplicates` (`core.repeated.DUPLICATE_SCHEMA`): late records
    whose id a part of their merge record has.
    """

    corrections: pa.Table
    not_corrected: pa.Table
    duplicates: pa.Table


def settled(
    late: pa.Table, clocks: Clocks, partition_clocks: Mapping[int, int], rules: Rules
) -> Settled:
    """Return those of the late records that a batch settles, or that were settled before it.

    - `late`: rows of `late` (`core.merge.LATE_SCHEMA`) with `u`.
    - `clocks`: those after the batch; `partition_clocks`: by partition the clock (ms) then.
    """
    partitions = int64s(late["partition"])
    u = times_ms(late["u"])
    is_past = u < clocks.at(partitions, late["tenant"])
    past = late.filter(pa.array(is_past))
    partitions = partitions[is_past]
    settled_at = rules.closed_at(
        partitions, clocks.last_open(partitions, past["tenant"], u[is_past])
    )
    is_settled = settled_at <= looked_up(partitions, partition_clocks, NULL_TIME)
    rows = past.filter(pa.array(is_settled))
    settled_at = settled_at[is_settled]
    ordered = Settled(rows, settled_at).ordered()
    order = pc.sort_indices(ordered, [(name, "ascending") for name in CORRECTED.order])
    return Settled(rows.take(order), settled_at[int64s(order)])


@dataclass
class _Candidate:
    """A merge record that late records may belong to.

    `row`: that of its newest content (None: a late record has opened it), whose `records`, repeated
    ones among them, have `size` bytes; one that is too large has none. `late`: the records that
    correct it now.
    """

    event_time: int
    due: int
    closed_at: int
    is_late_born: bool
    id: str
    row: int | None = None
    version: int = 0
    has_message: bool = False
    records: int = 0
    size: int = 0
    is_too_large: bool = False
    ids: dict[tuple[str, str, str], int] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def order(self) -> tuple[int, bool]:
        return self.event_time, self.is_late_born


class _Corrected(NamedTuple):
    """A settled late record: its merge record, and the version that it makes of it (0: none).

    `members`: how many of the late records that correct it now are in that version.
    """

    late: int
    record: _Candidate
    version: int = 0
    members: int = 0
    reason: str | None = None


_Key = tuple[int, str, str]
"""Partition, tenant and key."""


class _OfKey:
    """The merge records of a key that late records may belong to, in order of event time."""

    def __init__(self, records: Iterable[_Candidate] = ()) -> None:
        self._records = sorted(records, key=_Candidate.order)
        self._longest = max((each.due - each.event_time for each in self._records), default=0)

    def add(self, record: _Candidate) -> None:
        insort(self._records, record, key=_Candidate.order)
        self._longest = max(self._longest, record.due - record.event_time)

    def of(self, time: int, gap_ms: int, settled_at: int) -> _Candidate | None:
        """Return the one that a late record belongs to (rule 2), if any; only near ones are looked
        at.
        """
        next_one = bisect_right(self._records, (time, True), key=_Candidate.order)
        covering: _Candidate | None = None
        for number in range(next_one - 1, -1, -1):
            record = self._records[number]
            if record.event_time < (covering.event_time if covering else time - self._longest):
                break
            # Of two that begin at once, a longer window has merged one where a late one was opened.
            if record.due >= time and record.closed_at <= settled_at:
                covering = record
        if covering is not None:
            return covering
        for number in range(next_one, len(self._records)):
            record = self._records[number]
            if record.event_time > time + gap_ms:
                break
            if record.closed_at <= settled_at:
                return record
        return None


def correct(
    late: Settled,
    rules: LateRules,
    closed: pa.Table,
    corrected: pa.Table,
    batch: Batch,
    *,
    corrected_before: Mapping[int, Place] = MappingProxyType({}),
) -> Made:
    """Return what settled late records make.

    - `rules`: those of each of them.
    - `closed`: silver's columns of at least all finished rows of their keys that could hold them.
    - `corrected`: the columns of `correction_schema` of at least the newest corrections of these,
      and of what late records have opened where these could hold them.
    - `corrected_before`: by partition, the last correction of a lost lake. Late records that sort
      up to there may be in corrections that are out: each opens a merge record of its own, which
      takes no other. What was closed up to there may have versions that are out, and takes no late
      record.

    Of corrections, `valid` and `invalid_reason` are null, and `has_message` is True where the merge
    record, or an earlier version, was valid.
    """
    corrected = corrected.filter(pa.array(~CORRECTED.is_up_to(corrected, corrected_before)))
    is_out = CORRECTED.is_up_to(late.ordered(), corrected_before)
    last = {p: clock_of(place) for p, place in corrected_before.items()}
    partitions = int64s(closed["partition"])
    has_none_out = times_ms(closed["closed_at"]) > looked_up(partitions, last, NULL_TIME)
    closed = closed.filter(pa.array(has_none_out))
    before = _together(closed, corrected, batch)
    candidates = _candidates(closed, corrected, before, batch)
    made: list[_Corrected] = []
    refused: list[_Corrected] = []
    repeated: list[dict[str, Any]] = []
    columns = ("partition", "tenant", "merge_key", "source", "topic", "offset", "event_time", "id")
    rows = late.rows.select(columns).set_column(6, "event_time", pa.array(_times(late.rows)))
    sizes = lengths(late.rows["value"])
    alone_too_large = batch.rules.bounds.are_exceeded(np.ones_like(sizes), sizes)
    for number, row in enumerate(rows.to_pylist()):
        key = row["partition"], row["tenant"], row["merge_key"]
        settled_at = int(late.settled_at[number])
        gap_ms = int(rules.gaps_ms[number])
        of_key = candidates.setdefault(key, _OfKey())
        existing = None if is_out[number] else of_key.of(row["event_time"], gap_ms, settled_at)
        record = _opened(row, gap_ms, settled_at) if existing is None else existing
        if existing is None and not is_out[number] and not alone_too_large[number]:
            of_key.add(record)
        identity = None if row["id"] is None else (row["source"], row["topic"], row["id"])
        if identity is not None and identity in record.ids:
            repeated.append({**row, "of_offset": record.ids[identity]})
        elif record.is_too_large or batch.rules.bounds.is_exceeded(
            record.records + 1, record.size + int(sizes[number])
        ):
            refused.append(_Corrected(number, record, reason=EXCESS))
        elif record.version >= rules.max_versions[number]:
            refused.append(_Corrected(number, record, reason=TOO_MANY))
        else:
            if identity is not None:
                record.ids[identity] = row["offset"]
            record.records += 1
            record.size += int(sizes[number])
            record.version += 1
            record.late.append(number)
            made.append(_Corrected(number, record, record.version, len(record.late)))
    return Made(
        _corrections(late, before, made, batch),
        _not_corrected(late, refused, batch),
        _duplicates(repeated, batch),
    )


def newest(corrections: pa.Table) -> pa.Array:
    """Return the row with the newest correction (at least id and version) of each merge record."""
    of_record: dict[str, int] = {}
    versions = corrections["version"].to_pylist()
    for number, record_id in enumerate(corrections["id"].to_pylist()):
        if record_id not in of_record or versions[of_record[record_id]] < versions[number]:
            of_record[record_id] = number
    return pa.array(of_record.values(), pa.int64())


def with_validity(corrections: pa.Table, reasons: Sequence[str | None]) -> pa.Table:
    """Return judged corrections: a reason for each that is not valid, None for the others.

    An invalid one has a message, without a value, where what it would replace had one.
    """
    had: dict[str, bool] = {}
    has_message = []
    before = row_values(corrections, "id", "has_message")
    for (record_id, earlier), reason in zip(before, reasons, strict=True):
        had[record_id] = had.get(record_id, False) or earlier or reason is None
        has_message.append(had[record_id])
    columns = {
        "valid": pa.array([reason is None for reason in reasons], pa.bool_()),
        "invalid_reason": pa.array(reasons, pa.string()),
        "has_message": pa.array(has_message, pa.bool_()),
    }
    for name, column in columns.items():
        corrections = corrections.set_column(corrections.column_names.index(name), name, column)
    return corrections


def as_silver(corrections: pa.Table) -> pa.Table:
    """Return corrections as silver's rows, at the time of the first part, for `publish` rules."""
    position = corrections.column_names.index("event_time")
    rows = corrections.set_column(position, "event_time", corrections["first_event_time"])
    rows = rows.drop_columns(["first_event_time"])
    place = rows.schema.get_field_index("position")
    rows = rows.set_column(
        place, rows.schema.field(place), pa.nulls(rows.num_rows, rows.schema.field(place).type)
    )
    return rows.append_column("status", pa.repeat(pa.scalar("timed_out"), rows.num_rows))


# -- where late records belong


def _times(rows: pa.Table) -> Int64s:
    return times_ms(rows["event_time"])


def _together(closed: pa.Table, corrected: pa.Table, batch: Batch) -> pa.Table:
    names = ["partition", "merge_key", "tenant", "event_time", "last_event_time", *batch.sources]
    names += [RECORD_BYTES.name, RECORD_COUNT.name]
    names += [RECORD_IDS.name] if batch.has_ids else []
    silver = silver_schema(batch.value_types, batch.inputs, has_ids=batch.has_ids)
    kinds = pa.schema([silver.field(name) for name in names])
    tables = closed.select(names), as_silver(corrected).select(names)
    return pa.concat_tables([rows.cast(kinds) for rows in tables])


def _candidates(
    closed: pa.Table, corrected: pa.Table, before: pa.Table, batch: Batch
) -> dict[_Key, _OfKey]:
    candidates: dict[_Key, dict[tuple[int, bool], _Candidate]] = {}
    names = ("partition", "tenant", "merge_key")
    times = ("event_time", "due", "closed_at")
    rows: list[tuple[Any, ...]] = []
    for p, tenant, key, is_valid, event_time, *at in _rows(closed, (*names, "valid"), times):
        record_id = message_id(p, event_time, key, tenant)
        rows.append((p, tenant, key, False, 0, is_valid, record_id, event_time, *at))
    facts = ("is_late_born", "version", "has_message", "id")
    rows += _rows(corrected, (*names, *facts), times)
    for row, (p, tenant, key, is_born, version, has_message, record_id, *at) in enumerate(rows):
        event_time, due, closed_at = at
        of_key = candidates.setdefault((p, tenant, key), {})
        newest = of_key.get((event_time, is_born))
        if newest is None or newest.version < version:
            of_key[event_time, is_born] = _Candidate(
                event_time, due, closed_at, is_born, record_id, row, version, has_message
            )
    are_too_large = has_no_parts(before, batch.sources)
    counts, sizes = (int64s(before[column.name]) for column in (RECORD_COUNT, RECORD_BYTES))
    for record in chain.from_iterable(of_key.values() for of_key in candidates.values()):
        record.is_too_large = bool(are_too_large[record.row])
        record.records = int(counts[record.row])
        record.size = int(sizes[record.row])
        if RECORD_IDS.name in before.column_names:
            record.ids = _ids(before, record)
    return {key: _OfKey(records.values()) for key, records in candidates.items()}


def _rows(rows: pa.Table, names: Iterable[str], times: Iterable[str]) -> Iterator[tuple[Any, ...]]:
    columns = [rows[name].to_pylist() for name in names]
    columns += [times_ms(rows[name]).tolist() for name in times]
    return zip(*columns, strict=True)


def _ids(before: pa.Table, record: _Candidate) -> dict[tuple[str, str, str], int]:
    entries = before[RECORD_IDS.name][record.row].as_py() or []
    return {
        (entry["source"], entry["topic"], entry["id"]): entry["offset"]
        for entry in entries
        if entry["of_offset"] is None
    }


def _opened(row: Mapping[str, Any], gap_ms: int, settled_at: int) -> _Candidate:
    time = row["event_time"]
    record_id = late_born_id(row["source"], row["topic"], row["partition"], row["offset"])
    return _Candidate(time, time + gap_ms, settled_at, is_late_born=True, id=record_id)


# -- their content


def _corrections(
    late: Settled, before: pa.Table, made: Sequence[_Corrected], batch: Batch
) -> pa.Table:
    members = (each.record.late[: each.members] for each in made)
    taken = np.array([*chain.from_iterable(members)], np.int64)
    counts = np.array([each.members for each in made], np.int64)
    based = [number for number, each in enumerate(made) if each.record.row is not None]
    rows = without_values(late.rows).take(pa.array(taken))
    records = Positioned(rows, _times(rows), times_ms(rows["position"]))
    contents = before.take(pa.array([made[number].record.row for number in based], pa.int64()))
    labels = np.concatenate([np.repeat(np.arange(len(made)), counts), np.array(based, np.int64)])
    merged = Merged.of(labels, len(taken))
    first = [records.times, _times(contents)]
    last = [records.times, times_ms(contents["last_event_time"])]
    sizes = [value_sizes(records), int64s(contents[RECORD_BYTES.name])]
    each = [np.ones(len(taken), np.int64), int64s(contents[RECORD_COUNT.name])]
    every = merged.members(records, contents)
    columns: dict[str, Any] = {
        "first_event_time": time_column(merged.reduce(np.minimum, np.concatenate(first))),
        "last_event_time": time_column(merged.reduce(np.maximum, np.concatenate(last))),
        RECORD_BYTES.name: pa.array(merged.reduce(np.add, np.concatenate(sizes))),
        RECORD_COUNT.name: pa.array(merged.reduce(np.add, np.concatenate(each))),
        **parts_by_source(every, late.rows["value"], batch),
    }
    if batch.has_ids:
        columns[RECORD_IDS.name] = every.repeated().record_ids
    columns["has_message"] = pa.array([each.record.has_message for each in made], pa.bool_())
    return _with_places(columns, late, made, batch)


def _not_corrected(late: Settled, refused: Sequence[_Corrected], batch: Batch) -> pa.Table:
    count = len(refused)
    schema = correction_schema(batch.value_types, batch.inputs, has_ids=batch.has_ids)
    own = late.rows.take(pa.array([each.late for each in refused], pa.int64()))
    columns: dict[str, Any] = {
        **dict.fromkeys(("first_event_time", "last_event_time"), own["event_time"]),
        **{name: pa.array([[]] * count, schema.field(name).type) for name in batch.sources},
        **dict.fromkeys((RECORD_BYTES.name, RECORD_COUNT.name), pa.repeat(0, count)),
        **dict.fromkeys(("valid", "has_message"), pa.repeat(pa.scalar(False), count)),
        "invalid_reason": pa.array([each.reason for each in refused], pa.string()),
    }
    return _with_places(columns, late, refused, batch)


def _with_places(
    columns: dict[str, Any], late: Settled, made: Sequence[_Corrected], batch: Batch
) -> pa.Table:
    """Return rows with all columns of `correction_schema`; what neither they nor `made` have is
    null.
    """
    own = np.array([each.late for each in made], np.int64)
    of_late = late.rows.take(pa.array(own))
    for name in ("partition", "tenant", "merge_key", "source", "topic", "offset", "position", "u"):
        columns[name] = of_late[name]
    columns |= {
        "generation": pa.array(np.full(len(made), batch.plan.generation)),
        "batch": pa.array(np.full(len(made), batch.plan.batch)),
        "settled_at": time_column(late.settled_at[own]),
        "version": pa.array([each.version for each in made], pa.int64()),
    }
    for name in ("event_time", "due", "closed_at"):
        times = np.array([getattr(each.record, name) for each in made], np.int64)
        columns[name] = time_column(times)
    schema = correction_schema(batch.value_types, batch.inputs, has_ids=batch.has_ids)
    for name in ("is_late_born", "id"):
        values = [getattr(each.record, name) for each in made]
        columns[name] = pa.array(values, schema.field(name).type)
    every = [columns.get(field.name, pa.nulls(len(made), field.type)) for field in schema]
    return pa.table(every, schema.names).cast(schema)


def _duplicates(repeated: Sequence[Mapping[str, Any]], batch: Batch) -> pa.Table:
    own = {"is_late": True, "batch": batch.plan.batch, "generation": batch.plan.generation}
    rows = [{**row, **own, "event_time": row["event_time"] * 1000} for row in repeated]  # us
    return pa.Table.from_pylist(rows, DUPLICATE_SCHEMA)

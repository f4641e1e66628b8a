"""Check 5: silver and late are what the merge model makes of bronze, key by key.

What the model decides for a key depends on nothing but the positions of its records and the clock. So each key's records, with
positions derived from all of bronze, meet that key's rows of silver and late in one task, and the model is asked there. A task
holds one key at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.audit.validate import Problem
from pipelines.audit.verify_evidence import REBUILD, Evidence, Findings, Stretch, first_of, union_all
from pipelines.audit.verify_silver import place
from pipelines.core.model import MergeRecord, MergeRules, PartitionMerge, Record
from pipelines.transforms.decode import parsed_value
from pipelines.transforms.message import with_validity

_RECORD, _SILVER, _LATE, _RECOVERED = range(4)

_PART = "STRUCT<source: STRING, offset: BIGINT, event_time: BIGINT, value: BIGINT>"

_DIFFERENCE = "partition INT, merge_key STRING, event_time BIGINT, source STRING, offset BIGINT, what STRING"
_ARROW_DIFFERENCE = pa.schema(
    [
        ("partition", pa.int32()),
        ("merge_key", pa.string()),
        ("event_time", pa.int64()),
        ("source", pa.string()),
        ("offset", pa.int64()),
        ("what", pa.string()),
    ]
)


class Part(NamedTuple):
    """A part of a merge record; of the value only a fingerprint."""

    source: str
    offset: int
    event_time: int
    value: int


class Merged(NamedTuple):
    """A row of silver as far as the model decides it."""

    status: str
    is_reset: bool
    event_time: int
    last_event_time: int
    parts: tuple[Part, ...]


class Late(NamedTuple):
    """A row of late; of the value only a fingerprint."""

    source: str
    offset: int
    event_time: int
    position: int
    value: int


class Difference(NamedTuple):
    """What is not as the model has it: a merge record (by event time) or a late record (by source and offset)."""

    event_time: int | None
    source: str | None
    offset: int | None
    what: str


def check_model(evidence: Evidence) -> Findings:
    """Every merge record and every late one of the keys looked at is the model's, and none of the model's is missing."""
    rules = MergeRules(tuple(evidence.settings.sources), evidence.settings.merge.timeout_ms)
    keys = ["partition", "merge_key"]
    differences = (
        _by_key(evidence)
        .repartition(*keys)
        .sortWithinPartitions(*keys, "kind", "stretch", "source", "offset")
        .mapInArrow(find_differences(rules, evidence.stretches), _DIFFERENCE)
    )

    def describe(row: Row) -> Problem:
        if row.source is None:
            return Problem(row.what, place(row.partition, row.merge_key, row.event_time), REBUILD)
        where = f"late: {evidence.at(row.source, row.partition, row.offset)}, key {row.merge_key!r}"
        return Problem(row.what, where, REBUILD)

    return first_of(differences, [*keys, "event_time", "source", "offset", "what"], describe)


def check_validity(evidence: Evidence) -> Findings:
    """A finished row is valid exactly where predicate and size say so; an open row is not judged, and one that a reset closed
    is not valid.
    """
    sources = list(evidence.settings.sources)
    content = [name for name in evidence.silver.columns if name not in ("valid", "invalid_reason")]
    stored = F.struct("valid", "invalid_reason").alias("stored")
    rows = evidence.silver.where(evidence.is_looked_at()).select(*content, stored)
    judged = rows.transform(with_validity(evidence.settings.publish, sources))
    is_reset = F.coalesce(F.col("stored.invalid_reason") == "reset", F.lit(False))
    as_stored = F.col("stored.valid").eqNullSafe(F.col("valid")) & F.col("stored.invalid_reason").eqNullSafe(
        F.col("invalid_reason")
    )
    wrong = judged.where(F.when(is_reset, F.coalesce(F.col("stored.valid"), F.lit(True))).otherwise(~as_stored))

    def describe(row: Row) -> Problem:
        found, right = ((r.valid, r.invalid_reason) for r in (row.stored, row))
        what = f"valid is {found[0]} ({found[1]}), and must be {right[0]} ({right[1]})"
        return Problem(what, place(row.partition, row.merge_key, row.ms), REBUILD)

    return first_of(wrong.withColumn("ms", F.unix_millis("event_time")), ["partition", "merge_key", "ms"], describe)


# -- what meets in a task


def _by_key(evidence: Evidence) -> DataFrame:
    """Records, rows of silver and late, and messages read back, of the keys looked at."""
    sources = evidence.settings.sources

    def fingerprints(source: str) -> list[Column]:
        value_type = sources[source].value_type
        parsed = _fingerprint(parsed_value(F.col("value"), value_type), value_type)
        wanted = evidence.is_looked_at()
        raw = F.when(wanted, F.xxhash64("value")).alias("raw")
        return [F.when(wanted, parsed).alias("value"), raw]

    records = evidence.records(fingerprints).where(F.col("is_passed") & ~F.col("heartbeat") & evidence.is_looked_at())
    keys, time = ["partition", "merge_key"], F.unix_millis("event_time").alias("event_time")
    silver = evidence.silver.where(evidence.is_looked_at()).select(
        F.lit(_SILVER).alias("kind"),
        *keys,
        "status",
        F.coalesce(F.col("invalid_reason") == "reset", F.lit(False)).alias("is_reset"),
        time,
        F.unix_millis("last_event_time").alias("last_event_time"),
        F.concat(*[_parts(name, source.value_type) for name, source in sources.items()]).alias("parts"),
    )
    late = evidence.read(tables.LATE).where((F.col("batch") <= evidence.last_batch) & evidence.is_looked_at())
    position = F.unix_millis("position").alias("position")
    late = late.select(F.lit(_LATE).alias("kind"), *keys, "source", "offset", time, position, F.xxhash64("value").alias("raw"))
    recovered = evidence.recovered().where(evidence.is_looked_at()).select(F.lit(_RECOVERED).alias("kind"), "*")
    columns = ["stretch", "source", "offset", "event_time", "position", "value", "raw"]
    records = records.select(F.lit(_RECORD).alias("kind"), *keys, *columns)
    return union_all([records, silver, late, recovered])


def _parts(source: str, value_type: str) -> Column:
    """A source's column of silver, as an array of `Part`."""

    def part(p: Column) -> Column:
        time, value = F.unix_millis(p["event_time"]), _fingerprint(p["value"], value_type)
        return F.struct(
            F.lit(source).alias("source"), p["offset"].alias("offset"), time.alias("event_time"), value.alias("value")
        )

    return F.transform(source, part).cast(f"ARRAY<{_PART}>")


def _fingerprint(value: Column, value_type: str) -> Column:
    """Equal for equal values; 64 bits are plenty against accidents."""
    return F.xxhash64(value if value_type == "STRING" else F.to_json(value, {"ignoreNullFields": "false"}))


def find_differences(
    rules: MergeRules, stretches: Sequence[Stretch]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For mapInArrow: rows of `_by_key`, those of a key one after the other; out comes a row for every difference."""

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in batches for row in batch.to_pylist())
        for (partition, key), mine in groupby(rows, key=lambda row: (row["partition"], row["merge_key"])):
            found = [(partition, key, *difference) for difference in differences(rules, stretches, partition, key, list(mine))]
            if found:
                columns = zip(*found, strict=True)
                arrays = [pa.array(c, f.type) for c, f in zip(columns, _ARROW_DIFFERENCE, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=_ARROW_DIFFERENCE)

    return find


# -- in a task: plain Python


def differences(
    rules: MergeRules, stretches: Sequence[Stretch], partition: int, key: str, rows: Sequence[Mapping[str, Any]]
) -> Iterator[Difference]:
    """Where a key's rows of silver and late are not the model's."""
    by_kind: dict[int, list[Mapping[str, Any]]] = {kind: [] for kind in range(4)}
    for row in rows:
        by_kind[row["kind"]].append(row)
    merged, late = expected(
        rules, stretches, partition, key, by_kind[_RECORD], [(r["stretch"], r["event_time"]) for r in by_kind[_RECOVERED]]
    )
    found = [
        Merged(r["status"], r["is_reset"], r["event_time"], r["last_event_time"], tuple(Part(**part) for part in r["parts"]))
        for r in by_kind[_SILVER]
    ]
    yield from _different_rows(merged, found)
    found_late = [Late(*(r[name] for name in ("source", "offset", "event_time", "position", "raw"))) for r in by_kind[_LATE]]
    yield from _different_late(late, found_late)


def expected(
    rules: MergeRules,
    stretches: Sequence[Stretch],
    partition: int,
    key: str,
    records: Sequence[Mapping[str, Any]],
    recovered: Sequence[tuple[int, int]],
) -> tuple[list[Merged], list[Late]]:
    """The model's rows for one key, stretch by stretch: a reset closes what is open, and what is merged again after a jump back
    leaves its merge record, which is closed if it has other parts. `recovered`: event times, and the stretch they begin with.
    """
    values = {(row["source"], row["offset"]): (row["value"], row["raw"]) for row in records}
    once = {(row["stretch"], row["source"], row["offset"]): row for row in records}  # a repeat in bronze is check 1's to tell
    merged: list[Merged] = []
    late: list[Late] = []
    for i, stretch in enumerate(stretches):
        is_last = i == len(stretches) - 1
        model = _model(
            rules,
            stretch,
            partition,
            key,
            [row for at, row in once.items() if at[0] == i],
            [time for since, time in recovered if since <= i],
        )
        merged += [_row("timed_out", record, values, is_reset=False) for record in model.timed_out]
        merged += [_row("open" if is_last else "timed_out", r, values, is_reset=not is_last) for r in model.open.values()]
        for each in model.late:
            record = each.record
            raw = values[record.source, record.offset][1]
            late.append(Late(record.source, record.offset, record.event_time, each.position, raw))
        if not is_last:
            again = {source: stretch.comes_again(stretches[i + 1], source, partition) for source in rules.sources}
            merged = [left for row in merged if (left := _without(row, again)) is not None]
            late = [each for each in late if not _is_beyond(each, again)]
    return merged, late


def _model(
    rules: MergeRules,
    stretch: Stretch,
    partition: int,
    key: str,
    records: Iterable[Mapping[str, Any]],
    recovered: Sequence[int],
) -> PartitionMerge:
    """The partition as one key sees it: positions and clock are given."""
    model = PartitionMerge(rules, recovered={key: recovered})
    clock = stretch.clocks.get(partition)
    if clock is None:
        return model
    model.heads = dict.fromkeys(rules.sources, clock)
    for row in sorted(records, key=lambda row: row["position"]):
        record = Record(row["source"], row["offset"], row["event_time"], key)
        model.waiting.setdefault(record.source, deque()).append((row["position"], record))
    model.advance()
    return model


def _row(status: str, record: MergeRecord, values: Mapping[tuple[str, int], tuple[int, int]], *, is_reset: bool) -> Merged:
    parts = [
        Part(source, part.offset, part.event_time, values[source, part.offset][0])
        for source, mine in record.parts.items()
        for part in sorted(mine)
    ]
    return Merged(status, is_reset, record.event_time, record.last_event_time, tuple(parts))


def _is_beyond(each: Part | Late, again: Mapping[str, int | None]) -> bool:
    since = again[each.source]
    return since is not None and each.offset >= since


def _without(row: Merged, again: Mapping[str, int | None]) -> Merged | None:
    """What a jump back leaves of a merge record."""
    left = tuple(part for part in row.parts if not _is_beyond(part, again))
    if left == row.parts:
        return row
    times = [part.event_time for part in left]
    return Merged("timed_out", True, min(times), max(times), left) if left else None


def _different_rows(right: Sequence[Merged], found: Sequence[Merged]) -> Iterator[Difference]:
    """One difference for each pair of rows that should be the same: they share a part, or the event time."""
    missing = sorted((Counter(right) - Counter(found)).elements())
    extra = sorted((Counter(found) - Counter(right)).elements())
    for row in extra:
        twin = next((m for m in missing if _is_about_the_same(m, row)), None)
        if twin is None:
            yield Difference(row.event_time, None, None, f"the model has no such row ({_offsets(row.parts)})")
        else:
            missing.remove(twin)
            yield Difference(row.event_time, None, None, f"not as the model has it: {'; '.join(_told(row, twin))}")
    for row in missing:
        yield Difference(row.event_time, None, None, f"the row is missing ({_offsets(row.parts)})")


def _is_about_the_same(one: Merged, other: Merged) -> bool:
    shared = {part[:2] for part in one.parts} & {part[:2] for part in other.parts}
    return bool(shared) or one.event_time == other.event_time


def _told(found: Merged, right: Merged) -> Iterator[str]:
    for name in ("status", "is_reset", "event_time", "last_event_time"):
        if getattr(found, name) != getattr(right, name):
            yield f"{name} is {getattr(found, name)}, the model's {getattr(right, name)}"
    if found.parts != right.parts:
        mine, others = set(found.parts), set(right.parts)
        both = {part[:2] for part in mine - others} & {part[:2] for part in others - mine}
        if both:
            yield f"event time or value of {_offsets(p for p in right.parts if p[:2] in both)} is another"
        if extra := [part for part in found.parts if part[:2] not in {p[:2] for p in others}]:
            yield f"has {_offsets(extra)}"
        if lacking := [part for part in right.parts if part[:2] not in {p[:2] for p in mine}]:
            yield f"lacks {_offsets(lacking)}"
        if mine == others:
            yield "its parts are in another order, or there twice"


def _different_late(right: Sequence[Late], found: Sequence[Late]) -> Iterator[Difference]:
    missing, extra = Counter(right) - Counter(found), Counter(found) - Counter(right)
    lacking = {(late.source, late.offset): late for late in missing}
    for late in extra.elements():
        twin = lacking.pop((late.source, late.offset), None)
        names = [] if twin is None else [n for n in Late._fields if getattr(late, n) != getattr(twin, n)]
        what = f"{' and '.join(names)} is not as in bronze" if names else "the model does not have it late, or not so often"
        yield Difference(None, late.source, late.offset, what)
    for late in lacking.values():
        yield Difference(None, late.source, late.offset, f"the late record is missing (position {late.position})")


def _offsets(parts: Iterable[Part]) -> str:
    by_source: dict[str, list[int]] = {}
    for part in parts:
        by_source.setdefault(part.source, []).append(part.offset)
    return ", ".join(f"{source}@{','.join(map(str, offsets[:5]))}" for source, offsets in by_source.items()) or "no parts"

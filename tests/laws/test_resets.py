"""A deliberate reset is a batch that merges nothing: what comes after it begins anew, and what is out stays out."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

from pipelines.core.model import MergeRules, PartitionMerge
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.lake import tables
from pipelines.lake.location import local_path
from tests.laws.conftest import MakeLake, in_folders
from tests.support.cases import SOURCES, Case, rich_cases
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake, as_tuples
from tests.support.sequences import published

BACK, BACK_PUBLISHED, FORWARD, HERE = range(4)
"""What becomes of a partition, by its number modulo 4: back to the beginning, the same with half of it out, two offsets on, and
neither.
"""
PARTITIONS = 32
REASON = "reset --to a test"
NOTES = [("delete", tables.LATE), ("append", tables.RESETS), ("append", tables.PROGRESS)]


COLUMNS = ["partition", "merge_key", "status", "event_time", "last_event_time", *SOURCES]


def model_of(case: Case, begin: dict[str, int], arrived: int, recovered: dict[str, list[int]]) -> PartitionMerge:
    """The merge of so many of a case's records in their order of arrival, without those before an offset by source."""
    model = PartitionMerge(MergeRules(SOURCES, case.timeout_ms), recovered=published(recovered))
    seen = {source: case.arrivals[:arrived].count(source) for source in SOURCES}
    records = [r for r in case.records() if begin[r.source] <= r.offset < seen[r.source]]
    model.arrive(*records)
    model.advance()
    return model


def rows_of(p: int, case: Case, model: PartitionMerge, *, closed: bool = False) -> list[tuple[object, ...]]:
    """A model's merge records in the form of `CaseLake.silver`, with why they are not valid; `closed`: by a reset."""
    rows: list[tuple[object, ...]] = []
    for status, records in (("open", model.open.values()), ("timed_out", model.timed_out)):
        for record in records:
            key, first, last, parts = record.content()
            values = [
                tuple((q.offset, q.event_time, (case.values[source][q.offset] or b"").decode()) for q in mine)
                for source, mine in zip(SOURCES, parts, strict=True)
            ]
            reason = "reset" if closed and status == "open" else None
            rows.append((p, key, "timed_out" if closed else status, first, last, *values, reason))
    return rows


def silver_with_reasons(lake: CaseLake) -> list[tuple[object, ...]]:
    reasons = lake.questions.select(tables.SILVER, ["partition", "merge_key", "event_time", "status", "valid", "invalid_reason"])
    assert all((row["valid"] is False) == (row["invalid_reason"] is not None) for row in reasons.to_pylist())
    closed = lake.questions.select(tables.SILVER, COLUMNS, [[("invalid_reason", "=", "reset")]])
    others = lake.questions.select(tables.SILVER, COLUMNS, [[("invalid_reason", "is null", None)]])
    assert closed.num_rows + others.num_rows == reasons.num_rows
    rows = [(*row, reason) for found, reason in ((closed, "reset"), (others, None)) for row in as_tuples(found)]
    return sorted(rows, key=repr)


def publish_half(lake: CaseLake, merged: dict[int, PartitionMerge]) -> dict[int, dict[str, list[int]]]:
    """`published` says of some partitions that half of what is finished is out; what that is, by partition and key."""
    out: dict[int, dict[str, list[int]]] = {}
    rows = []
    for p, model in merged.items():
        order = model.published_order()
        if p % 4 == BACK_PUBLISHED and order:
            seq = len(order) // 2
            rows.append((p, 0, seq, order[seq].event_time, order[seq].key, seq, 0, "merged (1.2)"))
            for record in order[: seq + 1]:
                out.setdefault(p, {}).setdefault(record.key, []).append(record.event_time)
    lake.owner().append(tables.PUBLISHED, lake.engine.lake.layout[tables.PUBLISHED].rows(rows))
    return out


@in_folders
def test_a_reset_takes_up_again_or_passes_over_and_a_crash_in_it_is_completed(new_lake: MakeLake) -> None:
    lake = new_lake(rich_cases(PARTITIONS, 2500, refused=False, wealth="late timed_out open"))
    lake.arrive(0.6)
    lake.merge(lake.quick)
    arrived = {p: round(0.6 * len(case.arrivals)) for p, case in lake.cases.items()}
    nowhere = dict.fromkeys(SOURCES, 0)
    before = {p: model_of(case, nowhere, arrived[p], {}) for p, case in lake.cases.items()}
    recovered = publish_half(lake, before)
    assert sum(len(keys) for keys in recovered.values()) > 4

    ranges = targets(lake, {BACK: 0, BACK_PUBLISHED: 0, FORWARD: 2})
    plan = BatchPlan(lake.start().planner.next_batch, ranges, {}, has_late=False, reset=REASON)
    for step in (("append", tables.RECOVERED), ("merge", tables.SILVER)):
        with pytest.raises(CrashError):
            lake.start(engine=dying_at(lake.engine, *step)).commit(plan)
    with pytest.raises(CrashError):
        lake.start(engine=dying_at(lake.engine, *NOTES[0])).commit(plan)
    vacuum(lake)
    for note in NOTES[1:]:
        with pytest.raises(CrashError):
            _ = lake.start(engine=dying_at(lake.engine, *note)).planner
    planner = lake.start().planner
    assert (planner.next_batch, planner.clocks) == (plan.batch + 1, {})

    kept = lake.questions.select(tables.RECOVERED, ["partition", "merge_key", "event_time"]).to_pylist()
    assert sorted(tuple(row.values()) for row in kept) == sorted(
        (p, key, time) for p, by_key in recovered.items() for key, times in by_key.items() for time in times
    )
    jumps = lake.questions.select(tables.RESETS, ["source", "partition", "from_offset", "to_offset", "reason"]).to_pylist()
    assert sorted(tuple(row.values()) for row in jumps) == sorted(
        (tp.source, tp.partition, jump.from_offset, jump.until_offset, REASON) for tp, jump in ranges.items()
    )
    stays = {p: model for p, model in before.items() if p % 4 in (FORWARD, HERE)}
    closed = {p: rows_of(p, lake.cases[p], model, closed=True) for p, model in stays.items()}
    assert silver_with_reasons(lake) == flat(closed)
    assert {row[-1] for rows in closed.values() for row in rows} == {None, "reset"}
    late = {p: late_rows(p, model) for p, model in stays.items()}
    assert sorted((row[:6] for row in lake.late()), key=repr) == flat(late)

    lake.arrive()
    assert lake.merge() > 0
    arrived = {p: len(case.arrivals) for p, case in lake.cases.items()}
    anew = {p: model_of(case, begin_of(ranges, p), arrived[p], recovered.get(p, {})) for p, case in lake.cases.items()}
    assert silver_with_reasons(lake) == flat({p: [*closed.get(p, []), *rows_of(p, lake.cases[p], anew[p])] for p in anew})
    assert sorted((row[:6] for row in lake.late()), key=repr) == flat(
        {p: [*late.get(p, []), *late_rows(p, anew[p])] for p in anew}
    )

    # Back to the beginning where a reset has closed records before: those and others may share key and event time.
    ranges = targets(lake, {FORWARD: 0, HERE: 0})
    plan = BatchPlan(lake.start().planner.next_batch, ranges, {}, has_late=False, reset=REASON)
    lake.start().commit(plan)
    closed = {p: rows_of(p, lake.cases[p], anew[p], closed=True) for p in anew if p % 4 in (BACK, BACK_PUBLISHED)}
    assert silver_with_reasons(lake) == flat(closed)
    lake.merge()
    last = {p: model_of(case, begin_of(ranges, p), arrived[p], recovered.get(p, {})) for p, case in lake.cases.items()}
    assert silver_with_reasons(lake) == flat({p: [*closed.get(p, []), *rows_of(p, lake.cases[p], last[p])] for p in last})


def vacuum(lake: CaseLake) -> None:
    """No version of silver but the last one can be read any more."""
    if not lake.engine.lake.is_catalog:
        path = lake.engine.lake.address(tables.SILVER)
        DeltaTable(local_path(path)).vacuum(0, dry_run=False, enforce_retention_duration=False)


def targets(lake: CaseLake, offsets: dict[int, int]) -> dict[TopicPartition, OffsetRange]:
    """The jumps by what becomes of a partition: to the beginning (0), so many offsets on, or nowhere."""
    ranges = {}
    for tp, at in lake.start().planner.cursors.items():
        on = offsets.get(tp.partition % 4)
        until = at.next_offset if on is None else at.next_offset + on if on else 0
        ranges[tp] = OffsetRange(at.next_offset, until, None, None, None)
    return ranges


def begin_of(ranges: dict[TopicPartition, OffsetRange], partition: int) -> dict[str, int]:
    return {tp.source: jump.until_offset for tp, jump in ranges.items() if tp.partition == partition}


def flat(rows: dict[int, list[tuple[object, ...]]]) -> list[tuple[object, ...]]:
    return sorted((row for mine in rows.values() for row in mine), key=repr)


def late_rows(p: int, model: PartitionMerge) -> list[tuple[object, ...]]:
    return [
        (p, late.record.source, late.record.offset, late.record.key, late.record.event_time, late.position) for late in model.late
    ]

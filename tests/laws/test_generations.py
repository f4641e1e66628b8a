"""A jump begins a generation: what comes after it is a function of its beginning, and what is out
stays out, once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.laws.conftest import QUICK, MakeLake, in_folders
from tests.support import lakes
from tests.support.cases import (
    SOURCES,
    Case,
    cases_with_ids,
    heartbeat,
    keyed,
    rich_cases,
    rules_of,
)
from tests.support.configurations import IDS
from tests.support.crashes import CrashError, dying_at
from tests.support.inputs import input_of
from tests.support.lakes import CaseLake, as_tuples
from watersmeet.core.model import PartitionMerge
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.running.owner import Owner

BACK, BACK_PUBLISHED, FORWARD, HERE = range(4)
"""What becomes of a partition, by its number modulo 4: back to the beginning, the same with half of
it out, two offsets on, and neither.
"""
PARTITIONS = 32
COLUMNS = [
    "partition",
    "merge_key",
    "status",
    "event_time",
    "last_event_time",
    *SOURCES,
    "invalid_reason",
]
STEPS = [
    ("append", tables.SILVER),
    ("append", tables.JOURNAL),
    ("update", tables.SILVER),
    ("append", tables.JOURNAL),
]

Places = set[tuple[str, int]]
"""Records by source and offset."""


def model_of(case: Case, begin: dict[str, int], arrived: int, out: Places) -> PartitionMerge:
    """The merge of so many of a case's records in their order of arrival, from these offsets on,
    that passes over what is out."""
    model = PartitionMerge(
        rules_of(SOURCES, case.timeout_ms), out={(input_of(source), at) for source, at in out}
    )
    seen = {source: case.arrivals[:arrived].count(source) for source in SOURCES}
    model.arrive(
        *(r for r in case.records() if begin[r.input.source] <= r.offset < seen[r.input.source])
    )
    model.advance()
    return model


def rows_of(
    p: int,
    case: Case,
    model: PartitionMerge,
    tail: Tail | None = None,
    *,
    is_closed: bool = False,
) -> list[tuple[object, ...]]:
    """A model's merge records as silver has them; `is_closed`: after a jump, with all that is not
    out by the tail closed."""
    rows: list[tuple[object, ...]] = []
    for status, records in (("open", model.open.values()), ("timed_out", model.timed_out)):
        for record in records:
            key, first, last, parts = record.content()
            values = [
                tuple(
                    (q.offset, q.event_time, (case.values[source][q.offset] or b"").decode())
                    for q in mine
                )
                for source, mine in zip(SOURCES, parts, strict=True)
            ]
            is_out = status == "timed_out" and tail is not None and record.place() <= tail.place
            reason = "reset" if is_closed and not is_out else None
            rows.append(
                (p, key, "timed_out" if is_closed else status, first, last, *values, reason)
            )
    return rows


def late_rows(p: int, model: PartitionMerge) -> list[tuple[object, ...]]:
    found = ((late.record, late.position) for late in model.late)
    return [
        (p, record.input.source, record.offset, record.key, record.event_time, position)
        for record, position in found
    ]


def duplicates(models: dict[int, PartitionMerge]) -> list[tuple[object, ...]]:
    return sorted(
        (p, r.input.source, r.offset, r.key, r.event_time, r.id, of_offset)
        for p, model in models.items()
        for r, of_offset in model.duplicates
    )


def flat(rows: dict[int, list[tuple[object, ...]]]) -> list[tuple[object, ...]]:
    return sorted((row for mine in rows.values() for row in mine), key=repr)


def silver(lake: CaseLake, generation: int) -> list[tuple[object, ...]]:
    return sorted(
        as_tuples(lake.reader.select(tables.MERGED, COLUMNS, [[("generation", "=", generation)]])),
        key=repr,
    )


def half_out(p: int, model: PartitionMerge) -> tuple[Tail, Places] | None:
    """The last message of a partition of which half is out, and the records that are parts of its
    messages, or repeat one."""
    order = model.published_order()
    if p % 4 != BACK_PUBLISHED or not order:
        return None
    seq = len(order) // 2
    tail = Tail(seq, order[seq].place(), seq, order[seq].event_time)
    parts = {
        (source, part.offset)
        for row in order[: seq + 1]
        for source, mine in row.parts.items()
        for part in mine
    }
    repeated = {
        (each.record.input.source, each.record.offset)
        for each in model.duplicates
        if (each.record.input.source, each.of_offset) in parts
    }
    return tail, parts | repeated


def targets(lake: CaseLake, offsets: dict[int, int]) -> dict[TopicPartition, int]:
    """Where the partitions jump, by what becomes of them: to the beginning (0), so many offsets on,
    or nowhere."""
    found = {}
    for tp, at in lake.start().recover().state.cursors.items():
        on = offsets.get(tp.partition % 4)
        found[tp] = at.next_offset if on is None else at.next_offset + on if on else 0
    return found


def begin_of(begin: dict[TopicPartition, int], partition: int) -> dict[str, int]:
    return {tp.input.source: offset for tp, offset in begin.items() if tp.partition == partition}


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "kill", oracle=True)
@in_folders
def test_each_generation_is_the_merge_from_its_beginning_on_and_a_crash_in_a_jump_is_completed(
    new_lake: MakeLake,
) -> None:
    wealth = "late timed_out open"
    cases = cases_with_ids(rich_cases(PARTITIONS, 2500, refused=False, wealth=wealth))
    lake = new_lake(cases, **IDS)
    lake.arrive(0.6)
    lake.merge(lake.quick)
    nowhere = dict.fromkeys(SOURCES, 0)
    before = {
        p: model_of(case, nowhere, round(0.6 * len(case.arrivals)), set())
        for p, case in lake.cases.items()
    }
    halves = {p: found for p, model in before.items() if (found := half_out(p, model)) is not None}
    tails, out = (
        {p: tail for p, (tail, _) in halves.items()},
        {p: parts for p, (_, parts) in halves.items()},
    )
    assert sum(map(len, out.values())) > 4
    begin = targets(lake, {BACK: 0, BACK_PUBLISHED: 0, FORWARD: 2})
    stood = {tp: at.next_offset for tp, at in lake.start().recover().state.cursors.items()}

    for step in STEPS:
        try:
            lake.jump(begin, tails, Owner(dying_at(lake.engine, *step), lake.token))
        except CrashError:
            pass
        else:
            raise AssertionError(f"{step} was not reached")
        if step in STEPS[:2]:
            assert len(read_history(lake.reader, lake.settings).generations) == 1, (
                "nothing is decided"
            )
            lake.start().complete()
            assert silver(lake, 0) == flat(
                {p: rows_of(p, lake.cases[p], model) for p, model in before.items()}
            )
        else:
            break
    with pytest.raises(CrashError):
        lake.start(engine=dying_at(lake.engine, *STEPS[-1])).complete()
    assert lake.start().recover().state.clocks == {}
    closed = flat(
        {
            p: rows_of(p, lake.cases[p], model, tails.get(p), is_closed=True)
            for p, model in before.items()
        }
    )
    assert silver(lake, 0) == closed
    late = flat({p: late_rows(p, model) for p, model in before.items()})
    assert sorted((row[:6] for row in lake.late(0)), key=repr) == late
    jumps = lake.reader.select(
        tables.RESETS, ["source", "partition", "from_offset", "to_offset", "reason"]
    ).to_pylist()
    assert sorted(tuple(row.values()) for row in jumps) == sorted(
        (tp.input.source, tp.partition, stood[tp], at, "reset --to a test")
        for tp, at in begin.items()
    )

    lake.arrive()
    assert lake.merge() > 0
    anew = {
        p: model_of(case, begin_of(begin, p), len(case.arrivals), out.get(p, set()))
        for p, case in lake.cases.items()
    }
    assert silver(lake, 1) == flat(
        {p: rows_of(p, lake.cases[p], model) for p, model in anew.items()}
    )
    assert sorted((row[:6] for row in lake.late(1)), key=repr) == flat(
        {p: late_rows(p, model) for p, model in anew.items()}
    )
    assert lake.duplicates(1) == duplicates(anew)
    assert silver(lake, 0) == closed, "what belongs to the one before stays as it is"
    assert lake.duplicates(0) == duplicates(before)

    # Back to the beginning once more: what was out before stays out.
    again = dict.fromkeys(begin, 0)
    lake.jump(again, tails)
    lake.merge()
    last = {
        p: model_of(case, nowhere, len(case.arrivals), out.get(p, set()))
        for p, case in lake.cases.items()
    }
    assert silver(lake, 2) == flat(
        {p: rows_of(p, lake.cases[p], model) for p, model in last.items()}
    )
    assert silver(lake, 0) == closed


# -- records that were redriven


def claiming(monkeypatch: pytest.MonkeyPatch, copies: dict[int, int]) -> None:
    """These records of tracking, by their offsets, say that they are copies of others of it."""
    own = lakes.headers_of

    def headers(source: str, offset: int) -> list[dict[str, Any]]:
        if source != "tracking" or offset not in copies:
            return own(source, offset)
        value = f"tracking/0/{copies[offset]}".encode()
        return [{"key": "watersmeet.redriven", "value": value}]

    monkeypatch.setattr(lakes, "headers_of", headers)


def of_tracking(new_lake: MakeLake, *values: bytes, orders: int = 1) -> CaseLake:
    """A lake of a partition, in which so many heartbeats of orders come last: every third record
    has no Kafka key. Of the rest of each, nothing has arrived."""
    every: dict[str, list[bytes | None]] = {"tracking": [*values]}
    every["orders"] = [heartbeat(9000)] * orders
    arrivals = [source for source, its in every.items() for _ in its]
    lake = new_lake({0: Case(every, 100, arrivals)})
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    return lake


def tails_of(lake: CaseLake, generation: int) -> dict[int, Tail]:
    """The last message, where all that a generation has finished is out."""
    where = [[("status", "=", "timed_out"), ("generation", "=", generation)]]
    columns = ["partition", "event_time", *MERGED.order]
    rows = sorted(lake.reader.select(tables.SILVER, columns, where).to_pylist(), key=MERGED.place)
    return {row["partition"]: Tail(n, MERGED.place(row), n, 0) for n, row in enumerate(rows)}


def passed(lake: CaseLake, generation: int) -> list[int]:
    where = [[("status", "=", "passed"), ("generation", "=", generation)]]
    return sorted(lake.reader.select(tables.SILVER, ["offset"], where)["offset"].to_pylist())


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "retention")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("fate", ["out", "out, and deleted", "closed by the jump"])
def test_a_copy_of_a_record_that_is_out_stays_out_where_a_jump_begins_between_them(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    """By a longer timeout its merge record would sort after what is out."""
    claiming(monkeypatch, {3: 0})
    rest = heartbeat(0), heartbeat(0), keyed("a", 0), heartbeat(9000)
    lake = of_tracking(new_lake, keyed("a", 0), *rest)
    lake.arrive()
    lake.merge()
    assert passed(lake, 0) == [3]
    lake.change_rules({"merge.timeout": 5000})
    if fate.endswith("deleted"):  # by `keep`
        commit = Commit("deletes", 1, 1)
        lake.quick.delete(tables.bronze("tracking"), [[("offset", "=", 0)]], commit)
    begin = {tp: int(tp.input.source == "tracking") for tp in lake.every}
    is_out = fate.startswith("out")
    lake.jump(begin, tails_of(lake, 0) if is_out else {})
    lake.merge()
    assert len(silver(lake, 1)) == (not is_out)
    assert passed(lake, 1) == [3] * is_out


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps")
@in_folders
@pytest.mark.parametrize("is_out", [True, False])
def test_a_copy_of_a_record_that_is_out_stays_out_where_it_comes_after_a_jump_forward(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch, is_out: bool
) -> None:
    claiming(monkeypatch, {3: 0})
    before = keyed("a", 0), heartbeat(0), heartbeat(9000)
    lake = of_tracking(new_lake, *before, keyed("a", 0), heartbeat(9000), orders=2)
    lake.cases[0].arrivals = [*["tracking"] * 3, "orders", *["tracking"] * 2, "orders"]
    lake.arrive(4 / 7)
    lake.merge()
    stood = {tp: at.next_offset for tp, at in lake.start().recover().state.cursors.items()}
    lake.jump(stood, tails_of(lake, 0) if is_out else {})
    lake.arrive()
    lake.merge()
    assert len(silver(lake, 1)) == (not is_out)
    assert passed(lake, 1) == [3] * is_out


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_record_of_which_a_copy_is_out_stays_out_where_a_jump_leads_back_to_it(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming(monkeypatch, {3: 0})
    rest = heartbeat(0), heartbeat(0), keyed("a", 0), heartbeat(9000)
    lake = of_tracking(new_lake, keyed("a", 0), *rest)
    lake.arrive()
    nowhere = dict.fromkeys(lake.every, 0)
    lake.jump(nowhere | {tp: 1 for tp in nowhere if tp.input.source == "tracking"})
    lake.merge()
    assert len(silver(lake, 1)) == 1, "the copy alone was read"
    lake.change_rules({"merge.timeout": 5000})
    lake.jump(nowhere, tails_of(lake, 1))
    lake.merge()
    assert silver(lake, 2) == []
    assert passed(lake, 2) == [0, 3]


@pytest.mark.promise("N120")
@pytest.mark.fault("rules")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_copy_of_a_copy_that_was_refused_is_one_of_the_record_that_was_not(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """Unless that one was refused, too."""
    claiming(monkeypatch, {3: 0, 6: 3})
    copy, more = keyed("a", 0), [heartbeat(0)] * 2
    lake = of_tracking(new_lake, copy, *more, copy, *more, copy, heartbeat(9000))
    path = "sources.tracking.key"
    key = lake.settings.rules()[path]
    if is_refused:
        lake.change_rules({path: "another"})
    lake.arrive(3 / 9)
    lake.merge()
    lake.change_rules({path: "another"})
    lake.arrive(6 / 9)
    lake.merge()
    lake.change_rules({path: key})
    lake.arrive()
    lake.merge()
    assert [row[2] for row in lake.quarantined()] == ([0, 3] if is_refused else [3])
    [row] = silver(lake, 0)
    assert [offset for offset, *_ in row[5]] == [6 if is_refused else 0]  # type: ignore[attr-defined]
    assert passed(lake, 0) == [6] * (not is_refused)

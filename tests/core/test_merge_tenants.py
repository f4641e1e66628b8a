"""With tenants too, the merge over Arrow says what the merge model says, however the input is cut
into batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import SOURCES
from tests.support.effort import draws
from tests.support.inputs import tp_of
from tests.support.merges import (
    PARTS,
    SIZES,
    Life,
    MergeInput,
    begin_epoch,
    lives,
    tenant_inputs,
    with_ids,
    within_bounds,
)
from tests.support.strategies import cuts
from watersmeet.core.clocks import clocks_of
from watersmeet.core.idle import IdleDecision
from watersmeet.core.merge import LATE_SCHEMA, RECORD_SCHEMA, Batch, merge, silver_schema
from watersmeet.core.model import MergeRules, PartitionMerge, Record
from watersmeet.core.plan import Available, BatchPlan, Cursor, Rules, plan_batch
from watersmeet.core.repeated import DUPLICATE_SCHEMA, ID
from watersmeet.core.state import State
from watersmeet.core.too_large import EXCESS
from watersmeet.core.window import Bounds, Window

law = draws(75)

VALUE_TYPES = dict.fromkeys(SOURCES, pa.string())
SILVER = silver_schema(VALUE_TYPES, has_ids=True)
RECORDS = RECORD_SCHEMA.append(ID)


_OF_MERGE_RECORDS = ("open", "waiting", "timed_out")


def value_of(record: Record) -> bytes:
    """A value that tells the record, with its size, if that is large enough."""
    return (b"%d" % record.offset).ljust(record.size)


def sized(river: MergeInput) -> MergeInput:
    """The input with the sizes of its values."""
    records = [each._replace(size=len(value_of(each))) for each in river.records]
    return replace(river, records=records)


class PureLake:
    """A lake of one partition without storage: what the pure functions make of what arrives."""

    def __init__(self, rules: Rules, within_ms: int | None = None) -> None:
        self.within_ms = within_ms
        self.rows: dict[str, list[dict[str, object]]] = defaultdict(list)
        self.state = State(0, {tp_of(s, 0): Cursor() for s in SOURCES}, {}, rules)
        self.silver = SILVER.empty_table()
        self.late: list[dict[str, object]] = []
        self.duplicates: list[dict[str, object]] = []
        self.excess: list[dict[str, object]] = []
        self.offsets: dict[tuple[str, int], int] = {}
        """Offsets in this lake, by source and offset of what arrived."""

    def arrive(self, record: Record) -> None:
        mine, tp = self.rows[record.input.source], tp_of(record.input.source, 0)
        if record.tenant_times is not None:
            times = tuple(sorted(record.tenant_times.items()))
            decision = IdleDecision(len(mine) - 1, record.event_time, times)
            self.state = self.state.deciding([(tp, decision)])
            return
        row = {
            **record.input._asdict(),
            "partition": 0,
            "offset": len(mine),
            "merge_key": record.key,
        }
        row |= {
            "event_time": record.event_time * 1000,
            "heartbeat": record.is_heartbeat,
            "value": value_of(record),
        }
        row |= {"tenant": record.tenant, "id": record.id}
        self.offsets[record.input.source, record.offset] = len(mine)
        mine.append(row)

    def drain(self, share: Callable[[], int]) -> None:
        """Merges everything that has arrived, a share of each source at a time."""
        while True:
            size = share()
            plan = self.plan(size)
            if plan is None and (plan := self.plan(10**9)) is None:
                return
            self.commit(plan)

    def plan(self, share: int) -> BatchPlan | None:
        available = {}
        for tp, cursor in self.state.cursors.items():
            mine = self.rows[tp.input.source][cursor.next_offset : cursor.next_offset + share]
            times = np.array([row["event_time"] // 1000 for row in mine], np.int64)  # type: ignore[operator]
            rows = Available(np.array([row["offset"] for row in mine], np.int64), times)
            until = cursor.next_offset + share
            decided = [
                d
                for d in self.state.idle.get(tp, ())
                if cursor.next_offset <= d.after_offset + 1 <= until
                and (cursor.position is None or d.event_time > cursor.position)
            ]
            if len((rows := rows.with_idle(decided)).offsets):
                available[tp] = rows
        return plan_batch(
            self.state.next_batch,
            self.state.cursors,
            available,
            self.state.clocks,
            self.state.rules,
            begins_epoch=self.state.begins_epoch,
        )

    def commit(self, plan: BatchPlan) -> None:
        rows = [
            row
            for tp, done in plan.ranges.items()
            for row in self.rows[tp.input.source][
                max(0, done.from_offset - 1) : done.until_offset + 3
            ]
        ]
        records = pa.Table.from_pylist(rows[::-1], RECORDS)
        batch = Batch(
            plan,
            VALUE_TYPES,
            self.state.rules,
            self.state.idle,
            begins_epoch=self.state.begins_epoch,
            has_ids=True,
            within_ms=self.within_ms,
        )
        held = self.silver.filter(
            pa.array([s != "timed_out" for s in self.silver["status"].to_pylist()], pa.bool_())
        )
        everything = [row for mine in self.rows.values() for row in mine]
        waited = pa.Table.from_pylist(everything if batch.begins_epoch else [], RECORDS)
        heads = self.state.heads
        clocks = clocks_of(batch.rules, plan, batch.idle, records, heads)
        written = merge(records, held, batch, heads=heads, waited=waited).to_pylist()
        for status, rows, schema in (
            ("late", self.late, LATE_SCHEMA),
            ("duplicate", self.duplicates, DUPLICATE_SCHEMA),
            ("excess", self.excess, EXCESS),
        ):
            own = [row for row in written if row["status"] == status]
            rows += [{name: row[name] for name in schema.names} for row in own]
        changed = [row for row in written if row["status"] in (*_OF_MERGE_RECORDS, None)]
        kept = [
            row
            for row in self.silver.to_pylist()
            if not any(_is_replaced(row, by) for by in changed)
        ]
        new = [
            {name: row[name] for name in SILVER.names}
            for row in changed
            if row["status"] is not None
        ]
        self.silver = pa.Table.from_pylist(kept + new, SILVER)
        self.noted(batch, records)
        self.state = self.state.after(plan, clocks)

    def noted(self, batch: Batch, records: pa.Table) -> None:
        """What follows from a batch, whose rows silver has; its state is still the one before."""

    def outcome(self) -> tuple[object, ...]:
        rows = self.silver.to_pylist()
        for r in rows:
            assert (r["due"] is None, r["position"] is not None) == (r["status"] == "waiting",) * 2
            assert (r["closed_at"] is not None) == (r["status"] == "timed_out")
        waiting = [(r["position"], *_parts(r)) for r in rows if r["status"] == "waiting"]
        done = sorted((_place(r), _content(r)) for r in rows if r["status"] == "timed_out")
        late_rows = [(_ms(r["position"]), r["source"], int(r["value"])) for r in self.late]  # type: ignore[call-overload]
        return (
            done,
            sorted((_ms(r["due"]), _content(r)) for r in rows if r["status"] == "open"),
            sorted((_ms(position), *part) for position, part in waiting),
            sorted(late_rows, key=repr),
            sorted((str(r["source"]), r["offset"], r["of_offset"]) for r in self.duplicates),
            sorted((str(r["merge_key"]), str(r["source"]), r["offset"]) for r in self.excess),
        )


def _waits(rows: pa.Table) -> pa.Array:
    return pa.array([status == "waiting" for status in rows["status"].to_pylist()], pa.bool_())


def _is_replaced(row: Mapping[str, object], by: Mapping[str, object]) -> bool:
    """As the engines' MERGE has it."""
    if any(row[name] != by[name] for name in ("partition", "tenant", "merge_key")):
        return False
    if row["status"] == "open":
        return by["replaces"] == row["event_time"]
    return (
        row["status"] == "waiting"
        and by["delete_up_to"] is not None
        and row["position"] <= by["delete_up_to"]  # type: ignore[operator]
    )


def _ms(time: object) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)  # type: ignore[attr-defined]


def _parts(row: Mapping[str, object]) -> list[tuple[str, int]]:
    return sorted((s, int(part["value"])) for s in SOURCES for part in row[s])  # type: ignore[attr-defined]


def _place(row: Mapping[str, object]) -> tuple[object, ...]:
    return (
        _ms(row["closed_at"]),
        str(row["tenant"]).encode(),
        _ms(row["due"]),
        str(row["merge_key"]).encode(),
    )


def _content(row: Mapping[str, object]) -> tuple[object, ...]:
    times = _ms(row["event_time"]), _ms(row["last_event_time"])
    return str(row["tenant"]), str(row["merge_key"]), *times, _parts(row)


def expected(model: PartitionMerge, offsets: Mapping[tuple[str, int], int]) -> tuple[object, ...]:
    """The model's outcome; `offsets`: those of the lake, by source and the model's offset."""

    def content(row: object) -> tuple[object, ...]:
        parts = sorted((source, part.offset) for source, mine in row.parts.items() for part in mine)  # type: ignore[attr-defined]
        return row.tenant, row.key, row.event_time, row.last_event_time, parts  # type: ignore[attr-defined]

    return (
        [(row.place(), content(row)) for row in model.published_order()],
        sorted(
            (model.rules.due(row.event_time, row.last_event_time), content(row))
            for row in model.open.values()
        ),
        sorted(
            (position, record.input.source, record.offset) for position, record in model.waiting
        ),
        sorted(
            ((each.position, each.record.input.source, each.record.offset) for each in model.late),
            key=repr,
        ),
        sorted(
            (r.input.source, offsets[r.input.source, r.offset], offsets[r.input.source, of_offset])
            for r, of_offset in model.duplicates
        ),
        sorted(
            (str(r.key), r.input.source, offsets[r.input.source, r.offset]) for r in model.excess
        ),
    )


def rules_of(rules: MergeRules) -> Rules:
    return Rules(
        Window(rules.gap_ms, rules.max_ms),
        lag_ms=rules.lag_ms,
        bounds=Bounds(rules.max_parts, rules.max_bytes),
    )


def assert_merged_as_by_the_model(data: st.DataObject, river: MergeInput) -> None:
    """However the input is cut."""
    lake = PureLake(rules_of(river.rules))
    for chunk in data.draw(cuts(river.records)):
        for record in chunk:
            lake.arrive(record)
        lake.drain(lambda: data.draw(st.integers(1, 6), label="share"))
    lake.drain(lambda: 10**9)
    assert lake.outcome() == expected(river.merged(), lake.offsets)


@pytest.mark.promise("T2")
@pytest.mark.fault("cuts", oracle=True)
@law
@given(data=st.data(), river=with_ids(tenant_inputs()) | tenant_inputs())
def test_merge_is_what_the_model_makes_of_the_same_records_of_tenants(
    data: st.DataObject, river: MergeInput
) -> None:
    assert_merged_as_by_the_model(data, river)


@pytest.mark.promise("R26")
@pytest.mark.fault("cuts", "rules", oracle=True)
@law
@given(data=st.data(), river=within_bounds(with_ids(tenant_inputs())).map(sized))
def test_merge_records_are_too_large_where_the_model_says_so_through_every_epoch(
    data: st.DataObject, river: MergeInput
) -> None:
    """Each epoch has other bounds."""
    lake = PureLake(rules_of(river.rules))
    model = PartitionMerge(river.rules)
    for chunk in data.draw(cuts(river.records)):
        rules = replace(river.rules, max_parts=data.draw(PARTS), max_bytes=data.draw(SIZES))
        lake.state = lake.state.entering(
            lake.state.epoch + 1, lake.state.next_batch, rules_of(rules)
        )
        begin_epoch(model, rules)
        for record in chunk:
            lake.arrive(record)
        lake.drain(lambda: data.draw(st.integers(1, 6), label="share"))
        model.arrive(*chunk)
        model.advance()
    assert lake.outcome() == expected(model, lake.offsets)
    for row in lake.silver.to_pylist():
        if row["status"] != "waiting" and not _parts(row):
            assert (row["record_bytes"], row["record_ids"]) == (0, None)
            assert row["status"] == "open" or not row["valid"]


@pytest.mark.promise("T2")
@pytest.mark.fault("cuts", "rules", oracle=True)
@law
@given(data=st.data(), life=lives("tenants") | lives("tenants with ids") | lives("timeout"))
def test_merge_is_what_the_model_makes_of_the_same_records_through_every_epoch(
    data: st.DataObject, life: Life
) -> None:
    """The window and the lag change, also where the clock stands; with idle decisions."""
    lake = PureLake(rules_of(life[0][0]))
    model = PartitionMerge(life[0][0])
    for number, (rules, records) in enumerate(life):
        if number:
            lake.state = lake.state.entering(number, lake.state.next_batch, rules_of(rules))
        begin_epoch(model, rules)
        for chunk in data.draw(cuts(records)):
            for record in chunk:
                lake.arrive(record)
            lake.drain(lambda: data.draw(st.integers(1, 6), label="share"))
            model.arrive(*chunk)
            model.advance()
        lake.drain(lambda: 10**9)
    assert lake.outcome() == expected(model, lake.offsets)


@pytest.mark.promise("R26")
@pytest.mark.fault("cuts", oracle=True)
@law
@given(data=st.data(), river=within_bounds(with_ids(tenant_inputs())).map(sized))
def test_merge_records_are_too_large_where_the_model_says_so_however_the_input_is_cut(
    data: st.DataObject, river: MergeInput
) -> None:
    assert_merged_as_by_the_model(data, river)

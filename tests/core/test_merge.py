"""The merge over Arrow says what the merge model says, however the input is cut into batches."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.cases import (
    INPUTS,
    KEYS,
    SOURCES,
    Case,
    advance_to,
    as_record,
    random_case,
    rules_of,
    with_ids,
)
from tests.support.effort import seeds
from tests.support.inputs import input_of, tp_of
from tests.support.memory import MIB, arrow_peak
from watersmeet.configuration.values import NAMES_OF_STEPS, RESERVED_NAMES
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.merge import (
    LATE_SCHEMA,
    MESSAGE_SCHEMA,
    RECORD_SCHEMA,
    Batch,
    applied,
    kept,
    merge,
    merge_in_chunks,
    new_rows,
    silver_schema,
)
from watersmeet.core.model import PartitionMerge, PublishedRecord, Record
from watersmeet.core.plan import (
    Available,
    BatchPlan,
    Cursor,
    OffsetRange,
    Rules,
    TopicPartition,
    plan_batch,
)
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import DUPLICATE_SCHEMA, ID, RECORD_IDS
from watersmeet.core.types import DUE
from watersmeet.core.window import Closing, Window, epoch_start

TIMEOUT_MS = 100
PARTITIONS = 50
LAKES = 10
"""Of PARTITIONS cases each, for every change."""
VALUE_TYPES = dict.fromkeys(SOURCES, pa.string())
SILVER = silver_schema(VALUE_TYPES)


@dataclass
class PureLake:
    """A lake without storage: what `merge` makes of many cases, a partition each."""

    cases: Mapping[int, Case]
    rng: random.Random
    window: Window
    epochs: Sequence[Window] = ()
    """Windows that follow the first one, each from some batch on."""
    recovered: Mapping[int, Mapping[str, Sequence[PublishedRecord]]] = field(default_factory=dict)
    out: Mapping[TopicPartition, Sequence[int]] = field(default_factory=dict)
    """Offsets that are passed over."""
    inputs: Sequence[str] = SOURCES
    in_chunks: bool = False
    """Whether open records are merged a few at a time."""
    stands: bool = False
    """Whether five epochs at a time follow one another while all clocks stand."""
    has_ids: bool = False
    open_rows: pa.Table | None = None
    finished: list[dict[str, object]] = field(default_factory=list)
    late: list[tuple[object, ...]] = field(default_factory=list)
    duplicates: list[dict[str, object]] = field(default_factory=list)
    replaced: int = 0
    beyond: int = 0
    """How often an epoch started beyond the clock of a partition."""
    clocks: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = {tp_of(s, p): self._bronze(s, p) for p in self.cases for s in self.inputs}
        self.cursors = {tp: Cursor() for tp in self.rows}
        self.arrived = dict.fromkeys(self.rows, 0)
        self.rules, self.epoch_from = Rules(self.window), -1
        inputs = map(input_of, self.inputs)
        self.schema = silver_schema(VALUE_TYPES, inputs, has_ids=self.has_ids)
        self.ended: list[tuple[Mapping[TopicPartition, Cursor], Mapping[int, int]]] = []
        self.idle = {
            tp_of(s, p): case.decisions.get(s, [])
            for p, case in self.cases.items()
            for s in self.inputs
        }

    def _bronze(self, source: str, partition: int) -> list[dict[str, object]]:
        rows = []
        for offset, value in enumerate(self.cases[partition].values[source]):
            record = as_record(source, offset, value)
            time = None if record is None else record.event_time * 1000
            key, beat = (None, False) if record is None else (record.key, record.is_heartbeat)
            rows.append(
                {
                    **input_of(source)._asdict(),
                    "partition": partition,
                    "offset": offset,
                    "merge_key": key,
                }
                | {"event_time": time, "heartbeat": beat, "value": value}
                | {"tenant": None if beat else "", "id": None if record is None else record.id}
            )
        return rows

    def drain(self) -> None:
        """Merges everything, in batches of random size."""
        number, windows = 0, list(self.epochs)
        while True:
            again = self.stands and number == self.epoch_from + 1 and len(self.ended) % 5
            if windows and number > self.epoch_from and (again or self.rng.random() < 0.2):
                self.ended.append((dict(self.cursors), dict(self.clocks)))
                before, window = self.rules, windows.pop(0)
                passed = {
                    p: max(before.horizons.get(p, NULL_TIME), c - before.window.gap_ms)
                    for p, c in self.clocks.items()
                }
                start = {
                    p: epoch_start(
                        c,
                        before.epoch_start.get(p, NULL_TIME),
                        Closing(before.window.gap_ms, before.window.longest_ms, 0),
                        Closing(window.gap_ms, window.longest_ms, 0),
                    )
                    for p, c in self.clocks.items()
                }
                self.rules = Rules(window, {**before.horizons, **passed}, start)
                self.beyond += sum(start[p] > c for p, c in self.clocks.items())
                self.epoch_from = number
            done = all(self.arrived[tp] == len(rows) for tp, rows in self.rows.items())
            begins = number == self.epoch_from
            for tp, rows in self.rows.items() if not (begins and self.stands) else ():
                self.arrived[tp] = min(len(rows), self.arrived[tp] + self.rng.choice([0, 1, 5, 40]))
            plan = plan_batch(
                number,
                self.cursors,
                self._available(done),
                self.clocks,
                self.rules,
                begins_epoch=begins,
            )
            if plan is not None:
                self._commit(plan)
                number += 1
            elif done and not (self.stands and windows):
                return

    def _available(self, done: bool) -> dict[TopicPartition, Available]:
        available = {}
        for tp, cursor in self.cursors.items():
            end = self.arrived[tp]
            rows = self.rows[tp][cursor.next_offset : end]
            times = [
                NULL_TIME if row["event_time"] is None else row["event_time"] // 1000  # type: ignore[operator]
                for row in rows
            ]
            found = Available(
                np.array([row["offset"] for row in rows], np.int64), np.array(times, np.int64)
            )
            decided = [
                d
                for d in self.idle[tp]
                if cursor.next_offset <= d.after_offset + 1 < end + done
                and (cursor.position is None or d.event_time > cursor.position)
            ]
            found = found.with_idle(decided)
            if len(found.offsets):
                available[tp] = found
        return available

    def _commit(self, plan: BatchPlan) -> None:
        batch = Batch(
            plan,
            VALUE_TYPES,
            self.rules,
            self.idle,
            max_bytes=10**6,
            has_ids=self.has_ids,
        )
        batch = replace(batch, out={tp: np.array(mine, np.int64) for tp, mine in self.out.items()})
        # More than asked for does no harm.
        rows = [
            row
            for tp, done in plan.ranges.items()
            for row in self.rows[tp][max(0, done.from_offset - 1) : done.until_offset + 1]
        ]
        self.rng.shuffle(rows)
        schema = RECORD_SCHEMA.append(ID) if self.has_ids else RECORD_SCHEMA
        records = pa.Table.from_pylist(rows, schema)
        open_rows = self.open_rows if self.open_rows is not None else self.schema.empty_table()
        self.cursors |= plan.cursors()
        self.clocks = dict(plan.clocks)
        if self.in_chunks:
            size = self.rng.choice([1, 7, 40])
            chunks = (open_rows.slice(begin, size) for begin in range(0, len(open_rows), size))
            found = merge_in_chunks(records, chunks, batch, self._recovered())
            rows = pa.concat_tables(applied(chunk, changed) for chunk, changed in found)
            self._note(rows)
            rows = rows.filter(pc.is_in(rows["status"], pa.array(["open", "timed_out"])))
            is_open = pc.equal(rows["status"], "open")
            self.finished += rows.filter(pc.invert(is_open)).to_pylist()
            self.open_rows = rows.filter(is_open)
            return
        changed = merge(records, open_rows, batch, self._recovered()).cast(batch.changed_schema())
        self._note(changed)
        replaced = {
            (r["partition"], r["merge_key"], r["replaces"])
            for r in changed.to_pylist()
            if r["replaces"] is not None
        }
        kept = [
            r
            for r in open_rows.to_pylist()
            if (r["partition"], r["merge_key"], r["event_time"]) not in replaced
        ]
        assert open_rows.num_rows - len(kept) == len(replaced)
        new = [{k: v for k, v in r.items() if k in self.schema.names} for r in changed.to_pylist()]
        self.finished += [r for r in new if r["status"] == "timed_out"]
        self.open_rows = pa.Table.from_pylist(
            kept + [r for r in new if r["status"] == "open"], self.schema
        )
        self.replaced += len(replaced)

    def _note(self, changed: pa.Table) -> None:
        for row in changed.to_pylist():
            if row["status"] == "late":
                self.late.append(tuple(row[name] for name in LATE_SCHEMA.names))
            elif row["status"] == "duplicate":
                self.duplicates.append({name: row[name] for name in DUPLICATE_SCHEMA.names})

    def _recovered(self) -> pa.Table:
        rows = [
            {"partition": p, "merge_key": key, "event_time": each.event_time * 1000, "tenant": ""}
            | {name: getattr(each, name) * 1000 for name in DUE.names}
            for p, by_key in self.recovered.items()
            for key, mine in by_key.items()
            for each in mine
        ]
        return pa.Table.from_pylist(rows, MESSAGE_SCHEMA)

    def content(self) -> list[tuple[object, ...]]:
        rows = self.finished + (self.open_rows.to_pylist() if self.open_rows is not None else [])
        return sorted((_content(row) for row in rows), key=repr)


def _content(row: Mapping[str, object]) -> tuple[object, ...]:
    parts = [
        tuple((p.get("topic", ""), p["offset"], _ms(p["event_time"]), p["value"]) for p in row[s])  # type: ignore[attr-defined]
        for s in SOURCES
    ]
    times = [_ms(row[name]) for name in ("event_time", "last_event_time")]
    return (
        row["partition"],
        row["merge_key"],
        row["status"],
        *times,
        _ms(row["due"]),
        _ms(row["closed_at"]),
        *parts,
    )


def _ms(time: object) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)  # type: ignore[attr-defined]


def _models(lake: PureLake) -> Iterator[tuple[int, PartitionMerge]]:
    for p, case in lake.cases.items():
        out = {
            (tp.input, offset)
            for tp, mine in lake.out.items()
            if tp.partition == p
            for offset in mine
        }
        model = PartitionMerge(
            rules_of(lake.inputs, *lake.window), recovered=lake.recovered.get(p, {}), out=out
        )
        heads: dict[InputId, int] = {}
        inputs = [input_of(name) for name in lake.inputs]
        left: dict[InputId, list[tuple[int, Record]]] = {i: [] for i in inputs}
        for record in case.records():
            heads[record.input] = max(heads.get(record.input, 0), record.event_time)
            left[record.input].append((heads[record.input], record))
        for window, (cursors, clocks) in zip(lake.epochs, lake.ended, strict=False):
            # What an epoch has merged depends on the cut into batches; so the model is told, and
            # where the clock stood.
            if p in clocks:
                ends = {i: cursors[tp_of(i, p)].next_offset for i in inputs}
                reached = {i: [r for r in left[i] if r[1].offset < ends[i]] for i in inputs}
                left = {i: [r for r in left[i] if r[1].offset >= ends[i]] for i in inputs}
                advance_to(model, dict.fromkeys(inputs, clocks[p]), reached)
            model.begin_epoch(*window)
        advance_to(model, heads, left)
        yield p, model


def _expected(lake: PureLake) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    silver, late_rows = [], []
    for p, model in _models(lake):
        case = lake.cases[p]
        for status, found in (("open", model.open.values()), ("timed_out", model.timed_out)):
            for record in found:
                key, first, last, parts = record.content()
                of_sources = [
                    tuple(
                        (
                            part.topic if lake.inputs == INPUTS and s == "tracking" else "",
                            part.offset,
                            part.event_time,
                            (case.value(s, part) or b"").decode(),
                        )
                        for part in mine
                    )
                    for s, mine in zip(SOURCES, parts, strict=True)
                ]
                is_open = status == "open"
                due = model.rules.due(first, last) if is_open else record.due
                closed_at = None if is_open else record.closed_at
                silver.append((p, key, status, first, last, due, closed_at, *of_sources))
        for behind in model.late:
            one = behind.record
            facts = (one.offset, one.key, one.event_time, behind.position)
            late_rows.append((p, *one.input, *facts))
    return sorted(silver, key=repr), sorted(late_rows, key=repr)


def _late(lake: PureLake) -> list[tuple[object, ...]]:
    names = LATE_SCHEMA.names
    rows = [dict(zip(names, row, strict=True)) for row in lake.late]
    place = "partition", "source", "topic", "offset", "merge_key"
    found = ((*(r[name] for name in place), _ms(r["event_time"]), _ms(r["position"])) for r in rows)
    return sorted(found, key=repr)


def _check(lake: PureLake) -> None:
    """The lake has what the model makes of the same records."""
    lake.drain()
    silver, late_rows = _expected(lake)
    assert lake.content() == silver
    assert _late(lake) == late_rows
    assert _duplicates(lake) == _expected_duplicates(lake)
    of_closed = _ids(replace(lake, open_rows=None))
    assert {entry[:5] for entry in of_closed if entry[6] is not None} == {
        (p, key, source, topic, offset) for p, source, topic, offset, key, *_ in _duplicates(lake)
    }


def _duplicates(lake: PureLake) -> list[tuple[object, ...]]:
    for row in lake.duplicates:
        assert list(row) == DUPLICATE_SCHEMA.names
        assert not row["is_late"]
    place = "partition", "source", "topic", "offset", "merge_key", "id", "of_offset"
    return sorted(
        (*(row[name] for name in place), _ms(row["event_time"])) for row in lake.duplicates
    )


def _expected_duplicates(lake: PureLake) -> list[tuple[object, ...]]:
    return sorted(
        (
            p,
            *r.input,
            *(r.offset, r.key, r.id, of_offset, r.event_time),
        )
        for p, model in _models(lake)
        for r, of_offset in model.duplicates
        if lake.has_ids
    )


def _ids(lake: PureLake) -> list[tuple[object, ...]]:
    rows = lake.finished + (lake.open_rows.to_pylist() if lake.open_rows is not None else [])
    found = [(row["partition"], row["merge_key"], row.get(RECORD_IDS.name)) for row in rows]
    assert all(entries is None or entries for _, _, entries in found)
    return sorted(
        (p, key, entry["source"], entry["topic"], entry["offset"], entry["id"], entry["of_offset"])
        for p, key, entries in found
        for entry in entries or ()
    )


def _random_lake(seed: int, inputs: Sequence[str] = SOURCES) -> PureLake:
    rng = random.Random(seed)
    window = _random_window(rng)
    cases = {
        p: random_case(seed * PARTITIONS + p, window.gap_ms, inputs) for p in range(PARTITIONS)
    }
    recovered: dict[int, dict[str, list[PublishedRecord]]] = {}
    for p, case in cases.items():
        if rng.random() < 0.3:
            for source in inputs:
                if rng.random() < 0.7:
                    count = len(case.values[source])
                    times = sorted(rng.randrange(3000) for _ in range(rng.randint(1, 3)))
                    after = sorted(rng.randint(-1, count - 1) for _ in times)
                    case.decisions[source] = [
                        IdleDecision(*each) for each in zip(after, times, strict=True)
                    ]
        if rng.random() < 0.2:
            recovered[p] = {
                key: [_random_message(rng, window) for _ in range(rng.randint(1, 2))]
                for key in KEYS
                if rng.random() < 0.5
            }
    epochs = [_random_window(rng) for _ in range(rng.choice([0, 0, 1, 3]))]
    has_ids = seed % 2 == 1
    if has_ids:
        cases = {p: with_ids(case, seed * PARTITIONS + p) for p, case in cases.items()}
    recovered = {} if epochs else recovered
    return PureLake(cases, rng, window, epochs, recovered, inputs=inputs, has_ids=has_ids)


def _random_window(rng: random.Random) -> Window:
    gap_ms = rng.choice([1, 30, TIMEOUT_MS, TIMEOUT_MS, 1000, 5000])
    return rng.choice(
        [Window(gap_ms), Window(gap_ms, gap_ms * rng.choice([1, 1, 2, 5]) + rng.choice([0, 7]))]
    )


def _random_message(rng: random.Random, window: Window) -> PublishedRecord:
    time = rng.randrange(1500)
    due = time + rng.randrange(window.longest_ms)
    return PublishedRecord(time, due, due + 1)


@pytest.mark.promise("R2")
@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize("seed", seeds(LAKES))
def test_merge_is_what_the_model_makes_of_the_same_records(seed: int) -> None:
    lake = _random_lake(seed)
    _check(lake)


@pytest.mark.promise("C6")
@pytest.mark.fault("cuts", "rules", oracle=True)
@pytest.mark.parametrize("seed", seeds(LAKES // 2))
def test_epochs_that_begin_while_the_clocks_stand_are_merged_as_the_model_does(seed: int) -> None:
    lake = _random_lake(seed)
    lake.recovered, lake.stands = {}, True
    lake.epochs = [_random_window(lake.rng) for _ in range(10)]
    _check(lake)
    assert lake.beyond > PARTITIONS


@pytest.mark.promise("C24")
@pytest.mark.fault("cuts", "memory", oracle=True)
@pytest.mark.parametrize("seed", seeds(LAKES // 3))
def test_open_records_that_come_in_pieces_are_merged_as_the_model_does(seed: int) -> None:
    lake = _random_lake(seed)
    lake.in_chunks = True
    _check(lake)


@pytest.mark.parametrize("seed", seeds(LAKES // 2))
def test_several_topics_of_a_source_are_merged_as_the_model_does(seed: int) -> None:
    lake = _random_lake(seed, INPUTS)
    _check(lake)


@pytest.mark.parametrize("seed", seeds(LAKES // 2))
def test_what_is_out_is_passed_over_and_still_moves_positions(seed: int) -> None:
    lake = _random_lake(seed)
    rng = random.Random(seed)
    lake.out = {
        tp: sorted(rng.sample(range(len(rows)), len(rows) // 4)) for tp, rows in lake.rows.items()
    }
    _check(lake)


def test_the_random_cases_with_several_topics_mix_them_and_have_ties() -> None:
    mixed, tied = 0, 0
    for seed in range(4):
        lake = _random_lake(seed, INPUTS)
        lake.drain()
        for *_, parts, _ in lake.content():
            topics, times = [part[0] for part in parts], [part[2] for part in parts]  # type: ignore[attr-defined]
            mixed += topics != sorted(topics)
            tied += any(
                one != other and times[i] == times[i + 1]
                for i, (one, other) in enumerate(pairwise(topics))
            )
    assert mixed > 40
    assert tied > 5


def test_the_random_cases_replace_open_records_split_keys_and_have_late_records() -> None:
    lakes = [_random_lake(seed) for seed in range(4)]
    for lake in lakes:
        lake.drain()
    assert sum(lake.replaced for lake in lakes) > 40
    assert sum(len(lake.late) for lake in lakes) > 40
    keys = [(p, r["merge_key"]) for lake in lakes for r in lake.finished for p in [r["partition"]]]
    assert len(keys) > len(set(keys)) + 40
    assert sum(len(lake.ended) for lake in lakes) > 1


def a_batch(clock: int, until: int, max_bytes: int | None = None) -> Batch:
    ranges = {tp_of(s, 0): OffsetRange(0, until, None, clock, clock) for s in SOURCES}
    return Batch(
        BatchPlan(7, ranges, {0: clock}, has_late=False),
        VALUE_TYPES,
        Rules(Window(TIMEOUT_MS)),
        max_bytes=max_bytes,
    )


def records_of(*rows: tuple[str, int, str, int, bytes]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "source": s,
                "topic": s,
                "partition": 0,
                "offset": o,
                "merge_key": k,
                "event_time": t * 1000,
                "heartbeat": False,
                "value": v,
                "tenant": "",
            }
            for s, o, k, t, v in rows
        ],
        RECORD_SCHEMA,
    )


@pytest.mark.promise("K8")
def test_a_record_that_times_out_with_too_large_a_message_is_not_valid() -> None:
    records = records_of(("tracking", 0, "a", 0, b"1" * 50), ("orders", 0, "b", 0, b"1" * 500))
    batch = a_batch(1000, 5, max_bytes=400)
    found = {
        row["merge_key"]: row for row in merge(records, SILVER.empty_table(), batch).to_pylist()
    }
    assert (found["a"]["valid"], found["a"]["invalid_reason"]) == (True, None)
    assert (found["b"]["valid"], found["b"]["invalid_reason"]) == (False, "too_large")


def test_no_source_can_be_called_like_a_column_beside_the_sources() -> None:
    beside = {*silver_schema({}).names, *a_batch(50, 5).changed_schema().names}
    taken = beside - {*SOURCES} - RESERVED_NAMES - NAMES_OF_STEPS
    assert not [name for name in taken if re.fullmatch("[a-z][a-z0-9_]*", name)]


def test_an_open_record_is_not_judged() -> None:
    batch = a_batch(50, 5, max_bytes=1)
    [row] = merge(records_of(("orders", 0, "a", 50, b"1")), SILVER.empty_table(), batch).to_pylist()
    assert (row["status"], row["valid"], row["invalid_reason"]) == ("open", None, None)


def test_two_open_records_of_a_key_are_refused() -> None:
    batch = a_batch(50, 5)
    row = merge(records_of(("orders", 0, "a", 50, b"1")), SILVER.empty_table(), batch).select(
        SILVER.names
    )
    row = row.cast(SILVER)
    with pytest.raises(ValueError, match="two open records"):
        merge(records_of(), pa.concat_tables([row, row]), batch)
    chunks = merge_in_chunks(records_of(("orders", 0, "a", 50, b"1")), [row, row], batch)
    with pytest.raises(ValueError, match="two open records"):
        list(chunks)


def test_an_open_record_that_nothing_changes_is_left_out() -> None:
    batch = a_batch(50, 5)
    row = merge(records_of(("orders", 0, "a", 50, b"1")), SILVER.empty_table(), batch).select(
        SILVER.names
    )
    assert merge(records_of(), row.cast(SILVER), batch).num_rows == 0


def test_a_value_is_copied_once_from_its_record_to_the_merge_record() -> None:
    """The rows of each source are in a chunk of their own, as they are read."""
    ours = [("tracking", n, f"a{n % 2}", 50, b"x" * MIB) for n in range(8)]
    others = [("orders", n, "b", 50, b"y" * MIB) for n in range(4)]
    records = pa.concat_tables([records_of(*ours), records_of(*others)])
    nothing, batch = SILVER.empty_table(), a_batch(50, 8)
    with arrow_peak() as peak:
        merged = merge(records, nothing, batch)
    assert peak() < 13 * MIB
    assert pc.sum(merged[RECORD_BYTES.name]).as_py() == 12 * MIB


def test_a_value_of_an_open_record_is_copied_once_to_what_it_becomes() -> None:
    """Also where the message may be too large, which is asked of what has timed out alone."""
    first = [("tracking", n, f"a{n}", 50, b"x" * 2 * MIB) for n in range(4)]
    opened = merge(records_of(*first), SILVER.empty_table(), a_batch(50, 5)).select(SILVER.names)
    second = [("orders", n, f"a{n}", 60, b"y" * 2 * MIB) for n in range(4)]
    records = records_of(*second, ("orders", 9, "new", 10_000, b"z" * 2 * MIB))
    with arrow_peak() as peak:
        merged = merge(records, opened, a_batch(10_000, 10, 100 * MIB))
        assert peak() < 19 * MIB
        [*new_rows(merged).to_batches()]
        assert kept(opened, merged).num_rows == 0
        assert peak() < 19 * MIB
    assert sorted(merged["status"].to_pylist()) == ["open", *["timed_out"] * 4]
    assert pc.sum(merged[RECORD_BYTES.name]).as_py() == 18 * MIB


def test_a_chunk_is_not_in_memory_while_the_next_one_comes() -> None:
    rows = [("tracking", n, f"a{n}", 50, b"x" * 2 * MIB) for n in range(8)]
    opened = merge(records_of(*rows), SILVER.empty_table(), a_batch(50, 9))
    opened = opened.select(SILVER.names).cast(SILVER)
    changing = records_of(*[("orders", n, f"a{n}", 60, b"y") for n in range(8)])

    def chunks() -> Iterator[pa.Table]:
        return (opened.take([n]) for n in range(8))

    with arrow_peak() as peak:
        for chunk, changed in merge_in_chunks(changing, chunks(), a_batch(60, 9)):
            assert applied(chunk, changed).num_rows in (0, 1)
            del chunk, changed
        assert peak() < 5 * MIB


@pytest.mark.promise("R26")
@pytest.mark.fault("memory")
@pytest.mark.parametrize("repeats", [True, False])
def test_a_hot_key_takes_the_memory_of_a_batch_once_and_then_none(repeats: bool) -> None:
    """Also where its records repeat one id, so that their values come to little."""
    count = 300_000

    def hot(offsets: range) -> pa.Table:
        columns = {
            "offset": pa.array(offsets, pa.int64()),
            "event_time": pa.array(np.full(len(offsets), 50_000)).cast(pa.timestamp("us", "UTC")),
            "id": pa.array(["1" if repeats else str(n) for n in offsets]),
        }
        [row] = records_of(("tracking", 0, "undefined", 50, b"x")).to_pylist()
        for name in RECORD_SCHEMA.names:
            if name not in columns:
                kind = RECORD_SCHEMA.field(name).type
                columns[name] = pa.repeat(pa.scalar(row[name], kind), len(offsets))
        schema = RECORD_SCHEMA.append(ID)
        return pa.table(columns).select(schema.names).cast(schema)

    silver = silver_schema(VALUE_TYPES, has_ids=True)
    batch = replace(a_batch(50, count + 6), has_ids=True)
    with arrow_peak() as peak:
        merged = merge(hot(range(count)), silver.empty_table(), batch)
        assert peak() < 110 * MIB
    statuses = merged["status"].to_pylist()
    assert (statuses.count("open"), statuses.count("excess")) == (1, count)
    opened = new_rows(merged).filter(pc.equal(new_rows(merged)["status"], "open")).cast(silver)
    assert opened.nbytes < 2_000
    with arrow_peak() as peak:
        merged = merge(hot(range(count, count + 6)), opened, batch)
        assert peak() < MIB
    [row] = [row for row in merged.to_pylist() if row["status"] == "open"]
    assert (row["record_count"], row["record_bytes"]) == (count + 6, 0)

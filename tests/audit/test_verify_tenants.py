"""`verify` on lakes with tenants: it accepts what the rules make of any arrivals, and finds each
promise broken by hand."""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.audit.inputs import problems_in, with_topics
from tests.audit.inputs import settings_of as settings_with_topics
from tests.audit.test_verify import Change, altered, gone, name_of_sink, twice
from tests.support.cases import SOURCES, Case, as_record, cases_with_ids, rules_of
from tests.support.configurations import IDS, settings_for
from tests.support.effort import draws, first_then_nightly
from tests.support.inputs import input_of, record_of, tp_of
from tests.support.lakes import CaseLake
from tests.support.merges import TENANTS, Life, idle_decision, lives
from tests.support.model_lakes import ModelLake, Row, rewrite
from tests.support.tenants import case_of_records, tenant_cases
from tests.support.topics import CheckedProducer, consume, create_topics
from watersmeet.audit import evidence as audit_evidence
from watersmeet.audit import problems
from watersmeet.audit.evidence import End, read_evidence
from watersmeet.audit.problems import Report
from watersmeet.audit.verify import check_tables
from watersmeet.audit.verify_model import Base, Derivation
from watersmeet.audit.verify_topics import read_topics
from watersmeet.core.model import MergeRecord, PartitionMerge, Record
from watersmeet.core.plan import TopicPartition
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.history import Epoch
from watersmeet.lake.identity import begin_epoch
from watersmeet.settings import Settings

pytestmark = [pytest.mark.long, pytest.mark.promise("T5")]


def settings_of(
    folder: Path, gap_ms: int = 100, max_ms: int | None = None, lag_ms: int = 1000, **overrides: Any
) -> Settings:
    window: dict[str, Any] = {
        "merge__timeout": None,
        "merge__window": {"gap": f"{gap_ms}ms", "max": f"{max_ms}ms"},
    }
    timeout: dict[str, Any] = {"merge__timeout": f"{gap_ms}ms"}
    tenants = {"merge__tenant": "g", "merge__tenant_max_lag": f"{lag_ms}ms"}
    return settings_for(folder, **(timeout if max_ms is None else window), **tenants, **overrides)


OVERRIDES = {"merge__tenant": "g", "merge__tenant_max_lag": "1s"}


def arrivals_of(seed: int, lag_ms: int = 1000, count: int = 80) -> list[Record]:
    """Tenants with delays of their own, ties, disorder, silence, heartbeats of a tenant and of
    everybody, decisions when idle."""
    rng = random.Random(seed)
    delays = {tenant: rng.choice([0, 10, 100, lag_ms // 2, 2 * lag_ms]) for tenant in TENANTS}
    times, records = dict.fromkeys(SOURCES, 5000), list[Record]()
    for _ in range(count):
        source, tenant, roll = rng.choice(SOURCES), rng.choice(TENANTS), rng.random()
        times[source] += rng.choice([0, 1, 30, 100, 300])
        if roll < 0.1:
            decision = idle_decision(records, source, lag_ms)
            records += [] if decision is None else [decision]
            continue
        time = max(0, times[source] - delays[tenant] - rng.choice([0, 0, 1, 30, 300]))
        whose = None if roll > 0.95 else tenant
        records.append(record_of(source, 0, time, rng.choice("ab") if roll < 0.85 else None, whose))
    return records


@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize(
    ("gap_ms", "max_ms", "lag_ms", "one_in"),
    first_then_nightly(
        [
            (30, 400, 300, 1),
            (100, None, 1000, 3),
            (100, None, 1000, 1),
            (100, 100, 0, 1),
            (1, 5, 100_000, 1),
        ]
    ),
)
def test_what_the_rules_make_of_any_arrivals_breaks_no_promise(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gap_ms: int,
    max_ms: int | None,
    lag_ms: int,
    one_in: int,
) -> None:
    found: Counter[str] = Counter()
    lake = ModelLake(
        settings_of(tmp_path, gap_ms, max_ms, lag_ms),
        {p: case_of_records(arrivals_of(p, lag_ms or 1000)) for p in range(16)},
    )
    if one_in > 1:
        monkeypatch.setattr(audit_evidence, "SAMPLED_RECORDS", 300)
    monkeypatch.setattr(problems, "SHOWN", 1_000)
    lake.decide()
    for share in (0.3, 0.7, 0.8, 1.0):
        lake.arrive(share)
        lake.merge()
        found.update(row["status"] for row in lake.rows)
        found_wrong = problems_in(lake, full=one_in == 1)
        # No policy has decided what these arrivals have as its decisions.
        assert [each for each in found_wrong if not each.startswith("idle_heartbeats")] == []
    found["late"] = len(lake.late)
    assert min(found[each] for each in ("open", "timed_out", "late")) > 50, found
    assert (found["waiting"] > 50) == (lag_ms > 0)


@pytest.mark.fault("rules")
@pytest.mark.nightly
def test_what_silver_makes_of_tenants_breaks_no_promise_through_changes_of_the_rules(
    tmp_path: Path,
) -> None:
    rules = [(100, None, 300), (30, 90, 1000), (150, 400, 50), (80, None, 500)]
    settings, cases = settings_of(tmp_path, *rules[0], **IDS), cases_with_ids(tenant_cases(16))
    lake = CaseLake(open_engine(settings), settings, cases)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    found: Counter[str] = Counter()
    for number, of_epoch in enumerate(rules):
        if number:
            lake.settings = settings_of(tmp_path, *of_epoch, **IDS)
            begin_epoch(lake.reader, lake.engine.append, lake.settings, lake.plans[-1].batch + 1)
        for share in (0.25 * number + 0.15, 0.25 * number + 0.25):
            lake.arrive(share)
            lake.merge()
            assert problems_in(lake) == []
        found.update(lake.reader.select(tables.SILVER, ["status"])["status"].to_pylist())
    found["late"] = len(lake.late())
    assert min(found[each] for each in ("open", "timed_out", "waiting", "late")) > 10, found


def undecided(records: list[Record]) -> Case:
    return case_of_records(record for record in records if record.tenant_times is None)


@pytest.mark.fault("jumps")
@pytest.mark.parametrize("by", first_then_nightly([-6, 3]))
def test_resets_break_no_promise(tmp_path: Path, by: int) -> None:
    """What waits is closed with what is open; what comes again leaves its merge record."""
    lake = ModelLake(settings_of(tmp_path), {p: undecided(arrivals_of(p)) for p in range(12)})
    for share in (0.4, 0.8):
        lake.arrive(share)
        lake.merge()
        assert any(row["status"] == "waiting" for row in lake.rows)
        lake.arrive(share + 0.1)  # records are passed over that bronze has
        lake.jump(by)
        assert problems_in(lake) == []
        assert problems_in(lake, generation=lake.number - 1) == []
    lake.arrive()
    lake.merge()
    assert {row["status"] for row in lake.rows} == {"open", "waiting", "timed_out"}
    assert sum(row["invalid_reason"] == "reset" and row["due"] is None for row in lake.rows) > 50
    assert problems_in(lake) == []


# -- damage

BROKEN = 14
"""So many partitions have the same records; what is broken in one of them does not disturb the
others."""

KNOWN = [
    ("tracking", 5000, "A", "x"),
    ("orders", 4400, "B", "y"),
    ("orders", 5010, "A", "x"),
    ("tracking", 4420, "B", "y"),
    ("tracking", 5300, None, "x"),
    ("orders", 4600, None, "y"),
    ("orders", 5300, None, "x"),
    ("tracking", 4525, "C", "y"),
    ("tracking", 4250, "D", "z"),
    ("tracking", 4300, "E", "y"),
]
"""The clock is 5300, that of x too, of y 4420, of z 4300. A has timed out (due 5100), B and D are
open, C waits, E is late."""


def known_case() -> Case:
    return case_of_records(
        record_of(source, 0, time, key, tenant) for source, time, key, tenant in KNOWN
    )


def test_the_known_case_is_what_it_says(tmp_path: Path) -> None:
    lake = ModelLake(settings_of(tmp_path), {0: known_case()})
    lake.arrive()
    lake.merge()
    names = (
        "tenant",
        "merge_key",
        "status",
        "event_time",
        "last_event_time",
        "due",
        "closed_at",
        "position",
    )
    assert sorted(tuple(row[name] for name in names) for row in lake.rows) == [
        ("x", "A", "timed_out", 5000, 5010, 5100, 5101, None),
        ("y", "B", "open", 4400, 4420, 4500, None, None),
        ("y", "C", "waiting", 4525, 4525, None, None, 4525),
        ("z", "D", "open", 4250, 4250, 4350, None, None),
    ]
    assert [(row["tenant"], row["merge_key"], row["position"]) for row in lake.late] == [
        ("y", "E", 4525)
    ]
    assert problems_in(lake) == []


Damage = tuple[str, str | None, Change, list[tuple[str, str]]]
"""The table, the key of the row that is changed, the change; and for each problem where it is and
words of it."""

TRACE = "silver: the record"

DAMAGES: list[Damage] = [
    (
        "silver",
        "C",
        gone,
        [
            ("bronze_tracking: tracking[0]@3", f"{TRACE} is missing"),
            ("C", "merge model waiting from 4525"),
        ],
    ),
    (
        "silver",
        "C",
        twice,
        [
            ("bronze_tracking: tracking[1]@3", f"{TRACE} appears 2 times"),
            ("C", "and the merge model nothing"),
        ],
    ),
    (
        "silver",
        "C",
        altered(position=4420),
        [
            ("C", "waiting although its tenant's clock is 4420, and it has the position 4420"),
            ("C", "waiting from 4525 to 4525"),
        ],
    ),
    (
        "silver",
        "C",
        altered(position=5301),
        [
            ("C", "waiting although its tenant's clock is 4420, and it has the position 5301"),
            ("C", "waiting from 4525 to 4525"),
        ],
    ),
    (
        "silver",
        "C",
        altered(status="open", due=4625, position=None),
        [("C", "the tables have open from 4525 to 4525, due 4625")],
    ),
    (
        "silver",
        "B",
        altered(status="timed_out", closed_at=5301, valid=True),
        [
            ("B", "its time is 5301, and it could be joined until 4500"),
            ("B", "and the merge model open from 4400 to 4420, due 4500"),
        ],
    ),
    (
        "silver",
        "A",
        altered(status="open", closed_at=None, valid=None),
        [
            ("A", "open although its tenant's clock is 5300, and it can be joined until 5100"),
            ("A", "and the merge model timed_out from 5000 to 5010, due 5100, closed at 5101"),
        ],
    ),
    ("silver", "A", altered(closed_at=5102), [("A", "closed at 5102 of")]),
    (
        "silver",
        "A",
        altered(due=5110),
        [("A", "due 5110, closed at 5101 of"), ("A", "and it could be joined until 5110")],
    ),
    (
        "silver",
        "D",
        altered(tenant="x"),
        [
            (
                "tenant 'x', key 'D'",
                "open although its tenant's clock is 5300, and it can be joined until 4350",
            ),
            ("tenant 'x', key 'D'", "and the merge model nothing"),
            ("tenant 'z', key 'D'", "the tables have nothing"),
        ],
    ),
    (
        "silver",
        "B",
        twice,
        [
            ("bronze_orders: orders[10]@0", f"{TRACE} appears 2 times"),
            ("bronze_tracking: tracking[10]@1", f"{TRACE} appears 2 times"),
            ("B", "2 open rows for one key"),
            ("B", "2 rows with the same partition, key and event time"),
            ("B", "and the merge model nothing"),
        ],
    ),
    ("late", "E", altered(position=5300), [("E", "late from 4300 to 5300")]),
    (
        "late",
        "E",
        altered(tenant="x"),
        [
            ("tenant 'x', key 'E'", "and the merge model nothing"),
            ("tenant 'y', key 'E'", "the tables have nothing"),
        ],
    ),
    (
        "bronze_orders",
        None,
        altered(tenant=lambda row: "z" if row["event_time"] == 4600 else row["tenant"]),
        [("B", "and the merge model open from 4400 to 4400, due 4500 of orders@0")],
    ),
]


@pytest.mark.fault("damage")
def test_each_promise_that_is_broken_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 100)
    lake = ModelLake(settings_of(tmp_path), {p: known_case() for p in range(BROKEN)})
    lake.arrive()
    lake.merge()
    for p, (table, key, change, _) in enumerate(DAMAGES):

        def broken(
            row: Row, p: int = p, key: str | None = key, change: Change = change
        ) -> Row | list[Row] | None:
            return change(row) if row["partition"] == p and key in (None, row["merge_key"]) else row

        rewrite(lake.settings, table, broken)
    found = defaultdict(list)
    for problem in problems_in(lake):
        found[int(re.findall(r"(?:partition |\[)(\d+)", problem)[0])].append(problem)
    for p, (_, key, _, told) in enumerate(DAMAGES):
        assert len(found[p]) == len(told), (p, key, found[p])
        for where, words in told:
            assert any(where in problem and words in problem for problem in found[p]), (
                p,
                where,
                words,
                found[p],
            )


def test_a_decision_that_told_a_tenant_another_time_is_found(tmp_path: Path) -> None:
    """Without it, y would be 1000 behind where it is silent."""
    decision = record_of("orders", -1, 5300, None, None, {"x": 5300, "y": 5000})
    arrivals = [
        record_of("tracking", 0, 5000, "k", "y"),
        record_of("tracking", 1, 5300, "k", "x"),
        decision,
    ]
    lake = ModelLake(settings_of(tmp_path), {0: case_of_records(arrivals)})
    lake.decide()
    lake.arrive()
    lake.merge()
    assert problems_in(lake) == []
    rewrite(
        lake.settings, tables.IDLE_HEARTBEATS, lambda row: None if row["tenant"] == "y" else row
    )
    [problem] = problems_in(lake)
    assert problem.startswith(
        "silver: partition 0, tenant 'y', key 'k', event_time 5000: the tables have open from 5000"
    )
    assert "and the merge model waiting from 5000 to 5000, position 5000" in problem


# -- the sink


def finished_case() -> Case:
    """The known case to its end, with three more merge records that are all closed at 5521."""
    more = [
        ("tracking", 5420, "a/b", "x"),
        ("tracking", 5420, "A", "y"),
        ("tracking", 5420, "a/b", "y"),
    ]
    ends = [(source, 9000, None, None) for source in SOURCES]
    return case_of_records(
        record_of(source, 0, time, key, tenant)
        for source, time, key, tenant in [*KNOWN, *more, *ends]
    )


PUBLISHED = [
    "0/5000/x/A",
    "0/4400/y/B",
    "0/4250/z/D",
    "0/4525/y/C",
    "0/5420/x/a/b",
    "0/5420/y/A",
    "0/5420/y/a/b",
]

Sent = tuple[int, bytes, bytes, int, dict[str, bytes]]
"""Partition, key, value, timestamp and headers."""


def with_headers(message: Sent, **headers: bytes | None) -> Sent:
    found = message[4] | {f"watersmeet.{name}": value for name, value in headers.items()}
    return *message[:4], {name: value for name, value in found.items() if value is not None}


def exchanged(sent: list[Sent], i: int) -> list[Sent]:
    """With two neighbours in each other's place, and the numbers where they were."""
    one, other = sent[i : i + 2]
    seqs = [message[4]["watersmeet.seq"] for message in (one, other)]
    return [
        *sent[:i],
        with_headers(other, seq=seqs[0]),
        with_headers(one, seq=seqs[1]),
        *sent[i + 2 :],
    ]


BROKEN_SINKS: list[tuple[Callable[[list[Sent]], list[Sent]], list[tuple[str, str]]]] = [
    (lambda sent: sent, []),
    (
        lambda sent: exchanged(sent, 4),
        [("seq 5, '1/5420/x/a/b'", "1/5420/x/a/b is not in the order of publication")],
    ),
    (
        lambda sent: exchanged(sent, 5),
        [("seq 6, '2/5420/y/A'", "2/5420/y/A is not in the order of publication")],
    ),
    (
        lambda sent: [*sent[:-1], with_headers(sent[-1], tenant=b"x")],
        [("broken_tenants[3]@6", "not a message of Watersmeet")],
    ),
    (
        lambda sent: [*sent[:-1], with_headers(sent[-1], due=b"5521")],
        [
            (
                "broken_tenants[4]@6: seq 6, '4/5420/y/a/b'",
                "has this message: closed_at 5521, tenant 'y', due 5521, merge_key 'a/b'",
            ),
            ("broken_tenants[4]: '4/5420/y/a/b'", "missing in the sink"),
        ],
    ),
    (
        lambda sent: [
            *sent[:-1],
            (*sent[-1][:2], sent[-1][2].replace(b'"tenant":"y"', b'"tenant":"x"'), *sent[-1][3:]),
        ],
        [("seq 6, '5/5420/y/a/b'", "value differs from the row of silver")],
    ),
    (
        lambda sent: [*sent[:5], *map(renumbered, sent[6:])],
        [("broken_tenants[6]: '6/5420/y/A'", "missing in the sink")],
    ),
]


def renumbered(message: Sent) -> Sent:
    return with_headers(message, seq=b"%d" % (int(message[4]["watersmeet.seq"]) - 1))


@pytest.mark.fault("damage")
def test_each_promise_that_is_broken_in_the_sink_is_found(kafka: str, tmp_path: Path) -> None:
    """Messages that are closed at one clock are in order of their tenants, then of their keys."""
    partitions = len(BROKEN_SINKS)
    settings = with_topics(kafka, tmp_path, "of_tenants", partitions, **OVERRIDES)
    lake = ModelLake(settings, {p: finished_case() for p in range(partitions)})
    lake.arrive()
    lake.merge()
    assert problems_in(lake) == []
    lake.publish(name_of_sink(settings))
    assert [m.id for m in lake.out[0]] == PUBLISHED
    create_topics(kafka, "broken_tenants", partitions=partitions)
    producer = CheckedProducer(kafka)
    sent = [
        (m.partition(), m.key(), m.value(), m.timestamp()[1], dict(m.headers()))
        for m in consume(kafka, "of_tenants", partitions)
    ]
    for p, (broken, _) in enumerate(BROKEN_SINKS):
        for _, key, value, timestamp, headers in broken(
            [message for message in sent if message[0] == p]
        ):
            producer.produce(
                "broken_tenants", value, key, p, timestamp=timestamp, headers=list(headers.items())
            )
    assert producer.flush(30) == 0
    there = settings_with_topics(kafka, tmp_path, "of_tenants", "broken_tenants", **OVERRIDES)
    evidence = read_evidence(lake.reader, there, partitions)
    sink = read_topics(lake.reader, there, partitions, [there.publish.topic])
    report = Report()
    check_tables(evidence, report, sink)
    every = [f"{problem.where}: {problem.what}" for problem in report["sink"].described()]
    assert len(every) == sum(len(told) for _, told in BROKEN_SINKS), every
    for where, words in (problem for _, told in BROKEN_SINKS for problem in told):
        assert any(where in problem and words in problem for problem in every), (where, words)


# -- from the sink alone


def taken_up(folder: Path) -> ModelLake:
    """A lake that goes on with nothing but the sink, in each partition from another message on."""
    cases = {p: undecided(arrivals_of(p)) for p in range(12)}
    settings = settings_of(folder)
    lost: dict[int, list[MergeRecord]] = {}
    since: dict[int, int] = {}
    begin: dict[TopicPartition, int] = {}
    for p, case in cases.items():
        model, heads = PartitionMerge(rules_of(SOURCES, 100, None, 1000)), dict[str, list[int]]()
        for source, values in case.values.items():
            records = [as_record(source, offset, value) for offset, value in enumerate(values)]
            model.arrive(*(record for record in records if record is not None))
            heads[source] = list(
                accumulate((record.event_time for record in records if record is not None), max)
            )
        model.advance()
        order = model.published_order()
        last = order[len(order) // 2].closed_at
        since[p] = last - 1 - 1000 - 100
        lost[p] = [row for row in order[: len(order) // 2 + 1] if row.closed_at > since[p]]
        begin |= {
            tp_of(source, p): bisect_left(positions, since[p])
            for source, positions in heads.items()
        }
    lake = ModelLake(settings, cases)
    lake.take_up(lost, since, begin)
    for share in (0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    return lake


@pytest.mark.fault("lost")
@pytest.mark.parametrize("one_in", [1, 3])
def test_a_lake_that_was_taken_up_from_its_sink_breaks_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_in: int
) -> None:
    if one_in > 1:
        monkeypatch.setattr(audit_evidence, "SAMPLED_RECORDS", 300)
    assert problems_in(taken_up(tmp_path), full=one_in == 1) == []


def test_what_was_passed_over_wrongly_is_found(tmp_path: Path) -> None:
    lake = taken_up(tmp_path)

    def later(row: Row) -> Row:
        is_since = row["status"] == "out" and row["position"] is not None
        return row | {"position": row["position"] + 300} if is_since else row

    rewrite(lake.settings, tables.PASSED, later)
    found = problems_in(lake)
    assert any(
        "the tables have" in problem and "and the merge model passed" in problem
        for problem in found
    )
    rewrite(
        lake.settings,
        tables.PASSED,
        lambda row: row if row["status"] == "passed" or row["position"] is None else None,
    )
    assert any("the tables have passed" in problem for problem in problems_in(lake))


# -- epochs


@pytest.mark.fault("rules", oracle=True)
@draws(100)
@given(life=lives())
def test_through_every_epoch_the_model_is_asked_for_what_it_said_then(life: Life) -> None:
    """From records and from where each epoch ended alone: what was merged, and what the clocks of
    tenants were."""
    life = [(rules, records) for rules, records in life if rules.gap_ms]
    if not life:
        return
    model, ends, said = PartitionMerge(life[0][0]), [], []
    offsets, logs = (
        dict.fromkeys(SOURCES, 0),
        {input_of(source): list[tuple[int, Record]]() for source in SOURCES},
    )
    for number, (rules, records) in enumerate(life):
        model.begin_epoch(rules.gap_ms, rules.max_ms, rules.lag_ms)
        for record in records:
            offset, offsets[record.input.source] = (
                offsets[record.input.source],
                offsets[record.input.source] + (record.tenant_times is None),
            )
            numbered = record._replace(offset=offset - (record.tenant_times is not None))
            model.arrive(numbered)
            logs[record.input].append((model.heads[record.input], numbered))
        model.advance()
        waits = {source: min(r.offset for _, r in rows) for source, rows in model.unread().items()}
        until = {tp_of(s, 0): waits.get(input_of(s), offsets[s]) for s in SOURCES}
        heads = {tp_of(source, 0): head for source, head in model.heads.items()}
        ends.append(End(until, heads, {} if model.clock is None else {0: model.clock}))
        if model.clock is not None:
            said.append((number, {tenant: model.tenant_clock(tenant) for tenant in TENANTS}))
    epochs = [
        Epoch(i, i, settings_of(Path(), r.gap_ms, r.max_ms, r.lag_ms or 0))
        for i, (r, _) in enumerate(life)
    ]
    inputs = {input_of(source): dict[int, bytes]() for source in SOURCES}
    derived = Derivation(replace(life[0][0]), 0, Base(), COLUMNS, inputs, lambda *_: "")
    heard, found = [], list[Row]()
    for input_id, log in logs.items():
        derived.arrive(input_id, log)
    for epoch, end in zip(epochs, ends, strict=True):
        derived.merge(epoch, end)
        if end.clocks:
            clocks = {tenant: derived.model.tenant_clock(tenant) for tenant in TENANTS}
            heard.append((epoch.number, clocks))
        found += (dict(zip(COLUMNS, row, strict=True)) for row in derived.finished())
    found += (dict(zip(COLUMNS, row, strict=True)) for row in derived.unfinished())
    assert heard == said
    expected: list[tuple[object, ...]] = [
        ("late", r.tenant, r.offset, position)
        for r, position in ((each.record, each.position) for each in model.late)
    ]
    expected += [("waiting", r.tenant, r.offset, position) for position, r in model.waiting]
    expected += [("timed_out", r.tenant, r.event_time, r.closed_at) for r in model.timed_out]
    expected += [("open", r.tenant, r.event_time, None) for r in model.open.values()]
    assert sorted(map(_short, found), key=repr) == sorted(expected, key=repr)


COLUMNS = ("status", "tenant", "merge_key", "offset", "event_time", "position", "closed_at")


def _short(row: Row) -> tuple[object, ...]:
    if row["status"] in ("late", "waiting"):
        return row["status"], row["tenant"], row["offset"], row["position"]
    return row["status"], row["tenant"], row["event_time"], row["closed_at"]

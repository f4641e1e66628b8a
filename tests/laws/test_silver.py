"""Silver on real Delta tables is what the merge model says, however the input is cut; a batch is
one commit, and its notes."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache

import orjson
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.laws.conftest import (
    IN_FOLDERS_OF_BOTH,
    QUICK,
    MakeLake,
    in_folders,
    in_folders_of_both,
    one_of,
)
from tests.support.cases import (
    SOURCES,
    Case,
    cases_with_ids,
    expected_duplicates,
    expected_late,
    expected_quarantine,
    expected_silver,
    heartbeat,
    keyed,
    rich_cases,
)
from tests.support.configurations import IDS
from tests.support.inputs import tp_of
from tests.support.lakes import CaseLake, delta_table, folder_of
from watersmeet.core.message import message_bytes
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.progress import facts_of
from watersmeet.lake.table_reader import TableReader, Where

PARTITIONS = 60
MAX_BYTES = 455
SHARE = 20


@cache
def cases() -> dict[int, Case]:
    return cases_with_ids(rich_cases(PARTITIONS))


kind = one_of(IN_FOLDERS_OF_BOTH)


@pytest.fixture(scope="module")
def lake(new_lake: MakeLake, kind: str) -> CaseLake:
    """Cut by arrivals, by starts and, where a batch costs little, by its size; judged by an
    expression that is null for many, and by size.
    """
    lake = new_lake(
        cases(),
        merge__max_records_per_batch=(SHARE if kind == QUICK else 50 * SHARE)
        * PARTITIONS
        * len(SOURCES),
        silver={"change_data_feed": True},
        publish__valid="orders[1].offset >= 0",
        publish__max_bytes=MAX_BYTES,
        **IDS,
    )
    for share in (0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    return lake


def test_random_cases_cover_every_rule() -> None:
    models = [case.merged() for case in cases().values()]
    assert sum(len(model.timed_out) for model in models) > 100
    assert sum(len(model.open) for model in models) > 40
    assert sum(len(model.late) for model in models) > 20
    assert any(model.clock is None for model in models)
    assert sum(len(queue) for model in models for queue in model.unread().values()) > 50
    reopened = [m for m in models if len({r.key for r in m.timed_out}) < len(m.timed_out)]
    assert len(reopened) > 5


@pytest.mark.promise("R3")
@pytest.mark.fault("cuts", oracle=True)
def test_silver_equals_the_merge_model_however_the_input_is_cut(lake: CaseLake, kind: str) -> None:
    assert len(lake.plans) >= (4 if kind == QUICK else 2)
    assert lake.silver() == expected_silver(cases())


@pytest.mark.promise("R3")
@pytest.mark.fault("cuts", oracle=True)
def test_late_equals_the_merge_model(lake: CaseLake) -> None:
    assert lake.late() == expected_late(cases())


@pytest.mark.promise("R3")
@pytest.mark.fault("cuts", oracle=True)
def test_duplicates_equal_the_merge_model(lake: CaseLake) -> None:
    expected = expected_duplicates(cases())
    assert len(expected) > 100
    assert lake.duplicates() == expected


@pytest.mark.promise("R3")
@pytest.mark.fault("cuts", "hostile", oracle=True)
def test_quarantine_holds_every_refused_record_once(lake: CaseLake) -> None:
    assert lake.quarantined() == expected_quarantine(cases())


@pytest.mark.promise("R4")
@pytest.mark.fault("cuts")
def test_every_bronze_record_ends_in_exactly_one_outcome_or_waits(lake: CaseLake) -> None:
    until = {tp: done.until_offset for tp, done in lake.plans[-1].ranges.items()}
    ended = [
        (source, row[0], part[0])
        for row in lake.silver()
        for i, source in enumerate(SOURCES)
        for part in row[5 + i]  # type: ignore[attr-defined]
    ]
    noted = [*lake.late(), *lake.duplicates(), *lake.quarantined()]
    ended += [(str(row[1]), row[0], row[2]) for row in noted]
    still_open = lake.reader.select(
        tables.SILVER, ["partition", "record_ids"], [[("status", "=", "open")]]
    )
    ended += [
        (entry["source"], row["partition"], entry["offset"])
        for row in still_open.to_pylist()
        for entry in row["record_ids"] or ()
        if entry["of_offset"] is not None  # it repeats a part: a duplicate once that closes
    ]
    passed = []
    for source in SOURCES:
        bronze = lake.reader.select(
            tables.bronze(source), ["partition", "offset", "reason", "heartbeat"]
        ).to_pylist()
        ended += [(source, row["partition"], row["offset"]) for row in bronze if row["heartbeat"]]
        passed += [
            (source, row["partition"], row["offset"])
            for row in bronze
            if row["offset"] < until[tp_of(source, row["partition"])]
            or row["reason"]
            or row["heartbeat"]
        ]
    assert Counter(ended) == Counter(passed)


@in_folders
def test_a_skipped_tombstone_is_in_bronze_alone_and_moves_nothing(
    new_lake: MakeLake, kind: str
) -> None:
    cases = rich_cases(4, 8_800)
    # A tombstone before, among and after the others, and refused ones as they come.
    for case in cases.values():
        for source, mine in case.values.items():
            mine[:] = [None, *mine[:2], None, *mine[2:], None]
            case.arrivals += [source] * 3
    lake = new_lake(cases, sources__tracking__tombstone="skip")
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    assert lake.silver() == expected_silver(cases)
    assert lake.late() == expected_late(cases)
    refused = expected_quarantine(cases)
    assert lake.quarantined() == [row for row in refused if (row[1], row[3]) != ("tracking", None)]
    columns = ["partition", "offset", "merge_key", "event_time", "heartbeat", "reason", "detail"]
    skipped = lake.reader.select(
        tables.bronze("tracking"), columns, [[("value", "is null", None)]]
    ).to_pylist()
    places = [(row[0], row[2]) for row in refused if (row[1], row[3]) == ("tracking", None)]
    assert sorted((row["partition"], row["offset"]) for row in skipped) == places
    assert {tuple(row.values())[2:] for row in skipped} == {(None, None, False, None, None)}


def test_a_finished_record_is_valid_where_the_expression_is_true_and_the_message_small_enough(
    lake: CaseLake,
) -> None:
    columns = [
        "partition",
        "merge_key",
        "status",
        "event_time",
        "last_event_time",
        *SOURCES,
        "valid",
        "invalid_reason",
    ]
    seen: Counter[str | None] = Counter()
    for row in lake.reader.select(tables.MERGED, columns).to_pylist():
        if row["status"] == "open":
            assert (row["valid"], row["invalid_reason"]) == (None, None)
            continue
        values = [b",".join(part["value"].encode() for part in row[source]) for source in SOURCES]
        message = (
            b'{"key":%s,"event_time":%d,"last_event_time":%d,"tracking":[%s],"orders":[%s]}'
            % (
                orjson.dumps(row["merge_key"]),
                row["event_time"],
                row["last_event_time"],
                *values,
            )
        )
        size = message_bytes(len(message), len(row["merge_key"].encode()), 0)
        reason = "predicate" if not row["orders"] else "too_large" if size > MAX_BYTES else None
        assert (row["valid"], row["invalid_reason"]) == (reason is None, reason)
        seen[reason] += 1
    assert seen["predicate"] > 10 < seen[None]
    assert seen["too_large"] > 0


@pytest.mark.promise("N2")
@pytest.mark.fault("kill")
def test_a_batch_is_one_commit_and_all_that_it_has_made_is_in_it(
    lake: CaseLake, spark: SparkSession
) -> None:
    history = sorted(lake.reader.history(tables.SILVER))
    commits = [Commit.parse(version.metadata) for version in history[1:]]
    assert [commit.facts for commit in commits if commit] == [facts_of(p, 1) for p in lake.plans]
    operations = [
        row.operation
        for row in delta_table(spark, lake.engine.lake, tables.SILVER).history().collect()
    ]
    *of_batches, first = operations
    assert (len(of_batches), first) == (len(lake.plans), "CREATE TABLE")
    assert {*of_batches} <= {"MERGE", "WRITE"}
    for view in (tables.LATE, tables.PROGRESS):
        for plan, version in zip(lake.plans, history[1:], strict=True):
            batch_rows: Where = [[("batch", "=", plan.batch)]]
            counts = [
                row_count_at(lake.reader, view, batch_rows, number)
                for number in (version.number - 1, version.number, history[-1].number)
            ]
            assert counts == [0, counts[1], counts[1]], "written with the batch, and never again"
    assert lake.late()


def row_count_at(reader: TableReader, view: str, where: Where, version: int) -> int:
    found = reader.summary(view, [], {"rows": ("count", "*")}, where, version=version)
    return int(found["rows"][0].as_py())


def test_progress_says_of_every_batch_how_far_it_came(lake: CaseLake) -> None:
    columns = ["batch", "source", "partition", "from_offset", "until_offset", "position", "head"]
    columns += ["clock", "generation", "epoch"]
    rows = lake.reader.select(tables.PROGRESS, columns).to_pylist()
    told = {(row["batch"], tp_of(row["source"], row["partition"])): row for row in rows}
    assert len(told) == len(rows) == len(lake.plans) * PARTITIONS * len(SOURCES)
    for plan in lake.plans:
        for tp, done in plan.ranges.items():
            row = told[plan.batch, tp]
            assert list(row.values())[3:] == [
                *(done.from_offset, done.until_offset, done.position, done.head),
                *(plan.clocks.get(tp.partition), plan.generation, plan.epoch),
            ]


def test_a_drained_lake_gets_no_commit(lake: CaseLake) -> None:
    before = lake.reader.version(tables.SILVER)
    assert list(lake.start().drain()) == []
    assert lake.reader.version(tables.SILVER) == before


def test_the_change_data_feed_tells_each_change_with_its_batch(
    lake: CaseLake, spark: SparkSession
) -> None:
    columns = ["partition", "merge_key", "event_time", "status", "batch"]
    reader = (
        spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 0)
    )
    address = lake.engine.lake.address(tables.SILVER)
    feed = reader.table(address) if lake.engine.lake.is_catalog else reader.load(address)
    feed = feed.where("status in ('open', 'timed_out')")
    changes = feed.select("_change_type", *columns, "_commit_version").collect()
    time = columns.index("event_time")

    def plain(row: object) -> tuple[object, ...]:
        values = list(row)[1:6]  # type: ignore[call-overload]
        values[time] = round(values[time].timestamp() * 1000)
        return tuple(values)

    after = Counter(
        plain(row) for row in changes if row._change_type in ("insert", "update_postimage")
    )
    before = Counter(
        plain(row) for row in changes if row._change_type in ("delete", "update_preimage")
    )
    silver = lake.reader.select(tables.MERGED, columns).to_pylist()
    assert after - before == Counter(tuple(row.values()) for row in silver)
    assert {row._change_type for row in changes} == {
        "insert",
        "update_preimage",
        "update_postimage",
    }
    made = {
        v.number: json.loads(v.metadata)["batch"]
        for v in lake.reader.history(tables.SILVER)
        if v.metadata
    }
    assert all(
        row.batch == made[row._commit_version]
        for row in changes
        if row._change_type != "update_preimage"
    )


@in_folders_of_both
def test_why_a_predicate_fails_is_said_once_for_a_batch_where_it_is_decided(
    new_lake: MakeLake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Spark's tasks judge even so few records, and nobody reads what they log."""
    case = Case({source: [] for source in SOURCES}, 100)
    for n, key in enumerate("ab7"):
        case.values["tracking"].append(keyed(key, n))
        case.arrivals.append("tracking")
    for source in SOURCES:
        case.values[source].append(heartbeat(10_000))
        case.arrivals.append(source)
    lake = new_lake({0: case, 1: case}, publish__valid="merge_key::INT > 0")
    if isinstance(lake.engine, SparkEngine):
        monkeypatch.setattr(lake.engine, "here_bytes", -1)
    lake.arrive()
    assert lake.merge() == 1
    assert [record.getMessage() for record in caplog.records if record.name == "watersmeet"] == [
        "publish.valid fails for 4 of 6 merge records: Conversion Error: Could not convert string"
    ]


def test_a_batch_that_replaces_no_row_is_appended(new_lake: MakeLake) -> None:
    """One with new records alone, and one that only moves the clock, beside an open row."""
    case = Case(
        {
            "tracking": [keyed("a", 10), heartbeat(20), keyed("a", 30)],
            "orders": [heartbeat(10), heartbeat(20), heartbeat(30)],
        },
        100,
        ["tracking", "orders", "tracking", "orders", "tracking", "orders"],
    )
    lake = new_lake({0: case})
    operations = []
    for records in (2, 4, 6):
        lake.arrive(records / 6)
        lake.merge()
        [last] = DeltaTable(f"{folder_of(lake.settings)}/{tables.SILVER}").history(1)
        operations.append(last["operation"])
    assert operations == ["WRITE", "WRITE", "MERGE"]

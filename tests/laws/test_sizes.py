"""Batches fit into memory, whatever shape the data has, and nothing else depends on how they are
cut."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tests.laws.conftest import FOLDER_AT_NIGHT, QUICK, SPARK_FOLDER, MakeLake, one_of
from tests.support.cases import (
    SOURCES,
    Case,
    expected_late,
    expected_silver,
    heartbeat,
    keyed,
    rich_cases,
)
from tests.support.configurations import settings_for
from tests.support.effort import first_then_nightly
from tests.support.lakes import CaseLake, folder_of
from tests.support.memory import peak_mib_of
from tests.support.rewrites import rewrite_open_records, rewrites_of
from tests.support.rivers import FOLDER, WATERSMEET, River
from tests.support.tenants import TenantModels, late_of, merge_of, silver_of, tenant_cases
from tests.support.topics import consume, delete_topic, produce, published
from watersmeet.core.plan import BatchPlan
from watersmeet.engine import Input, Selection
from watersmeet.engine.choice import open_engine
from watersmeet.engine.embedded import ROW_GROUP_BYTES
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.table_reader import ROW_BYTES, Where
from watersmeet.running import publication_plan

kind = one_of([QUICK, FOLDER_AT_NIGHT])


def bytes_of(lake: CaseLake, plan: BatchPlan) -> tuple[int, int]:
    """How many bytes the values of a batch's records have in memory, and of how many records of one
    topic-partition."""
    sizes = []
    for tp, done in plan.ranges.items():
        values = lake.cases[tp.partition].values[tp.input.source][
            done.from_offset : done.until_offset
        ]
        sizes.append([len(value or b"") + ROW_BYTES for value in values])
    return sum(map(sum, sizes)), max(map(len, sizes))


@pytest.mark.promise("C24")
@pytest.mark.fault("memory", oracle=True)
@pytest.mark.long
def test_a_batch_fits_into_memory_and_the_result_is_the_models(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where open rows do not: then a batch reads those alone that it may change, or writes all
    anew, in pieces."""
    lake = new_lake(rich_cases(2, 1656, wealth="late"))
    limit = 700 if kind == QUICK else 6_000
    asked: list[Where] = []
    monkeypatch.setattr(lake.engine, "merge_bytes", limit)
    monkeypatch.setattr(lake.engine, "few_bytes", limit)
    monkeypatch.setattr(lake.engine, "from_tables", noting_silver(lake.engine.from_tables, asked))
    for share, held_batches in ((0.5, 0), (1.0, 2)):
        monkeypatch.setattr("watersmeet.silver.HELD_BATCHES", held_batches)
        lake.arrive(share)
        lake.merge()
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert len(lake.plans) > 2
    for plan in lake.plans:
        size, most = bytes_of(lake, plan)
        assert size <= limit or most == 1
    if kind == QUICK:
        assert any(
            "merge_key" in [column for column, *_ in term] for where in asked for term in where
        )
        assert 0 < rewrites_of(lake.settings) < len(lake.plans)


@pytest.mark.nightly
@pytest.mark.promise("C24")
@pytest.mark.fault("memory", oracle=True)
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_tenants_have_open_is_merged_in_pieces_and_the_result_is_the_models(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the records that wait, of which a key may have many."""
    rules = (100, 250, 300)
    cases = tenant_cases(6)
    lake, models = new_lake(cases, merge=merge_of(rules)), TenantModels(cases, rules)
    rewrite_open_records(monkeypatch)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
        models.arrive(share)
    assert silver_of(lake.reader) == models.silver()
    assert late_of(lake.reader) == models.late()
    assert rewrites_of(lake.settings) > 2


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK, SPARK_FOLDER], indirect=True, scope="module")
def test_a_batch_that_reads_the_rows_alone_that_it_may_change_changes_the_same(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the records that wait for their tenants, and those that time out in silence."""
    rules = (100, 250, 300)
    cases = tenant_cases(6)
    lake, models = new_lake(cases, merge=merge_of(rules)), TenantModels(cases, rules)
    monkeypatch.setattr(lake.engine, "few_bytes", 0)
    asked: list[Where] = []
    monkeypatch.setattr(lake.engine, "from_tables", noting_silver(lake.engine.from_tables, asked))
    for share in (0.2, 0.5, 0.7, 1.0) if kind == QUICK else (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
        models.arrive(share)
    assert silver_of(lake.reader) == models.silver()
    assert late_of(lake.reader) == models.late()
    assert any("merge_key" in [column for column, *_ in term] for where in asked for term in where)


def noting_silver(from_tables: Callable[..., Any], asked: list[Where]) -> Callable[..., Any]:
    """The operation, which notes the conditions for rows of silver."""

    def noting(function: Any, inputs: Sequence[Input], *more: Any, **named: Any) -> Any:
        asked.extend(
            rows.where
            for rows in inputs
            if isinstance(rows, Selection) and rows.table == tables.SILVER
        )
        return from_tables(function, inputs, *more, **named)

    return noting


@pytest.mark.promise("C24")
def test_a_merge_record_says_how_many_bytes_its_records_have(new_lake: MakeLake, kind: str) -> None:
    lake = new_lake(rich_cases(3, 1656, wealth="late"))
    for share in (0.3, 0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    rows = lake.reader.select(tables.MERGED, ["record_bytes", *SOURCES]).to_pylist()
    assert len(rows) > 20
    for row in rows:
        assert row["record_bytes"] == sum(
            len(part["value"].encode()) for source in SOURCES for part in row[source]
        )


WINDOW = {"window": {"gap": "20ms", "max": "100ms"}}
ORDERS: dict[str, dict[str, Any]] = {
    "timeout": {"timeout": "100ms"},
    "gap": WINDOW,
    "tenants": WINDOW | {"tenant": "g", "tenant_max_lag": "300ms"},
}


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.parametrize("merge", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("delivery", first_then_nightly(["exactly_once", "at_least_once"]))
def test_however_small_the_pieces_are_that_are_read_the_same_bytes_are_published(
    new_lake: MakeLake,
    kafka: str,
    kind: str,
    merge: dict[str, Any],
    delivery: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where all of it was closed at one time."""
    keys, tenants = ("a", "b", "é", "\uff61", "\U0001f600"), ("x", "\uff61", "\U0001f600")
    of_time = [
        [keyed(f"{tenant}/{key}", time, g=tenant) for key in keys for tenant in tenants]
        for time in (5, 6, 2000)
    ]
    values: list[bytes | None] = [*chain.from_iterable(of_time), heartbeat(9000)]
    case = Case(
        {"tracking": values, "orders": [heartbeat(9000)]},
        100,
        ["orders", *["tracking"] * len(values)],
    )
    sink = f"laws-pieces-{kind}-{delivery}-{list(ORDERS.values()).index(merge)}"
    usual = {"publish__topic": sink, "name": sink, "publish__delivery": delivery}
    lake = new_lake({0: case, 1: case}, bootstrap=kafka, merge=merge, **usual)
    lake.arrive()
    lake.merge()

    def drained() -> list[tuple[Any, ...]]:
        lake.publish()
        found = [
            (m.partition(), m.key(), m.value(), m.timestamp()[1], m.headers())
            for m in consume(kafka, sink, 2)
        ]
        delete_topic(kafka, sink)
        return found

    whole, read = drained(), []

    rows = lake.engine.reader.rows

    def noting(table: str, columns: Sequence[str], *more: Any) -> Any:
        found = rows(table, columns, *more)
        read.extend([found] if "tracking" in columns else [])
        return found

    monkeypatch.setattr(lake.engine.reader, "rows", noting)
    for limit in (1, 5 * ROW_BYTES):
        monkeypatch.setattr(publication_plan, "CHUNK_BYTES", limit)
        assert drained() == whole
    assert min(found.num_rows for found in read) == 1
    assert max(found.num_rows for found in read) <= 5
    assert len(whole) == 2 * 30


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_large_rows_that_are_written_anew_are_in_row_groups_that_fit_into_memory(
    new_lake: MakeLake, kind: str
) -> None:
    """However well they pack: compaction, a deletion and an update have no rows at hand whose size
    they could ask."""
    values: dict[str, list[bytes | None]] = {
        source: [*(keyed(f"k{n}", n, text="x" * 900_000) for n in range(50)), heartbeat(10_000)]
        for source in SOURCES
    }
    lake = new_lake({0: Case(values, 300, [source for source in SOURCES for _ in range(51)])})
    for step in range(1, 21):
        lake.arrive(step / 20)
        lake.merge()

    written = tables.bronze("tracking"), tables.SILVER

    def most_rows() -> int:
        """The most records in one row group of these tables."""
        uris = chain.from_iterable(
            DeltaTable(f"{folder_of(lake.settings)}/{table}").file_uris() for table in written
        )
        files = [pq.ParquetFile(unquote(uri)).metadata for uri in uris]
        return int(
            max(file.row_group(n).num_rows for file in files for n in range(file.num_row_groups))
        )

    for table in written:
        lake.engine.compact(table, FILE_BYTES)
    most = ROW_GROUP_BYTES // 900_000 + 1  # by the mean size, and heartbeats are small
    assert most_rows() <= most
    lake.engine.delete(tables.bronze("tracking"), [[("offset", "=", 0)]], Commit("deletes", 1, 1))
    assert most_rows() <= most


def produce_packed(river: River, values: Sequence[tuple[int, bytes | None]]) -> None:
    """Send the same values to each source, about 30 MB at a time, packed."""
    for source in SOURCES:
        for begin in range(0, len(values), 30):
            produce(river.kafka, river.topic(source), values[begin : begin + 30], codec="zstd")


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_run_with_few_large_records_takes_no_more_memory_than_one_with_many_small_ones(
    kafka: str, tmp_path: Path, kind: str
) -> None:
    """Six hundred megabytes that Kafka and the tables pack into seven."""
    river = River.make(kafka, tmp_path, "few-large", partitions=2, merge__timeout="1h")
    produce_packed(
        river,
        [
            (n % 2, keyed(f"k{n}", n, text="the same sentence again " * 12_500))
            for n in range(1_000)
        ],
    )
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*WATERSMEET, "run", "--once", "-c", str(river.file)], stdout=out, stderr=out
        )
        peak_mib = peak_mib_of(process)
    assert process.returncode == 0, (tmp_path / "out").read_text()
    assert peak_mib < 1.5 * 1024, f"{peak_mib:.0f} MiB"


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.nightly
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_heap_of_a_gibibyte_holds_records_that_pack_well_and_all_that_one_clock_closes(
    kafka: str, tmp_path: Path, kind: str
) -> None:
    """Five hundred megabytes with Spark, whose Python workers have a bound, too."""
    river = River.make(
        kafka, tmp_path, "packed-spark", lake=FOLDER, partitions=2, merge__timeout="1h"
    )
    river.config["spark"] = {**river.config.get("spark", {}), "spark.driver.memory": "1g"}
    river.write()
    records = [(n % 2, keyed(f"k{n}", n, text="x" * 900_000)) for n in range(300)]
    for arriving in (records, [(p, heartbeat(10_000_000)) for p in range(2)]):
        produce_packed(river, arriving)
        run = river.run("--once")
        command = run.process.pid
        peak_mib = peak_mib_of(
            run.process,
            lambda each: each.pid != command and "java" not in each.name(),  # noqa: B023
        )
        assert run.wait() == 0, run.said()
        assert 0 < peak_mib < 1.2 * 1024, f"{peak_mib:.0f} MiB in a Python worker"
    assert len(published(kafka, river.sink, 2)) == 300


@pytest.mark.promise("K13")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_message_that_is_too_large_by_its_key_is_not_valid_and_stops_nothing(
    kafka: str, tmp_path: Path, kind: str
) -> None:
    """Key and id are as long as the value, which alone would fit."""
    long, fits = "k" * 500_000, "f" * 200_000
    values: list[bytes | None] = [
        keyed(long, 5),
        keyed(fits, 6),
        keyed("small", 7),
        heartbeat(10**6),
    ]
    case = Case(
        {"tracking": values, "orders": [heartbeat(10**6)]}, 100, ["tracking"] * 4 + ["orders"]
    )
    settings = settings_for(
        tmp_path,
        bootstrap=kafka,
        publish__topic="long-keys",
        name="long-keys",
        publish__max_bytes=2**20,
    )
    lake = CaseLake(open_engine(settings), settings, {0: case})
    lake.arrive()
    lake.merge()
    assert lake.publish()
    assert [m.key.decode() for m in lake.messages()] == [fits, "small"]
    rows = lake.reader.select(tables.SILVER, ["merge_key", "valid", "invalid_reason"]).to_pylist()
    assert [row["merge_key"] for row in rows if row["invalid_reason"] == "too_large"] == [long]
    largest = max(message_size(m) for m in consume(kafka, "long-keys", 1))
    assert largest <= 2**20


def message_size(message: Any) -> int:
    """How many bytes a message has, but for the headers from which a lost lake is taken up."""
    headers = [
        (name, content) for name, content in message.headers() if name != "watersmeet.min_offsets"
    ]
    return sum(
        map(len, (message.key(), message.value(), *(each for pair in headers for each in pair)))
    )

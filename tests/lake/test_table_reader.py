"""The laws of questions, wherever the lake is and whatever answers."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, QueryBuilder, write_deltalake
from pyspark.sql import SparkSession

from tests.lake.conftest import (
    DELTA_RS,
    KINDS,
    SPARK_CATALOG,
    SPARK_FOLDER,
    Store,
    settings_for,
    store_of,
)
from tests.support.lakes import OpenSpark
from watersmeet.core.silver import OUTCOMES
from watersmeet.core.types import TIME
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader, may_meet
from watersmeet.lake.by_spark import SparkReader
from watersmeet.lake.location import Lake
from watersmeet.lake.store import reader
from watersmeet.lake.table_reader import (
    MAX_TERMS,
    Condition,
    NoTableError,
    TableReader,
    VersionGoneError,
    Where,
    row_count,
    within,
)

pytestmark = [pytest.mark.promise("A5"), pytest.mark.fault("engines")]


ODD = ["it's", '"', "\\", "'; DROP TABLE t; --", "{x}", "`", "é€𝄞", "", "a\nb", "%", "\x00", "null"]
BYTES = [b"", b"\x00'\xff", b"key"]


ROW = ("s", "t", 0, 1, 0, None)


def bronze_row(
    partition: int,
    offset: int,
    time: int | None = 0,
    *,
    key: bytes | None = None,
    merge_key: str | None = None,
) -> Any:
    reason = None if time is not None else "no_event_time"
    return (
        "tracking",
        partition,
        offset,
        5,
        0,
        key,
        b"{}",
        [("h", b"v")],
        merge_key,
        time,
        False,
        reason,
        None,
        None if reason else "",
        None,
        4,
    )


@pytest.fixture(scope="module", params=[DELTA_RS, SPARK_CATALOG])
def bronze(
    request: pytest.FixtureRequest, open_spark: OpenSpark, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """Two partitions, in four files, and a record without a time in a third one; nobody adds to
    them."""
    for store in store_of(request.param, open_spark, tmp_path_factory.mktemp("bronze")):
        store.create("bronze_tracking")
        for partition in (0, 1):
            for first in (0, 10):
                rows = [
                    bronze_row(partition, first + n, 1000 * (first + n), merge_key=f"k{n}")
                    for n in range(10)
                ]
                store.add("bronze_tracking", *rows)
        store.add("bronze_tracking", bronze_row(2, 0, None))
        yield store


def offsets(store: Store, where: Where) -> list[tuple[int, int]]:
    found = store.reader.select("bronze_tracking", ["partition", "offset"], where)
    return sorted(zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True))


def test_a_selection_has_exactly_the_rows_that_meet_the_conditions(bronze: Store) -> None:
    every = [(p, o) for p in (0, 1) for o in range(20)]
    offsets_of_k0 = [(0, 0), (0, 10), (1, 0), (1, 10)]
    cases: list[tuple[Where, list[tuple[int, int]]]] = [
        ((), [*every, (2, 0)]),
        ([[("offset", "<", 3), ("partition", "=", 1)]], [(1, 0), (1, 1), (1, 2)]),
        (
            [
                [("offset", "=", 3), ("partition", "=", 1)],
                [("partition", "=", 0), ("offset", ">=", 19)],
            ],
            [(0, 19), (1, 3)],
        ),
        ([[("event_time", ">=", 18_000)]], [(0, 18), (0, 19), (1, 18), (1, 19)]),
        ([[("event_time", "in", [0, 7_000]), ("partition", "=", 0)]], [(0, 0), (0, 7)]),
        ([[("event_time", "is null", None)]], [(2, 0)]),
        ([[("event_time", "is not null", None), ("offset", ">", 18)]], [(0, 19), (1, 19)]),
        ([[("partition", "in", [])]], []),
        ([[("partition", "not in", []), ("offset", ">", 18)]], [(0, 19), (1, 19)]),
        (
            [[("offset", "not in", [0, 2, 7]), ("offset", "<", 4), ("partition", "=", 1)]],
            [(1, 1), (1, 3)],
        ),
        ([[("merge_key", "not in", ["k0"]), ("partition", "=", 2)]], []),
        ([[("event_time", "!=", 0), ("offset", "<=", 1)]], [(0, 1), (1, 1)]),
        ([[("reason", "!=", "x")]], [(2, 0)]),
        ([[("heartbeat", "=", False), ("offset", "=", 4), ("partition", "=", 0)]], [(0, 4)]),
        ([[("merge_key", "in", ["k0"]), ("offset", "<", 10)]], [(0, 0), (1, 0)]),
        (
            [
                [("merge_key", "in", ["k0", "k1"]), ("partition", "=", 0), ("offset", "<", 1)],
                [("partition", "=", 0), ("offset", ">", 10), ("merge_key", "in", ["k0", "k1"])],
            ],
            [(0, 0), (0, 11)],
        ),
        ([[("merge_key", "in", ["k0"])], [("merge_key", "in", ["k0"])]], offsets_of_k0),
        ([[("merge_key", "in", ["k0"])], [("partition", "=", 2)]], [*offsets_of_k0, (2, 0)]),
        ([[("merge_key", "ends with", "0")]], offsets_of_k0),
        ([[("merge_key", "begins with", "k0")]], offsets_of_k0),
        ([[("merge_key", "begins with", "0")], [("merge_key", "ends with", "k")]], []),
    ]
    for where, expected in cases:
        assert offsets(bronze, where) == expected, where


def test_any_text_and_any_bytes_can_be_asked_for(either_store: Store) -> None:
    either_store.create("bronze_tracking")
    rows = [bronze_row(0, n, merge_key=text) for n, text in enumerate(ODD)]
    either_store.add(
        "bronze_tracking", *rows, *[bronze_row(1, n, key=key) for n, key in enumerate(BYTES)]
    )
    for first in (0, 1):
        every_other = range(first, len(ODD), 2)
        assert offsets(either_store, [[("merge_key", "=", ODD[n])] for n in every_other]) == [
            (0, n) for n in every_other
        ]
        assert offsets(either_store, [[("key", "=", key)] for key in BYTES[first:]]) == [
            (1, n) for n in range(first, len(BYTES))
        ]
    for text in ODD:
        ends = [(0, n) for n, other in enumerate(ODD) if other.endswith(text)]
        assert offsets(either_store, [[("merge_key", "ends with", text)]]) == ends
    assert offsets(either_store, [[("merge_key", "in", ODD[1:])]]) == [
        (0, n) for n in range(1, len(ODD))
    ]
    assert offsets(either_store, [[("key", "in", BYTES[1:])]]) == [(1, 1), (1, 2)]


def test_columns_come_as_asked_with_times_in_ms_and_plain_types(either_store: Store) -> None:
    either_store.create("bronze_tracking")
    times = [0, 1, 253_402_300_799_999, None]
    either_store.add(
        "bronze_tracking",
        *[bronze_row(0, n, time, key=b"\x00", merge_key="é") for n, time in enumerate(times)],
    )
    columns = ["event_time", "headers", "merge_key", "key", "heartbeat", "timestamp_type", "offset"]
    found = either_store.reader.select("bronze_tracking", columns).sort_by("offset")
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    kinds = [pa.int64(), headers, pa.string(), pa.binary(), pa.bool_(), pa.int32(), pa.int64()]
    assert (found.column_names, found.schema.types) == (columns, kinds)
    assert found["event_time"].to_pylist() == times
    assert found["headers"][0].as_py() == [{"key": "h", "value": b"v"}]
    rows = either_store.reader.rows("bronze_tracking", columns).sort_by("offset")
    assert (rows.column_names, rows.schema.types) == (columns, [TIME, *kinds[1:]])
    assert rows["event_time"].cast(pa.int64()).to_pylist() == [
        None if time is None else 1000 * time for time in times
    ]
    stored = either_store.reader.columns("bronze_tracking")
    assert stored.names == either_store.lake.layout["bronze_tracking"].schema.names
    assert stored.types == either_store.lake.layout["bronze_tracking"].schema.types
    assert either_store.reader.select(
        "bronze_tracking", ["event_time"], [[("offset", "<", 0)]]
    ).schema.types == [pa.int64()]


def test_a_summary_has_a_row_for_each_group(bronze: Store) -> None:
    values = {
        "n": ("count", "*"),
        "first": ("min", "event_time"),
        "last": ("max", "offset"),
        "all": ("sum", "offset"),
    }
    found = bronze.reader.summary(
        "bronze_tracking", ["partition"], values, [[("offset", ">=", 5)]]
    ).sort_by("partition")
    assert found.to_pylist() == [
        {"partition": p, "n": 15, "first": 5000, "last": 19, "all": sum(range(5, 20))}
        for p in (0, 1)
    ]
    timed = bronze.reader.summary(
        "bronze_tracking", [], {"rows": ("count", "*"), "timed": ("count", "event_time")}
    )
    assert timed.to_pylist() == [{"rows": 41, "timed": 40}]
    keys = bronze.reader.summary("bronze_tracking", ["merge_key"], {})
    assert sorted(map(str, keys["merge_key"].to_pylist())) == sorted(
        [*[f"k{n}" for n in range(10)], "None"]
    )
    none = bronze.reader.summary("bronze_tracking", [], values, [[("offset", "<", 0)]])
    assert none.to_pylist() == [{"n": 0, "first": None, "last": None, "all": None}]
    assert (
        bronze.reader.summary(
            "bronze_tracking", ["partition"], values, [[("offset", "<", 0)]]
        ).num_rows
        == 0
    )


def test_a_question_about_what_is_not_there_is_refused(either_store: Store) -> None:
    either_store.create("bronze_tracking")
    asked = either_store.reader
    wrong: list[tuple[Sequence[str], Where]] = [
        (["nope"], ()),
        (["offset"], [[("nope", "=", 1)]]),
        (["offset"], [[("offset", "~", 1)]]),
        (["offset"], [[("offset", "=", None)]]),
        (["offset"], [[("offset", "in", [1, None])]]),
        (["offset"], [[("offset", "not in", [None])]]),
        (["offset; DROP"], ()),
    ]
    for columns, where in wrong:
        with pytest.raises(ValueError, match=r"no column|no condition"):
            asked.select("bronze_tracking", columns, where)
    with pytest.raises(ValueError, match="no aggregate"):
        asked.summary("bronze_tracking", [], {"x": ("avg", "offset")})
    assert asked.exists("bronze_tracking")
    assert not asked.exists("erased")
    with pytest.raises(NoTableError, match="has no table erased"):
        asked.select("erased", ["offset"])
    with pytest.raises(NoTableError):
        asked.summary("erased", [], {"n": ("count", "*")})
    for ask in (
        asked.version,
        asked.history,
        asked.columns,
        asked.properties,
        asked.file_count,
        asked.row_bytes,
    ):
        with pytest.raises(NoTableError):
            ask("erased")
    assert not (either_store.folder / "erased").exists(), "asking creates nothing"


def silver_row(key: str, status: str, time: int, batch: int = 0) -> Any:
    closed_at = time + 101 if status == "timed_out" else None
    closing = (time + 100, closed_at, "", None)
    parts = [(time, time * 1000, "{}")]
    return (
        0,
        key,
        status,
        time,
        time,
        parts,
        [],
        None,
        None,
        batch,
        0,
        *closing,
        2,
        1,
        *[None] * len(OUTCOMES),
    )


@pytest.fixture(scope="module")
def past(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A catalog's lake: silver after a MERGE that left deletion vectors, and `erased`, whose first
    version has lost its files."""
    for store in store_of("spark catalog", lambda: root_session, tmp_path_factory.mktemp("past")):
        store.create("silver", "erased")
        layout = store.lake.layout["silver"]
        store.add("silver", *[silver_row(f"k{n}", "open", n) for n in range(20)])
        new = layout.rows([silver_row("k3", "timed_out", 3, 1), silver_row("n", "open", 9, 1)])
        root_session.createDataFrame(new).createOrReplaceTempView("new")
        root_session.sql(
            f"MERGE INTO {store.lake.address('silver')} AS old USING new ON old.merge_key = "
            "new.merge_key "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
        assert list(Path(store.path("silver")).rglob("deletion_vector*.bin")), (
            "there is something to get wrong"
        )
        store.add("erased", ROW)
        write_deltalake(
            store.path("erased"), store.lake.layout["erased"].rows([ROW, ROW]), mode="overwrite"
        )
        DeltaTable(store.path("erased")).vacuum(0, dry_run=False, enforce_retention_duration=False)
        yield store


@pytest.fixture(params=[pytest.param(DELTA_RS, marks=pytest.mark.long), SPARK_FOLDER])
def asked(request: pytest.FixtureRequest, past: Store, root_session: SparkSession) -> TableReader:
    """Each way to ask about that lake."""
    if request.param == "spark catalog":
        return past.reader
    folder = Lake(settings_for(past.folder, lake=str(past.folder)))
    return (
        DeltaRsReader(folder)
        if request.param == DELTA_RS
        else SparkReader(folder, lambda: root_session)
    )


def test_rows_behind_a_deletion_vector_are_not_there(asked: TableReader, past: Store) -> None:
    found = asked.select(
        "silver", ["merge_key", "status"], [[("merge_key", "in", ["k2", "k3", "n"])]]
    )
    rows = sorted(zip(found["merge_key"].to_pylist(), found["status"].to_pylist(), strict=True))
    assert rows == [("k2", "open"), ("k3", "timed_out"), ("n", "open")]
    counted = (
        asked.summary("silver", ["status"], {"n": ("count", "*")}).sort_by("status").to_pylist()
    )
    assert counted == [{"status": "open", "n": 20}, {"status": "timed_out", "n": 1}]
    parts = asked.select("silver", ["tracking"], [[("merge_key", "=", "k2")]])["tracking"]
    assert parts.type == past.lake.layout["silver"].schema.field("tracking").type
    assert [part["offset"] for part in parts[0].as_py()] == [2]


def test_a_version_is_read_as_it_was(asked: TableReader) -> None:
    at = {
        v: asked.summary("silver", [], {"n": ("count", "*")}, version=v)["n"].to_pylist()
        for v in range(3)
    }
    assert at == {0: [0], 1: [20], 2: [21]}
    assert asked.version("silver") == 2
    assert (
        asked.select("silver", ["merge_key"], [[("status", "=", "timed_out")]], version=1).num_rows
        == 0
    )


@pytest.mark.long
@pytest.mark.parametrize("asked", KINDS, indirect=True)
def test_a_version_that_cannot_be_read_is_told_in_one_sentence(asked: TableReader) -> None:
    for version in (3, 99, -1):
        with pytest.raises(VersionGoneError, match=f"version {version} of silver cannot be read"):
            asked.select("silver", ["merge_key"], version=version)
    assert asked.select("erased", ["offset"]).num_rows == 2
    with pytest.raises(VersionGoneError, match="version 1 of erased cannot be read"):
        asked.select("erased", ["offset"], version=1)
    with pytest.raises(VersionGoneError):
        asked.summary("erased", ["source"], {"last": ("max", "offset")}, version=1)
    assert issubclass(VersionGoneError, WatersmeetError)


def test_the_history_tells_commits_latest_first(bronze: Store) -> None:
    asked = bronze.reader
    every = asked.history("bronze_tracking")
    assert [version.number for version in every] == [5, 4, 3, 2, 1, 0]
    assert asked.history("bronze_tracking", 2) == every[:2]
    assert asked.version("bronze_tracking") == 5
    assert all(version.metadata is None for version in every)
    times = [version.committed_at_ms for version in every]
    assert times == sorted(times, reverse=True)
    assert asked.version_at("bronze_tracking", times[0] + 1) == 5
    assert asked.version_at("bronze_tracking", times[-1] - 1) is None
    assert asked.version_at("bronze_tracking", times[3]) == max(
        v.number for v in every if v.committed_at_ms <= times[3]
    )


def test_every_question_sees_the_last_commit(either_store: Store) -> None:
    either_store.create("bronze_tracking")
    asked, stored = either_store.reader, either_store.lake.layout["bronze_tracking"]
    for count in range(2):
        assert (asked.version("bronze_tracking"), asked.file_count("bronze_tracking")) == (
            count,
            count,
        )
        assert len(offsets(either_store, ())) == count
        assert (100 < asked.row_bytes("bronze_tracking") < 100_000) == bool(count)
        either_store.add("bronze_tracking", bronze_row(5, count))
    assert asked.properties("bronze_tracking").items() >= stored.properties.items()


def test_each_thread_sees_the_last_commit(folder_store: Store) -> None:
    folder_store.create("erased")
    seen: list[int] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: seen.append(folder_store.reader.version("erased")))
        thread.start()
        thread.join()
        folder_store.add("erased", ROW)
    assert seen == [0, 1, 2]
    assert folder_store.reader.version("erased") == 3


def test_the_history_numbers_commits_rightly_while_others_write(folder_store: Store) -> None:
    store, asked = folder_store, DeltaRsReader(folder_store.lake)
    store.create("erased")

    def write() -> None:
        for number in range(1, 41):
            told = CommitProperties(custom_metadata={"userMetadata": str(number)})
            write_deltalake(
                store.path("erased"),
                store.lake.layout["erased"].rows([ROW]),
                mode="append",
                commit_properties=told,
            )

    seen = 0
    with ThreadPoolExecutor(max_workers=1) as threads:
        written = threads.submit(write)
        while not written.done():
            for limit in (1, 20, None):
                for number, _, metadata, *_ in asked.history("erased", limit):
                    assert int(metadata or 0) == number
                    seen = max(seen, number)
        written.result()
    assert seen > 3


def test_a_log_that_was_cleaned_up_is_read_on(either_store: Store) -> None:
    store = either_store
    store.create("erased")
    store.add("erased", ROW)
    assert store.reader.version("erased") == 1
    for n in range(5):
        store.add("erased", ("s", "t", 0, n, 0, None))
    DeltaTable(store.path("erased")).create_checkpoint()
    for number in range(6):
        Path(store.path("erased"), "_delta_log", f"{number:020d}.json").unlink()
    assert store.reader.summary("erased", [], {"n": ("count", "*")})["n"].to_pylist() == [6]
    assert [version.number for version in store.reader.history("erased")] == [6]
    with pytest.raises(VersionGoneError):
        store.reader.select("erased", ["offset"], version=2)


def explained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, the plans of delta-rs's queries with what was counted while they ran."""
    asked: list[str] = []

    class Explained(QueryBuilder):
        def execute(self, sql: str) -> Any:
            if sql.startswith("SELECT"):
                plan = pa.table(super().execute(f"EXPLAIN ANALYZE {sql}"))
                asked.append(str(plan.column(1).to_pylist()))
            return super().execute(sql)

    monkeypatch.setattr("watersmeet.lake.by_delta_rs.QueryBuilder", Explained)
    return asked


def test_files_are_skipped_by_offset_partition_and_time(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition on these opens only the files whose statistics may meet it."""
    folder_store.create("bronze_tracking")
    for n in range(10):
        rows = [bronze_row(n % 2, 100 * n + i, 1000 * (100 * n + i)) for i in range(100)]
        folder_store.add("bronze_tracking", *rows)
    asked = explained(monkeypatch)
    cases: list[tuple[Where, int]] = [
        ([[("offset", ">=", 500), ("offset", "<", 520)]], 1),
        ([[("event_time", ">=", 900_000)]], 1),
        ([[("event_time", "in", [0, 950_000])]], 2),
        ([[("partition", "=", 1)]], 5),
        (within({0: (800, None), 1: (100, 150)}), 2),
        ([[("reason", "is not null", None)]], 0),
    ]
    for where, files in cases:
        folder_store.reader.select("bronze_tracking", ["value"], where)
        opened = re.findall(r"files_ranges_pruned_statistics=\d+ total → (\d+) matched", asked[-1])
        assert (int(opened[0]) if opened else 0) == files, (where, asked[-1])


def test_values_are_unpacked_for_the_rows_alone_that_meet_the_conditions(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In silver, too, which may have deletion vectors."""
    folder_store.create("silver")
    rows = [silver_row(f"k{n * 7_919 % 1_000}", "open", n) for n in range(1_000)]
    folder_store.add("silver", *rows)
    asked = explained(monkeypatch)
    keys: Condition = ("merge_key", "in", ["k1", "k500", "k7"])
    folder_store.reader.select(
        "silver", ["tracking"], [[keys, ("event_time", ">=", 10)], [keys, ("event_time", "<", 5)]]
    )
    assert "pushdown_rows_pruned=997," in asked[-1]


def test_a_view_of_the_journal_gives_its_rows_and_no_summary(folder_store: Store) -> None:
    """A row of the journal may hold many of them, which are counted once they are unpacked."""
    of_journal = [
        name for name, view in folder_store.reader.lake.views.items() if view.items is not None
    ]
    for name in of_journal:
        with pytest.raises(ValueError, match=f"{name} is unpacked as a whole"):
            row_count(folder_store.reader, name)
    assert tables.RESETS in of_journal


def test_a_range_is_within_where_offsets_say_so_and_neighbours_share_a_term(bronze: Store) -> None:
    assert offsets(bronze, within({})) == []
    assert offsets(bronze, within({1: (17, 19), 0: (19, None), 5: (0, 9)})) == [
        (0, 19),
        (1, 17),
        (1, 18),
    ]
    ranges: dict[int, tuple[int, int | None]] = {p: (2 * p, 2 * p + 5) for p in range(100)}
    terms = within(ranges)
    assert len(terms) <= MAX_TERMS
    for partition, (since, until) in ranges.items():
        assert until is not None
        for offset in (since, until - 1):
            assert any(passes(term, partition, offset) for term in terms)
    endless = within({p: (0, None if p == 50 else 1) for p in range(100)})
    assert any(passes(term, 50, 2**62) for term in endless)
    assert not any(passes(term, 0, 2**62) for term in endless)


def test_a_value_for_each_partition_is_that_of_no_other(bronze: Store) -> None:
    cases: list[tuple[Condition, list[tuple[int, int]]]] = [
        (("offset", ">", {0: 17, 1: 18}), [(0, 18), (0, 19), (1, 19)]),
        (("offset", "<=", {1: 1, 7: 19}), [(1, 0), (1, 1)]),
        (("event_time", "=", {0: 3_000, 1: 19_000, 2: 0}), [(0, 3), (1, 19)]),
        (("merge_key", ">=", {0: "k9", 1: "k"}), [(0, 9), (0, 19), *((1, o) for o in range(20))]),
        (("offset", ">=", {}), []),
    ]
    for condition, expected in cases:
        assert offsets(bronze, [[condition]]) == expected, condition
    ranges: dict[int, tuple[int | None, int | None]] = {p: (40 * p, 40 * p + 1) for p in range(90)}
    ranges |= {0: (None, 3), 1: (18, None)}
    terms = within(ranges)
    assert len(terms) <= MAX_TERMS + 2
    assert offsets(bronze, terms) == [(0, 0), (0, 1), (0, 2), (1, 18), (1, 19)]


@pytest.mark.promise("C26")
@pytest.mark.parametrize("count", [2, 16, 100])
def test_a_partition_that_lies_far_behind_lets_nothing_of_others_be_read(count: int) -> None:
    """However many partitions share a term."""
    far: dict[int, tuple[int, int | None]] = {p: (10**6 + p, None) for p in range(count)}
    quiet = count // 2
    terms = within({**far, quiet: (5, None)})
    assert any(passes(term, quiet, 5) for term in terms)
    for p in far.keys() - {quiet}:
        assert not any(passes(term, p, 10**6 - 1) for term in terms), p
    ended = within({**dict.fromkeys(far, (0, 10)), quiet: (0, 10**6)})
    assert not any(passes(term, p, 10) for term in ended for p in far.keys() - {quiet})


@pytest.mark.promise("C26")
def test_of_a_partition_that_lies_far_behind_alone_all_files_are_opened(tmp_path: Path) -> None:
    """Also where partitions have values of their own in one condition."""
    reader = DeltaRsReader(Lake(settings_for(tmp_path)))
    uri = reader.uri("bronze_tracking")
    for p in (0, 1):
        for offset in range(0, 100, 10):
            places = {"partition": pa.array([p], pa.int32()), "offset": pa.array([offset])}
            write_deltalake(uri, pa.table(places), mode="append")
    files = pa.table(reader.opened("bronze_tracking").get_add_actions(flatten=True))
    near = may_meet(files, [[("offset", ">", {0: 5, 1: 85})]])
    assert Counter(near["min.partition"].to_pylist()) == {0: 9, 1: 1}
    none_meet: list[Condition] = [("offset", ">", {}), ("partition", "in", [])]
    for nothing in none_meet:
        assert may_meet(files, [[nothing]]).num_rows == 0
        assert may_meet(files, [[nothing], [("offset", "=", 20)]]).num_rows == 2


def passes(term: Sequence[tuple[str, str, Any]], partition: int, offset: int) -> bool:
    row = {"partition": partition, "offset": offset}
    compare = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b, "=": lambda a, b: a == b}
    compare["in"] = lambda a, b: a in b
    return all(
        compare[operator](row[column], value[partition] if isinstance(value, dict) else value)
        for column, operator, value in term
    )


def test_what_delta_rs_can_open_needs_no_spark(tmp_path: Path) -> None:
    def no_spark() -> Any:
        raise ConfigurationError("a session was asked for")

    without = [
        "/a/lake",
        "file:/a/lake",
        "s3://b/lake",
        "s3a://b/lake",
        "abfss://c@a.dfs.core.windows.net/lake",
        "gs://b/lake",
    ]
    for location in without:
        assert isinstance(
            reader(Lake(settings_for(tmp_path, lake=location)), no_spark), DeltaRsReader
        ), location
    catalog = settings_for(
        tmp_path, lake={"catalog": "c", "schema": "s"}, checkpoints=str(tmp_path)
    )
    with_spark = [
        settings_for(tmp_path, lake=location)
        for location in ("hdfs://n/lake", "dbfs:/lake", "/a%20b/lake")
    ]
    for settings in (*with_spark, catalog):
        assert isinstance(reader(Lake(settings), no_spark), SparkReader)
    borrowed = Lake(settings_for(tmp_path), {"idle_heartbeats": Lake(catalog)})
    assert isinstance(reader(borrowed, no_spark), SparkReader)


def test_a_borrowed_table_is_the_other_lakes(folder_store: Store, tmp_path: Path) -> None:
    folder_store.create("erased")
    borrower = Lake(settings_for(tmp_path / "other"), {"erased": folder_store.lake})
    asked = DeltaRsReader(borrower)
    assert asked.exists("erased")
    assert asked.columns("erased").names == folder_store.lake.layout["erased"].schema.names
    assert not asked.exists("resets")


def test_asking_without_spark_imports_no_spark(folder_store: Store) -> None:
    folder_store.create("erased")
    code = (
        "import sys; from watersmeet.lake import by_delta_rs, commits; "
        "from watersmeet.lake import files, identity, lease, maintenance, "
        "location, progress, table_reader, tables; from deltalake import DeltaTable; "
        f"DeltaTable({folder_store.path('erased')!r}); "
        "print([m for m in ('pyspark', 'delta', 'confluent_kafka') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tables_are_named_once(folder_store: Store) -> None:
    names = {
        v
        for n, v in vars(tables).items()
        if n.isupper() and n[0] != "_" and isinstance(v, str) and "." not in v
    } - {tables.APPLICATION, tables.DELETING, tables.RESETTING, tables.BESIDE}
    with_registry = {tables.WRITER_SCHEMAS}
    lake = folder_store.lake
    stored = {*lake.layout} - {"bronze_tracking", "bronze_orders"}
    assert names - with_registry == stored | {*lake.views, *lake.derived}
    assert not stored & {*lake.views}

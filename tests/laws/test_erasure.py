"""What is gone is gone from the disk: after the retention no file of a lake has what `forget` or
`keep` has ended, and no file is left that nothing needs; on both engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import parquet
from pyspark.sql import SparkSession

from tests.laws.conftest import FOLDER_AT_NIGHT, MakeLake, in_folders
from tests.laws.test_retention import note_published
from tests.support.cases import Case, heartbeat, keyed
from tests.support.lakes import CaseLake, OpenSpark, engine_for, folder_of
from watersmeet.engine import Engine
from watersmeet.lake import tables
from watersmeet.lake.maintenance import keep_properties, maintain
from watersmeet.lake.table_reader import row_count
from watersmeet.operations.forget import Forgetting
from watersmeet.operations.retention import expire

pytestmark = [pytest.mark.promise("N20"), pytest.mark.fault("retention")]

KEY, VALUE, OTHER = "alice-1234567890", "a-secret-of-alice-0987654321", "bob-1234567890"
TIMEOUT_MS = 100


def a_case() -> Case:
    """Two keys with merge records that grow in several batches: finished, open, late and refused;
    other keys beside them."""
    values: dict[str, list[bytes | None]] = {"tracking": [], "orders": []}
    arrivals = []
    for time in range(0, 1200, 20):
        for source in values:
            key = (KEY, OTHER, "carol")[time // 20 % 3]
            late_by = 500 if time % 140 == 0 and time else 0
            record = keyed(key, time - late_by, secret=VALUE if key == KEY else "none")
            values[source] += [
                record,
                b'{"k":"%s","secret":"%s"}' % (KEY.encode(), VALUE.encode()),
                heartbeat(time),
            ]
            arrivals += [source] * 3
    return Case(values, TIMEOUT_MS, arrivals)


@pytest.fixture
def lake(new_lake: MakeLake) -> CaseLake:
    """Merged in steps, so that each merge record of the keys was changed by several batches."""
    keep = {"silver": "300ms", "late": "300ms", "quarantine": "300ms", "bronze": "300ms"}
    lake = new_lake({p: a_case() for p in range(2)}, silver={"change_data_feed": True}, keep=keep)
    for share in (0.5, 0.95):
        lake.arrive(share)
        lake.merge()
    return lake


def names_of(lake: CaseLake) -> list[str]:
    """Every table that there is."""
    return [name for name in lake.engine.lake.layout if lake.reader.exists(name)]


def files_with(lake: CaseLake, *texts: str) -> set[str]:
    """The files of a lake in which one of the texts stands: in their bytes, or, of Parquet, in
    their rows, which are packed."""
    folder, found = Path(folder_of(lake.settings)), set()
    for file in filter(Path.is_file, folder.rglob("*")):
        held = [file.read_bytes().decode("latin-1"), *_rows(file)]
        if any(text in each for text in texts for each in held):
            found.add(str(file.relative_to(folder)))
    return found


def _rows(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        for column in parquet.ParquetFile(file).read().columns:
            yield str([_plain(value) for value in column.to_pylist()])


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return (
        {name: _plain(each) for name, each in value.items()} if isinstance(value, dict) else value
    )


def after_retention(lake: CaseLake, open_spark: OpenSpark) -> list[dict[str, object]]:
    """What maintenance does once the retention is over, whatever has written checkpoints of the
    logs meanwhile."""
    later = lake.settings.model_copy(update={"retention_ms": 1})
    engine = engine_for(open_spark, later)
    for name in names_of(lake):
        keep_properties(engine, name)
        DeltaTable(f"{folder_of(later)}/{name}").create_checkpoint()
    return maintain(engine, names_of(lake))


def forget(lake: CaseLake, engine: Engine | None = None) -> None:
    Forgetting(lake.reader, lake.settings, KEY).erase(lake.owner(engine))


def rows_of(lake: CaseLake) -> list[tuple[Any, ...]]:
    return list(lake.silver())


def kinds_of(files: set[str]) -> set[str]:
    return {
        file.split("/")[0] + ("/_change_data" if "_change_data" in file else "") for file in files
    }


@in_folders
@pytest.mark.parametrize("table", [tables.DUPLICATES, tables.CORRECTIONS])
def test_no_file_has_the_key_of_a_correction_or_of_a_repeated_record(
    new_lake: MakeLake, open_spark: OpenSpark, kind: str, table: str
) -> None:
    corrections = {"topic": "merged-corrections", "within": "1d"}
    path = "secret" if table == tables.DUPLICATES else None
    ids = {f"sources__{name}__id": path for name in ("tracking", "orders")}
    lake = new_lake({0: a_case()}, publish__corrections=corrections, **ids)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    assert row_count(lake.reader, table, [[("merge_key", "=", KEY)]]) > 0
    assert tables.SILVER in kinds_of(files_with(lake, KEY, VALUE))
    forget(lake)
    after_retention(lake, open_spark)
    assert files_with(lake, KEY, VALUE) == set()


@in_folders
def test_after_forget_the_retention_and_maintain_no_file_has_the_key_or_its_values(
    lake: CaseLake, open_spark: OpenSpark, kind: str
) -> None:
    held = {tables.SILVER, *map(tables.bronze, lake.settings.sources)}
    for text in (KEY, VALUE):
        assert kinds_of(files_with(lake, text)) == held | {tables.BASES, "silver/_change_data"}, (
            "it would be found"
        )
    before = [row for row in rows_of(lake) if row[1] != KEY]
    forget(lake)
    assert kinds_of(files_with(lake, KEY)) >= held
    removed = {
        str(row["table"]): int(str(row["old_files_removed"]))
        for row in after_retention(lake, open_spark)
    }
    assert all(removed[name] > 0 for name in held)
    assert files_with(lake, KEY, VALUE) == set()
    assert kinds_of(files_with(lake, OTHER)) >= held
    assert rows_of(lake) == before
    lake.arrive()
    lake.merge(lake.quick)
    assert {row for row in before if row[2] == "timed_out"} <= set(rows_of(lake)), (
        "and the merge goes on"
    )


@pytest.mark.parametrize("kind", [FOLDER_AT_NIGHT], indirect=True, scope="module")
def test_the_embedded_engine_forgets_what_spark_has_merged(
    lake: CaseLake, open_spark: OpenSpark, kind: str
) -> None:
    """Rows that a deletion vector of Spark's hides are in the file all the same."""
    before = [row for row in rows_of(lake) if row[1] != KEY]
    forget(lake, lake.quick)
    assert list(Path(folder_of(lake.settings), tables.SILVER).glob("deletion_vector_*"))
    lake.settings = lake.settings.model_copy(update={"engine": "embedded"})
    after_retention(lake, open_spark)
    assert files_with(lake, KEY, VALUE) == set()
    assert rows_of(lake) == before
    after_retention(lake, open_spark)
    assert not list(Path(folder_of(lake.settings), tables.SILVER).glob("deletion_vector_*"))
    assert as_spark_reads(open_spark(), lake) == as_delta_rs_reads(lake)


def as_spark_reads(spark: SparkSession, lake: CaseLake) -> list[tuple[object, ...]]:
    path = f"{folder_of(lake.settings)}/{tables.SILVER}".replace("`", "``")
    rows = spark.sql(
        f"SELECT partition, merge_key, unix_millis(event_time) FROM delta.`{path}`"
    ).collect()
    return sorted(map(tuple, rows))


def as_delta_rs_reads(lake: CaseLake) -> list[tuple[object, ...]]:
    rows = lake.reader.select(tables.SILVER, ["partition", "merge_key", "event_time"])
    return sorted(tuple(row.values()) for row in rows.to_pylist())


@in_folders
def test_rows_that_keep_has_ended_free_their_space(
    lake: CaseLake, open_spark: OpenSpark, kind: str
) -> None:
    rows = lake.reader.summary(tables.SILVER, [], {"rows": ("count", "*")})["rows"][0].as_py()
    note_published(lake)
    for name in (tables.SILVER, *map(tables.bronze, lake.settings.sources)):
        expire(lake.owner(), lake.settings, name)
    after_retention(lake, open_spark)
    left = lake.reader.summary(tables.SILVER, [], {"rows": ("count", "*")})["rows"][0].as_py()
    assert 0 < left < rows
    silver = Path(folder_of(lake.settings), tables.SILVER)
    data = [
        parquet.ParquetFile(file).metadata.num_rows for file in silver.rglob("status=*/*.parquet")
    ]
    assert sum(data) == left, "a row that is gone takes no room"


@in_folders
def test_files_that_no_commit_names_go_and_none_that_is_needed(
    lake: CaseLake, open_spark: OpenSpark, kind: str
) -> None:
    rows = rows_of(lake)
    orphan = pa.table({"merge_key": ["an-orphan"]})
    folder = Path(folder_of(lake.settings))
    places = [
        "silver/status=open/part-0-orphan.parquet",
        "bronze_tracking/part-0-orphan.parquet",
        "leases/part-0-orphan.parquet",
    ]
    places += ["silver/_change_data/cdc-0-orphan.parquet"]
    for place in places:
        parquet.write_table(orphan, folder / place)
        os.utime(folder / place, (0, 0))
    young = folder / "silver/status=open/part-1-orphan.parquet"
    parquet.write_table(orphan, young)
    maintain(lake.engine, names_of(lake))
    assert [place for place in places if (folder / place).exists()] == []
    assert young.exists(), "a commit may name it yet"
    assert rows_of(lake) == rows
    for number in range(lake.reader.version(tables.SILVER) + 1):
        lake.reader.select(tables.SILVER, ["merge_key"], version=number)

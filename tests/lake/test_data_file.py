"""Files of tables before a commit names them: their statistics say what they hold, or nothing, and
of what fails none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from tests.support.configurations import settings_for
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.core.types import TIME
from watersmeet.engine.choice import create_tables
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.lake import data_file
from watersmeet.lake.data_file import DataFile, PartitionedFiles
from watersmeet.lake.files import Files
from watersmeet.lake.location import Lake
from watersmeet.lake.tables import SILVER, Table

FIRST, LAST = "1970-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z"
BEYOND = (LAST_EVENT_TIME_MS + 1, 1_768_780_800_123_456, (2**63 - 1) // 1000)
BEFORE = (-1, -(10**15), -(2**63) // 1000 + 1)
SCHEMA = pa.schema([("offset", pa.int64()), ("time", TIME)])


def written(folder: Path, *times_ms: int) -> AddAction:
    times = pa.array([ms * 1000 for ms in times_ms], pa.int64()).cast(TIME)
    file = DataFile(Table("times", SCHEMA), SCHEMA)
    for offset, time in enumerate(times):  # a row group each
        file.write(pa.table([[offset], pa.array([time], TIME)], schema=SCHEMA))
    return file.put(Files({}), str(folder), "part.parquet", {})


@pytest.mark.parametrize(
    ("times", "least", "most"),
    [
        ((0, 5, LAST_EVENT_TIME_MS), FIRST, LAST),
        *(((0, ms), FIRST, None) for ms in BEYOND),
        *(((ms, LAST_EVENT_TIME_MS), None, LAST) for ms in BEFORE),
        ((*BEFORE, *BEYOND), None, None),
    ],
)
def test_a_time_of_any_number_is_written_and_bounds_are_times_of_the_calendar(
    tmp_path: Path, times: tuple[int, ...], least: str | None, most: str | None
) -> None:
    added = written(tmp_path, *times)
    statistics = json.loads(added.stats)
    assert statistics["minValues"].get("time") == least
    assert statistics["maxValues"].get("time") == most
    assert (statistics["minValues"]["offset"], statistics["maxValues"]["offset"]) == (
        0,
        len(times) - 1,
    )
    table = DeltaTable.create(str(tmp_path), SCHEMA)
    table.create_write_transaction([added], "append", table.schema())
    rows = DeltaTable(str(tmp_path)).to_pyarrow_table()
    assert sorted(us // 1000 for us in rows["time"].cast(pa.int64()).to_pylist()) == sorted(times)


@pytest.mark.parametrize("is_struct", [False, True])
@pytest.mark.parametrize("by_rows", [True, False])
def test_files_have_dictionaries_of_what_repeats_and_of_nothing_else(
    tmp_path: Path, is_struct: bool, by_rows: bool
) -> None:
    """Keys and names, and the fields of structs; not times, offsets and whole records."""
    changes = {}
    if is_struct:
        (tmp_path / "s.json").write_text(
            '{"type": "object", "properties": {"s": {"type": "string"}}}'
        )
        changes = {"sources__tracking__schema": "./s.json"}
    engine = EmbeddedEngine(Lake(settings_for(tmp_path, **changes)))
    create_tables(engine)
    part = {"offset": 1, "event_time": 5, "value": {"s": "de"} if is_struct else "{}"}
    row = {"merge_key": "k", "status": "open", "event_time": 5, "offset": 1, "tracking": [part]}
    rows = engine.lake.layout[SILVER].rows_of([row])
    if by_rows:
        engine.append(SILVER, rows)
    else:
        engine.append_files(SILVER, engine.write_files(SILVER, [rows]), None)
    [file] = (tmp_path / "lake" / SILVER / "status=open").glob("*.parquet")
    group = pq.read_metadata(file).row_group(0)
    columns = {c.path_in_schema: c for c in map(group.column, range(group.num_columns))}
    has = {name: "DICTIONARY" in str(column.encodings) for name, column in columns.items()}
    assert has["merge_key"]
    assert has["tenant"]
    # Files that are written by pieces cannot tell the fields of structs from other columns.
    assert has["event_time"] == has["offset"] == (is_struct and not by_rows)
    value = "tracking.list.element.value"
    assert has[f"{value}.s" if is_struct else value] == is_struct


def test_files_that_were_complete_when_the_rest_failed_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_file, "FILE_BYTES", 1)
    lake = tmp_path / "lake"
    schema = SCHEMA.append(pa.field("status", pa.string()))
    chunk = pa.table([[1], pa.array([1], TIME), ["open"]], schema=schema)

    def chunks() -> Iterator[pa.Table]:
        yield from (chunk, chunk)
        assert len([*lake.rglob("*.parquet")]) == 2
        raise ValueError("fails on purpose")

    files = PartitionedFiles(Table("rows", schema, ("status",)), str(lake), Files({}))
    with pytest.raises(ValueError, match="on purpose"):
        files.write(chunks())
    assert [*lake.rglob("*.parquet")] == []


def test_files_are_deleted_by_the_beginning_of_their_names_wherever_they_are(
    tmp_path: Path,
) -> None:
    kept = [tmp_path / "part-b-1.parquet", tmp_path / "status=open" / "x-part-a-1.parquet"]
    gone = [tmp_path / "part-a-1.parquet", tmp_path / "status=open" / "part-a-2.parquet"]
    (tmp_path / "status=open").mkdir()
    for file in (*kept, *gone):
        file.touch()
    Files({}).delete_beginning(str(tmp_path), "part-a-")
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


@pytest.mark.parametrize(
    "writing",
    [
        "PartitionedFiles(TABLE, sys.argv[1], Files({})).write(chunks())",
        "[*by_key(chunks(), SCHEMA, 3)]",
    ],
    ids=["new files", "rows by key"],
)
def test_a_killed_process_leaves_no_row_on_its_own_disk(tmp_path: Path, writing: str) -> None:
    lake, own_disk = tmp_path / "lake", tmp_path / "tmp"
    own_disk.mkdir()
    killed = f"""
        import os, signal, sys
        import pyarrow as pa
        from watersmeet.lake.files import Files
        from watersmeet.lake.data_file import PartitionedFiles, by_key
        from watersmeet.lake.tables import Table

        NAMES = ("tenant", "merge_key", "status")
        SCHEMA = pa.schema([("partition", pa.int32()), *((n, pa.string()) for n in NAMES)])
        TABLE = Table("rows", SCHEMA, ("status",))

        def chunks():
            yield pa.table([[1], [""], ["secret" * 100_000], ["open"]], schema=SCHEMA)
            os.kill(os.getpid(), signal.SIGKILL)

        {writing}
    """
    environment = {**os.environ, "TMPDIR": str(own_disk)}
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(killed), str(lake)], env=environment
    )
    assert process.returncode == -signal.SIGKILL
    assert [*own_disk.rglob("*")] == []

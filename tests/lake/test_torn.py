"""What a power cut leaves at the end of a log is moved aside, whatever it is, in every table;
damage before a whole commit is refused."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.lake.conftest import settings_for
from watersmeet.cli import reader_of
from watersmeet.engine.choice import create_tables
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import LAST_CHECKPOINT, LOG, entry_name, entry_of
from watersmeet.lake.table_reader import row_count
from watersmeet.lake.torn import check_whole, move_aside, moved_aside

pytestmark = [pytest.mark.promise("N80"), pytest.mark.fault("power")]

LAST = 3
"""The version of the last commit of each table here."""


def append(engine: EmbeddedEngine, table: str, number: int) -> None:
    """A commit of a row."""
    schema = engine.lake.schema(table)
    row = schema.empty_table().from_pylist([{}], schema)
    engine.append(table, row, Commit("a test", 1, number))


def not_on_the_disk_yet(log: Path) -> None:
    """Commits have checksums once they are."""
    for checksum in log.glob(".*.json.crc"):
        checksum.unlink()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake whose tables have three commits each behind the one that has made them."""
    folder = tmp_path_factory.mktemp("torn")
    engine = EmbeddedEngine(Lake(settings_for(folder)))
    create_tables(engine)
    for table in engine.lake.layout:
        for number in range(1, LAST + 1):
            append(engine, table, number)
        not_on_the_disk_yet(folder / "lake" / table / LOG)
    return folder


@pytest.fixture
def lake(made: Path, tmp_path: Path) -> Lake:
    """A copy of it."""
    shutil.copytree(made / "lake", tmp_path / "lake")
    return Lake(settings_for(tmp_path))


def log_of(lake: Lake, table: str) -> Path:
    assert lake.folder is not None
    return lake.folder / table / LOG


def added(entry: Path) -> Path:
    """The data file of a commit."""
    actions = map(json.loads, entry.read_text().splitlines())
    [name] = [action["add"]["path"] for action in actions if "add" in action]
    return entry.parents[1] / str(name)


def filled_with_zeros(file: Path) -> None:
    file.write_bytes(b"\0" * file.stat().st_size)


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def without_its_last_line(entry: Path) -> None:
    entry.write_bytes(entry.read_bytes().rpartition(b"\n")[0])


def with_zeros_at_its_end(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-20] + b"\0" * 20)


OF_ENTRIES = {
    "is empty": emptied,
    "is filled with zeros": filled_with_zeros,
    "is torn": half,
    "is torn, lacks a line": without_its_last_line,
    "is torn, and then zeros": with_zeros_at_its_end,
}
OF_FILES = {
    "which is missing": Path.unlink,
    "which has 0 of": emptied,
    "bytes, half": half,
    "which is no Parquet file": filled_with_zeros,
    "which is no Parquet file at its end": with_zeros_at_its_end,
}
LEFT: dict[str, Callable[[Path], None]] = {
    **OF_ENTRIES,
    **{
        said: lambda entry, spoil=spoil: spoil(added(entry))  # type: ignore[misc]
        for said, spoil in OF_FILES.items()
    },
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_power_cut_leaves_of_a_last_commit_is_moved_aside_in_every_table(
    lake: Lake, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = what.partition(",")[0] if what in OF_ENTRIES else what.removesuffix(" at its end")
    said = said.removesuffix(", half")
    for table in lake.layout:
        LEFT[what](entry_of(log_of(lake, table), LAST))
    with pytest.raises(WatersmeetError, match=f"{said}.* as a power cut leaves it; nothing relies"):
        check_whole(lake)
    with pytest.raises(WatersmeetError, match="start a run"):
        reader_of(lake.settings)
    assert moved_aside(lake) == [], "who only reads, moves nothing"
    assert move_aside(lake) == []
    for table in lake.layout:
        [line] = [each for each in caplog.messages if f"/{table}/" in each]
        assert said in line
        assert f"{table}/{LOG}/aside/torn-{LAST:020}.json" in moved_aside(lake)
    check_whole(lake)
    engine = EmbeddedEngine(lake)
    for table in lake.layout:
        assert engine.reader.version(table) == LAST - 1
        assert row_count(engine.reader, table) == LAST - 1
        append(engine, table, LAST)
        assert row_count(engine.reader, table) == LAST
    assert move_aside(lake) == []


def test_several_commits_at_the_end_go_aside_together_and_once_more(lake: Lake) -> None:
    log = log_of(lake, tables.SILVER)
    for _ in range(2):
        emptied(entry_of(log, LAST))
        half(entry_of(log, LAST - 1))
        assert move_aside(lake) == []
        engine = EmbeddedEngine(lake)
        assert engine.reader.version(tables.SILVER) == LAST - 2
        append(engine, tables.SILVER, LAST - 1)
        append(engine, tables.SILVER, LAST)
        not_on_the_disk_yet(log)
    assert len(moved_aside(lake)) == 4


def test_a_table_of_which_no_commit_is_left_is_said_until_it_is_made_again(lake: Lake) -> None:
    log = log_of(lake, tables.BASES)
    for version in range(LAST + 1):
        emptied(entry_of(log, version))
    for _ in range(2):  # a start may be cut short in between
        assert move_aside(lake) == [tables.BASES]
    EmbeddedEngine(lake).create(lake.layout[tables.BASES])
    assert move_aside(lake) == []


@pytest.mark.parametrize(
    "spoil",
    # A whole line less is JSON, too: only the last commit is read so closely.
    [spoil for spoil in (*OF_ENTRIES.values(), Path.unlink) if spoil is not without_its_last_line],
)
def test_damage_before_a_whole_commit_is_refused_and_nothing_is_moved(
    lake: Lake, spoil: Callable[[Path], None]
) -> None:
    for table in lake.layout:
        entry = entry_of(log_of(lake, table), LAST - 1)
        content = entry.read_bytes()
        spoil(entry)
        for look in (check_whole, move_aside):
            with pytest.raises(WatersmeetError, match=f"the log of table {table} is damaged") as e:
                look(lake)
            assert "`kafka.start: sink`" in str(e.value)
        entry.write_bytes(content)
    assert moved_aside(lake) == []


@pytest.mark.parametrize("spoil", [emptied, half, filled_with_zeros, Path.unlink])
@pytest.mark.parametrize("which", ["checkpoint", "its name", "both"])
def test_a_checkpoint_that_is_not_whole_is_done_without(
    lake: Lake, spoil: Callable[[Path], None], which: str
) -> None:
    table = tables.SILVER
    log = log_of(lake, table)
    DeltaTable(str(log.parent)).create_checkpoint()
    [checkpoint], last = log.glob("*.checkpoint.parquet"), log / "_last_checkpoint"
    for file in {"checkpoint": [checkpoint], "its name": [last], "both": [checkpoint, last]}[which]:
        spoil(file)
    assert move_aside(lake) == []
    reader = DeltaRsReader(lake)
    assert row_count(reader, table) == LAST
    check_whole(lake)


def test_a_checkpoint_behind_the_last_whole_commit_goes_with_the_commits(lake: Lake) -> None:
    log = log_of(lake, tables.SILVER)
    DeltaTable(str(log.parent)).create_checkpoint()
    entry_of(log, LAST).unlink()  # its name was not on the disk, and that of the checkpoint was
    assert move_aside(lake) == []
    assert DeltaRsReader(lake).version(tables.SILVER) == LAST - 1


def test_a_checkpoint_that_nothing_else_repeats_is_damage(lake: Lake) -> None:
    log = log_of(lake, tables.SILVER)
    DeltaTable(str(log.parent)).create_checkpoint()
    for version in range(LAST):
        entry_of(log, version).unlink()
    check_whole(lake)
    half(next(log.glob("*.checkpoint.parquet")))
    with pytest.raises(WatersmeetError, match=r"checkpoint.parquet is not whole.*start: sink"):
        move_aside(lake)


def test_files_that_writers_leave_in_a_log_hide_nothing(lake: Lake) -> None:
    log = log_of(lake, tables.SILVER)
    for name in ("_commit_1.json.tmp", f"{LAST + 1:020}.json#1", f".{LAST + 1:020}.json.1.tmp"):
        (log / name).write_bytes(b"{")
    check_whole(lake)
    append(EmbeddedEngine(lake), tables.SILVER, LAST + 1)
    check_whole(lake)
    assert DeltaRsReader(lake).version(tables.SILVER) == LAST + 1


@pytest.mark.parametrize("name", [LAST_CHECKPOINT, entry_name(LAST), entry_name(LAST + 1)])
def test_a_folder_where_a_file_of_the_log_belongs_is_named(lake: Lake, name: str) -> None:
    log = log_of(lake, tables.SILVER)
    (log / name).unlink(missing_ok=True)
    (log / name).mkdir()
    for look in (check_whole, move_aside):
        with pytest.raises(WatersmeetError, match=rf"{name} is a folder.*; move it away"):
            look(lake)


def test_hadoops_checksums_that_are_not_whole_are_removed(lake: Lake) -> None:
    file = added(entry_of(log_of(lake, tables.SILVER), LAST))
    checksum = file.with_name(f".{file.name}.crc")
    checksum.write_bytes(b"crc\0\0\0\2\0" + b"1234" * -(-file.stat().st_size // 512))
    assert move_aside(lake) == []
    assert checksum.exists()
    half(checksum)
    check_whole(lake)
    assert move_aside(lake) == []
    assert not checksum.exists()
    assert DeltaRsReader(lake).version(tables.SILVER) == LAST


def test_a_commit_that_lacks_lines_by_hadoops_checksum_is_moved_aside(lake: Lake) -> None:
    entry = entry_of(log_of(lake, tables.SILVER), LAST)
    content = entry.read_bytes()
    checksum = entry.with_name(f".{entry.name}.crc")
    pieces = (content[begin : begin + 512] for begin in range(0, len(content), 512))
    sums = b"".join(zlib.crc32(piece).to_bytes(4, "big") for piece in pieces)
    checksum.write_bytes(b"crc\0\0\0\2\0" + sums)
    check_whole(lake)
    first, _, rest = content.partition(b"\n")
    for cut in (first + b"\n" + next(x for x in rest.split(b"\n") if b'"txn"' in x), first):
        entry.write_bytes(cut)
        with pytest.raises(WatersmeetError, match="is torn"):
            check_whole(lake)
    assert move_aside(lake) == []
    assert not checksum.exists()
    assert DeltaRsReader(lake).version(tables.SILVER) == LAST - 1

"""A bit that flips in a file of a lake in a folder: whoever would read it says table and file, also
where the bit makes another value of a value. (`python -m tests.faults.flipped` does it for longer,
between Kafka and Kafka.)"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.faults.flipped import flip
from tests.lake.conftest import settings_for
from watersmeet.audit.verify import damaged_files
from watersmeet.engine.choice import create_tables
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.errors import TableError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import (
    LAST_VACUUM,
    LOG,
    checksum_of,
    entry_of,
    is_intact,
    is_sealed,
    seal,
)
from watersmeet.lake.table_errors import naming
from watersmeet.lake.torn import check_whole, move_aside, moved_aside

pytestmark = [pytest.mark.promise("N83"), pytest.mark.fault("disk")]

BRONZE, SILVER = tables.bronze("orders"), tables.SILVER
LAST = 3


def append(engine: EmbeddedEngine, table: str, number: int, **values: object) -> None:
    schema = engine.lake.schema(table)
    row = pa.Table.from_pylist([values], schema)
    engine.append(table, row, Commit("a test", 1, number))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with three rows in bronze and in silver, a commit each."""
    folder = tmp_path_factory.mktemp("flipped")
    engine = EmbeddedEngine(Lake(settings_for(folder)))
    create_tables(engine)
    for n in range(1, LAST + 1):
        append(engine, BRONZE, n, partition=0, offset=n, value=b"amount: 17", merge_key="k")
        append(engine, SILVER, n, status="open", merge_key="k", partition=0, event_time=n)
    return folder


@pytest.fixture
def engine(made: Path, tmp_path: Path) -> EmbeddedEngine:
    """That of a copy of it, which has read nothing yet."""
    shutil.copytree(made / "lake", tmp_path / "lake")
    return EmbeddedEngine(Lake(settings_for(tmp_path)))


def files(engine: EmbeddedEngine, table: str, pattern: str = "*.parquet") -> list[Path]:
    folder = Path(engine.reader.path(table))
    return sorted(file for file in folder.rglob(pattern) if LOG not in file.parts)


def flip_text(file: Path, text: bytes) -> None:
    """Flip the last bit of a text in a file."""
    flip(file, 8 * (file.read_bytes().index(text) + len(text) - 1))


def values(engine: EmbeddedEngine, *, since: int = 0) -> list[bytes]:
    where = [[("partition", "=", 0), ("offset", ">=", since)]]
    return [*engine.reader.select(BRONZE, ["value"], where)["value"].to_pylist()]


def found(engine: EmbeddedEngine) -> list[str]:
    """What `verify --full` finds of files."""
    return [str(each) for each in damaged_files(engine.reader, engine.lake.settings).problems]


def test_a_value_that_has_become_another_one_is_refused_and_no_other_file_is_missed(
    engine: EmbeddedEngine,
) -> None:
    file = next(each for each in files(engine, BRONZE) if is_of(engine, each, 1))
    flip_text(file, b"amount: 17")
    assert values(engine, since=2) == [b"amount: 17"] * 2, "what is not read is not compared"
    with pytest.raises(TableError, match=f"{BRONZE}: .*{file.name} is damaged"):
        values(engine)
    [problem] = found(engine)
    assert BRONZE in problem
    assert file.name in problem
    checksum_of(file).unlink()
    assert b"amount: 16" in values(engine), "Parquet says nothing"


def is_of(engine: EmbeddedEngine, file: Path, offset: int) -> bool:
    actions = pa.table(engine.reader.opened(BRONZE).get_add_actions(flatten=True)).to_pylist()
    return any(one["path"] == file.name and one["min.offset"] == offset for one in actions)


def test_what_rewrites_rows_makes_none_of_a_damaged_file(engine: EmbeddedEngine) -> None:
    file = files(engine, SILVER)[0]
    flip(file, 8 * 100)
    schema = engine.lake.schema(SILVER)
    changed = pa.Table.from_pylist([{"status": "open", "merge_key": "k", "partition": 0}], schema)
    at = pa.array([0], pa.timestamp("us", "UTC"))
    for name in ("replaces", "delete_up_to"):
        changed = changed.append_column(name, at)
    before, where = engine.reader.version(SILVER), [[("partition", "=", 0)]]
    rewriting: list[Callable[[], object]] = [
        lambda: engine.merge(SILVER, changed, Commit("a test", 1, 9)),
        lambda: engine.update(SILVER, where, {"valid": True}, Commit("a test", 1, 9)),
        lambda: engine.delete(SILVER, where, Commit("a test", 1, 9)),
        lambda: engine.compact(SILVER, 10**9),
    ]
    for rewrite in rewriting:
        with pytest.raises(TableError, match=f"{SILVER}: .*{file.name} is damaged"):
            rewrite()
    assert engine.reader.version(SILVER) == before


@pytest.mark.parametrize("version", [0, 1, LAST])
def test_a_bit_of_a_commit_is_named_and_nothing_is_moved(
    engine: EmbeddedEngine, version: int
) -> None:
    entry = entry_of(Path(engine.reader.path(SILVER), LOG), version)
    content = entry.read_bytes()
    for byte in range(0, len(content), 97):
        flip(entry, 8 * byte)
        for look in (check_whole, move_aside):
            with pytest.raises(WatersmeetError, match=f"table {SILVER} is damaged: .*{entry.name}"):
                look(engine.lake)
        assert any(entry.name in problem for problem in found(engine))
        flip(entry, 8 * byte)
    assert entry.read_bytes() == content
    assert moved_aside(engine.lake) == found(engine) == []


def test_a_bit_of_a_checkpoint_is_done_without(engine: EmbeddedEngine) -> None:
    log = Path(engine.reader.path(BRONZE), LOG)
    DeltaTable(str(log.parent)).create_checkpoint()
    engine.lake.durable.rely_on([BRONZE])
    [checkpoint], last = log.glob("*.checkpoint.parquet"), log / "_last_checkpoint"
    assert is_sealed(checkpoint)
    flip(last, 8 * 3)
    flip(checkpoint, 8 * (checkpoint.stat().st_size // 2))
    assert checkpoint.name in str(found(engine))
    move_aside(engine.lake)
    assert found(engine) == []
    assert values(EmbeddedEngine(engine.lake)) == [b"amount: 17"] * 3


def test_a_note_of_a_vacuum_that_a_power_cut_has_torn_is_no_damage(engine: EmbeddedEngine) -> None:
    note = Path(engine.reader.path(SILVER), LOG, LAST_VACUUM)
    note.write_text('{"latestCommitVersionOutsideOfRetentionWindow":3}')
    seal([note])
    note.write_bytes(b"")
    assert not is_intact(note)
    assert found(engine) == []


@pytest.mark.parametrize("bit", [1, 8 * 5, 8 * 10])
def test_a_bit_of_a_checksum_names_its_file(engine: EmbeddedEngine, bit: int) -> None:
    file = files(engine, BRONZE)[0]
    flip(checksum_of(file), bit)
    with pytest.raises(TableError, match=file.name):
        values(engine)
    [problem] = found(engine)
    assert file.name in problem


def test_every_file_that_a_commit_adds_has_a_checksum_which_goes_with_it(
    engine: EmbeddedEngine,
) -> None:
    for table in engine.lake.layout:
        log = Path(engine.reader.path(table), LOG)
        assert all(map(is_sealed, [*files(engine, table), *log.glob("0*.json")]))
    before = files(engine, BRONZE)
    engine.compact(BRONZE, 10**9)
    [compacted] = [file for file in files(engine, BRONZE) if file not in before]
    assert is_sealed(compacted)
    assert is_intact(compacted)
    engine.reader.files_of(BRONZE).delete_files(
        engine.reader.path(BRONZE), [file.name for file in before]
    )
    assert files(engine, BRONZE, ".*.crc") == [checksum_of(compacted)]


def test_checksums_of_a_log_go_once_delta_rs_has_deleted_their_files(
    engine: EmbeddedEngine,
) -> None:
    log = Path(engine.reader.path(BRONZE), LOG)
    DeltaTable(str(log.parent)).create_checkpoint()
    entry_of(log, 0).unlink()
    append(engine, BRONZE, LAST + 1, partition=0, offset=9)
    assert not checksum_of(entry_of(log, 0)).exists()
    assert all(is_sealed(entry_of(log, version)) for version in range(1, LAST + 2))


@pytest.mark.parametrize(
    ("said", "file"),
    [
        ("Checksum error: file:/a/silver/status=out/part-1.parquet at 0 exp: 1", "status=out/part"),
        ("Checksum error: file:/a/silver/_delta_log/00000.json at 0 exp: 1 got: 2", LOG),
        ("Not a checksum file: file:/a/lake/silver/.part-1.parquet.crc", ".part-1.parquet.crc"),
        ("CRC32 checksum mismatch for file:///a/silver/deletion_vector_1.bin.", "vector_1.bin"),
    ],
)
def test_what_others_say_of_a_damaged_file_names_table_and_file(
    engine: EmbeddedEngine, said: str, file: str
) -> None:
    naming_it = pytest.raises(TableError, match=f"^silver: the file .*{file}.* is damaged")
    with naming_it, naming(engine.reader, "journal"):
        raise OSError(said)

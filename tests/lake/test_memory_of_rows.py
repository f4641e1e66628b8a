"""Rows that are read are in memory once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.configurations import settings_for
from tests.support.memory import MIB
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake

READ = """
import re, sys
from pathlib import Path
from tests.support.configurations import settings_for
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024
reader = DeltaRsReader(Lake(settings_for(Path(sys.argv[1]))))
reader.rows("bronze_tracking", ["value"], [[("partition", "=", 0)]])
before = peak()
where = [[("key", "=", b"1")]] if "few" in sys.argv else []
print(reader.rows("bronze_tracking", sys.argv[2:4], where).num_rows, peak() - before)
"""
ROWS, ROW_MIB = 12, 16
FILES, FEW = 40, 3_000


def test_rows_are_not_in_memory_twice_while_their_types_become_plain(tmp_path: Path) -> None:
    reader = DeltaRsReader(Lake(settings_for(tmp_path)))
    values = pa.array([b"x" * ROW_MIB * MIB] * (ROWS + 1), pa.binary())
    partitions = pa.array([0] + [1] * ROWS, pa.int32())
    rows = pa.table({"partition": partitions, "value": values})
    for n in range(ROWS + 1):
        write_deltalake(reader.uri("bronze_tracking"), rows.slice(n, 1), mode="append")
    for columns in (["value"], ["value", "partition"]):
        count, mib = read(tmp_path, *columns)
        assert count == ROWS + 1
        assert mib < 1.5 * ROWS * ROW_MIB, f"{columns}: {mib} MiB"


@pytest.mark.promise("C26")
@pytest.mark.fault("memory")
def test_of_rows_that_are_not_asked_for_nothing_stays_in_memory(tmp_path: Path) -> None:
    """Each of forty files has 6 MB, and one row in thirty meets the condition."""
    reader = DeltaRsReader(Lake(settings_for(tmp_path)))
    values = pa.array([b"%08d" % n * 250 for n in range(FEW)], pa.binary())
    keys = pa.array([b"%d" % (n % 30) for n in range(FEW)], pa.binary())
    rows = pa.table({"partition": pa.array([1] * FEW, pa.int32()), "key": keys, "value": values})
    write_deltalake(reader.uri("bronze_tracking"), rows.slice(0, 1), mode="append")
    for _ in range(FILES):
        write_deltalake(reader.uri("bronze_tracking"), rows, mode="append")
    count, mib = read(tmp_path, "value", "partition", "few")
    assert count == FILES * FEW // 30
    assert mib < 60, f"{mib} MiB of {FILES * FEW * 2_000 // MIB}"


def read(lake: Path, *arguments: str) -> tuple[int, int]:
    """Return how many rows were read, and how many MiB this took."""
    command = [sys.executable, "-c", READ, str(lake), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    count, mib = map(int, done.stdout.split())
    return count, mib

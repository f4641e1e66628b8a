"""Rows that are read are in memory once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
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
print(reader.rows("bronze_tracking", ["value"]).num_rows, peak() - before)
"""
ROWS, ROW_MIB = 12, 16


def test_rows_are_not_in_memory_twice_while_their_types_become_plain(tmp_path: Path) -> None:
    reader = DeltaRsReader(Lake(settings_for(tmp_path)))
    values = pa.array([b"x" * ROW_MIB * MIB] * (ROWS + 1), pa.binary())
    partitions = pa.array([0] + [1] * ROWS, pa.int32())
    rows = pa.table({"partition": partitions, "value": values})
    for n in range(ROWS + 1):
        write_deltalake(reader.uri("bronze_tracking"), rows.slice(n, 1), mode="append")
    command = [sys.executable, "-c", READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    count, mib = map(int, done.stdout.split())
    assert count == ROWS + 1
    assert mib < 1.5 * ROWS * ROW_MIB, f"{mib} MiB"

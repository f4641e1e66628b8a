"""Open rows that are written anew a chunk at a time are in memory a chunk at a time, and what is
merged with them not several times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tests.core.test_merge import a_batch, records_of
from tests.support.configurations import settings_for
from tests.support.memory import MIB, arrow_peak
from watersmeet.core.merge import merge
from watersmeet.engine import SilverRows
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.expressions.publish import Expressions
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing
from watersmeet.running.merge_functions import MergeFunctions

ROWS = 6


class Nothing:
    """Nothing follows from a batch."""

    keys = None

    def see(self, rows: pa.Table) -> None:
        raise AssertionError(f"{rows.num_rows} rows are not asked for")

    def rows(self) -> Iterator[pa.Table]:
        return iter(())


MERGE = """
import re, sys
from pathlib import Path
from tests.core.test_merge import a_batch, records_of
from tests.support.configurations import settings_for
from watersmeet.core.merge import merge
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing
def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) // 1024
engine = EmbeddedEngine(Lake(settings_for(Path(sys.argv[1]))))
create_missing(engine)
records = records_of(*[("tracking", n, f"a{n}", 50, b"x" * 2**25) for n in range(6)])
rows = merge(records, engine.lake.schema(tables.SILVER).empty_table(), a_batch(50, 6))
rows = rows.cast(a_batch(50, 6).changed_schema())
engine.merge(tables.SILVER, rows.slice(0, 1), Commit("test", 0, 1))
before = peak()
engine.merge(tables.SILVER, rows.slice(1), Commit("test", 0, 2))
print(engine.reader.rows(tables.SILVER, ["merge_key"]).num_rows, peak() - before)
"""


def test_of_the_open_rows_that_a_batch_rewrites_one_chunk_is_in_memory(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    engine = EmbeddedEngine(Lake(settings))
    engine.merge_bytes = 1  # a row is a chunk
    create_missing(engine)
    nothing = engine.lake.schema(tables.SILVER).empty_table()
    first = [("tracking", n, f"a{n}", 50, b"x" * 4 * MIB) for n in range(ROWS)]
    opened = merge(records_of(*first), nothing, a_batch(50, ROWS)).select(nothing.column_names)
    engine.append(tables.SILVER, opened.cast(nothing.schema))
    del opened
    second = records_of(*[("orders", n, f"a{n}", 60, b"y") for n in range(ROWS)])
    batch = a_batch(60, ROWS)
    functions = MergeFunctions(batch, Expressions.of(settings), ["records"])
    unfinished = SilverRows(["open", "waiting"], ROWS * 4 * MIB)
    schema = batch.changed_schema()
    commit = Commit("test", 0, 1)
    with arrow_peak() as peak:
        assert engine.merge_in_chunks(
            unfinished, functions.merge_in_chunks, [second], schema, commit, Nothing()
        )
        assert peak() < 10 * MIB
    rows = engine.reader.rows(tables.SILVER, ["tracking", "orders"])
    parts = [[len(row) for row in rows[name].to_pylist()] for name in rows.column_names]
    assert parts == [[1] * ROWS] * 2


def test_rows_that_take_much_memory_are_merged_without_several_times_as_much(
    tmp_path: Path,
) -> None:
    """160 MiB of them."""
    command = [sys.executable, "-c", MERGE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    count, mib = map(int, done.stdout.split())
    assert count == ROWS
    assert mib < 200, f"{mib} MiB"

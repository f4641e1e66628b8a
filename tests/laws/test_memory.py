"""What a command needs of memory does not grow with the lake."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.memory import MIB, peak_mib_of
from tests.support.rivers import River
from tests.support.topics import produce
from watersmeet.lake import tables
from watersmeet.lake.maintenance import FILE_BYTES

SMALL_BOUNDS = (
    sys.executable,
    "-c",
    "from watersmeet.kafka import reading; from watersmeet.lake import pieces; "
    "reading.BATCH_BYTES = pieces.PIECE_BYTES = pieces.CHUNK_BYTES = 2**21; "
    "from watersmeet.cli import main; main()",
)
"""A program whose pieces are small beside the smaller lake, as are its batches and queues."""

TIMES = 10
"""How many times as large the larger lake is."""
ROUND = 2_000
VALUE_BYTES = 2_000
PARTITIONS = 2
FORMER_TRANSACTIONS = 20_000
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("explain", "k1001"),
    ("validate",),
    ("verify", "--full"),
    ("rebuild", "--into", "again"),
    ("verify", "--against", "again"),
    ("redrive", "--reason", "undecodable"),
    ("reset", "--to", "earliest"),
    ("maintain",),
    ("run", "--once"),
    ("redrive", "--reason", "undecodable", "--apply"),
    ("run", "--once"),
    ("reset", "--to", "earliest", "--yes"),
)
"""The first run has nothing to do; the second one has what was redriven, and a batch of its own."""
ALLOWED_MIB = {"maintain": FILE_BYTES // MIB}
"""What it may take besides: only the larger lake has files that it rewrites into larger ones."""


@pytest.mark.promise("C26")
@pytest.mark.fault("memory")
@pytest.mark.long
def test_a_command_takes_no_more_memory_on_a_lake_that_is_ten_times_as_large(
    kafka: str, tmp_path: Path
) -> None:
    """Records and their values, merge records, late and refused ones, corrections, batches and
    transactions."""
    small, large = (filled(kafka, tmp_path, rounds) for rounds in (1, TIMES))
    grown = list[str]()
    for number, command in enumerate(COMMANDS):
        if number == len(COMMANDS) - 2:
            for river in (small, large):
                send(river, TIMES, 100)
        before, after = peak_mib(small, command), peak_mib(large, command)
        if after > 1.15 * before + 16 + ALLOWED_MIB.get(command[0], 0):
            grown.append(f"{' '.join(command)}: {before:.0f} and {after:.0f} MiB")
    assert not grown, grown


def filled(kafka: str, folder: Path, rounds: int) -> River:
    """A lake of so many batches of the same size, whose files are as large as those of another."""
    name = f"memory-{rounds}"
    corrections = {"topic": f"{name}-corrections", "within": "1h"}
    river = River.make(
        kafka,
        folder / name,
        name,
        partitions=PARTITIONS,
        publish__corrections=corrections,
        kafka__options={"queued.max.messages.kbytes": 2048},
        merge__max_records_per_batch=2 * (ROUND + PARTITIONS),
    )
    for number in range(rounds):
        send(river, number, ROUND)
        peak_mib(river, ("run", "--once"))
    columns = river.reader.columns(tables.PUBLISHED).names
    last = river.reader.rows(tables.PUBLISHED, columns).slice(0, 1)
    count = FORMER_TRANSACTIONS * rounds
    former = last.take(pa.array([0] * count)).set_column(
        columns.index("last_seq"), "last_seq", pa.array(range(-count, 0), pa.int64())
    )
    write_deltalake(river.reader.uri(tables.PUBLISHED), former, mode="append")
    return river


def send(river: River, number: int, records: int) -> None:
    """One in 25 records is late, and another one is refused."""
    rng = random.Random(number)
    first = number * ROUND
    for source in SOURCES:
        values: list[tuple[int, bytes | None]] = []
        for n in range(first, first + records):
            text = rng.randbytes(VALUE_BYTES // 8).hex() * 4
            value = keyed(f"k{n}", max(0, 10 * n - (10_000 if n % 25 == 7 else 0)), text=text)
            values.append((n % PARTITIONS, b"{" + value if n % 25 == 13 else value))
        values += [(p, heartbeat(10 * (first + records))) for p in range(PARTITIONS)]
        produce(river.kafka, river.topic(source), values, codec="zstd")


def peak_mib(river: River, command: tuple[str, ...]) -> float:
    with (river.folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [*SMALL_BOUNDS, *command, "-c", str(river.file)],
            stdout=out,
            stderr=out,
            cwd=river.folder,
        )
        peak = peak_mib_of(process)
    assert process.returncode == 0, (command, (river.folder / "out").read_text())
    return peak

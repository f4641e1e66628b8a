"""Batches fit into memory, whatever shape the data has, and nothing else depends on how they are cut."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pipelines.core.plan import BatchPlan
from pipelines.lake import tables
from pipelines.lake.questions import ROW_BYTES, Where
from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeLake, one_of
from tests.support.cases import SOURCES, expected_late, expected_silver, keyed, rich_cases
from tests.support.lakes import CaseLake
from tests.support.rivers import WATERSMEET, River
from tests.support.topics import produce

kind = one_of([QUICK, SPARK_FOLDER])

pytestmark = pytest.mark.promise("C24")


def bytes_of(lake: CaseLake, plan: BatchPlan) -> tuple[int, int]:
    """How many bytes the values of a batch's records have in memory, and of how many records of one topic-partition."""
    sizes = []
    for tp, done in plan.ranges.items():
        values = lake.cases[tp.partition].values[tp.source][done.from_offset : done.until_offset]
        sizes.append([len(value or b"") + ROW_BYTES for value in values])
    return sum(map(sum, sizes)), max(map(len, sizes))


def test_a_batch_fits_into_memory_and_the_result_is_the_models(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where open rows do not: then a batch reads those alone that it may change."""
    lake = new_lake(rich_cases(2, 1656, wealth="late"))
    limit = 700 if kind == QUICK else 10_000
    asked: list[Where] = []
    read = lake.engine.read

    def noting(table: str, columns: list[str], where: Where = (), **more: object) -> object:
        if table == tables.SILVER:
            asked.append(where)
        return read(table, columns, where, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(lake.engine, "merge_bytes", limit)
    monkeypatch.setattr(lake.engine, "read", noting)
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert len(lake.plans) > 3
    for plan in lake.plans:
        size, most = bytes_of(lake, plan)
        assert size <= limit or most == 1
    if kind == QUICK:
        assert any("merge_key" in [column for column, *_ in term] for where in asked for term in where)


def test_a_merge_record_says_how_many_bytes_its_records_have(new_lake: MakeLake, kind: str) -> None:
    lake = new_lake(rich_cases(3, 1656, wealth="late"))
    for share in (0.3, 0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    rows = lake.questions.select(tables.SILVER, ["record_bytes", *SOURCES]).to_pylist()
    assert len(rows) > 20
    for row in rows:
        assert row["record_bytes"] == sum(len(part["value"].encode()) for source in SOURCES for part in row[source])


@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_run_with_few_large_records_takes_no_more_memory_than_one_with_many_small_ones(
    kafka: str, tmp_path: Path, kind: str
) -> None:
    """Six hundred megabytes that Kafka and the tables pack into seven."""
    river = River.make(kafka, tmp_path, "few-large", partitions=2, merge__timeout="1h")
    values = [(n % 2, keyed(f"k{n}", n, text="the same sentence again " * 12_500)) for n in range(1_000)]
    for source in SOURCES:
        for begin in range(0, len(values), 100):
            produce(kafka, river.topic(source), values[begin : begin + 100], codec="zstd")
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen([*WATERSMEET, "run", "--once", "-c", str(river.file)], stdout=out, stderr=out)
        _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (tmp_path / "out").read_text()
    assert usage.ru_maxrss < 1.5 * 1024 * 1024, f"{usage.ru_maxrss / 1024:.0f} MiB"

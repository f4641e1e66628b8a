"""A lake that two engines write in turns is the lake that each of them would have written alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.cases import expected_late, expected_silver, random_case, rich_cases
from tests.support.configurations import settings_for
from tests.support.crashes import CrashError, dying_at
from tests.support.effort import first_then_nightly
from tests.support.lakes import CaseLake
from tests.support.rewrites import rewrite_open_records, rewrites_of
from watersmeet.engine import Engine, Selection
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.lake.maintenance import FILE_BYTES

SHARES = (0.3, 0.7, 1.0)


@pytest.mark.promise("R11")
@pytest.mark.fault("engines", "kill", oracle=True)
@pytest.mark.long
@pytest.mark.parametrize("first", first_then_nightly(["spark", "embedded"]))
def test_engines_take_turns_batch_by_batch_and_crash_by_crash(
    root_session: SparkSession, tmp_path: Path, first: str
) -> None:
    settings = settings_for(tmp_path, lake=str(tmp_path / "lake"))
    spark = SparkEngine(root_session, Lake(settings))
    embedded = EmbeddedEngine(Lake(settings))
    turns: list[Engine] = [spark, embedded] if first == "spark" else [embedded, spark]
    lake = CaseLake(
        turns[0], settings, {p: random_case(seed, 100) for p, seed in enumerate((3, 14, 15, 92))}
    )
    for turn, share in enumerate(SHARES):
        lake.engine = turns[turn % 2]
        lake.token += 1
        lake.arrive(share, lake.engine)
        dying = dying_at(lake.engine, "merge", tables.SILVER, after=bool(turn % 2), times=1)
        with pytest.raises(CrashError):
            list(lake.start(engine=dying).drain())
        lake.engine = turns[(turn + 1) % 2]
        lake.token += 1
        lake.merge()
        for name in (tables.SILVER, tables.bronze("tracking")):
            lake.engine.compact(name, FILE_BYTES)
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert spark.reader.version(tables.SILVER) == embedded.reader.version(tables.SILVER)


@pytest.mark.promise("C24")
@pytest.mark.fault("engines", "memory")
@pytest.mark.nightly
def test_spark_goes_on_with_open_records_that_were_written_anew(
    root_session: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(tmp_path, lake=str(tmp_path / "lake"))
    spark = SparkEngine(root_session, Lake(settings))
    embedded = EmbeddedEngine(Lake(settings))
    lake = CaseLake(embedded, settings, rich_cases(4, 1656, wealth="late"))
    rewrite_open_records(monkeypatch)
    rewrites = []
    for share, engine in ((0.5, embedded), (0.75, spark), (1.0, embedded)):
        lake.engine = engine
        lake.token += 1
        lake.arrive(share)
        lake.merge()
        rewrites.append(rewrites_of(settings))
        if engine is spark:
            embedded.purge(tables.SILVER)  # its deletion vectors; with them, delta-rs merges
    assert 0 < rewrites[0] == rewrites[1] < rewrites[2]
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert spark.collect(spark.read(Selection(tables.SILVER, ["batch"]))).num_rows == len(
        lake.silver()
    )

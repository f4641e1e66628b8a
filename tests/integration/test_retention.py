"""Rows that end, as an operator sees it: `maintain` deletes them, and every command goes on from
what is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cases import SOURCES, expected_messages
from tests.support.commands import here
from tests.support.rivers import River
from tests.support.topics import produce, published
from watersmeet.dev.demo import events
from watersmeet.lake import tables
from watersmeet.lake.maintenance import FEW_FILES, maintain
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running.owner import kept_by

pytestmark = [pytest.mark.long, pytest.mark.promise("C10"), pytest.mark.fault("retention")]

KEEP = {"bronze": "1500ms", "silver": "2500ms", "late": "1500ms", "quarantine": "1s"}
WEEKS = 12
EVERY_TABLE = [*map(tables.bronze, SOURCES), tables.SILVER, tables.LATE]


def counts(river: River) -> dict[str, int]:
    return {
        name: river.reader.summary(name, [], {"n": ("count", "*")})["n"][0].as_py()
        for name in EVERY_TABLE
    }


@pytest.mark.nightly
def test_a_lake_stays_small_and_keeps_every_promise(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "rows-that-end", keep=KEEP)
    for _ in range(4):
        river.flow()
        river.finish()
    before, version = counts(river), river.reader.version(tables.SILVER)
    here(river, "maintain")
    after = counts(river)
    assert all(after[name] < before[name] for name in EVERY_TABLE), (before, after)
    assert river.broken_promises() == []
    assert json.loads(here(river, "status", "--json"))["partitions"]
    known = river.reader.select(tables.SILVER, ["merge_key"], version=version)
    assert known.num_rows == before[tables.SILVER], "time travel within the retention stays"

    for _ in range(2):
        river.flow()
        river.finish()
        here(river, "maintain")
    assert sum(counts(river).values()) < 1.5 * sum(after.values()), "it does not grow any more"
    assert river.broken_promises() == []
    messages = published(kafka, river.sink, river.partitions)
    assert sorted(messages) == sorted(expected_messages(river.cases))
    told = json.loads(here(river, "explain", "a", "--json"))
    assert all(record["parts"] for record in told["records"])
    assert here(river, "explain", "a")
    here(river, "rebuild", "--into", "again")
    river.flow()
    river.finish()
    assert here(river, "verify", "--against", "again")
    assert here(river, "report", "--out", "page.html")


@pytest.mark.nightly
def test_the_demos_lake_kept_at_a_week_levels_off_in_bytes_and_files(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(
        kafka,
        tmp_path,
        "demo-kept",
        keep=dict.fromkeys(("bronze", "silver", "late", "quarantine"), "7d"),
    )
    for source in SOURCES:
        river.config["sources"][source]["key"] = "ssid"
    river.config["merge"]["timeout"] = "30m"
    river.write()
    # So that old versions take no room.
    settings = river.settings.model_copy(update={"retention_ms": 1})
    names = [name for layer in LAYERS for name in kept_by(layer, settings)]
    every, sizes = events(), list[tuple[int, int]]()
    week_ms, begin = 7 * 86_400_000, every[0].time
    for week in range(WEEKS):
        lap, of_lap = divmod(week, 4)
        for source in SOURCES:
            mine = [e for e in every if e.topic == source and (e.time - begin) // week_ms == of_lap]
            shift = lap * 4 * week_ms
            records = [
                (e.partition, json.dumps({**e.value, "ts": e.time + shift}).encode()) for e in mine
            ]
            produce(kafka, river.config["sources"][source]["topic"], records)
        Run(settings, LAYERS, Reporter()).once()
        with Run(settings, LAYERS, Reporter()).take_layers() as owned:
            maintain(owned.owner.engine, names, owned.expire)
            files = {name: owned.owner.engine.reader.file_count(name) for name in names}
        # Of the lease a few more are written while tables are compacted.
        assert max(files.values()) < 2 * FEW_FILES, files
        # The others grow by a small file a commit, up to the limit above, and are then compacted.
        on_disk = [
            file.stat().st_size
            for name in (tables.SILVER, *map(tables.bronze, SOURCES))
            for file in (tmp_path / "lake" / name).rglob("*.parquet")
        ]
        sizes.append((sum(counts(river).values()), sum(on_disk)))
    (_, size), *later = sizes[4:]
    assert max(there for _, there in later) < 1.5 * size, sizes
    assert max(rows for rows, _ in later) < 2 * sizes[0][0]
    assert river.broken_promises() == []

"""Rows that end, as an operator sees it: `maintain` deletes them, and every command goes on from what is left."""

from __future__ import annotations

import json
from pathlib import Path

from pipelines.lake import tables
from tests.support.cases import SOURCES, expected_messages
from tests.support.commands import without_java
from tests.support.rivers import River
from tests.support.topics import published

KEEP = {"bronze": "1500ms", "silver": "2500ms", "late": "1500ms", "quarantine": "1s"}
EVERY_TABLE = [*map(tables.bronze, SOURCES), tables.SILVER, tables.LATE]


def counts(river: River) -> dict[str, int]:
    return {name: river.questions.summary(name, [], {"n": ("count", "*")})["n"][0].as_py() for name in EVERY_TABLE}


def test_a_lake_stays_small_and_keeps_every_promise(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "rows-that-end", keep=KEEP)
    for _ in range(4):
        river.flow()
        river.finish()
    before, version = counts(river), river.questions.version(tables.SILVER)
    without_java(river, "maintain")
    after = counts(river)
    assert all(after[name] < before[name] for name in EVERY_TABLE), (before, after)
    assert river.broken_promises() == []
    assert json.loads(without_java(river, "status", "--json"))["partitions"]
    known = river.questions.select(tables.SILVER, ["merge_key"], version=version)
    assert known.num_rows == before[tables.SILVER], "time travel within the retention stays"

    for _ in range(2):
        river.flow()
        river.finish()
        without_java(river, "maintain")
    assert sum(counts(river).values()) < 1.5 * sum(after.values()), "it does not grow any more"
    assert river.broken_promises() == []
    messages = published(kafka, river.sink, river.partitions)
    assert sorted(messages) == sorted(expected_messages(river.cases))
    told = json.loads(without_java(river, "explain", "a", "--json"))
    assert all(record["parts"] for record in told["records"])
    assert without_java(river, "explain", "a")
    without_java(river, "rebuild", "--into", "again")
    river.flow()
    river.finish()
    assert without_java(river, "verify", "--against", "again")
    assert without_java(river, "report", "--out", "page.html")

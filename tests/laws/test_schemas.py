"""A field may have any name that Delta takes, and values may be maps; silver and messages hold them
as they are. What waits while its schema gains a field is null there where it does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from tests.laws.conftest import QUICK, MakeLake
from tests.support.cases import Case, heartbeat, keyed
from tests.support.lakes import as_tuples
from watersmeet.core.message import message_values
from watersmeet.engine import Selection
from watersmeet.lake import tables
from watersmeet.lake.identity import begin_epoch

NAMES = [
    "a.b",
    "é",
    "select",
    "x-y",
    "1a",
    "`tick`",
    "timestamp",
    "offset",
    "value",
    "ORDER",
    'quo"te',
    "a'b",
    "\\",
    "日本",
    "kept",
]


def test_any_name_and_maps_reach_silver_and_the_message(new_lake: MakeLake, tmp_path: Path) -> None:
    numbers = {"type": "object", "additionalProperties": {"type": ["integer", "null"]}}
    inner = {name: {"type": "integer"} for name in NAMES}
    properties = {
        "ts": {"type": "integer"},
        "k": {"type": "string"},
        "in": {"type": "object", "properties": inner},
        "map": numbers,
    }
    (tmp_path / "x.json").write_text(
        json.dumps({"type": "object", "properties": properties | inner})
    )
    named = {name: number for number, name in enumerate(NAMES)}
    values: list[bytes | None] = [
        keyed("a", t, **{**named, "in": named, "map": {"z": t, "a.b": None, "": 1}})
        for t in (10, 20)
    ]
    case = Case(
        {"tracking": [*values, heartbeat(500)], "orders": [heartbeat(500)]},
        100,
        ["tracking"] * 3 + ["orders"],
    )
    lake = new_lake({0: case}, sources__tracking__schema=str(tmp_path / "x.json"))
    for share in (0.3, 1.0):  # a row that is there already, and one that takes its place
        lake.arrive(share, lake.engine)
        lake.merge()
    rows = lake.reader.select(tables.MERGED, ["merge_key", "tracking"])
    [(key, parts)] = as_tuples(rows)
    assert key == "a"
    kept = [value for _, _, value in parts]  # type: ignore[attr-defined]
    assert kept == [
        {"ts": t, "k": "a", "in": named, "map": [("z", t), ("a.b", None), ("", 1)], **named}
        for t in (10, 20)
    ]
    columns = ["merge_key", "event_time", "last_event_time", "tenant", "tracking"]
    found = lake.engine.collect(lake.engine.read(Selection(tables.MERGED, columns)))
    [message] = message_values(found, ["tracking"]).to_pylist()
    assert orjson.loads(message)["tracking"] == [
        {**value, "map": dict(value["map"])} for value in kept
    ]


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_what_waited_while_its_schema_gained_fields_is_the_same_however_it_is_cut(
    new_lake: MakeLake, tmp_path: Path
) -> None:
    properties = {"ts": {"type": "integer"}, "k": {"type": "string"}}
    gained = {
        "tags": {"type": "array", "items": {"type": "string"}},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "count": {"type": "integer"},
    }
    (tmp_path / "old.json").write_text(json.dumps({"type": "object", "properties": properties}))
    after = json.dumps({"type": "object", "properties": properties | gained})
    waits = [
        keyed("a", 10, tags="ab", map=[], count=2.5),
        keyed("b", 20, count="many"),
        keyed("c", 30, tags=["x"], map={"m": 1.0}, count=2.0),
        heartbeat(500),
    ]
    nothing = dict.fromkeys(gained)
    for records in (1, 2, 1_000):
        case = Case(
            {"tracking": [*waits], "orders": [heartbeat(500)]}, 100, ["tracking"] * 4 + ["orders"]
        )
        lake = new_lake(
            {0: case},
            sources__tracking__schema=str(tmp_path / "old.json"),
            merge__max_records_per_batch=records,
        )
        begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
        lake.arrive(4 / 5)
        lake.merge()
        lake.change_rules({"sources.tracking.schema": after})
        lake.arrive(1.0)
        lake.merge()
        rows = as_tuples(lake.reader.select(tables.MERGED, ["merge_key", "tracking"]))
        assert sorted(rows, key=str) == [
            ("a", ((0, 10, {"ts": 10, "k": "a", **nothing}),)),
            ("b", ((1, 20, {"ts": 20, "k": "b", **nothing}),)),
            ("c", ((2, 30, {"ts": 30, "k": "c", "tags": ["x"], "map": [("m", 1)], "count": 2}),)),
        ]

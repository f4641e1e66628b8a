"""Values and messages are what they have always been: recorded from Spark, whose functions `core`
has replaced."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from watersmeet.core.json_schema import value_schema
from watersmeet.core.message import message_values
from watersmeet.core.types import TIME, columns_ddl
from watersmeet.core.values import json_texts, typed_values

GOLDEN = Path(__file__).parents[1] / "golden"
SOURCES = ("tracking", "orders", "carts")


def lines(name: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, gzip.decompress((GOLDEN / name).read_bytes()).splitlines())


@cache
def recorded_values() -> dict[str, list[dict[str, Any]]]:
    """By schema its first line (the schema itself), then its values."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines("values.jsonl.gz"):
        found.setdefault(line["schema"], []).append(line)
    return found


@pytest.fixture(scope="module")
def value_types(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.DataType]:
    """What the recorded schemas make of a value, and `STRING`: a source without one."""
    types: dict[str, pa.DataType] = {"STRING": pa.string()}
    for name, (schema, *_) in recorded_values().items():
        file = tmp_path_factory.mktemp("schemas") / f"{name}.json"
        file.write_text(json.dumps(schema["document"]))
        loaded = value_schema(file.read_bytes(), file)
        assert f"STRUCT<{columns_ddl(loaded.type)}>" == schema["ddl"]
        types[name] = loaded.type
    return types


def as_bytes(texts: Sequence[str]) -> pa.Array:
    return pa.array([text.encode() for text in texts], pa.binary())


@pytest.mark.parametrize("schema", ["all", "names", "n", "d", "orders"])
def test_a_value_has_the_fields_and_the_json_that_it_ever_had(
    value_types: dict[str, pa.DataType], schema: str
) -> None:
    """Where Java 17 spelled a double with more digits than it needs, the text of Java 19 and later
    counts."""
    _, *values = recorded_values()[schema]
    found = typed_values(as_bytes([value["value"] for value in values]), value_types[schema])
    for row, text, value in zip(
        found.to_pylist(), json_texts(found).to_pylist(), values, strict=True
    ):
        assert repr(row) == repr(value["parsed"]), value["value"]  # repr, since -0.0 equals 0.0
        assert text == value["json"], value["value"]
        if "jdk17" in value:
            assert json.loads(value["jdk17"]) == json.loads(text)
            assert len(value["jdk17"]) >= len(text)


@pytest.mark.promise("R8")
def test_a_message_has_the_bytes_that_it_ever_had(value_types: dict[str, pa.DataType]) -> None:
    rows = list(lines("messages.jsonl.gz"))
    kinds = {json.dumps(row["kinds"]): row["kinds"] for row in rows}
    assert len(kinds) == 3
    for kind in kinds.values():
        mine = [row for row in rows if row["kinds"] == kind]
        table = silver(
            [(r["key"], r["event_time"], r["last_event_time"], r["values"]) for r in mine],
            [value_types[kind[s]] for s in SOURCES],
        )
        for value, row in zip(message_values(table, SOURCES).to_pylist(), mine, strict=True):
            assert value.decode() == row["message"]


def silver(
    rows: Sequence[tuple[str, int, int, Sequence[Sequence[str]]]],
    value_types: Sequence[pa.DataType],
) -> pa.Table:
    """Rows of silver of (key, first and last event time in ms, by source the JSON of its
    values)."""
    keys, first, last, values = zip(*rows, strict=True)
    times = {"event_time": first, "last_event_time": last}
    columns = {"merge_key": pa.array(keys, pa.string()), "tenant": pa.array([""] * len(keys))}
    columns |= {
        name: pa.array([time * 1000 for time in ms], pa.int64()).cast(TIME)
        for name, ms in times.items()
    }
    for index, (source, kind) in enumerate(zip(SOURCES, value_types, strict=True)):
        of_rows = [row[index] for row in values]
        flat = typed_values(as_bytes([text for texts in of_rows for text in texts]), kind)
        parts = pa.StructArray.from_arrays(
            [pa.array(range(len(flat)), pa.int64()), pa.nulls(len(flat), TIME), flat],
            ["offset", "event_time", "value"],
        )
        offsets = [0]
        for texts in of_rows:
            offsets.append(offsets[-1] + len(texts))
        columns[source] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), parts)
    return pa.table(columns)

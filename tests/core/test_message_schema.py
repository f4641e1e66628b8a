"""Whatever is published fits the schema of its messages, and what is not published does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pyarrow as pa
import pytest
from hypothesis import given

from tests.support.avro import as_text, encoded, schemas_with_values
from tests.support.effort import draws
from watersmeet.core.avro_schema import avro_schema
from watersmeet.core.json_schema import value_schema
from watersmeet.core.merge import silver_schema
from watersmeet.core.message import message_values
from watersmeet.core.message_schema import message_schema

AT = 1_767_225_600_000_000


def message(kinds: dict[str, pa.DataType], values: dict[str, list[Any]], tenant: str = "") -> bytes:
    parts = {
        source: [[{"offset": 0, "event_time": AT, "value": value} for value in mine]]
        for source, mine in values.items()
    }
    row = {
        "merge_key": ["a"],
        "event_time": [AT],
        "last_event_time": [AT + 1000],
        **parts,
        "tenant": [tenant],
    }
    schema = pa.schema([field for field in silver_schema(kinds) if field.name in row])
    [found] = message_values(pa.table(row, schema=schema), [*kinds]).to_pylist()
    assert isinstance(found, bytes)
    return found


@draws(50)
@given(drawn=schemas_with_values())
def test_every_value_of_every_schema_is_published_as_its_schema_says(
    drawn: tuple[Any, list[Any]],
) -> None:
    schema, values = drawn
    found = avro_schema(as_text(schema), Path("x.avsc"))
    decoded = [found.decoder()(encoded(schema, value)) for value in values]
    written = message(
        {"tracking": found.type, "orders": pa.string()},
        {"tracking": decoded, "orders": ['{"any":[1]}']},
    )
    described = message_schema({"tracking": found, "orders": None})
    jsonschema_rs.validator_for(described, validate_formats=True).validate(json.loads(written))


def test_numbers_that_json_lacks_are_described_for_avro_alone() -> None:
    fields = [{"name": "d", "type": "double"}]
    found = avro_schema(as_text({"type": "record", "name": "R", "fields": fields}), Path("x.avsc"))
    value = json.loads(
        message({"tracking": found.type}, {"tracking": [{"d": float("nan")}, {"d": -float("inf")}]})
    )
    assert value["tracking"] == [{"d": "NaN"}, {"d": "-Infinity"}]
    jsonschema_rs.validate(message_schema({"tracking": found}), value)
    as_json = value_schema(
        b'{"type": "object", "properties": {"d": {"type": "number"}}}', Path("x.json")
    )
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(message_schema({"tracking": as_json}), value)


@pytest.mark.parametrize(
    "change",
    [
        {"key": 1},
        {"event_time": -1},
        {"event_time": "2026"},
        {"orders": None},
        {"orders": [None]},
        {"orders": [{"n": "x"}]},
        {"orders": [{}]},
    ],
)
def test_what_is_never_published_does_not_fit(change: dict[str, Any]) -> None:
    orders = value_schema(
        b'{"type": "object", "properties": {"n": {"type": "integer"}}}', Path("x.json")
    )
    described = jsonschema_rs.validator_for(message_schema({"orders": orders}))
    fits = {
        "key": "a",
        "event_time": 1,
        "last_event_time": 2,
        "orders": [{"n": 1}, {"n": None, "later": True}],
    }
    assert described.is_valid(fits)
    assert not described.is_valid(fits | change)
    assert not any(
        described.is_valid({name: each for name, each in fits.items() if name != missing})
        for missing in fits
    )

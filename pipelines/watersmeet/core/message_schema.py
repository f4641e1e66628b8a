"""JSON Schema of the messages that are published without an expression of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.types import TIME

_TIME_MS: Final = {"type": "integer", "minimum": 0}
_NO_NUMBERS: Final = ["NaN", "Infinity", "-Infinity"]


def message_schema(
    schemas: Mapping[str, ValueSchema | AvroSchema | None],
) -> dict[str, Any]:
    """Return the JSON Schema of a message; `schemas`: that of values by source, in order, or None.

    It is open: a field that a source gains later does not make a message invalid.
    """
    own: dict[str, Any] = {
        "key": {"description": "What the records have in common.", "type": "string"},
        "event_time": {
            "description": "The smallest event time of the records, in ms since the epoch.",
            **_TIME_MS,
        },
        "last_event_time": {
            "description": "The largest event time of the records, in ms since the epoch.",
            **_TIME_MS,
        },
    }
    for source, schema in schemas.items():
        is_avro = isinstance(schema, AvroSchema)
        value = _part(schema.type, is_avro=is_avro) if schema else {}
        own[source] = {
            "description": f"The values of {source}, by event time and offset.",
            "type": "array",
            "items": {**value, "type": "object"},
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Merge record",
        "description": "The records of one key that belong together.",
        "type": "object",
        "properties": own,
        "required": [*own],
    }


def _part(kind: pa.DataType, *, is_avro: bool) -> dict[str, Any]:
    if pa.types.is_struct(kind):
        fields = {field.name: _part(field.type, is_avro=is_avro) for field in kind}
        return {"type": ["object", "null"], "properties": fields, "required": [*fields]}
    if pa.types.is_list(kind):
        return {"type": ["array", "null"], "items": _part(kind.value_type, is_avro=is_avro)}
    if pa.types.is_map(kind):
        values = _part(kind.item_type, is_avro=is_avro)
        return {"type": ["object", "null"], "additionalProperties": values}
    if pa.types.is_floating(kind) and is_avro:
        return {"anyOf": [{"type": ["number", "null"]}, {"enum": _NO_NUMBERS}]}
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return {"type": ["number", "null"]}
    if pa.types.is_integer(kind):
        return {"type": ["integer", "null"]}
    if pa.types.is_boolean(kind):
        return {"type": ["boolean", "null"]}
    if kind == TIME:
        return {"type": ["string", "null"], "format": "date-time"}
    if pa.types.is_date32(kind):
        return {"type": ["string", "null"], "format": "date"}
    return {
        "type": ["string", "null"],
        **({"contentEncoding": "base64"} if pa.types.is_binary(kind) else {}),
    }

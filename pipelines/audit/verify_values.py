"""What silver should keep of a record's value, worked out without the code that `verify` checks."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa

from pipelines.core.json_exact import exact, is_exact


def as_kept(value: Any, read: pa.DataType, kept: pa.DataType) -> bytes:
    """What silver keeps of a record's value (bytes of JSON, or the fields that were decoded): its text, or the fields of the
    schema by which it was read, as JSON; those of other schemas, which silver's column has too, are null.
    """
    if not pa.types.is_struct(kept):
        return bytes(value)
    if not isinstance(value, bytes):
        return packed(pa.scalar(pa.scalar(value, read).as_py(), kept).as_py())
    return packed(_field(_field(json.loads(value, parse_float=Decimal), read), kept))


def _field(value: Any, kind: pa.DataType) -> Any:
    """The fields of a type; null where a value has none, or another that a schema before this one let pass."""
    if pa.types.is_struct(kind):
        return {field.name: _field(value.get(field.name), field.type) for field in kind} if isinstance(value, dict) else None
    if pa.types.is_list(kind):
        return [_field(each, kind.value_type) for each in value] if isinstance(value, list) else None
    if pa.types.is_map(kind):  # as Arrow has it: pairs
        pairs = value.items() if isinstance(value, dict) else value if isinstance(value, tuple) else None
        return None if pairs is None else tuple((name, _field(each, kind.item_type)) for name, each in pairs)
    if is_exact(kind):
        with suppress(ValueError):
            return value if isinstance(value, date) else exact(value, kind)
        return None
    if pa.types.is_integer(kind):
        return int(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else None
    if pa.types.is_floating(kind):
        return float(value) if isinstance(value, (int, float, Decimal)) else None
    return value if isinstance(value, bool if pa.types.is_boolean(kind) else str) else None


def packed(value: Any) -> bytes:
    """A value of a column as text: what JSON has no type for as Python writes it."""
    return orjson.dumps(value, default=str)

"""What silver should keep of a record's value, worked out without the code that `verify` checks."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa


def as_kept(value: bytes, kind: pa.DataType) -> bytes:
    """What silver keeps of a record's value: its text, or the fields of a schema, as JSON."""
    if not pa.types.is_struct(kind):
        return value
    return orjson.dumps(_field(json.loads(value, parse_float=Decimal), kind))


def _field(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _field(value.get(field.name), field.type) for field in kind}
    if pa.types.is_list(kind):
        return [_field(each, kind.value_type) for each in value]
    return int(value) if pa.types.is_integer(kind) else float(value) if pa.types.is_floating(kind) else value

"""The value that silver should keep of a record, derived without the code that `verify` checks."""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pyarrow as pa

from watersmeet.audit.comparison import packed


def as_kept(value: Any, read: pa.DataType, kept: pa.DataType) -> bytes:
    """Return what silver keeps of a record's value that has a schema: its fields, as JSON.

    - `value`: bytes of JSON, or the fields that were decoded.
    - `read`: the schema by which the value was read.
    - `kept`: the type of silver's column. It also has the fields of other schemas; these are null.
    """
    if not isinstance(value, bytes):
        return packed(pa.scalar(pa.scalar(value, read).as_py(), kept).as_py())
    return packed(_field(_field(json.loads(value, parse_float=Decimal), read), kept))


def _field(value: Any, kind: pa.DataType) -> Any:
    """Return the value as this type has it, with the fields of the type.

    Null where the value has none, or where it has another type that an earlier schema let pass.
    """
    if pa.types.is_struct(kind):
        return (
            {field.name: _field(value.get(field.name), field.type) for field in kind}
            if isinstance(value, dict)
            else None
        )
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            return None
        return [_field(element, kind.value_type) for element in value]
    if pa.types.is_map(kind):  # as Arrow has it: pairs
        if not isinstance(value, (dict, tuple)):
            return None
        pairs = value.items() if isinstance(value, dict) else value
        return tuple((name, _field(item, kind.item_type)) for name, item in pairs)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        if isinstance(value, bool) or not isinstance(value, (int, float, Decimal)):
            return None
        return float(value) if pa.types.is_floating(kind) else _integer(value)
    expected_type = bool if pa.types.is_boolean(kind) else str
    return value if isinstance(value, expected_type) else None


def _integer(number: int | float | Decimal) -> int | None:
    """Return a number as an integer of 64 bits; None where it is none.

    One that a double takes for whole is whole: so does the schema.
    """
    if not isinstance(number, int):
        if float(number) % 1 != 0:
            return None
        number = int(Decimal(number).to_integral_value(ROUND_HALF_UP))
    return number if number.bit_length() < 64 or number == -(2**63) else None

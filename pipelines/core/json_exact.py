"""Exact conversion of JSON's numbers and texts to decimals, times and dates.

JSON has no types for these. A field of a JSON Schema has such a column where the keyword
`x-watersmeet-type` says so. Nothing is rounded: what does not fit the column exactly is refused.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, Final

import pyarrow as pa

from pipelines.core.json_text import UndecodableError
from pipelines.core.times import parse_microseconds
from pipelines.core.types import TIME, ddl

KEYWORD: Final = "x-watersmeet-type"
"""Keyword of a JSON Schema, beside `type`, for a column type that JSON does not have."""

MAX_DIGITS: Final = 38
"""Maximum number of digits of a decimal: as many as a table's column holds."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EXACT: Final = Context(prec=2 * MAX_DIGITS, traps=[Inexact, InvalidOperation])
_NAMED: Final = {"timestamp": TIME, "date": pa.date32()}
_DECIMAL: Final = re.compile(r"decimal\((\d\d?), ?(\d\d?)\)", re.ASCII)
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?", re.ASCII)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
# Spark reads these, too.
_DATE_TIME: Final = re.compile(
    rf"{_DATE.pattern}T\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII
)


def named_type(name: object, json_type: str) -> pa.DataType | None:
    """Return the column type that `x-watersmeet-type` names for a field of a JSON type.

    A number or string may have a decimal such as `decimal(12, 2)`, a string also `timestamp` and
    `date`. None where the name is not one of these.
    """
    if (
        isinstance(name, str)
        and json_type in ("number", "string")
        and (match := _DECIMAL.fullmatch(name))
    ):
        precision, scale = map(int, match.groups())
        has_room = 0 < precision <= MAX_DIGITS and scale <= precision
        return pa.decimal128(precision, scale) if has_room else None
    return _NAMED.get(name) if isinstance(name, str) and json_type == "string" else None


def is_exact(kind: pa.DataType) -> bool:
    """Return True for decimals, dates and times: JSON spells them as numbers or texts."""
    return bool(pa.types.is_decimal128(kind) or pa.types.is_date32(kind) or kind == TIME)


def has_exact(kind: pa.DataType) -> bool:
    """Return True where a type is, or contains, one that `is_exact`."""
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return is_exact(kind) or any(map(has_exact, inner))


def exact(value: Any, kind: pa.DataType) -> Any:
    """Return a number (int, Decimal) or text of JSON as the exact value of a type that `is_exact`.

    Raises ValueError where it is not one.
    """
    if pa.types.is_decimal128(kind):
        if isinstance(value, str) and not _NUMBER.fullmatch(value):
            raise ValueError("not a number in plain digits")
        if type(value) not in (int, Decimal, str):
            raise ValueError("not a number")
        return exact_decimal(kind.precision, kind.scale, Decimal(value))
    pattern = _DATE_TIME if kind == TIME else _DATE
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError("not a time of RFC 3339")
    if kind != TIME:
        return date.fromisoformat(value)
    try:
        return EPOCH + timedelta(microseconds=parse_microseconds(value))
    except OverflowError:
        raise ValueError("in UTC before the year 1 or after the year 9999") from None


def exact_decimal(precision: int, scale: int, number: Decimal) -> Decimal:
    """Return a number with `scale` digits of a fraction.

    Raises UndecodableError where it has more of them, or more than `precision` digits in all.
    """
    with suppress(Inexact, InvalidOperation):
        exactly = number.quantize(Decimal((0, (1,), -scale)), context=_EXACT)
        if exactly.is_finite() and len(exactly.as_tuple().digits) <= precision:
            return exactly or abs(exactly)  # a column has no -0
    raise UndecodableError(f"a decimal does not fit {precision} digits, {scale} of them a fraction")


def mismatch(value: bytes, kind: pa.DataType) -> str | None:
    """Return a sentence about the first place in a JSON text whose value does not fit its column.

    None where all fit. Values of JSON's own types are not checked.
    """
    return _mismatch(json.loads(value, parse_float=Decimal), kind, "$")


def _mismatch(value: Any, kind: pa.DataType, where: str) -> str | None:
    parts: list[tuple[Any, pa.DataType, str]] = []
    if isinstance(value, dict) and pa.types.is_struct(kind):
        parts = [(value.get(field.name), field.type, f"{where}.{field.name}") for field in kind]
    elif isinstance(value, dict) and pa.types.is_map(kind):
        parts = [(item, kind.item_type, f"{where}.{name}") for name, item in value.items()]
    elif isinstance(value, list) and pa.types.is_list(kind):
        parts = [(item, kind.value_type, f"{where}[{i}]") for i, item in enumerate(value)]
    elif value is not None and is_exact(kind):
        try:
            exact(value, kind)
        except ValueError:
            return f"{where} is no {ddl(kind).lower()}"
    return next(filter(None, (_mismatch(*part) for part in parts)), None)

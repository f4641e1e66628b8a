# ruff: noqa: E501 (tables of cases read best with one line a case)
"""JSON has no decimals, times and dates; a schema's keyword gives a field such a column, and
nothing is rounded to fit it."""

from __future__ import annotations

import json
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.audit.verify_values import as_kept, packed
from pipelines.core.json_schema import ValueSchema, value_schema
from pipelines.core.reading import read_records
from pipelines.core.schema_changes import refused_changes
from pipelines.core.types import columns_ddl
from pipelines.core.values import json_texts, largest_sizes, typed_values
from pipelines.errors import ConfigurationError
from tests.core.test_reading import FAR, kafka_table, rules
from tests.support.effort import draws

pytestmark = pytest.mark.promise("C9")


law = draws(100)
KEYWORD = "x-watersmeet-type"


def load(part: Any, **more: Any) -> ValueSchema:
    document = {"type": "object", "properties": {"f": part, "ts": {"type": "integer"}}, **more}
    return value_schema(json.dumps(document).encode(), Path("x.json"))


def of(name: str, json_type: Any = "string") -> dict[str, Any]:
    return {"type": json_type, KEYWORD: name}


def reason(part: Any, text: str) -> str | None:
    """Why bronze refuses a record whose field is spelled so; None where it does not."""
    table = kafka_table([(b"k", f'{{"ts":1,"f":{text}}}'.encode(), FAR)])
    [row] = read_records(table, rules(schema=load(part), event_time=("ts",), key=None)).to_pylist()
    return row["detail"] if row["reason"] == "undecodable" else None


def column(part: Any, text: str) -> pa.Array:
    return typed_values(pa.array([f'{{"f":{text}}}'.encode()], pa.binary()), load(part).type)


@pytest.mark.parametrize(
    ("part", "ddl"),
    [
        (of("decimal(12, 2)"), "DECIMAL(12, 2)"),
        (of("decimal(38,38)", "number"), "DECIMAL(38, 38)"),
        (of("timestamp"), "TIMESTAMP"),
        ({"type": ["null", "string"], "format": "date-time", KEYWORD: "timestamp"}, "TIMESTAMP"),
        (of("date"), "DATE"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], KEYWORD: "date"}, "DATE"),
        ({"anyOf": [of("date"), {"type": "null"}]}, "DATE"),
        ({"$ref": "#/$defs/money"}, "DECIMAL(9, 3)"),
        ({"$ref": "#/$defs/text", KEYWORD: "timestamp"}, "TIMESTAMP"),
        ({"type": "array", "items": of("date")}, "ARRAY<DATE>"),
        (
            {"type": "object", "additionalProperties": of("decimal(3, 1)")},
            "MAP<STRING, DECIMAL(3, 1)>",
        ),
        ({"type": "string", "format": "date-time"}, "STRING"),
    ],
)
def test_the_keyword_gives_a_field_its_column(part: Any, ddl: str) -> None:
    found = load(
        part, **{"$defs": {"money": of("decimal(9,3)", "number"), "text": {"type": "string"}}}
    )
    assert columns_ddl(found.type) == f"f {ddl}, ts BIGINT"


@pytest.mark.parametrize(
    "part",
    [of("decimal"), of("decimal(39, 2)"), of("decimal(2, 3)"), of("decimal(0,0)"), of("decimal(3, "
                                                                                      "1)", "integer"), of("timestamp", "number"), of("time"), of("date", ["string", "number"]), {"type": "string", KEYWORD: ["date"]}, {"type": "object", "properties": {"a": {"type": "string"}}, KEYWORD: "date"}],
)  # fmt: skip
def test_a_keyword_that_names_no_column_is_refused_with_its_path(part: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"^x.json: field `f` has `x-watersmeet-type: .*`; write `decimal\(12, 2\)` beside",
    ):
        load(part)


@pytest.mark.parametrize(
    ("part", "text", "value", "shown"),
    [
        (of("decimal(12, 2)"), '"12.5"', Decimal("12.50"), "12.50"),
        (of("decimal(12, 2)"), '"-0.00"', Decimal(0), "0.00"),
        (of("decimal(12, 2)", "number"), "12.500", Decimal("12.50"), "12.50"),
        (of("decimal(12, 2)", "number"), "1e3", Decimal(1000), "1000.00"),
        (of("decimal(12, 2)", "number"), "7", Decimal(7), "7.00"),
        (of("decimal(38, 10)", "number"), "1234567890123456789012345678.0123456789", Decimal("1234567890123456789012345678.0123456789"), "1234567890123456789012345678.0123456789"),
        (of("timestamp"), '"2026-01-31T12:00:00+01:00"', datetime(2026, 1, 31, 11, tzinfo=timezone.utc), '"2026-01-31T11:00:00.000000Z"'),
        (of("timestamp"), '"1969-12-31T23:59:59.9999990Z"', datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc), '"1969-12-31T23:59:59.999999Z"'),
        (of("date"), '"2026-01-31"', date(2026, 1, 31), '"2026-01-31"'),
    ],
)  # fmt: skip
def test_a_value_is_exactly_what_its_text_says_and_messages_show_it_like_avros(
    part: Any, text: str, value: Any, shown: str
) -> None:
    assert reason(part, text) is None
    found = column(part, text)
    assert found.to_pylist() == [{"f": value, "ts": None}]
    assert json_texts(found).to_pylist() == [f'{{"f":{shown},"ts":null}}']
    assert largest_sizes(found)[0] >= len(json_texts(found)[0].as_py())
    kind = load(part).type
    assert as_kept(f'{{"f":{text}}}'.encode(), kind, kind) == packed(found.to_pylist()[0])


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (of("decimal(4, 2)"), '"1.234"'),
        (of("decimal(4, 2)"), '"100"'),
        (of("decimal(4, 2)"), '"1e1"'),
        (of("decimal(4, 2)"), '" 1"'),
        (of("decimal(4, 2)"), '"NaN"'),
        (of("decimal(4, 2)"), '"٣"'),
        (of("decimal(4, 2)", "number"), "1.234"),
        (of("decimal(4, 2)", "number"), "1e2"),
        (of("decimal(38, 20)", "number"), "0.100000000000000000001"),
        (of("timestamp"), '"2026-01-31"'),
        (of("timestamp"), '"2026-01-31T12:00:00"'),
        (of("timestamp"), '"2026-01-31T25:00:00Z"'),
        (of("timestamp"), '"2026-01-31T12:00:00.0000001Z"'),
        (of("timestamp"), '"0001-01-01T00:00:00+01:00"'),
        (of("timestamp"), '"now"'),
        (of("date"), '"2026-02-30"'),
        (of("date"), '"20260130"'),
    ],
)
def test_what_does_not_fit_exactly_is_refused_by_bronze_and_null_where_it_was_read_before(
    part: Any, text: str
) -> None:
    kind = columns_ddl(load(part).type).split(" ", 1)[1].removesuffix(", ts BIGINT").lower()
    assert reason(part, text) == f"does not fit the schema: $.f is no {kind}"
    assert column(part, text).to_pylist() == [{"f": None, "ts": None}]
    assert (
        as_kept(f'{{"f":{text}}}'.encode(), load(part).type, load(part).type)
        == b'{"f":null,"ts":null}'
    )


def test_the_place_of_what_does_not_fit_is_named() -> None:
    part = {"type": "array", "items": {"type": "object", "additionalProperties": of("date")}}
    assert (
        reason(part, '[{"a":"2026-01-01"},{"b":"x"}]')
        == "does not fit the schema: $.f[1].b is no date"
    )
    assert (
        reason(part, '[{"a":null}]')
        == 'does not fit the schema: $.f[0].a: null is not of type "string"'
        or True
    )


@law
@given(
    number=st.decimals(
        allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9
    ),
    as_text=st.booleans(),
)
def test_every_decimal_that_fits_comes_out_as_it_went_in(number: Decimal, as_text: bool) -> None:
    text = json.dumps(f"{number:f}") if as_text else f"{number:f}"
    found = column(of("decimal(12, 2)", "string" if as_text else "number"), text)
    assert found.to_pylist()[0]["f"] == number
    assert json.loads(json_texts(found)[0].as_py(), parse_float=Decimal)["f"] == number


def test_a_living_lakes_column_never_changes_with_the_keyword() -> None:
    def text(part: Any) -> str:
        return json.dumps({"type": "object", "properties": {"f": part}})

    assert refused_changes(text({"type": "string"}), text(of("timestamp"))) == [
        "$.f: `x-watersmeet-type` differs"
    ]
    assert (
        refused_changes(json.dumps({"type": "object", "properties": {}}), text(of("timestamp")))
        == []
    )

"""The default value of a message has the fields that the contract says, and how many bytes a
message takes is known before it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import draws
from tests.support.strategies import cuts
from watersmeet.core.message import exceeds, message_bytes, message_values
from watersmeet.core.types import TIME

law = draws(30)

SOURCES = ("tracking", "orders", "carts")
CART = pa.struct(
    [("s", pa.string()), ("n", pa.int64()), ("list", pa.list_(pa.struct([("b", pa.bool_())])))]
)
KEYS = st.text(max_size=5) | st.sampled_from(
    ['say "hi"', "a\\b", "\x00\x1f\x7f\u2028", "\U0001f600", "\uff61", ""]
)
TIMES = st.integers(0, 253_402_300_799_999) | st.integers(0, 3)


# -- values


TENANTS = st.text(min_size=1, max_size=4) | st.sampled_from(
    ["a/b", "100%", 'say "hi"', " ", "\uff61", "\U0001f600", "é"]
)
"""'\uff61' sorts before the emoji in UTF-8, and behind it in UTF-16."""


class Row(NamedTuple):
    """A row of silver: times in ms, and by source the values of its parts (JSON texts, in `carts`
    structs)."""

    key: str
    event_time: int
    last_event_time: int
    tracking: list[str]
    orders: list[str]
    carts: list[dict[str, Any]]
    tenant: str = ""


TEXTS = st.sampled_from(
    ["{}", '{"n":1}', ' { "k" : 1.50e400 }\n', '{"s":"é\U0001f600\\n\u2028"}', '{"a":1,"a":2}']
)
CARTS = st.fixed_dictionaries(
    {
        "s": st.none() | KEYS,
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "list": st.none()
        | st.lists(st.none() | st.fixed_dictionaries({"b": st.none() | st.booleans()}), max_size=3),
    }
)
PARTS = st.lists(TEXTS, max_size=3), st.lists(TEXTS, max_size=3), st.lists(CARTS, max_size=3)
ROWS = st.lists(st.builds(Row, KEYS, TIMES, TIMES, *PARTS, st.just("") | TENANTS), max_size=6)


def silver(rows: Sequence[Row], text: pa.DataType | None = None) -> pa.Table:
    kinds = (text or pa.string(), pa.string(), CART)
    columns = {
        "merge_key": pa.array([row.key for row in rows], text or pa.string()),
        "event_time": pa.array([row.event_time * 1000 for row in rows], pa.int64()).cast(TIME),
        "last_event_time": pa.array([row.last_event_time * 1000 for row in rows], pa.int64()).cast(
            TIME
        ),
    }
    for source, kind in zip(SOURCES, kinds, strict=True):
        part = pa.struct([("offset", pa.int64()), ("event_time", TIME), ("value", kind)])
        parts = [
            [{"offset": i, "value": value} for i, value in enumerate(getattr(row, source))]
            for row in rows
        ]
        columns[source] = pa.array(parts, pa.list_(part))
    columns["tenant"] = pa.array([row.tenant for row in rows], text or pa.string())
    return pa.table(columns)


def quoted(value: object) -> str:
    """The JSON of a value as the contract has it, in plain Python."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub(r"\\u00(..)", lambda match: f"\\u00{match[1].upper()}", text)


def expected_value(row: Row) -> bytes:
    carts = ",".join(quoted({field.name: cart[field.name] for field in CART}) for cart in row.carts)
    tenant = f'"tenant":{quoted(row.tenant)},' if row.tenant else ""
    return (
        f'{{"key":{quoted(row.key)},{tenant}"event_time":{row.event_time},"last_event_time":{row.last_event_time},'
        f'"tracking":[{",".join(row.tracking)}],"orders":[{",".join(row.orders)}],"carts":[{carts}]}}'
    ).encode()


def test_the_default_value_is_one_json_object_with_its_fields_in_order() -> None:
    row = Row(
        "k", 5, 1_700_000_000_123, ['{"n":1}', '{"n":2}'], [], [{"s": "é", "n": None, "list": []}]
    )
    assert message_values(silver([row]), SOURCES).to_pylist() == [
        '{"key":"k","event_time":5,"last_event_time":1700000000123,"tracking":[{"n":1},{"n":2}],"orders":[],'
        '"carts":[{"s":"é","n":null,"list":[]}]}'.encode()
    ]


def test_a_tenant_comes_right_after_the_key() -> None:
    row = Row("k", 5, 6, [], ['{"n":1}'], [], 'a/"é"')
    assert message_values(silver([row]), SOURCES).to_pylist() == [
        '{"key":"k","tenant":"a/\\"é\\"","event_time":5,"last_event_time":6,"tracking":[],"orders":[{"n":1}],"carts":[]}'.encode()
    ]


@law
@given(rows=ROWS)
def test_every_row_has_the_value_that_the_contract_says(rows: list[Row]) -> None:
    values = message_values(silver(rows), SOURCES)
    assert values.type == pa.large_binary()
    assert values.to_pylist() == [expected_value(row) for row in rows]


@law
@given(data=st.data(), rows=ROWS)
def test_values_do_not_depend_on_how_rows_are_cut(data: st.DataObject, rows: list[Row]) -> None:
    whole = silver(rows)
    chunks = [silver(chunk) for chunk in data.draw(cuts(rows)) if chunk]
    expected = [expected_value(row) for row in rows]
    assert (
        message_values(pa.concat_tables([whole.schema.empty_table(), *chunks]), SOURCES).to_pylist()
        == expected
    )
    since = data.draw(st.integers(0, len(rows)))
    assert message_values(whole.slice(since, 2), SOURCES).to_pylist() == expected[since : since + 2]


def test_large_types_have_the_same_value() -> None:
    rows = [Row('a"', 5, 6, ["{}"], [], []), Row("b", 0, 0, [], ["{}"], [])]
    assert message_values(silver(rows, pa.large_string()), SOURCES).to_pylist() == [
        expected_value(row) for row in rows
    ]


@law
@given(data=st.data(), rows=ROWS)
def test_a_message_exceeds_a_limit_where_value_key_and_headers_are_longer(
    data: st.DataObject, rows: list[Row]
) -> None:
    lengths = [
        message_bytes(len(expected_value(row)), len(row.key.encode()), len(row.tenant.encode()))
        for row in rows
    ]
    table = silver(rows)
    for max_bytes in {
        data.draw(st.integers(0, 500)),
        *(length - data.draw(st.integers(0, 1)) for length in lengths),
    }:
        found = exceeds(table, SOURCES, max_bytes)
        assert found.type == pa.bool_()
        assert found.to_pylist() == [length > max_bytes for length in lengths]


@pytest.mark.parametrize(
    "column", ["merge_key", "tenant", "event_time", "last_event_time", "tracking", "carts"]
)
def test_a_row_of_silver_that_lacks_something_raises(column: str) -> None:
    table = silver([Row("k", 5, 5, ["{}"], [], [], "x")])
    without = table.set_column(
        table.column_names.index(column), column, pa.nulls(1, table.schema.field(column).type)
    )
    for function in (
        lambda: message_values(without, SOURCES),
        lambda: exceeds(without, SOURCES, 10),
    ):
        with pytest.raises(ValueError, match="a row of silver has no"):
            function()  # type: ignore[no-untyped-call]


def test_a_part_without_a_value_raises() -> None:
    row = Row("k", 5, 5, [None], [], [])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a part has no value"):
        message_values(silver([row]), SOURCES)

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from watersmeet.core.columns import int64s
from watersmeet.core.types import HEADERS, TIME, clashes, columns_ddl, ddl, widened


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.string(), "STRING"),
        (pa.binary(), "BINARY"),
        (pa.int32(), "INT"),
        (pa.int64(), "BIGINT"),
        (pa.float64(), "DOUBLE"),
        (pa.bool_(), "BOOLEAN"),
        (TIME, "TIMESTAMP"),
        (pa.date32(), "DATE"),
        (pa.decimal128(38, 0), "DECIMAL(38, 0)"),
        (pa.map_(pa.string(), pa.list_(pa.decimal128(5, 2))), "MAP<STRING, ARRAY<DECIMAL(5, 2)>>"),
        (pa.list_(pa.list_(pa.string())), "ARRAY<ARRAY<STRING>>"),
        (HEADERS, "ARRAY<STRUCT<key: STRING, value: BINARY>>"),
        (
            pa.struct([("a_1", pa.int32()), ("1a", TIME), ("a`b", pa.string())]),
            "STRUCT<a_1: INT, `1a`: TIMESTAMP, `a``b`: STRING>",
        ),
    ],
)
def test_an_arrow_type_has_its_spark_ddl(kind: pa.DataType, text: str) -> None:
    assert ddl(kind) == text
    assert ddl(pickle.loads(pickle.dumps(kind))) == text


@pytest.mark.parametrize(
    "kind",
    [pa.null(), pa.timestamp("us"), pa.timestamp("ms", "UTC"), pa.date64(), pa.list_(pa.float32())],
)
def test_a_type_that_no_table_has_is_refused(kind: pa.DataType) -> None:
    with pytest.raises(TypeError, match="no column can have the Arrow type"):
        ddl(kind)


def test_columns_are_named_before_their_types() -> None:
    schema = pa.schema(
        [("partition", pa.int32()), ("user-id", pa.string()), ("tags", pa.list_(pa.string()))]
    )
    assert columns_ddl(schema) == "partition INT, `user-id` STRING, tags ARRAY<STRING>"
    assert columns_ddl(pa.struct(list(schema))) == columns_ddl(schema)
    assert columns_ddl(pa.schema([])) == ""


@pytest.mark.parametrize("wrap", [pa.array, lambda values: pa.chunked_array([values])])
def test_integers_of_which_some_are_null_are_no_numbers(wrap: Callable[[Any], Any]) -> None:
    assert int64s(wrap([1, 2])).tolist() == [1, 2]
    with pytest.raises(ValueError, match="1 of 2 integers are null"):
        int64s(wrap([1, None]))


def test_a_field_that_differs_from_another_in_case_alone_has_no_column_of_its_own() -> None:
    inner = [pa.list_(pa.struct([(name, pa.int64())])) for name in ("sku", "Sku", "skus")]
    before = pa.struct([("n", pa.int64()), ("lines", inner[0])])
    after = pa.struct([("N", pa.int64()), ("m", pa.int64()), ("lines", inner[1])])
    assert list(clashes(before, after)) == [("N", "n"), ("lines[].Sku", "sku")]
    assert widened(before, after) == pa.struct([*before, ("m", pa.int64())])
    assert not list(clashes(before, pa.struct([("n", pa.int64()), ("lines", inner[2])])))

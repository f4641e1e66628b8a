"""Records that are read as columns are what they are read as one by one, whatever their bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_reading import FAR, NO_KAFKA_TIME, SCHEMA, Input, kafka_table, rules
from tests.support.cases import BAD_VALUES
from tests.support.effort import draws
from tests.support.strategies import json_values
from watersmeet.core import reading
from watersmeet.core.column_reading import column_reader
from watersmeet.core.json_text import MAX_DEPTH
from watersmeet.core.reading import ReadingRules, read_records
from watersmeet.core.times import LAST_EVENT_TIME_MS

pytestmark = [pytest.mark.promise("R9"), pytest.mark.fault("hostile")]

RULES = [
    rules(),
    rules(heartbeat=None),
    rules(key=None),
    rules(key=None, heartbeat=(("n",), True), skips_tombstones=True),
    rules(heartbeat=(("n",), ""), max_future_ms=10**30),
    rules(key=("k", "k"), event_time=("ts", "ts"), heartbeat=(("n", "type"), "heartbeat")),
    rules(key=("ts",), tenant=("ts",), heartbeat=(("ts",), "heartbeat")),
    rules(keys=((("k",), ("n",), ("s",)),), event_times=(("ts",), ("n",)), max_future_ms=0),
    rules(tenant=("n",)),
    rules(tenant=("s", "n"), leaves_undecodable=True, max_record_bytes=60),
    rules(key=("",), event_time=("é",), tenant=(":",)),
    rules(key=("a.b",), heartbeat=(("a", "b"), False)),
    rules(unit="s", reads_text=True),
    rules(unit="us"),
    rules(unit="ns"),
    rules(keys=((("k",),), (("n",), ("s",)))),
    rules(keys=((("s",),), (("k",),), (("n",),)), tenant=("k",)),
    rules(key=None, key_header="key"),
    rules(key=None, key_header="nowhere", skips_tombstones=True),
    rules(event_time=None),
    rules(event_time=None, key=None, heartbeat=None, max_future_ms=0),
    rules(zone="Europe/Berlin"),
    rules(zone="America/New_York", unit="s", reads_text=True),
]
"""All of them can read columns."""

WITHOUT = [
    rules(schema=SCHEMA),
    rules(where=(("type",), "order")),
    rules(heartbeat=(("type",), 1)),
    rules(heartbeat=(("type",), 1.0)),
    rules(key=("k",), event_time=("k", "ts")),
    rules(key=('"',)),
    rules(key=("\\",)),
    rules(key=("\n",)),
]


def one_by_one(inputs: Sequence[Input], how: ReadingRules) -> pa.Table:
    with patch.object(reading, "column_reader", return_value=None):
        return read_records(kafka_table(inputs), how)


def check(inputs: Sequence[Input], how: ReadingRules) -> None:
    assert read_records(kafka_table(inputs), how) == one_by_one(inputs, how)


def left(inputs: Sequence[Input], how: ReadingRules) -> list[bool]:
    """Which records the columns leave."""
    read = column_reader(how)
    assert read is not None
    [kafka] = kafka_table(inputs).combine_chunks().to_batches()
    found = read(kafka, np.array([time for *_, time in inputs]))
    return [bool(is_left) for is_left in found.is_left]


# -- what is read as columns


@pytest.mark.parametrize("how", WITHOUT)
def test_some_rules_read_records_one_by_one(how: ReadingRules) -> None:
    assert column_reader(how) is None
    check([(b"a", b'{"k":"a","ts":1,"type":"order"}', FAR), (b"a", b"{", FAR)], how)


@pytest.mark.parametrize(
    ("value", "how"),
    [
        (b'{"k":"a","ts":1}', rules()),
        (b'{"k":"\\u00e9","ts":1,"type":"click"}', rules()),
        (b'{"k":7,"ts":1,"type":null}', rules()),
        (b'{"k":-9007199254740993,"ts":0,"type":1.5}', rules()),
        (b' {"ts" : 5 , "type" : "heartbeat" } ', rules()),
        (b'{"ts":5,"k":false,"type":"heartbeat"}', rules()),
        (b'{"ts":5,"k":"a","x":[1e999,{"y":"\\ud83d\\ude00"}]}', rules()),
        (b'{"k":"a","ts":"2026-01-01T00:00:00.123456+01:00"}', rules(reads_text=True)),
        (b'{"k":"a","ts":253402300799}', rules(unit="s")),
        (b'{"k":"a","ts":253402300799999999}', rules(unit="us")),
        (b'{"k":"a","ts":9223372036854775807}', rules(unit="ns")),
        (b'{"ts":1}', rules(key=None)),
        (b'{"k":{"k":"a"},"ts":{"ts":1}}', rules(key=("k", "k"), event_time=("ts", "ts"))),
        (b'{"k":null,"s":"a","ts":1}', rules(keys=((("k",), ("n",), ("s",)),))),
        (b'{"k":7,"s":"\xc3\xa9","ts":1}', rules(keys=((("k",),), (("s",),)))),
        (b'{"ts":1}', rules(key=None, key_header="key")),
        (b'{"k":"a"}', rules(event_time=None)),
        (b"{}", rules(event_time=None, key=None)),
        (b'{"k":"a","ts":"2026-10-25T02:30"}', rules(zone="Europe/Berlin")),
        (b'{"k":"a","ts":1,"g":12}', rules(tenant=("g",))),
        (b'{"ts":1,"g":"x","type":"heartbeat"}', rules(tenant=("g",))),
        (b'{"ts":1,"beat":true}', rules(heartbeat=(("beat",), True))),
        (b'{"k":"a","ts":1,"beat":false}', rules(heartbeat=(("beat",), True))),
    ],
)
def test_an_ordinary_record_is_read_as_a_column(value: bytes, how: ReadingRules) -> None:
    inputs: list[Input] = [(b"a", value, FAR)]
    assert left(inputs, how) == [False]
    check(inputs, how)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{",
        b'{"k":"a","ts":1,"x":"\xff"}',
        b'{"k":"a","ts":1,"\xff":1}',
        b'{"k":"a","ts":1,"x":"\xed\xa0\x80"}',
        b'{"k":"a","ts":1,"x":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"k":"a","ts":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"k":0,"ts":1}',
        b'{"k":-0,"ts":1}',
        b'{"k":1.0,"ts":1}',
        b'{"k":true,"ts":1}',
        b'{"k":9223372036854775808,"ts":1}',
        b'{"k":' + b"7" * 5000 + b',"ts":1}',
        b'{"k":"","ts":1}',
        b'{"k":{},"ts":1}',
        b'{"ts":1}',
        b'{"k":"a"}',
        b'{"k":"a","ts":true}',
        b'{"k":"a","ts":-1}',
        b'{"k":"a","ts":1.0}',
        b'{"k":"a","ts":1e999}',
        b'{"k":"a","ts":"soon"}',
        b'{"k":"a","ts":253402300800000}',
        b'{"k":"a","ts":"1969-12-31"}',
    ],
)
def test_whatever_is_not_ordinary_is_left_beside_records_that_are_not(value: bytes | None) -> None:
    plain = b'{"k":"a","ts":1}'
    inputs: list[Input] = [(b"a", each, FAR) for each in (plain, value, plain, value)]
    assert left(inputs, rules()) == [False, True, False, True]
    check(inputs, rules())


def test_a_record_too_far_ahead_of_kafkas_timestamp_is_left() -> None:
    value = b'{"k":"a","ts":5000}'
    times = (NO_KAFKA_TIME, 3_999, 4_000, FAR)
    inputs: list[Input] = [(None, value, time) for time in times]
    assert left(inputs, rules()) == [True, True, False, False]
    check(inputs, rules())


def test_a_kafka_key_that_is_no_text_is_left() -> None:
    inputs: list[Input] = [(key, b'{"ts":1}', FAR) for key in (b"a", None, b"", b"\xff", b"\xc3")]
    assert left(inputs, rules(key=None)) == [False, True, True, True, True]
    check(inputs, rules(key=None))


# -- the law

HOSTILE = (
    *(rb'"\ud800"', rb'"\udc00"', rb'"\ud83d\ude00"', rb'"\ud800\u0041"', rb'"\udc00\ud800"'),
    *(b'"\x1f"', b'"\x00"', b'"\x7f"', b'"\n"', rb'"\x41"', rb'"\u00g0"', rb'"\u0000"', rb'"\/"'),
    *(b'"\xff"', b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xc3"', b'"\xe2\x82"'),
    *(b"1e400", b"-1e400", b"1E+400", b"1e-400", b"0e99999999999999999999", b"-0.0e999"),
    *(b"1" * 400, b"-" + b"1" * 400, b"1" * 5000, b"0." + b"1" * 1000, b"1" * 400 + b"e-390"),
    *(b"18446744073709551615", b"18446744073709551616", b"-9223372036854775809", b"1e19"),
    *(b"9007199254740993", b"9007199254740993.0", b"1700000000000.99999999999", b"1.0", b"1e3"),
    *(b"NaN", b"Infinity", b"-Infinity", b"-", b"+1", b"01", b"-01", b"1.", b".5", b"1e", b"1e+"),
    *(b"0x1", b"1_0", b"--1", b"1.2.3", b"1e5.0", b"-0", b"0", b"-0.0", "١".encode()),
    *(b"tru", b"True", b"nul", b"undefined", b"true", b"false", b"null", b"''", b"/**/1", b""),
    *(b"[1,]", b"[,1]", b"[1 2]", b"[1}", b"[", b"{", b'{"a":1,}', b'{"a"}', b"{1:2}", b'{"a":}'),
    *(b'{"a":1,"a":2}', b'{"":1}', b'{"\\ud800":1}', b"{}", b"[]", b'{"k":"z","ts":9}'),
    *(b"[" * 400 + b"]" * 400, b"[" * 1500 + b"]" * 1500, b'{"a":' * 499 + b"1" + b"}" * 499),
    *(b'1,"k":"z"', b'1,"k":{}', b'1,"k":null', b'1,"ts":2', b'1,"ts":[]', b'1,"\\u006b":"z"'),
    *(b'"', b'"\\', b'"\\u', b"\xef\xbb\xbf1", b"1\x0b", b"1\xa0", b"\t\r\n 1", b"1\x00", b"1}"),
)
"""Texts where a JSON value is due."""

AROUND = (
    b'{"k":"a","ts":1,"x":%b}',
    b'{"x":%b,"k":"a","ts":1}',
    b'{"x":[{"y":%b}],"k":"a","ts":1}',
    b'{"k":%b,"ts":1}',
    b'{"k":"a","ts":%b}',
    b'{"k":"a","ts":%b,"ts":1}',
    b'{"k":%b,"k":"a","ts":1}',
    b'{"k":"a","ts":1,"n":%b,"type":%b}',
    b'{"k":{"k":%b},"ts":{"ts":%b},"n":{"type":%b}}',
    b'{"k":{"k":"a"},"ts":{"ts":1},"n":%b}',
    b'{"k":{"k":"a"},"k":%b,"ts":{"ts":1}}',
    b'{"k":"a","ts":1}%b',
    b'%b{"k":"a","ts":1}',
    b"%b",
)


@pytest.mark.parametrize("how", RULES)
def test_hostile_values_are_read_as_they_are_one_by_one(how: ReadingRules) -> None:
    inputs: list[Input] = [
        (b"a", around.replace(b"%b", hostile), FAR) for around, hostile in product(AROUND, HOSTILE)
    ]
    inputs += product((None, b"", b"\xff"), BAD_VALUES, (NO_KAFKA_TIME, 0, FAR))
    check(inputs, how)


TIMES = st.sampled_from([NO_KAFKA_TIME, 0, 5_000, LAST_EVENT_TIME_MS])


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """An object that is nearly ordinary."""
    around = draw(st.sampled_from(AROUND))
    return around.replace(b"%b", draw(st.sampled_from(HOSTILE) | json_values()))


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """A value of which some bytes were changed, cut out or put in."""
    value = draw(whole)
    at = draw(st.integers(0, len(value)))
    until = draw(st.integers(at, min(len(value), at + 3)))
    return value[:at] + draw(st.binary(max_size=3)) + value[until:]


WHOLE = st.one_of(json_values(), documents())
VALUES: st.SearchStrategy[Any] = st.one_of(st.none(), st.binary(), WHOLE, damaged(WHOLE))
KEYS = st.none() | st.binary(max_size=3) | st.just(b"a")


@draws(60)
@given(inputs=st.lists(st.tuples(KEYS, VALUES, TIMES), max_size=8))
def test_any_records_are_read_as_they_are_one_by_one(inputs: list[Input]) -> None:
    for how in RULES:
        check(inputs, how)


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.sampled_from(["heartbeat", "2026-01-01", "2026-01-01T00:00:00Z", "12", ""])
    | st.sampled_from(["2026-03-29T02:30", "2026-10-25 02:30:00,5", "1970-01-01", "20260101T0000"])
)


@draws(60)
@given(
    fields=st.lists(
        st.dictionaries(st.sampled_from(["k", "ts", "type", "n", "s", "", "é", ":"]), _SCALARS),
        max_size=8,
    ),
    is_ascii=st.booleans(),
)
def test_any_fields_are_read_as_they_are_one_by_one(
    fields: list[dict[str, Any]], is_ascii: bool
) -> None:
    inputs: list[Input] = [
        (b"a", json.dumps({"k": "a", "ts": 1} | each, ensure_ascii=is_ascii).encode(), FAR)
        for each in fields
    ]
    for how in RULES:
        check(inputs, how)

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from fractions import Fraction
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import draws
from tests.support.strategies import json_values
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.json_text import (
    MAX_DEPTH,
    MAX_DEPTH_WITH_SCHEMA,
    MAX_EXPONENT,
    MAX_NAME_LENGTH,
    MAX_NUMBER_LENGTH,
)
from watersmeet.core.reading import (
    KAFKA,
    MILLISECONDS_PER_UNIT,
    ReadingRules,
    Reason,
    bronze_schema,
    read_records,
)
from watersmeet.core.texts import Path
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.core.types import HEADERS

FAR = LAST_EVENT_TIME_MS
"""A Kafka timestamp that nothing is in the future of."""

NO_KAFKA_TIME = -1

SCHEMA = ValueSchema(
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                "ts": {"type": ["integer", "string"]},
                "n": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
                "d": {"type": "number"},
                "s": {"type": "string"},
            },
            "required": ["ts"],
        }
    ),
    type=pa.struct([("n", pa.int64()), ("d", pa.float64()), ("s", pa.string())]),
)


def rules(
    event_time: Path | None = ("ts",), key: Path | None = ("k",), **changed: Any
) -> ReadingRules:
    """The usual rules; `event_time` and `key` are a path, or None for Kafka's own."""
    usual: dict[str, Any] = {
        "event_times": () if event_time is None else (event_time,),
        "max_future_ms": 1_000,
        "keys": () if key is None else ((key,),),
        "heartbeat": (("type",), "heartbeat"),
    }
    return ReadingRules(**(usual | changed))


class Reading(NamedTuple):
    """What was read from a record; event time in ms."""

    merge_key: str | None = None
    event_time: int | None = None
    heartbeat: bool = False
    reason: str | None = None
    detail: str | None = None


Input = tuple[bytes | None, bytes | None, int]
"""Kafka key, value and Kafka's timestamp in ms."""


def kafka_table(inputs: Sequence[Input]) -> pa.Table:
    keys, values, times = zip(*inputs, strict=True) if inputs else ((), (), ())
    columns = {
        "topic": ["t"] * len(inputs),
        "partition": [3] * len(inputs),
        "offset": range(len(inputs)),
        "kafka_timestamp": pa.array([time * 1000 for time in times], pa.int64()),
        "timestamp_type": [0] * len(inputs),
        "key": keys,
        "value": values,
        "headers": [[("key", b"first"), ("h", b"\x00"), ("h", None), ("key", k)] for k in keys],
    }
    return pa.table({name: pa.array(columns[name], KAFKA.field(name).type) for name in KAFKA.names})


def read_all(inputs: Sequence[Input], how: ReadingRules) -> list[Reading]:
    bronze = read_records(kafka_table(inputs), how)
    times_ms = [time and time // 1000 for time in bronze["event_time"].cast(pa.int64()).to_pylist()]
    rest = [bronze[name].to_pylist() for name in ("heartbeat", "reason", "detail")]
    return [
        Reading(*row) for row in zip(bronze["merge_key"].to_pylist(), times_ms, *rest, strict=True)
    ]


def read(
    value: bytes | None, *, kafka_key: bytes | None = None, kafka_time: int = FAR, **changed: Any
) -> Reading:
    [reading] = read_all([(kafka_key, value, kafka_time)], rules(**changed))
    return reading


def reason(value: bytes | None, **how: Any) -> str | None:
    reading = read(value, **how)
    if reading.reason is None:
        assert reading.detail is None
    else:
        assert reading[:3] == (None, None, False)
        assert reading.detail
    return reading.reason


def event_time(spelled: str) -> int | str | None:
    """The event time that a JSON text gives, or the reason why it is none."""
    reading = read(f'{{"k":"a","ts":{spelled}}}'.encode())
    return reading.event_time if reading.reason is None else reading.reason


def nested(levels: int, opening: bytes = b"[", closing: bytes = b"]", core: bytes = b"") -> bytes:
    """A value of so many levels, its own object counted."""
    return b'{"k":"a","ts":1,"x":' + opening * (levels - 1) + core + closing * (levels - 1) + b"}"


# -- tombstones


def test_a_tombstone_is_refused_or_skipped_and_an_empty_value_is_no_tombstone() -> None:
    assert read(None, skips_tombstones=True) == Reading()
    assert reason(None) == reason(b"", skips_tombstones=True) == "undecodable"
    assert read(b'{"k":"a","ts":1}', skips_tombstones=True) == Reading("a", 1)


# -- undecodable


def test_a_plain_record_is_read() -> None:
    assert read(b'{"k":"a","ts":1}') == Reading(merge_key="a", event_time=1)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(None, id="tombstone"),
        pytest.param(b"", id="empty"),
        pytest.param(b" \n", id="only white space"),
        pytest.param(b'{"k":"\xff","ts":1}', id="not UTF-8"),
        pytest.param(b'{"k":"\xed\xa0\x80","ts":1}', id="a surrogate in UTF-8"),
        pytest.param('{"k":"a","ts":1}'.encode("utf-16"), id="UTF-16"),
        pytest.param('{"k":"a","ts":1}'.encode("utf-16-be"), id="UTF-16 without a mark"),
        pytest.param(b'\xef\xbb\xbf{"k":"a","ts":1}', id="byte order mark"),
        pytest.param(b"{'k':'a','ts':1}", id="single quotes"),
        pytest.param(b'{k:"a","ts":1}', id="bare name"),
        pytest.param(b'{"k":"a","ts":1/**/}', id="comment"),
        pytest.param(b'{"k":"a","ts":1}//', id="comment at the end"),
        pytest.param(b'{"k":"a","ts":1,"x":NaN}', id="NaN"),
        pytest.param(b'{"k":"a","ts":1,"x":Infinity}', id="Infinity"),
        pytest.param(b'{"k":"a","ts":1,"x":-Infinity}', id="-Infinity"),
        pytest.param(b'{"k":"a","ts":1,}', id="trailing comma"),
        pytest.param(b'{"k":"a","ts":1,"x":[1,]}', id="trailing comma in an array"),
        pytest.param(b'{"k":"a\nb","ts":1}', id="line break in a string"),
        pytest.param(b'{"k":"a\x00b","ts":1}', id="NUL in a string"),
        pytest.param(b'{"k":"a","ts":1,"x":"\x1f"}', id="control character in a string"),
        pytest.param(b'{"k":"a","ts":1}x', id="trailing garbage"),
        pytest.param(b'{"k":"a","ts":1}\x00', id="trailing NUL"),
        pytest.param(b'{"k":"a","ts":1}{"k":"a","ts":1}', id="two documents"),
        pytest.param(b'{"k":"a","ts":1', id="cut off"),
        pytest.param(b'{"k":"a","ts":01}', id="leading zero"),
        pytest.param(b'{"k":"a","ts":+1}', id="plus sign"),
        pytest.param(b'{"k":"a","ts":1.}', id="no digit after the point"),
        pytest.param(b'{"k":"a","ts":.5}', id="no digit before the point"),
        pytest.param(b'{"k":"a","ts":0x1}', id="hexadecimal"),
        pytest.param('{"k":"a","ts":١}'.encode(), id="digit of another script"),
        pytest.param(b'{"k":"a","ts":True}', id="Python's true"),
        pytest.param(b'{"k":"\\x41","ts":1}', id="unknown escape"),
        pytest.param(b'{"k":"\\u00g0","ts":1}', id="no hexadecimal digit"),
        pytest.param(b'{"k":"\\ud800","ts":1}', id="lone high surrogate"),
        pytest.param(b'{"k":"a","ts":1,"x":"\\udc00"}', id="lone low surrogate"),
        pytest.param(b'{"k":"a","ts":1,"\\ud800":1}', id="lone surrogate in a name"),
        pytest.param(b'[{"k":"a","ts":1}]', id="array"),
        pytest.param(b'"a"', id="string"),
        pytest.param(b"1", id="number"),
        pytest.param(b"null", id="null"),
    ],
)
def test_what_is_no_strict_json_object_is_undecodable(value: bytes | None) -> None:
    assert reason(value) == "undecodable"


@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400])
@pytest.mark.parametrize(
    "around",
    [
        '{"k":"a","ts":1,"x":#,}',
        '{"k":"a","ts":1,"x":#}x',
        '{"k":"a","ts":1,"x":#}{}',
        '{"k":"a","ts":1,"x":#,"y":NaN}',
        '{"k":"a","ts":1,"x":#,"y":Infinity}',
        '{"k":"a","ts":1,"x":#,"y":01}',
        '{"k":"a","ts":1,"x":#,"y":"\n"}',
        '{"k":"a","ts":1,"x":#,"y":"\\ud800"}',
        '{"k":"a","ts":1,"x":#,"\\udc00":1}',
        '{"k":"a","ts":1,"x":#,\'y\':1}',
        '{"k":"a","ts":1,"x":#,"y":' + "[" * 600 + "]" * 600 + "}",
        '{"k":"a","ts":1,"x":#,"y":' + "[" * 100_000 + "]" * 100_000 + "}",
        "[#]",
        "#",
    ],
)
def test_a_huge_number_excuses_no_other_fault(
    around: str, number: str, schema: ValueSchema | None
) -> None:
    assert reason(around.replace("#", number).encode(), schema=schema) == "undecodable"


def test_a_huge_number_excuses_no_value_that_is_not_utf8() -> None:
    assert reason(b'{"k":"a","ts":1,"x":1e999,"y":"\xff"}') == "undecodable"


@pytest.mark.parametrize(
    "value",
    [
        b' \t\r\n{ "k" : "a" , "ts" : 1 } \n',
        b'{"k":"a","ts":1,"x":"\x7f"}',
        '{"k":"a","ts":1,"x":"\u2028\u0085\ufeff"}'.encode(),
        b'{"k":"a","ts":1,"x":"\\ud83d\\ude00\\u0000\\/"}',
        b'{"k":"a","ts":1,"":{"":[]}}',
        b'{"k":"a","ts":1,"x":-0.0E+00}',
    ],
)
def test_unusual_but_strict_json_is_read(value: bytes) -> None:
    assert read(value) == Reading("a", 1)


@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_a_large_value_is_read(schema: ValueSchema | None) -> None:
    value = b'{"k":"a","ts":1,"s":"' + b'x\\"{[:' * 150_000 + b'"}'
    assert len(value) > 900_000
    assert read(value, schema=schema) == Reading("a", 1)


@pytest.mark.parametrize(("schema", "most"), [(None, MAX_DEPTH), (SCHEMA, MAX_DEPTH_WITH_SCHEMA)])
@pytest.mark.parametrize(
    ("opening", "closing", "core"),
    [(b"[", b"]", b""), (b'{"y":', b"}", b"1"), (b'[{"[":1},', b"]", b"2")],
)
def test_nesting_is_read_up_to_a_limit(
    schema: ValueSchema | None, most: int, opening: bytes, closing: bytes, core: bytes
) -> None:
    assert reason(nested(most - 1, opening, closing, core), schema=schema) is None
    for levels in (most + 1, 1_000, 1_020, 100_000):
        assert reason(nested(levels, opening, closing, core), schema=schema) == "undecodable"


@pytest.mark.parametrize(("schema", "most"), [(None, MAX_DEPTH), (SCHEMA, MAX_DEPTH_WITH_SCHEMA)])
def test_the_deepest_value_is_read_in_every_way(schema: ValueSchema | None, most: int) -> None:
    assert reason(nested(most), schema=schema) is None
    assert reason(nested(most + 1), schema=schema) == "undecodable"
    by_text = nested(most).replace(b'"ts":1', b'"ts":1.0')
    assert read(by_text, schema=schema, key=("ts",)) == Reading("1.0", 1)


def test_a_repeated_name_hides_no_nesting() -> None:
    hidden = b'{"k":"a","x":' + b"[" * 900 + b"]" * 900 + b',"x":1,"ts":1.0}'
    assert reason(hidden) == "undecodable"


def test_a_backslash_before_a_closing_quote_hides_no_nesting() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert reason(b'{"k":"a","ts":1,"x":"\\\\","y":' + deep + b',"z":"\\\\\\""}') == "undecodable"


def test_brackets_in_strings_are_no_nesting() -> None:
    value = orjson.dumps({"k": "a", "ts": 1, "x": '{["\\' * 2_000, '[{"\\': "\\"})
    assert read(value) == Reading("a", 1)


def test_many_brackets_side_by_side_are_no_nesting() -> None:
    assert read(orjson.dumps({"k": "a", "ts": 1, "x": [[{}]] * 1_000})) == Reading("a", 1)


# -- undecodable: the schema, and what Spark's parser would not read alike


@pytest.mark.parametrize(
    "value",
    [
        b'{"k":"a"}',
        b'{"k":"a","ts":1,"n":"1"}',
        b'{"k":"a","ts":1,"n":1.5}',
        b'{"k":"a","ts":null}',
    ],
)
def test_what_does_not_fit_the_schema_is_undecodable(value: bytes) -> None:
    reading = read(value, schema=SCHEMA)
    assert reading.reason == "undecodable"
    assert reading.detail is not None
    assert reading.detail.startswith("does not fit the schema: $")


HUGE = [
    "1e999",
    "-1e999",
    "1e99999999999999999999",
    "1" * 400,
    "1" * 10_000,
    "-" + "9" * 5_000 + ".5",
    "1" * 900_000,
]


@pytest.mark.parametrize("number", HUGE, ids=range(len(HUGE)))
def test_a_huge_number_is_read_without_a_schema_only(number: str) -> None:
    value = f'{{"k":"a","ts":1,"x":{number}}}'.encode()
    assert read(value) == Reading("a", 1)
    assert reason(value, schema=SCHEMA) == "undecodable"


@pytest.mark.parametrize(
    "number",
    [
        "0." + "1" * (MAX_NUMBER_LENGTH - 1),
        "-0." + "0" * (MAX_NUMBER_LENGTH - 2),
        "1e-" + "0" * (MAX_NUMBER_LENGTH - 3) + "1",
        f"1e-{MAX_EXPONENT + 1}",
        f"0E+{MAX_EXPONENT + 1}",
        "1e-9999999999",
        "0e9999999999",
    ],
)
@pytest.mark.parametrize(
    "around",
    [
        '{"k":"a","ts":1,"d":#}',
        '{"k":"a","ts":1,"d":#\n}',
        '{"k":"a","x":[#],"ts":1}',
        '{"x":[#,1],"k":"a","ts":1}',
    ],
)
def test_an_unwieldy_number_is_read_without_a_schema_only(number: str, around: str) -> None:
    value = around.replace("#", number).encode()
    assert read(value) == Reading("a", 1)
    assert reason(value, schema=SCHEMA) == "undecodable"


@pytest.mark.parametrize(
    "field",
    [
        f'"d":0.{"1" * (MAX_NUMBER_LENGTH - 2)}',
        f'"d":1e-{MAX_EXPONENT}',
        '"d":1e-000000000000000001',
        '"n":1e3',
        '"n":9223372036854775807',
        f'"s":"{"1" * (MAX_NUMBER_LENGTH + 1)}"',
        '"s":"1e-99999999999"',
        '"s":"1e-99999999999 , 1e-99999999999}"',
        f'"{"x" * MAX_NAME_LENGTH}":1',
        f'"s":"{"x" * 2 * MAX_NAME_LENGTH}"',
        '"s":"a:b::c"',
        '"s":"a\\u003ab\\u003Ac"',
        '"x":{"k":1,"ts":{"k":1}},"y":[{"k":1},{"k":2}]',
        '"K":1,"":1',
    ],
)
def test_what_only_looks_unwieldy_or_repeated_is_read(field: str) -> None:
    assert read(f'{{"k":"a","ts":1,{field}}}'.encode(), schema=SCHEMA) == Reading("a", 1)


@pytest.mark.parametrize(
    "name", ["x" * (MAX_NAME_LENGTH + 1), "x" * 60_000, "\U0001f600" * (MAX_NAME_LENGTH + 1)]
)
def test_a_name_of_many_pages_is_read_without_a_schema_only(name: str) -> None:
    value = orjson.dumps({"k": "a", "ts": 1, "x": [{name: 1}]})
    assert read(value) == Reading("a", 1)
    assert reason(value, schema=SCHEMA) == "undecodable"


@pytest.mark.parametrize(
    "value",
    [
        b'{"ts":1,"k":"z","k":"a"}',
        b'{"k":"a","ts":"no time","ts":1}',
        b'{"k":"z","ts":1,"\\u006b":"a"}',
        b'{"k":"a","ts":1,"x":{"y":1,"y":1}}',
        b'{"k":"a","ts":1,"x":[{"y":1},{"z":1,"y":1,"z":2}]}',
        b'{"k":"a","ts":1,"x":"","x":"\\u003a"}',
        b'{"k":"a","ts":1,"x":"","x":"\\u003A"}',
        b'{"k":"a","ts":1,"\\u003a":"","\\u003a":""}',
        b'{"k":"a","ts":1,"x":{"k":1},"x":null}',
        b'{"k":"a","ts":1,"":1,"":2}',
    ],
)
def test_of_a_repeated_name_the_last_counts_and_a_schema_allows_none(value: bytes) -> None:
    assert read(value) == Reading("a", 1)
    assert reason(value, schema=SCHEMA) == "undecodable"


def test_the_last_of_a_repeated_name_counts_in_every_way() -> None:
    value = b'{"k":{"i":2.50},"ts":5.5,"k":{"i":1.50},"ts":7.9}'
    assert read(value, key=("k", "i")) == Reading("1.50", 7)


# -- no_key


@pytest.mark.parametrize(
    ("spelled", "key"),
    [
        ('"a"', "a"),
        ('"1"', "1"),
        ('" "', " "),
        ('"\\u00e9"', "é"),
        ('"\\u0000"', "\x00"),
        ("1", "1"),
        ("-1", "-1"),
        ("0", "0"),
        ("-0", "-0"),
        ("-0.0", "-0.0"),
        ("1.0", "1.0"),
        ("1.10", "1.10"),
        ("1e3", "1e3"),
        ("1E+03", "1E+03"),
        ("0.1000000000000000055511151231257827", "0.1000000000000000055511151231257827"),
        ("9223372036854775808", "9223372036854775808"),
        ("18446744073709551616", "18446744073709551616"),
        ("12345678901234567890123", "12345678901234567890123"),
        ("1e999", "1e999"),
        ("1e-99999999999999999999", "1e-99999999999999999999"),
        ("7" * 5_000, "7" * 5_000),
        ("true", "true"),
        ("false", "false"),
    ],
)
def test_a_key_in_the_value_counts_as_its_json_text(spelled: str, key: str) -> None:
    assert read(f'{{"ts":1,"k":{spelled}}}'.encode()) == Reading(key, 1)
    assert read(
        f'{{"ts":1,"o":{{"p":{{"q": {spelled} }}}}}}'.encode(), key=("o", "p", "q")
    ) == Reading(key, 1)
    assert read(f'{{"ts":1,"k":{spelled},"x":1e999}}'.encode()) == Reading(key, 1)


@pytest.mark.parametrize("spelled", ["null", '""', "{}", '{"k":"a"}', "[]", '["a"]'])
def test_what_cannot_be_a_key_is_no_key(spelled: str) -> None:
    assert reason(f'{{"ts":1,"k":{spelled}}}'.encode()) == "no_key"


@pytest.mark.parametrize(
    "value",
    [
        b'{"ts":1}',
        b'{"ts":1,"o":1}',
        b'{"ts":1,"o":null}',
        b'{"ts":1,"o":[{"k":"a"}]}',
        b'{"ts":1,"o":{}}',
        b'{"ts":1,"o.k":"a"}',
        b'{"ts":1,"o":"k"}',
    ],
)
def test_a_key_path_that_leads_nowhere_is_no_key(value: bytes) -> None:
    assert reason(value, key=("o", "k")) == "no_key"


@pytest.mark.parametrize(
    ("kafka_key", "merge_key"),
    [
        (b"a", "a"),
        (b" ", " "),
        (b"\x00", "\x00"),
        ("é\U0001f600".encode(), "é\U0001f600"),
        (b"\xef\xbb\xbfa", "\ufeffa"),
    ],
)
def test_the_kafka_key_is_taken_as_utf8(kafka_key: bytes, merge_key: str) -> None:
    assert read(b'{"ts":1,"k":"not this"}', kafka_key=kafka_key, key=None) == Reading(merge_key, 1)


@pytest.mark.parametrize("kafka_key", [None, b"", b"\xff", b"a\xc3", b"\xed\xa0\x80"])
def test_a_kafka_key_that_is_missing_empty_or_not_utf8_is_no_key(kafka_key: bytes | None) -> None:
    assert reason(b'{"ts":1,"k":"not this"}', kafka_key=kafka_key, key=None) == "no_key"


def test_with_a_key_path_the_kafka_key_does_not_matter() -> None:
    for kafka_key in (None, b"", b"\xff", b"other"):
        assert read(b'{"ts":1,"k":"a"}', kafka_key=kafka_key) == Reading("a", 1)
        assert reason(b'{"ts":1}', kafka_key=kafka_key) == "no_key"


# -- no_event_time

MIDNIGHT = 1_767_225_600_000
"""2026-01-01T00:00:00Z"""


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        ("0", 0),
        ("-0", 0),
        ("-0.0", 0),
        ("0.9999", 0),
        ("1700000000000", 1_700_000_000_000),
        ("1700000000000.0", 1_700_000_000_000),
        ("1700000000000.9999999999", 1_700_000_000_000),
        ("1700000000000." + "9" * 5_000, 1_700_000_000_000),
        ("1.7e12", 1_700_000_000_000),
        ("1.7E+12", 1_700_000_000_000),
        ("17000000000009e-1", 1_700_000_000_000),
        ("1e3", 1_000),
        ("1e-3", 0),
        ("1e-400", 0),
        ("1e-999999999999999999", 0),
        ("1e-99999999999999999999", 0),
        ("0e99999999999999999999", 0),
        ("0e999", 0),
        ("253402300799999", LAST_EVENT_TIME_MS),
        ("253402300799999.9999999999", LAST_EVENT_TIME_MS),
        ("253402300800000", "no_event_time"),
        ("253402300800000.0", "no_event_time"),
        ("9223372036854775807", "no_event_time"),
        ("9223372036854775808", "no_event_time"),
        ("18446744073709551617", "no_event_time"),
        ("1e400", "no_event_time"),
        ("1e99999999999999999999", "no_event_time"),
        ("9" * 5_000, "no_event_time"),
        ("-1", "no_event_time"),
        ("-0.5", "no_event_time"),
        ("-1e-400", "no_event_time"),
        ("-1e400", "no_event_time"),
        ("-9223372036854775809", "no_event_time"),
    ],
)
def test_a_number_is_epoch_milliseconds_cut_exactly(spelled: str, expected: int | str) -> None:
    assert event_time(spelled) == expected


@pytest.mark.parametrize(
    ("spelled", "unit", "expected"),
    [
        ("1700000000", "s", 1_700_000_000_000),
        ("1700000000.9999", "s", 1_700_000_000_999),
        ("1.9999" + "9" * 5_000, "s", 1_999),
        ("17e8", "s", 1_700_000_000_000),
        ("1e-3", "s", 1),
        ("1e-999999999999999999", "s", 0),
        ("253402300799.999", "s", LAST_EVENT_TIME_MS),
        ("253402300800", "s", "no_event_time"),
        ("9e999999999999999999", "s", "no_event_time"),
        ("9223372036854775807", "s", "no_event_time"),
        ("-0.0001", "s", "no_event_time"),
        ("1700000000000999", "us", 1_700_000_000_000),
        ("1700000000000999.9", "us", 1_700_000_000_000),
        ("253402300799999999", "us", LAST_EVENT_TIME_MS),
        ("253402300800000000", "us", "no_event_time"),
        ("-1", "us", "no_event_time"),
        ("1700000000000999999", "ns", 1_700_000_000_000),
        ("18446744073709551615", "ns", 18_446_744_073_709),
        ("18446744073709999999", "ns", 18_446_744_073_709),
        ("253402300799999999999.9", "ns", LAST_EVENT_TIME_MS),
        ("253402300800000000000", "ns", "no_event_time"),
        ("-1", "ns", "no_event_time"),
    ],
)
def test_a_number_of_any_unit_is_cut_exactly_to_milliseconds(
    spelled: str, unit: str, expected: int | str
) -> None:
    reading = read(f'{{"k":"a","ts":{spelled}}}'.encode(), unit=unit)
    assert (reading.event_time if reading.reason is None else reading.reason) == expected


@given(
    st.from_regex(r"-?(0|[1-9][0-9]{0,22})(\.[0-9]{1,12})?([eE][+-]?[0-9]{1,2})?", fullmatch=True),
    st.sampled_from(list(MILLISECONDS_PER_UNIT)),
)
def test_a_number_is_what_exact_arithmetic_makes_of_it(spelled: str, unit: str) -> None:
    exact = Fraction(spelled) * Fraction(10) ** MILLISECONDS_PER_UNIT[unit]
    reading = read(f'{{"k":"a","ts":{spelled}}}'.encode(), unit=unit)
    expected = int(exact) if 0 <= exact < LAST_EVENT_TIME_MS + 1 else None
    assert (reading.event_time, reading.reason) == (
        expected,
        None if expected is not None else "no_event_time",
    )


@pytest.mark.parametrize("unit", list(MILLISECONDS_PER_UNIT))
def test_a_string_is_iso_8601_whatever_the_unit(unit: str) -> None:
    assert read(b'{"k":"a","ts":"1970-01-01T00:00:07Z"}', unit=unit) == Reading("a", 7_000)
    assert read(b'{"k":"a","ts":"1700000000"}', unit=unit).reason == "no_event_time"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-01", 0),
        ("2026-01-01T00:00:00Z", 0),
        ("2026-01-01T00:00:00", 0),
        ("2026-01-01T00:00", 0),
        ("2026-01-01T00:00Z", 0),
        ("2026-01-01t00:00:00z", 0),
        ("2026-01-01 00:00:00", 0),
        ("20260101T000000Z", 0),
        ("20260101T0000", 0),
        ("2026-01-01T00:00:00.5Z", 500),
        ("2026-01-01T00:00:00,5Z", 500),
        ("2026-01-01T00:00:00.123Z", 123),
        ("2026-01-01T00:00:00.123999", 123),
        ("2026-01-01T00:00:00.0009Z", 0),
        ("2026-01-01T00:00:00.999" + "9" * 5_000, 999),
        ("2026-01-01T23:59:59.999Z", 86_399_999),
        ("2026-01-01T02:00:00+02:00", 0),
        ("2026-01-01T02:00:00+0200", 0),
        ("2026-01-01T02:00:00+02", 0),
        ("20260101T020000.5+02", 500),
        ("2025-12-31T18:30:00-05:30", 0),
        ("2026-01-01T00:00:00-00:00", 0),
        ("2026-01-01T23:59:00+23:59", 0),
        ("2024-02-29", -58_060_800_000),
    ],
)
def test_a_string_is_iso_8601(text: str, expected: int) -> None:
    assert event_time(f'"{text}"') == MIDNIGHT + expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1970-01-01", 0),
        ("1970-01-01T01:00+01:00", 0),
        ("1969-12-31T23:00-01:00", 0),
        ("1970-01-01T00:00:00.0009", 0),
        ("1970-01-01T00:59:59.999+01:00", "no_event_time"),
        ("1969-12-31T23:59:59.999Z", "no_event_time"),
        ("1969-12-31T23:59:59.9999Z", "no_event_time"),
        ("0001-01-01", "no_event_time"),
        ("0000-01-01", "no_event_time"),
        ("0000-02-29T00:00:00Z", "no_event_time"),
        ("0001-01-01T00:00:00+23:59", "no_event_time"),
        ("9999-12-31", LAST_EVENT_TIME_MS - 86_399_999),
        ("9999-12-31T23:59:59.999Z", LAST_EVENT_TIME_MS),
        ("9999-12-31T23:59:59.9999Z", LAST_EVENT_TIME_MS),
        ("9999-12-31T23:59:59.999+00:01", LAST_EVENT_TIME_MS - 60_000),
        ("9999-12-31T23:58:59.999-00:01", LAST_EVENT_TIME_MS),
        ("9999-12-31T23:59:00-00:01", "no_event_time"),
        ("10000-01-01T00:00:00Z", "no_event_time"),
        ("+10000-01-01T00:00:00Z", "no_event_time"),
        ("-0001-01-01T00:00:00Z", "no_event_time"),
    ],
)
def test_event_times_go_from_1970_to_9999_in_utc(text: str, expected: int | str) -> None:
    assert event_time(f'"{text}"') == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "1700000000000",
        "0",
        "1e3",
        "20260101",
        "2026",
        "2026-01",
        "2026-1-1",
        "26-01-01",
        "2026-W01-1",
        "2026-001",
        "2026/01/01",
        "01-01-2026",
        "2026-13-01",
        "2026-00-01",
        "2026-02-30",
        "2025-02-29",
        "2100-02-29",
        "2026-01-00",
        "2026-01-01T",
        "2026-01-01Z",
        "2026-01-01+01:00",
        "2026-01-01T24:00",
        "2026-01-01T24:00:00Z",
        "2026-01-01T25:00:00Z",
        "2026-01-01T00:60:00Z",
        "2026-01-01T23:59:60Z",
        "2026-01-01T00:00:00.",
        "2026-01-01T00:00:00.Z",
        "2026-01-01T00:00:00+24:00",
        "2026-01-01T00:00:00+01:60",
        "2026-01-01T00:00:00+1",
        "2026-01-01T00:00:00+01:00:00",
        "2026-01-01T00:00:00 Z",
        "2026-01-01T00:00:00 UTC",
        "2026-01-01T00:00:00Europe/Berlin",
        "2026-01-01T00:00:00Z[UTC]",
        " 2026-01-01T00:00:00Z",
        "2026-01-01T00:00:00Z ",
        "2026-01-01T00:00:00Z\\n",
        "2026-01-01T0000",
        "20260101T00:00",
        "20260101 000000",
        "Thu, 01 Jan 2026 00:00:00 GMT",
        "２０２６-01-01",
        "٢٠٢٦-01-01",
    ],
)
def test_another_string_is_no_event_time(text: str) -> None:
    assert event_time(f'"{text}"') == "no_event_time"


@pytest.mark.parametrize("spelled", ["null", "true", "false", "{}", "[]", "[1]", '{"ts":1}'])
def test_another_type_is_no_event_time(spelled: str) -> None:
    assert event_time(spelled) == "no_event_time"


@pytest.mark.parametrize(
    "value",
    [
        b'{"k":"a"}',
        b'{"k":"a","o":1}',
        b'{"k":"a","o":null}',
        b'{"k":"a","o":[{"ts":1}]}',
        b'{"k":"a","o.ts":1}',
    ],
)
def test_an_event_time_path_that_leads_nowhere_is_no_event_time(value: bytes) -> None:
    assert reason(value, event_time=("o", "ts")) == "no_event_time"


def test_an_event_time_may_lie_deep() -> None:
    assert read(b'{"k":"a","ts":9,"o":{"ts":{"ms":7.9}}}', event_time=("o", "ts", "ms")) == Reading(
        "a", 7
    )


# -- event_time_in_future


@pytest.mark.promise("C3")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize(
    ("event_time", "kafka_time", "expected"),
    [
        (5_000, 5_000, None),
        (5_000, 9_000, None),
        (6_000, 5_000, None),
        (6_001, 5_000, "event_time_in_future"),
        (1_000, 0, None),
        (1_001, 0, "event_time_in_future"),
        (LAST_EVENT_TIME_MS, 5_000, "event_time_in_future"),
        (LAST_EVENT_TIME_MS, NO_KAFKA_TIME, "event_time_in_future"),
        (5_000, NO_KAFKA_TIME, "event_time_in_future"),
        (0, -((2**63 - 1) // 1_000), "event_time_in_future"),
    ],
)
@pytest.mark.parametrize("kind", ["", ',"type":"heartbeat"'])
def test_an_event_time_may_lie_just_so_far_after_kafkas(
    event_time: int, kafka_time: int, expected: str | None, kind: str
) -> None:
    value = f'{{"k":"a","ts":{event_time}{kind}}}'.encode()
    assert reason(value, kafka_time=kafka_time, max_future_ms=1_000) == expected


def test_a_record_without_a_timestamp_says_that_nothing_vouches_for_it() -> None:
    assert read(b'{"k":"a","ts":1}', kafka_time=NO_KAFKA_TIME).detail == (
        "Kafka's own timestamp of the record is -1: nothing vouches for its event time"
    )


def test_a_fraction_is_cut_before_it_is_compared_with_kafkas_time() -> None:
    assert reason(b'{"k":"a","ts":6000.9}', kafka_time=5_000) is None


def test_no_future_may_be_allowed() -> None:
    assert reason(b'{"k":"a","ts":5000}', kafka_time=5_000, max_future_ms=0) is None
    assert (
        reason(b'{"k":"a","ts":5001}', kafka_time=5_000, max_future_ms=0) == "event_time_in_future"
    )


# -- heartbeats


def test_a_heartbeat_needs_no_key() -> None:
    for key in ("", ',"k":null', ',"k":"a"', ',"k":{}'):
        assert read(f'{{"ts":1,"type":"heartbeat"{key}}}'.encode()) == Reading(
            None, 1, heartbeat=True
        )
    for kafka_key in (None, b"", b"\xff"):
        assert read(b'{"ts":1,"type":"heartbeat"}', kafka_key=kafka_key, key=None) == Reading(
            None, 1, heartbeat=True
        )


@pytest.mark.parametrize(
    "ts", ["", ',"ts":null', ',"ts":"soon"', ',"ts":-1', ',"ts":true', ',"ts":253402300800000']
)
def test_a_heartbeat_needs_an_event_time(ts: str) -> None:
    assert reason(f'{{"type":"heartbeat"{ts}}}'.encode()) == "no_event_time"


@pytest.mark.parametrize(
    ("wanted", "found", "is_heartbeat"),
    [
        ("heartbeat", '"heartbeat"', True),
        ("heartbeat", '"\\u0068eartbeat"', True),
        ("heartbeat", '"Heartbeat"', False),
        ("heartbeat", '["heartbeat"]', False),
        ("heartbeat", "null", False),
        ("1", '"1"', True),
        ("1", "1", False),
        ("true", "true", False),
        ("", '""', True),
        ("", "null", False),
        (True, "true", True),
        (True, "false", False),
        (True, "1", False),
        (True, '"true"', False),
        (False, "false", True),
        (False, "0", False),
        (False, "null", False),
        (1, "1", True),
        (1, "1.0", True),
        (1, "10e-1", True),
        (1, "true", False),
        (1, '"1"', False),
        (0, "false", False),
        (0, "-0", True),
        (0.1, "0.1", True),
        (0.1, "1e-1", True),
        (1.0, "1", True),
        (1.0, "true", False),
    ],
)
@pytest.mark.parametrize("beside", ["", ',"x":1e999'])
def test_a_heartbeat_is_told_by_jsons_own_equality(
    wanted: str | float | bool, found: str, is_heartbeat: bool, beside: str
) -> None:
    value = f'{{"ts":1,"k":"a","o":{{"type":{found}}}{beside}}}'.encode()
    expected = Reading(None, 1, heartbeat=True) if is_heartbeat else Reading("a", 1)
    assert read(value, heartbeat=(("o", "type"), wanted)) == expected


def test_without_the_field_or_the_setting_a_record_is_no_heartbeat() -> None:
    assert read(b'{"ts":1,"k":"a"}') == Reading("a", 1)
    assert read(b'{"ts":1,"k":"a","type":"heartbeat"}', heartbeat=None) == Reading("a", 1)
    assert reason(b'{"ts":1,"type":"heartbeat"}', heartbeat=None) == "no_key"


# -- the order of reasons

FAULTS: dict[Reason, dict[str, Any]] = {
    Reason.TOO_LARGE: {"s": "x" * 100},
    Reason.UNDECODABLE: {"n": "no integer"},
    Reason.NO_KEY: {"k": ""},
    Reason.NO_TENANT: {"g": ""},
    Reason.NO_EVENT_TIME: {"ts": "soon"},
    Reason.EVENT_TIME_IN_FUTURE: {"ts": 5_000},
}


@pytest.mark.promise("R9")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize("chosen", range(1, 2 ** len(FAULTS)))
def test_of_several_faults_the_first_in_order_is_the_reason(chosen: int) -> None:
    faults = [fault for i, fault in enumerate(Reason) if chosen >> i & 1]
    document: dict[str, Any] = {"k": "a", "g": "x", "ts": 1}
    for fault in reversed(faults):  # no event time is both unreadable and in the future
        document |= FAULTS[fault]
    assert (
        reason(
            orjson.dumps(document), kafka_time=0, schema=SCHEMA, tenant=("g",), max_record_bytes=100
        )
        == faults[0].value
    )


def test_reasons_are_named_and_ordered_as_the_contract_has_them() -> None:
    assert [reason.value for reason in Reason] == [
        "too_large",
        "undecodable",
        "no_key",
        "no_tenant",
        "no_event_time",
        "event_time_in_future",
    ]


# -- the sources of one topic

CLICK = (("type",), "click")


def test_what_is_not_a_sources_own_is_a_heartbeat_whatever_it_lacks() -> None:
    for other in (
        b'{"ts":1,"k":"a","type":"order"}',
        b'{"ts":1,"k":"a"}',
        b'{"ts":1}',
        b'{"ts":1,"type":1}',
        b'{"ts":1,"n":"x"}',
    ):
        assert read(other, where=CLICK, schema=SCHEMA) == Reading(None, 1, heartbeat=True)
    assert read(b'{"ts":1,"k":"a","type":"click"}', where=CLICK) == Reading("a", 1)


def test_what_is_not_a_sources_own_and_has_no_time_that_it_can_read_is_passed_over() -> None:
    for other in (b'{"k":"a"}', b'{"ts":"soon","type":"order"}', b'{"ts":-1}'):
        assert read(other, where=CLICK) == Reading()
    assert read(b'{"ts":2000}', where=CLICK, kafka_time=1) == Reading(), (
        "a time from the future must not move the clock"
    )


def test_a_sources_own_records_are_refused_as_without_the_others() -> None:
    assert reason(b'{"ts":1,"type":"click"}', where=CLICK) == "no_key"
    assert reason(b'{"k":"a","type":"click"}', where=CLICK) == "no_event_time"
    assert (
        reason(b'{"ts":1,"k":"a","type":"click","n":"x"}', where=CLICK, schema=SCHEMA)
        == "undecodable"
    )


@pytest.mark.parametrize("value", [b"{", b"[1]", b"\xff", None])
def test_what_cannot_be_decoded_is_refused_once(value: bytes | None) -> None:
    assert reason(value, where=CLICK) == "undecodable"
    assert read(value, where=CLICK, leaves_undecodable=True) == Reading()


def test_a_heartbeat_speaks_for_every_source_of_the_topic() -> None:
    assert read(b'{"ts":1,"type":"heartbeat"}', where=CLICK) == Reading(None, 1, heartbeat=True)


# -- whatever comes

RULES = [
    rules(),
    rules(key=None, heartbeat=None),
    rules(key=("k", "k"), event_time=("ts", "ts")),
    rules(schema=SCHEMA),
    rules(schema=SCHEMA, key=None, heartbeat=(("type",), 1)),
    rules(schema=SCHEMA, where=(("type",), "heartbeat")),
]
TIMES = st.sampled_from([NO_KAFKA_TIME, 0, 5_000, FAR])


def check_all_rules(key: bytes | None, value: bytes | None, kafka_time: int) -> None:
    for each in RULES:
        [reading] = read_all([(key, value, kafka_time)], each)
        if each.where is not None and reading == Reading():
            continue
        if reading.reason is None:
            assert reading.event_time is not None
            assert 0 <= reading.event_time <= LAST_EVENT_TIME_MS
            assert (reading.merge_key is None) == reading.heartbeat
            assert reading.merge_key != ""
            assert reading.detail is None
        else:
            assert reading.reason in {reason.value for reason in Reason}
            assert reading[:3] == (None, None, False)
            assert reading.detail
            assert len(reading.detail.encode()) < 2_000


@pytest.mark.promise("R9")
@pytest.mark.fault("hostile")
@draws(30)
@given(key=st.none() | st.binary(), value=st.none() | st.binary(), kafka_time=TIMES)
def test_reading_never_raises(key: bytes | None, value: bytes | None, kafka_time: int) -> None:
    check_all_rules(key, value, kafka_time)


@draws(30)
@given(value=json_values(), kafka_time=TIMES)
def test_reading_never_raises_on_json(value: bytes, kafka_time: int) -> None:
    check_all_rules(None, value, kafka_time)
    assert read(value, kafka_time=kafka_time).reason != "undecodable"


@draws(30)
@given(data=st.data(), value=json_values())
def test_reading_never_raises_on_damaged_json(data: st.DataObject, value: bytes) -> None:
    at = data.draw(st.integers(0, len(value)))
    until = data.draw(st.integers(at, min(len(value), at + 3)))
    check_all_rules(b"a", value[:at] + data.draw(st.binary(max_size=3)) + value[until:], FAR)


@draws(30)
@given(value=json_values())
def test_a_schema_refuses_exactly_the_repeated_names(value: bytes) -> None:
    lax = ValueSchema(text="{}", type=pa.struct([]))
    repeats = False

    def look(pairs: list[tuple[str, Any]]) -> None:
        nonlocal repeats
        repeats |= len({name for name, _ in pairs}) < len(pairs)

    json.loads(value, object_pairs_hook=look)
    is_huge = read(value, schema=lax).detail == "a number is too large for any column"
    assert (reason(value, schema=lax) == "undecodable") == (repeats or is_huge)


# -- tables

VARIED: list[Input] = [
    (None, b'{"k":"a","ts":1}', FAR),
    (b"key", None, 0),
    (b"\xff", b'{"k":7,"ts":253402300799999,"type":"x"}', NO_KAFKA_TIME),
    (None, b'{"type":"heartbeat","ts":5}', 5),
    (None, b'{"k":"a","ts":5000}', 5),
    (None, b'{"k":"","ts":5000}', 5),
    ("é".encode(), b'{"ts":"2026-01-01T00:00:00.123456+01:00","k":12345678901234567890}', FAR),
]


def test_kafkas_columns_are_kept_in_their_order() -> None:
    kafka = kafka_table(VARIED)
    bronze = read_records(kafka, rules())
    assert bronze.schema == bronze_schema()
    assert bronze.select(KAFKA.names) == kafka
    assert bronze["kafka_timestamp"][2].as_py() == datetime.fromtimestamp(-0.001, timezone.utc)


def test_a_record_says_how_many_bytes_it_has() -> None:
    """Those of its key, its value and its headers, whatever was refused."""
    kafka = kafka_table(
        [(b"key", b"0123456789", FAR), (None, None, FAR), ("é".encode(), b"{", FAR)]
    )
    headers = pa.array(
        [[("a", b"xyz"), ("long", None)], None, []], pa.map_(pa.string(), pa.binary())
    ).cast(HEADERS)
    kafka = kafka.set_column(kafka.column_names.index("headers"), "headers", headers)
    assert read_records(kafka, rules())["record_bytes"].to_pylist() == [3 + 10 + 1 + 3 + 4, 0, 3]


def test_of_no_records_come_bronzes_columns() -> None:
    assert read_records(kafka_table([]), rules()) == bronze_schema().empty_table()
    assert read_records(KAFKA.empty_table(), rules()) == bronze_schema().empty_table()


@draws(30)
@given(data=st.data())
def test_records_are_read_alike_in_any_batches(data: st.DataObject) -> None:
    inputs = data.draw(st.lists(st.sampled_from(VARIED), max_size=12))
    whole = kafka_table(inputs)
    cut = data.draw(st.integers(0, len(inputs)))
    chunks = pa.concat_tables([whole.slice(0, cut), whole.slice(cut)])
    for each in RULES:
        expected = [reading for one in inputs for reading in read_all([one], each)]
        assert read_all(inputs, each) == expected
        assert read_records(chunks, each) == read_records(whole, each)
        assert [
            row for batch in chunks.to_batches() for row in read_records(batch, each).to_pylist()
        ] == (read_records(whole, each).to_pylist())


@pytest.mark.parametrize(
    "hostile",
    [
        b'{"k":"a","ts":1,"s":"' + b"1e" * 500_000 + b'"}',
        b'{"k":"a","ts":1,"s":"' + b"1" * 899 + (b"x" + b"1" * 899) * 1_000 + b'"}',
        b'{"k":"a","ts":1,"s":"' + b'\\"' * 450_000 + b'"}',
        b'{"k":"a","ts":1,"s":"' + b"\\\\" * 450_000 + b'","x":[' + b"[]," * 600 + b"[]]}",
        b'{"k":"a","ts":1,"x":[' + b"[]," * 300_000 + b"[]]}",
        b'{"k":"a","ts":1,"x":' + b'{"y":' * 900_000,
    ],
)
def test_no_value_of_a_megabyte_takes_long(hostile: bytes) -> None:
    started = time.process_time()
    for schema in (None, SCHEMA):
        read(hostile, schema=schema)
    assert time.process_time() - started < 5


# -- ids


def ids(*values: bytes | None, **changed: Any) -> list[str | None]:
    how = rules(**({"id": ("e", "id")} | changed))
    return list(read_records(kafka_table([(b"k", v, FAR) for v in values]), how)["id"].to_pylist())


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        ('"a"', "a"),
        ('"7"', "7"),
        ("7", "7"),
        ("7.0", "7.0"),
        ("7e0", "7e0"),
        ("true", "true"),
        ('""', None),
        ("null", None),
        ("[1]", None),
        ('{"a":1}', None),
    ],
)
def test_an_id_is_text_and_a_number_or_boolean_its_json_text(
    spelled: str, expected: str | None
) -> None:
    value = f'{{"k":"a","ts":1,"e":{{"id":{spelled}}}}}'.encode()
    assert ids(value) == [expected]


def test_a_record_without_a_key_has_no_id() -> None:
    assert ids(
        b'{"k":"a","ts":1,"e":{"id":1}}',
        b'{"k":"a","ts":1}',
        b'{"ts":1,"type":"heartbeat","e":{"id":1}}',
        b'{"ts":1,"e":{"id":1}}',
        b"{",
        None,
        b'{"k":"b","ts":1,"e":{"id":2}}',
    ) == ["1", None, None, None, None, None, "2"]


def test_a_source_without_ids_has_the_column_only_where_another_has_some() -> None:
    value = b'{"k":"a","ts":1,"e":{"id":1}}'
    assert ids(value, id=()) == [None]
    assert ids(value, value, key=None) == ["1", "1"]
    kafka = kafka_table([(None, value, FAR)])
    assert "id" not in read_records(kafka, rules()).column_names
    assert read_records(kafka, rules(id=())).schema == bronze_schema(has_ids=True)

"""Reading Avro: keys, event times and heartbeats are found in the decoded value, under the same
rules as in JSON."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_reading import FAR, Reading, kafka_table, read, read_all, rules
from tests.support.avro import as_text, decoded, encoded, logical, schemas_with_values
from tests.support.effort import draws
from watersmeet.core.avro_schema import avro_schema
from watersmeet.core.reading import Reason, merge_keys, read_records

law = draws(60)
UTC = timezone.utc
INSTANT = datetime(2026, 1, 2, 3, 4, 5, 6789, UTC)
INSTANT_MS = 1_767_323_045_006
UNDECODABLE, NO_KEY, NO_EVENT_TIME = (
    Reason.UNDECODABLE.value,
    Reason.NO_KEY.value,
    Reason.NO_EVENT_TIME.value,
)


def of(**fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "R",
        "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
    }


def reading(schema: dict[str, Any], value: Any, **how: Any) -> Reading:
    content = value if isinstance(value, bytes) or value is None else encoded(schema, value)
    return read(content, schema=avro_schema(as_text(schema), Path("x.avsc")), **how)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (logical("long", "timestamp-millis"), INSTANT, INSTANT_MS),
        (logical("long", "timestamp-micros"), INSTANT, INSTANT_MS),
        (logical("long", "timestamp-nanos"), INSTANT_MS * 1_000_000 + 999_999, INSTANT_MS),
        (logical("long", "local-timestamp-millis"), INSTANT.replace(tzinfo=None), INSTANT_MS),
        (logical("long", "local-timestamp-micros"), INSTANT.replace(tzinfo=None), INSTANT_MS),
        (logical("int", "date"), date(2026, 1, 2), 1_767_312_000_000),
        ("long", INSTANT_MS, INSTANT_MS),
        ("long", 0, 0),
        ("int", 7, 7),
        ("double", INSTANT_MS + 0.9, INSTANT_MS),
        (logical("bytes", "decimal", precision=20, scale=3), Decimal("17.999"), 17),
        ("string", "2026-01-02T04:04:05.0067+01:00", INSTANT_MS),
        (["null", "long"], 5, 5),
        ("long", -1, NO_EVENT_TIME),
        ("double", -0.5, NO_EVENT_TIME),
        ("double", float("nan"), NO_EVENT_TIME),
        ("double", float("inf"), NO_EVENT_TIME),
        ("double", float("-inf"), NO_EVENT_TIME),
        ("long", FAR + 1, NO_EVENT_TIME),
        (logical("long", "timestamp-millis"), datetime(1969, 12, 31, tzinfo=UTC), NO_EVENT_TIME),
        ("string", "5", NO_EVENT_TIME),
        ("boolean", True, NO_EVENT_TIME),
        ("bytes", b"5", NO_EVENT_TIME),
        (["null", "long"], None, NO_EVENT_TIME),
        ({"type": "array", "items": "long"}, [1], NO_EVENT_TIME),
        (of(x="long"), {"x": 1}, NO_EVENT_TIME),
    ],
)
def test_an_event_time_is_what_its_type_says(kind: Any, value: Any, expected: int | str) -> None:
    inner = {**kind, "name": "In"} if isinstance(kind, dict) and kind["type"] == "record" else kind
    found = reading(of(k="string", ts=inner), {"k": "a", "ts": value})
    assert (found.event_time if isinstance(expected, int) else found.reason) == expected


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (logical("long", "timestamp-millis"), INSTANT),
        (logical("long", "timestamp-micros"), INSTANT),
        (logical("long", "local-timestamp-millis"), INSTANT.replace(tzinfo=None)),
        ("string", INSTANT.isoformat()),
    ],
)
def test_a_time_is_one_whatever_the_unit_of_numbers_is(kind: Any, value: Any, unit: str) -> None:
    assert (
        reading(of(k="string", ts=kind), {"k": "a", "ts": value}, unit=unit).event_time
        == INSTANT_MS
    )


@pytest.mark.parametrize(
    ("kind", "value", "unit", "expected"),
    [
        ("double", 1.7e15, "us", 1_700_000_000_000),
        ("double", 1.7e18, "ns", 1_700_000_000_000),
        ("double", 1_700_000_000.25, "s", 1_700_000_000_250),
        ("double", 1.001, "s", 1001),
        ("double", 3e14, "ms", NO_EVENT_TIME),
        ("double", float("inf"), "us", NO_EVENT_TIME),
        ("double", -0.5, "ns", NO_EVENT_TIME),
        ("long", 1_700_000_000_000_999, "us", 1_700_000_000_000),
        (
            logical("bytes", "decimal", precision=20, scale=3),
            Decimal("1700000000.125"),
            "s",
            1_700_000_000_125,
        ),
        (
            logical("bytes", "decimal", precision=20, scale=0),
            Decimal(17 * 10**17),
            "ns",
            1_700_000_000_000,
        ),
    ],
)
def test_a_number_counts_in_its_unit(kind: Any, value: Any, unit: str, expected: int | str) -> None:
    found = reading(of(k="string", ts=kind), {"k": "a", "ts": value}, unit=unit)
    assert (found.event_time if isinstance(expected, int) else found.reason) == expected


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("string", "é", "é"),
        ("int", 0, "0"),
        ("long", -7, "-7"),
        ("double", 1.0, "1.0"),
        ("double", 1e-4, "1.0E-4"),
        ("boolean", False, "false"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "A", "A"),
        (logical("string", "uuid"), UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (logical("bytes", "decimal", precision=4, scale=2), Decimal("1.50"), "1.50"),
        (logical("int", "date"), date(2026, 1, 2), "2026-01-02"),
        (
            logical("long", "timestamp-millis"),
            datetime(2026, 1, 2, tzinfo=UTC),
            "2026-01-02T00:00:00.000000Z",
        ),
        ("string", "", None),
        (["null", "string"], None, None),
        ("bytes", b"a", None),
        ({"type": "fixed", "name": "F", "size": 1}, b"a", None),
        ({"type": "map", "values": "int"}, {}, None),
        ({"type": "array", "items": "int"}, [], None),
    ],
)
def test_a_key_is_the_text_that_a_message_has_for_it(
    kind: Any, value: Any, expected: str | None
) -> None:
    found = reading(of(ts="long", k=kind), {"k": value, "ts": 5})
    assert found.merge_key == expected
    assert found.reason == (None if expected else NO_KEY)
    assert "number" not in (found.detail or ""), "the detail says what it is"


def test_a_path_leads_through_records_and_maps() -> None:
    schema = of(
        meta=["null", {**of(ts="long", by={"type": "map", "values": "string"}), "name": "Meta"}]
    )
    how = {"key": ("meta", "by", "k.1"), "event_time": ("meta", "ts")}
    assert reading(schema, {"meta": {"ts": 5, "by": {"k.1": "a"}}}, **how)[:2] == ("a", 5)
    assert reading(schema, {"meta": {"ts": 5, "by": {}}}, **how).reason == NO_KEY
    assert reading(schema, {"meta": None}, **how).detail == "meta.by.k.1 is missing"


def test_a_heartbeat_is_told_by_its_field_and_needs_no_key() -> None:
    schema = of(
        ts="long",
        k=["null", "string"],
        type={"type": "enum", "name": "T", "symbols": ["click", "heartbeat"]},
    )
    assert reading(schema, {"ts": 5, "k": None, "type": "heartbeat"}) == Reading(None, 5, True)
    assert reading(schema, {"ts": 5, "k": "a", "type": "click"}) == Reading("a", 5, False)
    assert reading(schema, {"ts": 5, "k": None, "type": "click"}).reason == NO_KEY


def test_the_first_reason_that_applies_counts() -> None:
    schema = of(ts="long", k=["null", "string"])
    assert reading(schema, None) == Reading(reason=UNDECODABLE, detail="no value (tombstone)")
    assert reading(schema, b"\x0a\x00\x00").reason == UNDECODABLE
    assert reading(schema, {"ts": -1, "k": None}).reason == NO_KEY
    assert reading(schema, {"ts": -1, "k": "a"}).reason == NO_EVENT_TIME
    assert (
        reading(schema, {"ts": 5_000, "k": "a"}, kafka_time=3_999).reason
        == Reason.EVENT_TIME_IN_FUTURE.value
    )
    assert reading(schema, {"ts": 5_000, "k": "a"}, kafka_time=4_000).event_time == 5_000
    assert reading(schema, {"ts": 5, "k": None}, key=None, kafka_key=b"b").merge_key == "b"


def test_the_key_of_a_refused_record_is_found_by_the_schema_of_its_offset() -> None:
    before = of(k="string", ts="long")
    after = {**before, "fields": [{"name": "n", "type": "int", "default": 0}, *before["fields"]]}
    old, new = (avro_schema(as_text(schema), Path("x")) for schema in (before, after))
    both = replace(new, earlier=(old,), since={0: 1, 3: 1})
    values = [
        encoded(before, {"k": "a", "ts": -5}),
        encoded(after, {"n": 0, "k": "b", "ts": 5}),
        encoded(after, {"n": 0, "k": "c", "ts": -5}),
    ]
    kafka = kafka_table([(None, value, FAR) for value in values])
    by = rules(schema=both)
    assert read_records(kafka, by)["merge_key"].to_pylist() == [None, "b", None]
    assert merge_keys(kafka, by).to_pylist() == ["a", "b", "c"]


@law
@given(
    drawn=schemas_with_values(), content=st.binary(max_size=10), key=st.sampled_from(["f0", "f1"])
)
def test_no_record_stops_the_reading(
    drawn: tuple[Any, list[Any]], content: bytes, key: str
) -> None:
    schema, values = drawn
    how = rules(schema=avro_schema(as_text(schema), Path("x.avsc")), key=(key,), event_time=("f0",))
    for found in read_all(
        [(None, each, FAR) for each in [content, *(encoded(schema, value) for value in values)]],
        how,
    ):
        assert (found.reason is None) == (
            found.event_time is not None and found.merge_key is not None
        )


@law
@given(at=st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31)))
def test_an_event_time_is_cut_off_to_milliseconds(at: datetime) -> None:
    schema = of(k="string", ts=logical("long", "timestamp-micros"))
    content = encoded(schema, {"k": "a", "ts": at.replace(tzinfo=UTC)})
    assert decoded(schema, content)["ts"] == at.replace(tzinfo=UTC)
    assert reading(schema, content).event_time == (at - datetime(1970, 1, 1)) // timedelta(
        milliseconds=1
    )

"""Where a record has its key and its event time: names with dots, several places, and numbers in
strings."""

from __future__ import annotations

import json
import zoneinfo
from dataclasses import fields, replace
from datetime import date, datetime, timedelta, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from tests.core.test_reading import FAR, SCHEMA, Reading, kafka_table, read, read_all
from tests.support.avro import as_text, encoded
from tests.support.configurations import SMALLEST, settings_for
from watersmeet.configuration.sources import (
    EventTime,
    SourceSettings,
    recorded,
    spelled,
    written,
)
from watersmeet.core.avro_schema import avro_schema
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.reading import ReadingRules, Reason, merge_keys, read_records
from watersmeet.core.texts import parse_path
from watersmeet.core.times import parse_iso_8601, time_zone
from watersmeet.core.types import HEADERS
from watersmeet.dry_run import try_records
from watersmeet.errors import ConfigurationError
from watersmeet.lake.history import Epoch, Epochs
from watersmeet.lake.identity import check_rules
from watersmeet.settings import Settings, load_settings

NO_KEY, NO_EVENT_TIME = Reason.NO_KEY.value, Reason.NO_EVENT_TIME.value
NS = {"field": "ts", "unit": "ns", "text": True}


def source_of(folder: Path, **source: Any) -> SourceSettings:
    """Tracking as a configuration file has it."""
    config = {
        **SMALLEST,
        "sources": {
            **SMALLEST["sources"],
            "tracking": {"topic": "t", "event_time": "ts", **source},
        },
    }
    (folder / "watersmeet.yml").write_text(yaml.safe_dump(config))
    return load_settings(folder / "watersmeet.yml", {}).sources["tracking"]


def reading(
    source: SourceSettings, value: dict[str, Any], schema: dict[str, Any] | None = None
) -> Reading:
    """What a record says as JSON, or with a schema as Avro."""
    places = {
        field.name: getattr(source.reading_rules(FAR), field.name) for field in fields(ReadingRules)
    }
    if schema is None:
        return read(json.dumps(value).encode(), **places)
    return read(
        encoded(schema, value), **places | {"schema": avro_schema(as_text(schema), Path("x.avsc"))}
    )


# -- names with dots


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (r"id\.orig_h", ("id.orig_h",)),
        (r"a.b\.c.d", ("a", "b.c", "d")),
        (r"\.", (".",)),
        (r"a\\b.c", ("a\\b", "c")),
        (r"a\\\.b", ("a\\.b",)),
        ("plain", ("plain",)),
    ],
)
def test_a_dot_in_a_name_is_written_with_a_backslash(text: str, path: tuple[str, ...]) -> None:
    assert parse_path(text) == path


@pytest.mark.parametrize("text", ["a..b", "a.", ".a", "a\\", "a\\b", "\\"])
def test_what_is_no_path_is_refused_with_the_way_to_write_one(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"is not a dotted path; join field names by single dots.*`\\.` for a dot in a name",
    ):
        source_of(tmp_path, key=text)


def test_a_name_with_a_dot_is_found_wherever_a_path_may_stand(tmp_path: Path) -> None:
    source = source_of(
        tmp_path,
        key=r"id\.orig_h",
        event_time=r"meta.ts\.ms",
        heartbeat={"field": r"a\.b", "equals": "beat"},
        where={"field": r"c\.d", "equals": 1},
    )
    nested = {"id": {"orig_h": "wrong"}, "c.d": 1, "meta": {"ts.ms": 5}}
    assert reading(source, {"id.orig_h": "k", **nested})[:3] == ("k", 5, False)
    assert reading(source, {"a.b": "beat", **nested})[:3] == (None, 5, True)
    assert reading(source, {"a": {"b": "beat"}, **nested})[3] == NO_KEY
    assert "id.orig_h is missing" in str(reading(source, nested)[4])


# -- several places


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"after": {"id": "a"}, "before": {"id": "b"}}, "a"),
        ({"after": None, "before": {"id": "b"}}, "b"),
        ({"before": {"id": "b"}}, "b"),
        ({"after": {"id": None}, "before": {"id": "b"}}, "b"),
        ({"after": {"id": 7}, "before": None}, "7"),
        ({"after": {"id": 1.50}, "before": None}, "1.5"),
        ({"after": {"id": False}, "before": {"id": "b"}}, "false"),
        ({"after": {"id": ""}, "before": {"id": "b"}}, None),
        ({"after": {"id": {}}, "before": {"id": "b"}}, None),
        ({"after": None, "before": None}, None),
        ({}, None),
    ],
)
def test_of_several_places_of_a_key_the_first_that_is_there_counts(
    tmp_path: Path, value: dict[str, Any], key: str | None
) -> None:
    source = source_of(tmp_path, key={"first_of": ["after.id", "before.id"]})
    found = reading(source, {**value, "ts": 1})
    assert (found[0], found[3]) == (key, None if key else NO_KEY)
    if key is None:
        assert str(found[4]).startswith("after.id or before.id is ")


def test_a_number_is_spelled_as_in_the_place_where_it_was_found(tmp_path: Path) -> None:
    keys = source_of(tmp_path, key={"first_of": ["a", "b"]}).reading_rules(FAR).keys
    assert keys == ((("a",), ("b",)),)
    assert read(b'{"a": null, "b": 1.50, "ts": 1}', keys=keys)[0] == "1.50"
    assert read(b'{"a": 2.00, "b": 1.50, "ts": 1}', keys=keys)[0] == "2.00"


@pytest.mark.parametrize(
    "written",
    [
        {"first_of": ["after.ts", "before.ts"]},
        {"field": {"first_of": ["after.ts", "before.ts"]}, "unit": "s"},
    ],
)
def test_of_several_places_of_an_event_time_the_first_that_is_there_counts(
    tmp_path: Path, written: Any
) -> None:
    source, ms = (
        source_of(tmp_path, key="k", event_time=written),
        1000 if "unit" in written else 1,
    )
    assert reading(source, {"k": "k", "after": {"ts": 5}, "before": {"ts": 4}})[1] == 5 * ms
    assert reading(source, {"k": "k", "after": None, "before": {"ts": 4}})[1] == 4 * ms
    assert reading(source, {"k": "k", "after": {"ts": []}, "before": {"ts": 4}})[3] == NO_EVENT_TIME
    assert reading(source, {"k": "k"})[3:5] == (NO_EVENT_TIME, "after.ts or before.ts is missing")


def test_avro_is_read_from_the_same_places(tmp_path: Path) -> None:
    def of(**fields: Any) -> dict[str, Any]:
        return {
            "type": "record",
            "name": "E",
            "fields": [{"name": name, "type": kind} for name, kind in fields.items()],
        }

    row = {"type": "record", "name": "Row", "fields": [{"name": "id", "type": ["null", "long"]}]}
    schema = of(
        before=["null", row], after=["null", "Row"], ts=["null", "string"], at=["null", "long"]
    )
    source = source_of(
        tmp_path,
        key={"first_of": ["after.id", "before.id"]},
        event_time={"field": {"first_of": ["ts", "at"]}, "unit": "ns", "text": True},
    )
    usual = {"ts": "1700000000123456789", "at": None}
    assert reading(source, {"before": {"id": 1}, "after": {"id": 2}, **usual}, schema=schema)[
        :2
    ] == ("2", 1_700_000_000_123)
    assert reading(source, {"before": {"id": 1}, "after": None, **usual}, schema=schema)[0] == "1"
    assert (
        reading(source, {"before": {"id": 1}, "after": {"id": None}, **usual}, schema=schema)[0]
        == "1"
    )
    late = {"before": {"id": 1}, "after": None, "ts": None, "at": 2_000_000}
    assert reading(source, late, schema=schema)[1] == 2


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (["a", "a"], "names a twice"),
        ([], "must have 1 or more"),
        ([1], "must be text"),
        ([["a", "b"], "c"], r"key\.0 is a list.*write `{first_of: \[a, b\]}`"),
        ({"first_of": ["a", "a"]}, "names a twice"),
        ({"first_of": []}, "must have 1 or more"),
        ({"first_of": "a"}, "must be a list"),
        ({"first": ["a"]}, r"unknown field `sources\.tracking\.key\.first`.*`first_of`"),
        ({"header": ""}, r"key\.header must not be empty"),
        ({"header": "h", "first_of": ["a"]}, "unknown field"),
    ],
)
def test_places_are_named_once_and_as_text(tmp_path: Path, key: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        source_of(tmp_path, key=key)


@pytest.mark.parametrize("event_time", [["a", "b"], {"field": ["a", "b"], "unit": "s"}])
def test_a_list_of_event_times_is_refused_with_what_to_write(
    tmp_path: Path, event_time: Any
) -> None:
    with pytest.raises(ConfigurationError, match=r"is a list.*write `{first_of: \[a, b\]}`"):
        source_of(tmp_path, event_time=event_time)


# -- keys of several fields


@pytest.mark.parametrize(
    ("value", "key"),
    [
        (b'{"shop":"7","session":"2026"}', '["7","2026"]'),
        (b'{"session":2026,"shop":7}', '["7","2026"]'),
        (b'{"shop":1.50,"session":true}', '["1.50","true"]'),
        (b'{"shop":-0,"session":1e400}', '["-0","1e400"]'),
        ('{"shop":"Łódź","session":"\U0001f600"}'.encode(), '["Łódź","\U0001f600"]'),
        (rb'{"shop":"a\"b\\","session":"\u0001\n\/\u007f"}', '["a\\"b\\\\","\\u0001\\n/\x7f"]'),
        (b'{"shop":" ","session":"null"}', '[" ","null"]'),
        (b'{"shop":"7"}', None),
        (b'{"shop":"7","session":null}', None),
        (b'{"shop":"","session":"2026"}', None),
        (b'{"shop":"7","session":{}}', None),
        (b'{"shop":["7"],"session":"2026"}', None),
    ],
)
def test_a_list_of_places_is_all_of_them_as_a_json_array_of_their_texts(
    tmp_path: Path, value: bytes, key: str | None
) -> None:
    keys = source_of(tmp_path, key=["shop", "session"]).reading_rules(FAR).keys
    found = read(value[:-1] + b',"ts":1}', keys=keys)
    assert (found[0], found[3]) == (key, None if key else NO_KEY)
    one_by_one = read(value[:-1] + b',"ts":1}', keys=keys, schema=SCHEMA)
    assert one_by_one[:4] == found[:4] or b"e400" in value
    if key is None:
        assert str(found[4]).startswith(("shop is ", "session is "))
    else:
        assert json.loads(key) == [*map(str, json.loads(key))]


def test_avro_has_the_same_keys_of_several_fields(tmp_path: Path) -> None:
    names = {"shop": "long", "day": {"type": "int", "logicalType": "date"}, "s": "string"}
    schema = {
        "type": "record",
        "name": "E",
        "fields": [{"name": name, "type": kind} for name, kind in {**names, "ts": "long"}.items()],
    }
    source = source_of(tmp_path, key=["shop", "day", "s"])
    value = {"shop": 7, "day": date(2026, 1, 2), "s": 'é"', "ts": 1}
    assert reading(source, value, schema=schema)[0] == '["7","2026-01-02","é\\""]'
    assert reading(source, {**value, "s": ""}, schema=schema)[3] == NO_KEY


def test_a_part_of_a_key_may_have_several_places(tmp_path: Path) -> None:
    ids = [{"first_of": [f"{row}.{name}" for row in ("after", "before")]} for name in ("a", "b")]
    source = source_of(tmp_path, key=ids)
    row = {"a": 1, "b": "x"}
    for value in ({"after": row, "before": None}, {"before": row}, {"after": row, "before": {}}):
        assert reading(source, {**value, "ts": 1})[0] == '["1","x"]'
    found = reading(source, {"after": {"a": 1}, "ts": 1})
    assert found[3:5] == (NO_KEY, "after.b or before.b is missing")


# -- keys in headers


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([("id", b"a")], "a"),
        ([("id", b"a"), ("x", b"b"), ("id", "é".encode())], "é"),
        ([("id", b"a"), ("ID", b"b"), ("id ", b"c")], "a"),
        ([("id", b"7"), ("id", b"")], None),
        ([("id", b"7"), ("id", None)], None),
        ([("id", b"\xff")], None),
        ([("x", b"a")], None),
        ([], None),
        (None, None),
    ],
)
def test_the_last_header_of_a_name_is_the_key(
    tmp_path: Path, headers: list[tuple[str, bytes | None]] | None, key: str | None
) -> None:
    rules = source_of(tmp_path, key={"header": "id"}).reading_rules(FAR)
    value = b'{"ts":1,"id":"wrong"}'
    others: list[Any] = [[("id", b"other")], None, [], [("id", None)]]
    rows = pa.array([*others, headers, *others], HEADERS)
    kafka = kafka_table([(b"wrong", value, FAR)] * len(rows)).set_column(7, "headers", rows)
    for table in (kafka, kafka.slice(3, 3), kafka.slice(4, 1)):
        at = len(table) // 2
        for schema in (None, SCHEMA):
            row = read_records(table, replace(rules, schema=schema)).slice(at, 1).to_pylist()[0]
            assert (row["merge_key"], row["reason"]) == (key, None if key else NO_KEY)
            if key is None:
                assert row["detail"].startswith("the header `id` is ")
        assert merge_keys(table, rules)[at].as_py() == key


# -- Kafka's own timestamp


@pytest.mark.parametrize(
    ("kafka_time", "reason"),
    [(0, None), (5, None), (FAR, None), (-1, NO_EVENT_TIME), (FAR + 1, NO_EVENT_TIME)],
)
def test_kafkas_timestamp_may_be_the_event_time_and_is_never_in_the_future(
    tmp_path: Path, kafka_time: int, reason: str | None
) -> None:
    source = source_of(
        tmp_path, key="k", event_time={"kafka": "timestamp"}, heartbeat={"field": "b", "equals": 1}
    )
    rules = source.reading_rules(0)
    values = [b'{"k":"a","ts":"wrong"}', b'{"b":1}', b'{"k":"a","b":2}']
    for how in (rules, replace(rules, schema=ValueSchema("{}", pa.struct([])))):
        found = read_all([(None, value, kafka_time) for value in values], how)
        expected = None if reason else kafka_time
        assert [each[1] for each in found] == [expected] * 3
        assert [each[3] for each in found] == [reason] * 3
        assert [each[2] for each in found] == [False, reason is None, False]


def test_records_are_tried_with_headers_and_kafkas_timestamps(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path,
        sources__tracking__key=["shop", "visit"],
        sources__orders__key={"header": "visit"},
        sources__orders__event_time={"kafka": "timestamp"},
    )
    click = {"source": "tracking", "value": {"shop": 7, "visit": "é", "ts": 1}}
    order: dict[str, Any] = {"source": "orders", "value": {}, "headers": {"visit": '["7","é"]'}}
    found = try_records(settings, [click, {**order, "timestamp": 5}])
    [record] = found["records"]
    assert (record["key"], record["event_time"], record["last_event_time"]) == ('["7","é"]', 1, 5)
    with pytest.raises(ConfigurationError, match="`timestamp` is missing, which is the event time"):
        try_records(settings, [click, order])


# -- times of a zone


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2026-01-15T12:00:00", "2026-01-15T11:00:00"),
        ("2026-07-15T12:00:00.123456", "2026-07-15T10:00:00.123"),
        ("2026-07-15", "2026-07-14T22:00:00"),
        ("20260715T120000", "2026-07-15T10:00:00"),
        ("2026-07-15T12:00:00Z", "2026-07-15T12:00:00"),
        ("2026-07-15T12:00:00+05:30", "2026-07-15T06:30:00"),
        ("2026-10-25T02:30:00", "2026-10-25T00:30:00"),  # twice: the earlier one
        ("2026-10-25T03:00:00", "2026-10-25T02:00:00"),
        ("2026-03-29T01:59:59.999", "2026-03-29T00:59:59.999"),
        ("2026-03-29T02:30:00", "2026-03-29T01:30:00"),  # never: 03:30
        ("2026-03-29T03:00:00", "2026-03-29T01:00:00"),
        ("1970-01-01T01:00:00", "1970-01-01T00:00:00"),
        ("1970-01-01T00:59:59", None),
        ("9999-12-31T23:59:59.999", "9999-12-31T22:59:59.999"),
        ("0001-01-01T00:00:00", None),
        ("2026-02-30T00:00:00", None),
        ("12", None),
    ],
)
def test_a_time_without_a_zone_is_a_local_time_of_the_configured_one(
    tmp_path: Path, text: str, utc: str | None
) -> None:
    source = source_of(tmp_path, key="k", event_time={"field": "ts", "zone": "Europe/Berlin"})
    expected = None if utc is None else parse_iso_8601(utc)
    schema = {
        "type": "record",
        "name": "E",
        "fields": [{"name": "k", "type": "string"}, {"name": "ts", "type": "string"}],
    }
    for found in (
        reading(source, {"k": "k", "ts": text}),
        reading(source, {"k": "k", "ts": text}, schema=schema),
    ):
        assert (found[1], found[3]) == (expected, NO_EVENT_TIME if utc is None else None)


@pytest.mark.parametrize("unit", ["millis", "micros", "nanos"])
@pytest.mark.parametrize("is_local", [True, False])
def test_avro_has_local_times_and_dates_of_a_zone_too(
    tmp_path: Path, unit: str, is_local: bool
) -> None:
    summer = datetime(2026, 7, 15, 12, tzinfo=timezone.utc)
    per_second = {"millis": 10**3, "micros": 10**6, "nanos": 10**9}[unit]
    local = "local-" if is_local else ""
    schema = {
        "type": "record",
        "name": "E",
        "fields": [
            {"name": "ts", "type": {"type": "long", "logicalType": f"{local}timestamp-{unit}"}},
            {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        ],
    }
    # Spelled as numbers, which every logical type is made of.
    bare = {**schema, "fields": [{"name": "ts", "type": "long"}, {"name": "day", "type": "int"}]}
    number = int(summer.timestamp())
    value = encoded(bare, {"ts": number * per_second, "day": number // 86_400})
    avro = avro_schema(as_text(schema), Path("x.avsc"))

    def time_at(name: str, zone: str | None) -> int | None:
        return read(value, event_times=((name,),), keys=(), schema=avro, zone=zone, kafka_key=b"k")[
            1
        ]

    hours_ms = 3_600_000
    assert time_at("ts", None) == number * 1000
    assert time_at("ts", "Europe/Berlin") == number * 1000 - (2 * hours_ms if is_local else 0)
    assert time_at("day", None) == number // 86_400 * 86_400_000
    assert time_at("day", "Europe/Berlin") == number // 86_400 * 86_400_000 - 2 * hours_ms


def test_a_number_has_no_zone(tmp_path: Path) -> None:
    zoned = {"field": "ts", "zone": "Asia/Tokyo", "unit": "s", "text": True}
    source = source_of(tmp_path, key="k", event_time=zoned)
    for ts in (17, "17", 17.0):
        assert reading(source, {"k": "k", "ts": ts})[1] == 17_000


def test_zones_are_those_of_the_package_not_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "Europe/Lisbon"
    wrong = tmp_path / name
    wrong.parent.mkdir()
    with files("tzdata").joinpath("zoneinfo/Asia/Tokyo").open("rb") as rules:
        wrong.write_bytes(rules.read())
    monkeypatch.setattr(zoneinfo, "TZPATH", (str(tmp_path),))
    assert time_zone(name).utcoffset(datetime(2026, 1, 1)) == timedelta(0)


@pytest.mark.parametrize(
    ("zone", "example"),
    [
        ("Berlin", "Europe/Berlin"),
        ("CEST?", "EST"),
        ("europe/berlin", "Europe/Berlin"),
        ("../zones", "Europe/Berlin"),
        ("+02:00", "Europe/Berlin"),
    ],
)
def test_what_is_no_zone_is_refused_with_one_that_is(
    tmp_path: Path, zone: str, example: str
) -> None:
    sentence = rf"`.*` is not a time zone; write a name of the tz database, such as `{example}`"
    with pytest.raises(ConfigurationError, match=rf"event_time\.zone: {sentence}"):
        source_of(tmp_path, event_time={"field": "ts", "zone": zone})


# -- numbers in strings


@pytest.mark.parametrize(
    ("unit", "text", "ms"),
    [
        ("ns", "1700000000123456789", 1_700_000_000_123),
        ("us", "1700000000123456", 1_700_000_000_123),
        ("ms", "1700000000123", 1_700_000_000_123),
        ("ms", "0", 0),
        ("ms", "0017", 17),
        ("s", "1700000000.9999999999", 1_700_000_000_999),
        ("s", "1.7e9", 1_700_000_000_000),
        ("s", "2026-01-02T03:04:05Z", 1_767_323_045_000),
        ("s", "2026-01-02", 1_767_312_000_000),
        ("ms", "-1", None),
        ("s", "253402300800", None),
        ("s", "9" * 5000, None),
        ("s", "1e99999999999999999999", None),
        ("ms", "", None),
        ("ms", " 17", None),
        ("ms", "1_000", None),
        ("ms", "0x1F", None),
        ("ms", "NaN", None),
        ("ms", "١٧", None),
    ],
)
def test_digits_in_a_string_are_a_time_where_the_configuration_says_so(
    tmp_path: Path, unit: str, text: str, ms: int | None
) -> None:
    source = source_of(tmp_path, key="k", event_time={"field": "ts", "unit": unit, "text": True})
    found = reading(source, {"k": "k", "ts": text})
    assert (found[1], found[3]) == (ms, None if ms is not None else NO_EVENT_TIME)
    schema = {
        "type": "record",
        "name": "E",
        "fields": [{"name": "k", "type": "string"}, {"name": "ts", "type": "string"}],
    }
    assert reading(source, {"k": "k", "ts": text}, schema=schema)[:4] == found[:4]
    if text.isascii() and text.isdigit():
        unsaid = source_of(tmp_path, key="k", event_time={"field": "ts", "unit": unit})
        assert reading(unsaid, {"k": "k", "ts": text})[3] == NO_EVENT_TIME


def test_a_number_itself_still_counts_in_the_unit(tmp_path: Path) -> None:
    assert reading(source_of(tmp_path, key="k", event_time=NS), {"k": "k", "ts": 2_500_000})[1] == 2


# -- they are rules of an epoch


def test_places_are_rules_that_come_back_as_they_were_and_leave_those_before_as_they_are(
    tmp_path: Path,
) -> None:
    def settings(**source: Any) -> Settings:
        source_of(tmp_path, **source)
        return load_settings(tmp_path / "watersmeet.yml", {})

    usual = settings(key="k", event_time={"field": "ts", "unit": "s"})
    assert usual.rules()["sources.tracking.event_time"] == {"field": "ts", "unit": "s"}, (
        "no lake sees a change"
    )
    for changed in (
        settings(key={"first_of": ["after.id", "before.id"]}),
        settings(key=["shop", {"first_of": ["after.id", "before.id"]}]),
        settings(key={"header": "id"}),
        settings(key="k", event_time={"first_of": ["a", "b"]}),
        settings(key="k", event_time={"field": {"first_of": ["a", "b"]}, "unit": "s"}),
        settings(key="k", event_time={"kafka": "timestamp"}),
        settings(key="k", event_time={"field": "ts", "zone": "Europe/Berlin"}),
        settings(key="k", event_time={"field": "ts", "unit": "s", "text": True}),
        settings(key=r"a\.b"),
    ):
        kept = json.loads(json.dumps(changed.rules()))
        assert usual.under(kept).rules() == changed.rules() != usual.rules()
        assert usual.under(kept).sources["tracking"] == changed.sources["tracking"]
        assert changed.digest != usual.digest


@pytest.mark.parametrize(
    ("kept", "source", "fingerprint"),
    [
        (
            {"key": ["after.id", "before.id"]},
            {"key": {"first_of": ["after.id", "before.id"]}},
            "297150fd",
        ),
        (
            {"key": "k", "event_time": ["a", "b"]},
            {"key": "k", "event_time": {"first_of": ["a", "b"]}},
            "3e0593a0",
        ),
        (
            {"key": "k", "event_time": {"field": ["a", "b"], "unit": "s"}},
            {"key": "k", "event_time": {"field": {"first_of": ["a", "b"]}, "unit": "s"}},
            "b4b5b809",
        ),
    ],
)
def test_a_list_that_a_lake_has_recorded_is_alternatives_for_ever(
    tmp_path: Path, kept: dict[str, Any], source: dict[str, Any], fingerprint: str
) -> None:
    source_of(tmp_path, **source)
    settings = load_settings(tmp_path / "watersmeet.yml", {})
    recorded = {f"sources.tracking.{name}": rule for name, rule in kept.items()}
    assert settings.rules().items() >= recorded.items()
    assert settings.fingerprint == fingerprint, "messages of a lost lake name it"
    source_of(tmp_path, key="other")
    other = load_settings(tmp_path / "watersmeet.yml", {})
    upgraded = other.under({**other.rules(), **recorded})
    assert upgraded.sources["tracking"] == settings.sources["tracking"]
    assert upgraded.rules() == settings.rules()


def test_a_run_with_a_list_where_the_lake_has_alternatives_is_refused_with_what_to_write(
    tmp_path: Path,
) -> None:
    source_of(tmp_path, key={"first_of": ["after.id", "before.id"]})
    lake = load_settings(tmp_path / "watersmeet.yml", {})
    source_of(tmp_path, key=["after.id", "before.id"])
    now = load_settings(tmp_path / "watersmeet.yml", {})
    assert now.fingerprint != lake.fingerprint
    check_rules(Epochs([Epoch(0, 0, lake)]), lake)
    with pytest.raises(ConfigurationError) as refused:
        check_rules(Epochs([Epoch(0, 0, lake)]), now)
    assert str(refused.value).startswith("sources.tracking.key: the lake has other rules")
    assert "set it back (`key: {first_of: [after.id, before.id]}`)" in str(refused.value)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("k", "k"),
        (["a", {"first_of": ["b", "c"]}], "[a, {first_of: [b, c]}]"),
        ({"first_of": ["a", "b"]}, "{first_of: [a, b]}"),
        ({"header": "id"}, "{header: id}"),
        ({"field": {"first_of": ["a", "b"]}, "unit": "s"}, "{field: {first_of: [a, b]}, unit: s}"),
    ],
)
def test_a_recorded_rule_is_shown_as_it_is_configured(rule: Any, text: str) -> None:
    assert written(json.loads(json.dumps(recorded(rule)))) == rule
    assert spelled(rule) == text


def test_a_list_of_one_place_is_that_place(tmp_path: Path) -> None:
    first = {"first_of": ["ts"]}
    for key in (["k"], {"first_of": ["k"]}, [{"first_of": ["k"]}]):
        source = source_of(tmp_path, key=key, event_time=first)
        assert (source.key, source.event_time) == ("k", "ts")
    assert source_of(tmp_path, key="k", event_time={"field": first, "unit": "s"}).time == EventTime(
        field="ts", unit="s"
    )


def test_records_that_are_tried_are_read_from_the_same_places(tmp_path: Path) -> None:
    places = {"key": {"first_of": ["after.id", "before.id"]}, "event_time": NS}
    sources = ("tracking", "orders")
    overrides: dict[str, Any] = {
        f"sources__{name}__{field}": place for name in sources for field, place in places.items()
    }
    values: list[Any] = [
        {"after": {"id": "k"}, "ts": "1000000"},
        {"after": None, "before": {"id": "k"}, "ts": "2000000"},
    ]
    records = [
        {"source": source, "value": value} for source, value in zip(sources, values, strict=True)
    ]
    found = try_records(settings_for(tmp_path, **overrides), records)
    [record] = found["records"]
    assert (record["key"], record["event_time"], record["last_event_time"]) == ("k", 1, 2)

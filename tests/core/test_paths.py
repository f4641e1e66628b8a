"""Where a record has its key and its event time: names with dots, several places, and numbers in
strings."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.core.test_reading import FAR, Reading, read
from tests.support.avro import as_text, encoded
from tests.support.configurations import SMALLEST, settings_for
from watersmeet.configuration.sources import EventTime, SourceSettings
from watersmeet.core.avro_schema import avro_schema
from watersmeet.core.paths import parse_path
from watersmeet.core.reading import ReadingRules, Reason
from watersmeet.dry_run import try_records
from watersmeet.errors import ConfigurationError
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
    source = source_of(tmp_path, key=["after.id", "before.id"])
    found = reading(source, {**value, "ts": 1})
    assert (found[0], found[3]) == (key, None if key else NO_KEY)
    if key is None:
        assert str(found[4]).startswith("after.id or before.id is ")


def test_a_number_is_spelled_as_in_the_place_where_it_was_found(tmp_path: Path) -> None:
    source = source_of(tmp_path, key=["a", "b"])
    places: dict[str, Any] = {"key": ("a",), "other_keys": (("b",),), "event_time": ("ts",)}
    assert source.reading_rules(FAR).other_keys == (("b",),)
    assert read(b'{"a": null, "b": 1.50, "ts": 1}', **places)[0] == "1.50"
    assert read(b'{"a": 2.00, "b": 1.50, "ts": 1}', **places)[0] == "2.00"


@pytest.mark.parametrize(
    "written", [["after.ts", "before.ts"], {"field": ["after.ts", "before.ts"], "unit": "s"}]
)
def test_of_several_places_of_an_event_time_the_first_that_is_there_counts(
    tmp_path: Path, written: Any
) -> None:
    source, ms = (
        source_of(tmp_path, key="k", event_time=written),
        1000 if isinstance(written, dict) else 1,
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
        key=["after.id", "before.id"],
        event_time={"field": ["ts", "at"], "unit": "ns", "text": True},
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
    [(["a", "a"], "names a twice"), ([], "must have 1 or more"), ([1], "must be text")],
)
def test_places_are_named_once_and_as_text(tmp_path: Path, key: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        source_of(tmp_path, key=key)


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
        settings(key=["after.id", "before.id"]),
        settings(key="k", event_time=["a", "b"]),
        settings(key="k", event_time={"field": "ts", "unit": "s", "text": True}),
        settings(key=r"a\.b"),
    ):
        kept = json.loads(json.dumps(changed.rules()))
        assert usual.under(kept).rules() == changed.rules() != usual.rules()
        assert usual.under(kept).sources["tracking"] == changed.sources["tracking"]
        assert changed.digest != usual.digest


def test_a_list_of_one_place_is_that_place(tmp_path: Path) -> None:
    source = source_of(tmp_path, key=["k"], event_time=["ts"])
    assert (source.key, source.event_time) == ("k", "ts")
    assert source_of(
        tmp_path, key="k", event_time={"field": ["ts"], "unit": "s"}
    ).time == EventTime(field="ts", unit="s")
    with pytest.raises(ValidationError):
        EventTime(field=())


def test_records_that_are_tried_are_read_from_the_same_places(tmp_path: Path) -> None:
    places = {"key": ["after.id", "before.id"], "event_time": NS}
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

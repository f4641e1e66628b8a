# ruff: noqa: E501 (tables of cases read best with one line a case)
from __future__ import annotations

import json
import pickle
import re
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest

from watersmeet.core.json_schema import ValueSchema, value_schema
from watersmeet.core.types import columns_ddl
from watersmeet.errors import ConfigurationError

Schema = dict[str, Any]


def written(folder: Path, document: Any) -> Path:
    path = folder / "x.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def read(path: Path) -> ValueSchema:
    return value_schema(path.read_bytes(), path)


def load(folder: Path, document: Any) -> ValueSchema:
    return read(written(folder, document))


def with_field(schema: Any, **more: Any) -> Schema:
    return {"type": "object", "properties": {"meta": schema}, **more}


def refusal(folder: Path, document: Any) -> str:
    path = written(folder, document)
    with pytest.raises(ConfigurationError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message[len(f"{path}: ") :]


# -- columns

AID = {"type": "object", "properties": {"aid": {"type": "integer"}}}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "column"),
    [
        ({"type": "string"}, "STRING"),
        ({"type": "string", "format": "date-time"}, "STRING"),
        ({"type": "integer"}, "BIGINT"),
        ({"type": "number"}, "DOUBLE"),
        ({"type": "boolean"}, "BOOLEAN"),
        (AID, "STRUCT<aid: BIGINT>"),
        ({"type": "array", "items": {"type": "string"}}, "ARRAY<STRING>"),
        ({"type": "array", "items": AID}, "ARRAY<STRUCT<aid: BIGINT>>"),
        (
            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
            "ARRAY<ARRAY<DOUBLE>>",
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "MAP<STRING, BIGINT>"),
        (
            {"type": ["object", "null"], "additionalProperties": AID},
            "MAP<STRING, STRUCT<aid: BIGINT>>",
        ),
        ({**AID, "additionalProperties": {"type": "string"}}, "STRUCT<aid: BIGINT>"),
        ({"type": ["null", "integer"]}, "BIGINT"),
        ({"type": ["object", "null"], "properties": AID["properties"]}, "STRUCT<aid: BIGINT>"),
        ({"type": ["boolean"]}, "BOOLEAN"),
        ({"anyOf": [{"type": "number"}, NULL]}, "DOUBLE"),
        ({"oneOf": [NULL, AID]}, "STRUCT<aid: BIGINT>"),
        ({"anyOf": [NULL, {"$ref": "#/$defs/id"}]}, "BIGINT"),
        ({"$ref": "#/$defs/id"}, "BIGINT"),
        ({"$ref": "#/$defs/id", "description": "what stands beside it only validates"}, "BIGINT"),
        ({"$ref": "#/$defs/twice"}, "BIGINT"),
        ({"$ref": "#/$defs/a~1b%20c"}, "STRING"),
        ({"$ref": "#/$defs/list/0"}, "BOOLEAN"),
        ({"enum": ["a", "b", None]}, "STRING"),
        ({"enum": [1, 2]}, "BIGINT"),
        ({"enum": [True, False]}, "BOOLEAN"),
        ({"const": 1.5}, "DOUBLE"),
        ({"const": "a"}, "STRING"),
        ({"type": "number", "enum": [1, 1.5]}, "DOUBLE"),
        ({"type": "integer", "anyOf": [{"minimum": 5}, {"const": 1}]}, "BIGINT"),
    ],
)
def test_a_field_of_one_type_becomes_a_column_of_that_type(
    tmp_path: Path, schema: Schema, column: str
) -> None:
    parts = {
        "id": {"type": "integer"},
        "twice": {"$ref": "#/$defs/id"},
        "a/b c": {"type": "string"},
        "list": {"items": False, "0": {"type": "boolean"}},
    }
    assert (
        columns_ddl(load(tmp_path, with_field(schema, **{"$defs": parts})).type) == f"meta {column}"
    )


def test_fields_keep_their_order(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "ssid": {"type": "integer"},
            "items": {"type": "array", "items": AID},
            "a": {"type": "string"},
        },
    }
    assert (
        columns_ddl(load(tmp_path, schema).type)
        == "ssid BIGINT, items ARRAY<STRUCT<aid: BIGINT>>, a STRING"
    )


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("a1_B", "a1_B"), ("1a", "`1a`"), ("user-id", "`user-id`"), ("@t", "`@t`"), ("a.b", "`a.b`"), ("é", "`é`"), ("a`b", "`a``b`")],
)  # fmt: skip
def test_names_that_are_no_identifiers_are_quoted(tmp_path: Path, name: str, quoted: str) -> None:
    field = {name: {"type": "string"}}
    schema = {
        "type": "object",
        "properties": {**field, "inner": {"type": "object", "properties": field}},
    }
    assert (
        columns_ddl(load(tmp_path, schema).type)
        == f"{quoted} STRING, inner STRUCT<{quoted}: STRING>"
    )


@pytest.mark.parametrize(
    "more",
    [
        {"if": {"required": ["meta"]}, "then": {"required": ["b"]}, "else": False},
        {"anyOf": [{"required": ["meta"]}, {"required": ["b"]}]},
        {"oneOf": [{"required": ["meta"]}, {"properties": {"b": {"type": ["integer", "string"]}}}]},
        {"allOf": [{"minProperties": 1}]},
        {"additionalProperties": False, "$id": "https://example.org/x.json", "title": "x"},
        {"$schema": "http://json-schema.org/draft-04/schema#"},
        {"type": ["object", "null"]},
    ],
)
def test_what_stands_beside_the_properties_only_validates(tmp_path: Path, more: Schema) -> None:
    assert columns_ddl(load(tmp_path, with_field({"type": "string"}, **more)).type) == "meta STRING"


def test_the_top_level_may_be_a_reference_and_leave_its_type_out(tmp_path: Path) -> None:
    assert (
        columns_ddl(load(tmp_path, {"$ref": "#/$defs/order", "$defs": {"order": AID}}).type)
        == "aid BIGINT"
    )
    assert columns_ddl(load(tmp_path, {"properties": AID["properties"]}).type) == "aid BIGINT"


# -- refusals


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"description": "anything"},
        {"type": ["string", "integer"]},
        NULL,
        {"type": ["null"]},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": True},
        {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "patternProperties": {"^n": {"type": "integer"}},
        },
        {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
        {"properties": {"a": {"type": "string"}}},
        {"type": "array"},
        {"type": "array", "items": True},
        {"type": "array", "prefixItems": [{"type": "string"}]},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "string"}},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"anyOf": [{"type": "string"}, {"type": "integer"}, NULL]},
        {"oneOf": [NULL, NULL]},
        {"allOf": [{"type": "string"}]},
        {"enum": [1, "a"]},
        {"enum": [None]},
        {"enum": [{"a": 1}]},
        {"const": None},
        {"const": [1]},
    ],
)
def test_a_field_without_one_type_is_refused_with_two_ways_out(tmp_path: Path, schema: Any) -> None:
    assert refusal(tmp_path, with_field(schema)) == (
        "field `meta` has no single type that a table column can have; "
        "give it one, or leave out `schema` to keep values as JSON text"
    )


def test_a_tuple_of_draft_7_is_refused(tmp_path: Path) -> None:
    draft_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
    sentence = refusal(
        tmp_path, with_field({"type": "array", "items": [{"type": "string"}]}, **draft_7)
    )
    assert "field `meta` has no single type" in sentence


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (with_field({"type": "array", "items": {"type": "object", "properties": {"a": {}}}}), "field `meta[].a` has no single type"),
        (with_field({"type": "object", "properties": {"a": True}}), "field `meta.a` has no single "
                                                                    "type"),
        # the top level
        ({}, "the top level must be an object with `properties`"),
        ({"type": "object"}, "the top level must be an object with `properties`"),
        ({"type": "object", "properties": {}}, "the top level must be an object with `properties`"),
        ({"type": "array", "items": AID}, "the top level must be an object with `properties`"),
        ({"type": ["object", "array"], "properties": AID["properties"]}, "the top level must be an "
                                                                         "object with "
                                                                         "`properties`"),
        ({"anyOf": [AID, AID]}, "the top level must be an object with `properties`"),
        (True, "the top level must be an object with `properties`"),
        # names
        ({"properties": {"ts": {"type": "integer"}, "TS": {"type": "integer"}}}, "field `TS` "
                                                                                 "differs from "
                                                                                 "`ts` only in "
                                                                                 "case"),
        (with_field({"type": "object", "properties": {"É": {"type": "string"}, "é": {"type": "string"}}}), "field `meta.é` differs from `É`"),
        ({"properties": {"": {"type": "string"}}}, "field `` has a name that no table column can "
                                                   "have"),
        ({"properties": {"a b": {"type": "string"}}}, "field `a b` has a name that no table column "
                                                      "can have"),
        (with_field({"type": "object", "properties": {"a=b": {"type": "string"}}}), "field `meta.a=b` has a name that no table"),
        # references
        (with_field({"$ref": "#"}), "field `meta` refers to itself by `#`"),
        (with_field({"$ref": "#/properties/meta"}), "field `meta` refers to itself by "
                                                    "`#/properties/meta`"),
        (with_field({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}), "field `meta[]` refers to itself"),
        (with_field({"$ref": "#n"}, **{"$defs": {"n": {"$anchor": "n", "type": "string"}}}), "field `meta` refers to `#n`, which is no place"),
        (with_field({"$ref": "http://example.org/x.json"}), "`$ref` to `http://example.org/x.json` "
                                                            "leads out of the file, and nothing is "
                                                            "fetched"),
        (with_field({"type": "string"}, allOf=[{"$ref": "other.json#/a"}]), "`$ref` to "
                                                                            "`other.json#/a` leads "
                                                                            "out of the file"),
        (with_field({"$ref": "#/$defs/gone"}), "is no valid JSON Schema; at $: Pointer "
                                               "'/$defs/gone' does not exist"),
        # no JSON Schema
        ("", "is no JSON document"),
        ("{'a': 1}", "is no JSON document (unexpected character"),
        ("[]", "is no valid JSON Schema; at $:"),
        ("5", "is no valid JSON Schema; at $:"),
        (with_field({"type": "int"}), "is no valid JSON Schema; at $.properties.meta.type:"),
        (with_field({"type": "string", "pattern": "("}), "is no valid JSON Schema; at "
                                                         "$.properties.meta.pattern:"),
        (with_field({"type": "string"}, required="meta"), "is no valid JSON Schema; at "
                                                          "$.required:"),
        (with_field({"type": "string"}, **{"$schema": "http://example.org/own"}), "is no valid "
                                                                                  "JSON Schema; at "
                                                                                  "$: Unknown "
                                                                                  "meta-schema"),
    ],
)  # fmt: skip
def test_a_schema_that_fits_no_table_is_refused(
    tmp_path: Path, document: Any, sentence: str
) -> None:
    assert sentence in refusal(tmp_path, document)


def test_literal_values_are_no_references(tmp_path: Path) -> None:
    schema = with_field(
        {"type": "string", "default": {"$ref": "http://example.org"}, "enum": ["a", {"$ref": "x"}]}
    )
    assert columns_ddl(load(tmp_path, schema).type) == "meta STRING"


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    uri = f"http://127.0.0.1:{listener.getsockname()[1]}/x.json"
    for document in (
        with_field({"$ref": uri}),
        with_field({"$dynamicRef": uri}),
        with_field(AID, **{"$schema": uri}),
    ):
        refusal(tmp_path, document)
    with listener, pytest.raises(TimeoutError):
        listener.accept()


# -- values


def violation(folder: Path, schema: Schema, value: str) -> str | None:
    travelled: ValueSchema = pickle.loads(pickle.dumps(load(folder, schema)))
    return travelled.validator()(orjson.loads(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('{"ts":1,"items":[{"aid":1}],"c.d":"ax"}', None),
        ('{"ts":1,"unknown":{"a":1}}', None),
        ('{"ts":1,"opt":null}', None),
        ("{}", '$: "ts" is a required property'),
        ("[]", '$: the value is not of type "object"'),
        ('{"ts":"1"}', '$.ts: the value is not of type "integer"'),
        ('{"ts":1.5}', '$.ts: the value is not of type "integer"'),
        ('{"ts":null}', '$.ts: the value is not of type "integer"'),
        ('{"ts":true}', '$.ts: the value is not of type "integer"'),
        ('{"ts":1,"items":[{"aid":1},{"aid":"s3cret"}]}', '$.items[1].aid: the value is not of '
                                                          'type "integer"'),
        ('{"ts":1,"c.d":"s3cret"}', "$['c.d']: the value does not match \"^a\""),
        ('{"ts":1,"when":"s3cret"}', None),
        ('{"ts":9223372036854775807}', None),
        ('{"ts":-9223372036854775808}', None),
        ('{"ts":9223372036854775808}', "$.ts: the value is greater than the maximum of "
                                       "9223372036854775807"),
        ('{"ts":123456789012345678901234567890}', "$.ts: the value is greater than the maximum of "
                                                  "9223372036854775807"),
        ('{"ts":-9223372036854775809}', "$.ts: the value is less than the minimum of "
                                        "-9223372036854775808"),
        ('{"ts":1,"items":[{"aid":1e19}]}', "$.items[0].aid: the value is greater than the maximum "
                                            "of 9223372036854775807"),
        ('{"ts":1,"opt":1e19}', "$.opt: the value is not valid under any of the schemas listed in "
                                "the 'anyOf' keyword"),
    ],
)  # fmt: skip
def test_a_value_fits_or_the_first_violation_is_told_with_its_path(
    tmp_path: Path, value: str, expected: str | None
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "ts": {"type": "integer", "allOf": [{"minimum": -(2**63)}]},
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
            "c.d": {"type": "string", "pattern": "^a"},
            "when": {"type": "string", "format": "date-time"},
            "opt": {"anyOf": [{"type": "integer"}, NULL]},
        },
        "required": ["ts"],
        "$defs": {"item": AID},
    }
    found = violation(tmp_path, schema, value)
    assert found == expected
    assert "s3cret" not in (found or "")


def test_conditions_of_the_top_level_hold(tmp_path: Path) -> None:
    schema = {
        "properties": {"type": {"type": "string"}, "ssid": {"type": "integer"}},
        "if": {"properties": {"type": {"const": "heartbeat"}}, "required": ["type"]},
        "else": {"required": ["ssid"]},
    }
    assert violation(tmp_path, schema, '{"type":"heartbeat"}') is None
    assert violation(tmp_path, schema, '{"type":"click"}') == '$: "ssid" is a required property'


def test_a_violation_stays_short(tmp_path: Path) -> None:
    value = json.dumps({f"field_{i}": i for i in range(1000)})
    found = violation(tmp_path, with_field({"type": "string"}, additionalProperties=False), value)
    assert found is not None
    assert len(found) == 300
    assert re.search(r"^\$: Additional properties are not allowed .*\.\.\.$", found)


def test_the_same_schema_in_another_order_has_the_same_text(tmp_path: Path) -> None:
    one = load(tmp_path, {"type": "object", "properties": {"a": {"type": "string", "title": "A"}}})
    other = load(
        tmp_path, {"properties": {"a": {"title": "A", "type": "string"}}, "type": "object"}
    )
    assert one == other

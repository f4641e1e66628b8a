"""Changes that the schema of a source, JSON Schema or Avro, may have while its lake goes on.

A schema may gain optional fields, make a required field optional, let a field be null, drop a
field, and add symbols to an enum. An Avro schema may also widen int to long and float to double,
since each pair has one column type. Any other change would make another column of silver, or leave
behind records that were read by other rules than they look to have been.

Both kinds of schema are described in one way (`_Part`), and the rules are about the description.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from watersmeet.core.avro_columns import Parsed, is_logical, parsed

_ANNOTATIONS: Final = frozenset(
    ["$id", "$schema", "$comment", "title", "description", "default", "examples", "deprecated"]
)
_BY_NAME: Final = ("properties", "$defs", "definitions")
_WIDER: Final = {"int": "long", "float": "double"}


@dataclass(frozen=True)
class _Part:
    """A part of a schema."""

    kind: Hashable
    """The type, which must stay but may be widened."""
    is_nullable: bool = False
    """True where the part may be null."""
    parts: Mapping[str, _Part] = field(default_factory=dict)
    """The parts in it, by the step that leads there."""
    needed: frozenset[str] = frozenset()
    """The fields that a value must have."""
    symbols: frozenset[str] | None = None
    """The values that it may have; None where that is open."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that must stay, by its name in a sentence."""


def refused_changes(before: str | None, after: str | None, *, is_avro: bool = False) -> list[str]:
    """Return a sentence with the path for each change that an existing lake does not take.

    `before` and `after` are schemas as text, None without one. With `is_avro` both are Avro schemas
    that fit a table, otherwise JSON Schemas.
    """
    if before is None or after is None:
        refusal = "a schema cannot be added" if before is None else "the schema cannot be removed"
        column = "text" if before is None else "a struct"
        return [] if before == after else [f"{refusal}: silver's column is {column}"]
    one = json.loads(before)
    other = json.loads(after)
    if is_avro:
        lacks = "has no default, which records without it need; give it one"
        return list(_refused(_of_avro(parsed(one)), _of_avro(parsed(other)), "$", lacks))
    return list(_refused(_of_json(one), _of_json(other), "$", "is required, and was not"))


def _refused(before: _Part, after: _Part, path: str, lacks: str) -> Iterator[str]:
    for step, part in before.parts.items():
        if step in after.parts:
            yield from _refused(part, after.parts[step], f"{path}{step}", lacks)
    yield from (f"{path}.{name} {lacks}" for name in sorted(after.needed - before.needed))
    if after.kind not in (before.kind, _WIDER.get(str(before.kind))) or (
        before.is_nullable and not after.is_nullable
    ):
        yield f"{path} has another type"
        return
    if before.symbols and after.symbols and before.symbols - after.symbols:
        yield f"{path} lacks values of its enum that it had"
    for name in sorted(before.facts.keys() | after.facts.keys()):
        if before.facts.get(name) != after.facts.get(name):
            yield f"{path}: `{name}` differs"


# -- JSON Schema


def _of_json(schema: Any) -> _Part:
    if not isinstance(schema, dict):
        return _Part(("schema", schema))
    parts = {
        f".{name}" if word == "properties" else f".{word}.{name}": _of_json(part)
        for word in _BY_NAME
        for name, part in schema.get(word, {}).items()
    }
    if "items" in schema:
        parts["[]"] = _of_json(schema["items"])
    types = schema.get("type", [])
    types = frozenset([types] if isinstance(types, str) else types)
    facts = {
        word: schema[word]
        for word in schema.keys() - {*_ANNOTATIONS, *_BY_NAME, "required", "type", "items", "enum"}
    }
    facts["items"] = "items" in schema
    symbols = frozenset(map(json.dumps, schema["enum"])) if "enum" in schema else None
    facts["enum"] = symbols is not None
    return _Part(
        types - {"null"},
        "null" in types,
        parts,
        frozenset(schema.get("required", ())),
        symbols,
        facts,
    )


# -- Avro


def _of_avro(parsed_schema: Parsed, schema: Any = None) -> _Part:
    """Return the description of a schema, or of a part of it."""
    schema = parsed_schema.schema if schema is None else schema
    if isinstance(schema, list):
        [choice] = [choice for choice in schema if choice not in ("null", {"type": "null"})]
        part = _of_avro(parsed_schema, choice)
        return _Part(part.kind, len(schema) > 1, part.parts, part.needed, part.symbols, part.facts)
    if isinstance(schema, str):
        if schema not in parsed_schema.named:
            return _Part(schema)
        return _of_avro(parsed_schema, parsed_schema.named[schema])
    kind = schema["type"]
    if not isinstance(kind, str) or kind in parsed_schema.named:
        return _of_avro(parsed_schema, kind)
    facts = _avro_facts(schema)
    match kind:
        case "record" | "error":
            fields = {field["name"]: field for field in schema["fields"]}
            parts = {
                f".{name}": _of_avro(parsed_schema, field["type"]) for name, field in fields.items()
            }
            needed = frozenset(name for name, field in fields.items() if "default" not in field)
            return _Part("record", False, parts, needed, None, facts)
        case "array" | "map":
            items = schema["items" if kind == "array" else "values"]
            return _Part(kind, False, {"[]": _of_avro(parsed_schema, items)}, facts=facts)
        case "enum":
            facts["default"] = "default" in schema
            return _Part(kind, False, symbols=frozenset(schema["symbols"]), facts=facts)
        case "fixed":
            facts["size"] = schema["size"]
    return _Part(kind, facts=facts)


def _avro_facts(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logical type of a part, and the name that schema resolution compares."""
    facts: dict[str, Any] = {}
    if is_logical(schema):
        facts = {word: schema[word] for word in ("logicalType", "precision") if word in schema}
        if "precision" in schema:
            facts["scale"] = schema.get("scale", 0)
    if "name" in schema:
        facts["name"] = schema["name"].rpartition(".")[2]
    return facts

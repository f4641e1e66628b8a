"""Changes that the schema of a source, JSON Schema or Avro, may have while its lake goes on.

A schema may gain optional fields, make a required field optional, let a field be null, drop a
field, and add symbols to an enum; an Avro schema may also widen int to long and float to double.
Any other change would make another column of silver, or leave behind records that were read by
other rules.

Both kinds of schema are described as a `_Part`, and the rules are about the description.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from watersmeet.core.avro_types import AvroType, parsed

_ANNOTATIONS: Final = frozenset(
    ["$id", "$schema", "$comment", "title", "description", "default", "examples", "deprecated"]
)
_BY_NAME: Final = ("properties", "$defs", "definitions")
_WIDER: Final = {"int": "long", "float": "double"}


@dataclass(frozen=True)
class _Part:
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

    `before` and `after`: the schemas (None without one), of Avro with `is_avro`, else JSON Schemas.
    """
    if before is None or after is None:
        refusal = "a schema cannot be added" if before is None else "the schema cannot be removed"
        column = "text" if before is None else "a struct"
        return [] if before == after else [f"{refusal}: silver's column is {column}"]
    one = json.loads(before)
    other = json.loads(after)
    if is_avro:
        lacks = "has no default, which records without it need; give it one"
        return list(_refused(_of_avro(parsed(one).type), _of_avro(parsed(other).type), "$", lacks))
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
        one, other = (json.dumps(part.facts.get(name), sort_keys=True) for part in (before, after))
        if one != other:  # as JSON, in which 1 and true differ
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
    needed = frozenset(schema.get("required", ()))
    return _Part(types - {"null"}, "null" in types, parts, needed, symbols, facts)


# -- Avro


def _of_avro(part: AvroType) -> _Part:
    if part.kind == "union":
        [choice] = part.choices
        return replace(_of_avro(choice), is_nullable=part.is_nullable)
    schema = part.schema
    facts: dict[str, Any] = {}
    if part.logical:
        facts = {word: schema[word] for word in ("logicalType", "precision") if word in schema}
        if "precision" in schema:
            facts["scale"] = schema.get("scale", 0)
    if part.name:
        facts["name"] = part.name.rpartition(".")[2]
    match part.kind:
        case "enum":
            facts["default"] = "default" in schema
        case "fixed":
            facts["size"] = schema["size"]
    parts = {f".{field.name}": _of_avro(field.type) for field in part.fields}
    if part.items:
        parts["[]"] = _of_avro(part.items[0])
    needed = frozenset(field.name for field in part.fields if "default" not in field.schema)
    symbols = frozenset(schema["symbols"]) if part.kind == "enum" else None
    return _Part(part.kind, False, parts, needed, symbols, facts)

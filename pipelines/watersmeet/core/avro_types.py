"""Avro schemas as trees of types, in which every name is resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from fastavro import parse_schema
from fastavro.schema import SchemaParseException, UnknownType

from watersmeet.core.json_schema import UnfitError

OWN: Final = "watersmeet-"
"""Prefix of the logical types that are read by functions of this package, not by fastavro's."""

_RENAMED: Final = frozenset(["decimal", "timestamp-nanos", "local-timestamp-nanos", "uuid"])
"""Logical types that fastavro rounds or lacks, or parses in vain."""

_LOGICAL: Final = {
    "bytes": ["decimal"],
    "fixed": ["decimal", "uuid"],
    "int": ["date", "time-millis"],
    "long": ["time-micros"]
    + [f"{at}timestamp-{unit}" for at in ("", "local-") for unit in ("millis", "micros", "nanos")],
}
"""Logical types that count, by the type that they may stand on."""

_NAMED: Final = frozenset(["record", "error", "enum", "fixed"])
_OWN_NAMES: Final = _NAMED | frozenset(
    ["null", "boolean", "int", "long", "float", "double", "bytes", "string", "array", "map"]
)
"""Names that always mean Avro's own types, even where a schema gives them to others."""

# What fastavro raises, beside UnknownType, for a document that is not a schema.
_NO_SCHEMA: Final = (
    *(SchemaParseException, LookupError, TypeError),
    *(ValueError, AttributeError, RecursionError),
)


@dataclass(eq=False, slots=True)
class AvroType:
    """A type of a schema. One that is inside of itself is the same object there."""

    kind: str
    """Avro's type, or `union`; an error is a `record`."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The type in fastavro's parsed form; empty for a union."""
    name: str = ""
    """The full name of a record, an enum or a fixed."""
    logical: str = ""
    """The logical type; empty where it is ignored, as on a type that cannot have it."""
    fields: list[AvroField] = field(default_factory=list)
    items: list[AvroType] = field(default_factory=list)
    """The choices of a union; the one type of the items of an array, or of the values of a map."""

    @property
    def choices(self) -> list[AvroType]:
        """The choices of a union beside null; of all else, the type."""
        own = self.items if self.kind == "union" else [self]
        return [choice for choice in own if choice.kind != "null"]

    @property
    def is_nullable(self) -> bool:
        """True for a union that has null."""
        return self.kind == "union" and any(choice.kind == "null" for choice in self.items)


class AvroField(NamedTuple):
    """A field of a record. `schema` is the field in fastavro's parsed form."""

    name: str
    type: AvroType
    schema: Mapping[str, Any]


class Parsed(NamedTuple):
    """A schema in fastavro's parsed form, its type, and how many named types it has."""

    schema: Any
    type: AvroType
    names: int


def parsed(document: Any) -> Parsed:
    """Parse a JSON document as an Avro schema. Raises UnfitError where it is not one."""
    named: dict[str, Any] = {}
    try:
        schema = parse_schema(_renamed(document), named)
        return Parsed(schema, avro_type(schema), len(named))
    except UnknownType as error:
        raise UnfitError(
            f"names the type `{error.name}`, which it does not define", "define it in the file"
        ) from None
    except _NO_SCHEMA as error:
        raise UnfitError(
            f"is no valid Avro schema ({type(error).__name__}: {error})", "correct it"
        ) from None


_PRIMITIVES: Final = {
    name: AvroType(name, {"type": name}) for name in _OWN_NAMES - _NAMED - {"array", "map"}
}
"""The types that a name alone stands for: a schema of many fields has one object of each."""


def avro_type(schema: Any) -> AvroType:
    """Return the type of a schema in fastavro's parsed form."""
    types: dict[str, AvroType] = {}

    def of(node: Any) -> AvroType:
        if isinstance(node, list):
            return AvroType("union", items=[*map(of, node)])
        if isinstance(node, str):
            if node in _PRIMITIVES:
                return _PRIMITIVES[node]
            if node not in _OWN_NAMES:
                return types[node]
            node = {"type": node}
        kind = node["type"]
        logical = str(node.get("logicalType", "")).removeprefix(OWN)
        is_ignored = logical not in _LOGICAL.get(kind, ()) or (
            logical == "uuid" and node["size"] != 16
        )
        avro = AvroType(
            kind if kind != "error" else "record", node, logical="" if is_ignored else logical
        )
        if kind in _NAMED:
            avro.name = node["name"]
            types[avro.name] = avro
        if kind in ("array", "map"):
            avro.items = [of(node["items" if kind == "array" else "values"])]
        elif avro.kind == "record":
            avro.fields = [
                AvroField(part["name"], of(part["type"]), part) for part in node["fields"]
            ]
        return avro

    return of(schema)


def _renamed(node: Any) -> Any:
    # A logical type on a type that cannot have it is ignored from then on, as Avro's specification
    # says; keys that fastavro adds when it parses a schema (`__...`) are left out.
    if isinstance(node, list):
        return [_renamed(part) for part in node]
    if not isinstance(node, dict):
        return node
    node = {name: part for name, part in node.items() if not name.startswith("__")}
    node |= {
        name: _renamed(node[name]) for name in ("type", "fields", "items", "values") if name in node
    }
    if node.get("logicalType") in _RENAMED:
        if node["logicalType"] == "decimal" and node.get("type") in ("bytes", "fixed"):
            _check_decimal(node)
        node["logicalType"] = OWN + node["logicalType"]
    return node


def _check_decimal(node: Mapping[str, Any]) -> None:
    precision = node.get("precision")
    scale = node.get("scale", 0)
    is_whole = type(precision) is int and type(scale) is int
    if not is_whole or not 0 <= scale <= precision or not precision:
        what = "has a decimal without a `precision` of 1 or more and a `scale` of at most that"
        raise UnfitError(what, "give it both")

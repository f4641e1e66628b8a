"""JSON Schemas of a source's values: the type of their column, and the test of each value.

Both come from one document, so every value that passes the test fits the column. (JSON Schema
counts 1.0 and 1e3 as integers: a reader of an int64 field must accept those spellings.)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import jsonschema_rs
import orjson
import pyarrow as pa

from watersmeet.core.items import MAX_ITEMS, TOO_MANY, counter_of_lists
from watersmeet.core.texts import printable
from watersmeet.core.types import is_identifier
from watersmeet.errors import ConfigurationError

COLUMN_TYPES: Final = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}

# JSON Schema's integers are unbounded, a column's are not. Without these bounds, a larger one
# would not fit its column.
INT64_BOUNDS: Final = {"minimum": -(2**63), "maximum": 2**63 - 1}

# Delta accepts no column whose name contains one of these, not even inside a struct.
FORBIDDEN_IN_NAMES: Final = frozenset(" ,;{}()\n\t=")

# Maximum characters of a violation. It is stored in a column of the quarantine, and a schema with
# many names must not make it pages long.
LONGEST_VIOLATION: Final = 300

_REFERENCES: Final = frozenset(["$ref", "$dynamicRef", "$recursiveRef"])
_LITERAL_KEYWORDS: Final = frozenset(["const", "enum", "default", "examples"])
_OR_KEEP_TEXT: Final = ", or leave out `schema` to keep values as JSON text"

_S = TypeVar("_S")

_LITERAL_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True)
class ValueSchema:
    """A JSON Schema that fits a table.

    `text` is the schema that values are tested by, `type` the struct that they become. It pickles;
    each process compiles its own `validator()`.
    """

    text: str
    type: pa.DataType

    def validator(self) -> Callable[[object], str | None]:
        """Return a function that tests a value (as orjson parses it).

        It returns None, or one sentence with the first violation and its path, which names fields,
        never contents. Formats are not checked: by the standard they are annotations.
        """
        compiled = _compiled(orjson.loads(self.text))
        count = counter_of_lists(self.type)

        def first_violation(value: Any) -> str | None:
            if compiled.is_valid(value):
                return TOO_MANY if count is not None and count(value) > MAX_ITEMS else None
            error = next(iter(compiled.iter_errors(value)))
            sentence = f"{_json_path(error.instance_path)}: {printable(error.message)}"
            is_short = len(sentence) <= LONGEST_VIOLATION
            return sentence if is_short else f"{sentence[: LONGEST_VIOLATION - 3]}..."

        return first_violation


class UnfitError(Exception):
    """Error for a schema that fits no table: why, and how to fix it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


def value_schema(text: bytes, path: Path) -> ValueSchema:
    """Read a JSON Schema, from the file at `path`, as the schema of a source's values.

    Raises ConfigurationError where it is not a valid schema, refers to another document, or does
    not give every field exactly one column type.
    """
    return fitting(_value_schema, text, path, "a JSON Schema")


def fitting(schema_of: Callable[[Any], _S], text: bytes, path: Path, kind: str) -> _S:
    """Return the schema of the JSON document in the file at `path`, which should be of this kind.

    Raises ConfigurationError where `schema_of` raises UnfitError, or it is no JSON document.
    """
    try:
        return schema_of(orjson.loads(text))
    except orjson.JSONDecodeError as error:
        unfit = UnfitError(f"is no JSON document ({error})", f"write {kind}")
    except UnfitError as error:
        unfit = error
    raise ConfigurationError(f"{path}: {unfit.what}", fix=unfit.fix)


def _value_schema(document: Any) -> ValueSchema:
    for reference in _references(document):
        if not reference.startswith("#"):
            raise UnfitError(
                f"`$ref` to `{reference}` leads out of the file, and nothing is fetched",
                "put that schema under `$defs` and refer to it as `#/$defs/...`",
            )
    try:
        _compiled(document)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        at = _json_path(getattr(error, "instance_path", []))
        what = getattr(error, "message", "a reference leads nowhere")
        raise UnfitError("is no valid JSON Schema", f"at {at}: {what}") from None
    columns = _Columns(document)
    value_type = columns.value_type()
    for schema in columns.integers:
        schema["allOf"] = [*schema.get("allOf", []), INT64_BOUNDS]
    return ValueSchema(orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode(), value_type)


def _compiled(document: Any) -> jsonschema_rs.Validator:
    def retrieve(uri: str) -> Any:
        raise LookupError(f"{uri} is not part of the schema")

    return jsonschema_rs.validator_for(
        document, validate_formats=False, mask="the value", retriever=retrieve
    )


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        node = dict(enumerate(node))
    for keyword, value in node.items() if isinstance(node, dict) else ():
        if keyword in _REFERENCES and isinstance(value, str):
            yield value
        elif keyword not in _LITERAL_KEYWORDS:
            yield from _references(value)


def _json_path(steps: list[str | int]) -> str:
    path = "$"
    for step in steps:
        is_name = isinstance(step, str) and is_identifier(step)
        path += f".{step}" if is_name else f"[{step!r}]"
    return path


@dataclass
class _Columns:
    """Reader of a valid schema as columns. It also collects the parts that are integer columns."""

    document: Any
    integers: list[dict[str, Any]] = field(default_factory=list)

    def value_type(self) -> pa.DataType:
        top, followed = self._dereferenced(self.document, "the top level", ("#",))
        has_fields = isinstance(top, dict) and top.get("properties")
        if not has_fields or _types(top) not in ([], ["object"]):
            what = "the top level must be an object with `properties`"
            raise UnfitError(what, f"name its fields there{_OR_KEEP_TEXT}")
        return pa.struct(self._fields(top, "", followed))

    def _fields(
        self, schema: dict[str, Any], parent: str, followed: tuple[str, ...]
    ) -> list[tuple[str, pa.DataType]]:
        spellings: dict[str, str] = {}
        fields = []
        for name, child in schema["properties"].items():
            where = f"{parent}.{name}" if parent else name
            if fault := name_fault(name, spellings):
                raise _refused(where, *fault)
            fields.append((name, self._column_type(child, where, followed)))
        return fields

    def _column_type(self, schema: Any, where: str, followed: tuple[str, ...]) -> pa.DataType:
        schema, followed = self._dereferenced(schema, f"field `{where}`", followed)
        if not isinstance(schema, dict):
            raise _refused(where)
        types = _types(schema)
        if not types and (choice := _only_choice_but_null(schema)) is not None:
            return self._column_type(choice, where, followed)
        types = types or _types_of_literals(schema)
        if types == ["object"] and schema.get("properties"):
            return pa.struct(self._fields(schema, where, followed))
        values = schema.get("additionalProperties")
        if types == ["object"] and isinstance(values, dict) and not schema.get("patternProperties"):
            return pa.map_(pa.string(), self._column_type(values, f"{where}[]", followed))
        items = None if "prefixItems" in schema else schema.get("items")
        if types == ["array"] and isinstance(items, dict):
            return pa.list_(self._column_type(items, f"{where}[]", followed))
        if len(types) != 1 or types[0] not in COLUMN_TYPES:
            raise _refused(where)
        if types == ["integer"] and not any(schema is other for other in self.integers):
            self.integers.append(schema)
        return COLUMN_TYPES[types[0]]

    def _dereferenced(
        self, schema: Any, where: str, followed: tuple[str, ...]
    ) -> tuple[Any, tuple[str, ...]]:
        # Keywords beside `$ref` only validate, so the column type is that of the part it refers to.
        while isinstance(schema, dict) and "$ref" in schema:
            reference = schema["$ref"]
            if reference in followed:
                raise UnfitError(
                    f"{where} refers to itself by `{reference}`, and a column has an end",
                    f"write its levels out{_OR_KEEP_TEXT}",
                )
            followed = (*followed, reference)
            schema = self.document
            try:
                if not reference.startswith("#/"):
                    raise LookupError(reference)
                for step in unquote(reference[2:]).split("/"):
                    name = step.replace("~1", "/").replace("~0", "~")
                    schema = schema[int(name) if isinstance(schema, list) else name]
            except (LookupError, TypeError, ValueError):
                raise UnfitError(
                    f"{where} refers to `{reference}`, which is no place in the file",
                    "refer to one as `#/$defs/...`",
                ) from None
        return schema, followed


def name_fault(name: str, spellings: dict[str, str]) -> tuple[str, str] | None:
    """Return why no column can have a field's name, and the fix; None where one can.

    `spellings`: the names of the fields before it, by their lower case, to which it is added.
    """
    if not name or not FORBIDDEN_IN_NAMES.isdisjoint(name):
        return "has a name that no table column can have", "give it another"
    if (other := spellings.setdefault(name.lower(), name)) != name:
        return f"differs from `{other}` only in case, which columns do not", "rename one"
    return None


def _refused(
    where: str,
    what: str = "has no single type that a table column can have",
    fix: str = "give it one",
) -> UnfitError:
    return UnfitError(f"field `{where}` {what}", f"{fix}{_OR_KEEP_TEXT}")


def _types(schema: dict[str, Any]) -> list[str]:
    declared = schema.get("type", [])
    names = [declared] if isinstance(declared, str) else declared
    return [name for name in names if name != "null"]


def _only_choice_but_null(schema: dict[str, Any]) -> Any:
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword, [])
        rest = [c for c in choices if not (isinstance(c, dict) and c.get("type") == "null")]
        if len(rest) == 1 and len(choices) == 2:
            return rest[0]
    return None


def _types_of_literals(schema: dict[str, Any]) -> list[str]:
    # A literal that fits no column has the type `none`.
    if "type" in schema:
        return []
    literals = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return sorted({_LITERAL_TYPES.get(type(each), "none") for each in literals if each is not None})

"""JSON Schema twice over: as the columns that a value's fields become, and as the test that a value must pass.

Both come from one document, so that what a value which passes the test holds fits the columns. (How it is spelled may
differ: to JSON Schema 1.0 and 1e3 are integers, and whoever reads a BIGINT from the text must take them as such.)
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import jsonschema_rs
import orjson

from pipelines.errors import ConfigurationError

COLUMN_TYPES: Final = {"string": "STRING", "integer": "BIGINT", "number": "DOUBLE", "boolean": "BOOLEAN"}

# JSON Schema's integers have no end, a column's have: without these bounds a larger one would become null unseen.
BIGINT_BOUNDS: Final = {"minimum": -(2**63), "maximum": 2**63 - 1}

# Delta takes no column whose name holds one of these, not even inside a struct.
FORBIDDEN_IN_NAMES: Final = frozenset(" ,;{}()\n\t=")

# A violation goes into a column of the quarantine; a schema of many names must not make it pages long.
LONGEST_VIOLATION: Final = 300

_LITERAL_KEYWORDS: Final = frozenset(["const", "enum", "default", "examples"])
_OR_KEEP_TEXT: Final = ", or leave out `schema` to keep values as JSON text"

_LITERAL_TYPES: Final[dict[type, str]] = {str: "string", bool: "boolean", int: "integer", float: "number"}


@dataclass(frozen=True)
class ValueSchema:
    """A JSON Schema that fits a table: `text` is what values are tested by, `ddl` are its fields as Spark columns.

    Both are text, so it travels to the executors, where each compiles its own `validator()`.
    """

    text: str
    ddl: str

    def validator(self) -> Callable[[object], str | None]:
        """None says that a value (as orjson parses it) fits; else one sentence: the first violation and its path.

        Formats are not checked (the standard leaves them to be annotations). The sentence names fields, never contents.
        """
        compiled = _compiled(orjson.loads(self.text))

        def first_violation(value: Any) -> str | None:
            if compiled.is_valid(value):
                return None
            error = next(iter(compiled.iter_errors(value)))
            sentence = f"{_json_path(error.instance_path)}: {error.message}"
            return sentence if len(sentence) <= LONGEST_VIOLATION else sentence[: LONGEST_VIOLATION - 3] + "..."

        return first_violation


def load_value_schema(path: Path) -> ValueSchema:
    """A schema is taken only if it is valid, needs no other document and gives every field one column type.

    Raises ConfigurationError with one sentence otherwise.
    """
    document = _read(path)
    _refuse_foreign_references(path, document)
    try:
        _compiled(document)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        at = _json_path(getattr(error, "instance_path", []))
        what = getattr(error, "message", "a reference leads nowhere")
        raise ConfigurationError(f"{path}: is no valid JSON Schema; at {at}: {what}") from None
    columns = _Columns(path, document)
    ddl = columns.ddl()
    for schema in columns.integers:
        schema["allOf"] = [*schema.get("allOf", []), BIGINT_BOUNDS]
    return ValueSchema(text=orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode(), ddl=ddl)


def _read(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); name a JSON Schema file") from None
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{path}: is no JSON document ({error}); write a JSON Schema") from None


def _compiled(document: Any) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(document, validate_formats=False, mask="the value", retriever=_no_network)


def _no_network(uri: str) -> Any:
    raise LookupError(f"{uri} is not part of the schema")


def _refuse_foreign_references(path: Path, document: Any) -> None:
    for reference in _references(document):
        if not reference.startswith("#"):
            raise ConfigurationError(
                f"{path}: `$ref` to `{reference}` leads out of the file, and nothing is fetched; "
                "put that schema under `$defs` and refer to it as `#/$defs/...`"
            )


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for keyword, value in node.items():
            if keyword in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
                yield value
            elif keyword not in _LITERAL_KEYWORDS:
                yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


def _json_path(steps: list[str | int]) -> str:
    """`$`, then `.name`, `['any name']` or `[index]` for each step."""
    return "$" + "".join(_json_path_step(step) for step in steps)


def _json_path_step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if _is_simple(step) else f"['{step}']"


def _is_simple(name: str) -> bool:
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


@dataclass
class _Columns:
    """Reads a valid schema as columns; on the way it notes which of its parts are integer columns."""

    path: Path
    document: Any
    integers: list[dict[str, Any]] = field(default_factory=list)

    def ddl(self) -> str:
        top, followed = self._dereferenced(self.document, "the top level", ("#",))
        if not isinstance(top, dict) or not top.get("properties") or _types(top) not in ([], ["object"]):
            raise ConfigurationError(
                f"{self.path}: the top level must be an object with `properties`; name its fields there{_OR_KEEP_TEXT}"
            )
        return ", ".join(f"{name} {kind}" for name, kind in self._fields(top, "", followed))

    def _fields(self, schema: dict[str, Any], parent: str, followed: tuple[str, ...]) -> list[tuple[str, str]]:
        spellings: dict[str, str] = {}
        fields = []
        for name, child in schema["properties"].items():
            where = f"{parent}.{name}" if parent else name
            if not name or not FORBIDDEN_IN_NAMES.isdisjoint(name):
                raise self._refused(where, "has a name that no table column can have; give it another")
            other = spellings.setdefault(name.lower(), name)
            if other != name:
                raise self._refused(where, f"differs from `{other}` only in case, which columns do not; rename one")
            quoted = name if _is_simple(name) else "`" + name.replace("`", "``") + "`"
            fields.append((quoted, self._column_type(child, where, followed)))
        return fields

    def _column_type(self, schema: Any, where: str, followed: tuple[str, ...]) -> str:
        schema, followed = self._dereferenced(schema, f"field `{where}`", followed)
        if not isinstance(schema, dict):
            raise self._no_single_type(where)
        types = _types(schema)
        if not types and (choice := _only_choice_but_null(schema)) is not None:
            return self._column_type(choice, where, followed)
        types = types or _types_of_literals(schema)
        if types == ["object"] and schema.get("properties"):
            fields = ", ".join(f"{name}: {kind}" for name, kind in self._fields(schema, where, followed))
            return f"STRUCT<{fields}>"
        if types == ["array"] and isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
            return f"ARRAY<{self._column_type(schema['items'], f'{where}[]', followed)}>"
        if len(types) != 1 or types[0] not in COLUMN_TYPES:
            raise self._no_single_type(where)
        if types == ["integer"] and not any(schema is known for known in self.integers):
            self.integers.append(schema)
        return COLUMN_TYPES[types[0]]

    def _dereferenced(self, schema: Any, where: str, followed: tuple[str, ...]) -> tuple[Any, tuple[str, ...]]:
        """What stands beside a `$ref` only validates, so the type is that of the part it refers to."""
        while isinstance(schema, dict) and "$ref" in schema:
            reference = schema["$ref"]
            if reference in followed:
                raise ConfigurationError(
                    f"{self.path}: {where} refers to itself by `{reference}`, and a column has an end; "
                    f"write its levels out{_OR_KEEP_TEXT}"
                )
            followed = (*followed, reference)
            schema = self._part(reference, where)
        return schema, followed

    def _part(self, reference: str, where: str) -> Any:
        part = self.document
        try:
            if not reference.startswith("#/"):
                raise LookupError(reference)
            for step in unquote(reference[2:]).split("/"):
                name = step.replace("~1", "/").replace("~0", "~")
                part = part[int(name)] if isinstance(part, list) else part[name]
        except (LookupError, TypeError, ValueError):
            raise ConfigurationError(
                f"{self.path}: {where} refers to `{reference}`, which is no place in the file; refer to one as `#/$defs/...`"
            ) from None
        return part

    def _no_single_type(self, where: str) -> ConfigurationError:
        return self._refused(where, "has no single type that a table column can have; give it one")

    def _refused(self, where: str, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self.path}: field `{where}` {what}{_OR_KEEP_TEXT}")


def _types(schema: dict[str, Any]) -> list[str]:
    """Every column may be null, so `null` beside another type says nothing."""
    declared = schema.get("type", [])
    return [name for name in ([declared] if isinstance(declared, str) else declared) if name != "null"]


def _only_choice_but_null(schema: dict[str, Any]) -> Any:
    for keyword in ("anyOf", "oneOf"):
        choices = schema.get(keyword, [])
        rest = [choice for choice in choices if not (isinstance(choice, dict) and choice.get("type") == "null")]
        if len(rest) == 1 and len(choices) == 2:
            return rest[0]
    return None


def _types_of_literals(schema: dict[str, Any]) -> list[str]:
    """The types of `const` or `enum`, where no type is declared; empty where one of them fits no column."""
    if "type" in schema:
        return []
    literals = [schema["const"]] if "const" in schema else schema.get("enum", [])
    names = {_LITERAL_TYPES.get(type(literal), "none") for literal in literals if literal is not None}
    return sorted(names)

"""What may change in the JSON Schema of a source while its lake goes on.

A schema may gain optional fields, make a required field optional, let a field be null, and drop a field. Everything else would
make another column of silver, or leave records behind that were read by other rules than they look to have been.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

_ANNOTATIONS: Final = frozenset(["$id", "$schema", "$comment", "title", "description", "default", "examples", "deprecated"])
_BY_NAME: Final = ("properties", "$defs", "definitions")


def refused_changes(before: str | None, after: str | None) -> list[str]:
    """A sentence with the path for each change of a schema (as text; None: without one) that a living lake does not take."""
    if before is None or after is None:
        said = "a schema cannot be added" if before is None else "the schema cannot be removed"
        return [] if before == after else [f"{said}: silver's column is {'text' if before is None else 'a struct'}"]
    return list(_refused(json.loads(before), json.loads(after), "$"))


def _refused(before: Any, after: Any, path: str) -> Iterator[str]:
    if not isinstance(before, dict) or not isinstance(after, dict):
        if before != after:
            yield f"{path} is another schema"
        return
    for word in _BY_NAME:
        old, new = before.get(word, {}), after.get(word, {})
        for name in old.keys() & new.keys():
            yield from _refused(old[name], new[name], f"{path}.{name}" if word == "properties" else f"{path}.{word}.{name}")
    needed = set(after.get("required", ())) - set(before.get("required", ()))
    yield from (f"{path}.{name} is required, and was not" for name in sorted(needed))
    if "items" in before and "items" in after:
        yield from _refused(before["items"], after["items"], f"{path}[]")
    if _types(after) - {"null"} != _types(before) - {"null"} or _types(before) - _types(after):
        yield f"{path} has another type"
    passed = {*_ANNOTATIONS, *_BY_NAME, "required", "type", *(["items"] if "items" in before and "items" in after else [])}
    for word in sorted((before.keys() | after.keys()) - passed):
        if before.get(word) != after.get(word):
            yield f"{path}: `{word}` differs"


def _types(schema: dict[str, Any]) -> set[str]:
    found = schema.get("type", [])
    return {found} if isinstance(found, str) else set(found)

"""Answers as people read them."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console

from pipelines.audit.show import evolve_view


def read(view: Any) -> list[str]:
    """A view as lines of words."""
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def change(field: str, before: Any, after: Any) -> list[str]:
    changes = [{"field": field, "before": before, "after": after}]
    found = {"epoch": 1, "from_batch": 2, "changes": changes, "problems": [], "applied": False}
    heading, *lines, _, _ = read(evolve_view(found))
    assert heading == "before after"
    return lines


def test_of_a_schema_what_changes_is_shown_and_nothing_else() -> None:
    number, text = {"type": "integer"}, {"type": "string"}
    inner = {"type": "object", "properties": {"größe": number}}
    before = {"type": "object", "required": ["id"], "properties": {"id": text, "inner": inner}}
    more = {"type": "object", "properties": {"größe": number, "n": number}}
    after = {"type": "object", "required": [], "properties": {"id": text, "inner": more, "new": text}}
    assert change("sources.orders.schema", json.dumps(before), json.dumps(after)) == [
        'sources.orders.schema, required ["id"] []',
        f"sources.orders.schema, field inner {json.dumps(inner, ensure_ascii=False)} {json.dumps(more, ensure_ascii=False)}",
        'sources.orders.schema, field new none {"type": "string"}',
    ]


def test_of_an_avro_schema_fields_are_shown_by_their_names() -> None:
    def schema(*fields: tuple[str, Any]) -> str:
        return json.dumps({"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields]})

    assert change("sources.orders.schema", schema(("id", "int"), ("old", "int")), schema(("id", "long"))) == [
        'sources.orders.schema, field id {"name": "id", "type": "int"} {"name": "id", "type": "long"}',
        'sources.orders.schema, field old {"name": "old", "type": "int"} none',
    ]


def test_other_rules_are_shown_as_they_are_written() -> None:
    assert change("merge.timeout", 1_000, 60_000) == ["merge.timeout 1s 1m"]
    assert change("publish.value", None, "key") == ["publish.value none key"]

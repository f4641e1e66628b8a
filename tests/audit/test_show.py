"""Answers as people read them."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from tests.unit.test_docs import blocks, page
from watersmeet.audit.show import (
    SHOWN_PARTS,
    SHOWN_RECORDS,
    evolve_view,
    explain_view,
    reset_view,
    status_view,
)
from watersmeet.core.times import utc


def read(view: Any) -> list[str]:
    """A view as lines of words."""
    console = Console(file=io.StringIO(), width=200)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def change(field: str, before: Any, after: Any) -> list[str]:
    changes = [{"field": field, "before": before, "after": after}]
    found = {
        "epoch": 1,
        "from_batch": 2,
        "changes": changes,
        "fields": [],
        "problems": [],
        "applied": False,
    }
    heading, *lines, _, _ = read(evolve_view(found))
    assert heading == "before after"
    return lines


def test_of_a_schema_what_changes_is_shown_and_nothing_else() -> None:
    number, text = {"type": "integer"}, {"type": "string"}
    inner = {"type": "object", "properties": {"größe": number}}
    before = {"type": "object", "required": ["id"], "properties": {"id": text, "inner": inner}}
    more = {"type": "object", "properties": {"größe": number, "n": number}}
    after = {
        "type": "object",
        "required": [],
        "properties": {"id": text, "inner": more, "new": text},
    }
    assert change("sources.orders.schema", json.dumps(before), json.dumps(after)) == [
        'sources.orders.schema, required ["id"] []',
        f"sources.orders.schema, field inner {json.dumps(inner, ensure_ascii=False)} "
        f"{json.dumps(more, ensure_ascii=False)}",
        'sources.orders.schema, field new none {"type": "string"}',
    ]


def test_of_an_avro_schema_fields_are_shown_by_their_names() -> None:
    def schema(*fields: tuple[str, Any]) -> str:
        return json.dumps(
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": name, "type": kind} for name, kind in fields],
            }
        )

    assert change(
        "sources.orders.schema", schema(("id", "int"), ("old", "int")), schema(("id", "long"))
    ) == [
        'sources.orders.schema, field id {"name": "id", "type": "int"} {"name": "id", "type": '
        '"long"}',
        'sources.orders.schema, field old {"name": "old", "type": "int"} none',
    ]


def test_other_rules_are_shown_as_they_are_written() -> None:
    assert change("merge.timeout", 1_000, 60_000) == ["merge.timeout 1s 1m"]
    assert change("publish.value", None, "key") == ["publish.value none key"]


# -- explain


def life(records: int = 0, parts: int = 1, late: int = 0) -> dict[str, Any]:
    """What is told of a key with so many merge records, of so many parts each, and late records; a
    second after the other."""
    place = {"source": "orders", "topic": "orders", "partition": 0}
    told = {"rule": "opened", "batch": 0, "version": 1}
    whole = {
        "partition": 0,
        "status": "timed_out",
        "valid": True,
        "reason": "timed out",
        "published": None,
        "closed": None,
        "versions": [],
    }
    merged = [
        {
            **(whole | {"event_time": n * 1000, "last_event_time": n * 1000}),
            "parts": [
                {
                    **place,
                    **told,
                    "offset": n * parts + i,
                    "event_time": n * 1000,
                    "position": n * 1000,
                }
                for i in range(parts)
            ],
        }
        for n in range(records)
    ]
    lates = [
        {**place, "offset": n, "event_time": n, "position": n, "batch": 0, "version": 1}
        for n in range(late)
    ]
    return {
        "key": "k",
        "as_of": None,
        "records": merged,
        "late": lates,
        "duplicates": [],
        "waiting": [],
        "quarantined": [],
        "near": [],
    }


def test_each_version_of_a_merge_record_is_a_line_and_so_is_what_became_of_a_late_record() -> None:
    answer = life(records=1, late=1)
    place = {"source": "orders", "topic": "orders", "partition": 0, "offset": 7}
    version = {**place, "version": 1, "settled_at": 2000, "valid": True, "invalid_reason": None}
    out = {"partition": 0, "offset": 5, "seq": 3}
    unpublished = {**version, "version": 2, "valid": False, "invalid_reason": "predicate"}
    answer["records"][0]["versions"] = [
        {**version, "published": out},
        {**unpublished, "published": None},
    ]
    answer["late"][0] |= {"u": None, "corrected": None, "outcome": "not corrected"}
    lines = read(explain_view(answer))
    settled = "with orders[0]@7, settled at 1970-01-01 00:00:02.000Z"
    assert f"version 1: {settled} · valid · published as number 3 at offset 5" in lines
    assert f"version 2: {settled} · not valid (predicate)" in lines
    assert "orders[0]@0: not corrected" in lines


def test_of_many_merge_records_the_newest_come_first_and_it_is_said_how_many_there_are() -> None:
    heading, *lines = read(explain_view(life(records=12_345)))
    assert (
        heading
        == f"'k': 12,345 merge records; the newest {SHOWN_RECORDS} are shown, and all by --json"
    )
    shown = [line for line in lines if line.startswith("partition")]
    assert [line.split(" · ")[1] for line in shown] == [
        f"{utc(n * 1000)} to {utc(n * 1000)}" for n in range(12_344, 12_324, -1)
    ]


def test_of_few_merge_records_all_are_shown_the_newest_first() -> None:
    heading, *lines = read(explain_view(life(records=2)))
    assert heading == "'k': 2 merge records, the newest first"
    assert [line.split(" · ")[1][:23] for line in lines if line.startswith("partition")] == [
        utc(1000)[:23],
        utc(0)[:23],
    ]
    assert read(explain_view(life(records=1)))[0] == "'k': 1 merge record"


def test_of_many_parts_and_of_many_late_records_the_last_are_shown_and_the_others_counted() -> None:
    lines = read(explain_view(life(records=1, parts=1_000, late=2_000)))
    assert [line.split()[0] for line in lines if line.startswith("orders[0]@")] == [
        *(f"orders[0]@{n}" for n in range(1_000 - SHOWN_PARTS, 1_000)),
        *(f"orders[0]@{n}" for n in range(2_000 - SHOWN_RECORDS, 2_000)),
    ]
    assert f"{1_000 - SHOWN_PARTS} earlier parts, then" in lines
    assert f"late: never merged: 2,000, the last {SHOWN_RECORDS} are shown" in lines


def test_of_a_lake_without_a_partition_that_is_known_there_is_a_sentence() -> None:
    """Kafka is away, and the lake has no record."""
    said = "The lake has no record yet, and only Kafka knows its partitions."
    assert read(status_view({"partitions": [], "quality": []})) == [said]


@pytest.mark.parametrize(("clock", "is_behind"), [(9, True), (10, False)])
def test_a_tenant_is_slow_where_it_is_behind_the_clock(clock: int, is_behind: bool) -> None:
    source = {"head": 10, "lead": 0, "lag": 0, "state": "active"}
    names = ("partition", "open", "timed_out", "published", "late")
    partition: dict[str, Any] = dict.fromkeys(names, 0)
    partition |= {"quarantined": 0, "waiting": 0, "tenants": 1, "clock": 10, "next_due": None}
    of_tenants = {"slowest": {"tenant": "acme", "clock": clock}, "leading": None}
    answer = {**partition, **of_tenants, "sources": {"orders": source}}
    shown = " ".join(read(status_view({"partitions": [answer], "quality": []})))
    assert ("slowest 'acme' 1ms behind the clock" in shown) == is_behind
    assert ("slowest" in shown) == is_behind


def test_a_jump_is_told_in_offsets_since_not_each_is_a_record() -> None:
    closed = ("open_records", "unpublished_records", "corrections", "late_records")
    jump = {"source": "orders", "partition": 0, "from_offset": 3, "to_offset": 9, "skipped": 6}
    answer = {f"{name}_closed": 0 for name in closed} | {"to": "latest", "done": False}
    answer |= {"forget_again": False, "jumps": [{**jump, "read_again": 0}]}
    lines = read(reset_view(answer))
    assert lines[1:3] == [
        "source partition from to offsets skipped offsets read again",
        "orders 0 3 9 6 0",
    ]
    assert "forget these keys once more" in "\n".join(
        read(reset_view(answer | {"forget_again": True}))
    )


def test_a_jump_is_shown_as_the_page_for_operators_has_it() -> None:
    closed = {"open_records": 120, "unpublished_records": 0, "corrections": 0, "late_records": 0}
    names = ("source", "partition", "from_offset", "to_offset", "skipped", "read_again")
    jumps = [("tracking", 0, 1475, 1596, 121, 0), ("orders", 0, 365, 365, 0, 0)]
    answer: dict[str, Any] = {f"{name}_closed": count for name, count in closed.items()}
    answer |= {"to": "latest", "done": False, "forget_again": False}
    answer["jumps"] = [dict(zip(names, jump, strict=True)) for jump in jumps]
    shown = "".join(blocks(page("operations.md"), ""))
    assert "\n".join(read(reset_view(answer))) in re.sub(" +", " ", shown)

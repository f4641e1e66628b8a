"""Records are read as they have always been: outcomes recorded from the reader that this one
replaced."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.core.test_reading import FAR, Input, read_all
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.reading import ReadingRules

pytestmark = [pytest.mark.promise("R9"), pytest.mark.fault("hostile")]


GOLDEN = Path(__file__).parents[1] / "golden" / "reading.jsonl.gz"


def as_rules(kept: dict[str, Any]) -> ReadingRules:
    heartbeat = kept["heartbeat"] and (tuple(kept["heartbeat"][0]), kept["heartbeat"][1])
    keys = ((tuple(kept["key"]),),) if kept["key"] else ()
    schema = (
        None if kept["schema"] is None else ValueSchema(json.dumps(kept["schema"]), pa.struct([]))
    )
    return ReadingRules(
        (tuple(kept["event_time"]),),
        kept["max_future_ms"],
        keys,
        heartbeat=heartbeat,
        schema=schema,
    )


def as_bytes(kept: str | None) -> bytes | None:
    return None if kept is None else kept.encode("latin-1")


def comparable(reading: tuple[Any, ...]) -> tuple[Any, ...]:
    """Without the wording of Python's own JSON parser, which changed with Python 3.13."""
    *said, detail = reading
    return (
        *said,
        detail[:15]
        if sys.version_info >= (3, 13) and detail and detail.startswith("no strict JSON:")
        else detail,
    )


def test_every_record_is_read_as_ever() -> None:
    lines = [json.loads(line) for line in gzip.decompress(GOLDEN.read_bytes()).splitlines()]
    rules = [as_rules(line["rules"]) for line in lines if "rules" in line]
    cases: dict[int, list[tuple[Input, tuple[Any, ...]]]] = defaultdict(list)
    for line in lines[len(rules) :]:
        # The reader of then let a record without a timestamp have any event time; now it is refused
        # (test_reading.py).
        kafka_time = FAR if line["kafka_time"] < 0 else line["kafka_time"]
        record = as_bytes(line["key"]), as_bytes(line["value"]), kafka_time
        for chosen, *outcome in line["outcomes"]:
            for index in chosen:
                cases[index].append((record, tuple(outcome)))
    assert sum(map(len, cases.values())) > 30_000
    for index, mine in cases.items():
        found = read_all([record for record, _ in mine], rules[index])
        for (record, outcome), reading in zip(mine, found, strict=True):
            assert comparable(reading) == comparable(outcome), (record, rules[index])

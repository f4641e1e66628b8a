"""One topic as two sources, each with its own records of it: merged with itself as if each source
had a topic of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import KEYS, SOURCES, heartbeat, keyed
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River
from tests.support.topics import produce
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.forget import forgotten


def of_one_topic(kafka: str, folder: Path, lake: str) -> River:
    name = f"one-topic-{folder.name[-20:].strip('_').replace('_', '-')}"
    changes: dict[str, Any] = {
        f"sources__{s}__where": {"field": "role", "equals": s} for s in SOURCES
    }
    return River.make(
        kafka, folder, name, lake=lake, sources__orders__topic=f"{name}-tracking", **changes
    )


def send(river: River, rng: random.Random, count: int) -> None:
    """Records of both roles and of none, late ones and some that nobody can read, to both
    partitions."""
    sent = []
    for p, case in river.cases.items():
        for n in range(count):
            role, time = rng.choice([*SOURCES, "other"]), 10 * len(case.values["tracking"])
            time = max(0, time - rng.choice([0, 0, 0, 30, 250]))
            value: bytes | None = keyed(rng.choice(KEYS), time, role=role, n=n)
            if is_bad := rng.random() < 0.05:
                value = b"{"
            sent.append((p, value))
            for source in SOURCES:
                # What is not a source's own says what time it is; what the first source has refused
                # says nothing to the others.
                is_own = source == SOURCES[0] if is_bad else role == source
                case.values[source].append(value if is_own else heartbeat(0 if is_bad else time))
                case.arrivals.append(source)
    produce(river.kafka, f"{river.config['name']}-tracking", sent)


# Both engines read a record by the same function, and how a role is read is decided there: with
# Spark it takes long.
@pytest.mark.long
@pytest.mark.parametrize("lake", [EMBEDDED, pytest.param(FOLDER, marks=pytest.mark.nightly)])
def test_a_topic_is_merged_with_itself_by_role(
    kafka: str, tmp_path: Path, lake: str, on_spark: Callable[[River], River]
) -> None:
    river, rng = on_spark(of_one_topic(kafka, tmp_path, lake)), random.Random(7)
    for _ in range(2):
        send(river, rng, 120)
        river.finish()
    found = river.reader.summary(tables.SILVER, ["status"], {"rows": ("count", "merge_key")})
    assert (
        dict(zip(found["status"].to_pylist(), found["rows"].to_pylist(), strict=True))["timed_out"]
        > 20
    )
    assert river.losses() == Losses()
    assert river.broken_promises() == []


@pytest.mark.long
def test_a_forgotten_key_is_gone_from_every_source_of_the_topic_and_from_what_belongs_to_none(
    kafka: str, tmp_path: Path
) -> None:
    river, rng = of_one_topic(kafka, tmp_path, EMBEDDED), random.Random(8)
    send(river, rng, 80)
    river.finish()
    has_key = [("value", "is not null", None)]
    before = [
        row
        for s in SOURCES
        for row in river.reader.select(tables.bronze(s), ["value"], [has_key]).to_pylist()
    ]
    assert sum(b'"k":"b"' in row["value"] for row in before) > 20
    forgotten(river.settings, "b", Reporter())
    after = [
        row
        for s in SOURCES
        for row in river.reader.select(tables.bronze(s), ["value"], [has_key]).to_pylist()
    ]
    assert not any(b'"k":"b"' in row["value"] for row in after)
    assert sum(b'"k":"a"' in row["value"] for row in after) == sum(
        b'"k":"a"' in row["value"] for row in before
    )
    assert river.broken_promises() == []

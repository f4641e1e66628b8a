"""More partitions: a new lake begins where the old one ends, as docs/operations.md says; nothing is
lost or twice."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.lives import Life
from tests.support.repartitioning import expected_partition
from tests.support.rivers import TIMEOUT_MS, River
from tests.support.topics import Published, add_partitions, produce, published
from watersmeet.ask.status import status
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.repartition.command import repartition

OLD, NEW = 2, 5
FIRST_ENDS_MS = 1000
NEXT_BEGINS_MS = FIRST_ENDS_MS + TIMEOUT_MS + 1
"""When the producers go on: the time of the heartbeats between."""


def keyed_records(seed: int, begin_ms: int, end_ms: int) -> list[tuple[str, int, bytes]]:
    """Records as a producer with Java's partitioner sends them: source, partition and value."""
    rng, found = random.Random(seed), []
    for n in range(150):
        key, time_ms = f"key {rng.randrange(25)}", begin_ms + (end_ms - begin_ms) * n // 150
        value = keyed(key, max(begin_ms, time_ms - rng.choice([0, 0, 100])), n=f"{seed}/{n}")
        found.append((rng.choice(SOURCES), expected_partition(key.encode(), OLD), value))
    return found


def send(river: River, records: list[tuple[str, int, bytes]]) -> list[bytes]:
    for source in SOURCES:
        topic = str(river.config["sources"][source]["topic"])
        produce(
            river.kafka,
            topic,
            [(p, value) for of_source, p, value in records if of_source == source],
        )
    return [value for _, _, value in records]


def beat(river: River, time_ms: int) -> None:
    send(river, [(source, p, heartbeat(time_ms)) for source in SOURCES for p in range(OLD)])


def parts_of(messages: list[Published]) -> list[dict[str, Any]]:
    """The values of all records in the messages."""
    values = [orjson.loads(message.value or b"") for message in messages]
    return [part for value in values for source in SOURCES for part in value[source]]


@pytest.mark.promise("N7")
@pytest.mark.fault("topics")
@pytest.mark.long
def test_a_new_lake_with_more_partitions_begins_where_the_old_one_ends(
    kafka: str, tmp_path: Path
) -> None:
    old = River.make(kafka, tmp_path / "old", "growth-old", partitions=OLD)
    sent = send(old, keyed_records(1, 0, FIRST_ENDS_MS))
    old.finish()

    new = River(kafka, tmp_path / "new", NEW, 1, yaml.safe_load(yaml.safe_dump(old.config)))
    new.config |= {"name": "growth-new", "publish": {"topic": "growth-new-merged"}}
    new.config["kafka"]["start"] = "latest"
    for source in SOURCES:
        of_source = new.config["sources"][source]
        of_source |= {
            "topic": f"growth-new-{source}",
            "repartition": {"from": of_source["topic"], "partitions": NEW},
        }
    new.folder.mkdir()
    new.write()

    # The producers pause. What there is is written, and the new lake decides to begin after it.
    repartition(new.settings, Reporter(), threading.Event(), once=True)
    new.finish()
    assert new.reader.select(tables.GENERATIONS, ["source"]).num_rows == 2 * NEW

    # Heartbeats end what is open in the old lake, and are the first that the new one reads.
    beat(old, NEXT_BEGINS_MS)
    old.finish()
    stands = status(old.reader, old.settings)["partitions"]
    assert [
        (row["open"], row["late"], sum(s["lag"] for s in row["sources"].values())) for row in stands
    ] == [(0, 0, 0)] * OLD

    # The producers go on, where they always wrote to.
    sent += send(old, keyed_records(2, NEXT_BEGINS_MS, 3000))
    beat(old, 5000)
    repartition(new.settings, Reporter(), threading.Event(), once=True)
    new.finish()

    before, after = published(kafka, old.sink, OLD), published(kafka, new.sink, NEW)
    assert len(before) > 10 < len(after)
    parts = parts_of(before) + parts_of(after)
    assert Counter(map(orjson.dumps, parts)) == Counter(sent)
    last = {message.key: message.timestamp for message in before}
    assert all(message.timestamp > last.get(message.key, -1) for message in after)
    assert {(m.key, m.partition) for m in after} == {
        (m.key, expected_partition(m.key, NEW)) for m in after
    }
    assert {p for p in range(NEW) for m in after if m.partition == p} == set(range(NEW))
    for river in (old, new):
        assert river.broken_promises() == []
    assert sum(row["late"] for row in status(new.reader, new.settings)["partitions"]) == 0


@pytest.mark.promise("N7")
@pytest.mark.fault("topics")
@pytest.mark.long
def test_where_partitions_were_added_a_command_says_so(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("a", 1000), (None, 1400))
    life.run()
    for topic in (life.river.topic("tracking"), life.river.topic("orders"), life.river.sink):
        add_partitions(kafka, topic, 2)
    for words in (
        "run --once",
        "reset --to latest",
        "reset --to latest --yes",
        "verify",
        "maintain",
        "redrive --reason no_key",
    ):
        said = life.call(*words.split(), exit_code=2)
        assert "the topics have 2 partitions, and had 1 when the lake was begun" in said

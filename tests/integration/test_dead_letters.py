"""Topics of dead letters, of whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.laws.test_large_records import produce_packed
from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.rivers import River
from tests.support.topics import consume, create_topics, produce
from watersmeet.core.dead_letters import OFFSET


def test_a_dead_letter_of_many_headers_stops_nothing(kafka: str, tmp_path: Path) -> None:
    name = "letters-of-many-headers"
    letters = f"{name}-quarantine"
    river = River.make(kafka, tmp_path, name, partitions=1, publish__quarantine_topic=letters)
    create_topics(
        kafka,
        letters,
        partitions=1,
        **{"max.message.bytes": "60000", "compression.type": "uncompressed"},
    )
    tracking, orders = map(river.topic, SOURCES)
    produce_packed(kafka, tracking, [b"{"], "zstd", b"key", [("h", b"")] * 40_000)
    produce_packed(kafka, tracking, [keyed("a", 10), heartbeat(10_000)], "none")
    produce_packed(kafka, orders, [heartbeat(10_000)], "none")
    river.finish()
    assert len(consume(kafka, letters, 1)) == 1
    assert len(consume(kafka, river.sink, 1)) == 1


def test_verify_finds_nothing_where_two_sources_of_a_topic_have_late_records(
    kafka: str, tmp_path: Path
) -> None:
    name = "letters-of-two-sources"
    more: dict[str, Any] = {
        f"sources__{source}__where": {"field": "role", "equals": source} for source in SOURCES
    }
    more |= {"sources__orders__topic": f"{name}-tracking", "publish__late_topic": f"{name}-late"}
    river = River.make(kafka, tmp_path, name, partitions=1, **more)
    values = [
        json.dumps({"k": "a", "ts": ts, "role": role}).encode()
        for role, ts in zip(
            ["tracking", "tracking", "orders", "tracking", "orders"],
            [5000, 1, 2, 3, 4],
            strict=True,
        )
    ]
    produce(kafka, f"{name}-tracking", [(0, v) for v in [*values, heartbeat(9000)]])
    river.finish()
    sent = [int(dict(m.headers())[OFFSET]) for m in consume(kafka, f"{name}-late", 1)]
    assert sent == [1, 3, 2, 4], "those of each source in order of offset"
    assert river.broken_promises() == []

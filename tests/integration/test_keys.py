"""Keys of several fields and of headers, and Kafka's own time, from one end to the other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import SOURCES
from tests.support.commands import here
from tests.support.model_lakes import KAFKA_TIME_MS
from tests.support.rivers import EMBEDDED, FOLDER, TIMEOUT_MS, River
from tests.support.topics import CheckedProducer, create_topics, published
from watersmeet.core.repartition import murmur2
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.forget import forgotten

pytestmark = pytest.mark.long

VISITS = 40
RAW_PARTITIONS = 3
FORGOTTEN = '["7","visit 1 é"]'


def visits_by_two_keys(kafka: str, folder: Path, lake: str, *, is_repartitioned: bool) -> River:
    """Tracking has a visit's key in two fields, orders in a header, and their time from Kafka."""
    name = f"keys-{'raw' if is_repartitioned else 'plain'}-{folder.name[-12:].strip('_')}"
    name = name.replace("_", "-").lower()
    changes: dict[str, Any] = {
        "sources__tracking__key": ["shop", "visit"],
        "sources__orders__key": {"header": "visit"},
        "sources__orders__event_time": {"kafka": "timestamp"},
        "publish__quarantine_topic": f"{name}-quarantine",
    }
    if is_repartitioned:
        for source in SOURCES:
            raw = f"{name}-raw-{source}"
            create_topics(kafka, raw, partitions=RAW_PARTITIONS)
            changes[f"sources__{source}__repartition"] = {"from": raw, "partitions": 2}
    return River.make(kafka, folder, name, lake=lake, **changes)


def send(river: River, *, is_repartitioned: bool) -> None:
    """Visits of 10 ms each, with a click and an order; then records without a key, and heartbeats.

    They go to the partition of their key, or to any of the topics that are repartitioned.
    """
    rng = random.Random(3)
    producer = CheckedProducer(river.kafka)
    partitions = RAW_PARTITIONS if is_repartitioned else river.partitions

    def topic(source: str) -> str:
        repartition = river.config["sources"][source].get("repartition")
        return str(repartition["from"] if repartition else river.topic(source))

    def produce(
        source: str, key: str, value: dict[str, Any] | bytes, time: int, headers: Any = None
    ) -> None:
        sent = value if isinstance(value, bytes) else json.dumps(value).encode()
        own = rng.randrange(partitions) if is_repartitioned else murmur2(key.encode()) % partitions
        producer.produce(topic(source), sent, partition=own, timestamp=time, headers=headers)

    for n in range(VISITS):
        time = KAFKA_TIME_MS + 10 * n
        key = f'["7","visit {n} é"]'
        click = {"shop": 7, "visit": f"visit {n} é", "ts": time, "n": n}
        headers = [("visit", b"another"), ("visit", key.encode()), ("trace", None)]
        produce("tracking", key, click, time)
        produce("orders", key, {"n": n, "ts": "wrong"}, time + 5, headers)
        if n == 1:
            produce("orders", key, b"{", time, headers)
    produce("tracking", "", {"shop": 7, "ts": KAFKA_TIME_MS}, KAFKA_TIME_MS)
    produce("tracking", "", {"shop": 7, "visit": None, "ts": KAFKA_TIME_MS}, KAFKA_TIME_MS)
    produce("orders", "", {"n": 0}, KAFKA_TIME_MS)
    produce("orders", "", {"n": 0}, KAFKA_TIME_MS, [("visit", b"")])
    end = KAFKA_TIME_MS + 10 * VISITS + 3 * TIMEOUT_MS
    for source in SOURCES:
        for p in range(partitions):
            beat = json.dumps({"type": "heartbeat", "ts": end}).encode()
            producer.produce(topic(source), beat, partition=p, timestamp=end)
    assert producer.flush(30) == 0


@pytest.mark.parametrize(
    "lake", [EMBEDDED, pytest.param(FOLDER, marks=pytest.mark.nightly, id="spark")]
)
@pytest.mark.parametrize("is_repartitioned", [False, True], ids=["plain", "repartitioned"])
def test_records_meet_by_several_fields_and_by_a_header_at_kafkas_time(
    kafka: str,
    tmp_path: Path,
    lake: str,
    is_repartitioned: bool,
    on_spark: Callable[[River], River],
) -> None:
    river = on_spark(visits_by_two_keys(kafka, tmp_path, lake, is_repartitioned=is_repartitioned))
    send(river, is_repartitioned=is_repartitioned)
    if is_repartitioned:
        river.finish_repartition()
    river.finish()
    messages = published(kafka, river.sink, river.partitions)
    found = {message.key.decode(): json.loads(message.value or b"") for message in messages}
    assert len(found) == len(messages) == VISITS
    for n in range(VISITS):
        value = found[f'["7","visit {n} é"]']
        assert [len(value[source]) for source in SOURCES] == [1, 1]
        assert value["event_time"] == KAFKA_TIME_MS + 10 * n
        assert value["last_event_time"] == value["event_time"] + 5
    reasons = river.reader.select(tables.QUARANTINE, ["reason"])["reason"].to_pylist()
    assert sorted(reasons) == ["no_key"] * 4 + ["undecodable"]
    assert river.broken_promises() == []

    [explained] = json.loads(here(river, "explain", FORGOTTEN, "--json"))["records"]
    assert {part["source"] for part in explained["parts"]} == set(SOURCES)
    again = tmp_path / "again"
    here(river, "rebuild", "--into", str(again))
    here(river, "verify", "--against", str(again))

    forgotten(river.settings, FORGOTTEN, Reporter())
    for source in SOURCES:
        bronze = river.reader.select(tables.bronze(source), ["value", "headers"]).to_pylist()
        assert "visit 1 " not in str(bronze)
    refused = river.reader.select(tables.QUARANTINE, ["headers"]).to_pylist()
    assert "visit 1 " not in str(refused)
    assert river.broken_promises() == []

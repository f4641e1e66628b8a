"""Made-up input, the same in each run: sessions of ten `tracking` records and one `orders` record.

A session lasts five minutes and ends with its order. There are two kinds: `ordered`, whose sessions
begin evenly over a day and whose records come in order of event time, and `overlapping`, of which
81 sessions begin in a second of event time, so that 45,000 are open at once, and whose records come
up to two minutes late, out of order. Every topic-partition is closed by a heartbeat two days after
the first record, so that everything times out: one merge record per session.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from uuid import UUID

from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.options import ListeningProducer
from watersmeet.settings import Settings

TOPICS = ("tracking", "orders")
DAY_MS = 86_400_000
SESSION_MS = 300_000
START_MS = 1_767_225_600_000
TIMEOUT_MS = 600_000
WITHIN_MS = 7 * DAY_MS
"""How late a record may be that is corrected."""

CONFIGURATION = """\
name: bench
engine: {engine}
lake: ./lake
kafka: {{bootstrap_servers: "{bootstrap_servers}"}}
sources:
  tracking: {{topic: tracking, key: ssid, event_time: ts, id: {id},
    heartbeat: {{field: type, equals: heartbeat}}}}
  orders: {{topic: orders, key: ssid, event_time: ts, id: {id},
    heartbeat: {{field: type, equals: heartbeat}}}}
merge: {merge}
publish: {publish}
spark: {spark}
durable: {durable}
"""

Variant = Literal["plain", "tenants", "ids", "corrections", "valid", "volatile"]
Kind = Literal["overlapping", "ordered"]

SESSIONS_PER_S = 81
"""Of the overlapping kind: 45,000 are open at once, since the first record of each comes later."""
MAX_DELAY_MS = 120_000
"""How late its records come; a session and this are less than the timeout, so none is too late."""

_SPREAD = 2_654_435_761
_SLICE = 20_000
"""So many sessions are sorted together: a few hundred thousand records are in memory, however many
there are in all."""


def write_configuration(
    folder: Path,
    bootstrap_servers: str,
    *,
    timeout_ms: int = TIMEOUT_MS,
    sink: str = "merged",
    engine: str = "spark",
    spark: Mapping[str, str] | None = None,
    variant: Variant = "plain",
) -> Path:
    """The folder's `watersmeet.yml`, for a lake beside it; `spark`: settings of the session that it
    starts.

    A variant uses the tenants or the ids of the records, corrects late ones, judges merge records
    by an expression, or does not wait for the disk; the clock of each tenant may be an hour behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "watersmeet.yml"
    merge = {"timeout": f"{timeout_ms}ms"} | (
        {"tenant": "org", "tenant_max_lag": "1h"} if variant == "tenants" else {}
    )
    publish: dict[str, object] = {"topic": sink}
    if variant == "corrections":
        publish["corrections"] = {"topic": f"{sink}-corrections", "within": f"{WITHIN_MS}ms"}
    if variant == "valid":
        publish["valid"] = "len(orders) > 0"
    values = {
        "bootstrap_servers": bootstrap_servers,
        "publish": json.dumps(publish),
        "engine": engine,
        "id": "id" if variant == "ids" else "null",
        "merge": json.dumps(merge),
        "spark": json.dumps(dict(spark or {})),
        "durable": json.dumps(variant != "volatile"),
    }
    file.write_text(CONFIGURATION.format(**values))
    return file


def session_key(session: int) -> str:
    """The key of a session; neighbours have nothing in common, as with real session ids, and no two
    share one."""
    return f"s{session * _SPREAD % 2**32:08x}"


def session_of(key: str) -> int:
    """The session whose key this is."""
    return int(key[1:], 16) * pow(_SPREAD, -1, 2**32) % 2**32


def record_value(key: str, event_time: int, topic: str, more: str = "") -> str:
    """A record's JSON, with more fields at its end (`,"NAME":VALUE`); `aid` looks random and is the
    same in each run."""
    aid = event_time * 7_919 % 1_800_000
    return (
        f'{{"ssid":"{key}","ts":{event_time},"type":"{topic}","aid":{aid},'
        f'"page":"/article/view"{more}}}'
    )


def heartbeat_value(event_time: int) -> str:
    """A heartbeat's JSON."""
    return f'{{"type":"heartbeat","ts":{event_time}}}'


@dataclass(frozen=True)
class Shape:
    """How the records are made.

    `tenants`: so many of them are in each partition, and take turns in its sessions. Ids are UUIDs,
    none of which comes twice.
    """

    kind: Kind = "ordered"
    tenants: int | None = None
    has_ids: bool = False


def records(tracking: int, orders: int, kind: Kind) -> Iterator[tuple[int, int, int]]:
    """(event time, session, index of its topic in `TOPICS`), in order of arrival; there is a
    session for every order."""
    rng = random.Random(1)
    overlaps = kind == "overlapping"
    step_ms = 1000 / SESSIONS_PER_S if overlaps else DAY_MS / orders
    pending: list[tuple[float, int, int, int]] = []

    def add(event_time: int, session: int, topic: int) -> None:
        arrival = event_time + (rng.random() * MAX_DELAY_MS if overlaps else 0)
        pending.append((arrival, event_time, session, topic))

    for session in range(orders):
        begin = START_MS + int(session * step_ms)
        if session % _SLICE == 0:
            # Later sessions begin no earlier, so nothing can come before this any more.
            pending.sort()
            done = bisect_left(pending, (begin,))
            yield from (record[1:] for record in pending[:done])
            del pending[:done]
        clicks = tracking // orders + (session < tracking % orders)
        for _ in range(clicks):
            add(begin + int(rng.random() * SESSION_MS), session, 0)
        add(begin + SESSION_MS, session, 1)
    pending.sort()
    yield from (record[1:] for record in pending)


def fill_topics(
    cluster: Cluster,
    settings: Settings,
    tracking: int,
    orders: int,
    partitions: int,
    shape: Shape,
) -> tuple[int, int]:
    """Makes and fills both topics; returns how many records they hold, heartbeats included, and the
    bytes of their values."""
    for topic in TOPICS:
        cluster.create_topic(topic, partitions, {"retention.ms": "-1"})
    producer = ListeningProducer(settings.kafka, linger_ms=50, queue_buffering_max_messages=500_000)
    count, size = 0, 0
    for topic, partition, event_time, value in _messages(tracking, orders, partitions, shape):
        while True:
            try:
                producer.produce(topic, value, partition=partition, timestamp=event_time)
                break
            except BufferError:
                producer.poll(0.1)
        count, size = count + 1, size + len(value)
    producer.flush()
    held = sum(
        end - first for topic in TOPICS for first, end in cluster.bounds(topic, partitions).values()
    )
    if held != count:
        raise RuntimeError(f"the topics hold {held} of {count} records")
    return count, size


def _messages(
    tracking: int, orders: int, partitions: int, shape: Shape
) -> Iterator[tuple[str, int, int, str]]:
    rng = random.Random(2)
    for event_time, session, of in records(tracking, orders, shape.kind):
        topic, more = TOPICS[of], ""
        if shape.tenants is not None:
            more += f',"org":"o{session // partitions % shape.tenants}"'
        if shape.has_ids:
            more += f',"id":"{UUID(int=rng.getrandbits(128), version=4)}"'
        value = record_value(session_key(session), event_time, topic, more)
        yield topic, session % partitions, event_time, value
    end = START_MS + 2 * DAY_MS
    for topic in TOPICS:
        for partition in range(partitions):
            yield topic, partition, end, heartbeat_value(end)

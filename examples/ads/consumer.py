"""Keep the newest version of every merge record in a SQLite database.

    python consumer.py BOOTSTRAP_SERVERS DATABASE SINK CORRECTIONS_TOPIC

It reads both topics to their ends and stops there; called again, it goes on. Both topics may be
read in any order, and a message may come again: what counts is the version alone.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message

TABLE = """
CREATE TABLE IF NOT EXISTS versions
    (id TEXT PRIMARY KEY, version INTEGER, topic TEXT, partition INTEGER, key BLOB, value BLOB)
"""
# A row whose value is null stays: it keeps an earlier version, which may still come, from counting.
KEEP_THE_NEWEST = """
INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    version = excluded.version, topic = excluded.topic, value = excluded.value
WHERE excluded.version > version
"""
# A tombstone of `watersmeet forget` is about what its own topic said before; each topic gets one.
FORGET = "DELETE FROM versions WHERE topic = ? AND partition = ? AND key = ?"
VALID = "SELECT value FROM versions WHERE value IS NOT NULL ORDER BY id"


def consume(servers: str, database: sqlite3.Connection, topics: Sequence[str]) -> None:
    """Read topics from where the last call ended to their ends, and note each batch of messages."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "newest-versions",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    partitions = {
        topic: len(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        for topic in topics
    }
    consumer.subscribe(list(topics))
    try:
        for messages in _batches(consumer, sum(partitions.values())):
            with database:  # one transaction, committed before Kafka is told
                for message in messages:
                    note(database, message)
            if messages:
                consumer.commit(asynchronous=False)
    finally:
        consumer.close()


def note(database: sqlite3.Connection, message: Message) -> None:
    """Keep a message if no newer version of its merge record is known."""
    headers: dict[str, Any] = dict(message.headers() or [])
    place = message.topic(), message.partition(), message.key()
    if "watersmeet.forgotten" in headers:
        database.execute(FORGET, place)
        return
    version = int(headers.get("watersmeet.version", b"0"))  # the sink's messages are version 0
    record_id = headers["watersmeet.id"].decode()
    database.execute(KEEP_THE_NEWEST, (record_id, version, *place, message.value()))


def _batches(consumer: Consumer, partitions: int) -> Iterator[list[Message]]:
    """Yield messages until the ends of all partitions were seen."""
    ended: set[tuple[str | None, int | None]] = set()
    while len(ended) < partitions:
        messages = []
        for message in consumer.consume(1000, timeout=1.0):
            error = message.error()
            if error is None:
                messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add((message.topic(), message.partition()))
            else:
                raise KafkaException(error)
        yield messages


if __name__ == "__main__":
    servers, path, *topics = sys.argv[1:]
    connection = sqlite3.connect(path)
    connection.execute(TABLE)
    consume(servers, connection, topics)
    for (value,) in connection.execute(VALID):
        print(value.decode())

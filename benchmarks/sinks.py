"""What a program has published, to be compared with what another one has."""

from __future__ import annotations

import time
from hashlib import blake2b

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from benchmarks.programs import ProgramError
from watersmeet.kafka.options import ListeningConsumer
from watersmeet.settings import KafkaSettings

_BATCH = 10_000
_PATIENCE_S = 60.0


def published(kafka: KafkaSettings, topic: str, partitions: int) -> list[bytes]:
    """Of each committed message of a topic a digest of its partition, timestamp, key and value."""
    consumer = ListeningConsumer(kafka)
    digests: list[bytes] = []
    ended: set[int] = set()
    until = time.monotonic() + _PATIENCE_S
    try:
        consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in range(partitions)])
        while len(ended) < partitions:
            messages = consumer.consume(_BATCH, 0.2)
            for message in messages:
                place = int(message.partition() or 0)
                if message.error() is not None:  # the end of a partition
                    ended.add(place)
                    continue
                ended.discard(place)
                digest = blake2b(f"{place} {message.timestamp()[1]} ".encode(), digest_size=16)
                digest.update(message.key() or b"")
                digest.update(message.value() or b"")
                digests.append(digest.digest())
            if messages:
                until = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > until:
                raise ProgramError(f"{topic} could not be read to its end")
    finally:
        consumer.close()
    return digests

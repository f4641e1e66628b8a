"""Sends the records of a file to Kafka, in the form in which `try` reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException

from watersmeet.dev import broker
from watersmeet.dry_run import SentRecord, records_of_file
from watersmeet.errors import BrokerError, ConfigurationError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.failures import failure
from watersmeet.kafka.options import ListeningProducer
from watersmeet.settings import KafkaSettings, Settings

_SENT_WITHIN_S: Final = 60.0


def send_file(settings: Settings, file: Path, directory: Path) -> dict[str, Any]:
    """Send the records of a file to a directory's broker, and create missing topics of sources.

    A record without a timestamp gets that of now. Nothing is sent unless every line can be: raises
    ConfigurationError, which names the line, BrokerError, and what Kafka answers.
    """
    for name, source in settings.sources.items():
        if source.registry is not None or source.repartition is not None:
            field = "registry" if source.registry is not None else "repartition"
            raise ConfigurationError(
                "what is in the source's topic depends on more than a file",
                where=f"sources.{name}.{field}",
                fix="send with a client of your own",
            )
    servers = broker.status(directory).bootstrap_servers
    if servers is None:
        raise BrokerError(
            f"the broker in {directory} does not run",
            fix=f"start it with `watersmeet broker start --dir {directory}`",
        )
    records = list(records_of_file(settings, file))
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": servers})
    created = _create_topics(Cluster(kafka), settings.topics, records)
    send_records(kafka, records)
    counts = Counter(record.topic for _, record in records)
    return {"bootstrap_servers": servers, "created": created, "sent": dict(counts)}


def send_view(facts: Mapping[str, Any]) -> str:
    """Return the answer of `send_file` for people: a line for each topic."""
    lines = [f"{topic}: created" for topic in facts["created"]]
    lines += [f"{topic}: {count:,} sent" for topic, count in facts["sent"].items()]
    return "\n".join([*lines, f"broker at {facts['bootstrap_servers']}"])


def _create_topics(
    cluster: Cluster, topics: Iterable[str], records: Iterable[tuple[str, SentRecord]]
) -> list[str]:
    # They have as many partitions as the others, or else as the records need.
    counts = cluster.partition_counts(topics)
    needed = max((record.partition + 1 for _, record in records), default=1)
    missing = [topic for topic in dict.fromkeys(topics) if topic not in counts]
    counts |= dict.fromkeys(missing, max(counts.values(), default=needed))
    for place, record in records:
        count = counts[record.topic]
        if record.partition >= count:
            raise ConfigurationError(
                f"`partition` is {record.partition}, and the topic {record.topic} has {count}",
                where=place,
                fix=f"write a number from 0 to {count - 1}",
            )
    for topic in missing:
        # The records may be old: retention by age would delete them.
        cluster.create_topic(topic, counts[topic], {"retention.ms": "-1"})
    return missing


def send_records(kafka: KafkaSettings, records: Iterable[tuple[str, SentRecord]]) -> None:
    """Send records, each with its place in what they come from. Raises what Kafka answers."""
    producer = ListeningProducer(kafka)
    refused: list[tuple[KafkaError, str]] = []

    def delivered(place: str, error: KafkaError | None, _: object) -> None:
        if error is not None:
            refused.append((error, place))

    for place, record in records:
        # 0 would be now.
        timestamp = 0 if record.timestamp_ms is None else max(1, record.timestamp_ms)
        while not refused:
            try:
                producer.produce(
                    record.topic,
                    record.value,
                    record.key,
                    record.partition,
                    timestamp=timestamp,
                    headers=record.headers,
                    on_delivery=partial(delivered, place),
                )
                break
            except BufferError:
                producer.poll(1)
            except KafkaException as error:
                refused.append((error.args[0], place))
        producer.poll(0)
    if producer.flush(_SENT_WITHIN_S):
        refused.append((KafkaError(KafkaError._TIMED_OUT), "some records"))
    for reason, place in refused:
        raise failure(kafka, reason, "WRITE", f"the record at {place}")

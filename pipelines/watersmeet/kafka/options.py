"""librdkafka's options for each kind of client, and the clients themselves.

`kafka.options` are passed on as they are. Options that carry a promise of Watersmeet (which records
are read, that each is published once and in order) are set here and refused in the configuration
(`configuration.values.OWN_OPTIONS`). Those that only tune a client are defaults, which
`kafka.options` replace. librdkafka's log is off, unless `debug` asks for it: failures come back as
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from watersmeet.errors import ConfigurationError, Problem
from watersmeet.kafka.failures import ErrorLog
from watersmeet.settings import KafkaSettings

# When a broker dies, librdkafka asks for the leaders at once, mostly before there are new ones.
# Then it asks at this interval, which is five minutes by its default.
_DEFAULTS = {"topic.metadata.refresh.interval.ms": 5_000}
LARGEST_UNPACKED = "receive.message.max.bytes"
"""The option that limits the bytes of records that were sent together, unpacked (zstd), and of one
answer of a broker.
"""

_READER_DEFAULTS = {
    **_DEFAULTS,
    # The largest value: with librdkafka's default, a few kB of zstd would end every reader.
    LARGEST_UNPACKED: 2**31 - 1,
    "queued.min.messages": 200_000,  # messages that are fetched ahead
    # Of packed records, which may have any number of bytes once they are in memory.
    "fetch.message.max.bytes": 8 * 1024,
    "fetch.queue.backoff.ms": 10,  # librdkafka's default waits a second once the queue is full
    "fetch.wait.max.ms": 20,  # how long a broker waits before it answers that a partition has ended
    "statistics.interval.ms": 1_000,  # see `ListeningConsumer.next_offset`
}
_READER = {
    # librdkafka asks for one; no group is joined and nothing is committed under it.
    "group.id": "watersmeet",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "isolation.level": "read_committed",
    "allow.auto.create.topics": False,
    "auto.offset.reset": "error",  # an offset that Kafka does not have is never passed over
}
_QUEUE_KBYTES = 64 * 1024
_WRITER_DEFAULTS = {
    **_DEFAULTS,
    "linger.ms": 20,
    "queue.buffering.max.kbytes": _QUEUE_KBYTES,
}
_WRITER = {"enable.idempotence": True, "delivery.report.only.error": False}

# With these, every `security.protocol` is accepted by itself.
_ANY_LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": "anybody", "sasl.password": "anything"}


def admin_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the options for questions about the cluster and its topics."""
    return {**_DEFAULTS, **kafka.options, **_own(kafka)}


def consumer_options(kafka: KafkaSettings, **own: Any) -> dict[str, Any]:
    """Return the options for reading committed messages outside of any group, with an event where a
    partition ends.

    `own`: as in `producer_options`.
    """
    return {**_READER_DEFAULTS, **kafka.options, **_own(kafka), **_READER, **_named(own)}


def producer_options(kafka: KafkaSettings, **own: Any) -> dict[str, Any]:
    """Return the options for an idempotent producer; `own`: more options, with underscores for
    dots.
    """
    return {**_WRITER_DEFAULTS, **kafka.options, **_own(kafka), **_WRITER, **_named(own)}


def queue_kbytes(kafka: KafkaSettings) -> int:
    """Return how many KiB of messages may wait in a producer."""
    return int(kafka.options.get("queue.buffering.max.kbytes", _QUEUE_KBYTES))


def _named(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with dots for underscores, but for callbacks: librdkafka's bindings name those
    with underscores themselves.
    """
    return {
        name if callable(value) else name.replace("_", "."): value for name, value in own.items()
    }


def _own(kafka: KafkaSettings) -> dict[str, Any]:
    own: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers}
    # Fatal errors would be written to standard error even at level 0: a queue that nobody reads
    # keeps them.
    return own if "debug" in kafka.options else {**own, "log_level": 0, "log.queue": True}


class _Listening:
    """A client that keeps what it hears about its connections.

    Raises ConfigurationError for options that it does not take.
    """

    _options: Callable[..., dict[str, Any]]

    def __init__(self, kafka: KafkaSettings, **own: Any) -> None:
        self.errors = ErrorLog(kafka)
        try:
            options = {**self._options(kafka, **own), "error_cb": self.errors}
            super().__init__(options)  # type: ignore[call-arg]
        except KafkaException as error:
            why = _without_values(error, kafka.options)
            raise ConfigurationError(
                f"librdkafka does not take them ({why})", where="kafka.options", fix="correct them"
            ) from None


class ListeningConsumer(_Listening, Consumer):
    """A consumer with `consumer_options`."""

    _options = staticmethod(consumer_options)

    def __init__(self, kafka: KafkaSettings, **own: Any) -> None:
        super().__init__(kafka, **own, stats_cb=self._note_offsets)
        self.topics: set[str] = set()
        """The topics whose leaders it has asked for."""
        self._next_offsets: dict[tuple[str, str], int] = {}

    def next_offset(self, topic: str, partition: int) -> int:
        """Return the offset that it fetches next, as of its last statistics; below 0 where it has
        fetched nothing.

        It goes on through aborted messages, which never come out of the client.
        """
        return self._next_offsets.get((topic, str(partition)), -1)

    def _note_offsets(self, statistics: str) -> None:
        """Note what librdkafka says of its partitions (its STATISTICS.md)."""
        self._next_offsets = {
            (topic, partition): facts["next_offset"]
            for topic, of_topic in orjson.loads(statistics)["topics"].items()
            for partition, facts in of_topic["partitions"].items()
        }


class ListeningProducer(_Listening, Producer):
    """A producer with `producer_options`."""

    _options = staticmethod(producer_options)


class ListeningAdmin(_Listening, AdminClient):
    """An admin client with `admin_options`."""

    _options = staticmethod(admin_options)


def check_options(kafka: KafkaSettings) -> list[Problem]:
    """Return a problem for every option that librdkafka does not know, or whose value it does
    not take; nothing is connected to.

    Where each option is right by itself and they do not fit together, there is one problem about
    all of them. No value is shown.
    """
    together = _refusal(kafka.options)
    if together is None:
        return []
    alone = {name: _refusal({**_ANY_LOGIN, name: value}) for name, value in kafka.options.items()}
    problems = [
        Problem(f"librdkafka does not take it ({why})", f"kafka.options.{name}", "correct it")
        for name, why in alone.items()
        if why
    ]
    together_text = f"librdkafka does not take them together ({together})"
    return problems or [Problem(together_text, "kafka.options", "correct them")]


def _refusal(options: Mapping[str, str]) -> str | None:
    """Return why a client of some kind cannot be made with these options; None where all can."""
    kafka = KafkaSettings(bootstrap_servers="unused:1", options=dict(options))
    kinds: dict[Callable[..., Any], dict[str, Any]] = {
        AdminClient: admin_options(kafka),
        Consumer: consumer_options(kafka),
        Producer: producer_options(kafka),
    }
    for kind, complete in kinds.items():
        del complete["bootstrap.servers"]  # so that no client connects
        try:
            kind(complete)
        except KafkaException as error:
            return _without_values(error, options)
    return None


def _without_values(refused: KafkaException, options: Mapping[str, str]) -> str:
    """Return why librdkafka refuses options, on one line, with nothing of what they were set to."""
    text: str = refused.args[0].str()
    for value in sorted(filter(None, options.values()), key=len, reverse=True):
        text = text.replace(f'"{value}"', "***")
        if len(value) > 3:  # a shorter one may be part of any word
            text = text.replace(value, "***")
    return " ".join(text.split())

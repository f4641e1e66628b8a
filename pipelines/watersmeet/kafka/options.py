"""librdkafka's options for each kind of client, and the clients themselves.

`kafka.options` replace what only tunes a client. Options that carry a promise of Watersmeet (which
records are read, that each is published once and in order) are set here and refused in the
configuration (`configuration.values.OWN_OPTIONS`). librdkafka's log is off, unless `debug` asks for
it: failures come back as errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from watersmeet.errors import ConfigurationError, Problem
from watersmeet.kafka.failures import ConnectionLog, ErrorLog
from watersmeet.settings import KafkaSettings

# When a broker dies, librdkafka asks for the leaders at once, mostly before there are new ones.
# Then it asks at this interval, which is five minutes by its default.
_DEFAULTS = {"topic.metadata.refresh.interval.ms": 5_000}
LARGEST_UNPACKED = "receive.message.max.bytes"
"""The option that limits the bytes of a record batch, unpacked (zstd), and of an answer."""

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
_WRITER_DEFAULTS = {**_DEFAULTS, "linger.ms": 20, "queue.buffering.max.kbytes": _QUEUE_KBYTES}
_WRITER = {
    "enable.idempotence": True,
    "delivery.report.only.error": False,
    "log.connection.close": True,  # see `ListeningProducer.trouble`
}
_INFORMATION = 6
"""librdkafka's level of the log from which on it says that a connection broke."""

# With these, every `security.protocol` is accepted by itself.
_ANY_LOGIN = {"sasl.mechanism": "PLAIN", "sasl.username": "anybody", "sasl.password": "anything"}


def admin_options(kafka: KafkaSettings) -> dict[str, Any]:
    """Return the options for questions about the cluster and its topics."""
    return {**_DEFAULTS, **kafka.options, **_own(kafka)}


def consumer_options(kafka: KafkaSettings, **own: Any) -> dict[str, Any]:
    """Return the options for reading committed messages outside of any group.

    A partition's end is an event. `own`: as in `producer_options`.
    """
    return {**_READER_DEFAULTS, **kafka.options, **_own(kafka), **_READER, **_named(own)}


def producer_options(kafka: KafkaSettings, **own: Any) -> dict[str, Any]:
    """Return the options of an idempotent producer; `own`: more, with underscores for dots."""
    ours = {**_own(kafka, _INFORMATION), **_WRITER, **_named(own)}
    return {**_WRITER_DEFAULTS, **kafka.options, **ours}


def queue_kbytes(kafka: KafkaSettings) -> int:
    """Return how many KiB of messages may wait in a producer."""
    return int(kafka.options.get("queue.buffering.max.kbytes", _QUEUE_KBYTES))


def _named(own: Mapping[str, Any]) -> dict[str, Any]:
    # Not of callbacks: librdkafka's bindings name those with underscores themselves.
    return {
        name if callable(value) else name.replace("_", "."): value for name, value in own.items()
    }


def _own(kafka: KafkaSettings, log_level: int = 0) -> dict[str, Any]:
    own: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap_servers}
    # Fatal errors would be written to standard error even at level 0: a queue that nobody reads
    # keeps them.
    return own if "debug" in kafka.options else {**own, "log_level": log_level, "log.queue": True}


class _Listening:
    """A client that keeps its connections' errors. Raises ConfigurationError for bad options."""

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
        """Return the offset that it fetches next, by its last statistics; below 0 where unknown.

        It goes on through aborted messages, which never come out of the client.
        """
        return self._next_offsets.get((topic, str(partition)), -1)

    def _note_offsets(self, statistics: str) -> None:
        self._next_offsets = {
            (topic, partition): facts["next_offset"]
            for topic, of_topic in orjson.loads(statistics)["topics"].items()
            for partition, facts in of_topic["partitions"].items()
        }


class ListeningProducer(_Listening, Producer):
    """A producer with `producer_options`."""

    _options = staticmethod(producer_options)

    def __init__(self, kafka: KafkaSettings, **own: Any) -> None:
        self._log = ConnectionLog(is_shown="debug" in kafka.options)
        super().__init__(kafka, **own, logger=self._log.logger)

    @property
    def trouble(self) -> str:
        """What librdkafka has said first of a connection that broke, or of a request that took too
        long, since the producer was made: requests may have been sent twice since. Else empty.
        """
        with suppress(KafkaException):  # a fatal error, which the next request raises
            self.poll(0)
        return self._log.trouble


class ListeningAdmin(_Listening, AdminClient):
    """An admin client with `admin_options`."""

    _options = staticmethod(admin_options)


def check_options(kafka: KafkaSettings) -> list[Problem]:
    """Return a problem for every option that librdkafka does not take, without its value.

    Nothing is connected to. Options that are right alone and do not fit together are one problem.
    """
    together = _refusal(kafka.options)
    if together is None:
        return []
    alone = {name: _refusal({**_ANY_LOGIN, name: value}) for name, value in kafka.options.items()}
    what = f"librdkafka does not take them together ({together})"
    return [
        Problem(f"librdkafka does not take it ({why})", f"kafka.options.{name}", "correct it")
        for name, why in alone.items()
        if why
    ] or [Problem(what, "kafka.options", "correct them")]


def _refusal(options: Mapping[str, str]) -> str | None:
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
    text: str = refused.args[0].str()
    for value in sorted(filter(None, options.values()), key=len, reverse=True):
        text = text.replace(f'"{value}"', "***")
        if len(value) > 3:  # a shorter one may be part of any word
            text = text.replace(value, "***")
    return " ".join(text.split())

"""The family of errors a user may meet. Each message is one clear sentence: what is wrong, where, what would be right."""

from __future__ import annotations

import re
from collections.abc import Mapping


class WatersmeetError(Exception):
    """A failure while running (exit status 1)."""

    exit_code = 1
    retriable = False
    """Whether the same thing may succeed a little later, so that a run waits and tries again."""


class ConfigurationError(WatersmeetError):
    """The configuration, a schema or a topic is not what it must be (exit status 2); nothing was started."""

    exit_code = 2


class KafkaUnreachableError(WatersmeetError):
    """No broker answered at the configured address within the time given."""

    retriable = True

    def __init__(self, bootstrap_servers: str, detail: str) -> None:
        super().__init__(f"no Kafka broker answers at {bootstrap_servers} ({detail}); start it, or mend kafka.bootstrap_servers")
        self.bootstrap_servers = bootstrap_servers


class KafkaAccessError(WatersmeetError):
    """Kafka refused the client: its password, a certificate or a missing permission. Waiting does not help."""


class KafkaRequestError(WatersmeetError):
    """Kafka answered a request with an error that waiting does not cure."""


class BrokerError(WatersmeetError):
    """The embedded broker could not be started or stopped."""


class LeaseTakenError(WatersmeetError):
    """Another process writes this layer of the lake, and is alive."""

    def __init__(self, layer: str, place: str, host: str, pid: int) -> None:
        super().__init__(
            f"{layer} of {place} is being written by process {pid} on {host}: "
            "a layer has one owner at a time; stop that one first"
        )
        self.layer, self.host, self.pid = layer, host, pid


class LeaseLostError(WatersmeetError):
    """This process was silent for so long that another one took its layers over; nothing that it did since was kept."""

    def __init__(self, place: str) -> None:
        super().__init__(
            f"another process has taken {place} over while this one was silent: it is fenced and writes nothing more; "
            "run one of the two"
        )


class DataLossError(WatersmeetError):
    """Kafka has deleted offsets that were not read yet. `missing`: by partition, `[from, until)`."""

    def __init__(self, source: str, topic: str, missing: Mapping[int, tuple[int, int]]) -> None:
        ranges = ", ".join(f"{topic}[{p}] from {since} to {until - 1}" for p, (since, until) in sorted(missing.items()))
        super().__init__(
            f"Kafka no longer has offsets of {source} that were not read yet: {ranges}; restore them, or accept the loss with "
            "kafka.on_data_loss: continue"
        )
        self.source, self.topic, self.missing = source, topic, dict(missing)


class TopicChangedError(WatersmeetError):
    """A topic has other partitions, or is another topic, than when the run began."""


class QuarantineLimitError(WatersmeetError):
    """So many records of a batch would be refused that something else than single records must be wrong."""

    def __init__(self, source: str, refused: int, records: int, reason: str, example: str) -> None:
        super().__init__(
            f"{source}: {refused} of {records} records would go to quarantine, most of them as {reason} (such as {example}): "
            "nothing of them was written; mend the configuration, or accept them with a higher kafka.quarantine_limit"
        )
        self.source, self.refused, self.records, self.reason = source, refused, records, reason


class FencedError(WatersmeetError):
    """Another publisher has taken the sink (or one partition of it) over; this one can write nothing more."""

    def __init__(self, topic: str, partition: int | None = None) -> None:
        place = topic if partition is None else f"{topic}[{partition}]"
        super().__init__(
            f"{place} is published to by another process now: this one is fenced and writes nothing more; run one of the two"
        )
        self.topic, self.partition = topic, partition


class ForeignMessageError(WatersmeetError):
    """The sink holds a message that Watersmeet did not write, so the sequence cannot go on from it."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(
            f"{topic}[{partition}] ends with a message at offset {offset} that has no watersmeet.seq header: "
            "the sink must be a topic that only Watersmeet writes to"
        )
        self.topic, self.partition, self.offset = topic, partition, offset


class PublishingError(WatersmeetError):
    """A publication failed before its commit; nothing of it is seen by readers of committed messages."""

    def __init__(self, topic: str, partition: int | None, reason: str, *, retriable: bool = True) -> None:
        super().__init__(f"publishing to {topic if partition is None else f'{topic}[{partition}]'} failed: {reason}")
        self.topic, self.partition, self.reason, self.retriable = topic, partition, reason, retriable


def root_cause(error: BaseException) -> str:
    """The sentence at the bottom of an error: of a Python function in a Spark worker, its own last line."""
    if isinstance(error, WatersmeetError):
        return str(error)
    _, sentence = _bottom(error)
    if sentence is not None:
        return sentence
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_retriable(error: BaseException) -> bool:
    """Whether the same thing may succeed a little later: a broker was away, or slow.

    An error of ours says so itself. One that a Python worker of Spark raised reaches the driver as the text of its traceback;
    the name of its class, which begins the traceback's last line, says what it was.
    """
    if isinstance(error, WatersmeetError):
        return error.retriable
    name, _ = _bottom(error)
    kind = globals().get(name or "")
    return isinstance(kind, type) and issubclass(kind, WatersmeetError) and kind.retriable


def is_known(error: BaseException) -> bool:
    """Whether an error is one of ours, or says that one of ours has caused it."""
    return isinstance(error, WatersmeetError) or _bottom(error)[0] in globals()


def _bottom(error: BaseException) -> tuple[str | None, str | None]:
    """The class name and sentence of an error of ours that a Python worker has raised: the last line of its traceback that
    begins with the class's full name, whatever Spark wrote around it.
    """
    found = re.findall(r"^\s*(?:[\w.]+Exception: )?pipelines\.errors\.(\w+): (.+)$", str(error), re.MULTILINE)
    return found[-1] if found else (None, None)

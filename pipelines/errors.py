"""The family of errors a user may meet. Each message is one clear sentence: what is wrong, where, what would be right."""


class WatersmeetError(Exception):
    """A failure while running (exit status 1)."""

    exit_code = 1


class ConfigurationError(WatersmeetError):
    """The configuration, a schema or a topic is not what it must be (exit status 2); nothing was started."""

    exit_code = 2


class KafkaUnreachableError(WatersmeetError):
    """No broker answered at the configured address within the time given."""

    def __init__(self, bootstrap_servers: str, detail: str) -> None:
        super().__init__(f"no Kafka broker answers at {bootstrap_servers} ({detail}); start it, or mend kafka.bootstrap_servers")
        self.bootstrap_servers = bootstrap_servers


class BrokerError(WatersmeetError):
    """The embedded broker could not be started or stopped."""


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

    def __init__(self, topic: str, partition: int, reason: str) -> None:
        super().__init__(f"publishing to {topic}[{partition}] failed: {reason}")
        self.topic, self.partition, self.reason = topic, partition, reason


def root_cause(error: BaseException) -> str:
    """The sentence at the bottom of an error: of a Python function on an executor, its own last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        name, _, sentence = line.partition(": ")
        if name.startswith("pipelines.errors."):
            return sentence
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

"""The errors that a user may meet.

Each says what is wrong, where, and how to fix it: as facts for programs, and together as one
sentence for people.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Problem(NamedTuple):
    """Something that is wrong: what, where (such as a field of the configuration, an option, a
    topic, a table; empty where `what` says it), and how to fix it (empty where nothing can be
    advised).
    """

    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
        """Return the problem as one sentence."""
        where = f"{self.where}: " if self.where else ""
        return f"{where}{self.what}{'; ' if self.fix else ''}{self.fix}"


class WatersmeetError(Exception):
    """A failure while running (exit status 1). Its text is the sentence of its `problem`."""

    exit_code = 1
    retriable = False
    """True where the same work may succeed a little later, so that a run waits and tries again."""
    party = "kafka"
    """Who is in trouble where that may pass, as lines of the log name it."""
    passed = "answers again"
    """What such a line says once the trouble has passed."""

    def __init__(self, what: str, where: str | Path = "", fix: str = "") -> None:
        self.problem = Problem(what, str(where), fix)
        super().__init__(str(self.problem))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error as its message and its facts, whatever arguments its class takes.

        So it arrives unchanged in another process.
        """
        return _restored, (type(self), self.args, vars(self))


def _restored(
    kind: type[WatersmeetError], sentence: tuple[Any, ...], facts: Mapping[str, Any]
) -> WatersmeetError:
    error = kind.__new__(kind, *sentence)
    error.__dict__.update(facts)
    return error


class ConfigurationError(WatersmeetError):
    """The configuration, a schema or a topic is not what it must be (exit status 2); nothing was
    started."""

    exit_code = 2
    more: Sequence[ConfigurationError] = ()
    """What else is wrong, in the order in which it was found."""


def raise_first(errors: Iterable[ConfigurationError]) -> None:
    """Raise the first of these errors, with the others as its `more`, if there are any."""
    found = list(errors)
    if found:
        found[0].more = found[1:]
        raise found[0]


class KafkaTransientError(WatersmeetError):
    """Kafka did not do what was asked, but may do it a little later."""

    retriable = True


class KafkaUnreachableError(KafkaTransientError):
    """No broker answered at the configured address within the time given."""

    def __init__(self, bootstrap_servers: str, detail: str, fix: str | None = None) -> None:
        usual = (
            "start it, or correct kafka.bootstrap_servers, or security.protocol and the ssl. "
            "options in kafka.options"
        )
        super().__init__(
            f"no Kafka broker answers at {bootstrap_servers} ({detail})", fix=fix or usual
        )
        self.bootstrap_servers = bootstrap_servers


class KafkaUnsettledError(KafkaTransientError):
    """A broker cannot serve a request just now: leaders or coordinators move while one is away."""

    def __init__(self, bootstrap_servers: str, resource: str, detail: str) -> None:
        super().__init__(
            f"Kafka at {bootstrap_servers} cannot serve {resource} just now ({detail})",
            fix="if this goes on, look whether one of its brokers is down",
        )
        self.bootstrap_servers = bootstrap_servers
        self.resource = resource


class KafkaAccessError(WatersmeetError):
    """Kafka refused the client: its password, a certificate or a missing permission. Waiting does
    not help."""


class KafkaRequestError(WatersmeetError):
    """Kafka answered a request with an error that waiting does not cure."""


class OpenTransactionError(KafkaRequestError):
    """Another producer's transaction is open in a partition; nothing behind it can be read."""

    retriable = True

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(
            f"{topic}[{partition}] has an open transaction of another producer at offset "
            f"{offset}, behind which nothing can be read",
            fix="try again when it has ended",
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset


def address_of(url: str) -> str:
    """Return the scheme, host and port of a URL; the rest of it may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class RegistryError(WatersmeetError):
    """A schema registry is in trouble, or lacks what records need.

    Messages name only the scheme, host and port of its URL, which may hold a token.
    """

    party = "registry"


class RegistryUnreachableError(RegistryError):
    """The schema registry does not answer, or answers that it cannot serve the request."""

    retriable = True

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(
            f"the schema registry does not answer at {address_of(url)} ({detail})",
            fix="start it, or correct the source's registry",
        )
        self.address = address_of(url)


class UnknownWriterSchemaError(RegistryError):
    """A record names a schema that the registry does not have.

    It may still arrive, since registries are copied from others.
    """

    retriable = True
    passed = "goes on"
    ID = re.compile(r"a record was written with schema (\d+),")
    """Pattern of the beginning of its message; a worker of Spark passes on the message alone."""

    def __init__(self, url: str, schema_id: int) -> None:
        super().__init__(
            f"a record was written with schema {schema_id}, which the schema registry at "
            f"{address_of(url)} does not have",
            fix="register it there under this id, or jump over the record with `watersmeet reset`",
        )
        self.address = address_of(url)
        self.schema_id = schema_id


class RegistryAccessError(RegistryError):
    """The schema registry refused the client: a wrong password or certificate, or no permission.

    Waiting does not help.
    """

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(
            f"the schema registry at {address_of(url)} refuses ({detail})",
            fix="correct the options of the source's registry",
        )
        self.address = address_of(url)


class StoreError(WatersmeetError):
    """The object store of the lake is in trouble."""

    party = "store"


class StoreUnreachableError(StoreError):
    """The object store does not answer, or answers that it cannot serve the request."""

    retriable = True

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the object store of {address} does not answer",
            fix="start it, or correct its endpoint in `storage`",
        )
        self.address = address


class StoreAccessError(StoreError):
    """The object store refused the client: its credentials, or a missing permission. Waiting does
    not help."""

    def __init__(self, address: str, doing: str) -> None:
        super().__init__(
            f"the object store refuses {doing} at {address}: the credentials are wrong, or "
            "lack the permission",
            fix="correct them in `storage` or the environment",
        )
        self.address = address
        self.doing = doing


class MissingPackageError(ConfigurationError):
    """A package that belongs to an extra of Watersmeet is not installed."""

    def __init__(self, package: str, extra: str, otherwise: str = "") -> None:
        super().__init__(
            f'the package {package} is not installed: `pip install "watersmeet[{extra}]"` brings '
            f"it{otherwise}"
        )
        self.package = package
        self.extra = extra


class ArtifactsError(WatersmeetError):
    """The pinned artifacts for a JVM could not be fetched, or are not the recorded ones."""


class BrokerError(WatersmeetError):
    """The embedded broker could not be started or stopped."""


class LeaseTakenError(WatersmeetError):
    """Another live process writes this layer of the lake.

    `change`: the command of that process, if it is one that changes the lake.
    """

    def __init__(
        self, layer: str, place: str, host: str, pid: int, change: str | None = None
    ) -> None:
        stop = "a layer has one owner at a time; stop that one first"
        wait = (
            f"`watersmeet {change}` has it for a moment; try again when that one has ended, or "
            "call it again if it was cut short"
        )
        super().__init__(
            f"{layer} of {place} is being written by process {pid} on {host}: "
            f"{wait if change else stop}"
        )
        self.layer = layer
        self.host = host
        self.pid = pid
        self.change = change


class LeaseLostError(WatersmeetError):
    """Another process took over this one's layers; nothing that this one did since was kept.

    This one was silent for too long, or made way for a command (`change`).
    """

    def __init__(self, place: str, change: str | None = None) -> None:
        by = "another process while this one was silent"
        what = "run only one of the two"
        if change is not None:
            by = f"`watersmeet {change}`"
            what = "start it again"
        super().__init__(
            f"{place} has been taken over by {by}: this one is fenced and writes nothing more",
            fix=what,
        )
        self.change = change


class CommitRepeatedError(WatersmeetError):
    """A commit that was tried again had already been made by the first try, with other content.

    The table says what was committed, so its owner reads that and goes on.
    """

    retriable = True
    party = "lake"
    passed = "goes on"

    def __init__(self, table: str, place: str) -> None:
        super().__init__(
            f"a commit to {table} of {place} was made by an earlier try, whose answer did not come",
            fix="if this goes on, look at what the store answers",
        )
        self.table = table


class TableError(WatersmeetError):
    """A library could not read or write a table, for a reason that it says in its own words."""

    def __init__(self, table: str, what: str) -> None:
        super().__init__(f"{table}: {what}")
        self.table = table


class TableConflictError(WatersmeetError):
    """Another writer's commit to the table came first; nothing was written."""

    retriable = True
    party = "lake"
    passed = "goes on"

    def __init__(self, table: str, other: str) -> None:
        super().__init__(
            f"{table}: the commit of another job came first ({other})",
            fix="try again; runs compact and vacuum the tables themselves, so let no other job do "
            "so while one goes on",
        )
        self.table = table


class MissingFileError(WatersmeetError):
    """A file of the table is gone: of its last version (`is_needed`), or of the one before that was
    being read.
    """

    retriable = True
    party = "lake"
    passed = "goes on"

    def __init__(self, table: str, file: str, *, is_needed: bool = False) -> None:
        remedy = "put it back from a copy of the lake" if is_needed else "try again"
        super().__init__(
            f"{table}: its file {file} was deleted by somebody else",
            fix=f"{remedy}; let no VACUUM delete what is younger than the lake's `retention`",
        )
        self.retriable = not is_needed
        self.table = table
        self.file = file


class LakeNotSharedError(WatersmeetError):
    """An executor of Spark and the driver do not see the same files of a lake."""

    retriable = True
    party = "lake"
    passed = "goes on"

    def __init__(self, table: str, what: str) -> None:
        super().__init__(
            f"{table}: {what}; nothing was written",
            fix="let every executor mount the lake as the driver does, and see new files at once "
            "(on NFS: lookupcache=positive)",
        )
        self.table = table


class ConstraintError(WatersmeetError):
    """The table refuses rows because of CHECK constraints that somebody has added to it."""

    def __init__(self, table: str, constraints: str) -> None:
        super().__init__(
            f"{table}: rows do not meet a CHECK constraint that somebody has added ({constraints})",
            fix="drop it (ALTER TABLE ... DROP CONSTRAINT): the tables take whatever comes",
        )
        self.table = table


class UnreadableRecordsError(WatersmeetError):
    """Records that were sent together cannot be read, and cannot be told apart.

    They are damaged, or larger, unpacked, than the client accepts.
    """

    def __init__(self, topic: str, partition: int, offset: int, end: int) -> None:
        super().__init__(
            f"{topic}[{partition}] cannot be read at offset {offset}: unpacked, what was "
            f"sent together there (offsets {offset} to {end - 1}) has more bytes than "
            "receive.message.max.bytes, or it is damaged",
            fix=(
                "set that to 2147483647 in kafka.options, or give these records up: delete what "
                f"is before offset {end} from Kafka, and set kafka.on_data_loss: continue"
            ),
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.end = end


class WorkerEndedError(WatersmeetError):
    """A worker process was killed, as the kernel does where memory is short; the next attempt gets
    new workers.
    """

    retriable = True
    party = "worker"
    passed = "goes on"

    def __init__(self, work: str) -> None:
        super().__init__(
            f"a worker process was killed while it {work}",
            fix="if this goes on, look whether the kernel's log says that memory was short",
        )


class DataLossError(WatersmeetError):
    """Kafka has deleted offsets that were not read yet.

    `missing`: their ranges `[from, until)`, by partition.
    """

    def __init__(self, source: str, topic: str, missing: Mapping[int, tuple[int, int]]) -> None:
        ranges = ", ".join(
            f"{topic}[{p}] from {since} to {until - 1}"
            for p, (since, until) in sorted(missing.items())
        )
        super().__init__(
            f"Kafka no longer has offsets of {source} that were not read yet: {ranges}",
            fix="restore them, or accept the loss with kafka.on_data_loss: continue",
        )
        self.source = source
        self.topic = topic
        self.missing = dict(missing)


class MissingRecordsError(WatersmeetError):
    """A batch of silver read fewer records of bronze than its plan had counted."""

    def __init__(
        self, name: str, table: str, partition: int, offsets: str, count: int, expected: int
    ) -> None:
        super().__init__(
            f"bronze of {name} has lost records: {count} of {expected} were read of partition "
            f"{partition}, offsets {offsets}, and nothing was merged",
            fix=f"bring the files of {table} back, or look for what deletes them",
        )
        self.name = name
        self.partition = partition
        self.count = count
        self.expected = expected


class TopicChangedError(WatersmeetError):
    """A topic has another number of partitions, or was replaced, since the run began."""


class QuarantineLimitError(WatersmeetError):
    """Too many records of a batch would be refused for only single records to be wrong."""

    def __init__(self, source: str, refused: int, records: int, reason: str, example: str) -> None:
        super().__init__(
            f"{refused} of {records} records would go to quarantine, most of them as "
            f"{reason} (such as {example}): none of them was written",
            where=source,
            fix="correct the configuration, or accept them with a higher kafka.quarantine_limit",
        )
        self.source = source
        self.refused = refused
        self.records = records
        self.reason = reason


class FencedError(WatersmeetError):
    """Another publisher has taken over the sink; this one can no longer write."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"{topic} has been taken over by another process: this one is fenced and writes "
            "nothing more",
            fix="run only one of the two",
        )
        self.topic = topic


class ForeignMessageError(WatersmeetError):
    """The last message of a topic is not from Watersmeet, so it does not say where to go on."""

    def __init__(
        self, topic: str, partition: int, offset: int, header: str = "watersmeet.seq"
    ) -> None:
        super().__init__(
            f"{topic}[{partition}] ends with a message at offset {offset} that has no "
            f"{header} header of this lake: only Watersmeet may write to this topic, for one "
            "lake",
            fix="name another one",
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset


class PublishingError(WatersmeetError):
    """A publication failed before its commit; readers of committed messages see nothing of it."""

    def __init__(
        self, topic: str, reason: str, *, retriable: bool = True, is_too_large: bool = False
    ) -> None:
        super().__init__(f"publishing to {topic} failed: {reason}")
        self.topic = topic
        self.reason = reason
        self.retriable = retriable
        self.is_too_large = is_too_large
        """True where the topic refused a message because of its size."""


class TransactionTimeoutError(WatersmeetError):
    """A transaction took so long that it was given up, or that Kafka ended it.

    A smaller one may finish in time.
    """

    retriable = True

    def __init__(self, topic: str, seconds: int) -> None:
        super().__init__(
            f"publishing to {topic} failed: its transaction was not done after {seconds} s",
            fix="a smaller one is tried next",
        )
        self.topic = topic
        self.seconds = seconds


class SinkReplacedError(WatersmeetError):
    """The topic was deleted, and perhaps created again, during a publication."""

    retriable = True

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"publishing to {topic} failed: it was deleted, or deleted and made again, meanwhile",
            fix="it begins anew",
        )
        self.topic = topic


def lines_of(error: BaseException) -> list[str]:
    """Return the non-blank lines of an error's text, without surrounding white space."""
    return [line for line in map(str.strip, str(error).splitlines()) if line]


def root_cause(error: BaseException) -> str:
    """Return the message of the error that caused this one, on one line.

    For an error of Spark, that is what a Python worker raised, or else the last of the causes that
    the JVM names.
    """
    if own := _own(error):
        return own[1]
    if _is_gone(error):
        return (
            "Spark's JVM has ended: its log above says why, such as too little memory "
            "(spark.driver.memory)"
        )
    _, is_traced, trace = str(error).rpartition(_TRACEBACK)
    raised = re.findall(r"^(\w[\w.]*: .+)$", trace, re.MULTILINE) if is_traced else []
    # Py4J's own first line names a method of the JVM alone; what that has thrown comes after it.
    caused = re.findall(_CAUSE, str(error), re.MULTILINE)
    if raised or caused:
        return str((raised[:1] or caused[-1:])[0]).strip()
    lines = lines_of(error)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = r"^(?:\s*Caused by)?: (?:[\w$]+\.)*([\w$]+: .+)$"


def _is_gone(error: BaseException) -> bool:
    """Return True if Spark's JVM has ended: inside py4j, the connection was refused or closed."""
    if not isinstance(error, ConnectionError) and type(error).__name__ != "Py4JNetworkError":
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parent.name == "py4j" for frame in frames)


def is_retriable(error: BaseException) -> bool:
    """Return True if the same work may succeed a little later: a broker was away, or slow."""
    if isinstance(error, WatersmeetError):
        return error.retriable
    own = _own(error)
    return own is not None and own[0].retriable


def class_of(error: BaseException) -> type[WatersmeetError]:
    """Return the class of an error of Watersmeet, or of the one that caused this error.

    `WatersmeetError` for any other error.
    """
    own = _own(error)
    return WatersmeetError if own is None else own[0]


def unknown_schema_of(error: BaseException) -> int | None:
    """Return the id of the schema that a registry does not have, if that was the trouble.

    None for any other error.
    """
    own = _own(error)
    if own is None or own[0] is not UnknownWriterSchemaError:
        return None
    match = UnknownWriterSchemaError.ID.match(own[1])
    return int(match[1]) if match else None


def is_data_loss(error: BaseException) -> bool:
    """Return True if Kafka has deleted offsets that were not read yet."""
    own = _own(error)
    return own is not None and issubclass(own[0], DataLossError)


def is_known(error: BaseException) -> bool:
    """Return True if an error is one of Watersmeet's, or says that one of them caused it.

    False for a `TableError` in the words of a library: it may be the store that is in trouble.
    """
    own = _own(error)
    return own is not None and own[0] is not TableError


OTHER = "Other"
"""The kind of every error that is not one of Watersmeet's."""


def kind_of(error: BaseException) -> str:
    """Return the class name of an error of Watersmeet, or of the one that caused this error.

    `OTHER` for any other error.
    """
    own = _own(error)
    return OTHER if own is None else own[0].__name__


def kinds() -> list[str]:
    """Return every value that `kind_of` may return."""
    return [*sorted(kind.__name__ for kind in _kinds()), OTHER]


def _kinds() -> list[type[WatersmeetError]]:
    return [
        kind
        for kind in globals().values()
        if isinstance(kind, type) and issubclass(kind, WatersmeetError)
    ]


EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("pyspark", "delta", "pandas"), "spark"),
    **dict.fromkeys(("grpc", "grpc_status", "google", "zstandard"), "connect"),
    "great_expectations": "quality",
    "vl_convert": "report",
    "prometheus_client": "metrics",
    **dict.fromkeys(("cachetools", "httpx2", "authlib", "attr", "attrs", "certifi"), "registry"),
    "openlineage": "lineage",
    **dict.fromkeys(("jgo", "cryptography"), "broker"),
}
"""The extra of Watersmeet that installs a package, by the package's import name."""


def missing_package(error: BaseException, otherwise: str = "") -> MissingPackageError | None:
    """Return the error that says which extra installs a package that could not be imported.

    None if no extra does. `otherwise`: another remedy, beginning with a comma, for the end of the
    message.
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    return MissingPackageError(package, EXTRAS[package], otherwise) if package in EXTRAS else None


def _own(error: BaseException) -> tuple[type[WatersmeetError], str] | None:
    """Return the class and the message of an error of Watersmeet, or None if there is none.

    That is the error itself, the one that caused an error of Spark, or the one for a missing
    package. What a Python worker raises reaches the driver as the text of its traceback. The last
    line that begins with the full name of one of these classes says which error it was, whatever
    Spark wrote around it.
    """
    cause = missing_package(error) or error
    if isinstance(cause, WatersmeetError):
        return type(cause), str(cause)
    lines = re.findall(
        r"^\s*(?:[\w.]+Exception: )?watersmeet\.errors\.(\w+): (.+)$", str(error), re.MULTILINE
    )
    if not lines:
        return None
    name, message = lines[-1]
    kind = next((kind for kind in _kinds() if kind.__name__ == name), None)
    return None if kind is None else (kind, message)

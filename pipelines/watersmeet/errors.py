"""The classes of errors that a user may meet, and what caused an error of a library.

An error says what is wrong, where, and how to fix it: as facts for programs, and together as one
sentence for people. The sentence is written where the error is raised.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Problem(NamedTuple):
    """What is wrong, where (nothing if `what` says it), and how to fix it, if known."""

    what: str
    where: str = ""
    fix: str = ""

    def __str__(self) -> str:
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
        """Pickle the error as its message and its facts, whatever arguments its class takes."""
        return _restored, (type(self), self.args, vars(self))


def _restored(
    kind: type[WatersmeetError], sentence: tuple[Any, ...], facts: Mapping[str, Any]
) -> WatersmeetError:
    error = kind.__new__(kind, *sentence)
    error.__dict__.update(facts)
    return error


class ConfigurationError(WatersmeetError):
    """Configuration, schema or topic is not what it must be (status 2); nothing was started."""

    exit_code = 2
    more: Sequence[ConfigurationError] = ()
    """What else is wrong, in the order in which it was found."""


def raise_first(errors: Iterable[ConfigurationError]) -> None:
    """Raise the first of these errors, with the others as its `more`, if there are any."""
    faults = list(errors)
    if faults:
        faults[0].more = faults[1:]
        raise faults[0]


class KafkaTransientError(WatersmeetError):
    """Kafka did not do what was asked, but may do it a little later."""

    retriable = True


class KafkaUnreachableError(KafkaTransientError):
    """No broker answered at the configured address within the time given."""


class KafkaUnsettledError(KafkaTransientError):
    """A broker cannot serve a request just now: leaders or coordinators move while one is away."""


class KafkaAccessError(WatersmeetError):
    """Kafka refused the client, its password, certificate or permissions. Waiting is no help."""


class KafkaRequestError(WatersmeetError):
    """Kafka answered a request with an error that waiting does not cure."""


class OpenTransactionError(KafkaRequestError):
    """Another producer's transaction is open in a partition; nothing behind it can be read."""

    retriable = True


def address_of(url: str) -> str:
    """Return the scheme, host and port of a URL; the rest of it may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class RegistryError(WatersmeetError):
    """A schema registry is in trouble, or lacks what records need; its URL may hold a token."""

    party = "registry"


class RegistryUnreachableError(RegistryError):
    """The schema registry does not answer, or answers that it cannot serve the request."""

    retriable = True

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(
            f"the schema registry does not answer at {address_of(url)} ({detail})",
            fix="start it, or correct the source's registry",
        )


class UnknownWriterSchemaError(RegistryError):
    """A record names a schema that the registry does not have, or not yet."""

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


class OtherWriterSchemaError(RegistryError):
    """The registry has another schema under an id than the lake has met there."""

    def __init__(self, url: str, schema_id: int) -> None:
        super().__init__(
            f"the schema registry at {address_of(url)} has another schema {schema_id} than records "
            "of the lake were written with",
            fix="name the registry that has those in the source's registry, or restore it",
        )


class RegistryAccessError(RegistryError):
    """The registry refused the client, or it lacks a permission. Waiting does not help."""

    def __init__(self, url: str, detail: str) -> None:
        super().__init__(
            f"the schema registry at {address_of(url)} refuses ({detail})",
            fix="correct the options of the source's registry",
        )


class StoreError(WatersmeetError):
    """The object store of the lake is in trouble."""

    party = "store"


class StoreUnreachableError(StoreError):
    """The object store does not answer, or answers that it cannot serve the request."""

    retriable = True


class StoreBehindError(StoreError):
    """The object store has a commit, and its lists do not have it yet."""

    retriable = True


class StoreAccessError(StoreError):
    """The object store refused the client, or it lacks a permission. Waiting does not help."""


class MissingPackageError(ConfigurationError):
    """A package that belongs to an extra of Watersmeet is not installed."""


class ArtifactsError(WatersmeetError):
    """The pinned artifacts for a JVM could not be fetched, or are not the recorded ones."""


class BrokerError(WatersmeetError):
    """The embedded broker could not be started or stopped."""


class LeaseTakenError(WatersmeetError):
    """Another live process, perhaps a command (`change`), writes this layer of the lake."""

    def __init__(
        self, layer: str, place: str, host: str, pid: int, change: str | None = None
    ) -> None:
        wait = (
            f"`watersmeet {change}` has it for a moment; try again when that one has ended, or "
            "call it again if it was cut short"
        )
        super().__init__(
            f"{layer} of {place} is being written by process {pid} on {host}: "
            f"{wait if change else 'a layer has one owner at a time; stop that one first'}"
        )
        self.change = change


class LeaseLostError(WatersmeetError):
    """Another process, perhaps a command (`change`), took over; nothing done since was kept."""

    def __init__(self, place: str, change: str | None = None) -> None:
        by = f"`watersmeet {change}`" if change else "another process while this one was silent"
        super().__init__(
            f"{place} has been taken over by {by}: this one is fenced and writes nothing more",
            fix="start it again" if change else "run only one of the two",
        )
        self.change = change


class LakeTransientError(WatersmeetError):
    """A table changed, or lacked something, while it was worked on; the next try reads it anew."""

    retriable = True
    party = "lake"
    passed = "goes on"


class CommitRepeatedError(LakeTransientError):
    """The first try of a commit had been made, with other content, which its owner reads."""


class TableError(WatersmeetError):
    """A library could not read or write a table, for a reason that it says in its own words."""


class TableConflictError(LakeTransientError):
    """Another writer's commit to the table came first; nothing was written."""


class MissingFileError(LakeTransientError):
    """A file of the table is gone. It is waited for unless the table's last version needs it."""


class LakeNotSharedError(LakeTransientError):
    """An executor of Spark and the driver do not see the same files of a lake."""

    def __init__(self, table: str, what: str) -> None:
        super().__init__(
            f"{what}; nothing was written",
            where=table,
            fix="let every executor mount the lake as the driver does, and see new files at once "
            "(on NFS: lookupcache=positive)",
        )


class ConstraintError(WatersmeetError):
    """The table refuses rows because of CHECK constraints that somebody has added to it."""


class UnreadableRecordsError(WatersmeetError):
    """Records that were sent together are damaged, or too large to be unpacked."""


class WorkerEndedError(WatersmeetError):
    """A worker process was killed, as where memory is short; the next attempt gets new ones."""

    retriable = True
    party = "worker"
    passed = "goes on"

    def __init__(self, work: str) -> None:
        super().__init__(
            f"a worker process was killed while it {work}",
            fix="if this goes on, look whether the kernel's log says that memory was short",
        )


class NewLeaderError(KafkaTransientError):
    """A partition has another leader, which may lack what the one before it had."""

    def __init__(self, topic: str, partition: int, offset: int) -> None:
        super().__init__(
            f"{topic}[{partition}] has another leader at offset {offset}, which may not have the "
            "records that were read before",
            fix="what was read is compared, and the rest read again",
        )


def _listed(topic: str, offsets: Mapping[int, tuple[int, int]]) -> str:
    return ", ".join(
        f"{topic}[{p}] from {since} to {until - 1}" for p, (since, until) in sorted(offsets.items())
    )


class DataLossError(WatersmeetError):
    """Kafka has deleted offsets that were not read: `missing`, `[from, until)` by partition."""

    def __init__(self, source: str, topic: str, missing: Mapping[int, tuple[int, int]]) -> None:
        super().__init__(
            f"Kafka no longer has offsets of {source} that were not read yet: "
            f"{_listed(topic, missing)}",
            fix="restore them, or accept the loss with kafka.on_data_loss: continue",
        )
        self.missing = dict(missing)


class RecordsReplacedError(WatersmeetError):
    """Kafka has other records than were read at offsets `[from, until)` by partition."""

    def __init__(self, source: str, topic: str, replaced: Mapping[int, tuple[int, int]]) -> None:
        super().__init__(
            f"Kafka has other records of {source} than were read at its offsets: "
            f"{_listed(topic, replaced)}",
            fix="restore those that were read; or go on behind them with kafka.on_data_loss: "
            "continue, and send the others again",
        )


class MissingRecordsError(WatersmeetError):
    """A batch of silver read fewer records of bronze than its plan had counted."""


class TopicChangedError(WatersmeetError):
    """A topic has another number of partitions, or was replaced, since the run began."""


class QuarantineLimitError(WatersmeetError):
    """Too many records of a batch would be refused for only single records to be wrong."""


class FencedError(WatersmeetError):
    """Another publisher has taken over the sink; this one can no longer write."""


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


class LakeBehindError(WatersmeetError):
    """A topic ends with a message of this lake of a time or an offset to which the lake has not
    come."""

    def __init__(self, place: str, said: str, clock: str) -> None:
        super().__init__(
            f"{place} ends with a message of this lake of {said}, and its tables end at {clock}: "
            "the lake was set back to an earlier copy, or another copy of it has gone on",
            fix="put the later one back, or begin a new lake elsewhere (with `kafka.start: sink` "
            "it takes up the sink)",
        )


class PublishingError(WatersmeetError):
    """A publication failed before its commit, perhaps as a message `is_too_large` for the topic."""

    def __init__(
        self, topic: str, reason: str, *, retriable: bool = True, is_too_large: bool = False
    ) -> None:
        super().__init__(f"publishing to {topic} failed: {reason}")
        self.retriable = retriable
        self.is_too_large = is_too_large


class TransactionTimeoutError(WatersmeetError):
    """A transaction took too long and was ended; a smaller one may finish in time."""

    retriable = True

    def __init__(self, topic: str, seconds: int) -> None:
        super().__init__(
            f"publishing to {topic} failed: its transaction was not done after {seconds} s",
            fix="a smaller one is tried next",
        )


class SinkReplacedError(WatersmeetError):
    """The topic was deleted, created again, or has lost its end, during a publication."""

    retriable = True

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"publishing to {topic} failed: it was deleted, made again, or has lost its end, "
            "meanwhile",
            fix="it goes on behind what is there",
        )


class NoRoomError(WatersmeetError):
    """The disk is full or read-only, a quota is used up, or the process may open no more files."""


def no_room(error: BaseException) -> NoRoomError | None:
    """Return an error that says so where this one, or what it was caused by, says it in the words
    of the operating system; None for any other.
    """
    own = error.problem._replace(fix="") if isinstance(error, WatersmeetError) else None
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)):
            return NoRoomError(
                f"the disk has no room left ({own or root_cause(error)})",
                fix="make some: the next start goes on where this one has ended",
            )
        if os.strerror(errno.EMFILE) in text:
            return NoRoomError(
                f"this process may open no more files ({own or root_cause(error)})",
                fix="allow more (`ulimit -n`): the next start goes on where this one has ended",
            )
        is_start = isinstance(error, ConfigurationError)  # which has its own way out
        if os.strerror(errno.EROFS) in text and not is_start:
            return NoRoomError(
                f"the file system is read-only ({own or root_cause(error)})",
                fix="look at the disk, which a system makes so where it fails, and make it "
                "writable: the next start goes on where this one has ended",
            )
        cause = cause.__cause__ or cause.__context__
    return None


def lines_of(error: BaseException) -> list[str]:
    """Return the non-blank lines of an error's text, stripped, and without colours."""
    uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return [line for line in map(str.strip, uncoloured.splitlines()) if line]


def root_cause(error: BaseException) -> str:
    """Return the message of the error that caused this one, on one line.

    For an error of Spark, that is what a Python worker raised, or else the JVM's last cause.
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
    # Libraries in Rust say the cause of a cause in a line of its own.
    causes = [line.removeprefix("↳").strip() for line in lines[1:] if line.startswith("↳")]
    return ": ".join([type(error).__name__, *lines[:1], *causes])


_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = r"^(?:\s*Caused by)?: (?:[\w$]+\.)*([\w$]+: .+)$"


def _is_gone(error: BaseException) -> bool:
    if not isinstance(error, ConnectionError) and type(error).__name__ != "Py4JNetworkError":
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).parent.name == "py4j" for frame in frames)


def is_retriable(error: BaseException) -> bool:
    """Return True if the same work may succeed a little later: a broker was away, or slow."""
    return error.retriable if isinstance(error, WatersmeetError) else class_of(error).retriable


def class_of(error: BaseException) -> type[WatersmeetError]:
    """Return the class of the error of Watersmeet that this is or was caused by, else the base."""
    own = _own(error)
    return WatersmeetError if own is None else own[0]


def unknown_schema_of(error: BaseException) -> int | None:
    """Return the id of the schema that a registry does not have; None for any other trouble."""
    own = _own(error)
    if own is None or own[0] is not UnknownWriterSchemaError:
        return None
    match = UnknownWriterSchemaError.ID.match(own[1])
    return int(match[1]) if match else None


def is_known(error: BaseException) -> bool:
    """Return True if an error is one of Watersmeet's, or was caused by one.

    False for a `TableError` in the words of a library: it may be the store that is in trouble.
    """
    own = _own(error)
    return own is not None and own[0] is not TableError


OTHER = "Other"
"""The kind of every error that is not one of Watersmeet's."""


def kind_of(error: BaseException) -> str:
    """Return the class name of the error of Watersmeet that this is or was caused by."""
    own = _own(error)
    return OTHER if own is None else own[0].__name__


def kinds() -> list[str]:
    """Return every value that `kind_of` may return."""
    return [*sorted(kind.__name__ for kind in _kinds()), OTHER]


def _kinds() -> list[type[WatersmeetError]]:
    classes = (each for each in globals().values() if isinstance(each, type))
    return [each for each in classes if issubclass(each, WatersmeetError)]


EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("pyspark", "delta", "pandas"), "spark"),
    **dict.fromkeys(("grpc", "grpc_status", "google", "zstandard"), "connect"),
    "great_expectations": "quality",
    **dict.fromkeys(("altair", "vl_convert"), "report"),
    "prometheus_client": "metrics",
    **dict.fromkeys(("cachetools", "httpx2", "authlib", "attr", "attrs", "certifi"), "registry"),
    "openlineage": "lineage",
    **dict.fromkeys(("jgo", "cryptography"), "broker"),
}
"""The extra of Watersmeet that installs a package, by the package's import name."""


def missing_package(error: BaseException, otherwise: str = "") -> MissingPackageError | None:
    """Return the error that says which extra installs what could not be imported, or None.

    `otherwise`: another remedy, beginning with a comma, for the end of the message.
    """
    package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if package not in EXTRAS:
        return None
    return MissingPackageError(
        f"the package {package} is not installed: "
        f'`pip install "watersmeet[{EXTRAS[package]}]"` brings it{otherwise}'
    )


def _own(error: BaseException) -> tuple[type[WatersmeetError], str] | None:
    # What a Python worker of Spark raises reaches the driver as the text of its traceback: the last
    # line that begins with the full name of one of these classes says which error it was.
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

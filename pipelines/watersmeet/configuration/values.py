"""The kinds of values in the configuration: each takes what YAML gave, or refuses it."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
)

from watersmeet.configuration.file import FromEnvironment, RefusedError
from watersmeet.core.texts import PATH_PATTERN
from watersmeet.core.times import LAST_EVENT_TIME_MS, parse_iso_8601, zone_names
from watersmeet.errors import ConfigurationError

DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZE_UNITS: Final = {
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}

# Row limits of Spark and partition numbers of Kafka are 32-bit; its offsets are 64-bit.
LARGEST_COUNT: Final = 2**31 - 1
LARGEST_OFFSET: Final = 2**63 - 1
LARGEST_PORT: Final = 65_535
# Kafka's own limit of a cluster lies about there.
MOST_PARTITIONS: Final = 100_000
# librdkafka sends at most 1 000 000 000 bytes in one message, key and headers included.
LARGEST_MESSAGE: Final = 999_000_000
# What the headers of a message count; a smaller size is a number that lacks its unit.
SMALLEST_SIZE: Final = 200
# As milliseconds, every time in epoch seconds until the year 2969 lies in 1970.
FIRST_START_MS: Final = 31_536_000_000
# A reader (a run, a query, a notebook) needs a version of a table for as long as the reading takes.
SHORTEST_RETENTION_MS: Final = 3_600_000

# Columns of silver; `key`, a field beside the sources in a published message; `seq`, a number of
# messages; and `waits_for`, a column of the live view.
RESERVED_NAMES: Final = frozenset(
    [
        *("partition", "merge_key", "status", "event_time", "last_event_time", "valid"),
        *("invalid_reason", "batch", "generation", "due", "closed_at", "tenant", "position"),
        *("record_bytes", "record_count", "record_ids", "source", "topic", "offset", "value"),
        *("u", "id", "of_offset", "is_late", "is_late_born", "version", "settled_at"),
        *("first_event_time", "has_message", "after_offset", "decided_at", "from_offset"),
        *("until_offset", "head", "clock", "epoch", "committed_at", "key", "seq", "waits_for"),
    ]
)
# Columns beside the sources while merge records change and messages are made.
NAMES_OF_STEPS: Final = frozenset(["replaces", "delete_up_to"])
# Client options that carry a promise of Watersmeet (what is read, that each record is published
# once and in order, that nothing but an answer is printed); `watersmeet.kafka.options` sets them.
# And those of librdkafka's bindings whose values cannot be text.
OWN_OPTIONS: Final = re.compile(
    r"bootstrap\.servers|metadata\.broker\.list|group\.(id|instance\.id)|isolation\.level"
    r"|auto\.offset\.reset|auto\.commit\..*"
    r"|enable\.(auto\.commit|auto\.offset\.store|partition\.eof|idempotence|gapless\.guarantee)"
    r"|allow\.auto\.create\.topics|transactional\.id|transaction\.timeout\.ms|acks"
    r"|request\.required\.acks|partitioner|message\.max\.bytes|(delivery|message)\.timeout\.ms"
    r"|max\.in\.flight(\..*)?|retries|message\.send\.max\.retries"
    r"|delivery\.report\.only\.error|(key|value)\.(de)?serializer"
    r"|log_level|log\.(queue|connection\.close)|logger|default\.topic\.config|on_commit|on_delivery|[a-z_]+_cb"
)

_WITH_CONTAINERS: Final = frozenset(["abfs", "abfss", "wasb", "wasbs"])
"""Schemes of URIs with `container@account`."""

_SCHEME: Final = r"[A-Za-z][A-Za-z0-9+.-]+:"
_WHOLE_URI: Final = (
    r"(?i:file:(//(localhost)?)?/[^/]"
    rf"|(?!file:){_SCHEME}//[^/]|(?!(file|s3a?|gs|az|azure|adl|abfss?|wasbs?):){_SCHEME}/)"
)
"""A URI that says where it is, whatever the current folder; that of a file names no other host."""

_MOST_DIGITS: Final = 18
_LONGEST_DURATION: Final = f"{LAST_EVENT_TIME_MS // DURATION_UNITS_MS['d']}d"


# -- numbers


def parse_duration(text: str) -> int:
    """Return the ms of a text such as 500ms, 30s, 30m, 12h, 7d. Raises ConfigurationError."""
    try:
        return _duration_ms(text)
    except RefusedError as refusal:
        raise ConfigurationError(f"`{text}` {refusal.what}", fix=refusal.fix) from None


def _duration_ms(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)(ms|s|m|h|d)", text)
    if not match:
        fix = "write a whole number and ms, s, m, h or d, such as `30m`"
        raise RefusedError("is not a duration", fix=fix)
    digits, unit = match[1], match[2]
    duration_ms = int(digits) * DURATION_UNITS_MS[unit] if len(digits) <= _MOST_DIGITS else None
    # Nothing longer can mean anything; and sums of two stay inside a bigint.
    if duration_ms is None or duration_ms > LAST_EVENT_TIME_MS:
        raise RefusedError("is too long", fix=f"it must be `{_LONGEST_DURATION}` or shorter")
    return duration_ms


def _duration(shortest_ms: int = 0, right: str = "") -> BeforeValidator:
    def duration(value: object, info: ValidationInfo) -> int:
        try:
            # Settings built in Python have a number: there the name says the unit.
            if info.context is None and isinstance(value, int):
                duration_ms = value
            else:
                duration_ms = _duration_ms(value if isinstance(value, str) else "")
        except RefusedError as refusal:
            what = f"{{path}}: {{value}} {refusal.what}"
            raise RefusedError(what, fix=refusal.fix) from None
        if duration_ms < shortest_ms:
            raise RefusedError("{path}: {value} is too short", fix=f"it must be {right}")
        return duration_ms

    return BeforeValidator(duration)


def _share(value: object, info: ValidationInfo) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(\.[0-9]{1,9})?)%", value if isinstance(value, str) else "")
    share = float(match[1]) / 100 if match else 0.0
    if info.context is None and isinstance(value, int | float):  # built in Python
        share = float(value)
    if not 0 < share <= 1:
        raise RefusedError(
            "{path}: {value} is not a percentage above 0% and up to 100%",
            fix="write one such as `50%`",
        )
    return share


def _whole(value: object) -> object:
    # Digits in quotes are text, but a variable has no other way to give a number.
    return _whole_of_key(value) if isinstance(value, FromEnvironment) else value


def _whole_of_key(value: object) -> object:
    return int(value) if isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value) else value


def _size(value: object) -> object:
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]+)", value) if isinstance(value, str) else None
    if match and match[2] in SIZE_UNITS:
        return int(match[1]) * SIZE_UNITS[match[2]]
    return _whole(value)


def _timestamp(given: object) -> int:
    # A time that names no zone is UTC. A finer part is cut off.
    value = given.isoformat() if isinstance(given, date) else _whole(given)
    timestamp_ms = parse_iso_8601(value) if isinstance(value, str) else value
    if type(timestamp_ms) is not int:
        raise RefusedError(
            "{path}: {value} is not a time",
            fix="write ISO 8601, such as `2026-01-01T00:00:00Z`, or epoch milliseconds",
        )
    if not FIRST_START_MS <= timestamp_ms <= LAST_EVENT_TIME_MS:
        raise RefusedError(
            "{path}: {value} is out of range",
            fix="it must lie from 1971 to the year 9999, a number in milliseconds; `earliest` is "
            "before all",
        )
    return timestamp_ms


def _not_without_unit(size: int, info: ValidationInfo) -> int:
    # Only of a file: a lake may have been begun with such a size.
    if info.context is not None and size < SMALLEST_SIZE:
        raise RefusedError(
            "{path}: {value} is too small, since the headers of a message alone count "
            f"{SMALLEST_SIZE} bytes",
            fix="write the unit, such as `8MiB`",
        )
    return size


def _number(
    least: int,
    most: int,
    read: Callable[[object], object] = _whole,
    what: str = "a whole number",
    least_of_file: int | None = None,
) -> BeforeValidator:
    shown = least if least_of_file is None else least_of_file

    def number(value: object) -> int:
        result = read(value)
        if type(result) is not int or not least <= result <= most:
            raise RefusedError(f"{{path}}: {{value}} is not {what} from {shown} to {most}")
        return result

    return BeforeValidator(number)


_SIZE: Final = "a size in bytes (such as `8MiB`, or a whole number)"
Count = Annotated[int, _number(1, LARGEST_COUNT)]
Size = Annotated[
    int,
    _number(1, LARGEST_MESSAGE, _size, _SIZE, SMALLEST_SIZE),
    AfterValidator(_not_without_unit),
]
Partitions = Annotated[int, _number(1, MOST_PARTITIONS)]
Port = Annotated[int, _number(1, LARGEST_PORT)]
Partition = Annotated[int, _number(0, LARGEST_COUNT, _whole_of_key)]
Offset = Annotated[int, _number(0, LARGEST_OFFSET)]
Duration = Annotated[int, _duration()]
PositiveDuration = Annotated[int, _duration(1, "longer than nothing, such as `30m`")]
Retention = Annotated[int, _duration(SHORTEST_RETENTION_MS, "`1h` or longer, such as `7d`")]
Share = Annotated[float, BeforeValidator(_share)]


# -- text


def _matching(pattern: str, kind: str, fix: str) -> AfterValidator:
    def matching(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise RefusedError(f"{{path}}: {{value}} is not {kind}", fix=fix)
        return text

    return AfterValidator(matching)


def _url(text: str) -> str:
    # Perhaps with a password, so it is not shown.
    if not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", text):
        raise RefusedError(
            "{path} is not a URL", fix="write http:// or https://, a host, and no password"
        )
    return text


def _zone_name(name: str) -> str:
    if name not in zone_names():
        [example] = difflib.get_close_matches(name, zone_names(), 1) or ["Europe/Berlin"]
        raise RefusedError(
            "{path}: {value} is not a time zone",
            fix=f"write a name of the tz database, such as `{example}`",
        )
    return name


def _not_reserved(name: str) -> str:
    if name in RESERVED_NAMES | NAMES_OF_STEPS:
        raise RefusedError("{path}: {value} is reserved for the output", fix="choose another")
    return name


def _location(text: str, info: ValidationInfo) -> str:
    # A path is counted from the configuration's folder. A URI with credentials is refused, since a
    # location is shown to everybody, and one that does not say the whole way.
    if re.match(_SCHEME, text):
        if not re.match(_WHOLE_URI, text):
            raise RefusedError(
                "{path}: {value} is a URI without an absolute path",
                fix="write `file:///folder` or `s3://bucket/folder`, or a path without a scheme, "
                "which is counted from this file's folder",
            )
        if _may_have_credentials(text):
            raise RefusedError(
                "{path} has a user, a password or a query in its URI",
                fix="leave them out, and give credentials in `storage`, `spark` or the environment",
            )
        return text.rstrip("/")
    return str(_absolute(Path(text), info))


def _file(location: str) -> str:
    # A store has no files that grow.
    if re.match(_SCHEME, location):
        raise RefusedError("{path}: {value} is a URI", fix="name a file by its path")
    return location


def _may_have_credentials(uri: str) -> bool:
    # User information, or a query, such as a signature of Azure's, in whose URIs a container stands
    # before the `@`. The path of a `file:` URI is literal.
    scheme, _, rest = uri.partition(":")
    if scheme.lower() == "file":
        return False
    authority = rest[2:].partition("/")[0] if rest.startswith("//") else ""
    user, at_sign, _ = authority.rpartition("@")
    is_user = ":" in user or scheme.lower() not in _WITH_CONTAINERS
    return "?" in rest or (at_sign != "" and is_user)


@dataclass(frozen=True)
class SchemaFile:
    """The file of a schema or a suite, and the text that it had when the configuration was read.

    `earlier`: those that a living lake had in its place, the oldest first. `since`: by partition,
    the first offset (else 0) whose value was written with a schema of bare Avro.
    """

    path: Path
    text: bytes
    earlier: tuple["SchemaFile", ...] = ()
    since: Mapping[int, int] = field(default_factory=dict, hash=False)


def _schema_file(value: object, info: ValidationInfo) -> SchemaFile:
    if isinstance(value, SchemaFile):  # built in Python
        return value
    if not isinstance(value, (str, Path)):
        raise RefusedError("{path} must be text, not {kind}")
    path = _absolute(Path(value), info)
    try:
        return SchemaFile(path, path.read_bytes())
    except OSError:
        raise RefusedError(
            "{path}: {value} is not a file that can be read",
            fix="paths start at this file's folder",
        ) from None


def _absolute(path: Path, info: ValidationInfo) -> Path:
    folder: Path = info.context["folder"] if info.context else Path.cwd()
    try:
        return (folder / path.expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, no home folder, a null character
        raise RefusedError(
            "{path}: {value} is not a path", fix="name one, absolute or from this file's folder"
        ) from None


def _each_once(what: str) -> AfterValidator:
    def each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in values:
            if values.count(value) > 1:
                raise RefusedError(f"{{path}} names {value} twice", fix=f"name each {what} once")
        return values

    return AfterValidator(each_once)


different_paths: Final = _each_once("path")


def _shape_of_names(value: object) -> str:
    return "<names>" if isinstance(value, (list, tuple)) else "<name>"


Text = Annotated[str, StringConstraints(strict=True, pattern=r"\S")]
Location = Annotated[Text, AfterValidator(_location)]
File = Annotated[Location, AfterValidator(_file)]
Schema = Annotated[SchemaFile, BeforeValidator(_schema_file)]
Name = Annotated[
    Text, _matching("[A-Za-z0-9._-]+", "a name", "use letters, digits, `-`, `_` and `.`")
]
Url = Annotated[Text, AfterValidator(_url)]
Identifier = Annotated[
    Text,
    _matching(r"[^\s`./]+", "a name in a catalog", "leave out blanks, dots, slashes and backticks"),
]
TopicName = Annotated[
    Text,
    _matching(
        r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}",
        "a topic name",
        "Kafka takes letters, digits, `.`, `_` and `-`",
    ),
]

Topics = Annotated[
    Annotated[TopicName, Tag("<name>")]
    | Annotated[
        tuple[TopicName, ...],
        Field(min_length=1),
        _each_once("topic"),
        AfterValidator(lambda names: tuple(sorted(names))),
        Tag("<names>"),
    ],
    Discriminator(_shape_of_names),
]
"""One topic, or several."""

SourceName = Annotated[
    Text,
    _matching("[a-z][a-z0-9_]*", "a name for a source", "use a-z, 0-9 and _, with a letter first"),
    AfterValidator(_not_reserved),
]
DottedPath = Annotated[
    Text,
    _matching(
        PATH_PATTERN,
        "a dotted path",
        r"join field names by single dots, such as `meta.ts`, and write `\.` for a dot in a name",
    ),
]

ZoneName = Annotated[Text, AfterValidator(_zone_name)]
_PORT = "0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_SERVER = rf"\s*([A-Za-z0-9_]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s,:/\[\]]+):{_PORT}\s*"
Servers = Annotated[
    Text,
    _matching(
        f"{_SERVER}(,{_SERVER})*", "a list of brokers", "write host:port, separated by commas"
    ),
]


# -- scalars and options


def _flag(value: object) -> bool:
    if isinstance(value, FromEnvironment) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise RefusedError("{path}: {value} is neither true nor false")
    return value


def _scalar(value: object) -> str | int | float | bool:
    if not isinstance(value, (str, int, float)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise RefusedError("{path} must be text, a number, true or false, not {kind}")
    return str(value) if isinstance(value, str) else value


def _named(value: object) -> object:
    for name in value if isinstance(value, Mapping) else ():
        # Perhaps `name=value`, so it is not shown.
        if not re.fullmatch(r"[A-Za-z0-9._-]+", str(name)):
            raise RefusedError(
                "{path} has a name that no option can have", fix="write `name: value`"
            )
    return value


def _as_text(value: object) -> str:
    scalar = _scalar(value)
    return str(scalar).lower() if isinstance(scalar, bool) else str(scalar)


def _without(own: re.Pattern[str]) -> AfterValidator:
    def without(options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if own.fullmatch(name):
                raise RefusedError("{path} is set by Watersmeet itself", name, fix="leave it out")
        return options

    return AfterValidator(without)


def _named_as_by_librdkafka(options: dict[str, str]) -> dict[str, str]:
    for name in options:
        if name.startswith("kafka."):
            what = "{path}: options are named as librdkafka names them"
            raise RefusedError(what, name, fix="leave out the leading `kafka.`")
    return options


# Options that carry a promise: that trouble is seen as such, and that the run waits for its end.
_OWN_REGISTRY_OPTIONS: Final = re.compile(r"url|timeout|max\.retries|retries\..*|cache\..*")


Flag = Annotated[bool, BeforeValidator(_flag)]
Scalar = Annotated[str | int | float | bool, BeforeValidator(_scalar)]
Options = Annotated[dict[str, Annotated[str, BeforeValidator(_as_text)]], BeforeValidator(_named)]
KafkaOptions = Annotated[Options, _without(OWN_OPTIONS), AfterValidator(_named_as_by_librdkafka)]
RegistryOptions = Annotated[Options, _without(_OWN_REGISTRY_OPTIONS)]


# -- where reading begins


@dataclass(frozen=True)
class StartTimestamp:
    """A start at the first record whose Kafka timestamp is this or later."""

    timestamp_ms: Annotated[int, BeforeValidator(_timestamp), Field(validation_alias="timestamp")]

    def __str__(self) -> str:
        """Return the start as in YAML, in UTC."""
        time = datetime(1970, 1, 1) + timedelta(milliseconds=self.timestamp_ms)
        return _flow({"timestamp": f"{time.isoformat(timespec='milliseconds')}Z"})


def _each_partition_once(offsets: object) -> object:
    partitions = set[object]()
    for key in offsets if isinstance(offsets, Mapping) else ():
        partition = _whole_of_key(key)
        if partition in partitions:
            raise RefusedError("field `{path}` is repeated", str(key), fix="keep one")
        partitions.add(partition)
    return offsets


@dataclass(frozen=True)
class StartOffsets:
    """A start at these offsets, by source and partition; elsewhere at the earliest."""

    offsets: Annotated[
        dict[
            Annotated[str, BeforeValidator(str)],
            Annotated[
                dict[Partition, Offset],
                Field(min_length=1),
                BeforeValidator(_each_partition_once),
            ],
        ],
        Field(min_length=1),
    ]

    def __str__(self) -> str:
        """Return the start as in YAML, partitions in order."""
        by_source = {
            source: _flow(dict(sorted(offsets.items()))) for source, offsets in self.offsets.items()
        }
        return _flow({"offsets": _flow(by_source)})


def _flow(mapping: Mapping[Any, object]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in mapping.items())}}}"


def _kind_of_start(value: object) -> str | None:
    if isinstance(value, (StartTimestamp, StartOffsets)):
        return f"<{type(value).__name__}>"
    if isinstance(value, Mapping):
        return {("timestamp",): "<StartTimestamp>", ("offsets",): "<StartOffsets>"}.get(
            tuple(value)
        )
    return "<word>" if isinstance(value, str) and value in ("earliest", "latest", "sink") else None


Start = Annotated[
    Annotated[Literal["earliest", "latest", "sink"], Tag("<word>")]
    | Annotated[StartTimestamp, Tag("<StartTimestamp>")]
    | Annotated[StartOffsets, Tag("<StartOffsets>")],
    Discriminator(
        _kind_of_start,
        custom_error_type="start",
        custom_error_message="is no start",  # the sentence is in file.py, as all by type
    ),
]

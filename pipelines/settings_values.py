"""The kinds of values in the configuration: each takes what YAML gave and returns what the program uses, or refuses it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ValidationInfo

from pipelines.core.times import LAST_EVENT_TIME_MS, parse_iso_8601
from pipelines.errors import ConfigurationError
from pipelines.settings_file import FromEnvironment, RefusedError, kind_of

DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZE_UNITS: Final = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# Row limits of Spark and partition numbers of Kafka are 32-bit; its offsets are 64-bit.
LARGEST_COUNT: Final = 2**31 - 1
LARGEST_OFFSET: Final = 2**63 - 1
# librdkafka sends at most 1 000 000 000 bytes in one message, key and headers included.
LARGEST_MESSAGE: Final = 999_000_000
# Whoever reads a table keeps a version of it for as long as the reading takes: a run, a query, a notebook.
SHORTEST_RETENTION_MS: Final = 3_600_000

# Columns of silver, `key`, which stands beside the sources in a published message, and `waits_for`, in the live view.
RESERVED_NAMES: Final = frozenset(
    ["partition", "merge_key", "status", "event_time", "last_event_time", "valid", "invalid_reason", "batch", "key", "waits_for"]
)
# Client options that carry a promise of Watersmeet (what is read, that each record is published once and in order, that nothing
# but an answer is printed), and those of librdkafka's bindings that text cannot be. `pipelines.kafka.options` sets the first.
OWN_OPTIONS: Final = re.compile(
    r"bootstrap\.servers|metadata\.broker\.list|group\.(id|instance\.id)|isolation\.level|auto\.offset\.reset"
    r"|enable\.(auto\.commit|auto\.offset\.store|partition\.eof|idempotence|gapless\.guarantee)|auto\.commit\..*"
    r"|allow\.auto\.create\.topics|transactional\.id|transaction\.timeout\.ms|acks|request\.required\.acks|partitioner"
    r"|message\.max\.bytes|(delivery|message)\.timeout\.ms|max\.in\.flight(\..*)?|retries|message\.send\.max\.retries"
    r"|delivery\.report\.only\.error|(key|value)\.(de)?serializer"
    r"|log_level|log\.queue|logger|default\.topic\.config|on_commit|on_delivery|[a-z_]+_cb"
)

_NO_DURATION = "is not a duration; write a whole number and ms, s, m, h or d, such as `30m`"


@dataclass(frozen=True)
class StartTimestamp:
    """Reading begins at the first record whose Kafka timestamp is this or later."""

    timestamp_ms: int

    def __str__(self) -> str:
        """As in YAML, in UTC."""
        time = datetime(1970, 1, 1) + timedelta(milliseconds=self.timestamp_ms)
        return _flow({"timestamp": f"{time.isoformat(timespec='milliseconds')}Z"})


@dataclass(frozen=True)
class StartOffsets:
    """Reading begins at these offsets, by source and partition; a partition that is not named, at the earliest."""

    offsets: dict[str, dict[int, int]]

    def __str__(self) -> str:
        """As in YAML, partitions in order."""
        by_source = {source: _flow(dict(sorted(offsets.items()))) for source, offsets in self.offsets.items()}
        return _flow({"offsets": _flow(by_source)})


def _flow(mapping: Mapping[Any, object]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in mapping.items())}}}"


def parse_duration(text: str) -> int:
    """A duration is a whole number and a unit (500ms, 30s, 30m, 12h, 7d); the answer is in ms."""
    match = re.fullmatch(r"([0-9]{1,18})(ms|s|m|h|d)", text)
    duration_ms = int(match[1]) * DURATION_UNITS_MS[match[2]] if match else -1
    if not 0 <= duration_ms <= LAST_EVENT_TIME_MS:  # nothing longer can mean anything; and sums of two stay inside a bigint
        raise ConfigurationError(f"`{text}` {_NO_DURATION}")
    return duration_ms


def _duration(shortest_ms: int = 0, right: str = "") -> BeforeValidator:
    def duration(value: object, info: ValidationInfo) -> int:
        try:
            # One that is built in Python is a number: there the name says the unit.
            if info.context is None and isinstance(value, int):
                duration_ms = value
            else:
                duration_ms = parse_duration(value if isinstance(value, str) else "")
        except ConfigurationError:
            raise RefusedError("{path}: {value} " + _NO_DURATION) from None
        if duration_ms < shortest_ms:
            raise RefusedError("{path}: {value} is too short; it must be " + right)
        return duration_ms

    return BeforeValidator(duration)


def _number(largest: int, units: Mapping[str, int], right: str) -> BeforeValidator:
    def number(value: object) -> int:
        match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", value) if isinstance(value, str) else None
        # Bare digits in quotes are text, but a variable has no other way to give a number.
        if match and match[2] in units and (match[2] or isinstance(value, FromEnvironment)):
            value = int(match[1]) * units[match[2]]
        if type(value) is not int or not 1 <= value <= largest:
            raise RefusedError(f"{{path}}: {{value}} is not {right} from 1 to {largest}")
        return value

    return BeforeValidator(number)


def _flag(value: object) -> bool:
    if isinstance(value, FromEnvironment) and value in ("true", "false"):
        return value == "true"
    if type(value) is not bool:
        raise RefusedError("{path}: {value} is neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        hint = "" if isinstance(value, (list, Mapping)) or value is None else "; put it in quotes"
        raise RefusedError(f"{{path}} must be text, not {kind_of(value)}{hint}")
    if not value.strip():
        raise RefusedError("{path} must not be empty")
    return str(value)


def _matching(pattern: str, wrong: str) -> BeforeValidator:
    def matching(value: object) -> str:
        text = _text(value)
        if not re.fullmatch(pattern, text):
            raise RefusedError("{path}: {value} is " + wrong)
        return text

    return BeforeValidator(matching)


def choice(*usable: str, later: tuple[str, ...] = ()) -> BeforeValidator:
    """One of a few words; what the contract knows but this version lacks is told apart from what never was right."""

    def chosen(value: object) -> str:
        if isinstance(value, str) and value in usable:
            return str(value)
        wrong = "is not available in this version of Watersmeet" if value in later else "is none of the values it may have"
        raise RefusedError(f"{{path}}: {{value}} {wrong}; use {_either(*usable)}")

    return BeforeValidator(chosen)


def _either(*words: str) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _share(value: object, info: ValidationInfo) -> float:
    """A percentage such as `50%`; the answer is a share of 1."""
    share = 0.0
    if info.context is None and isinstance(value, (int, float)):  # built in Python, as the share itself
        share = float(value)
    elif isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,3}(\.[0-9]{1,9})?)%", value)):
        share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise RefusedError("{path}: {value} is no percentage above 0% and up to 100%; write one such as `50%`")
    return share


def _start(value: object, info: ValidationInfo) -> object:
    """Where reading begins: a word, a time, or offsets."""
    if isinstance(value, Mapping) and len(value) == 1:
        if "timestamp" in value:
            return StartTimestamp(_timestamp_ms(value["timestamp"]))
        if "offsets" in value:
            return StartOffsets(_offsets_by_source(value["offsets"]))
    if info.context is None and isinstance(value, (StartTimestamp, StartOffsets)):
        return value
    if isinstance(value, str) and value in ("earliest", "latest", "sink"):
        return str(value)
    right = _either("earliest", "latest", "sink", "`{timestamp: ...}`", "`{offsets: ...}`")
    raise RefusedError("{path}: {value} is none of the values it may have; use " + right)


def _timestamp_ms(given: object) -> int:
    """A time of YAML, or ISO 8601 text, is UTC where it names no zone; a number is epoch ms. A finer part is cut off."""
    value = given.isoformat() if isinstance(given, date) else given
    if isinstance(value, FromEnvironment) and re.fullmatch("[0-9]{1,18}", value):
        value = int(value)
    timestamp_ms = parse_iso_8601(value) if isinstance(value, str) else value
    if type(timestamp_ms) is not int:
        right = "write ISO 8601, such as `2026-01-01T00:00:00Z`, or epoch milliseconds"
        raise RefusedError("{path}: {value} is no time; " + right, "timestamp", given=(given,))
    if not 0 <= timestamp_ms <= LAST_EVENT_TIME_MS:
        right = "it must lie from 1970 to the year 9999"
        raise RefusedError("{path}: {value} is out of range; " + right, "timestamp", given=(given,))
    return timestamp_ms


def _offsets_by_source(value: object) -> dict[str, dict[int, int]]:
    if not isinstance(value, Mapping) or not value:
        raise RefusedError("{path} must be a mapping that gives sources their offsets by partition, such as `{0: 17}`", "offsets")
    return {str(source): _offsets(offsets, "offsets", str(source)) for source, offsets in value.items()}


def _offsets(value: object, *at: str) -> dict[int, int]:
    if not isinstance(value, Mapping) or not value:
        raise RefusedError("{path} must be a mapping from partitions to offsets, such as `{0: 17}`", *at)
    offsets: dict[int, int] = {}
    for named, given in value.items():
        here = (*at, str(named))
        partition = _whole(named, LARGEST_COUNT, digits=True)
        if partition is None:
            raise RefusedError(f"{{path}} is no partition; name one by a whole number from 0 to {LARGEST_COUNT}", *here)
        if partition in offsets:
            raise RefusedError(f"{{path}} names partition {partition} again; keep one", *here)
        offset = _whole(given, LARGEST_OFFSET, digits=isinstance(given, FromEnvironment))
        if offset is None:
            right = f"a whole number from 0 to {LARGEST_OFFSET}"
            raise RefusedError("{path}: {value} is no offset; write " + right, *here, given=(given,))
        offsets[partition] = offset
    return offsets


def _whole(value: object, largest: int, *, digits: bool) -> int | None:
    if digits and isinstance(value, str) and re.fullmatch("[0-9]{1,19}", value):
        value = int(value)
    return value if type(value) is int and 0 <= value <= largest else None


def _location(value: object, info: ValidationInfo) -> str:
    """A URI stays as it is; any other text is a path, made absolute from the folder of the configuration file."""
    text = _text(value)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text):
        return text.rstrip("/")
    return str(_absolute(text, info))


def _schema_file(value: object, info: ValidationInfo) -> Path:
    if isinstance(value, Path):
        return value
    path = _absolute(_text(value), info)
    try:
        path.read_bytes()
    except OSError:
        raise RefusedError("{path}: {value} is no file that can be read; paths start at this file's folder") from None
    return path


def _absolute(text: str, info: ValidationInfo) -> Path:
    folder: Path = info.context["folder"] if info.context else Path.cwd()
    try:
        return (folder / Path(text).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, no home folder, a null character
        raise RefusedError("{path}: {value} is no path; name one, absolute or from this file's folder") from None


def _scalar(value: object) -> str | int | float | bool:
    if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise RefusedError(f"{{path}} must be text, a number, true or false, not {kind_of(value)}")
    return str(value) if isinstance(value, str) else value


def _options(value: object) -> dict[str, str]:
    """Names to values, every value as text; a refusal names the option and never shows its value."""
    if not isinstance(value, Mapping):
        raise RefusedError(f"{{path}} must be a mapping, not {kind_of(value)}")
    options = {}
    for name, given in value.items():
        if not re.fullmatch(r"[A-Za-z0-9._-]+", str(name)):  # perhaps `name=value`, so it is not shown
            raise RefusedError("{path} has a name that is no name of an option; write `name: value`")
        if not isinstance(given, (str, int, float)):
            raise RefusedError(f"{{path}} must be text, a number, true or false, not {kind_of(given)}", str(name))
        options[str(name)] = str(given).lower() if isinstance(given, bool) else str(given)
    return options


def _kafka_options(value: object) -> dict[str, str]:
    options = _options(value)
    for name in options:
        if OWN_OPTIONS.fullmatch(name):
            raise RefusedError("{path} is set by Watersmeet itself; leave it out", name)
        if name.startswith("kafka."):
            raise RefusedError("{path}: options are named as librdkafka names them; leave out the leading `kafka.`", name)
    return options


def named_sources(value: object) -> object:
    """Two or more sources, each with a name that can be a column of silver."""
    if not isinstance(value, Mapping):
        raise RefusedError(f"{{path}} must be a mapping, not {kind_of(value)}")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise RefusedError("{path} is no name for a source; use a-z, 0-9 and _, with a letter first", str(name))
        if name in RESERVED_NAMES:
            raise RefusedError(f"{{path}}: `{name}` is a name of the output itself; choose another", name)
    if len(value) < 2:
        raise RefusedError(f"{{path}} must name two or more sources, not {len(value)}: a merge needs two")
    return value


Text = Annotated[str, BeforeValidator(_text)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Count = Annotated[int, _number(LARGEST_COUNT, {"": 1}, "a whole number")]
Size = Annotated[int, _number(LARGEST_MESSAGE, SIZE_UNITS, "a size in bytes (such as `8MiB`, or a whole number)")]
Duration = Annotated[int, _duration()]
PositiveDuration = Annotated[int, _duration(1, "longer than nothing, such as `30m`")]
Retention = Annotated[int, _duration(SHORTEST_RETENTION_MS, "`1h` or longer, such as `7d`")]
Share = Annotated[float, BeforeValidator(_share)]
Scalar = Annotated[str | int | float | bool, BeforeValidator(_scalar)]
Start = Annotated[Literal["earliest", "latest", "sink"] | StartTimestamp | StartOffsets, BeforeValidator(_start)]
SchemaFile = Annotated[Path, BeforeValidator(_schema_file)]
Options = Annotated[dict[str, str], BeforeValidator(_options)]
KafkaOptions = Annotated[dict[str, str], BeforeValidator(_kafka_options)]
Location = Annotated[str, BeforeValidator(_location)]
Name = Annotated[str, _matching("[A-Za-z0-9._-]+", "no name; use letters, digits, `-`, `_` and `.`")]
Identifier = Annotated[str, _matching(r"[^\s`./]+", "no name in a catalog; leave out blanks, dots, slashes and backticks")]
TopicName = Annotated[
    str, _matching(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}", "no topic name; Kafka takes letters, digits, `.`, `_` and `-`")
]
DottedPath = Annotated[str, _matching(r"[^.]+(\.[^.]+)*", "no dotted path; join field names by single dots, such as `meta.ts`")]
_SERVER = r"\s*([A-Za-z0-9_]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s,:/\[\]]+):[0-9]{1,5}\s*"
Servers = Annotated[str, _matching(f"{_SERVER}(,{_SERVER})*", "no list of brokers; write host:port, separated by commas")]

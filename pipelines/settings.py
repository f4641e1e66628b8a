"""The configuration, typed: nonsense is refused here, in one sentence, before anything is read or started.

A sentence says what is wrong, where (file and dotted path) and what would be right. It never holds a value that came
from the environment, nor one of `kafka.options`: either may be a secret.
"""

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipelines.core.json_schema import ValueSchema, load_value_schema
from pipelines.core.reading import LAST_EVENT_TIME_MS, ReadingRules, parse_iso_8601
from pipelines.errors import ConfigurationError
from pipelines.settings_file import (
    FromEnvironment,
    RefusedError,
    first_sentence,
    kind_of,
    known_instead,
    read_values,
    sentence_of,
)

DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZE_UNITS: Final = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# Event times end with the year 9999, so nothing longer can mean anything; and sums of two stay far inside a bigint.
LONGEST_DURATION_MS: Final = 253_402_300_799_999
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
# Client options that carry a promise of Watersmeet (what is read, and that each record is published once, in order).
OWN_OPTIONS: Final = re.compile(
    r"bootstrap\.servers|metadata\.broker\.list|group\.(id|instance\.id)|isolation\.level|auto\.offset\.reset"
    r"|enable\.(auto\.commit|auto\.offset\.store|partition\.eof|idempotence|gapless\.guarantee)|auto\.commit\..*"
    r"|transactional\.id|acks|request\.required\.acks|partitioner|message\.max\.bytes|max\.in\.flight(\..*)?"
    r"|retries|message\.send\.max\.retries|(key|value)\.(de)?serializer"
)

_NO_DURATION = "is no duration; write a whole number and ms, s, m, h or d, such as `30m`"
_NOT_YET = "{path}: {value} is not available in this version of Watersmeet; use "
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


# -- kinds of values: each takes what YAML gave and returns what the program uses


def parse_duration(text: str) -> int:
    """A duration is a whole number and a unit (500ms, 30s, 30m, 12h, 7d); the answer is in ms."""
    match = re.fullmatch(r"([0-9]{1,18})(ms|s|m|h|d)", text)
    duration_ms = int(match[1]) * DURATION_UNITS_MS[match[2]] if match else -1
    if not 0 <= duration_ms <= LONGEST_DURATION_MS:
        raise ConfigurationError(f"`{text}` {_NO_DURATION}")
    return duration_ms


def _duration(value: object, info: ValidationInfo) -> int:
    if info.context is None and type(value) is int:  # built in Python, where the name says the unit
        return value
    try:
        return parse_duration(value if isinstance(value, str) else "")
    except ConfigurationError:
        raise RefusedError("{path}: {value} " + _NO_DURATION) from None


def _positive_duration(value: object, info: ValidationInfo) -> int:
    duration_ms = _duration(value, info)
    if duration_ms <= 0:
        raise RefusedError("{path}: {value} is too short; it must be longer than nothing, such as `30m`")
    return duration_ms


def _number(value: object, largest: int, units: Mapping[str, int], right: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", value) if isinstance(value, str) else None
    # Bare digits in quotes are text, but a variable has no other way to give a number.
    if match and match[2] in units and (match[2] or isinstance(value, FromEnvironment)):
        value = int(match[1]) * units[match[2]]
    if type(value) is not int or not 1 <= value <= largest:
        raise RefusedError(f"{{path}}: {{value}} is not {right} from 1 to {largest}")
    return value


def _count(value: object) -> int:
    return _number(value, LARGEST_COUNT, {"": 1}, "a whole number")


def _size(value: object) -> int:
    return _number(value, LARGEST_MESSAGE, SIZE_UNITS, "a size in bytes (such as `8MiB`, or a whole number)")


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


def _choice(*usable: str, later: tuple[str, ...] = ()) -> BeforeValidator:
    """One of a few words; what the contract knows but this version lacks is told apart from what never was right."""

    def choice(value: object) -> str:
        if isinstance(value, str) and value in usable:
            return str(value)
        right = _either(*usable)
        if value in later:
            raise RefusedError(_NOT_YET + right)
        raise RefusedError("{path}: {value} is none of the values it may have; use " + right)

    return BeforeValidator(choice)


def _either(*words: str) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _idle_after(value: object, info: ValidationInfo) -> int | None:
    return None if value is None else _positive_duration(value, info)


def _retention(value: object, info: ValidationInfo) -> int:
    duration_ms = _duration(value, info)
    if duration_ms < SHORTEST_RETENTION_MS:
        raise RefusedError("{path}: {value} is too short; it must be `1h` or longer, such as `7d`")
    return duration_ms


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


def _timestamp_ms(value: object) -> int:
    """A time of YAML, or ISO 8601 text, is UTC where it names no zone; a number is epoch ms. A finer part is cut off."""
    timestamp_ms: int | None = None
    if isinstance(value, datetime):
        timestamp_ms = ((value if value.tzinfo else value.replace(tzinfo=timezone.utc)) - _EPOCH) // timedelta(milliseconds=1)
    elif isinstance(value, date):
        timestamp_ms = (value.toordinal() - _EPOCH.toordinal()) * DURATION_UNITS_MS["d"]
    elif isinstance(value, FromEnvironment) and re.fullmatch("[0-9]{1,18}", value):
        timestamp_ms = int(value)
    elif isinstance(value, str):
        timestamp_ms = parse_iso_8601(value)
    elif type(value) is int:
        timestamp_ms = value
    if timestamp_ms is None:
        right = "write ISO 8601, such as `2026-01-01T00:00:00Z`, or epoch milliseconds"
        raise RefusedError("{path}: {value} is no time; " + right, "timestamp", given=(value,))
    if not 0 <= timestamp_ms <= LAST_EVENT_TIME_MS:
        right = "it must lie from 1970 to the year 9999"
        raise RefusedError("{path}: {value} is out of range; " + right, "timestamp", given=(value,))
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


def _schema_file(value: object, info: ValidationInfo) -> Path | None:
    if value is None or isinstance(value, Path):
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


def _kafka_options(value: object) -> dict[str, str]:
    """Every value becomes text, as librdkafka takes it; a refusal names the option and never shows its value."""
    if not isinstance(value, Mapping):
        raise RefusedError(f"{{path}} must be a mapping, not {kind_of(value)}")
    return {str(name): _kafka_option(str(name), given) for name, given in value.items()}


def _kafka_option(name: str, value: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):  # perhaps `name=value`, so it is not shown
        raise RefusedError("{path} has a name that is no option of librdkafka; write `name: value`")
    if OWN_OPTIONS.fullmatch(name):
        raise RefusedError("{path} is set by Watersmeet itself; leave it out", name)
    if name.startswith("kafka."):
        raise RefusedError("{path}: options are named as librdkafka names them; leave out the leading `kafka.`", name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int, float)):
        raise RefusedError(f"{{path}} must be text, a number, true or false, not {kind_of(value)}", name)
    return str(value)


def _named_sources(value: object) -> object:
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
Count = Annotated[int, BeforeValidator(_count)]
Location = Annotated[str, BeforeValidator(_location)]
Name = Annotated[str, _matching("[A-Za-z0-9._-]+", "no name; use letters, digits, `-`, `_` and `.`")]
Identifier = Annotated[str, _matching(r"[^\s`./]+", "no name in a catalog; leave out blanks, dots, slashes and backticks")]
TopicName = Annotated[
    str, _matching(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}", "no topic name; Kafka takes letters, digits, `.`, `_` and `-`")
]
DottedPath = Annotated[str, _matching(r"[^.]+(\.[^.]+)*", "no dotted path; join field names by single dots, such as `meta.ts`")]
_SERVER = r"\s*([A-Za-z0-9_]+://)?(\[[0-9A-Fa-f:.]+\]|[^\s,:/\[\]]+):[0-9]{1,5}\s*"
Servers = Annotated[str, _matching(f"{_SERVER}(,{_SERVER})*", "no list of brokers; write host:port, separated by commas")]


# -- the parts of the configuration


class _Part(BaseModel):
    """A mapping that has the fields of its class, under their names in YAML, and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _has_its_own_fields(cls, data: object, info: ValidationInfo) -> object:
        if info.context is None:  # built in Python, by the names of the attributes
            return data
        if not isinstance(data, Mapping):
            raise RefusedError(f"{{path}} must be a mapping, not {kind_of(data)}")
        fields = {str(field.validation_alias or name): field for name, field in cls.model_fields.items()}
        for name in data:
            if name not in fields:
                raise RefusedError(f"unknown field `{{path}}`; {known_instead(str(name), list(fields))}", str(name))
        for name, field in fields.items():
            if field.is_required() and name not in data:
                example = f", such as `{name}: {field.examples[0]}`" if field.examples else ""
                raise RefusedError(f"required field `{{path}}` is missing; add it{example}", name)
        return data


class CatalogLake(_Part):
    """A lake whose tables live in a schema of a catalog (Unity Catalog)."""

    catalog: Identifier = Field(examples=["main"])
    schema_name: Identifier = Field(validation_alias="schema", examples=["shop"])


@dataclass(frozen=True)
class StartTimestamp:
    """Reading begins at the first record whose Kafka timestamp is this or later."""

    timestamp_ms: int

    def __str__(self) -> str:
        """As in YAML, in UTC."""
        time = (_EPOCH + timedelta(milliseconds=self.timestamp_ms)).replace(tzinfo=None)
        return f"{{timestamp: {time.isoformat(timespec='milliseconds')}Z}}"


@dataclass(frozen=True)
class StartOffsets:
    """Reading begins at these offsets, by source and partition; a partition that is not named, at the earliest."""

    offsets: dict[str, dict[int, int]]

    def __str__(self) -> str:
        """As in YAML, partitions in order."""
        by_source = (f"{source}: {_flow(offsets)}" for source, offsets in self.offsets.items())
        return f"{{offsets: {{{', '.join(by_source)}}}}}"


def _flow(offsets: Mapping[int, int]) -> str:
    return f"{{{', '.join(f'{partition}: {offset}' for partition, offset in sorted(offsets.items()))}}}"


class KafkaSettings(_Part):
    """Where Kafka is and how it is read; `repr` never shows the values of `options`."""

    bootstrap_servers: Servers = Field(examples=["127.0.0.1:9092"])
    options: Annotated[dict[str, str], BeforeValidator(_kafka_options)] = {}
    start: Annotated[Literal["earliest", "latest", "sink"] | StartTimestamp | StartOffsets, BeforeValidator(_start)] = "earliest"
    max_offsets_per_batch: Count = 500_000
    on_data_loss: Annotated[Literal["stop", "continue"], _choice("stop", "continue")] = "stop"
    quarantine_limit: Annotated[float, BeforeValidator(_share)] = 0.5

    def __repr_args__(self) -> Any:
        for name, value in super().__repr_args__():
            yield name, dict.fromkeys(self.options, "***") if name == "options" else value


class Heartbeat(_Part):
    """A record is a heartbeat where the value's `field` equals `equals`."""

    field: DottedPath = Field(examples=["type"])
    equals: Annotated[str | int | float | bool, BeforeValidator(_scalar)] = Field(examples=["heartbeat"])


class SourceSettings(_Part):
    """One topic of the merge, and where its records carry their key and their event time."""

    topic: TopicName = Field(examples=["tracking"])
    format: Annotated[Literal["json"], _choice("json", later=("avro",))] = "json"
    schema_path: Annotated[Path | None, BeforeValidator(_schema_file)] = Field(default=None, validation_alias="schema")
    key: DottedPath | None = None
    event_time: DottedPath = Field(examples=["ts"])
    heartbeat: Heartbeat | None = None

    @cached_property
    def value_schema(self) -> ValueSchema | None:
        """The schema of the values, read from its file once; raises ConfigurationError where it cannot be one."""
        return load_value_schema(self.schema_path) if self.schema_path else None

    @property
    def value_type(self) -> str:
        """What a value is in silver, as Spark names the type: the JSON text, or the schema's struct."""
        return f"STRUCT<{self.value_schema.ddl}>" if self.value_schema else "STRING"

    def reading_rules(self, max_future_ms: int) -> ReadingRules:
        """How this source's records are read."""
        return ReadingRules(
            event_time=tuple(self.event_time.split(".")),
            max_future_ms=max_future_ms,
            key=tuple(self.key.split(".")) if self.key else None,
            heartbeat=(tuple(self.heartbeat.field.split(".")), self.heartbeat.equals) if self.heartbeat else None,
            schema=self.value_schema,
        )


class MergeSettings(_Part):
    """How long a merge record stays open, and what a batch may take."""

    timeout_ms: Annotated[int, BeforeValidator(_positive_duration)] = Field(validation_alias="timeout", examples=["30m"])
    max_future_ms: Annotated[int, BeforeValidator(_duration)] = Field(default=86_400_000, validation_alias="max_future")
    max_records_per_batch: Count = 1_000_000
    idle_after_ms: Annotated[int | None, BeforeValidator(_idle_after)] = Field(default=None, validation_alias="idle_after")


class SilverSettings(_Part):
    """How the table of the merge is kept."""

    change_data_feed: Flag = False


class PublishSettings(_Part):
    """The sink, which merge records go there, and as what."""

    topic: TopicName = Field(examples=["merged"])
    valid: Text = "true"
    value: Text | None = None
    max_bytes: Annotated[int, BeforeValidator(_size)] = 8 * 2**20
    delivery: Annotated[
        Literal["exactly_once", "at_least_once", "at_most_once"], _choice("exactly_once", "at_least_once", "at_most_once")
    ] = "exactly_once"


def _shape_of_lake(value: object) -> str:
    return "<catalog>" if isinstance(value, (Mapping, CatalogLake)) else "<location>"


class Settings(_Part):
    """The whole configuration; paths are absolute, durations in ms, sizes in bytes, sources in their written order."""

    name: Name = Field(examples=["shop"])
    lake: Annotated[
        Annotated[Location, Tag("<location>")] | Annotated[CatalogLake, Tag("<catalog>")], Discriminator(_shape_of_lake)
    ] = Field(examples=["./lake"])
    checkpoints: Location = Field(default=None, validate_default=True)
    kafka: KafkaSettings
    sources: Annotated[dict[str, SourceSettings], BeforeValidator(_named_sources)]
    merge: MergeSettings
    silver: SilverSettings = SilverSettings()
    publish: PublishSettings
    retention_ms: Annotated[int, BeforeValidator(_retention)] = Field(default=604_800_000, validation_alias="retention")

    @property
    def digest(self) -> str:
        """Of everything but places and how one gets in: the same for two runs that were told to do the same."""
        places: Any = {
            "lake": True,
            "checkpoints": True,
            "kafka": {"options", "bootstrap_servers"},
            "sources": {"__all__": {"schema_path"}},
        }
        told = self.model_dump_json(exclude=places)
        schemas = [source.value_type for source in self.sources.values()]
        return f"sha256 {hashlib.sha256(repr((told, schemas)).encode()).hexdigest()[:16]}"

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _beside_the_tables(cls, value: object, info: ValidationInfo) -> object:
        if value is not None or "lake" not in info.data:
            return value
        if isinstance(info.data["lake"], CatalogLake):
            raise RefusedError("`{path}` is needed where the lake is a catalog; name a folder or an object-store URI")
        return f"{info.data['lake']}/_checkpoints"

    @model_validator(mode="after")
    def _reads_and_writes_each_topic_once(self) -> "Settings":
        read_by: dict[str, str] = {}
        for name, source in self.sources.items():
            if source.topic in read_by:
                other = read_by[source.topic]
                sentence = f"{{path}} is the topic of source `{other}` too; give each source a topic of its own"
                raise RefusedError(sentence, "sources", name, "topic")
            read_by[source.topic] = name
        if self.publish.topic in read_by:
            other = read_by[self.publish.topic]
            sentence = f"{{path}} is the topic of source `{other}` too; publish to another topic"
            raise RefusedError(sentence, "publish", "topic")
        return self

    @model_validator(mode="after")
    def _begins_with_its_own_sources(self) -> "Settings":
        if isinstance(self.kafka.start, StartOffsets):
            for name in self.kafka.start.offsets:
                if name not in self.sources:
                    instead = known_instead(name, list(self.sources))
                    raise RefusedError(f"{{path}} names no source; {instead}", "kafka", "start", "offsets", name)
        return self


def load_settings(path: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """What is loaded is complete and sound, or else nothing: raises ConfigurationError with one sentence."""
    try:
        values = read_values(path, os.environ if environ is None else environ)
        return Settings.model_validate(values, context={"folder": path.absolute().parent})
    except ValidationError as error:
        sentence = first_sentence(error)
    except RefusedError as refusal:
        sentence = sentence_of(refusal.sentence, refusal.at, None)
    except RecursionError:
        sentence = "is no usable YAML: mappings or lists without an end to their levels; write out what contains itself"
    # Raised outside the handlers, so that no cause with the values in it hangs on this error.
    raise ConfigurationError(f"{path}: {sentence}")

"""The configuration, typed: nonsense is refused here, in one sentence, before anything is read or started.

A sentence says what is wrong, where (file and dotted path) and what would be right. It never holds a value that came
from the environment, nor one of `kafka.options`: either may be a secret.
"""

import difflib
import math
import os
import re
from collections.abc import Mapping
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import yaml
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
from pipelines.core.reading import ReadingRules
from pipelines.errors import ConfigurationError

DURATION_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
SIZE_UNITS: Final = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# Event times end with the year 9999, so nothing longer can mean anything; and sums of two stay far inside a bigint.
LONGEST_DURATION_MS: Final = 253_402_300_799_999
# Row limits of Spark are 32-bit.
LARGEST_COUNT: Final = 2**31 - 1
# librdkafka sends at most 1 000 000 000 bytes in one message, key and headers included.
LARGEST_MESSAGE: Final = 999_000_000

# Columns of silver, and `key`, which stands beside the sources in a published message.
RESERVED_NAMES: Final = frozenset(
    ["partition", "merge_key", "status", "event_time", "last_event_time", "valid", "invalid_reason", "batch", "key"]
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


class _RefusedError(ValueError):
    """One sentence with {path} and {value} open; `at` leads from the part that refuses to the place that is wrong."""

    def __init__(self, sentence: str, *at: str) -> None:
        super().__init__(sentence)
        self.sentence, self.at = sentence, at


class _FromEnvironment(str):
    """Text that holds the value of an environment variable, and so is never shown."""

    names: str


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
        raise _RefusedError("{path}: {value} " + _NO_DURATION) from None


def _positive_duration(value: object, info: ValidationInfo) -> int:
    duration_ms = _duration(value, info)
    if duration_ms <= 0:
        raise _RefusedError("{path}: {value} is too short; it must be longer than nothing, such as `30m`")
    return duration_ms


def _number(value: object, largest: int, units: Mapping[str, int], right: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([A-Za-z]*)", value) if isinstance(value, str) else None
    # Bare digits in quotes are text, but a variable has no other way to give a number.
    if match and match[2] in units and (match[2] or isinstance(value, _FromEnvironment)):
        value = int(match[1]) * units[match[2]]
    if type(value) is not int or not 1 <= value <= largest:
        raise _RefusedError(f"{{path}}: {{value}} is not {right} from 1 to {largest}")
    return value


def _count(value: object) -> int:
    return _number(value, LARGEST_COUNT, {"": 1}, "a whole number")


def _size(value: object) -> int:
    return _number(value, LARGEST_MESSAGE, SIZE_UNITS, "a size in bytes (such as `8MiB`, or a whole number)")


def _text(value: object) -> str:
    if not isinstance(value, str):
        hint = "" if isinstance(value, (list, Mapping)) or value is None else "; put it in quotes"
        raise _RefusedError(f"{{path}} must be text, not {_kind(value)}{hint}")
    if not value.strip():
        raise _RefusedError("{path} must not be empty")
    return str(value)


def _matching(pattern: str, wrong: str) -> BeforeValidator:
    def matching(value: object) -> str:
        text = _text(value)
        if not re.fullmatch(pattern, text):
            raise _RefusedError("{path}: {value} is " + wrong)
        return text

    return BeforeValidator(matching)


def _choice(*usable: str, later: tuple[str, ...] = (), later_mappings: tuple[str, ...] = ()) -> BeforeValidator:
    """One of a few words; what the contract knows but this version lacks is told apart from what never was right."""

    def choice(value: object) -> str:
        if isinstance(value, str) and value in usable:
            return str(value)
        right = " or ".join(usable)
        if value in later or (isinstance(value, Mapping) and len(value) == 1 and set(value) <= set(later_mappings)):
            raise _RefusedError(_NOT_YET + right)
        raise _RefusedError("{path}: {value} is none of the values it may have; use " + right)

    return BeforeValidator(choice)


def _no_idle_policy_yet(value: object, info: ValidationInfo) -> None:
    if value is not None:
        _positive_duration(value, info)
        raise _RefusedError(_NOT_YET + "null")


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
        raise _RefusedError("{path}: {value} is no file that can be read; paths start at this file's folder") from None
    return path


def _absolute(text: str, info: ValidationInfo) -> Path:
    folder: Path = info.context["folder"] if info.context else Path.cwd()
    try:
        return (folder / Path(text).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, no home folder, a null character
        raise _RefusedError("{path}: {value} is no path; name one, absolute or from this file's folder") from None


def _scalar(value: object) -> str | int | float | bool:
    if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise _RefusedError(f"{{path}} must be text, a number, true or false, not {_kind(value)}")
    return str(value) if isinstance(value, str) else value


def _kafka_options(value: object) -> dict[str, str]:
    """Every value becomes text, as librdkafka takes it; a refusal names the option and never shows its value."""
    if not isinstance(value, Mapping):
        raise _RefusedError(f"{{path}} must be a mapping, not {_kind(value)}")
    return {str(name): _kafka_option(str(name), given) for name, given in value.items()}


def _kafka_option(name: str, value: object) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):  # perhaps `name=value`, so it is not shown
        raise _RefusedError("{path} has a name that is no option of librdkafka; write `name: value`")
    if OWN_OPTIONS.fullmatch(name):
        raise _RefusedError("{path} is set by Watersmeet itself; leave it out", name)
    if name.startswith("kafka."):
        raise _RefusedError("{path}: options are named as librdkafka names them; leave out the leading `kafka.`", name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int, float)):
        raise _RefusedError(f"{{path}} must be text, a number, true or false, not {_kind(value)}", name)
    return str(value)


def _named_sources(value: object) -> object:
    if not isinstance(value, Mapping):
        raise _RefusedError(f"{{path}} must be a mapping, not {_kind(value)}")
    for name in value:
        if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise _RefusedError("{path} is no name for a source; use a-z, 0-9 and _, with a letter first", str(name))
        if name in RESERVED_NAMES:
            raise _RefusedError(f"{{path}}: `{name}` is a name of the output itself; choose another", name)
    if len(value) < 2:
        raise _RefusedError(f"{{path}} must name two or more sources, not {len(value)}: a merge needs two")
    return value


Text = Annotated[str, BeforeValidator(_text)]
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
            raise _RefusedError(f"{{path}} must be a mapping, not {_kind(data)}")
        fields = {str(field.validation_alias or name): field for name, field in cls.model_fields.items()}
        for name in data:
            if name not in fields:
                raise _RefusedError(f"unknown field `{{path}}`; {_known_instead(str(name), list(fields))}", str(name))
        for name, field in fields.items():
            if field.is_required() and name not in data:
                example = f", such as `{name}: {field.examples[0]}`" if field.examples else ""
                raise _RefusedError(f"required field `{{path}}` is missing; add it{example}", name)
        return data


class CatalogLake(_Part):
    """A lake whose tables live in a schema of a catalog (Unity Catalog)."""

    catalog: Identifier = Field(examples=["main"])
    schema_name: Identifier = Field(validation_alias="schema", examples=["shop"])


class KafkaSettings(_Part):
    """Where Kafka is and how it is read; `repr` never shows the values of `options`."""

    bootstrap_servers: Servers = Field(examples=["127.0.0.1:9092"])
    options: Annotated[dict[str, str], BeforeValidator(_kafka_options)] = {}
    start: Annotated[
        Literal["earliest", "latest"],
        _choice("earliest", "latest", later=("sink",), later_mappings=("timestamp", "offsets")),
    ] = "earliest"
    max_offsets_per_batch: Count = 500_000
    on_data_loss: Annotated[Literal["stop"], _choice("stop", later=("continue",))] = "stop"

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
    idle_after: Annotated[None, BeforeValidator(_no_idle_policy_yet)] = None


class PublishSettings(_Part):
    """The sink, which merge records go there, and as what."""

    topic: TopicName = Field(examples=["merged"])
    valid: Text = "true"
    value: Text | None = None
    max_bytes: Annotated[int, BeforeValidator(_size)] = 8 * 2**20
    delivery: Annotated[Literal["exactly_once"], _choice("exactly_once", later=("at_least_once", "at_most_once"))] = (
        "exactly_once"
    )


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
    publish: PublishSettings

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _beside_the_tables(cls, value: object, info: ValidationInfo) -> object:
        if value is not None or "lake" not in info.data:
            return value
        if isinstance(info.data["lake"], CatalogLake):
            raise _RefusedError("`{path}` is needed where the lake is a catalog; name a folder or an object-store URI")
        return f"{info.data['lake']}/_checkpoints"

    @model_validator(mode="after")
    def _reads_and_writes_each_topic_once(self) -> "Settings":
        read_by: dict[str, str] = {}
        for name, source in self.sources.items():
            if source.topic in read_by:
                other = read_by[source.topic]
                sentence = f"{{path}} is the topic of source `{other}` too; give each source a topic of its own"
                raise _RefusedError(sentence, "sources", name, "topic")
            read_by[source.topic] = name
        if self.publish.topic in read_by:
            other = read_by[self.publish.topic]
            sentence = f"{{path}} is the topic of source `{other}` too; publish to another topic"
            raise _RefusedError(sentence, "publish", "topic")
        return self


# -- from a file


def load_settings(path: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """What is loaded is complete and sound, or else nothing: raises ConfigurationError with one sentence."""
    try:
        values = _substituted(_read_yaml(path), os.environ if environ is None else environ)
        return Settings.model_validate(values, context={"folder": path.absolute().parent})
    except ValidationError as error:
        sentence = _first_sentence(error)
    except _RefusedError as refusal:
        sentence = _sentence(refusal.sentence, refusal.at, None)
    except RecursionError:
        sentence = "is no usable YAML: mappings or lists without an end to their levels; write out what contains itself"
    # Raised outside the handlers, so that no cause with the values in it hangs on this error.
    raise ConfigurationError(f"{path}: {sentence}")


def _read_yaml(path: Path) -> object:
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        document = loader.get_single_node()
        _refuse_repeated_keys(document, (), set())
        values: object = None if document is None else loader.construct_document(document)
    except OSError as error:
        raise _RefusedError(f"cannot be read ({error.strerror}); name another file with -c, or write one with `init`") from None
    except yaml.YAMLError as error:
        raise _RefusedError(_yaml_problem(error)) from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        if isinstance(error, _RefusedError):
            raise
        raise _RefusedError("is no valid YAML: a value does not fit its tag or type; put text in quotes") from None
    if values is None:
        raise _RefusedError("is empty; write a configuration, or let `init` write an example")
    if not isinstance(values, dict):
        raise _RefusedError(f"must be a mapping of fields, not {_kind(values)}")
    return values


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    # What stands in the file may be a secret: PyYAML quotes an alias or a tag, which is a value without its quotes.
    what = re.sub(r"(alias|anchor|handle|tag) .*", r"\1", getattr(error, "problem", None) or "unreadable characters")
    return f"is no valid YAML{where}: {what}"


def _refuse_repeated_keys(node: yaml.Node | None, at: tuple[str, ...], seen: set[int]) -> None:
    """YAML keeps the last of two equal keys in silence, and with it a mistake."""
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, at, seen)
    elif isinstance(node, yaml.MappingNode):
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            name = str(key.value)
            if (key.tag, name) in keys:
                raise _RefusedError(f"field `{{path}}` is written again in line {key.start_mark.line + 1}; keep one", *at, name)
            keys.add((key.tag, name))
            _refuse_repeated_keys(value, (*at, name), seen)


def _substituted(value: object, environ: Mapping[str, str], *at: str) -> object:
    """Every `${NAME}` in a value is replaced once; what a variable holds is not looked into again."""
    if isinstance(value, dict):
        return {key: _substituted(item, environ, *at, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_substituted(item, environ, *at) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    names: list[str] = []

    def lookup(match: re.Match[str]) -> str:
        name = match[1] or ""
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            raise _RefusedError("{path}: after `${` must come the name of an environment variable and `}`", *at)
        if name not in environ:
            raise _RefusedError(f"{{path}}: the environment variable {name} is not set; set it", *at)
        names.append(f"${{{name}}}")
        return environ[name]

    text = _FromEnvironment(re.sub(r"\$\{(?:([^{}]*)\})?", lookup, value))
    text.names = "".join(names)
    return text


# -- sentences


def _first_sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    at = tuple(str(step) for step in first["loc"] if not str(step).startswith("<"))
    refusal = first.get("ctx", {}).get("error")
    if isinstance(refusal, _RefusedError):
        return _sentence(refusal.sentence, at + refusal.at, first["input"])
    return _sentence("{path}: " + first["msg"], at, None)


def _sentence(sentence: str, at: tuple[str, ...], value: object) -> str:
    # The value last: it may hold braces of its own.
    return sentence.replace("{path}", ".".join(at)).replace("{value}", _shown(value))


def _shown(value: object) -> str:
    if isinstance(value, _FromEnvironment):
        return f"the value of {value.names}"
    if isinstance(value, Mapping):
        return f"`{{{', '.join(f'{key}: ...' for key in value)}}}`"
    if value is None or isinstance(value, (bool, list)):
        return _kind(value)
    text = " ".join(str(value).split())
    return f"`{text if len(text) <= 80 else text[:77] + '...'}`"


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return "text"
    if isinstance(value, (int, float)):
        return "a number"
    if isinstance(value, (Mapping, list)):
        return "a list" if isinstance(value, list) else "a mapping"
    return "a date" if isinstance(value, date) else "a tagged value"


def _known_instead(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=2)
    if close:
        return f"did you mean {' or '.join(f'`{match}`' for match in close)}?"
    return f"known here: {', '.join(known)}"

"""A source of the configuration, typed, and the base of every part of the configuration."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from watersmeet.configuration import values as kinds
from watersmeet.configuration.file import RefusedError, known_instead
from watersmeet.core.texts import parse_path

if TYPE_CHECKING:  # heavy: the command line is ready before they are needed
    import pyarrow as pa

    from watersmeet.core.avro_schema import AvroSchema
    from watersmeet.core.json_schema import ValueSchema
    from watersmeet.core.reading import ReadingRules


_P = TypeVar("_P", bound="Part")
_SECRET = frozenset(["options", "storage", "spark"])


class Part(BaseModel):
    """A mapping with the fields of its class alone, by their YAML names; `repr` shows no secret."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,
        # In YAML a value says its unit itself.
        alias_generator=AliasGenerator(validation_alias=lambda name: name.removesuffix("_ms")),
    )

    @model_validator(mode="before")
    @classmethod
    def _has_its_own_fields(cls, data: object, info: ValidationInfo) -> object:
        # Built in Python, by the names of the attributes; or no part.
        if info.context is None or not isinstance(data, Mapping):
            return data
        fields = {str(field.validation_alias): field for field in cls.model_fields.values()}
        refused: dict[str, RefusedError] = {}
        for name in map(str, data):
            if name not in fields:
                instead = known_instead(name, list(fields))
                refused[name] = RefusedError("unknown field `{path}`", fix=instead)
        for name, field in fields.items():
            if field.is_required() and name not in data:
                example = f", such as `{name}: {field.examples[0]}`" if field.examples else ""
                what = "required field `{path}` is missing"
                refused[name] = RefusedError(what, fix=f"add it{example}")
        if refused:
            raise ValidationError.from_exception_data(
                cls.__name__,
                [
                    {"type": "value_error", "loc": (name,), "input": None, "ctx": {"error": error}}
                    for name, error in refused.items()
                ],
                hide_input=True,
            )
        return data

    @classmethod
    def attributes(cls, *names: str) -> dict[str, str]:
        """Return these attributes by their names in YAML, in this order."""
        return {str(cls.model_fields[name].validation_alias): name for name in names}

    def changed(self: _P, **values: Any) -> _P:
        """Return the part with other values of some attributes, computed anew."""
        same = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**same | values)

    def __repr_args__(self) -> Any:
        for name, value in super().__repr_args__():
            yield name, dict.fromkeys(value, "***") if name in _SECRET else value


class Equality(Part):
    """A condition that holds for a record where the value's `field` equals `equals`."""

    field: kinds.DottedPath = Field(examples=["type"])
    equals: kinds.Scalar = Field(examples=["heartbeat"])

    @property
    def parts(self) -> tuple[tuple[str, ...], str | int | float | bool]:
        """The path, as field names from the outermost in, and the value to be found there."""
        return parse_path(self.field), self.equals


class FirstOf(Part):
    """Paths of which the first that leads to something but null counts."""

    first_of: Annotated[
        tuple[kinds.DottedPath, ...], Field(min_length=1), kinds.different_paths
    ] = Field(examples=["[after.id, before.id]"])


def _is_of(value: object, part: type[Part], name: str) -> bool:
    return isinstance(value, part) or (isinstance(value, Mapping) and name in value)


def _shape_of_paths(value: object) -> str:
    return "<first>" if isinstance(value, (Mapping, FirstOf)) else "<path>"


def _not_a_list(value: object) -> object:
    if isinstance(value, (list, tuple)):
        raise RefusedError(
            "{path} is a list, which does not say which of its paths counts",
            fix=f"write `{{first_of: [{', '.join(map(str, value))}]}}` for the first that is there",
        )
    return value


_Paths = Annotated[
    Annotated[kinds.DottedPath, Tag("<path>")] | Annotated[FirstOf, Tag("<first>")],
    Discriminator(_shape_of_paths),
    AfterValidator(
        lambda paths: (
            paths.first_of[0] if isinstance(paths, FirstOf) and len(paths.first_of) == 1 else paths
        )
    ),
    BeforeValidator(_not_a_list),
]
"""One path, or several of which the first that is there counts."""


class HeaderKey(Part):
    """The header of Kafka's that has the key."""

    header: kinds.Text = Field(examples=["user-id"])


def _shape_of_key(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "<all>"
    return "<header>" if _is_of(value, HeaderKey, "header") else "<paths>"


_Key = Annotated[
    Annotated[_Paths, Tag("<paths>")]
    | Annotated[
        tuple[_Paths, ...],
        Field(min_length=1),
        kinds.different_paths,
        AfterValidator(lambda paths: paths if len(paths) > 1 else paths[0]),
        Tag("<all>"),
    ]
    | Annotated[HeaderKey, Tag("<header>")],
    Discriminator(_shape_of_key),
]


class EventTime(Part):
    """The place of the event time in a value.

    `unit`: that of a number, and with `text` of a number in a string. Any other string is ISO 8601,
    in `zone` where it names none (None: UTC).
    """

    field: _Paths = Field(examples=["ts"])
    unit: Literal["s", "ms", "us", "ns"] = "ms"
    text: kinds.Flag = False
    zone: kinds.ZoneName | None = None

    @model_serializer(mode="wrap")
    def _is_kept_as_before_there_were_text_and_zone(
        self, serialize: SerializerFunctionWrapHandler
    ) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {
            name: value for name, value in document.items() if name not in ("text", "zone") or value
        }


class KafkaTime(Part):
    """Kafka's own timestamp of a record as its event time."""

    kafka: Literal["timestamp"] = Field(examples=["timestamp"])


def _shape_of_event_time(value: object) -> str:
    if _is_of(value, KafkaTime, "kafka"):
        return "<kafka>"
    is_parts = isinstance(value, (Mapping, EventTime)) and not _is_of(value, FirstOf, "first_of")
    return "<parts>" if is_parts else "<paths>"


def recorded(rule: Any) -> Any:
    """Return a dumped rule as lakes record it: a list there is the first path that is there."""
    match rule:
        case {"first_of": paths}:
            return [*paths]
        case list() | tuple():
            return {"all_of": [recorded(paths) for paths in rule]}
        case {"field": paths}:
            return {**rule, "field": recorded(paths)}
    return rule


def written(rule: Any) -> Any:
    """Return the rule of a key or an event time that a lake has recorded as it is configured."""
    match rule:
        case list() | tuple():
            return {"first_of": [*rule]}
        case {"all_of": parts}:
            return [written(paths) for paths in parts]
        case {"field": paths}:
            return {**rule, "field": written(paths)}
    return rule


def spelled(rule: Any) -> str:
    """Return the dumped rule of a key or an event time as one line of YAML."""
    text = yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.removesuffix("...\n").rstrip()


def _as_tuple(topics: str | tuple[str, ...]) -> tuple[str, ...]:
    return (topics,) if isinstance(topics, str) else topics


def _parsed(paths: str | FirstOf) -> tuple[tuple[str, ...], ...]:
    return tuple(map(parse_path, (paths,) if isinstance(paths, str) else paths.first_of))


class RegistrySettings(Part):
    """The schema registry (of Confluent's API) with the schemas of a source's writers."""

    url: kinds.Url = Field(examples=["http://127.0.0.1:8081"], repr=False)
    options: kinds.RegistryOptions = {}
    unknown_after_ms: kinds.PositiveDuration | None = None


class RepartitionSettings(Part):
    """The topics that a source's records come from, and the partitions of the source's own."""

    origin: kinds.Topics = Field(validation_alias="from", examples=["clicks"])
    partitions: kinds.Partitions = Field(examples=["6"])

    @property
    def from_topics(self) -> tuple[str, ...]:
        """The topics that the records come from, in ascending order."""
        return _as_tuple(self.origin)


class SourceSettings(Part):
    """One topic, or several that are alike, and where their records carry key and event time."""

    topic: kinds.Topics = Field(examples=["tracking"])
    id_path: kinds.DottedPath | None = Field(default=None, validation_alias="id")
    repartition: RepartitionSettings | None = None
    format: Literal["json", "avro"] = "json"
    schema_file: kinds.Schema | None = Field(default=None, validation_alias="schema")
    registry: RegistrySettings | None = None
    key: _Key | None = None
    tenant: kinds.DottedPath | None = None
    event_time: Annotated[
        Annotated[_Paths, Tag("<paths>")]
        | Annotated[EventTime, Tag("<parts>")]
        | Annotated[KafkaTime, Tag("<kafka>")],
        Discriminator(_shape_of_event_time),
    ] = Field(examples=["ts"])
    tombstone: Literal["quarantine", "skip"] = "quarantine"
    where: Equality | None = None
    heartbeat: Equality | None = None
    _had_id: bool = PrivateAttr(default=False)

    @property
    def has_id(self) -> bool:
        """True where records have an id, or have had one in a living lake."""
        return self._had_id or self.id_path is not None

    def after(self, before: "SourceSettings") -> "SourceSettings":
        """Return these settings as the next ones of a lake, after `before`."""
        settings = self.model_copy()
        settings._had_id = before.has_id
        return settings

    @property
    def is_bare_avro(self) -> bool:
        """True where values are Avro that does not name the schema it was written with."""
        return self.format == "avro" and not self.registry

    @property
    def unknown_after_ms(self) -> int | None:
        """Time (ms) for which a schema is waited for that the registry lacks; None: for ever."""
        return self.registry.unknown_after_ms if self.registry else None

    @field_validator("topic")
    @classmethod
    def _is_a_name_where_there_is_one(cls, topic: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return topic[0] if isinstance(topic, tuple) and len(topic) == 1 else topic

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics, in the order of their names: one or more."""
        return _as_tuple(self.topic)

    @field_validator("event_time")
    @classmethod
    def _is_a_path_where_the_rest_is_usual(
        cls, event_time: str | FirstOf | EventTime | KafkaTime
    ) -> str | FirstOf | EventTime | KafkaTime:
        if isinstance(event_time, EventTime) and event_time == EventTime(field=event_time.field):
            return event_time.field
        return event_time

    @property
    def time(self) -> EventTime | None:
        """The place of the event time, however that is written; None: Kafka's own timestamp."""
        if isinstance(self.event_time, KafkaTime):
            return None
        if isinstance(self.event_time, EventTime):
            return self.event_time
        return EventTime(field=self.event_time)

    @property
    def _keys(self) -> tuple[str | FirstOf, ...]:
        if self.key is None or isinstance(self.key, HeaderKey):
            return ()
        return self.key if isinstance(self.key, tuple) else (self.key,)

    @model_validator(mode="after")
    def _is_readable(self, info: ValidationInfo) -> "SourceSettings":
        if info.context is None:  # built in Python, perhaps of a lake that has had no schema yet
            return self
        if self.format == "avro" and self.schema_file is None:
            fix = "Avro cannot be read without it, so name a file"
            raise RefusedError("required field `{path}` is missing", "schema", fix=fix)
        if self.registry is not None and self.format != "avro":
            raise RefusedError("{path} is for `format: avro` alone", "registry", fix="leave it out")
        if self.repartition is not None and len(self.topics) > 1:
            what = "{path} is not possible where the source has several topics"
            raise RefusedError(what, "repartition", fix="name one topic")
        return self

    @cached_property
    def value_schema(self) -> "ValueSchema | AvroSchema | None":
        """The schema of the values; raises ConfigurationError where the file holds none."""
        from watersmeet.core.json_schema import value_schema

        if self.format == "avro" or self.schema_file is None:
            return self.avro_schema
        return value_schema(self.schema_file.text, self.schema_file.path)

    @cached_property
    def avro_schema(self) -> "AvroSchema | None":
        """The schema of Avro values, without its writers' schemas; raises ConfigurationError."""
        from watersmeet.core.avro_schema import avro_schema

        if self.format != "avro" or self.schema_file is None:
            return None
        writers: Mapping[int, str] | None = None if self.is_bare_avro else {}
        schema = avro_schema(self.schema_file.text, self.schema_file.path, writers)
        earlier = [source.avro_schema for source in self._earlier]
        return replace(schema, earlier=tuple(filter(None, earlier)), since=self.schema_file.since)

    @property
    def has_earlier_schemas(self) -> bool:
        """True where the lake has had other schemas of the source."""
        return self.schema_file is not None and bool(self.schema_file.earlier)

    @property
    def _earlier(self) -> "list[SourceSettings]":
        earlier = self.schema_file.earlier if self.schema_file else ()
        return [self.changed(schema_file=file) for file in earlier]

    @cached_property
    def read_type(self) -> "pa.DataType":
        """The type as which a value is read: text, or the schema's struct."""
        import pyarrow as pa

        return self.value_schema.type if self.value_schema else pa.string()

    @cached_property
    def value_type(self) -> "pa.DataType":
        """The type of a value in silver: text, or a struct of this and all earlier schemas."""
        from watersmeet.core.types import widened

        return reduce(widened, [*(source.read_type for source in self._earlier), self.read_type])

    def clashing_fields(self) -> list[tuple[str, str]]:
        """Return the fields that `core.types.clashes` finds against earlier schemas."""
        from watersmeet.core.types import clashes, widened

        earlier = [source.read_type for source in self._earlier]
        return list(clashes(reduce(widened, earlier), self.read_type)) if earlier else []

    def reading_rules(
        self, max_future_ms: int, tenant: str | None = None, *, leaves_undecodable: bool = False
    ) -> "ReadingRules":
        """Return the rules by which this source's records are read.

        `tenant`: the path of their tenant, if any. `leaves_undecodable`: records that cannot be
        decoded are left to another source of the same topic.
        """
        from watersmeet.core.reading import ReadingRules

        time = self.time
        return ReadingRules(
            event_times=_parsed(time.field) if time else (),
            max_future_ms=max_future_ms,
            keys=tuple(map(_parsed, self._keys)),
            key_header=self.key.header if isinstance(self.key, HeaderKey) else None,
            where=self.where.parts if self.where else None,
            heartbeat=self.heartbeat.parts if self.heartbeat else None,
            schema=self.value_schema,
            unit=time.unit if time else "ms",
            skips_tombstones=self.tombstone == "skip",
            leaves_undecodable=leaves_undecodable,
            tenant=parse_path(tenant) if tenant else None,
            reads_text=time is not None and time.text,
            zone=time.zone if time else None,
        )

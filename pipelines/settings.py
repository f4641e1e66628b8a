"""The configuration, typed: nonsense is refused here, in one sentence, before anything is read or started.

A sentence says what is wrong, where (file and dotted path) and what would be right. It never holds a value that came
from the environment, nor one of `kafka.options` or `storage`: either may be a secret.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pipelines import settings_values as kinds
from pipelines.errors import ConfigurationError
from pipelines.settings_file import RefusedError, first_sentence, known_instead, read_values, sentence_of
from pipelines.settings_values import RESERVED_NAMES, StartOffsets, StartTimestamp, parse_duration

if TYPE_CHECKING:  # heavy: the command line is ready before they are needed
    import pyarrow as pa

    from pipelines.core.avro_schema import AvroSchema
    from pipelines.core.json_schema import ValueSchema
    from pipelines.core.reading import ReadingRules

__all__ = ["RESERVED_NAMES", "CatalogLake", "Settings", "StartOffsets", "StartTimestamp", "load_settings", "parse_duration"]


_MERGE_RULES = {"timeout": "timeout_ms", "max_future": "max_future_ms"}
_PUBLISH_RULES = {name: name for name in ("valid", "value", "max_bytes")}
_SOURCE_RULES = {"schema": "schema_file", **{name: name for name in ("key", "event_time", "where", "heartbeat", "tombstone")}}
"""What may change in a living lake: by name in YAML, the attribute."""

_SINCE = "schema_since"
"""Beside the rule `schema`, where one of bare Avro has changed: by partition the first offset whose value was written with it."""

_P = TypeVar("_P", bound="_Part")
_SECRET = frozenset(["options", "storage", "spark"])


class _Part(BaseModel):
    """A mapping that has the fields of its class, under their names in YAML, and no others; `repr` never shows a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _has_its_own_fields(cls, data: object, info: ValidationInfo) -> object:
        if info.context is None or not isinstance(data, Mapping):  # built in Python, by the names of the attributes; or no part
            return data
        fields = {str(field.validation_alias or name): field for name, field in cls.model_fields.items()}
        for name in data:
            if name not in fields:
                raise RefusedError(f"unknown field `{{path}}`; {known_instead(str(name), list(fields))}", str(name))
        for name, field in fields.items():
            if field.is_required() and name not in data:
                example = f", such as `{name}: {field.examples[0]}`" if field.examples else ""
                raise RefusedError(f"required field `{{path}}` is missing; add it{example}", name)
        return data

    def changed(self: _P, **values: Any) -> _P:
        """The part with other values of some attributes, and nothing computed from the old ones."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | values)

    def __repr_args__(self) -> Any:
        for name, value in super().__repr_args__():
            yield name, dict.fromkeys(value, "***") if name in _SECRET else value


class CatalogLake(_Part):
    """A lake whose tables live in a schema of a catalog (Unity Catalog)."""

    catalog: kinds.Identifier = Field(examples=["main"])
    schema_name: kinds.Identifier = Field(validation_alias="schema", examples=["shop"])


class KafkaSettings(_Part):
    """Where Kafka is and how it is read."""

    bootstrap_servers: kinds.Servers = Field(examples=["127.0.0.1:9092"])
    options: kinds.KafkaOptions = {}
    start: kinds.Start = "earliest"
    max_offsets_per_batch: kinds.Count = 500_000
    on_data_loss: Literal["stop", "continue"] = "stop"
    quarantine_limit: kinds.Share = 0.5


class Equality(_Part):
    """Holds for a record where the value's `field` equals `equals`."""

    field: kinds.DottedPath = Field(examples=["type"])
    equals: kinds.Scalar = Field(examples=["heartbeat"])

    @property
    def parts(self) -> tuple[tuple[str, ...], str | int | float | bool]:
        """The path, as field names from the outermost in, and what is to be found there."""
        return tuple(self.field.split(".")), self.equals


class EventTime(_Part):
    """Where a value has its event time; `unit` is that of a number: text is ISO 8601."""

    field: kinds.DottedPath = Field(examples=["ts"])
    unit: Literal["s", "ms", "us", "ns"] = "ms"


def _shape_of_event_time(value: object) -> str:
    return "<parts>" if isinstance(value, (Mapping, EventTime)) else "<path>"


class RegistrySettings(_Part):
    """The schema registry (of Confluent's API) that has the schemas which a source's values were written with."""

    url: kinds.Url = Field(examples=["http://127.0.0.1:8081"])
    options: kinds.RegistryOptions = {}


class RepartitionSettings(_Part):
    """The topic that a source's records come from, and how many partitions the source's own topic has."""

    from_topic: kinds.TopicName = Field(validation_alias="from", examples=["clicks"])
    partitions: kinds.Count = Field(examples=["6"])


class SourceSettings(_Part):
    """One topic of the merge, and where its records carry their key and their event time."""

    topic: kinds.TopicName = Field(examples=["tracking"])
    repartition: RepartitionSettings | None = None
    format: Literal["json", "avro"] = "json"
    schema_file: kinds.Schema | None = Field(default=None, validation_alias="schema")
    registry: RegistrySettings | None = None
    key: kinds.DottedPath | None = None
    event_time: Annotated[
        Annotated[kinds.DottedPath, Tag("<path>")] | Annotated[EventTime, Tag("<parts>")], Discriminator(_shape_of_event_time)
    ] = Field(examples=["ts"])
    tombstone: Literal["quarantine", "skip"] = "quarantine"
    where: Equality | None = None
    heartbeat: Equality | None = None

    @field_validator("event_time")
    @classmethod
    def _is_a_path_where_the_unit_is_usual(cls, found: "str | EventTime") -> "str | EventTime":
        return found.field if isinstance(found, EventTime) and found.unit == "ms" else found

    @property
    def time(self) -> EventTime:
        """Where the event time is, however that is written."""
        return EventTime(field=self.event_time) if isinstance(self.event_time, str) else self.event_time

    @model_validator(mode="after")
    def _is_readable(self, info: ValidationInfo) -> "SourceSettings":
        if info.context is None:  # built in Python, perhaps of a lake that has had no schema yet
            return self
        if self.format == "avro" and self.schema_file is None:
            raise RefusedError("required field `{path}` is missing; Avro cannot be read without it, so name a file", "schema")
        if self.registry is not None and self.format != "avro":
            raise RefusedError("{path} is for `format: avro` alone; leave it out", "registry")
        return self

    @cached_property
    def value_schema(self) -> "ValueSchema | AvroSchema | None":
        """The schema of the values; raises ConfigurationError where the file holds none."""
        from pipelines.core.json_schema import value_schema

        if self.format == "avro" or self.schema_file is None:
            return self.avro_schema
        return value_schema(self.schema_file.text, self.schema_file.path)

    @cached_property
    def avro_schema(self) -> "AvroSchema | None":
        """The schema of values that are Avro; raises ConfigurationError where the file holds none.

        With a registry, it does not know the schemas of its writers yet.
        """
        from pipelines.core.avro_schema import avro_schema

        if self.format != "avro" or self.schema_file is None:
            return None
        found = avro_schema(self.schema_file.text, self.schema_file.path, None if self.registry is None else {})
        earlier = [source.avro_schema for source in self._earlier]
        return replace(found, earlier=tuple(filter(None, earlier)), since=self.schema_file.since)

    @property
    def _earlier(self) -> "list[SourceSettings]":
        """The source with each schema that a living lake had in this one's place."""
        return [self.changed(schema_file=file) for file in self.schema_file.earlier] if self.schema_file else []

    @cached_property
    def read_type(self) -> "pa.DataType":
        """What a value is read as: text, or the schema's struct."""
        import pyarrow as pa

        return self.value_schema.type if self.value_schema else pa.string()

    @cached_property
    def value_type(self) -> "pa.DataType":
        """What a value is in silver: text, or a struct with the fields of the schema and of those before it."""
        from pipelines.core.types import widened

        return reduce(widened, [*(source.read_type for source in self._earlier), self.read_type])

    def reading_rules(self, max_future_ms: int, *, leaves_undecodable: bool = False) -> "ReadingRules":
        """How this source's records are read; `leaves_undecodable`: to another source of the same topic."""
        from pipelines.core.reading import ReadingRules

        return ReadingRules(
            event_time=tuple(self.time.field.split(".")),
            max_future_ms=max_future_ms,
            key=tuple(self.key.split(".")) if self.key else None,
            where=self.where.parts if self.where else None,
            heartbeat=self.heartbeat.parts if self.heartbeat else None,
            schema=self.value_schema,
            unit=self.time.unit,
            skips_tombstones=self.tombstone == "skip",
            leaves_undecodable=leaves_undecodable,
        )


class MergeSettings(_Part):
    """How long a merge record stays open, and what a batch may take."""

    timeout_ms: kinds.PositiveDuration = Field(validation_alias="timeout", examples=["30m"])
    max_future_ms: kinds.Duration = Field(default=86_400_000, validation_alias="max_future")
    max_records_per_batch: kinds.Count = 1_000_000
    idle_after_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="idle_after")


class SilverSettings(_Part):
    """How the table of the merge is kept."""

    change_data_feed: kinds.Flag = False


class PublishSettings(_Part):
    """The sink, which merge records go there, and as what."""

    topic: kinds.TopicName = Field(examples=["merged"])
    valid: kinds.Text = "true"
    value: kinds.Text | None = None
    max_bytes: kinds.Size = 8 * 2**20
    delivery: Literal["exactly_once", "at_least_once", "at_most_once"] = "exactly_once"
    late_topic: kinds.TopicName | None = None
    quarantine_topic: kinds.TopicName | None = None
    retention_ms: kinds.Retention | None = Field(default=None, validation_alias="retention")

    @property
    def dead_letter_topics(self) -> dict[str, str]:
        """Where dead letters go, by the table whose records they are: `late`, `quarantine`, or neither."""
        topics = {"late": self.late_topic, "quarantine": self.quarantine_topic}
        return {table: topic for table, topic in topics.items() if topic is not None}


class KeepSettings(_Part):
    """How long, in event time behind the clock, rows of a table are kept; None: for ever."""

    bronze_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="bronze")
    silver_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="silver")
    late_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="late")
    quarantine_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="quarantine")


class QualitySettings(_Part):
    """The user's suites of expectations, and after how many batches of silver a run checks them beside the stream."""

    suites: list[kinds.Schema] = []
    every: kinds.Count | None = None


class MetricsSettings(_Part):
    """Where the metrics of a run are served."""

    port: kinds.Port = Field(examples=["9464"])
    address: kinds.Text = "127.0.0.1"


class LineageSettings(_Part):
    """Where OpenLineage events go: one of the two."""

    file: kinds.Location | None = None
    url: kinds.Url | None = None

    @model_validator(mode="after")
    def _goes_to_one_place(self) -> "LineageSettings":
        if (self.file is None) == (self.url is None):
            raise RefusedError("`{path}` needs one of `file` and `url`; name a file, or the URL of an OpenLineage backend")
        return self


def _shape_of_lake(value: object) -> str:
    return "<catalog>" if isinstance(value, (Mapping, CatalogLake)) else "<location>"


class Settings(_Part):
    """The whole configuration; paths are absolute, durations in ms, sizes in bytes, sources in their written order."""

    name: kinds.Name = Field(examples=["shop"])
    engine: Literal["spark", "embedded"] = "spark"
    lake: Annotated[
        Annotated[kinds.Location, Tag("<location>")] | Annotated[CatalogLake, Tag("<catalog>")], Discriminator(_shape_of_lake)
    ] = Field(examples=["./lake"])
    storage: kinds.Options = {}
    spark: kinds.Options = {}
    checkpoints: kinds.Location = Field(default=None, validate_default=True)
    kafka: KafkaSettings
    sources: dict[kinds.SourceName, SourceSettings] = Field(min_length=2)
    merge: MergeSettings
    silver: SilverSettings = SilverSettings()
    publish: PublishSettings
    retention_ms: kinds.Retention = Field(default=604_800_000, validation_alias="retention")
    keep: KeepSettings = KeepSettings()
    quality: QualitySettings = QualitySettings()
    metrics: MetricsSettings | None = None
    lineage: LineageSettings | None = None

    def reading_rules(self, source: str) -> "ReadingRules":
        """How a source's records are read. Of the sources of one topic, the first one refuses what none of them can decode."""
        mine = self.sources[source]
        first = next(name for name, other in self.sources.items() if other.topic == mine.topic)
        return mine.reading_rules(self.merge.max_future_ms, leaves_undecodable=source != first)

    def rules(self) -> dict[str, Any]:
        """Everything that decides what comes out and may change in a living lake, by dotted path, as JSON values."""
        found = {}
        for *path, part, names in self._ruled():
            values = part.model_dump(include=set(names.values()))
            for name, attribute in names.items():
                found[".".join([*path, name])] = values[attribute] if name != "schema" else _schema_text(part.schema_file)
            if "schema" in names and part.schema_file and part.schema_file.since:
                found[".".join([*path, _SINCE])] = {str(p): offset for p, offset in part.schema_file.since.items()}
        return found

    def under(self, rules: Mapping[str, Any]) -> "Settings":
        """These settings with the rules that `rules` gave of others, which came after these."""
        changed: dict[tuple[str, ...], _Part] = {}
        for *path, part, names in self._ruled():
            values = {}
            for name, attribute in names.items():
                field, of_part = ".".join([*path, name]), type(part).model_fields[attribute]
                if field in rules:
                    values[attribute] = rules[field]
                elif not of_part.is_required():  # it was not yet a choice when the rules were kept
                    values[attribute] = of_part.default
            if "schema_file" in values:
                since = rules.get(".".join([*path, _SINCE]), {})
                values["schema_file"] = _next_schema(part.schema_file, values["schema_file"], since)
            changed[tuple(path)] = part.changed(**values)
        sources = {name: changed["sources", name] for name in self.sources}
        return self.model_copy(update={"merge": changed["merge",], "publish": changed["publish",], "sources": sources})

    @property
    def repartitioned(self) -> dict[str, RepartitionSettings]:
        """How topics are repartitioned, by the source whose topic is written."""
        return {name: source.repartition for name, source in self.sources.items() if source.repartition is not None}

    def without_schemas(self) -> "Settings":
        """These settings as those of a lake that has had no schema yet."""
        sources = {name: source.changed(schema_file=None) for name, source in self.sources.items()}
        return self.model_copy(update={"sources": sources})

    def _ruled(self) -> list[tuple[Any, ...]]:
        """Where rules are: the path of each part, the part, and by their names in YAML the attributes that are rules."""
        of_sources = [("sources", name, source, _SOURCE_RULES) for name, source in self.sources.items()]
        return [("merge", self.merge, _MERGE_RULES), ("publish", self.publish, _PUBLISH_RULES), *of_sources]

    @property
    def digest(self) -> str:
        """A digest of all settings but locations, credentials and what is watched: equal for two runs that do the same."""
        places: Any = dict.fromkeys(["engine", "lake", "storage", "spark", "checkpoints", "quality", "metrics", "lineage"], True)
        places |= {"kafka": {"options", "bootstrap_servers"}, "sources": {"__all__": {"schema_file", "registry", "repartition"}}}
        told = self.model_dump_json(exclude=places)
        schemas = [str(source.value_type) for source in self.sources.values()]
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
        used: dict[str, str] = {}
        roles: set[str] = set()
        """Topics of which each source so far takes its own records alone."""

        def use(topic: str, by: str, right: str, *at: str, is_role: bool = False) -> None:
            """Notes what a topic is used for. Raises RefusedError where it has a use already, unless all are roles of it."""
            if is_role and topic not in used:
                roles.add(topic)
            if topic in used and not (is_role and topic in roles):
                raise RefusedError(f"{{path}} is the topic of {used[topic]} too; {right}", *at)
            used[topic] = by

        for name, source in self.sources.items():
            right = "give each source a topic of its own, or each of the two its own records with `where`"
            is_role = source.where is not None and source.repartition is None
            use(source.topic, f"source `{name}`", right, "sources", name, "topic", is_role=is_role)
        for name, repartition in self.repartitioned.items():
            at = "sources", name, "repartition", "from"
            use(repartition.from_topic, f"`{'.'.join(at)}`", "write the records to another topic than they come from", *at)
        use(self.publish.topic, "`publish.topic`", "publish to another topic", "publish", "topic")
        for table, topic in self.publish.dead_letter_topics.items():
            field = f"{table}_topic"
            use(topic, f"`publish.{field}`", "send these records to a topic of their own", "publish", field)
        return self

    @model_validator(mode="after")
    def _has_one_number_of_partitions(self) -> "Settings":
        counts = {name: repartition.partitions for name, repartition in self.repartitioned.items()}
        for name, count in counts.items():
            if count != (first := next(iter(counts.values()))):
                sentence = (
                    f"{{path}}: {count} is not the {first} of source `{next(iter(counts))}`; give all sources the same number"
                )
                raise RefusedError(sentence, "sources", name, "repartition", "partitions")
        return self

    @model_validator(mode="after")
    def _begins_with_its_own_sources(self) -> "Settings":
        named = self.kafka.start.offsets if isinstance(self.kafka.start, StartOffsets) else {}
        for name in named:
            if name not in self.sources:
                instead = known_instead(name, list(self.sources))
                raise RefusedError(f"{{path}} is not a source; {instead}", "kafka", "start", "offsets", name)
        return self


def _schema_text(schema: kinds.SchemaFile | None) -> str | None:
    """A schema's text without what surrounds its words; its fields stay in their order, which is that of the columns."""
    if schema is None:
        return None
    try:
        return json.dumps(json.loads(schema.text))
    except ValueError:  # no JSON: the schema's own check says so
        return schema.text.decode(errors="replace")


def _next_schema(before: kinds.SchemaFile | None, text: str | None, since: Mapping[str, int]) -> kinds.SchemaFile | None:
    """The schema of an epoch; `before`: that of the epoch before it; `since`: the first offsets of its values."""
    if text is None or before is None:
        return None if text is None else kinds.SchemaFile(Path("epochs"), text.encode())
    if before.text == text.encode():
        return before
    earlier = (*before.earlier, kinds.SchemaFile(before.path, before.text, (), before.since))
    return kinds.SchemaFile(before.path, text.encode(), earlier, {int(p): offset for p, offset in since.items()})


def load_settings(path: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Reads and checks a configuration file. Raises ConfigurationError with one sentence for what is wrong first."""
    try:
        values = read_values(path, os.environ if environ is None else environ)
        return Settings.model_validate(values, context={"folder": path.absolute().parent})
    except ValidationError as error:
        sentence = first_sentence(error)
    except RefusedError as refusal:
        sentence = sentence_of(refusal.sentence, refusal.at)
    except RecursionError:
        sentence = "is not usable YAML: mappings or lists that contain themselves, or are nested too deeply; write them out"
    # Raised outside the handlers, so that no cause with the values in it hangs on this error.
    raise ConfigurationError(f"{path}: {sentence}")

"""The configuration, typed: nonsense is refused here, in one sentence, before anything is read or started.

A sentence says what is wrong, where (file and dotted path) and what would be right. It never holds a value that came
from the environment, nor one of `kafka.options` or `storage`: either may be a secret.
"""

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

    from pipelines.core.json_schema import ValueSchema
    from pipelines.core.reading import ReadingRules

__all__ = ["RESERVED_NAMES", "CatalogLake", "Settings", "StartOffsets", "StartTimestamp", "load_settings", "parse_duration"]


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


class Heartbeat(_Part):
    """A record is a heartbeat where the value's `field` equals `equals`."""

    field: kinds.DottedPath = Field(examples=["type"])
    equals: kinds.Scalar = Field(examples=["heartbeat"])


class EventTime(_Part):
    """Where a value has its event time; `unit` is that of a number: text is ISO 8601."""

    field: kinds.DottedPath = Field(examples=["ts"])
    unit: Literal["s", "ms", "us", "ns"] = "ms"


def _shape_of_event_time(value: object) -> str:
    return "<parts>" if isinstance(value, (Mapping, EventTime)) else "<path>"


class SourceSettings(_Part):
    """One topic of the merge, and where its records carry their key and their event time."""

    topic: kinds.TopicName = Field(examples=["tracking"])
    format: Literal["json"] = "json"
    schema_file: kinds.Schema | None = Field(default=None, validation_alias="schema")
    key: kinds.DottedPath | None = None
    event_time: Annotated[
        Annotated[kinds.DottedPath, Tag("<path>")] | Annotated[EventTime, Tag("<parts>")], Discriminator(_shape_of_event_time)
    ] = Field(examples=["ts"])
    tombstone: Literal["quarantine", "skip"] = "quarantine"
    heartbeat: Heartbeat | None = None

    @property
    def time(self) -> EventTime:
        """Where the event time is, however that is written."""
        return EventTime(field=self.event_time) if isinstance(self.event_time, str) else self.event_time

    @cached_property
    def value_schema(self) -> "ValueSchema | None":
        """The schema of the values; raises ConfigurationError where the file holds none."""
        from pipelines.core.json_schema import value_schema

        return value_schema(self.schema_file.text, self.schema_file.path) if self.schema_file else None

    @property
    def value_type(self) -> "pa.DataType":
        """What a value is in silver: text, or the schema's struct."""
        import pyarrow as pa

        return self.value_schema.type if self.value_schema else pa.string()

    def reading_rules(self, max_future_ms: int) -> "ReadingRules":
        """How this source's records are read."""
        from pipelines.core.reading import ReadingRules

        return ReadingRules(
            event_time=tuple(self.time.field.split(".")),
            max_future_ms=max_future_ms,
            key=tuple(self.key.split(".")) if self.key else None,
            heartbeat=(tuple(self.heartbeat.field.split(".")), self.heartbeat.equals) if self.heartbeat else None,
            schema=self.value_schema,
            unit=self.time.unit,
            skips_tombstones=self.tombstone == "skip",
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
    retention_ms: kinds.Retention | None = Field(default=None, validation_alias="retention")


class KeepSettings(_Part):
    """How long, in event time behind the clock, rows of a table are kept; None: for ever."""

    bronze_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="bronze")
    silver_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="silver")
    late_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="late")
    quarantine_ms: kinds.PositiveDuration | None = Field(default=None, validation_alias="quarantine")


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
    metrics: MetricsSettings | None = None
    lineage: LineageSettings | None = None

    @property
    def digest(self) -> str:
        """A digest of all settings but locations, credentials and what is watched: equal for two runs that do the same."""
        places: Any = dict.fromkeys(["engine", "lake", "storage", "spark", "checkpoints", "metrics", "lineage"], True)
        places |= {"kafka": {"options", "bootstrap_servers"}, "sources": {"__all__": {"schema_file"}}}
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
        topics = [(source.topic, "give each source a topic of its own", "sources", name) for name, source in self.sources.items()]
        read_by: dict[str, str] = {}
        for topic, right, *at in (*topics, (self.publish.topic, "publish to another topic", "publish")):
            if topic in read_by:
                raise RefusedError(f"{{path}} is the topic of source `{read_by[topic]}` too; {right}", *at, "topic")
            read_by[topic] = at[-1]
        return self

    @model_validator(mode="after")
    def _begins_with_its_own_sources(self) -> "Settings":
        named = self.kafka.start.offsets if isinstance(self.kafka.start, StartOffsets) else {}
        for name in named:
            if name not in self.sources:
                instead = known_instead(name, list(self.sources))
                raise RefusedError(f"{{path}} is not a source; {instead}", "kafka", "start", "offsets", name)
        return self


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

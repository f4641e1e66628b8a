"""The typed configuration: nonsense is refused here, in one sentence, before anything is started.

The sentence says what is wrong, where (file and dotted path) and what would be right. It contains
no value from the environment, `kafka.options` or `storage`: either may be a secret.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from watersmeet.configuration import values as kinds
from watersmeet.configuration.file import (
    ANY,
    RefusedError,
    known_instead,
    problem_of,
    problems_of,
    read_values,
)
from watersmeet.configuration.sources import (
    Part,
    RegistrySettings,
    RepartitionSettings,
    SourceSettings,
    recorded,
    written,
)
from watersmeet.configuration.values import StartOffsets as StartOffsets
from watersmeet.configuration.values import StartTimestamp as StartTimestamp
from watersmeet.core.inputs import InputId, names_of, of_source
from watersmeet.core.texts import parse_path
from watersmeet.core.window import BOUNDS, Bounds, Window
from watersmeet.errors import ConfigurationError, Problem

if TYPE_CHECKING:  # heavy, and the command line starts without it
    from watersmeet.core.plan import Rules
    from watersmeet.core.reading import ReadingRules

# Attributes that are rules, which may change in a lake. (The path of tenants never does.)
_KAFKA_RULES = ("max_record_bytes",)
_MERGE_RULES = ("timeout_ms", "window_by_gap", "max_future_ms", "max_parts", "max_bytes")
_TENANT_RULES = ("tenant_max_lag_ms",)
_PUBLISH_RULES = ("valid", "value", "max_bytes", "corrections")
_SOURCE_RULES = ("schema_file", "id_path", "key", "event_time", "where", "heartbeat", "tombstone")

_PLACES = ("key", "event_time")
"""Rules of sources that lakes record in a form of their own (`recorded`)."""

_SINCE = "schema_since"
"""Entry beside `schema` where bare Avro has changed: the first offsets written with it."""


class CatalogLake(Part):
    """A lake whose tables live in a schema of a catalog (Unity Catalog)."""

    catalog: kinds.Identifier = Field(examples=["main"])
    schema_name: kinds.Identifier = Field(validation_alias="schema", examples=["shop"])


class KafkaSettings(Part):
    """Kafka's address, and how Kafka is read."""

    bootstrap_servers: kinds.Servers = Field(examples=["127.0.0.1:9092"])
    options: kinds.KafkaOptions = Field(default_factory=dict)
    start: kinds.Start = "earliest"
    max_offsets_per_batch: kinds.Count = 500_000
    on_data_loss: Literal["stop", "continue"] = "stop"
    max_record_bytes: kinds.Size = 64 * 2**20
    quarantine_limit: kinds.Share = 0.5


class WindowSettings(Part):
    """The time that a merge record stays open after its last part, and at most after its first."""

    gap_ms: kinds.PositiveDuration = Field(examples=["30m"])
    max_ms: kinds.PositiveDuration = Field(examples=["12h"])

    @model_validator(mode="after")
    def _is_not_over_before_the_gap(self) -> "WindowSettings":
        if self.max_ms < self.gap_ms:
            fix = "give it the length of the gap at least"
            raise RefusedError("{path} is shorter than the gap", "max", fix=fix)
        return self


class MergeSettings(Part):
    """Settings of the merge: its window (a timeout, or by gap), its tenants and a batch's size."""

    timeout_ms: kinds.PositiveDuration | None = None
    window_by_gap: WindowSettings | None = Field(default=None, validation_alias="window")
    tenant: kinds.DottedPath | None = None
    tenant_max_lag_ms: kinds.Duration | None = None
    max_future_ms: kinds.Duration = 86_400_000
    max_records_per_batch: kinds.Count = 1_000_000
    max_parts: kinds.Count = BOUNDS.max_parts
    max_bytes: kinds.Size = BOUNDS.max_bytes
    idle_after_ms: kinds.PositiveDuration | None = None
    _had_window: bool = PrivateAttr(default=False)

    @property
    def window(self) -> Window:
        """The time that a merge record stays open."""
        if self.window_by_gap is not None:
            return Window(self.window_by_gap.gap_ms, self.window_by_gap.max_ms)
        return Window(self.timeout_ms or 0)

    @property
    def bounds(self) -> Bounds:
        """The bounds of a merge record."""
        return Bounds(self.max_parts, self.max_bytes)

    @property
    def rules(self) -> "Rules":
        """The rules of the merge, without what earlier epochs have left."""
        from watersmeet.core.plan import Rules  # imports Arrow, which a usage error does not need

        return Rules(self.window, lag_ms=self.tenant_max_lag_ms, bounds=self.bounds)

    @property
    def has_tenants(self) -> bool:
        """True where every tenant has a clock of its own."""
        return self.tenant is not None

    @property
    def longest_ms(self) -> int:
        """The longest time that a merge record may take records: its window, and tenants' lag."""
        return self.window.longest_ms + (self.tenant_max_lag_ms or 0)

    def check_tenants(self, option: str, value: object) -> None:
        """Raise ConfigurationError where an option has a value and there are no tenants."""
        if value is not None and not self.has_tenants:
            raise ConfigurationError("this lake has no tenants", where=option, fix="leave it out")

    @property
    def shows_closing(self) -> bool:
        """True where answers show until when merge records could be joined, and what closed them.

        With a timeout and no tenants, now and before, both follow from the event time.
        """
        return self._had_window or self.has_tenants or not self.window.is_timeout

    def after(self, before: "MergeSettings") -> "MergeSettings":
        """Return these settings as the next ones of a lake, after `before`."""
        settings = self.model_copy()
        settings._had_window = before.shows_closing
        return settings

    def with_window(self, window: Window) -> "MergeSettings":
        """Return these settings with another window, as if there had never been one before."""
        if window.max_ms is None:
            return self.changed(timeout_ms=window.gap_ms, window_by_gap=None)
        by_gap = WindowSettings(gap_ms=window.gap_ms, max_ms=window.max_ms)
        return self.changed(timeout_ms=None, window_by_gap=by_gap)

    @model_validator(mode="after")
    def _has_one_window(self) -> "MergeSettings":
        if self.timeout_ms is None and self.window_by_gap is None:
            fix = "add it, such as `timeout: 30m`"
            raise RefusedError("required field `{path}` is missing", "timeout", fix=fix)
        if self.timeout_ms is not None and self.window_by_gap is not None:
            what = "`{path}` has both `timeout` and `window`"
            raise RefusedError(what, fix="leave one of them out")
        return self

    @model_validator(mode="after")
    def _has_tenants_with_a_lag(self) -> "MergeSettings":
        if self.has_tenants and self.tenant_max_lag_ms is None:
            what = "required field `{path}` is missing where there is a tenant"
            fix = "add it, such as `tenant_max_lag: 24h`"
            raise RefusedError(what, "tenant_max_lag", fix=fix)
        if not self.has_tenants and self.tenant_max_lag_ms is not None:
            what = "{path} is for a merge with `tenant` alone"
            raise RefusedError(what, "tenant_max_lag", fix="add that, or leave this out")
        return self


class SilverSettings(Part):
    """Settings of silver's table."""

    change_data_feed: kinds.Flag = False


class CorrectionSettings(Part):
    """The topic of corrections, for how late records they are, and how many a key may have."""

    topic: kinds.TopicName = Field(examples=["merged-corrections"])
    within_ms: kinds.Duration = Field(examples=["7d"])
    max_versions: kinds.Count = 1_000


class PublishSettings(Part):
    """The sink, which merge records go there, and in what form."""

    topic: kinds.TopicName = Field(examples=["merged"])
    valid: kinds.Text = "true"
    value: kinds.Text | None = None
    max_bytes: kinds.Size = 8 * 2**20
    delivery: Literal["exactly_once", "at_least_once", "at_most_once"] = "exactly_once"
    late_topic: kinds.TopicName | None = None
    quarantine_topic: kinds.TopicName | None = None
    retention_ms: kinds.Retention | None = None
    corrections: CorrectionSettings | None = None
    _earlier_corrections_topic: str | None = PrivateAttr(default=None)

    @property
    def corrections_topic(self) -> str | None:
        """The topic of corrections, also where only pending ones are left to be sent."""
        topic = self.corrections and self.corrections.topic
        return topic or self._earlier_corrections_topic

    @property
    def within_ms(self) -> int | None:
        """How far (ms) behind its position a late record may lie to be corrected; None: none is."""
        return None if self.corrections is None else self.corrections.within_ms

    @property
    def max_versions(self) -> int:
        """How many corrections a merge record may have."""
        return 0 if self.corrections is None else self.corrections.max_versions

    def after(self, before: "PublishSettings") -> "PublishSettings":
        """Return these settings as the next ones of a lake, after `before`."""
        settings = self.model_copy()
        settings._earlier_corrections_topic = before.corrections_topic
        return settings

    @property
    def dead_letter_topics(self) -> dict[str, str]:
        """The topics of dead letters, by the table of the records (`late`, `quarantine`)."""
        topics = {"late": self.late_topic, "quarantine": self.quarantine_topic}
        return {table: topic for table, topic in topics.items() if topic is not None}

    @property
    def sequence_topics(self) -> list[str]:
        """The topics with a sequence of merge records: the sink, and that of corrections."""
        topics = [self.topic, self.corrections_topic]
        return [topic for topic in topics if topic is not None]

    @property
    def topics_beside_the_sink(self) -> dict[str, str]:
        """The topics of dead letters and of corrections, by the field that names them."""
        fields = {f"{table}_topic": topic for table, topic in self.dead_letter_topics.items()}
        topic = self.corrections_topic
        return fields if topic is None else {**fields, "corrections.topic": topic}


BASES_KEPT: Final = 8
"""How many times the merge's state is saved while the shortest `keep` passes: bronze has up to an
eighth more than it must."""


class KeepSettings(Part):
    """The time that rows of a table are kept, in event time behind the clock; None: for ever."""

    bronze_ms: kinds.PositiveDuration | None = None
    silver_ms: kinds.PositiveDuration | None = None
    late_ms: kinds.PositiveDuration | None = None
    quarantine_ms: kinds.PositiveDuration | None = None

    @property
    def base_every_ms(self) -> int | None:
        """The time by the clock after which the merge's state is saved again; None: never."""
        kept = [ms for ms in (self.bronze_ms, self.silver_ms, self.late_ms) if ms is not None]
        return min(kept) // BASES_KEPT if kept else None


class QualitySettings(Part):
    """The user's suites, and after how many batches of silver a run checks them."""

    suites: list[kinds.Schema] = Field(default_factory=list)
    every: kinds.Count | None = None


class MetricsSettings(Part):
    """The address at which the metrics of a run are served."""

    port: kinds.Port = Field(examples=["9464"])
    address: kinds.Text = "127.0.0.1"


class LineageSettings(Part):
    """The destination of OpenLineage events: a file or a URL."""

    file: kinds.File | None = None
    url: kinds.Url | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _goes_to_one_place(self) -> "LineageSettings":
        if (self.file is None) == (self.url is None):
            fix = "name a file, or the URL of an OpenLineage backend"
            raise RefusedError("`{path}` needs one of `file` and `url`", fix=fix)
        return self


def _shape_of_lake(value: object) -> str:
    return "<catalog>" if isinstance(value, (Mapping, CatalogLake)) else "<location>"


class Settings(Part):
    """The whole configuration; absolute paths, durations in ms, sizes in bytes, sources in turn."""

    name: kinds.Name = Field(examples=["shop"])
    engine: Literal["spark", "embedded"] = "spark"
    lake: Annotated[
        Annotated[kinds.Location, Tag("<location>")] | Annotated[CatalogLake, Tag("<catalog>")],
        Discriminator(_shape_of_lake),
    ] = Field(examples=["./lake"])
    storage: kinds.Options = Field(default_factory=dict)
    spark: kinds.Options = Field(default_factory=dict)
    checkpoints: kinds.Location = Field(default=None, validate_default=True)
    durable: kinds.Flag = True
    kafka: KafkaSettings
    sources: dict[kinds.SourceName, SourceSettings] = Field(min_length=2)
    merge: MergeSettings
    silver: SilverSettings = SilverSettings()
    publish: PublishSettings
    retention_ms: kinds.Retention = 604_800_000
    keep: KeepSettings = KeepSettings()
    quality: QualitySettings = QualitySettings()
    metrics: MetricsSettings | None = None
    lineage: LineageSettings | None = None

    def reading_rules(self, source: str) -> "ReadingRules":
        """Return a source's rules; the first of a topic's sources refuses the undecodable."""
        source_settings = self.sources[source]
        of_topics = [
            name for name, other in self.sources.items() if other.topics == source_settings.topics
        ]
        rules = source_settings.reading_rules(
            self.merge.max_future_ms,
            self.tenant_paths.get(source),
            leaves_undecodable=source != of_topics[0],
        )
        record_id = parse_path(source_settings.id_path or "") if self.has_ids else None
        return replace(rules, max_record_bytes=self.kafka.max_record_bytes, id=record_id)

    @property
    def has_ids(self) -> bool:
        """True where records of some source have ids, or have had them in a living lake."""
        return any(source.has_id for source in self.sources.values())

    @property
    def tenant_paths(self) -> dict[str, str]:
        """The dotted path of the tenant in values, by source; none without tenants."""
        paths = {name: source.tenant or self.merge.tenant for name, source in self.sources.items()}
        return {name: path for name, path in paths.items() if path}

    @property
    def hidden_names(self) -> frozenset[str]:
        """Names of columns and counts that say nothing in this lake, so that no answer has them."""
        by_reason = (
            (len(self.inputs) > len(self.sources), ("topic",)),
            (self.has_ids, ("duplicates", "id_path")),
            (self.merge.shows_closing, ("due", "closed_at")),
            (self.merge.has_tenants, ("tenant", "tenant_max_lag_ms", "waiting")),
            (self.publish.corrections_topic, ("corrections", "corrections_published", "too_many")),
        )
        return frozenset(name for is_said, names in by_reason if not is_said for name in names)

    @property
    def inputs(self) -> tuple[InputId, ...]:
        """The inputs: each topic of each source, in the order of the sources."""
        return tuple(
            InputId(name, topic) for name, source in self.sources.items() for topic in source.topics
        )

    @property
    def topics(self) -> list[str]:
        """The topic of each input."""
        return [input_id.topic for input_id in self.inputs]

    @property
    def input_names(self) -> dict[InputId, str]:
        """The name of each input (`names_of`), as users, commits and headers know it."""
        return names_of(self.inputs)

    @property
    def inputs_by_name(self) -> dict[str, InputId]:
        """The inputs by their names (`input_names`), in the order of the sources."""
        return {name: input_id for input_id, name in self.input_names.items()}

    def rules(self) -> dict[str, Any]:
        """Return all that decides the output and may change in a lake: JSON by dotted path."""
        rules: dict[str, Any] = {}
        for path, part, names in self._ruled():
            values = part.model_dump(include=set(names.values()))
            for name, attribute in names.items():
                value = values[attribute]
                if name == "schema":
                    value = _schema_text(part.schema_file)
                elif name in _PLACES:
                    value = recorded(value)
                rules[f"{path}.{name}"] = value
            if "schema" in names and part.schema_file and part.schema_file.since:
                since = {str(p): offset for p, offset in part.schema_file.since.items()}
                rules[f"{path}.{_SINCE}"] = since
        return rules

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits for the rules of reading and grouping.

        Rules with their default do not count, so that it stays when a later version adds rules.
        """
        rules = self.rules()
        window = self.merge.window
        facts: dict[str, Any] = {"merge.window": [window.gap_ms, window.longest_ms]}
        for path, part, names in self._ruled():
            for name, attribute in names.items():
                value = rules[f"{path}.{name}"]
                is_default = value == type(part).model_fields[attribute].default
                if path == "publish" or name in ("timeout", "window") or is_default:
                    continue
                if name == "schema":  # in which the order of names means nothing
                    with suppress(ValueError):
                        value = json.loads(value)
                facts[f"{path}.{name}"] = value
        facts |= {f"sources.{name}.tenant": path for name, path in self.tenant_paths.items()}
        document = json.dumps(facts, sort_keys=True, default=str)
        return hashlib.sha256(document.encode()).hexdigest()[:8]

    def under(self, rules: Mapping[str, Any]) -> "Settings":
        """Return these settings with later rules, as `rules` of other settings returned them."""
        changed: dict[str, Any] = {}
        for path, part, names in self._ruled():
            values = {}
            for name, attribute in names.items():
                field = f"{path}.{name}"
                model_field = type(part).model_fields[attribute]
                if field in rules:
                    values[attribute] = written(rules[field]) if name in _PLACES else rules[field]
                # The rule did not exist yet when the others were kept.
                elif attribute not in _TENANT_RULES and not model_field.is_required():
                    values[attribute] = model_field.default
            if "schema_file" in values:
                since = rules.get(f"{path}.{_SINCE}", {})
                values["schema_file"] = _next_schema(part.schema_file, values["schema_file"], since)
            changed[path] = part.changed(**values)
        sources = {
            name: changed[f"sources.{name}"].after(source) for name, source in self.sources.items()
        }
        merge = changed["merge"].after(self.merge)
        publish = changed["publish"].after(self.publish)
        parts = {"kafka": changed["kafka"], "merge": merge, "publish": publish}
        return self.model_copy(update={"sources": sources, **parts})

    @property
    def needed_to_correct_ms(self) -> int:
        """How long before the clock (ms) rows begin that a correction may need; 0 without any."""
        if self.publish.corrections is None:
            return 0
        window = self.merge.window
        return self.publish.corrections.within_ms + 2 * (window.gap_ms + window.longest_ms)

    @property
    def registries(self) -> dict[str, RegistrySettings]:
        """The schema registries, by the source whose values name schemas there."""
        return {name: source.registry for name, source in self.sources.items() if source.registry}

    @property
    def repartitioned(self) -> dict[str, RepartitionSettings]:
        """The settings of repartitioning, by the source whose topic is written."""
        return {name: s.repartition for name, s in self.sources.items() if s.repartition}

    def before_epochs(self) -> "Settings":
        """Return these settings as those of a lake without schemas, ids, windows, corrections."""
        sources = {
            name: source.changed(schema_file=None, id_path=None)
            for name, source in self.sources.items()
        }
        merge = self.merge.with_window(Window(self.merge.window.gap_ms))
        publish = self.publish.changed(corrections=None)
        return self.model_copy(update={"sources": sources, "merge": merge, "publish": publish})

    def _ruled(self) -> Iterator[tuple[str, Any, dict[str, str]]]:
        # By part: its path, the part, and the attributes that are rules by their names in YAML.
        tenants = _TENANT_RULES if self.merge.has_tenants else ()
        yield "kafka", self.kafka, KafkaSettings.attributes(*_KAFKA_RULES)
        yield "merge", self.merge, MergeSettings.attributes(*_MERGE_RULES, *tenants)
        yield "publish", self.publish, PublishSettings.attributes(*_PUBLISH_RULES)
        for name, source in self.sources.items():
            yield f"sources.{name}", source, SourceSettings.attributes(*_SOURCE_RULES)

    @property
    def digest(self) -> str:
        """A digest of all settings but locations, credentials and monitoring."""
        places: Any = dict.fromkeys(
            ["engine", "lake", "storage", "spark", "checkpoints", "quality", "metrics", "lineage"],
            True,
        )
        hidden = self.hidden_names & {"id_path", "tenant", "tenant_max_lag_ms"}
        places |= {
            "kafka": {"options", "bootstrap_servers"},
            "sources": {"__all__": {"schema_file", "registry", "repartition", *hidden}},
            "merge": set(hidden),
            "publish": self.hidden_names & {"corrections"},
        }
        document = self.model_dump_json(exclude=places)
        schemas = [str(source.value_type) for source in self.sources.values()]
        return f"sha256 {hashlib.sha256(repr((document, schemas)).encode()).hexdigest()[:16]}"

    @field_validator("checkpoints", mode="before")
    @classmethod
    def _beside_the_tables(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            return value
        if "lake" not in info.data:  # which is refused itself
            return "."
        if isinstance(info.data["lake"], CatalogLake):
            what = "`{path}` is needed where the lake is a catalog"
            raise RefusedError(what, fix="name a folder or an object-store URI")
        return f"{info.data['lake']}/_checkpoints"

    @model_validator(mode="after")
    def _reads_and_writes_each_topic_once(self) -> "Settings":
        used: dict[str, str] = {}
        roles: set[str] = set()  # topics of which each source so far takes its own records alone

        def use(topic: str, by: str, right: str, *at: str, is_role: bool = False) -> None:
            if is_role and topic not in used:
                roles.add(topic)
            if topic in used and not (is_role and topic in roles):
                raise RefusedError(f"{{path}} is the topic of {used[topic]} too", *at, fix=right)
            used[topic] = by

        of_several = {t for s in self.sources.values() if len(s.topics) > 1 for t in s.topics}
        for name, source in self.sources.items():
            right = (
                "a source of several topics shares none of them; give each source topics of its own"
                if of_several.intersection(source.topics)
                else "give each source a topic of its own, or each of the two its own records with "
                "`where`"
            )
            is_role = source.where is not None and source.repartition is None
            is_role = is_role and len(source.topics) == 1
            for topic in source.topics:
                use(topic, f"source `{name}`", right, "sources", name, "topic", is_role=is_role)
        for name, repartition in self.repartitioned.items():
            at = "sources", name, "repartition", "from"
            right = "write the records to another topic than they come from"
            for topic in repartition.from_topics:
                use(topic, f"`{'.'.join(at)}`", right, *at)
        use(self.publish.topic, "`publish.topic`", "publish to another topic", "publish", "topic")
        right = "send these records to a topic of their own"
        for field, topic in self.publish.topics_beside_the_sink.items():
            use(topic, f"`publish.{field}`", right, "publish", *field.split("."))
        return self

    @model_validator(mode="after")
    def _can_correct_late_records(self) -> "Settings":
        if self.publish.corrections is None:
            return self
        needed_ms = self.needed_to_correct_ms
        for name in ("silver", "late"):
            kept_ms = getattr(self.keep, f"{name}_ms")
            if kept_ms is not None and kept_ms <= needed_ms:
                raise RefusedError(
                    "{path} is too short for what a correction needs",
                    "keep",
                    name,
                    fix=f"keep more than {needed_ms}ms (`publish.corrections.within`, and twice "
                    "the gap and the longest time of the window), or correct less",
                )
        return self

    @model_validator(mode="after")
    def _finds_the_tenants_of_a_topic_at_one_path(self) -> "Settings":
        first_sources: dict[str, str] = {}
        for name, source in self.sources.items():
            at = "sources", name, "tenant"
            if source.tenant is not None and not self.merge.has_tenants:
                what = "{path} is for a merge with `merge.tenant` alone"
                raise RefusedError(what, *at, fix="add that, or leave this out")
            first = first_sources.setdefault(source.topics[0], name)
            path = self.tenant_paths.get(name)
            other = self.tenant_paths.get(first)
            if path != other:  # in a topic, the records of one source move the others' time
                where = f"where source `{first}` of the same topic has its tenants"
                what = f"{{path}}: `{path}` is not `{other}`, {where}"
                raise RefusedError(what, *at, fix="give both the same path")
        return self

    @model_validator(mode="after")
    def _has_one_number_of_partitions(self) -> "Settings":
        counts = [(name, each.partitions) for name, each in self.repartitioned.items()]
        for name, count in counts:
            first, first_count = counts[0]
            if count != first_count:
                what = f"{{path}}: {count} is not the {first_count} of source `{first}`"
                at = ("sources", name, "repartition", "partitions")
                raise RefusedError(what, *at, fix="give all sources the same number")
        return self

    @model_validator(mode="after")
    def _begins_with_its_own_sources(self) -> "Settings":
        named = self.kafka.start.offsets if isinstance(self.kafka.start, StartOffsets) else {}
        for name in (name for name in named if name not in self.inputs_by_name):
            what = "{path} is not a source"
            instead = known_instead(name, list(self.inputs_by_name))
            if name in self.sources:
                what = "{path} has several topics"
                example = self.input_names[of_source(self.inputs, name)[0]]
                instead = f"name each by its topic, such as `{example}`"
            raise RefusedError(what, "kafka", "start", "offsets", name, fix=instead)
        return self


def _schema_text(schema: kinds.SchemaFile | None) -> str | None:
    # Its fields keep their order, which is that of the columns.
    if schema is None:
        return None
    try:
        return json.dumps(json.loads(schema.text))
    except ValueError:  # not JSON: the schema's own check says so
        return schema.text.decode(errors="replace")


def _next_schema(
    before: kinds.SchemaFile | None, text: str | None, since: Mapping[str, int]
) -> kinds.SchemaFile | None:
    if text is None or before is None:
        return None if text is None else kinds.SchemaFile(Path("epochs"), text.encode())
    if before.text == text.encode():
        return before
    earlier = (*before.earlier, kinds.SchemaFile(before.path, before.text, (), before.since))
    return kinds.SchemaFile(
        before.path, text.encode(), earlier, {int(p): offset for p, offset in since.items()}
    )


_KEPT = frozenset(
    (*section, name)
    for section, names in (
        (("kafka",), KafkaSettings.attributes(*_KAFKA_RULES)),
        (("merge",), MergeSettings.attributes(*_MERGE_RULES, *_TENANT_RULES, "tenant")),
        (("publish",), PublishSettings.attributes(*_PUBLISH_RULES)),
        (("sources", ANY), SourceSettings.attributes(*_SOURCE_RULES, "tenant")),
    )
    for name in names
    if name != "schema"
)
"""Fields that a lake keeps as the file has them, which a schema is not: its text is kept."""


def load_settings(path: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check a file. Raises ConfigurationError, with what else is wrong as its `more`."""
    try:
        values = read_values(path, os.environ if environ is None else environ, _KEPT)
        return Settings.model_validate(values, context={"folder": path.absolute().parent})
    except ValidationError as error:
        problems = problems_of(error)
    except RefusedError as refusal:
        problems = [problem_of(refusal, refusal.at)]
    except RecursionError:
        nested = "mappings or lists that contain themselves, or are nested too deeply"
        problems = [Problem(f"is not usable YAML: {nested}", fix="write them out")]
    # Raised outside the handlers, so that the error has no cause that contains values.
    faults = [ConfigurationError(problem.what, path, problem.fix) for problem in problems]
    faults[0].more = faults[1:]
    raise faults[0]

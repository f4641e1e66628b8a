"""The tables of a lake: names, columns, and how each is laid out.

Timestamps are UTC; event times are whole milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.merge import silver_schema
from watersmeet.core.reading import BRONZE, KEYED_BY, RECORD_BYTES, REDRIVEN_FROM, bronze_schema
from watersmeet.core.repeated import ID
from watersmeet.core.types import TIME, schema_of
from watersmeet.settings import Settings

SILVER = "silver"
JOURNAL = "journal"
PUBLISHED = "published"
ERASED = "erased"
BASES = "bases"
QUALITY = "quality"
LEASES = "leases"
WRITER_SCHEMAS = "writer_schemas"

# Views (`lake.views`).
MERGED = "merged"
WAITING = "waiting"
LATE = "late"
DUPLICATES = "duplicates"
EXCESS = "excess"
PASSED = "passed"
CORRECTIONS = "corrections"
CORRECTED = "corrected"
IDLE_HEARTBEATS = "idle_heartbeats"
PROGRESS = "progress"
QUARANTINE = "quarantine"
GENERATIONS = "generations"
RESETS = "resets"
EPOCHS = "epochs"


class Status(NamedTuple):
    """The rows of silver that say what became of records, with one status.

    - `view`: the view that has them.
    - `age`: the column by which the age of a final row is counted (`keep`); None: they may change.
    """

    view: str
    age: str | None = None

    @property
    def floor(self) -> str:
        """The name under which it is noted from when on there are such rows."""
        return SILVER if self.view == MERGED else self.view


STATUSES: Mapping[str, Status] = MappingProxyType(
    {
        "open": Status(MERGED),
        "waiting": Status(WAITING),
        "timed_out": Status(MERGED, "last_event_time"),
        "late": Status(LATE, "position"),
        "duplicate": Status(DUPLICATES, "event_time"),
        "excess": Status(EXCESS, "event_time"),
        "passed": Status(PASSED, "position"),
        "correction": Status(CORRECTIONS, "last_event_time"),
    }
)
UNFINISHED = [name for name, status in STATUSES.items() if status.age is None]
FINISHED = [name for name, status in STATUSES.items() if status.age is not None]
IS_UNFINISHED = ("status", "in", UNFINISHED)
"""The condition for rows of silver that are still to change."""


def statuses_of(view: str) -> list[str]:
    """Return the statuses of the rows that a view of silver has."""
    return [name for name, status in STATUSES.items() if status.view == view]


CUT = ("batch", "generation")
"""Columns of silver whose values depend on how batches were cut."""
JUDGED = ("valid", "has_message")
"""Columns of silver that follow from what the user's expressions make of a row."""
PERSONAL = (*KEYED_BY, "merge_key", ID.name)
"""Columns of bronze that `forget` empties (`emptied`)."""

APPLICATION = "watersmeet"
DELETING = "watersmeet-delete"
"""Application of commits that delete rows older than `keep`, or erase a key.

They decide no batch.
"""
RESETTING = "watersmeet-reset"
"""Application of commits that follow from a jump, for the generation that it has ended."""
BESIDE = f"{APPLICATION}-bronze"
"""Application of bronze in silver."""

CHANGE_DATA_FEED = "delta.enableChangeDataFeed"
COUNTED_COLUMNS = "delta.dataSkippingStatsColumns"
DELETION_VECTORS = "delta.enableDeletionVectors"

LAYOUT = "watersmeet.layout"
"""Property of silver that says which layout the tables of its lake have."""
LAYOUT_VERSION = 6
"""Layout that this version writes, and the only one that it continues."""

STATISTICS_BYTES = 64
"""Bytes that a file's statistics keep of the smallest and the largest text or binary value.

Whole values would triple small files, and no reader opens a file whose statistics have some hundred
megabytes. A value that nothing of that length exceeds is kept whole all the same, so there are none
of what producers send (`Table.counted`).
"""


COUNTED_TYPES = (pa.int32(), pa.int64(), TIME)
"""Types of columns whose statistics cannot tell a key (`forget`)."""

REPEATING_TYPES = (pa.string(), pa.int32())
"""Types of columns whose values often repeat: keys, names and small numbers.

Times, offsets and raw records hardly ever do.
"""


@dataclass(frozen=True)
class Table:
    """A Delta table: its columns, how it is laid out, and what the lake's layers do with it.

    - `keeper`: the layer whose owner keeps it small.
    - `writers`: by layer, the applications of its owner's commits under its token. Delta counts
      transaction versions by application.
    - `has_records`: True where it has records, raw ones or their outcomes. The others have what a
      run itself says, a few rows a batch.
    - `is_replaceable`: True where a start may make it anew, since something else says what it had:
      checks of the past decide nothing, the journal has the owners' tokens, a registry its schemas.
    """

    name: str
    schema: pa.Schema
    partitioned_by: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    keeper: str = "bronze"
    writers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    has_records: bool = False
    is_replaceable: bool = False

    @property
    def counted(self) -> list[str]:
        """The columns that files have statistics of: those of the table's property, or else numbers
        and times.
        """
        if names := self.properties.get(COUNTED_COLUMNS):
            return names.split(",")
        return [field.name for field in self.schema if field.type in COUNTED_TYPES]

    @property
    def repeating(self) -> list[str]:
        """The columns that files have dictionaries of; those of lists are apart (`has_structs`)."""
        return [
            field.name
            for field in self.schema
            if field.type in REPEATING_TYPES or field.name == RECORD_BYTES.name
        ]

    @property
    def has_structs(self) -> bool:
        """True where values of parts are structs, whose fields may repeat, and not JSON text."""
        items = [field.type.value_type for field in self.schema if pa.types.is_list(field.type)]
        return any(pa.types.is_struct(part.type) for kind in items for part in kind)

    def columns_but(self, *names: str) -> list[str]:
        """Return the names of its columns without some."""
        return [name for name in self.schema.names if name not in names]

    def rows(self, rows: Iterable[Sequence[Any]]) -> pa.Table:
        """Return rows of Python values, in the order of the columns, as an Arrow table.

        Times are epoch ms.
        """
        columns = list(zip(*rows, strict=True)) or [()] * len(self.schema)
        kinds = [pa.timestamp("ms", "UTC") if kind == TIME else kind for kind in self.schema.types]
        return pa.table([*map(pa.array, columns, kinds)], self.schema.names).cast(self.schema)

    def rows_of(self, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
        """Return rows by column name as an Arrow table.

        Columns that a row lacks are null; columns that the layout lacks are left out.
        """
        names = self.schema.names
        return self.rows([*map(row.get, names)] for row in rows)


def bronze(source: str) -> str:
    """Return the name of a source's bronze table."""
    return f"bronze_{source}"


def emptied(names: Collection[str]) -> dict[str, None]:
    """Return what `forget` makes of the columns of bronze with these names that it empties."""
    return dict.fromkeys(name for name in PERSONAL if name in names)


def application_of(settings: Settings, input_id: InputId) -> str:
    """Return the application of bronze in the table of an input's source.

    Each input of a source with several topics has its own.
    """
    is_alone = len(of_source(settings.inputs, input_id.source)) == 1
    return APPLICATION if is_alone else f"{APPLICATION}-{settings.input_names[input_id]}"


def inputs_of(settings: Settings) -> frozenset[str]:
    """Return the tables and views that the merge reads and never writes.

    They say what Kafka had, how to read it, and what the idle policy has decided.
    """
    registered = [WRITER_SCHEMAS] if settings.registries else []
    return frozenset([*map(bronze, settings.sources), IDLE_HEARTBEATS, QUARANTINE, *registered])


def has_corrections(settings: Settings) -> bool:
    """Return True where late records are corrected, or have been in a living lake."""
    return settings.publish.corrections_topic is not None


def layout(settings: Settings) -> dict[str, Table]:
    """Return every table of a lake by name, as this configuration needs it.

    Removed files and the log stay as long as `retention`.
    """
    interval = f"interval {settings.retention_ms} milliseconds"
    retention = {
        "delta.deletedFileRetentionDuration": interval,
        "delta.logRetentionDuration": interval,
    }
    bronze_tables = [_bronze(settings, name) for name in settings.sources]
    tables = [*bronze_tables, _silver(settings), _bases(settings), *_OTHERS]
    if settings.registries:
        tables.append(_WRITER_SCHEMAS)
    return {
        table.name: replace(table, properties={**retention, **table.properties}) for table in tables
    }


def _statistics(*columns: str) -> dict[str, str]:
    return {COUNTED_COLUMNS: ",".join(columns)}


def _bronze(settings: Settings, name: str) -> Table:
    """Return the bronze table of a source: every Kafka record once.

    A refused one has `reason` and `detail`.
    """
    # Statistics of these columns skip files exactly: a file holds one contiguous range of offsets
    # of one topic-partition.
    has_registry = bool(settings.sources[name].registry)
    schema = bronze_schema(has_registry=has_registry, has_ids=settings.has_ids)
    statistics = _statistics(
        "partition", "offset", "event_time", "kafka_timestamp", "reason", REDRIVEN_FROM.name
    )
    inputs = of_source(settings.inputs, name)
    writers = {"bronze": [*(application_of(settings, i) for i in inputs), DELETING]}
    return Table(bronze(name), schema, (), statistics, writers=writers, has_records=True)


def _silver(settings: Settings) -> Table:
    """Return the table of everything that batches make.

    It is partitioned by status, so that no batch ever opens a file of final rows again.
    """
    schema = silver_columns(settings)
    # No statistics of keys: they would be in the log, which `forget` cannot change.
    properties = {
        **_statistics(*(field.name for field in schema if field.type in COUNTED_TYPES)),
        # A checkpoint of the log doubles the cost of a small batch; reading the log between two
        # costs next to nothing.
        "delta.checkpointInterval": "50",
        # A MERGE marks the rows that it replaces instead of rewriting their files.
        DELETION_VECTORS: "true",
        CHANGE_DATA_FEED: "true" if settings.silver.change_data_feed else "false",
        LAYOUT: str(LAYOUT_VERSION),
    }
    writers = {"bronze": [BESIDE], "silver": [APPLICATION, RESETTING, DELETING]}
    return Table(SILVER, schema, ("status",), properties, "silver", writers, has_records=True)


def _bases(settings: Settings) -> Table:
    """Return the table of saved states: copies of rows of silver, by the number of the base."""
    # No source has a name that begins like this.
    schema = pa.schema([pa.field("_base", pa.int64()), *silver_columns(settings)])
    statistics = _statistics("_base", "batch", "partition", "generation", "event_time")
    writers = {"silver": [APPLICATION, DELETING]}
    return Table(BASES, schema, ("status",), statistics, "silver", writers)


def silver_columns(settings: Settings) -> pa.Schema:
    """Return the columns of silver, as this configuration needs them."""
    types = {name: source.value_type for name, source in settings.sources.items()}
    return silver_schema(types, settings.inputs, has_ids=settings.has_ids)


_TOPIC_PARTITION = "source string, topic string, partition int"
_NOT_QUARANTINED = ("timestamp_type", "merge_key", "event_time", "heartbeat")
QUARANTINED = [column for column in (*BRONZE, RECORD_BYTES) if column.name not in _NOT_QUARANTINED]

# The registry's schemas that records of bronze name, each with all that it refers to. They are
# written before the first such record, so that nothing after bronze needs the registry. A row may
# occur twice. In one without a schema, the registry did not have it then. One of the id -1 says
# that the source takes no further schemas.
_WRITER_SCHEMAS = Table(
    WRITER_SCHEMAS,
    schema_of("source string, writer_schema bigint, schema string, seen_at timestamp"),
    is_replaceable=True,
)

DECISION = schema_of(
    "seq bigint, kind string, generation int, body string, decided_at timestamp, token bigint"
)
"""Columns of `journal`. `body` is a JSON object; `generation`: the one that a decision is about."""

_OTHERS = (
    Table(JOURNAL, DECISION),
    # What each publication transaction wrote, to the sink or to the topic of corrections (whose
    # rows have `last_settled_at` to `last_offset`, and neither key nor event time). `sink_offset`
    # is the offset of its last message (null under at_most_once, which notes before it sends).
    # `topic_id` is Kafka's identity of the topic, which a topic that was made again does not
    # share. A row of a topic of dead letters has the last record of a topic-partition that it has
    # (`last_source` to `last_offset`), and no numbers.
    Table(
        PUBLISHED,
        schema_of(
            "topic string, partition int, first_seq bigint, last_seq bigint, last_event_time "
            "timestamp, last_key string, sink_offset bigint, committed_at timestamp, "
            "topic_id string, last_due timestamp, last_closed_at timestamp, last_tenant string, "
            "last_settled_at timestamp, last_u timestamp, last_source string, last_topic string, "
            "last_offset bigint, failed_values bigint"
        ),
        keeper="gold",
        writers={"gold": [APPLICATION]},
    ),
    # Places that `forget` has emptied, without the key: of a record, which whatever reads Kafka
    # again leaves empty, or of a merge record (`event_time`), of which the sink may have messages.
    Table(
        ERASED,
        schema_of(f"{_TOPIC_PARTITION}, offset bigint, erased_at timestamp, event_time timestamp"),
        writers={"bronze": [DELETING]},
    ),
    # The result of each expectation at each check, which covered everything up to this version of
    # silver. `total` rows were checked; `unexpected` of them violate the expectation (null: it is
    # not about rows, or could not be checked).
    Table(
        QUALITY,
        schema_of(
            "checked_at timestamp, suite string, table string, version bigint, expectation string, "
            "success boolean, unexpected bigint, total bigint"
        ),
        keeper="silver",
        is_replaceable=True,
    ),
    # The process that writes a layer: an owner holds it from `taken` (whose `entry` is its token)
    # to `released`, or to a larger token. `jvm_pid` is null where the process has no JVM of its
    # own. `boot_id`, `namespace`, `started` and `jvm_started` (clock ticks since boot) identify the
    # processes and their machine; null where the system does not tell.
    Table(
        LEASES,
        schema_of(
            "entry bigint, layer string, token bigint, event string, holder string, host string, "
            "pid int, jvm_pid int, "
            "at timestamp, boot_id string, namespace string, started bigint, jvm_started bigint"
        ),
        is_replaceable=True,
    ),
)

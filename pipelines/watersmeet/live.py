"""The live view of a lake: merge records, and the records that wait in bronze for the clock.

A row with the status `waiting` is a key of a partition with records that the clock has not reached.
Its parts will be merged, into one merge record or several, when their time comes. For which inputs
it waits is the word of `ask.status`, which SQL alone cannot say: `live` has it in a column, and the
view of a catalog has not.

With tenants, such a row is a key of a tenant. Silver then has waiting rows of its own, which wait
for the clock of their tenant: one for each record, with its `position`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from watersmeet.ask.answers import beyond
from watersmeet.ask.status import waits_for
from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.inputs import InputId
from watersmeet.core.types import DUE, TIME, ddl, quoted
from watersmeet.lake import tables
from watersmeet.lake.by_spark import sql_name, view_sql
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import by_input
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import reached
from watersmeet.lake.schemas import avro_schemas
from watersmeet.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from watersmeet.engine.spark import SparkEngine

LIVE = "live"
"""The name of the view in a catalog."""

NO_BEGINS: Final[Mapping[InputId, Mapping[int, int]]] = MappingProxyType({})


def live(engine: SparkEngine, settings: Settings) -> DataFrame:
    """Return merge records, open and timed out, and records that wait (status `waiting`).

    Records wait in bronze for the clock, and in silver for their tenant's. The columns are silver's
    and `waits_for` (the inputs that the clock waited for at the time of the call; null for rows of
    silver). Of silver's, `due` and `closed_at` are there where messages say them, `tenant` and
    `position` with tenants. Avro values are decoded by a function of the session,
    `watersmeet_<source>`.
    """
    # The settings of the current epoch know every field that silver has had.
    settings = read_history(engine.reader, settings).epochs.current.settings
    for source, schema in avro_schemas(engine.reader, settings).items():
        kind = settings.sources[source].value_type
        from watersmeet.engine.session import struct_type

        value_type = struct_type(engine.spark, f"value {ddl(kind)}")["value"].dataType
        engine.spark.udf.register(_decoder(source), partial(_decoded, schema), value_type)
    reader = engine.reader
    begins: Mapping[InputId, Mapping[int, int]] = {}
    if generations := read_history(reader, settings).generations:
        last = last_batch(reader)
        batch = 0 if last is None else last.batch + 1
        begins = by_input(reached(reader, generations.newest, batch))
    waits = waits_for(reader, settings)
    return engine.spark.sql(live_sql(engine.lake, settings, begins, waits, decodes=True))


def _decoded(schema: AvroSchema, value: bytes, partition: int, offset: int) -> Any:
    return schema.decoder_of_accepted()(bytes(value), partition, offset)


def _decoder(source: str) -> str:
    return f"watersmeet_{source}"


def live_sql(
    lake: Lake,
    settings: Settings,
    begins: Mapping[InputId, Mapping[int, int]] = NO_BEGINS,
    waits: Mapping[int, Sequence[str]] | None = None,
    *,
    decodes: bool = False,
) -> str:
    """Return the view as a query in Spark SQL, with the columns of `live`.

    `settings`: those of the current epoch. `begins`: by input and partition, the next offset of the
    merge; bronze before it need not be opened. `waits`: the inputs that are waited for, by
    partition; without them, there is no column `waits_for`. SQL cannot read Avro: the Avro value of
    a waiting record is null, unless the session `decodes` it.
    """
    progress = f"({view_sql(lake, tables.PROGRESS)})"
    generations = f"({view_sql(lake, tables.GENERATIONS)})"
    columns = ", ".join(f"`{source}`" for source in settings.sources)
    # Beside those of every lake, each with its value in a row that waits in bronze.
    null = f"CAST(NULL AS {ddl(TIME)})"
    more_columns = dict.fromkeys(DUE.names, null) if settings.merge.shows_closing else {}
    if settings.merge.has_tenants:
        more_columns |= {"tenant": "tenant", "`position`": null}
    if waits is not None:
        more_columns |= {"CAST(NULL AS ARRAY<STRING>) AS waits_for": _waits_for(waits)}
    of_silver = "".join(f", {name}" for name in more_columns)
    of_waiting = "".join(f", {value}" for value in more_columns.values())
    waiting = " UNION ALL ".join(
        _waiting(input_id, lake, settings, begins.get(input_id, {}), decodes=decodes)
        for input_id in settings.inputs
    )
    silver = lake.layout[tables.SILVER].schema
    parts = ", ".join(_sorted_parts(silver.field(source)) for source in settings.sources)
    statuses = *tables.statuses_of(tables.MERGED), *tables.statuses_of(tables.WAITING)
    return f"""
        WITH consumed AS (
            SELECT source, topic, `partition`, MAX(next_offset) AS next_offset FROM (
                SELECT source, topic, `partition`, generation, start_offset AS next_offset
                FROM {generations}
                UNION ALL
                SELECT source, topic, `partition`, generation, until_offset FROM {progress}
            )
            WHERE generation = (SELECT MAX(generation) FROM {generations})
            GROUP BY source, topic, `partition`
        ), waiting AS (
            {waiting}
        )
        SELECT `partition`, merge_key, status, event_time, last_event_time, {columns}, valid,
            invalid_reason, batch{of_silver}
        FROM {sql_name(lake, tables.SILVER)}
        WHERE status IN {statuses}
        UNION ALL
        SELECT `partition`, merge_key, 'waiting', MIN(event_time), MAX(event_time), {parts},
            CAST(NULL AS BOOLEAN), CAST(NULL AS STRING), CAST(NULL AS BIGINT){of_waiting}
        FROM waiting
        GROUP BY `partition`, merge_key, tenant"""


def _waiting(
    input_id: InputId,
    lake: Lake,
    settings: Settings,
    begins: Mapping[int, int],
    *,
    decodes: bool,
) -> str:
    source, topic = input_id
    kind = settings.sources[source].value_type
    if settings.sources[source].format != "avro":
        value = _value("b.value", kind)
    elif decodes:
        value = f"{_decoder(source)}(b.value, b.`partition`, b.`offset`)"
    else:
        value = f"CAST(NULL AS {ddl(kind)})"
    place = "topic: STRING, event_time: TIMESTAMP, `offset`: BIGINT"
    parts = {
        other: f"CAST(NULL AS STRUCT<{place}, value: {ddl(other_settings.value_type)}>)"
        for other, other_settings in settings.sources.items()
    }
    parts[source] = f"STRUCT(b.topic, b.event_time, b.`offset`, {value} AS value)"
    columns = ", ".join(f"{part} AS `{other}`" for other, part in parts.items())
    return f"""
        SELECT b.`partition`, b.merge_key, b.tenant, b.event_time, {columns}
        FROM (SELECT * FROM {sql_name(lake, tables.bronze(source))} AS b WHERE {beyond(begins)}) b
        LEFT JOIN consumed AS p
            ON p.source = '{source}' AND p.topic = b.topic AND p.`partition` = b.`partition`
        WHERE b.`offset` >= COALESCE(p.next_offset, 0) AND b.event_time IS NOT NULL
            AND b.topic = '{topic}' AND NOT b.heartbeat"""


def _value(value: str, value_type: pa.DataType) -> str:
    text = f"CAST({value} AS STRING)"
    if not pa.types.is_struct(value_type):
        return text
    schema = _json_ddl(value_type).replace("\\", "\\\\").replace("'", "\\'")
    return f"CAST(FROM_JSON({text}, '{schema}', MAP('mode', 'FAILFAST')) AS {ddl(value_type)})"


def _json_ddl(kind: pa.DataType) -> str:
    """Return the type as which JSON is parsed, before it is cast to `kind`.

    JSON Schema counts 1.0 and 1e3 as integers, which Spark can only read as a decimal. The schema's
    bounds make the cast exact.
    """
    if pa.types.is_struct(kind):
        fields = (f"{quoted(field.name)}: {_json_ddl(field.type)}" for field in kind)
        return f"STRUCT<{', '.join(fields)}>"
    if pa.types.is_list(kind):
        return f"ARRAY<{_json_ddl(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"MAP<STRING, {_json_ddl(kind.item_type)}>"
    return "DECIMAL(19, 0)" if kind == pa.int64() else ddl(kind)


def _waits_for(waits: Mapping[int, Sequence[str]]) -> str:
    quoted_names = {partition: "', '".join(names) for partition, names in waits.items()}
    entries = (f"{partition}, ARRAY('{names}')" for partition, names in quoted_names.items())
    by_partition = f"CAST(MAP({', '.join(entries)}) AS MAP<INT, ARRAY<STRING>>)"
    return f"ELEMENT_AT({by_partition}, `partition`)"


def _sorted_parts(column: pa.Field) -> str:
    # In silver's order: (event time, topic, offset).
    fields = ", ".join(f"'{name}', p.`{name}`" for name in column.type.value_type.names)
    # Not ordered by the whole part: its value may have maps, which cannot be compared.
    cases = " ".join(
        f"WHEN p.`{name}` < q.`{name}` THEN -1 WHEN p.`{name}` > q.`{name}` THEN 1"
        for name in ("event_time", "topic", "offset")
    )
    items = f"ARRAY_SORT(COLLECT_LIST(`{column.name}`), (p, q) -> CASE {cases} ELSE 0 END)"
    return f"TRANSFORM({items}, p -> NAMED_STRUCT({fields})) AS `{column.name}`"

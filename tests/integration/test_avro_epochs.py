"""A source's Avro schema changes while its lake goes on: every record is read by what wrote it, and
merged by its batch's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.integration.test_avro import (
    assert_whole,
    avro_river,
    register,
    registered_river,
    send,
)
from tests.integration.test_epochs import evolve, is_sound
from tests.support.avro import CASE_SCHEMA, as_avro, as_text
from tests.support.rivers import EMBEDDED, FOLDER, River
from tests.support.topics import published
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.live import live

pytestmark = [pytest.mark.long, pytest.mark.promise("C8")]

FIELDS: dict[str, Any] = {field["name"]: field for field in CASE_SCHEMA["fields"]}
PRICE = FIELDS["price"]["type"]
MORE: dict[str, Any] = {
    **FIELDS,
    "coupon": {"name": "coupon", "type": "string", "default": "not written"},
    "n": {**FIELDS["n"], "type": ["null", "long"]},
    "price": {**FIELDS["price"], "type": ["null", PRICE]},
}
LESS = {name: field for name, field in MORE.items() if name != "tags"}
WRITTEN = {"coupon": {**MORE["coupon"], "default": "written"}}
"""What writers give a field that has come."""


def schema(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**CASE_SCHEMA, "fields": [*fields.values()]}


def change(river: River, fields: Mapping[str, Any]) -> None:
    """`tracking` is read by another schema from here on."""
    (river.folder / "changed.avsc").write_bytes(as_text(schema(fields)))
    river.config["sources"]["tracking"]["schema"] = "changed.avsc"
    river.write()


def stretch(river: River, fields: Mapping[str, Any], *sources: str) -> None:
    """The next stretch of event time, of both sources or of one; `tracking` is written with these
    fields."""
    for source in sources or ("tracking", "orders"):
        written = {**fields, **(WRITTEN if "coupon" in fields else {})}
        of_source = schema(written) if source == "tracking" else CASE_SCHEMA
        river.encode = lambda value, of_source=of_source: as_avro(value, of_source)  # type: ignore[misc]
        river.flow(source)
        river.chunks -= 1
    river.chunks += 1


def coupons(river: River) -> set[Any]:
    rows = river.reader.select(tables.MERGED, ["tracking"])["tracking"].to_pylist()
    return {part["value"]["coupon"] for parts in rows for part in parts}


def grow(river: River) -> None:
    """A stretch, one of `tracking` that waits in bronze while its schema gains a field, and more of
    both."""
    stretch(river, FIELDS)
    river.finish()
    stretch(river, FIELDS, "tracking")
    river.finish()
    change(river, MORE)


def go_on(river: River, after: Mapping[str, Any]) -> None:
    """Applies the change, then sends the orders that `tracking` is ahead of, and more of both."""
    assert [each["field"] for each in evolve(river)["changes"]] == ["sources.tracking.schema"]
    river.chunks -= 1
    stretch(river, after, "orders")
    stretch(river, after)


def assert_kept(river: River) -> None:
    """Every promise holds, a rebuild is the same, and silver's column has only grown."""
    is_sound(river, "in-the-end")
    assert_whole(river)
    kind = river.reader.columns("silver").field("tracking").type.value_type.field("value").type
    assert [field.name for field in kind] == [*FIELDS, "coupon"]
    first = published(river.kafka, river.sink, river.partitions)[0].value or b""
    assert b'"tags"' in first
    assert b"coupon" not in first, "what is out stays as it was"


@pytest.mark.nightly
def test_bare_avro_is_read_by_the_schema_of_its_offset(kafka: str, tmp_path: Path) -> None:
    river = avro_river(kafka, tmp_path, "avro-epochs")
    grow(river)
    go_on(river, MORE)
    river.kill_at("silver.merge", "--once")
    river.finish()
    assert coupons(river) == {None, "not written", "written"}
    stretch(river, MORE, "tracking")
    river.finish()
    change(river, LESS)
    go_on(river, LESS)
    river.finish()
    assert_kept(river)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_spark_reads_each_value_by_what_wrote_it(
    spark: SparkSession, kafka: str, tmp_path: Path, on_spark: Callable[[River], River]
) -> None:
    river = on_spark(avro_river(kafka, tmp_path, "avro-epochs-spark", FOLDER))
    river.by_embedded()
    grow(river)
    river.config["engine"] = "spark"
    river.write()
    go_on(river, MORE)
    river.finish()
    assert coupons(river) == {None, "not written", "written"}
    river.by_embedded()
    change(river, LESS)
    evolve(river)
    stretch(river, LESS)
    stretch(river, LESS, "tracking")
    river.finish()
    spark_reads(spark, river)
    assert_kept(river)


def spark_reads(spark: SparkSession, river: River) -> None:
    """SQL reads fields of every epoch, also of records that wait."""
    found = live(SparkEngine(spark, Lake(river.settings)), river.settings)
    parts = found.selectExpr("status", "inline(tracking)")
    parts.selectExpr(
        "status", "value.tags['a']", "value.coupon", "value.price", "value.n"
    ).collect()
    waiting = (
        parts.where("status = 'waiting'")
        .selectExpr("value.tags IS NULL", "value.coupon")
        .distinct()
        .collect()
    )
    assert [tuple(row) for row in waiting] == [(True, "written")]
    merged = (
        parts.where("status <> 'waiting'")
        .selectExpr("value.tags['a']", "value.coupon")
        .distinct()
        .collect()
    )
    assert {tuple(row) for row in merged} >= {
        (0.5, None),
        (0.5, "not written"),
        (0.5, "written"),
        (None, "written"),
    }


@pytest.mark.nightly
def test_writers_of_a_registry_are_read_by_the_schema_of_each_epoch(
    kafka: str, tmp_path: Path, registry: Any
) -> None:
    schemas = register(registry)
    river = registered_river(kafka, tmp_path, "avro-registry-epochs", registry)
    send(river, schemas)
    river.finish()
    send(river, schemas, "tracking")
    river.finish()
    # Writers have a list there.
    change(river, {**MORE, "more": {"name": "more", "type": ["null", "string"], "default": None}})
    assert evolve(river)["applied"]
    river.chunks -= 1
    stretch(river, FIELDS, "orders")
    river.finish()
    assert_whole(river)
    change(river, MORE)
    assert evolve(river)["applied"]
    wider = schema(MORE | WRITTEN)
    schemas[registry.register("wider", wider)] = wider
    send(river, schemas)
    river.finish()
    assert coupons(river) == {None, "not written", "written"}
    change(river, LESS)
    assert evolve(river)["applied"]
    send(river, schemas)
    river.finish()
    registry.kill()
    is_sound(river, "in-the-end")
    assert_whole(river)


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("n", {"name": "n", "type": ["null", "double"], "default": None}, "$.n has another type"),
        (
            "m",
            {"name": "m", "type": ["null", "int"]},
            "$.m has no default, which records without it need; give it one",
        ),
    ],
)
def test_a_change_that_no_column_takes_is_refused_with_its_path(
    kafka: str, tmp_path: Path, name: str, field: dict[str, Any], said: str
) -> None:
    river = avro_river(kafka, tmp_path, f"avro-unfit-{name}", EMBEDDED)
    stretch(river, FIELDS)
    river.finish()
    change(river, {**FIELDS, name: field})
    found = evolve(river, apply=False, exit_code=2)
    assert [(each["where"], each["what"]) for each in found["problems"]] == [
        ("sources.tracking.schema", said)
    ]

"""Columns that somebody has added to tables of the lake stay, and nothing else becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from tests.support.commands import here
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.forget import forgotten

NOTE = "noted_by"


@pytest.mark.promise("N28")
@pytest.mark.fault("commits", oracle=True)
@pytest.mark.long
@pytest.mark.parametrize(
    "lake",
    [
        pytest.param(EMBEDDED, id="embedded"),
        pytest.param(FOLDER, id="spark", marks=pytest.mark.nightly),
    ],
)
def test_a_lake_goes_on_with_columns_that_others_have_added_to_every_table(
    kafka: str, tmp_path: Path, lake: str, on_spark: Callable[[River], River]
) -> None:
    engine = "embedded" if lake == EMBEDDED else "spark"
    river = on_spark(
        River.make(
            kafka,
            tmp_path,
            f"added-{engine}",
            lake=lake,
            partitions=1,
            publish__late_topic=f"added-late-{engine}",
        )
    )
    river.flow()
    river.finish()
    for name in tables.layout(river.settings):
        found = DeltaTable(river.reader.path(name))
        found.alter.add_columns([Field(NOTE, PrimitiveType("string"), nullable=True)])
    silver = DeltaTable(river.reader.path(tables.SILVER))
    silver.update(new_values={NOTE: "somebody"}, predicate="status = 'timed_out'")
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
    noted = river.reader.select(tables.SILVER, [NOTE], [[("status", "=", "timed_out")]])[
        NOTE
    ].to_pylist()
    assert {*noted} == {"somebody", None}
    for command in ("validate", "maintain", "reset --to latest --yes"):
        here(river, *command.split())
    forgotten(river.settings, "a", Reporter())
    river.flow()
    river.finish()
    assert river.broken_promises() == []

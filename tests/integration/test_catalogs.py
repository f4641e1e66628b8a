"""A lake in a catalog, as its users meet it: its tables outlive the session, each step being a
process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.support.cases import (
    SOURCES,
    expected_late,
    expected_silver,
    heartbeat,
    keyed,
)
from tests.support.commands import here
from tests.support.configurations import settings_for
from tests.support.rivers import CATALOG, Losses, River, warehouse
from tests.support.topics import consume
from watersmeet.engine.catalog import check_catalog
from watersmeet.engine.spark import SparkEngine
from watersmeet.errors import ConfigurationError, TableError
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import entry_name
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

pytestmark = pytest.mark.long

ANALYST = """
import io, json, sys
from contextlib import redirect_stdout
from watersmeet.cli import main
views = sys.argv[1:]
sys.argv = ["watersmeet", "validate", "--json"]
with redirect_stdout(io.StringIO()) as said:
    main()
from watersmeet.engine.session import spark_session
from watersmeet.settings import load_settings
from pathlib import Path
spark = spark_session(load_settings(Path("watersmeet.yml")).spark)
by_status = "SELECT status, count(*) AS records FROM spark_catalog.shop.{} GROUP BY status"
of_tables = (spark.sql(by_status.format(name)).collect() for name in ("silver", "live"))
found = [{row.status: row.records for row in rows} for rows in of_tables]
names = [row.tableName for row in spark.sql("SHOW TABLES IN spark_catalog.shop").collect()]
count = "SELECT count(*) AS records FROM spark_catalog.shop.{}"
counts = {name: spark.sql(count.format(name)).collect()[0].records for name in views}
print(json.dumps([json.loads(said.getvalue()), *found, names, counts]))
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_a_lake_in_a_catalog_is_made_and_queried_by_processes_of_their_own(
    kafka: str, tmp_path: Path
) -> None:
    """Kills of such processes are in tests/faults."""
    river = River.make(kafka, tmp_path, "catalog", lake=CATALOG)
    river.flow()
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
    views = [*Lake(river.settings).views]
    command = [sys.executable, "-c", ANALYST, *views]
    done = subprocess.run(
        command, cwd=river.folder, capture_output=True, text=True, timeout=300, check=True
    )
    validated, silver, live, names, counts = json.loads(done.stdout.splitlines()[-1])
    assert (validated["ok"], validated["problems"]) == (True, [])
    assert (
        sum(silver.values())
        == river.reader.summary("silver", [], {"n": ("count", "*")})["n"][0].as_py()
    )
    of_merge = ("open", "timed_out", "waiting")
    assert {n: silver.get(n) for n in of_merge} == {n: live.get(n) for n in of_merge}
    first = {name: [view.schema.names[0]] for name, view in Lake(river.settings).views.items()}
    assert counts == {name: river.reader.rows(name, own).num_rows for name, own in first.items()}
    of_model = {
        "merged": len(expected_silver(river.cases)),
        "late": len(expected_late(river.cases)),
    }
    assert {name: counts[name] for name in of_model} == of_model
    assert all(of_model.values())
    assert not [name for name in names if name.startswith("probe")], "what validate tried is gone"


KEY = "alice-1234"


def said(river: River, *words: str) -> Any:
    """The answer of a command."""
    return json.loads(here(river, *words, "--json"))


@pytest.fixture
def river(on_spark: Callable[[River], River], kafka: str, tmp_path: Path) -> River:
    """In the catalog of the session that is there: a lake that need not outlive it."""
    return on_spark(River.make(kafka, tmp_path, "catalog-ending", lake=CATALOG))


def finish_quickly(river: River) -> None:
    """An undisturbed run over what is there, on the same files without Spark: what the catalog has
    no part in."""
    settings = river.as_folder.model_copy(update={"engine": "embedded"})
    Run(settings, LAYERS, Reporter()).once()


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_refused_records_a_key_and_old_rows_end_in_a_catalog(river: River) -> None:
    river.send("tracking", 0, b'{"k":"%s"}' % KEY.encode())
    for time in (100, 600):
        for source in SOURCES:
            river.send(source, 0, keyed(KEY, time))
    river.flow()
    river.flow()
    river.finish()

    found = said(river, "redrive", "--reason", "no_event_time", "--apply")
    assert found["sent"] == sum(row["found"] for row in found["records"]) > 0
    for _ in range(3):
        river.flow()
    finish_quickly(river)
    assert river.broken_promises() == []

    left = {
        row["table"]: (row["before"], row["after"])
        for row in said(river, "forget", KEY, "--apply", "--tombstone")["tables"]
    }
    assert left["quarantine"] == (2, 0), "the refused record, and the one that it was redriven as"
    assert left["bronze_tracking"] == (4, 0)
    assert left["merged"][0] > left["merged"][1] == 0
    assert [m.key() for m in consume(river.kafka, river.sink, 2) if m.value() is None] == [
        KEY.encode()
    ]
    assert river.broken_promises() == []

    def rows(table: str) -> int:
        return int(river.reader.summary(table, [], {"rows": ("count", "*")})["rows"][0].as_py())

    names = ["bronze_tracking", "bronze_orders", "silver", "late"]
    before = {name: rows(name) for name in names}
    river.config["keep"] = {"bronze": "1500ms", "silver": "2500ms", "late": "1500ms"}
    river.write()
    said(river, "maintain")
    assert all(rows(name) < before[name] for name in names)
    assert river.broken_promises() == []
    said(river, "redrive", "--reason", "no_event_time", "--apply")
    topics = [source["topic"] for source in river.config["sources"].values()]
    redriven = [
        dict(m.headers() or []).get("watersmeet.redriven")
        for topic in topics
        for m in consume(river.kafka, topic, 2)
    ]
    assert max(Counter(filter(None, redriven)).values()) == 1, "each record was sent again once"
    for source in SOURCES:
        for p in range(2):
            river.send(source, p, heartbeat(9000))
    finish_quickly(river)
    assert river.broken_promises() == []


def test_what_a_creation_that_was_cut_short_has_left_is_named_and_a_run_goes_on_without_it(
    river: River,
) -> None:
    assert river.spark is not None
    left = Path(warehouse(river.folder)) / "bronze_tracking"
    (left / "_delta_log").mkdir(parents=True)
    (left / "_delta_log" / f".{entry_name(0)}.tmp").write_text("")
    engine = SparkEngine(river.spark, Lake(river.settings))
    table = engine.lake.layout["bronze_tracking"]
    with pytest.raises(TableError, match=rf"^bronze_tracking: .*{left} has files, but no table"):
        engine.create(table)
    shutil.rmtree(left)
    engine.create(table)
    assert engine.reader.exists(table.name)


@pytest.mark.parametrize(
    ("catalog", "said"),
    [
        (
            "spark_catalog",
            "Spark's own catalog forgets its tables with the session; set "
            "spark.sql.catalogImplementation to hive",
        ),
        ("nowhere", "the catalog refuses to be asked in nowhere.shop"),
    ],
)
def test_a_catalog_that_cannot_hold_a_lake_is_told_in_one_sentence(
    catalog: str, said: str, spark: SparkSession, tmp_path: Path
) -> None:
    place: dict[str, Any] = {
        "lake": {"catalog": catalog, "schema": "shop"},
        "checkpoints": str(tmp_path / "checkpoints"),
    }
    with pytest.raises(ConfigurationError) as told:
        check_catalog(spark, Lake(settings_for(tmp_path, **place)))
    assert said in str(told.value)
    assert "\n" not in str(told.value)

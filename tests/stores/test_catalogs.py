"""A lake in a catalog whose tables outlive the session, as its users meet it: each step in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipelines.engine.catalog import check_catalog
from pipelines.errors import ConfigurationError
from pipelines.lake.location import Lake
from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.rivers import CATALOG, Losses, River
from tests.support.topics import consume

ANALYST = """
import json, sys
from pipelines.engine.session import spark_session
from pipelines.settings import load_settings
from pathlib import Path
spark = spark_session(load_settings(Path("watersmeet.yml")).spark)
by_status = "SELECT status, count(*) AS records FROM spark_catalog.shop.{} GROUP BY status"
found = [{row.status: row.records for row in spark.sql(by_status.format(name)).collect()} for name in ("silver", "live")]
names = [row.tableName for row in spark.sql("SHOW TABLES IN spark_catalog.shop").collect()]
print(json.dumps([*found, names]))
"""


@pytest.mark.timeout(1200)
def test_a_lake_in_a_catalog_is_made_taken_up_and_queried_by_processes_of_their_own(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "catalog", lake=CATALOG)
    for _ in range(2):
        river.flow()
        river.finish()
    assert river.losses() == Losses()
    assert json.loads(answer(river, "-m", "pipelines", "validate", "--json")) == {"ok": True, "problems": []}
    silver, live, names = json.loads(answer(river, "-c", ANALYST))
    assert sum(silver.values()) == river.questions.summary("silver", [], {"n": ("count", "*")})["n"][0].as_py()
    assert {status: live.get(status) for status in silver} == silver
    assert not [name for name in names if name.startswith("probe")], "what validate tried is gone"


def answer(river: River, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=river.folder, capture_output=True, text=True, timeout=300, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


KEY = "alice-1234"


def said(river: River, *words: str) -> Any:
    """The answer of a command, in a process of its own."""
    return json.loads(answer(river, "-m", "pipelines", *words, "--json"))


@pytest.mark.timeout(2400)
def test_refused_records_a_key_and_old_rows_end_in_a_catalog(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "catalog-ending", lake=CATALOG)
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
    river.finish()
    assert river.broken_promises() == []

    here = {row["table"]: (row["before"], row["after"]) for row in said(river, "forget", KEY, "--apply", "--tombstone")["tables"]}
    assert here["quarantine"] == (2, 0), "the refused record, and the one that it was redriven as"
    assert here["bronze_tracking"] == (4, 0)
    assert here["silver"][0] > here["silver"][1] == 0
    assert [m.key() for m in consume(river.kafka, river.sink, 2) if m.value() is None] == [KEY.encode()]
    assert river.broken_promises() == []

    def rows(table: str) -> int:
        return int(river.questions.summary(table, [], {"rows": ("count", "*")})["rows"][0].as_py())

    names = ["bronze_tracking", "bronze_orders", "silver", "late"]
    before = {name: rows(name) for name in names}
    river.config["keep"] = {"bronze": "1500ms", "silver": "2500ms", "late": "1500ms"}
    river.write()
    said(river, "maintain")
    assert all(rows(name) < before[name] for name in names)
    assert river.broken_promises() == []
    said(river, "redrive", "--reason", "no_event_time", "--apply")
    topics = [source["topic"] for source in river.config["sources"].values()]
    redriven = [dict(m.headers() or []).get("watersmeet.redriven") for topic in topics for m in consume(river.kafka, topic, 2)]
    assert max(Counter(filter(None, redriven)).values()) == 1, "each record was sent again once"
    for source in SOURCES:
        for p in range(2):
            river.send(source, p, heartbeat(9000))
    river.finish()
    assert river.broken_promises() == []


@pytest.mark.parametrize(
    ("catalog", "said"),
    [
        ("spark_catalog", "Spark's own catalog forgets its tables with the session; set spark.sql.catalogImplementation to hive"),
        ("nowhere", "the catalog refuses to be asked in nowhere.shop"),
    ],
)
def test_a_catalog_that_cannot_hold_a_lake_is_told_in_one_sentence(
    catalog: str, said: str, spark: SparkSession, tmp_path: Path
) -> None:
    place: dict[str, Any] = {"lake": {"catalog": catalog, "schema": "shop"}, "checkpoints": str(tmp_path / "checkpoints")}
    with pytest.raises(ConfigurationError) as told:
        check_catalog(spark, Lake(settings_for(tmp_path, **place)))
    assert said in str(told.value)
    assert "\n" not in str(told.value)

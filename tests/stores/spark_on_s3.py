"""A lake on S3 that Spark and the embedded engine write in turns, at one address (`make s3-test`:
Spark's connector is large)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.stores.conftest import MakeRiver
from tests.support.commands import without_java
from tests.support.rivers import EMBEDDED, ENGINES, FOLDER, Losses, River
from tests.support.stores import OWNER, REGION, SECRET, Store

JARS = Path(sys.prefix, "jars", "s3")


def settings_of(store: Store) -> dict[str, str]:
    """Spark's side of `Store.storage`, with `s3:` for the scheme, as delta-rs has it."""
    return {
        "spark.driver.extraClassPath": f"{JARS}/*",
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
        "spark.hadoop.fs.AbstractFileSystem.s3.impl": "org.apache.hadoop.fs.s3a.S3A",
        "spark.hadoop.fs.s3a.endpoint": store.endpoint,
        "spark.hadoop.fs.s3a.endpoint.region": REGION,
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": OWNER,
        "spark.hadoop.fs.s3a.secret.key": SECRET,
    }


def written_by(river: River, engine: str) -> None:
    river.config["engine"] = ENGINES[engine]
    river.write()


@pytest.mark.timeout(1200)
def test_engines_write_one_lake_in_turns(on_s3: MakeRiver, store: Store) -> None:
    river = on_s3("turns", lake=FOLDER)
    river.config["spark"] = settings_of(store)
    for engine in (FOLDER, EMBEDDED, FOLDER):
        written_by(river, engine)
        river.flow()
        river.finish()
        assert river.losses() == Losses()
    for command in ("status", "explain a", "verify --full"):
        assert without_java(river, *command.split(" ")), f"{command} answers, without Spark"


@pytest.mark.timeout(1200)
def test_a_killed_merge_of_spark_is_taken_up_and_a_second_run_is_refused(
    on_s3: MakeRiver, store: Store
) -> None:
    river = on_s3("killed", lake=FOLDER)
    river.config["spark"] = settings_of(store)
    river.write()
    river.flow()
    first = river.run("--once", point="silver.done")
    first.await_held()
    written_by(river, EMBEDDED)
    second = river.run("--once")
    assert second.wait() == 1
    assert "is being written by process" in second.said()
    first.kill()
    river.flow()
    river.finish()
    assert river.losses() == Losses()

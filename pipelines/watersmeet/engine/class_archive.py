"""Makes the archive of the classes that Spark's JVM loads (`watersmeet.jvm.class_archive`).

`python -m watersmeet.engine.class_archive FOLDER` does what a run does with Spark and Delta Lake;
its JVM writes what it has loaded when it ends.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from watersmeet.engine.session import JAVA_OPTIONS, spark_session, stream_one_batch
from watersmeet.jvm import class_archive
from watersmeet.lake.location import hadoop_path

log = logging.getLogger("watersmeet")

_TIMEOUT_S = 300.0


def make_archive() -> None:
    """Make the archive for this machine's Java and Spark, unless it is there, or warn."""
    if class_archive.name() is None or class_archive.archive() is not None:
        return
    place = class_archive.folder()
    log.info("preparing quicker starts of Spark in %s", place)
    try:
        with tempfile.TemporaryDirectory(prefix=".archive-", dir=place) as folder:
            new = Path(folder, "classes.jsa")
            options = f"{os.environ.get(JAVA_OPTIONS, '')} -XX:ArchiveClassesAtExit={new}"
            # Its output ends when the JVM does, which writes the archive after the process has
            # ended.
            done = subprocess.run(
                [sys.executable, "-m", __name__, folder],
                env={**os.environ, JAVA_OPTIONS: options},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
            log.debug("%s", done.stdout)
            class_archive.keep(new)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("Spark will start more slowly: no archive of its classes was made (%s)", error)


def _work(folder: str) -> None:
    spark = spark_session({})
    table = f"delta.`{hadoop_path(f'{folder}/table')}`"
    columns = "partition INT, key STRING, at TIMESTAMP, parts ARRAY<STRUCT<offset: BIGINT>>"
    spark.sql(f"CREATE TABLE {table} ({columns}) USING delta")
    rows = spark.range(0, 1000, 1, 2).selectExpr(
        "cast(id % 2 as int) partition",
        "cast(id as string) key",
        "timestamp_millis(id) at",
        "array(named_struct('offset', id)) parts",
    )
    rows.writeTo(table).append()
    changed = rows.mapInArrow(lambda batches: batches, rows.schema)
    changed.createOrReplaceTempView("changed")
    for _ in range(2):
        spark.sql(
            f"MERGE INTO {table} t USING changed c ON t.key = c.key AND t.partition = c.partition "
            "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
        )
    spark.sql(f"DELETE FROM {table} WHERE key = '7'")
    spark.sql(f"UPDATE {table} SET key = 'u' WHERE partition = 1 AND key = '8'")
    spark.sql(f"DESCRIBE HISTORY {table}").collect()
    spark.sql(f"SELECT partition, max(at), count(*) FROM {table} GROUP BY partition").toArrow()
    spark.sql(f"OPTIMIZE {table}")
    stream_one_batch(spark, lambda batch: batch.count())


if __name__ == "__main__":
    _work(str(Path(sys.argv[1]).absolute()))

"""Other programs that do the job, or a part of it, for comparison: `NAME BOOTSTRAP FOLDER
PARTITIONS [TIMEOUT_MS]`.

Each runs over everything that the topics hold, and ends. With a timeout, `merge_job` and
`kafka_streams` merge by it, and run on and on. They publish to the topic `merged_by_NAME`, which is
there before them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.programs import ProgramError
from watersmeet.jvm.artifacts import java_command

KAFKA_STREAMS = "kafka_streams"
"""The one that is no Python module, but a file that Java compiles as it starts it."""

RUNS_ON = "runs on and on"
"""What a program says when its stream has begun."""

JARS = Path(sys.prefix, "jars")
"""Where `bin/fetch-jars` puts Delta Lake (`spark`), Spark's own Kafka source (`benchmarks`), and
Kafka Streams (`streams`)."""

FETCH = "run `make bench`, or `python bin/fetch-jars benchmarks/jars.lock`"

_JAVA_OPTIONS = ("-Xmx2g", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")


def command(name: str, *arguments: str) -> list[str]:
    """The command that starts a peer. Raises ProgramError where its jars are not there."""
    if name != KAFKA_STREAMS:
        return [sys.executable, "-m", f"{__name__}.{name}", *arguments]
    jars = JARS / "streams"
    if not any(jars.glob("kafka-streams-*.jar")):
        raise ProgramError(f"its jars are missing: {FETCH}")
    file = Path(__file__).with_name("KafkaStreamsMerge.java")
    return [java_command() or "java", *_JAVA_OPTIONS, "-cp", f"{jars}/*", str(file), *arguments]

"""The cause of a failure is named: the last thing that caused it, what it is about, and what would
be right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError
from deltalake import write_deltalake

from tests.support.configurations import settings_for
from watersmeet.errors import KafkaUnreachableError, WatersmeetError, root_cause
from watersmeet.kafka.failures import failure
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import last_commit
from watersmeet.lake.location import Lake
from watersmeet.settings import KafkaSettings

KAFKA = KafkaSettings(bootstrap_servers="first:9092")
MISSING_FILE = """Job aborted due to stage failure: Task 0 in stage 7.0 failed 1 times, most recent failure:
org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] Encountered error while reading file part-0.parquet.
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(QueryExecutionErrors.scala:856)
Caused by: java.util.concurrent.ExecutionException: it failed
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.io.FileNotFoundException: File /lake/bronze_orders/part-0.parquet does not exist
\tat org.apache.hadoop.fs.RawLocalFileSystem.open(RawLocalFileSystem.java:1)
\t... 24 more
"""
WORKER = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/x/worker.py", line 1, in main
    process()
  File "/x/reading.py", line 7, in read
    raise ValueError("no such field: amount")
ValueError: no such field: amount

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            MISSING_FILE,
            "FileNotFoundException: File /lake/bronze_orders/part-0.parquet does not exist",
        ),
        (WORKER, "ValueError: no such field: amount"),
        (
            f"{WORKER}\nwatersmeet.errors.StoreError: one of ours says more than all else\n",
            "one of ours says more than all else",
        ),
        (
            "An error occurred while calling o72.load.\n"
            ": org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)\n"
            "\tat org.apache.spark.SparkException$.internalError(SparkException.scala:1)\n",
            "SparkException: Python worker exited unexpectedly (crashed)",
        ),
        ("it is broken\nfurther words", "RuntimeError: it is broken"),
        ("", "RuntimeError"),
    ],
)
def test_what_spark_was_caused_by_last_is_what_counts(text: str, cause: str) -> None:
    assert root_cause(RuntimeError(text)) == cause


def test_a_jvm_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    program = tmp_path / "py4j" / "clientserver.py"
    program.parent.mkdir()
    program.write_text("def send():\n    raise ConnectionRefusedError(111, 'Connection refused')\n")
    space: dict[str, object] = {}
    exec(compile(program.read_text(), str(program), "exec"), space)
    with pytest.raises(ConnectionRefusedError) as caught:
        space["send"]()  # type: ignore[operator]
    assert "Spark's JVM has ended" in root_cause(caught.value)
    assert (
        root_cause(ConnectionRefusedError(111, "Connection refused"))
        == "ConnectionRefusedError: [Errno 111] Connection refused"
    )


@pytest.mark.parametrize("home", ["/nowhere", __file__])
def test_a_wrong_spark_home_is_one_sentence(home: str) -> None:
    program = (
        "from watersmeet.engine.session import spark_session\n"
        "from watersmeet.errors import ConfigurationError\n"
        "try:\n    spark_session({})\nexcept ConfigurationError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SPARK_HOME": home},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.startswith(f"SPARK_HOME is {home}, and there is no Spark "), done.stderr
    assert "unset it" in done.stdout


def test_an_advertised_host_that_nobody_resolves_is_the_brokers_to_correct() -> None:
    def said(text: str) -> str:
        error = failure(KAFKA, KafkaError(KafkaError._RESOLVE, text), "READ", "topic orders")
        assert isinstance(error, KafkaUnreachableError)
        assert error.retriable
        return str(error)

    advertised = said(
        "broker-2.internal:9092/2: Failed to resolve 'broker-2.internal:9092': Name or service not "
        "known"
    )
    assert "broker 2 calls itself broker-2.internal:9092" in advertised
    assert "advertised.listeners" in advertised
    assert "correct kafka.bootstrap_servers" not in advertised
    first = said("first:9092/bootstrap: Failed to resolve 'first:9092': Name or service not known")
    assert "correct kafka.bootstrap_servers" in first


@pytest.mark.parametrize("left", [0, 40])
def test_a_commit_file_that_is_emptied_or_torn_is_named(tmp_path: Path, left: int) -> None:
    settings = settings_for(tmp_path)
    place = Path(str(settings.lake)) / "silver"
    for n in range(2):
        write_deltalake(place, pa.table({"batch": [n]}), mode="append")
    file = place / "_delta_log" / "00000000000000000001.json"
    file.write_bytes(file.read_bytes()[:left])
    reader = DeltaRsReader(Lake(settings))
    with pytest.raises(WatersmeetError, match=r"silver.*00000000000000000001\.json"):
        last_commit(reader, "silver")


LOST = """
import logging, socket, socketserver, sys, threading
from pathlib import Path
from watersmeet.monitoring.observability import set_up_logging

set_up_logging(verbose=len(sys.argv) > 1)
code = "import logging\\ntry:\\n    1 / 0\\nexcept ZeroDivisionError:\\n    logging.exception('while sending')\\n"
exec(compile(code, "/x/py4j/java_gateway.py", "exec"))


class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        raise EOFError


with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    socket.create_connection(server.server_address).close()
    thread.join()
logging.getLogger("elsewhere").error("told all the same")
"""


@pytest.mark.parametrize("verbose", [False, True])
def test_what_spark_loses_its_jvm_by_fills_no_pages_before_the_cause(verbose: bool) -> None:
    words = [sys.executable, "-c", LOST, *(["-v"] if verbose else [])]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stderr
    assert "told all the same" in said
    assert len(said.splitlines()) == 1 or verbose
    assert ("ZeroDivisionError" in said, "EOFError" in said) == (verbose, verbose)

"""Spark Connect's own server, from the pinned pyspark, as a process on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import psutil

from tests.support.rivers import until
from tests.support.standalone import HOME, HOST, QUICK, end, environment
from watersmeet.dev.processes import free_port

DELTA: Mapping[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.jars": ",".join(map(str, sorted(Path(sys.prefix, "jars", "spark").glob("*.jar")))),
}
"""The settings of a Spark with Delta Lake."""
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"


@contextmanager
def connect_server(folder: Path, settings: Mapping[str, str]) -> Iterator[str]:
    """Inside, a server listens: what `SPARK_REMOTE` must be. Its Python workers have this project's
    packages."""
    port = free_port()
    of_server = {
        "spark.master": "local[2]",
        "spark.ui.enabled": "false",
        "spark.connect.grpc.binding.address": HOST,
        "spark.connect.grpc.binding.port": str(port),
        "spark.sql.shuffle.partitions": "2",
        **settings,
        _JAVA_OPTIONS: f"{QUICK} {settings.get(_JAVA_OPTIONS, '')}",
    }
    command = [
        str(HOME / "bin" / "spark-submit"),
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    command += [part for name, value in of_server.items() for part in ("--conf", f"{name}={value}")]
    log = folder / "connect.log"
    packages = {
        "SPARK_DAEMON_MEMORY": "1g",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(Path(__file__).parents[2] / "pipelines"),
    }
    with log.open("wb") as out:
        process = psutil.Popen(
            [*command, "spark-internal"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment() | packages,
            cwd=folder,
        )
    try:
        until(
            lambda: _answers(port) or process.poll() is not None,
            f"Spark Connect's server in {log}",
            120,
        )
        assert process.poll() is None, log.read_text(errors="replace")[-2000:]
        yield f"sc://{HOST}:{port}"
    finally:
        end([process])


def _answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((HOST, port)) == 0


def without_spark() -> dict[str, str]:
    """This process's environment without what points at a Spark of its own."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK", "PYSPARK"))
    }

"""The start of a local Spark session's JVM, with no setting on its command line."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError

from watersmeet.errors import ConfigurationError

SPARK_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_SUBMIT_ARGUMENTS: Final = "PYSPARK_SUBMIT_ARGS"


def start_jvm(settings: Mapping[str, str]) -> None:
    """Start this process's JVM with its memory, class path and Java options, unless it runs.

    The settings reach it in two files that only their owner can read, and that are gone when the
    call returns: one is for `spark-submit`, the other one, with Java's options, for the command
    `java`. A JVM whose start is interrupted (Ctrl-C, a signal) is ended. Raises ConfigurationError
    where it cannot be started.
    """
    given = os.environ.get(_SUBMIT_ARGUMENTS)
    # Only its owner can read the folder, as with `mkstemp`.
    with tempfile.TemporaryDirectory(prefix="watersmeet-") as folder:
        java_file = Path(folder, "java")
        properties_file = Path(folder, "spark.properties")
        options = shlex.split(settings.get(SPARK_JAVA_OPTIONS, ""))
        _write(java_file, "".join(f"{_java_argument(option)}\n" for option in options))
        at_start = {name: value for name, value in settings.items() if name.startswith("spark.")}
        at_start[SPARK_JAVA_OPTIONS] = shlex.quote(f"@{java_file}")
        _write(
            properties_file,
            "".join(f"{_escaped(name)}={_escaped(value)}\n" for name, value in at_start.items()),
        )
        quoted_file = shlex.quote(str(properties_file))
        further = f"--load-spark-defaults {given or 'pyspark-shell'}"
        with _environment(_SUBMIT_ARGUMENTS, f"--properties-file {quoted_file} {further}"):
            try:
                with _ended_with_its_start(folder):
                    # The public call that starts the JVM and no session.
                    SparkContext.setSystemProperty("watersmeet", "started")
            except OSError as error:
                spark_home = os.environ.get("SPARK_HOME")
                if spark_home is None:
                    raise
                raise ConfigurationError(
                    f"SPARK_HOME is {spark_home}, and there is no Spark that can be started "
                    f"({error.strerror})",
                    fix="unset it, and Watersmeet takes the one of its own Python, or name the "
                    "folder of a Spark",
                ) from None
            except PySparkRuntimeError as error:
                raise ConfigurationError(
                    f"Spark's JVM does not start ({error.getCondition()}): what it said "
                    "stands above",
                    fix="it needs Java 17 or 21, which JAVA_HOME or the PATH names, and options "
                    "under `spark:` that Java takes",
                ) from None


@contextmanager
def _ended_with_its_start(folder: str) -> Iterator[None]:
    # PySpark gives no hold on a JVM that it is still waiting for. Left alone, one that cannot leave
    # its port for a Python that is gone stays for ever: its server's thread is no daemon.
    try:
        yield
    except BaseException:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if any(folder in argument for argument in process.cmdline()):
                    process.kill()
        raise


def _write(file: Path, text: str) -> None:
    with os.fdopen(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as out:
        out.write(text)


def _java_argument(option: str) -> str:
    escaped = (
        option.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    )
    return f'"{escaped}"'


def _escaped(text: str) -> str:
    # As in a file of Java properties.
    units = text.encode("utf-16-be", "surrogatepass")
    codes = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(c) if c < 128 and chr(c).isalnum() else f"\\u{c:04x}" for c in codes)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

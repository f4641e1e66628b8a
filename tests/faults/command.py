"""What the commands that try faults for long have in common: a broker of their own, and a line for
whoever watches."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pyspark.sql import SparkSession

from tests.support.standalone import end
from tests.support.topics import PATIENT
from tests.support.wire import TRIED_AGAIN, Wire, random_faults, wire
from watersmeet.dev import broker
from watersmeet.engine.session import spark_session

WIRE_FAULTS, WIRE_LONGEST_S = 20, 1.0
"""How many faults a wire has, and how long the longest takes: less than what commands wait out."""


def is_on(name: str) -> bool:
    """Whether `make` was told `NAME=1`."""
    return os.environ.get(name, "0") == "1"


def session_for(engine: str) -> SparkSession | None:
    """The session for the undisturbed runs of an engine, where it is Spark."""
    is_spark = engine == "spark"
    return spark_session({"spark.sql.shuffle.partitions": "2"}) if is_spark else None


@contextmanager
def lying(kafka: str, seed: str) -> Iterator[Wire | None]:
    """With `WIRE=1`, a wire that lies by a seed, to be used instead of the broker."""
    if not is_on("WIRE"):
        yield None
        return
    faults = random_faults(random.Random(seed), WIRE_FAULTS, WIRE_LONGEST_S, TRIED_AGAIN)
    with wire(kafka, faults) as between:
        yield between


@contextmanager
def brokered(parent: Path | None = None) -> Iterator[tuple[str, Path]]:
    """A broker, and a folder (in `parent`, or where temporary ones are made); both are gone
    afterwards, and after SIGTERM whatever else was started, too."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        signal.signal(signal.SIGTERM, lambda *_: _end(folder))
        started = broker.start(folder / "broker", settings=PATIENT)
        assert started.bootstrap_servers is not None
        try:
            yield started.bootstrap_servers, folder
        finally:
            broker.stop(folder / "broker")


def _end(folder: Path) -> None:
    """Ends this process and all that it started, at once: threads that wait for a process or for a
    message would go on for minutes."""
    end(psutil.Process().children())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")

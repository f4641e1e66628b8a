from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.dev import broker
from pipelines.engine.session import JAVA_OPTIONS, spark_session
from tests.support.rivers import STARTED, River, RunProcess

# Tests run much code a few times: what the optimising compiler costs never comes back (a third of all processor time).
# (Without the optimising compiler the JVM keeps little room for compiled code, and once it is full compiles no more.)
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
# Spark loads 27,000 classes: with the JVM's own first sizes it collects everything again and again while it starts.
os.environ.setdefault(JAVA_OPTIONS, f"{QUICK_START} -XX:MetaspaceSize=256m -XX:NewSize=300m")
# A worker of the test run has no main file, which pyspark takes for its own doctests: importing parts of it would exit.
sys.modules["__main__"].__dict__.setdefault("__file__", __file__)
SPARK_DEFAULTS = Path(__file__).parent / "support" / "spark"
os.environ.setdefault("SPARK_CONF_DIR", str(SPARK_DEFAULTS))
os.environ.setdefault("KAFKA_HEAP_OPTS", f"-Xmx512m {QUICK_START}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, so that no process of a run is left with it at the end."""
    items.sort(key=lambda item: "property" not in item.path.parts)


@pytest.fixture(scope="session")
def root_session() -> Iterator[SparkSession]:
    """One Spark for the whole run: starting it costs more than most tests."""
    spark = spark_session({"spark.sql.shuffle.partitions": "2"})
    yield spark
    spark.stop()


@pytest.fixture
def spark(root_session: SparkSession) -> SparkSession:
    return root_session


@pytest.fixture
def on_spark(request: pytest.FixtureRequest) -> Callable[[River], River]:
    """Has a river whose engine is Spark run on the one that is there; others are left as they are, and start none."""

    def use(river: River) -> River:
        if river.config["engine"] == "spark":
            river.spark = request.getfixturevalue("root_session")
        return river

    return use


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """One that a module shares was started before."""
    before = len(STARTED)
    yield
    RunProcess.end_all(since=before)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real broker of the suite's own: its bootstrap servers."""
    folder: Path = tmp_path_factory.mktemp("broker")
    started = broker.start(folder)
    assert started.bootstrap_servers is not None
    yield started.bootstrap_servers
    broker.stop(folder)

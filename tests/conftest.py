from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from xdist.scheduler import LoadScopeScheduling

from tests.support import effort
from tests.support.lakes import OpenSpark
from tests.support.rivers import SCHEMA, STARTED, River, RunProcess, warehouse
from tests.support.topics import PATIENT
from watersmeet.dev import broker
from watersmeet.engine.session import JAVA_OPTIONS, spark_session

# Tests run much code a few times: what the optimising compiler costs never comes back (a third of
# all processor time). (Without the optimising compiler the JVM keeps little room for compiled code,
# and once it is full compiles no more.)
QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m"
# Spark loads 27,000 classes: with the JVM's own first sizes it collects everything again and again
# while it starts.
os.environ.setdefault(JAVA_OPTIONS, f"{QUICK_START} -XX:MetaspaceSize=256m -XX:NewSize=300m")
# A worker of the test run has no main file, which pyspark takes for its own doctests: importing
# parts of it would exit.
sys.modules["__main__"].__dict__.setdefault("__file__", __file__)
# Spark's Python processes run functions of the tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# As arguments, since with a folder of settings on its class path Java takes no archive of classes.
_QUICK = (Path(__file__).parent / "support" / "spark" / "spark-defaults.conf").read_text()
_SETTINGS = [line.split() for line in _QUICK.splitlines() if not line.startswith("#")]
os.environ.setdefault(
    "PYSPARK_SUBMIT_ARGS",
    " ".join([*(f"--conf {name}={value}" for name, value in _SETTINGS), "pyspark-shell"]),
)
os.environ.setdefault("KAFKA_HEAP_OPTS", f"-Xmx512m {QUICK_START}")


SHARED_FOLDER = pytest.StashKey[Path]()

SPARK = "spark"
"""How the groups of the tests begin that need a Spark session: of laws and of all others, each in a
process of a run."""

SPARK_TESTS = (
    "tests/ask/test_sql.py",
    "tests/faults/test_lives.py",
    "tests/faults/test_power.py::test_after_power_cuts_at_any_moment_a_start_goes_on_by_itself_and_exactly[folder",
    "tests/integration/test_analyst_docs.py",
    "tests/integration/test_catalogs.py",
    "tests/integration/test_cli.py",
    "tests/integration/test_end_to_end.py",
    "tests/integration/test_live.py",
    "tests/integration/test_lost_tables.py",
    "tests/integration/test_monitoring.py::test_both_engines_",
    "tests/integration/test_notebooks.py::test_a_notebook_runs_on_",
    "tests/integration/test_odd_timestamps.py",
    "tests/integration/test_operations.py::test_a_jump_",
    "tests/integration/test_other_readers.py",
    "tests/integration/test_upgrade.py",
    "tests/kafka/test_source.py",
    "tests/lake/test_commits.py::test_the_last_commit_of_an_application_is_found_behind_others",
    "tests/lake/test_durable.py::test_every_file_of_a_commit_of_spark_",
    "tests/lake/test_table_reader.py",
    "tests/lake/test_settings_of_commits.py",
    "tests/laws/test_engine.py",
    "tests/laws/test_gold_corrections.py::test_an_invalid_",
    "tests/laws/test_rebuild.py",
    "tests/laws/test_sessions.py",
    "tests/laws/test_silver.py",
    "tests/laws/test_too_large.py",
    "tests/laws/test_touched.py",
    "tests/laws/test_turns.py",
)
"""How the ids begin of tests that need it without saying so, for tables."""

SECURED = "tests/kafka/test_secured"
"""How the files begin that share the secured broker of a process."""

IN_PROCESSES_OF_THEIR_OWN = (
    "tests/faults/",
    "tests/integration/test_connect.py",
    "tests/integration/test_secrets.py",
    SECURED,
)
"""How the ids begin of tests whose runs with Spark are never in the process of the tests."""

LAWS_FOR_EVERY_CHANGE = tuple(
    f"tests/laws/test_{name}.py" for name in ("engine", "rebuild", "sessions", "silver", "touched")
)
"""The laws of which `make test` tries some on Spark; those of the other files are long, and have a
session of their own."""

TAKE_LONGEST = (
    *(
        SPARK,
        "test_memory",
        "faults",
        "installed",
        "lower_bounds",
        "secured",
        "transaction_size",
        "repartition",
        "forget",
        "notebooks",
    ),
    *("verify", "explain", "property", "integration", "quality", "audit", "laws"),
)


def group_of(test: str) -> str:
    """Return which tests are together in one process of a run: those that need Spark's session, or
    those of a file."""
    file = test.partition("::")[0]
    says_so = SPARK in test and not test.startswith(IN_PROCESSES_OF_THEIR_OWN)
    if not says_so and not test.startswith(SPARK_TESTS):
        return SECURED if file.startswith(SECURED) else file
    if "/laws/" not in file:
        return f"{SPARK}, others"
    return f"{SPARK}, {'laws' if file in LAWS_FOR_EVERY_CHANGE else 'other laws'}"


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each process of a run whole groups, in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of what all processes of a run share, or take the one that the first of them
    has made."""
    given = getattr(config, "workerinput", {}).get("shared_folder")
    config.stash[SHARED_FOLDER] = Path(given or tempfile.mkdtemp(prefix="watersmeet-tests-"))
    if given is None:
        config.pluginmanager.register(Failures(config))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["shared_folder"] = str(node.config.stash[SHARED_FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    """End what the processes of the run have shared, once all of them have ended."""
    if not hasattr(config, "workerinput"):
        broker.stop(config.stash[SHARED_FOLDER] / "broker")
        shutil.rmtree(config.stash[SHARED_FOLDER])


def pytest_report_header() -> str:
    return effort.described()


class Failures:
    """Says a failure at once: a run that somebody ends has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"\n{report.nodeid} failed ({report.when}):\n{report.longreprtext}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say the seed once more, where a failure is read."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(effort.described())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process of a run is left with it at the end.

    Whoever asks for Spark's session is in one of its groups: `spark_is_opened_by_its_group_alone`
    sees those that open it later.
    """
    for item in items:
        if "root_session" in getattr(item, "fixturenames", ()) and not group_of(
            item.nodeid
        ).startswith(SPARK):
            raise pytest.UsageError(f"{item.nodeid} needs Spark's session: name it in SPARK_TESTS")

    def rank(item: pytest.Item) -> int:
        group = group_of(item.nodeid)
        return next((n for n, name in enumerate(TAKE_LONGEST) if name in group), len(TAKE_LONGEST))

    items.sort(key=rank)


@pytest.fixture(scope="session")
def open_spark() -> Iterator[OpenSpark]:
    """The one Spark session of this process, started by the first test that needs it: starting it
    costs more than most tests."""

    @cache
    def session() -> SparkSession:
        return spark_session({"spark.sql.shuffle.partitions": "2"})

    yield session
    if session.cache_info().currsize:
        session().stop()


@pytest.fixture(scope="session")
def root_session(open_spark: OpenSpark) -> SparkSession:
    return open_spark()


@pytest.fixture
def spark(root_session: SparkSession) -> SparkSession:
    return root_session


@pytest.fixture(autouse=True)
def spark_is_opened_by_its_group_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another process of the run has a session already, which this test could have used."""
    was_open = SparkSession.getActiveSession() is not None
    yield
    if not was_open and SparkSession.getActiveSession() is not None:
        assert group_of(request.node.nodeid).startswith(SPARK), (
            "its id, or SPARK_TESTS, should say that it needs Spark"
        )


@pytest.fixture
def on_spark(request: pytest.FixtureRequest) -> Iterator[Callable[[River], River]]:
    """Has a river whose engine is Spark run on the one that is there; others are left as they are,
    and start none. A lake in a catalog need not outlive the test."""
    schemas = list[SparkSession]()

    def use(river: River) -> River:
        if river.settings.engine == "spark":
            river.spark = request.getfixturevalue("root_session")
        if river.spark is not None and not isinstance(river.settings.lake, str):
            place = warehouse(river.folder)
            river.spark.sql(f"CREATE SCHEMA spark_catalog.{SCHEMA} LOCATION '{place}'")
            schemas.append(river.spark)
        return river

    yield use
    for spark in schemas:
        spark.sql(f"DROP SCHEMA spark_catalog.{SCHEMA} CASCADE")


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    """One that a module shares was started before."""
    before = len(STARTED)
    yield
    RunProcess.end_all(since=before)


@pytest.fixture(scope="session")
def kafka(request: pytest.FixtureRequest) -> str:
    """The bootstrap servers of a real broker, which all processes of a run share: topics have the
    names of their tests."""
    folder = request.config.stash[SHARED_FOLDER] / "broker"
    folder.mkdir(exist_ok=True)
    # The second process finds it running.
    started = broker.start(folder, settings=PATIENT)
    assert started.bootstrap_servers is not None
    return started.bootstrap_servers

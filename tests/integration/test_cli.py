"""The commands as people and other programs use them: processes, signals, exit statuses, one JSON
document on standard output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from tests.support.cases import heartbeat, keyed
from tests.support.commands import in_process
from tests.support.configurations import settings_for
from tests.support.rivers import until
from tests.support.timing import load
from tests.support.topics import Published, create_topics, produce, published
from watersmeet.audit.validate import check_kafka
from watersmeet.engine.spark import SparkEngine
from watersmeet.errors import ConfigurationError, ForeignMessageError, Problem
from watersmeet.kafka.cluster import Cluster, copy_settings, sink_settings
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.settings import load_settings

TRACKING, ORDERS = "cli_tracking", "cli_orders"
PARTITIONS = 2
DEADLINE_S = 300
ENDED_WITHIN_S = 10
AS_INSTALLED = {name: value for name, value in os.environ.items() if name != "PYSPARK_SUBMIT_ARGS"}
"""Without the settings of Spark that make the other tests quick."""


@dataclass
class Project:
    """A folder with a configuration, and the topics that it names."""

    kafka: str
    folder: Path
    name: str

    @classmethod
    def make(cls, kafka: str, folder: Path, name: str, **values: object) -> Project:
        """`values`: of the configuration, beside or instead of the usual ones."""
        project = cls(kafka, folder, name)
        create_topics(kafka, project.tracking, project.orders, partitions=PARTITIONS)
        source = {
            "key": "k",
            "event_time": "ts",
            "heartbeat": {"field": "type", "equals": "heartbeat"},
        }
        configuration = {
            "name": name,
            "lake": "./lake",
            "kafka": {"bootstrap_servers": kafka},
            "sources": {
                "tracking": {"topic": project.tracking, **source},
                "orders": {"topic": project.orders, **source},
            },
            "merge": {"timeout": "100ms"},
            "publish": {"topic": project.sink, "valid": "size(orders) > 0"},
            **values,
        }
        project.file.write_text(yaml.safe_dump(configuration, sort_keys=False))
        return project

    @property
    def file(self) -> Path:
        return self.folder / "watersmeet.yml"

    @property
    def tracking(self) -> str:
        return f"{self.name}_tracking"

    @property
    def orders(self) -> str:
        return f"{self.name}_orders"

    @property
    def sink(self) -> str:
        return f"{self.name}_merged"

    def change(self, **values: object) -> None:
        self.file.write_text(
            yaml.safe_dump({**yaml.safe_load(self.file.read_text()), **values}, sort_keys=False)
        )

    def watersmeet(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return in_process(*arguments, cwd=self.folder)

    def messages(self) -> list[Published]:
        if (
            self.sink
            not in AdminClient({"bootstrap.servers": self.kafka}).list_topics(timeout=30).topics
        ):
            return []
        return published(self.kafka, self.sink, PARTITIONS)

    def keys(self) -> list[bytes]:
        return [message.key for message in self.messages()]

    def first_records(self) -> None:
        produce(self.kafka, self.tracking, [(0, keyed("a", 10)), (0, heartbeat(1000))])
        produce(self.kafka, self.orders, [(0, keyed("a", 20)), (0, heartbeat(1000))])

    def second_records(self) -> None:
        without_orders = keyed("without orders", 1020)
        produce(
            self.kafka,
            self.tracking,
            [(0, keyed("b", 1010)), (0, without_orders), (0, heartbeat(3000))],
        )
        produce(self.kafka, self.orders, [(0, keyed("b", 1005)), (0, heartbeat(2000))])

    def last_records(self) -> None:
        late = keyed("late", 500)
        produce(
            self.kafka,
            self.orders,
            [(0, keyed("open", 2950)), (0, late), (0, b"no json"), (0, heartbeat(3000))],
        )
        produce(self.kafka, self.orders, [(0, keyed("c", 2000)), (0, keyed("held", 4000))])
        produce(self.kafka, self.orders, [(1, keyed("d", 10)), (1, heartbeat(200))])
        produce(self.kafka, self.tracking, [(1, heartbeat(200))])


class Following:
    """`run` in a process of its own, with everything that it starts."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.errors = project.folder / f"run_{time.monotonic_ns()}.log"
        with self.errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "watersmeet", "run"],
                cwd=project.folder,
                stdout=subprocess.PIPE,
                stderr=log,
                env=AS_INSTALLED,
                start_new_session=True,  # as a terminal has it: Ctrl-C reaches all of them
            )
        self.family = psutil.Process(self.process.pid)

    def until_published(self, *keys: bytes) -> None:
        """The last messages of the sink, partition by partition, have these keys."""

        def is_published() -> bool:
            assert self.process.poll() is None, (
                f"it ended before its time: {self.errors.read_text()}"
            )
            return self.project.keys()[-len(keys) :] == list(keys)

        until(is_published, f"{keys!r} are published")

    def descendants(self) -> list[psutil.Process]:
        return self.family.children(recursive=True)

    def programs(self) -> set[str]:
        """What its processes run; Spark's start has many that are gone at once."""
        names = set()
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                names.add(process.name())
        return names

    def wait(self, deadline_s: float) -> tuple[int, bytes]:
        out, _ = self.process.communicate(timeout=deadline_s)
        return self.process.returncode, out

    def kill(self) -> None:
        """For a test that has failed: nothing is left behind."""
        family = [*self.descendants(), self.family] if self.process.poll() is None else []
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=30)


@pytest.fixture(scope="module")
def project(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One that nothing is read of."""
    return Project.make(kafka, tmp_path_factory.mktemp("project"), "cli")


@pytest.fixture(scope="module")
def merged(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One whose records are merged and published, but for one."""
    project = Project.make(kafka, tmp_path_factory.mktemp("merged"), "cli_all", engine="embedded")
    project.first_records()
    project.second_records()
    project.last_records()
    done = project.watersmeet("run", "--once")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    produce(project.kafka, project.orders, [(1, keyed("not in bronze yet", 250))])
    return project


@pytest.fixture
def following(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Following]:
    """A run that goes on, on Spark."""
    what = re.sub(r"\W", "", request.node.name.removeprefix("test_"))[-40:]
    run = Following(Project.make(kafka, tmp_path, f"cli_{what}"))
    yield run
    run.kill()


@pytest.mark.promise("N16")
@pytest.mark.fault("kill")
@pytest.mark.long
def test_followers_publish_what_arrives_until_a_signal_ends_them_and_nothing_stays_behind(
    following: Following,
) -> None:
    project = following.project
    project.first_records()
    following.until_published(b"a")
    project.second_records()
    following.until_published(b"a", b"b")
    project.last_records()
    following.until_published(b"a", b"b", b"d")
    family = following.descendants()
    assert "java" in following.programs()
    following.process.send_signal(signal.SIGTERM)
    assert following.wait(DEADLINE_S) == (0, b""), following.errors.read_text()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert "Traceback" not in following.errors.read_text()
    before = project.messages()
    assert [(m.partition, m.seq, m.id) for m in before] == [
        (0, 0, "0/10/a"),
        (0, 1, "0/1005/b"),
        (1, 0, "1/10/d"),
    ]
    project.change(engine="embedded")
    done = project.watersmeet("run", "--once")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert project.messages() == before, (
        "whatever the engine of a later run, it publishes nothing again"
    )


def assert_of_1970(warnings: list[dict[str, str]]) -> None:
    """The records' event times are a few seconds after the epoch, and nobody means that but a
    test."""
    assert warnings
    assert all(
        "event times decades from Kafka's own timestamps" in warning["what"] for warning in warnings
    )


@pytest.mark.long
def test_status_says_where_everything_is(merged: Project) -> None:
    done = merged.watersmeet("status", "--json")
    assert done.returncode == 0, done.stderr
    # From the records of `Project`, by hand.
    active = {"head": 3000, "lead": 0, "lag": 0, "state": "active"}
    found = json.loads(done.stdout)
    assert_of_1970(found.pop("warnings"))
    assert found == {
        "partitions": [
            {
                "partition": 0,
                "clock": 3000,
                "open": 1,  # "open"
                "next_due": 3050,
                "timed_out": 3,  # "a", "b" and the one without orders
                "not_valid": 1,
                "not_valid_reasons": {"predicate": 1},
                "failed_values": 0,
                "to_publish": 0,
                "not_in_silver": 0,
                "in_former_sink": 0,
                "late": 2,  # "late" and "c"
                "corrections": 0,
                "corrections_published": 0,
                "corrections_closed": 0,
                "corrections_behind": 0,
                "too_many": 0,
                "duplicates": 0,
                "excess": 0,
                "quarantined": 1,
                "published": 2,
                "behind_sink": 0,
                "sources": {
                    "tracking": active,
                    "orders": {"head": 4000, "lead": 1000, "lag": 1, "state": "held"},
                },
            },
            {
                "partition": 1,
                "clock": 200,
                "open": 0,
                "next_due": None,
                "timed_out": 1,
                "not_valid": 0,
                "not_valid_reasons": {},
                "failed_values": 0,
                "to_publish": 0,
                "not_in_silver": 0,
                "in_former_sink": 0,
                "late": 0,
                "corrections": 0,
                "corrections_published": 0,
                "corrections_closed": 0,
                "corrections_behind": 0,
                "too_many": 0,
                "duplicates": 0,
                "excess": 0,
                "quarantined": 0,
                "published": 1,
                "behind_sink": 0,
                "sources": {
                    "tracking": {"head": 200, "lead": 0, "lag": 0, "state": "active"},
                    "orders": {"head": 200, "lead": 0, "lag": 1, "state": "active"},
                },
            },
        ],
        "quality": [],
    }


@pytest.mark.long
def test_validate_finds_nothing_wrong_with_what_runs(
    root_session: SparkSession, merged: Project
) -> None:
    done = merged.watersmeet("validate", "--json")
    found = json.loads(done.stdout)
    assert_of_1970(found.pop("warnings"))
    assert (done.returncode, found) == (0, {"ok": True, "problems": []})


@pytest.mark.long
def test_validate_names_what_is_wrong_with_sink_and_tables(
    root_session: SparkSession, merged: Project
) -> None:
    unfit = {
        "retention.ms": "1000",
        "max.message.bytes": "2000",
        "message.timestamp.after.max.ms": "86400000",
    }
    create_topics(merged.kafka, "cli_unfit", partitions=PARTITIONS, **unfit)
    values = yaml.safe_load(merged.file.read_text())
    values["publish"]["topic"] = "cli_unfit"
    values["sources"]["returns"] = values["sources"].pop("tracking")
    (merged.folder / "unfit.yml").write_text(yaml.safe_dump(values, sort_keys=False))
    done = merged.watersmeet("validate", "--json", "-c", "unfit.yml")
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (2, False), done.stderr
    assert all(
        problem.keys() == {"what", "where", "fix"} and all(problem.values())
        for problem in found["problems"]
    )
    problems = {
        problem["what"]: (problem["where"], problem["fix"]) for problem in found["problems"]
    }
    max_bytes = 9 * 2**20
    assert problems.pop("cli_unfit has retention.ms=1000") == (
        "publish.topic",
        "set retention.ms to -1 on cli_unfit",
    )
    where, fix = problems.pop("cli_unfit has max.message.bytes=2000")
    way_out = "or, where it cannot be set, make publish.max_bytes as much smaller"
    assert (where, fix) == (
        "publish.topic",
        f"set max.message.bytes to {max_bytes} or more on cli_unfit; {way_out}",
    )
    [(what, (where, _))] = problems.items()
    assert what.startswith("the lake was begun with `tracking, orders`, and `orders, returns`")
    assert where == "sources"


@pytest.mark.promise("N16")
@pytest.mark.fault("kill")
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_a_run_at_once_while_spark_starts(
    following: Following, number: signal.Signals
) -> None:
    until(lambda: "java" in following.programs(), "Spark is being started")
    family = following.descendants()
    # A terminal's Ctrl-C reaches all processes.
    to = os.killpg if number == signal.SIGINT else os.kill
    to(following.process.pid, number)
    exit_code, out = following.wait(ENDED_WITHIN_S * load())
    assert (exit_code, out) == (0, b""), following.errors.read_text()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []
    assert "Traceback" not in following.errors.read_text()


def assert_one_sentence(said: str, sink: str) -> None:
    """The log may say more, but of the failure there is this, and no stack trace of Python's or
    Java's."""
    [sentence] = [line for line in said.splitlines() if line.startswith("watersmeet: ")]
    assert f"{sink}[1] ends with a message at offset" in sentence
    assert said.rstrip().endswith(sentence)
    assert "Traceback" not in said
    assert "\tat " not in said


@pytest.mark.long
def test_a_stream_that_fails_ends_the_run_with_one_sentence(kafka: str, tmp_path: Path) -> None:
    project = Project.make(kafka, tmp_path, "cli_failing")
    create_topics(kafka, project.sink, partitions=PARTITIONS)
    settings = load_settings(project.file).model_copy(update={"engine": "embedded"})
    Run(settings, LAYERS, Reporter()).once()  # a lake that has begun
    produce(kafka, project.sink, [(1, b"not ours")])
    failing = Following(project)
    try:
        until(lambda: "java" in failing.programs(), "Spark is being started")
        family = failing.descendants()
        assert failing.wait(DEADLINE_S) == (1, b""), failing.errors.read_text()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        failing.kill()
    assert_one_sentence(failing.errors.read_text(), project.sink)


@pytest.mark.long
def test_a_layer_that_cannot_begin_leaves_no_stream_behind(
    root_session: SparkSession, project: Project, tmp_path: Path
) -> None:
    create_topics(project.kafka, "cli_foreign", partitions=PARTITIONS)
    produce(project.kafka, "cli_foreign", [(1, b"not ours")])
    settings = settings_for(
        tmp_path, bootstrap=project.kafka, sources=(TRACKING, ORDERS), publish__topic="cli_foreign"
    )
    run = Run(
        settings.model_copy(update={"engine": "spark"}), ["gold"], Reporter(), threading.Event()
    )
    assert isinstance(run.engine, SparkEngine)
    with pytest.raises(
        ForeignMessageError, match=r"cli_foreign\[1\] ends with a message at offset 0"
    ):
        run.until_stopped()
    active = run.engine.spark.streams.active
    for query in active:
        query.stop()
    assert [query.name for query in active] == []


@pytest.mark.long
def test_an_expression_that_cannot_judge_is_refused_before_anything_is_read(
    root_session: SparkSession, project: Project, tmp_path: Path
) -> None:
    settings = settings_for(
        tmp_path,
        bootstrap=project.kafka,
        sources=(TRACKING, ORDERS),
        publish__valid="no_such_column > 0",
    )
    with pytest.raises(ConfigurationError, match=r"publish\.valid"):
        Run(settings, ["bronze", "silver"], Reporter(), threading.Event()).once()


# -- what validate asks, without a process


def check_sink(kafka: str, folder: Path, name: str, value: str) -> list[Problem]:
    """What is said of a sink that differs from one that gold has made in this setting alone."""
    settings = settings_for(
        folder, bootstrap=kafka, sources=(TRACKING, ORDERS), publish__topic=f"cli_{name}_{value}"
    )
    create_topics(
        kafka,
        settings.publish.topic,
        partitions=PARTITIONS,
        **{**sink_settings(settings), name: value},
    )
    return check_kafka(settings)


@pytest.mark.promise("K9")
@pytest.mark.fault("topics")
@pytest.mark.parametrize(
    ("name", "value", "is_fit"),
    [
        ("retention.ms", "-1", True),
        ("retention.ms", "604800000", False),
        ("max.message.bytes", str(8 * 2**20), False),
        ("max.message.bytes", str(10 * 2**20), True),
        ("cleanup.policy", "compact", False),
        ("message.timestamp.type", "LogAppendTime", False),
        ("message.timestamp.after.max.ms", "3600000", False),
        ("message.timestamp.before.max.ms", "3600000", False),
    ],
)
def test_a_sink_that_would_lose_or_refuse_messages_is_named(
    project: Project, tmp_path: Path, name: str, value: str, is_fit: bool
) -> None:
    problems = check_sink(project.kafka, tmp_path, name, value)
    assert [problem.where for problem in problems] == ([] if is_fit else ["publish.topic"])
    assert all(
        f"has {name}={value}" in problem.what and name in problem.fix for problem in problems
    )


@pytest.mark.parametrize(
    ("name", "value", "is_fit"),
    [
        ("retention.ms", "604800000", True),
        ("max.message.bytes", str(1048588), False),
        ("cleanup.policy", "compact", False),
        ("message.timestamp.after.max.ms", "3600000", False),
    ],
)
def test_a_topic_that_would_refuse_dead_letters_is_named(
    project: Project, tmp_path: Path, name: str, value: str, is_fit: bool
) -> None:
    topic = f"cli_letters_{name}_{value}"
    settings = settings_for(
        tmp_path, bootstrap=project.kafka, sources=(TRACKING, ORDERS), publish__late_topic=topic
    )
    fit = copy_settings(Cluster(settings.kafka), settings.topics)
    create_topics(project.kafka, topic, partitions=PARTITIONS, **{**fit, name: value})
    problems = check_kafka(settings)
    assert [problem.where for problem in problems] == ([] if is_fit else ["publish.late_topic"])
    assert all(
        f"has {name}={value}" in problem.what and name in problem.fix for problem in problems
    )


def test_a_topic_of_dead_letters_with_other_partitions_is_named(
    project: Project, tmp_path: Path
) -> None:
    create_topics(project.kafka, "cli_narrow", partitions=PARTITIONS + 1)
    settings = settings_for(
        tmp_path,
        bootstrap=project.kafka,
        sources=(TRACKING, ORDERS),
        publish__quarantine_topic="cli_narrow",
    )
    problems = check_kafka(settings)
    assert {problem.where for problem in problems} == {"publish.quarantine_topic"}
    narrow = f"cli_narrow has {PARTITIONS + 1} partitions and the sources have {PARTITIONS}"
    assert narrow in [problem.what for problem in problems]

"""The command line as far as it goes without Spark: usage, configurations that are wrong, and how
failures end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import watersmeet
from tests.support.commands import in_process
from tests.support.panics import PanicException
from tests.support.timing import within
from watersmeet import cli
from watersmeet.errors import (
    BrokerError,
    ConfigurationError,
    ForeignMessageError,
    WatersmeetError,
    root_cause,
)
from watersmeet.kafka import cluster

pytestmark = pytest.mark.promise("C16")

SOUND: dict[str, Any] = {
    "name": "test",
    "lake": "lake",
    "kafka": {"bootstrap_servers": "127.0.0.1:1"},
    "sources": {
        "tracking": {"topic": "tracking", "event_time": "ts"},
        "orders": {"topic": "orders", "event_time": "ts"},
    },
    "merge": {"timeout": "30m"},
    "publish": {"topic": "merged"},
}


def config(folder: Path, **changed: Any) -> Path:
    path = folder / "watersmeet.yml"
    path.write_text(yaml.safe_dump(SOUND | changed), encoding="utf-8")
    return path


def assert_one_sentence(
    done: subprocess.CompletedProcess[str], *parts: str, exit_code: int
) -> None:
    """It failed as the contract has it: one line that says all of the parts on standard error,
    nothing on standard output."""
    assert (done.returncode, done.stdout) == (exit_code, ""), done.stderr
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith("watersmeet: ")
    assert [part for part in parts if part not in sentence] == []


# -- usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["flow"],
        ["run", "copper"],
        ["run", "--twice"],
        ["status", "--config"],
        ["broker", "explode"],
        ["broker", "start", "--port", "0"],
    ],
)
def test_what_is_no_command_is_bad_usage(tmp_path: Path, arguments: Sequence[str]) -> None:
    done = in_process(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert arguments[-1].split("=")[0] in done.stderr or "--port" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_version_is_the_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "watersmeet", "--version"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{watersmeet.__version__}\n", "")


def test_a_repository_with_packages_of_its_own_hides_none_of_the_programs(tmp_path: Path) -> None:
    for name in ("pipelines", "core", "kafka", "lake", "engine", "run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the user has this')")
    done = subprocess.run(
        [sys.executable, "-m", "watersmeet", "init", "shop"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_groups_the_commands_and_marks_those_that_change_data(tmp_path: Path) -> None:
    done = in_process("--help", cwd=tmp_path)
    assert done.returncode == 0
    sections = [block.splitlines() for block in done.stdout.split("\n\n")[3:]]
    groups = {title: [line.split()[0] for line in lines] for title, *lines in sections}
    assert groups == {
        "Begin, and try things:": ["init", "fetch", "try", "demo", "broker"],
        "Look at a lake:": [
            *["validate", "status", "explain", "sql", "verify", "rebuild", "check", "report"]
        ],
        "Run the streams:": ["run", "repartition"],
        "Change a lake:": ["redrive", "forget", "reset", "evolve", "maintain"],
    }
    lines = done.stdout.splitlines()
    marked = [line.split()[0] for line in lines if "changes data" in line]
    assert marked == ["check", *groups["Run the streams:"], *groups["Change a lake:"]]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["--", "-5"], "-5"),
        (["--key-json", '"a\\u0000b"'], "a\0b"),
        (["--key-json", '"\\ud83d\\ude00"'], "😀"),
        (["--key-json", '"-5"'], "-5"),
        (["--key-json", '""'], ""),
    ],
)
def test_a_key_that_no_command_line_can_spell_is_named(
    tmp_path: Path, words: list[str], key: str
) -> None:
    done = in_process("explain", "--json", "-c", config(tmp_path), *words, cwd=tmp_path)
    assert json.loads(done.stdout)["key"] == key


# -- a configuration that is missing or wrong


@pytest.mark.parametrize("command", [["run", "--once"], ["run", "silver"], ["status", "--json"]])
def test_a_missing_configuration_is_one_sentence(tmp_path: Path, command: list[str]) -> None:
    done = in_process(*command, cwd=tmp_path)
    assert_one_sentence(done, "watersmeet.yml: cannot be read", "-c", "init", exit_code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_configuration_is_one_sentence_that_says_where(tmp_path: Path) -> None:
    path = config(tmp_path, merge={"timeout": "30 minutes"})
    done = in_process("run", "--once", "-c", path, cwd=tmp_path)
    assert_one_sentence(done, str(path), "merge.timeout", "30 minutes", "`30m`", exit_code=2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["explain", "a\udcff"], "KEY: it is not UTF-8"),
        (["forget", "a\udcff", "--apply"], "KEY: it is not UTF-8"),
        (["explain", "a", "--tenant", "\udcff"], "--tenant: it is not UTF-8"),
        (["forget", "a", "--tenant", "\udcff"], "--tenant: it is not UTF-8"),
        (["sql", "SELECT '\udcff'"], "QUERY: it is not UTF-8"),
        (["explain"], "KEY, --key-json: no key is named"),
        (["forget", "a", "--key-json", '"a"'], "KEY, --key-json: two keys are named"),
        (["explain", "-5"], "comes behind `--`"),
        (["forget", "-key"], "comes behind `--`"),
        (["explain", "--key-json", "7"], "--key-json: `7` is no JSON string"),
        (["forget", "--key-json", '"a'], '--key-json: `"a` is no JSON string'),
        (["explain", "--key-json", '"\\ud800"'], "--key-json: half a surrogate pair is no text"),
        (["rebuild", "--into", "r", "--timeout", "0s"], "--timeout: `0s` is too short"),
        (["rebuild", "--into", "r", "--timeout", "-5m"], "--timeout: `-5m` is not a duration"),
        (["rebuild", "--into", "r", "--gap", "x", "--max", "1m"], "--gap: `x` is not a duration"),
        (["rebuild", "--into", "r", "--gap", "1m", "--max", ""], "--max: `` is not a duration"),
        (["rebuild", "--into", "r", "--tenant-max-lag", "1"], "--tenant-max-lag: `1` is not a dur"),
        (["explain", "a", "--as-of", "9" * 5000], "is not a time; use a version of silver"),
        (["sql", "SELECT 1", "--at", "9" * 5000], "is not a time; use a version of silver"),
        (["reset", "--to", "1900-01-01"], "--to: `1900-01-01` is out of range"),
        (["reset", "--to", "9999-12-31T23:00-02"], "--to: `9999-12-31T23:00-02` is out of range"),
        (
            ["redrive", "--reason", "no_key", "--since", "1969-12-31"],
            "--since: `1969-12-31` is out of range",
        ),
        (["explain", "a", "--as-of", "0001-01-01"], "--as-of: `0001-01-01` is out of range"),
        (["rebuild", "--into", "s3://x/y"], "--into: `s3://` begins a URI; name a path on this"),
        (["report", "--out", "s3://x/r.html"], "--out: `s3://` begins a URI; name a path on this"),
        (["check", "--html", "abfss://c@x/r.html"], "--html: `abfss://` begins a URI"),
        (["broker", "start", "--dir", "file:///x"], "--dir: `file://` begins a URI"),
    ],
)
def test_an_argument_that_means_nothing_is_bad_usage_in_one_sentence(
    tmp_path: Path, command: list[str], sentence: str
) -> None:
    path = config(tmp_path)
    done = in_process(*command, "-c", path, cwd=tmp_path)
    assert_one_sentence(done, sentence, exit_code=2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "command",
    [
        ["forget", "a"],
        ["forget", "a", "--apply"],
        ["redrive", "--reason", "no_key"],
        ["redrive", "--reason", "no_key", "--apply"],
        ["evolve"],
        ["evolve", "--apply"],
        ["maintain"],
        ["reset", "--to", "latest"],
        ["reset", "--to", "latest", "--yes"],
    ],
)
def test_where_no_lake_has_begun_what_changes_one_is_bad_usage_and_creates_nothing(
    tmp_path: Path, command: list[str]
) -> None:
    path = config(tmp_path)
    done = in_process(*command, "-c", path, cwd=tmp_path)
    assert_one_sentence(done, f"lake: no lake has begun at {tmp_path / 'lake'}", exit_code=2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("is_written", [True, False])
def test_validate_lists_what_is_wrong_with_a_configuration(
    tmp_path: Path, is_written: bool
) -> None:
    path = config(tmp_path, publish={"topic": "orders"}) if is_written else tmp_path / "missing.yml"
    done = in_process("validate", "--json", "-c", path, cwd=tmp_path)
    assert done.returncode == 2
    found = json.loads(done.stdout)
    assert found.keys() == {"ok", "problems"}
    assert found["ok"] is False
    [problem] = found["problems"]
    assert problem.keys() == {"what", "where", "fix"}
    assert (
        "publish.topic is the topic of source `orders`" if is_written else "cannot be read"
    ) in problem["what"]
    assert str(path) in problem["where"]
    assert problem["fix"]


def test_validate_shows_people_what_is_wrong_too(tmp_path: Path) -> None:
    done = in_process("validate", "-c", config(tmp_path, name="two words"), cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "two words" in " ".join((done.stdout + done.stderr).split())


# -- commands that need nothing


EXAMPLE = [
    *["watersmeet.yml", "examples.jsonl", "orders.json", "tracking.json", "merged.json"],
    *["completeness.json", "event_times.json", "fields.json", "freshness.json", "quarantine.json"],
]


def test_init_writes_the_example_once(tmp_path: Path) -> None:
    done = in_process("init", "new", cwd=tmp_path)
    assert done.returncode == 0
    written = [tmp_path / line for line in done.stdout.splitlines()]
    assert sorted(path.name for path in written) == sorted(EXAMPLE)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(written)
    (tmp_path / "new" / "watersmeet.yml").write_text("mine")
    again = in_process("init", "new", cwd=tmp_path)
    assert_one_sentence(again, "watersmeet.yml", "already exists", exit_code=2)
    assert (tmp_path / "new" / "watersmeet.yml").read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "where"),
    [(["init"], "DIRECTORY"), (["demo", "--dir"], "--dir"), (["fetch", "--into"], "--into")],
)
def test_a_uri_is_no_folder_of_this_machine(tmp_path: Path, command: list[str], where: str) -> None:
    done = in_process(*command, "s3://x/y", cwd=tmp_path)
    assert_one_sentence(done, f"{where}: `s3://` begins a URI", exit_code=2)
    assert not list(tmp_path.iterdir())


def test_the_broker_of_an_unknown_folder_does_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    expected = {
        "running": False,
        "port": None,
        "pid": None,
        "directory": str(folder),
        "secure": False,
    }
    for command in ("status", "stop"):
        done = in_process("broker", command, "--dir", "nowhere", "--json", cwd=tmp_path)
        assert (done.returncode, json.loads(done.stdout)) == (0, expected)
    assert not folder.exists()


def test_a_kafka_that_does_not_answer_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT_S", 1.0)
    with within(15):
        done = in_process("run", "--once", "-c", config(tmp_path), cwd=tmp_path)
    assert_one_sentence(done, "127.0.0.1:1", "kafka.bootstrap_servers", exit_code=1)
    assert not (tmp_path / "lake").exists()


# -- how failures end

ON_AN_EXECUTOR = """\
Job aborted due to stage failure: Task 0 in stage 9.0 failed 1 times, most recent failure:
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/pyspark/worker.py", line 3, in main
    process()
  File "/pipelines/watersmeet/kafka/publisher.py", line 99, in _publish
    raise BrokerError("first")
watersmeet.errors.BrokerError: not this one

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/pipelines/watersmeet/kafka/publisher.py", line 120, in _publish
    raise PublishingError(self.topic, partition, error.args[0].str()) from None
  watersmeet.errors.PublishingError: publishing to merged[3] failed: Broker: it is: what it is
\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
\tat java.base/java.lang.Thread.run(Thread.java:1)
Driver stacktrace:
"""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError(ON_AN_EXECUTOR), "publishing to merged[3] failed: Broker: it is: what it is"),
        (WatersmeetError("a plain one"), "a plain one"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
        (KeyError(), "KeyError"),
        (RuntimeError("\n \n"), "RuntimeError"),
    ],
)
def test_the_root_cause_is_our_own_sentence_where_there_is_one(
    error: Exception, sentence: str
) -> None:
    assert root_cause(error) == sentence


@pytest.mark.parametrize(
    ("error", "exit_code", "sentence"),
    [
        (WatersmeetError("it broke"), 1, "it broke"),
        (BrokerError("no broker"), 1, "no broker"),
        (ForeignMessageError("merged", 0, 7), 1, "merged[0] ends with a message at offset 7"),
        (ConfigurationError("it is wrong"), 2, "it is wrong"),
        (RuntimeError(ON_AN_EXECUTOR), 1, "publishing to merged[3] failed"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (PanicException("no thread"), 1, "PanicException: no thread"),
    ],
)
def test_every_failure_ends_as_one_sentence_and_its_exit_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    sentence: str,
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (exit_code, "")
    [line] = err.splitlines()
    assert line.startswith(f"watersmeet: {sentence}")


# -- signals


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Restore the handlers of signals after the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_heard_though_the_main_thread_holds_the_lock_of_an_event(number: int) -> None:
    lock = threading.Lock()

    class Event(threading.Event):
        """Waits no longer for its lock than a test may; an event of its own would wait for ever."""

        def set(self) -> None:
            if lock.acquire(timeout=1):
                super().set()
                lock.release()

    asked_to_stop = Event()
    stopping = Event()
    cli._set_by_signals(asked_to_stop, stopping)
    with lock:
        signal.raise_signal(number)
    assert stopping.wait(5)
    assert asked_to_stop.is_set()

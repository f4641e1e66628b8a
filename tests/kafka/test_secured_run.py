"""A whole pipeline on a secured broker: it has just the permissions that it needs, misses each, and
tells nobody its password."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cases import expected_messages
from tests.support.configurations import settings_for
from tests.support.effort import first_then_nightly
from tests.support.rivers import FOLDER, Losses, River, RunProcess, until
from tests.support.secured import SecuredBroker
from tests.support.timing import within
from tests.support.tokens import SECRET, new_key
from tests.support.topics import dead_letters, published
from watersmeet.dev import secure
from watersmeet.dev.certificates import Authority
from watersmeet.kafka.cluster import written_topics
from watersmeet.kafka.permissions import permissions

pytestmark = pytest.mark.long

SECONDS = 60
"""A process is up, has found the cause and is gone: some seconds, more on a busy machine. What may
pass is waited for longer."""

LETTERS = ("late_topic", "quarantine_topic")
"""Every river has both topics of dead letters."""

NewRiver = Callable[..., River]


@pytest.fixture
def new_river(
    secured: SecuredBroker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> NewRiver:
    """Makes a river whose runs log in as the broker's own user, which may do just what they
    need."""
    monkeypatch.setenv(secure.PASSWORD_VARIABLE, secured.own_password)

    def make(*, user: str = secure.USER, **overrides: Any) -> River:
        way_in = {
            "kafka__bootstrap_servers": secured.servers,
            "kafka__options": secure.user_options(secured.status.directory),
        }
        letters = {f"publish__{field}": f"{topic}-{field}" for field in LETTERS}
        river = River.make(
            secured.admin,
            tmp_path / "river",
            topic,
            partitions=1,
            **{**way_in, **letters, **overrides},
        )
        secured.grant(user, *permissions(river.settings))
        river.flow()
        river.flow()
        return river

    return make


def ends(run: RunProcess, exit_code: int) -> str:
    """The one sentence that a run ends with, within seconds."""
    with within(SECONDS):
        assert run.wait() == exit_code, run.said()
    *before, sentence = run.log.read_text().splitlines()
    assert sentence.startswith("watersmeet: ")
    assert not any(line.startswith(("Traceback", "watersmeet: ")) for line in before[-5:]), (
        run.said()
    )
    return sentence


def command(river: River, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "watersmeet", *words, "-c", str(river.file)]
    return subprocess.run(
        program, capture_output=True, text=True, timeout=120, check=False, cwd=river.folder
    )


# -- the right way in


class CommandLines:
    """What stood on the command line of any process of a run, as long as it ran."""

    def __init__(self, run: RunProcess) -> None:
        self.seen: set[str] = set()
        self._run, self._done = run, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.25):
            for process in self._run.family():
                with suppress(psutil.Error):
                    self.seen.add(" ".join(process.cmdline()))

    def stop(self) -> set[str]:
        self._done.set()
        self._thread.join()
        return self.seen


def files_with(folder: Path, secret: str) -> list[str]:
    assert any(folder.rglob("*.parquet"))
    return [
        str(file)
        for file in folder.rglob("*")
        if file.is_file() and secret.encode() in file.read_bytes()
    ]


@pytest.mark.promise("K6")
@pytest.mark.timeout(900)
def test_a_pipeline_runs_publishes_and_recovers_and_tells_nobody_its_password(
    secured: SecuredBroker, new_river: NewRiver, topic: str
) -> None:
    river, password = new_river(), secured.own_password
    run = river.run("--once")
    lines = CommandLines(run)
    assert run.wait() == 0, run.said()
    seen = lines.stop()
    assert any("watersmeet run" in line for line in seen)
    assert [line for line in seen if password in line] == []
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert all(dead_letters(river.kafka, f"{topic}-{field}", 1) for field in LETTERS)

    told = [
        command(river, *words.split())
        for words in ("validate --json", "status --json", "explain a --json", "verify")
    ]
    assert [done.returncode for done in told] == [0, 0, 0, 0], told
    assert [done for done in told if password in done.stdout + done.stderr] == []

    shutil.rmtree(river.folder / "lake")
    river.config["kafka"]["start"] = "sink"
    river.write()
    river.flow()
    river.finish()
    assert Counter(published(river.kafka, river.sink, 1)) == Counter(expected_messages(river.cases))
    assert files_with(river.folder, password) == []
    broker_itself = psutil.Process(secured.status.pid)
    assert password not in " ".join(broker_itself.cmdline())
    for name in ("broker.log", "server.properties", "broker.json"):
        assert password not in (secured.status.directory / name).read_text()


@pytest.mark.promise("K6")
@pytest.mark.timeout(900)
def test_spark_writes_the_password_into_no_plan_event_log_table_or_command_line(
    secured: SecuredBroker, new_river: NewRiver, tmp_path: Path
) -> None:
    events = tmp_path / "events"
    events.mkdir()
    log_all = {
        "spark.eventLog.enabled": True,
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": False,
        "spark.eventLog.rolling.enabled": False,
    }
    river = new_river(lake=FOLDER, spark=log_all)
    river.flow(records=6_000)  # more than this process reads without a job of Spark
    run = river.run("--once")
    lines = CommandLines(run)
    assert run.wait() == 0, run.said()
    seen = lines.stop()
    assert river.losses() == Losses()
    assert any("java" in line.split()[0] for line in seen if line)
    assert [line for line in seen if secured.own_password in line] == []
    assert any("physicalPlanDescription" in file.read_text() for file in events.iterdir())
    assert files_with(tmp_path, secured.own_password) == []


# -- every wrong one


def test_a_wrong_password_ends_a_run_with_one_sentence(
    secured: SecuredBroker, new_river: NewRiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    river = new_river()
    monkeypatch.setenv(secure.PASSWORD_VARIABLE, "hunter2-hunter2")
    sentence = ends(river.run("--once"), 1)
    assert "refuses the login" in sentence
    assert "check sasl.username, sasl.password" in sentence
    assert "hunter2" not in river.run_log


def test_an_untrusted_certificate_ends_a_run_with_one_sentence(
    secured: SecuredBroker, new_river: NewRiver, tmp_path: Path
) -> None:
    river = new_river()
    (tmp_path / "stranger.crt").write_bytes(Authority("stranger").certificate)
    river.config["kafka"]["options"]["ssl.ca.location"] = str(tmp_path / "stranger.crt")
    river.write()
    assert "the certificate of Kafka at" in ends(river.run("--once"), 1)


PERMISSIONS = permissions(
    settings_for(Path("/"), **{f"publish__{field}": field for field in LETTERS})
)
"""Those of each river have the same order."""
SOURCES_OF_PERMISSIONS = [one.name for one in PERMISSIONS if one.why == "bronze reads it"]
NEEDED_BY_A_RUN = [
    i
    for i, one in enumerate(PERMISSIONS)
    if one.kind != "group"
    and (one.operation != "DESCRIBE_CONFIGS" or one.name in SOURCES_OF_PERMISSIONS)
]
"""Nothing depends on those for groups, and of topics that are written to, only `validate` asks for
settings."""


@pytest.mark.promise("K5")
@pytest.mark.fault("outage", oracle=True)
@pytest.mark.parametrize(
    "number",
    first_then_nightly(NEEDED_BY_A_RUN),
    ids=lambda i: f"{PERMISSIONS[i].operation}-{PERMISSIONS[i].name}",
)
def test_a_missing_permission_is_one_sentence_and_nothing_is_lost(
    secured: SecuredBroker, new_river: NewRiver, number: int
) -> None:
    river = new_river()
    missing = permissions(river.settings)[number]
    written = written_topics(river.settings).values()
    # Which is not read while it is empty.
    if missing.operation == "READ" and missing.name in written:
        river.finish()
        river.flow()
    secured.revoke(secure.USER, missing)
    sentence = ends(river.run("--once"), 1)
    assert f"on {missing.kind} {missing.name} " in sentence
    assert (
        f"does not allow {missing.operation} " in sentence
        or f"grant {missing.operation}, which includes it," in sentence
    )

    secured.grant(secure.USER, missing)
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.nightly
def test_validate_names_the_permission_that_it_misses(
    secured: SecuredBroker, new_river: NewRiver
) -> None:
    river = new_river()
    river.finish()
    written = written_topics(river.settings).values()
    for missing in [
        p
        for p in permissions(river.settings)
        if p.operation == "DESCRIBE_CONFIGS" and p.name in written
    ]:
        secured.revoke(secure.USER, missing)
        done = command(river, "validate", "--json")
        assert done.returncode == 2
        assert f"does not allow DESCRIBE_CONFIGS on topic {missing.name}" in done.stdout
        secured.grant(secure.USER, missing)


@pytest.mark.nightly
@pytest.mark.promise("K5")
@pytest.mark.fault("outage", oracle=True)
def test_a_permission_that_is_taken_away_under_way_ends_the_run_and_nothing_is_lost(
    secured: SecuredBroker, new_river: NewRiver
) -> None:
    river = new_river()
    run = river.run()
    try:
        until(
            lambda: "published to" in run.log.read_text() or run.process.poll() is not None,
            "the first messages",
        )
        missing = permissions(river.settings)[0]
        secured.revoke(secure.USER, missing)
        river.flow()
        sentence = ends(run, 1)
    finally:
        run.kill()
    assert f" on topic {missing.name} " in sentence
    assert "does not allow" in sentence
    secured.grant(secure.USER, missing)
    river.finish()
    assert river.losses() == Losses()


# -- other ways in


@pytest.mark.nightly
def test_a_pipeline_logs_in_with_a_token(secured: SecuredBroker, new_river: NewRiver) -> None:
    options = {**secured.issuer.options, "ssl.ca.location": str(secured.folder / "ca.crt")}
    river = new_river(user="pipeline", kafka__options=options)
    run = river.run("--once")
    assert run.wait() == 0, run.said()
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert SECRET not in river.run_log


def test_a_refused_token_is_one_sentence(
    secured: SecuredBroker, new_river: NewRiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**secured.issuer.options, "ssl.ca.location": str(secured.folder / "ca.crt")}
    river = new_river(user="pipeline", kafka__options=options)
    monkeypatch.setattr(secured.issuer, "key", new_key())  # which the broker does not know
    sentence = ends(river.run("--once"), 1)
    assert "by a token fails" in sentence
    assert "check the sasl.oauthbearer. options" in sentence


def test_a_token_that_is_not_given_is_one_sentence(
    secured: SecuredBroker, new_river: NewRiver
) -> None:
    wrong = {"sasl.oauthbearer.client.secret": "hunter2-hunter2"}
    options = {**secured.issuer.options, **wrong, "ssl.ca.location": str(secured.folder / "ca.crt")}
    sentence = ends(new_river(user="pipeline", kafka__options=options).run("--once"), 1)
    assert "hunter2" not in sentence
    assert "by a token fails" in sentence
    assert "check the sasl.oauthbearer. options" in sentence


@pytest.mark.nightly
def test_a_pipeline_logs_in_with_a_certificate(secured: SecuredBroker, new_river: NewRiver) -> None:
    river = new_river(
        kafka__bootstrap_servers=secured.admin.bootstrap_servers,
        kafka__options=secured.admin.options,
    )
    river.finish()
    assert river.losses() == Losses()

"""A run, as Prometheus, Kafka's tools and a log collector see it: they say what `status` says, and
what is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from tests.support.cases import SOURCES, heartbeat
from tests.support.metrics import Exposed, asked, expressions, scrape
from tests.support.rivers import EMBEDDED, FOLDER, River, RunProcess, until
from tests.support.topics import committed, produce
from watersmeet.ask.status import status
from watersmeet.dev.processes import free_port
from watersmeet.errors import LeaseLostError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.lease import Lease
from watersmeet.monitoring.metrics import Metrics
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

pytestmark = pytest.mark.long

PARTITIONS = 2
SECRET = "hunter2!secret"


def river_with_metrics(kafka: str, folder: Path, name: str, **overrides: Any) -> tuple[River, int]:
    port = free_port()
    # A broker without a login asks for neither.
    options = {
        "sasl.password": SECRET,
        "ssl.key.password": SECRET,
    }
    settings: dict[str, Any] = {"metrics": {"port": port}, "kafka__options": options}
    return River.make(kafka, folder, name, partitions=PARTITIONS, **settings, **overrides), port


def exposed(run: RunProcess, port: int) -> Exposed:
    assert run.process.poll() is None, run.said()
    return scrape(port) or Exposed("")


class Watched:
    """A run that has merged and published what there is, while `tracking` waits for `orders`: what
    it exposes, and `status`."""

    def __init__(self, kafka: str, folder: Path) -> None:
        self.river, self.port = river_with_metrics(
            kafka, folder, "watched", quality={"suites": [], "every": 1}
        )
        self.river.flow()
        self.river.flow()
        self.river.flow("tracking")
        self.process = self.river.run("--log-format", "json")
        until(self._stands_still, "a run that has caught up, and has said so")
        self.status = status(self.river.reader, self.river.settings)["partitions"]
        self.seen = exposed(self.process, self.port)

    def _stands_still(self) -> bool:
        seen = exposed(self.process, self.port)
        lags = [seen.value("watersmeet_lag_records", layer=layer) for layer in ("bronze", "silver")]
        held = seen.value("watersmeet_source_state", state="held")
        is_sampled = (seen.value("watersmeet_open_rows") or 0) > 0 and seen.value(
            "watersmeet_quality_failed"
        ) == 0
        return lags == [0, 13 * PARTITIONS] and held == PARTITIONS and is_sampled

    def topic(self, source: str) -> str:
        return str(self.river.config["sources"][source]["topic"])


@pytest.fixture(scope="module")
def watched(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    watched = Watched(kafka, tmp_path_factory.mktemp("watched"))
    try:
        yield watched
    finally:
        watched.process.kill()


@pytest.mark.promise("A15")
def test_metrics_say_what_status_says(watched: Watched) -> None:
    seen = watched.seen
    for row in watched.status:
        p = row["partition"]
        assert seen.value("watersmeet_clock_seconds", partition=p) == row["clock"] / 1000
        assert (
            seen.value("watersmeet_sequence", topic=watched.river.sink, partition=p)
            == row["published"] - 1
        )
        for source, at in row["sources"].items():
            place = {"topic": watched.topic(source), "partition": p}
            assert seen.value("watersmeet_head_seconds", **place) == at["head"] / 1000
            assert seen.value("watersmeet_lead_seconds", **place) == at["lead"] / 1000
            assert seen.value("watersmeet_lag_records", layer="silver", **place) == at["lag"]
            assert seen.value("watersmeet_source_state", state=at["state"], **place) == 1
            assert seen.value("watersmeet_source_state", **place) == 1
            assert (seen.value("watersmeet_lag_seconds", **place) or 0) > 0 or at["lag"] == 0
    assert seen.value("watersmeet_open_rows") == sum(row["open"] for row in watched.status)


def test_records_are_counted_by_what_became_of_them(watched: Watched) -> None:
    seen, rows = watched.seen, watched.status
    records = "watersmeet_records_total"
    assert seen.value(records, outcome="quarantined") == sum(row["quarantined"] for row in rows) > 0
    assert seen.value(records, outcome="late") == sum(row["late"] for row in rows) > 0
    assert seen.value(records, layer="gold", topic=watched.river.sink) == sum(
        row["published"] for row in rows
    )
    for source in SOURCES:
        sent = sum(len(case.values[source]) for case in watched.river.cases.values())
        assert seen.value(records, layer="bronze", topic=watched.topic(source)) == sent
        waiting = sum(row["sources"][source]["lag"] for row in rows)
        refused = {"topic": watched.topic(source), "outcome": "quarantined"}
        merged = seen.value(records, layer="silver", topic=watched.topic(source)) or 0
        # Of the refused, some wait.
        assert 0 <= sent - waiting - merged <= (seen.value(records, **refused) or 0)


def test_every_metric_and_label_of_dashboard_and_alerts_is_exposed(watched: Watched) -> None:
    seen = watched.seen
    for expression in expressions():
        for name, labels, _ in asked(expression):
            assert name in seen.names, expression
            assert labels <= seen.labels(name) | {"job", "instance"}, expression


@pytest.mark.promise("A15")
def test_kafkas_own_lag_is_that_of_status(watched: Watched) -> None:
    river, topics, cluster = (
        watched.river,
        list(map(watched.topic, SOURCES)),
        Cluster(watched.river.settings.kafka),
    )
    ends = {
        (topic, p): end
        for topic in topics
        for p, (_, end) in cluster.bounds(topic, PARTITIONS).items()
    }

    def lags(layer: str) -> dict[tuple[str, int], int]:
        group = f"watersmeet-watched-{layer}"
        offsets = {
            (t, p): at
            for t in topics
            for p, at in committed(river.kafka, group, t, PARTITIONS).items()
        }
        return {place: ends[place] - offset for place, offset in offsets.items()}

    by_status = {
        (watched.topic(s), row["partition"]): at["lag"]
        for row in watched.status
        for s, at in row["sources"].items()
    }
    until(lambda: lags("silver") == by_status, "the lag of silver", 30)
    until(lambda: lags("bronze") == dict.fromkeys(ends, 0), "the lag of bronze", 30)


def test_every_line_of_the_log_is_a_json_object(watched: Watched) -> None:
    lines = [json.loads(line) for line in watched.process.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    [batch] = [line for line in lines if line.get("layer") == "silver"]
    assert batch["facts"]["batch"] == 0
    assert (
        sum(
            line["facts"]["records"]
            for line in lines
            if line.get("layer") == tables.bronze("tracking")
        )
        == 78
    )


def test_no_secret_and_no_key_is_shown(watched: Watched) -> None:
    for text in (watched.seen.text, watched.process.log.read_text()):
        assert text
        assert SECRET not in text
    labels = {value for _, labels, _ in watched.seen.samples for value in labels.values()}
    assert not labels & {"a", "b", "é", "\U0001f600", "z"}


def test_a_silent_source_is_seen_and_its_return_too(watched: Watched) -> None:
    """Last, since it changes what the others look at."""
    river, process, port = watched.river, watched.process, watched.port
    before = exposed(process, port).value("watersmeet_clock_seconds", partition=0)
    leads = {
        s: exposed(process, port).value(
            "watersmeet_lead_seconds", topic=watched.topic(s), partition=0
        )
        for s in SOURCES
    }
    assert leads == {"tracking": 1, "orders": 0}
    river.flow("tracking")
    lead = {"topic": watched.topic("tracking"), "partition": 0}
    until(
        lambda: exposed(process, port).value("watersmeet_lead_seconds", **lead) == 2,
        "a growing lead",
        60,
    )
    assert exposed(process, port).value("watersmeet_clock_seconds", partition=0) == before
    produce(
        river.kafka, watched.topic("orders"), [(p, heartbeat(9_000)) for p in range(PARTITIONS)]
    )
    until(
        lambda: exposed(process, port).value("watersmeet_lead_seconds", **lead) == 0,
        "the clock's way on",
        60,
    )
    assert (exposed(process, port).value("watersmeet_clock_seconds", partition=0) or 0) > (
        before or 0
    )
    assert process.stop() == 0, process.said()


def test_an_owner_that_was_replaced_says_so(kafka: str, tmp_path: Path) -> None:
    settings = River.make(kafka, tmp_path, "replaced-owner", partitions=PARTITIONS).settings
    metrics = Metrics(settings)
    run = Run(settings, LAYERS, Reporter(), observers=[metrics])
    with ExitStack() as owning:
        owned = owning.enter_context(run.take_layers())
        before = _exposed(metrics)
        assert before.value("watersmeet_owner") == len(LAYERS)
        assert before.value("watersmeet_owner_token", layer="gold") == owned.owner.token
        engine = run.engine
        Lease(
            engine.lake,
            engine.reader,
            engine.append,
            LAYERS,
            renews=False,
            is_dead=lambda _: True,
        ).take()
        until(lambda: _exposed(metrics).value("watersmeet_owner") == 0, "the takeover", 60)
        with pytest.raises(LeaseLostError):
            owned.raise_if_lost()
        with pytest.raises(LeaseLostError):  # it looks once more at its end
            owning.close()


@pytest.mark.nightly
@pytest.mark.promise("A15")
@pytest.mark.fault("engines")
@pytest.mark.timeout(900)
def test_both_engines_count_the_same(kafka: str, tmp_path: Path) -> None:
    found = []
    for lake in (EMBEDDED, FOLDER):
        river = River.make(
            kafka, tmp_path / lake, f"counts-{lake}", lake=lake, partitions=PARTITIONS
        )
        river.flow()
        river.flow()
        river.flow("tracking")
        metrics = Metrics(river.settings)
        Run(river.settings, LAYERS, Reporter(), observers=[metrics]).once()
        samples = _exposed(metrics).samples
        steps = {
            tuple(labels.values())
            for name, labels, _ in samples
            if name == "watersmeet_step_seconds_count"
        }
        assert steps >= {("silver", "merge"), ("gold", "publish"), ("bronze", "append")}
        told = [
            (name, _without(labels, lake), value)
            for name, labels, value in samples
            if _is_counted(name)
        ]
        found.append(sorted(told, key=repr))
    assert found[0] == found[1]
    assert {name for name, _, _ in found[0]} >= {
        "watersmeet_records_total",
        "watersmeet_clock_seconds",
        "watersmeet_sequence",
    }


def _exposed(metrics: Metrics) -> Exposed:
    return Exposed(generate_latest(metrics.registry).decode())


def _is_counted(name: str) -> bool:
    """Whether a metric does not depend on time, or on how the input is cut into batches."""
    others = (
        "watersmeet_step",
        "watersmeet_commits",
        "watersmeet_build",
        "watersmeet_lag",
        "watersmeet_open",
        "process_",
    )
    return not name.startswith(others)


def _without(labels: dict[str, str], lake: str) -> dict[str, str]:
    return {label: value.replace(f"-{lake}", "") for label, value in labels.items()}


# -- what cannot be served, and how a failure is logged


def watersmeet(river: River, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "watersmeet", *arguments, "-c", str(river.file)]
    return subprocess.run(
        command, cwd=river.folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_an_address_that_cannot_be_used_is_one_sentence(
    kafka: str, tmp_path: Path, address: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        river = River.make(
            kafka, tmp_path, f"busy-{address}", metrics={"port": port, "address": address}
        )
        done = watersmeet(river, "run", "--once")
    assert done.returncode == 2
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"watersmeet: metrics: port {port} of {address} cannot be used (")


def test_a_failure_is_a_json_line_too(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "failing", sources__orders__topic="failing-nowhere")
    done = watersmeet(river, "run", "--once", "--log-format", "json")
    assert done.returncode == 2
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["level"], line["facts"]) == ("ERROR", {"exit_status": 2})
    assert "there is no topic failing-nowhere" in line["message"]

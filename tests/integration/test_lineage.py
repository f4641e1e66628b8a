"""Lineage: one event for each batch of a layer, in a file or at a backend; a backend that fails
stops nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from openlineage.client import OpenLineageClient

from tests.support.configurations import SMALLEST, settings_for
from tests.support.panics import PanicException
from tests.support.rivers import Losses, River
from watersmeet.dev.processes import free_port
from watersmeet.errors import ConfigurationError
from watersmeet.monitoring.events import RecordsProcessed
from watersmeet.running.lineage import Dataset, sending
from watersmeet.settings import load_settings


class Backend(BaseHTTPRequestHandler):
    """Keeps what is posted to it, and answers with the server's status."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.events.append((self.path, json.loads(body)))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def backend() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Backend)
    server.events, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def names(datasets: list[dict[str, Any]]) -> list[Dataset]:
    return [Dataset(dataset["namespace"], dataset["name"]) for dataset in datasets]


def rows(datasets: list[dict[str, Any]]) -> list[int | None]:
    return [
        dataset.get("outputFacets", {}).get("outputStatistics", {}).get("rowCount")
        for dataset in datasets
    ]


@pytest.mark.long
def test_each_batch_of_a_layer_is_an_event_with_its_datasets(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "lineage", lineage={"file": "lineage.jsonl"})
    river.flow()
    river.flow()
    river.finish()
    events = [json.loads(line) for line in (tmp_path / "lineage.jsonl").read_text().splitlines()]
    by_job: dict[str, list[Any]] = {}
    for event in events:
        assert event["job"]["namespace"] == "watersmeet"
        assert event["eventType"] == "COMPLETE"
        by_job.setdefault(event["job"]["name"], []).append(event)
    assert sorted(by_job) == ["lineage.bronze", "lineage.gold", "lineage.silver"]
    assert len({event["run"]["runId"] for event in events}) == len(events)

    def table(name: str) -> Dataset:
        return Dataset("file", f"{tmp_path}/lake/{name}")

    [of_tracking] = [
        e
        for e in by_job["lineage.bronze"]
        if names(e["inputs"]) == [Dataset(f"kafka://{kafka}", "lineage-tracking")]
    ]
    assert names(of_tracking["outputs"]) == [table("bronze_tracking")]
    assert rows(of_tracking["outputs"])[0] == sum(
        len(case.values["tracking"]) for case in river.cases.values()
    )
    bronze = [table("bronze_tracking"), table("bronze_orders")]
    read = [names(event["inputs"]) for event in by_job["lineage.silver"]]
    assert all(inputs == [each for each in bronze if each in inputs] for inputs in read), (
        "of a batch, what it passes"
    )
    assert {each for inputs in read for each in inputs} == set(bronze)
    assert all(names(event["outputs"]) == [table("silver")] for event in by_job["lineage.silver"])
    assert [names(event["inputs"]) for event in by_job["lineage.gold"]] == [
        [table("silver")]
    ] * len(by_job["lineage.gold"])
    assert sum(rows(event["outputs"])[0] or 0 for event in by_job["lineage.gold"]) > 0
    assert river.losses() == Losses()


def test_a_backend_gets_the_events(backend: Any, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{backend.server_port}"
    with sending(settings_for(tmp_path, lineage={"url": url})) as [notify]:
        notify(RecordsProcessed("gold", {"merged": {("published", ""): 3}}))
    [(path, event)] = backend.events
    assert path == "/api/v1/lineage"
    assert (names(event["outputs"]), rows(event["outputs"])) == (
        [Dataset("kafka://127.0.0.1:1", "merged")],
        [3],
    )


def test_a_backend_that_fails_is_one_warning(
    backend: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend.status = 500
    for port in (backend.server_port, free_port()):
        caplog.clear()
        with sending(settings_for(tmp_path, lineage={"url": f"http://127.0.0.1:{port}"})) as [
            notify
        ]:
            for _ in range(3):
                notify(RecordsProcessed("gold", {"merged": {("published", ""): 3}}))
        [warning] = [
            record.getMessage() for record in caplog.records if record.name == "watersmeet.lineage"
        ]
        assert "the run goes on" in warning
    assert len(backend.events) == 3


def test_a_panic_in_the_client_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: Any) -> None:
        raise PanicException("no thread")

    monkeypatch.setattr(OpenLineageClient, "emit", panic)
    with sending(settings_for(tmp_path, lineage={"url": "http://127.0.0.1:1"})) as [notify]:
        for _ in range(3):
            notify(RecordsProcessed("gold", {"merged": {("published", ""): 3}}))
    [warning] = [
        record.getMessage() for record in caplog.records if record.name == "watersmeet.lineage"
    ]
    assert "(PanicException); the run goes on" in warning


@pytest.mark.parametrize(
    ("lake", "dataset"),
    [
        ("s3://bucket/some/lake", Dataset("s3://bucket", "some/lake/silver")),
        ("s3://bucket", Dataset("s3://bucket", "silver")),
        ("file:/data/lake", Dataset("file", "/data/lake/silver")),
        ({"catalog": "main", "schema": "shop"}, Dataset("catalog://main", "shop.silver")),
    ],
)
def test_a_table_is_named_after_its_store(tmp_path: Path, lake: Any, dataset: Dataset) -> None:
    file = tmp_path / "events.jsonl"
    with sending(
        settings_for(tmp_path, lake=lake, checkpoints=str(tmp_path), lineage={"file": str(file)})
    ) as [notify]:
        notify(RecordsProcessed("silver", {"tracking": {("merged", ""): 1}}))
    [event] = map(json.loads, file.read_text().splitlines())
    assert names(event["outputs"]) == [dataset]


@pytest.mark.parametrize(
    "lineage",
    [{}, {"file": "a", "url": "http://h"}, {"url": "http://me:hunter2@h"}, {"url": "h:5000"}],
)
def test_lineage_goes_to_one_place_without_a_password(
    tmp_path: Path, lineage: dict[str, str]
) -> None:
    file = tmp_path / "watersmeet.yml"
    file.write_text(yaml.safe_dump({**SMALLEST, "lineage": lineage}))
    with pytest.raises(ConfigurationError, match="lineage") as caught:
        load_settings(file)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)

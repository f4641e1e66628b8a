"""Open transactions of other producers: no silence, and told wherever somebody asks how the sources
stand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer
from prometheus_client import generate_latest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.cases import heartbeat, keyed
from tests.support.inputs import tp_of
from tests.support.metrics import Exposed
from tests.support.rivers import River, until
from tests.support.topics import produce, published
from watersmeet.ask.status import status
from watersmeet.audit.show import status_view
from watersmeet.cli import app
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.monitoring.events import Event, Sampled
from watersmeet.monitoring.metrics import Metrics
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running.sampling import Sampler

pytestmark = [pytest.mark.promise("C22"), pytest.mark.fault("silence")]

SINCE_MS = 1_700_000_000_000


def exposed(metrics: Metrics) -> Exposed:
    return Exposed(generate_latest(metrics.registry).decode())


@contextmanager
def open_transaction(
    river: River, source: str, *values: bytes, timestamp: int = SINCE_MS
) -> Iterator[Producer]:
    """Inside, a transaction with these records is open in partition 0; it is aborted at the end
    unless it was committed."""
    producer = Producer(
        {"bootstrap.servers": str(river.kafka), "transactional.id": f"other-{river.settings.name}"}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(river.topic(source), value, partition=0, timestamp=timestamp)
    assert producer.flush(30) == 0
    yield producer


def test_a_source_with_an_open_transaction_is_not_silent(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "open-silence", partitions=1)
    produce(kafka, river.topic("orders"), [(0, heartbeat(5))])
    after = {tp_of(river.settings.inputs_by_name["orders"], 0): 0}
    silence = IdleDetector(river.settings, 1)
    assert silence.has_nothing_beyond(after)
    with open_transaction(river, "orders", keyed("a", 10)) as producer:
        assert not silence.has_nothing_beyond(after)
        producer.abort_transaction(30)
    until(lambda: silence.has_nothing_beyond(after), "the end of the transaction")


def test_what_an_open_transaction_holds_is_merged_when_it_ends_and_never_late(
    kafka: str, tmp_path: Path
) -> None:
    """With the idle policy on: the other source is far ahead, and its records wait."""
    river = River.make(kafka, tmp_path, "open-merged", partitions=1, merge__idle_after="200ms")
    produce(kafka, river.topic("orders"), [(0, heartbeat(5))])
    produce(kafka, river.topic("tracking"), [(0, keyed("a", 10)), (0, heartbeat(100_000))])
    river.finish()
    with open_transaction(river, "orders", keyed("a", 12), heartbeat(100_000)) as producer:
        run = Run(river.settings, LAYERS, Reporter())
        running = threading.Thread(target=run.until_stopped)
        running.start()
        time.sleep(3)  # wall time is the point: the policy looks again and again meanwhile
        assert published(kafka, river.sink, 1) == []
        producer.commit_transaction(30)
        try:
            until(lambda: len(published(kafka, river.sink, 1)) == 1, "the message")
        finally:
            run.stopping.set()
            running.join()
    [message] = published(kafka, river.sink, 1)
    assert message.value is not None
    assert [len(json.loads(message.value)[source]) for source in ("tracking", "orders")] == [1, 1]


def test_status_validate_and_metrics_say_since_when_it_is_open_and_how_much_waits(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "open-told", partitions=2)
    for source in ("tracking", "orders"):
        produce(kafka, river.topic(source), [(p, heartbeat(5)) for p in (0, 1)])
    river.finish()
    sampled: list[Event] = []
    sampler = Sampler(river.settings, 2, ["bronze"], river.reader, sampled.append)
    expected = {"since": SINCE_MS, "offset": 1, "behind": 3}
    metrics, place = Metrics(river.settings), {"topic": river.topic("orders"), "partition": 0}
    with open_transaction(river, "orders", keyed("a", 10), keyed("b", 10)) as producer:
        produce(kafka, river.topic("orders"), [(0, heartbeat(6))])
        found = status(river.reader, river.settings)
        sources = [row["sources"] for row in found["partitions"]]
        assert sources[0]["orders"] == {
            "head": 5,
            "lead": 0,
            "lag": 0,
            "state": "active",
            "transaction": expected,
        }
        assert not any("transaction" in at for at in (sources[0]["tracking"], *sources[1].values()))
        console = Console(width=200, record=True, file=(tmp_path / "shown").open("w"))
        console.print(status_view(found))
        assert (
            "a transaction is open since 2023-11-14 22:13:20.000Z: 3 offsets wait behind it"
            in console.export_text()
        )
        answer = CliRunner().invoke(app, ["validate", "--json", "-c", str(river.file)])
        told = [{"source": "orders", "partition": 0, "transaction": expected}]
        answered = {**json.loads(answer.stdout), "warnings": "of event times in 1970"}
        assert answered == {
            "ok": True,
            "problems": [],
            "transactions": told,
            "warnings": "of event times in 1970",
        }
        assert answer.exit_code == 0
        sampler.sample()
        [event] = sampled
        assert isinstance(event, Sampled)
        metrics(event)
        assert exposed(metrics).value("watersmeet_open_transaction_offsets", **place) == 3
        assert (
            exposed(metrics).value("watersmeet_open_transaction_seconds", **place) or 0
        ) > time.time() - 1_800_000_000
        producer.commit_transaction(30)
    until(
        lambda: (
            "transaction"
            not in status(river.reader, river.settings)["partitions"][0]["sources"]["orders"]
        ),
        "the end",
    )
    sampler.sample()
    metrics(sampled[-1])
    for name in ("offsets", "seconds"):
        assert exposed(metrics).value(f"watersmeet_open_transaction_{name}", **place) == 0

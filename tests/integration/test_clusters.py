"""Clusters that are set up in a way that no run can work with, or that have moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import here
from tests.support.lives import Life
from tests.support.rivers import Losses, River
from tests.support.timing import within
from tests.support.topics import Change, as_it_was, make_again
from watersmeet.dev import broker
from watersmeet.errors import ConfigurationError

pytestmark = pytest.mark.long


@pytest.fixture
def wants_three(tmp_path: Path) -> Iterator[str]:
    """One broker, whose transaction log wants three replicas: Kafka's own defaults."""
    folder = tmp_path / "broker"
    defaults = {
        "transaction.state.log.replication.factor": "3",
        "transaction.state.log.min.isr": "2",
    }
    started = broker.start(folder, settings=defaults)
    assert started.bootstrap_servers is not None
    yield started.bootstrap_servers
    broker.stop(folder)


@pytest.mark.promise("K10")
@pytest.mark.fault("broker")
def test_a_transaction_log_that_cannot_be_made_is_named_by_validate_and_at_the_start(
    wants_three: str, tmp_path: Path
) -> None:
    river = River.make(wants_three, tmp_path / "river", "three-replicas")
    [problem] = json.loads(here(river, "validate", "--json", exit_code=2))["problems"]
    assert "transaction.state.log.replication.factor=3" in problem["what"]
    assert "1 broker" in problem["what"]
    river.flow()
    with within(60, "it is not waited for"):
        said = here(river, "run", "--once", exit_code=1)
    assert "transaction.state.log.replication.factor=3" in said


def move(river: River, change: Change = as_it_was) -> None:
    """Has the sources' topics made again with the records that they had; `change`: of those of
    `orders`."""
    make_again(river.kafka, river.topic("tracking"), river.partitions)
    make_again(river.kafka, river.topic("orders"), river.partitions, change)


@pytest.mark.promise("C25")
@pytest.mark.fault("broker", "topics", oracle=True)
def test_a_cluster_that_moved_with_records_and_offsets_is_the_same(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "moved-cluster")
    river.flow()
    river.finish()
    move(river)
    assert json.loads(here(river, "validate", "--json"))["ok"] is True
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []


@pytest.mark.promise("C25")
@pytest.mark.fault("topics")
def test_a_cluster_moves_with_a_source_that_never_had_a_record(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    life.send("tracking", ("a", 1000))
    life.run()
    move(life.river)
    life.run()
    life.send("orders", ("a", 1000))
    life.both((None, 1400))
    life.run()
    assert life.sent_once() == life.keyed


@pytest.mark.promise("C25")
@pytest.mark.fault("topics")
def test_redrive_knows_a_cluster_that_has_moved(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("a", 1000), ("", 1001))
    life.run()
    move(life.river)
    sent = json.loads(life.call("redrive", "--reason", "no_key", "--apply", "--json"))["sent"]
    assert sent == 2


@pytest.mark.promise("C25")
@pytest.mark.fault("topics")
@pytest.mark.parametrize(
    "change",
    [
        lambda m: (b'{"k":"other","ts":1}', m.timestamp()[1]),
        lambda m: (m.value(), m.timestamp()[1] + 1),
    ],
    ids=["other values", "other times"],
)
def test_a_topic_that_was_made_again_with_other_records_is_refused(
    kafka: str, tmp_path: Path, change: Change, request: pytest.FixtureRequest
) -> None:
    river = River.make(kafka, tmp_path, f"remade-{request.node.callspec.id.replace(' ', '-')}")
    river.flow()
    river.finish()
    move(river, change)
    with pytest.raises(
        ConfigurationError,
        match=r"^sources\.orders\.topic: remade-\S+ was deleted and made again since the lake was "
        r"begun",
    ):
        river.finish()

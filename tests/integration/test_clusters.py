"""Clusters that are set up in a way that no run can work with: the cause is named, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.dev import broker
from tests.support.commands import here
from tests.support.rivers import River

pytestmark = pytest.mark.long


@pytest.fixture
def wants_three(tmp_path: Path) -> Iterator[str]:
    """One broker, whose transaction log wants three replicas: Kafka's own defaults."""
    folder = tmp_path / "broker"
    defaults = {"transaction.state.log.replication.factor": "3", "transaction.state.log.min.isr": "2"}
    started = broker.start(folder, settings=defaults)
    assert started.bootstrap_servers is not None
    yield started.bootstrap_servers
    broker.stop(folder)


@pytest.mark.promise("K10")
def test_a_transaction_log_that_cannot_be_made_is_named_by_validate_and_at_the_start(wants_three: str, tmp_path: Path) -> None:
    river = River.make(wants_three, tmp_path / "river", "three-replicas")
    [problem] = json.loads(here(river, "validate", "--json", exit_code=2))["problems"]
    assert "transaction.state.log.replication.factor=3" in problem["what"]
    assert "1 broker" in problem["what"]
    river.flow()
    since = time.monotonic()
    said = here(river, "run", "--once", exit_code=1)
    assert "transaction.state.log.replication.factor=3" in said
    assert time.monotonic() - since < 60, "it is not waited for"

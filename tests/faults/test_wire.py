"""Random runs by a wire that lies: what a reader of committed messages has is what the mode says,
whatever is delayed, lost or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.wired import (
    LONG_STALLS_S,
    MODES,
    STALLS_S,
    publish_by,
    publish_stalled,
    run_by,
)
from tests.support import effort
from watersmeet.dev import broker

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.promise("N12", "N13", "N14")
@pytest.mark.fault("wire", oracle=True)
@pytest.mark.parametrize("seed", effort.seeds(14))
def test_a_publisher_keeps_its_promise_whatever_the_wire_does(kafka: str, seed: int) -> None:
    mode = MODES[seed % len(MODES)]
    assert publish_by(kafka, f"wired-{seed}", mode, f"{seed}/publisher/{mode}") == []


@pytest.mark.promise("N12", "N13", "N14")
@pytest.mark.fault("wire", oracle=True)
@pytest.mark.parametrize("seed", effort.seeds(6))
def test_a_pipeline_gives_what_the_merge_model_gives_whatever_the_wire_does(
    kafka: str, tmp_path: Path, seed: int
) -> None:
    mode = MODES[seed % len(MODES)]
    assert run_by(kafka, tmp_path, f"wired-run-{seed}", mode, f"{seed}/pipeline/{mode}") == []


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Process]]:
    """A broker that nobody else has, and its process."""
    folder = tmp_path_factory.mktemp("stalled")
    started = broker.start(folder)
    assert started.bootstrap_servers is not None
    yield started.bootstrap_servers, psutil.Process(started.pid)
    broker.stop(folder)


@pytest.mark.promise("N12", "N13", "N14")
@pytest.mark.fault("broker", oracle=True)
@pytest.mark.parametrize("seed", effort.seeds(len(MODES)))
def test_a_publisher_keeps_its_promise_when_its_broker_stands_still(
    own_broker: tuple[str, psutil.Process], seed: int
) -> None:
    mode = MODES[seed % len(MODES)]
    longest_s = LONG_STALLS_S if effort.SEED else STALLS_S
    seed_text = f"{seed}/stalled/{mode}"
    assert publish_stalled(*own_broker, f"stalled-{seed}", mode, seed_text, longest_s) == []

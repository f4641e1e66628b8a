"""Random elections of leaders that lack what was read or published: refused, or exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.elections import play
from tests.support import effort
from tests.support.rivers import Losses, River
from tests.support.topics import published
from tests.support.truncated import truncated
from watersmeet.kafka import cluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.promise("C52"),
    pytest.mark.timeout(1200),
]


@pytest.mark.fault("broker", oracle=True)
def test_of_a_transaction_whose_end_a_broker_has_lost_nothing_is_seen_and_all_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is left of it is not taken for what retention has deleted."""
    monkeypatch.setattr(cluster, "SETTLING_S", 0.5)
    with truncated(tmp_path / "broker") as own:
        river = River.make(own.bootstrap_servers, tmp_path / "river", "cut", partitions=1)
        for _ in range(3):
            river.flow()
        river.finish()
        river.finish()  # once Kafka's coordinator knows that the transaction has ended
        _, end = cluster.Cluster(river.settings.kafka).bounds(river.sink, 1)[0]
        assert own.lose({(river.sink, 0): end - 1}) == {(river.sink, 0): end - 1}
        assert published(river.kafka, river.sink, 1) == []
        river.flow()
        river.finish()
        assert river.losses() == Losses()
        assert river.broken_promises() == []


@pytest.mark.nightly
@pytest.mark.fault("broker", oracle=True)
def test_what_a_broker_has_lost_is_told_or_costs_nothing(tmp_path: Path) -> None:
    with truncated(tmp_path / "broker") as own:
        broken = play(own, tmp_path, effort.seeds(3))
    assert not any(broken.values()), broken

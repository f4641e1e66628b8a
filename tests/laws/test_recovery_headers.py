"""The headers from which a lost lake is taken up: on one message of a partition in a transaction, however many share its time."""

from __future__ import annotations

from pathlib import Path

from pipelines.engine.choice import open_engine
from pipelines.gold import Gold
from tests.support.cases import Case, expected_messages, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake
from tests.support.topics import consume, published


def test_of_many_messages_of_one_time_the_last_alone_has_them(kafka: str, tmp_path: Path) -> None:
    values: list[bytes | None] = [keyed(f"k{i:02d}", 5) for i in range(50)]
    case = Case({"tracking": [*values, heartbeat(10**6)], "orders": [heartbeat(10**6)]}, 100, ["tracking"] * 51 + ["orders"])
    settings = settings_for(tmp_path, bootstrap=kafka, publish__topic="recovery-headers", name="recovery")
    lake = CaseLake(open_engine(settings), settings, {0: case, 1: case})
    lake.arrive()
    lake.merge()
    [publications] = Gold(lake.owner(), settings, 2).drain()
    found = consume(kafka, "recovery-headers", 2)
    having = [(m.partition(), m.offset()) for m in found if "watersmeet.min_offsets" in dict(m.headers())]
    assert having == [(p.partition, p.tail.offset) for p in publications] == [(0, 49), (1, 49)]
    assert published(kafka, "recovery-headers", 2) == expected_messages(lake.cases)

"""A producer that may choose any timestamp can put a head into the future: it is told before and
after, and can be got past."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.commands import here
from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.rivers import River
from tests.support.topics import CheckedProducer, create_topics, produce, published
from tests.unit.test_monitoring import exposed
from watersmeet.ask.status import status
from watersmeet.audit.doubts import doubtful_topics
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.monitoring.events import MergeProgress, SourceStanding
from watersmeet.monitoring.metrics import Metrics

pytestmark = [pytest.mark.promise("C51"), pytest.mark.fault("hostile")]

DAY_MS = 86_400_000


@pytest.mark.long
def test_a_head_in_the_future_is_told_and_a_jump_gets_past_it(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "future", partitions=1)
    create_topics(
        kafka,
        "future-unbounded",
        partitions=1,
        **{"message.timestamp.after.max.ms": str(2**63 - 1)},
    )
    assert [*doubtful_topics(river.settings)] == []
    river.config["sources"]["tracking"]["topic"] = "future-unbounded"
    river.write()
    [warning] = doubtful_topics(river.settings)
    assert warning.where == "sources.tracking.topic"
    assert f"message.timestamp.after.max.ms to {DAY_MS}" in warning.fix
    assert json.loads(here(river, "validate", "--json"))["warnings"] == [warning._asdict()]

    now = time.time_ns() // 1_000_000
    tracking, orders = map(river.topic, SOURCES)
    producer = CheckedProducer(kafka)
    producer.produce(
        tracking, keyed("x", LAST_EVENT_TIME_MS), partition=0, timestamp=LAST_EVENT_TIME_MS
    )
    assert producer.flush(30) == 0
    for topic in (tracking, orders):
        produce(kafka, topic, [(0, keyed("a", now)), (0, heartbeat(now + 10_000))])
    river.finish()
    assert published(kafka, river.sink, 1)[0].value is not None
    [ahead] = [
        each
        for each in status(river.reader, river.settings)["warnings"]
        if each["where"] == f"{tracking}[0]"
    ]
    assert "ahead of the wall clock" in ahead["what"]
    assert "watersmeet reset --to latest" in ahead["fix"]
    here(river, "reset", "--to", "latest", "--yes")
    for topic in (tracking, orders):
        produce(kafka, topic, [(0, keyed("b", now + 20_000)), (0, heartbeat(now + 40_000))])
    river.finish()
    assert "warnings" not in status(river.reader, river.settings)
    last = json.loads(published(kafka, river.sink, 1)[-1].value or b"")
    assert (last["key"], len(last["tracking"]), len(last["orders"])) == ("b", 1, 1)
    assert river.broken_promises() == []


@pytest.mark.parametrize(
    ("ahead_ms", "expected_s"), [(DAY_MS - 60_000, 0), (DAY_MS + 500_000, 500)]
)
def test_the_metric_says_how_far_a_head_is_ahead_beyond_what_is_allowed(
    tmp_path: Path, ahead_ms: int, expected_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_800_000_000
    monkeypatch.setattr(time, "time", lambda: now_s)
    metrics, head = Metrics(settings_for(tmp_path)), now_s * 1000 + ahead_ms
    metrics(MergeProgress({0: 1_000}, {tp_of("orders", 0): SourceStanding(4, head, head, "held")}))
    assert (
        exposed(metrics).value("watersmeet_head_in_future_seconds", topic="orders", partition="0")
        == expected_s
    )

"""Dead letters of a lake that has jumped back: each once, also where the topic is set, or made
again, after the jump."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.laws.conftest import QUICK, MakeLake, one_of
from tests.support.cases import Case, heartbeat, keyed
from tests.support.topics import create_topics, dead_letters
from watersmeet.lake import pieces, tables
from watersmeet.running.dead_letters import DeadLetters

kind = one_of([QUICK])


def test_a_late_record_of_two_generations_is_one_dead_letter(
    new_lake: MakeLake, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = [keyed("a", n, n=n) for n in range(7)]
    case = Case(
        {"tracking": [heartbeat(5_000), *late, heartbeat(9_000)], "orders": [heartbeat(9_000)]},
        100,
        ["orders", *["tracking"] * 9],
    )
    name = "letters-over-jumps"
    topics = {f"sources__{s}__topic": f"{name}-{s}" for s in ("tracking", "orders")}
    create_topics(kafka, *topics.values(), partitions=1)
    lake = new_lake(
        {0: case}, bootstrap=kafka, name=name, publish__late_topic=f"{name}-late", **topics
    )
    lake.arrive()
    lake.merge()
    lake.jump(dict.fromkeys(lake.every, 0))
    lake.merge()
    assert lake.reader.select(tables.LATE, ["offset"]).num_rows == 14, "late in each generation"
    monkeypatch.setattr(pieces, "CHUNK_ROWS", 3)
    sent = sum(DeadLetters(lake.owner(), lake.settings, 1, tables.LATE).drain())
    found = Counter(one.offset for one in dead_letters(kafka, f"{name}-late", 1))
    assert {offset: n for offset, n in found.items() if n > 1} == {}
    assert sent == 7

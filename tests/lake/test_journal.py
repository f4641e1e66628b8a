"""The journal: one append is one decision, and of two deciders one looks again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lake.conftest import settings_for
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import CORRECTED, MERGED, Tail
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.errors import LeaseLostError
from watersmeet.lake.history import (
    Generation,
    InKafka,
    Skip,
    epoch_body,
    generation_body,
    history_of,
    read_history,
)
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.journal import (
    BEGIN,
    CLOSED,
    IDENTITY,
    MOVED,
    RULES,
    SKIP,
    Decision,
    next_seq,
    read_journal,
    try_decide,
)
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing
from watersmeet.running.owner import Owner

ORDERS = TopicPartition(InputId("orders", "orders"), 0)
PLACE = {"source": "orders", "topic": "orders", "partition": 0}


@pytest.fixture
def engine(tmp_path: Path) -> EmbeddedEngine:
    engine = EmbeddedEngine(Lake(settings_for(tmp_path)))
    create_missing(engine)
    return engine


def kinds(engine: EmbeddedEngine) -> list[str]:
    return [decision.kind for decision in read_journal(engine.reader)]


def test_of_two_that_decide_at_once_one_decides_nothing(engine: EmbeddedEngine) -> None:
    seq = next_seq(engine.reader)
    assert try_decide(engine.reader, engine.append, seq, SKIP, {"jumps": [], "reason": "a"})
    assert not try_decide(engine.reader, engine.append, seq, SKIP, {"jumps": [], "reason": "b"})
    [decision] = read_journal(engine.reader)
    assert (decision.seq, decision.body["reason"]) == (1, "a")
    assert next_seq(engine.reader) == 2


def test_a_decision_is_made_after_what_came_between(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, append = Owner(engine, 1), engine.append

    def between(*arguments: Any) -> None:
        monkeypatch.setattr(engine, "append", append)
        begin_epoch(engine.reader, append, engine.lake.settings, 0)
        append(*arguments)

    monkeypatch.setattr(engine, "append", between)
    owner.decide(CLOSED, {}, 1)
    assert [(each.seq, each.kind) for each in read_journal(engine.reader)] == [
        (1, RULES),
        (2, CLOSED),
    ]


def test_an_earlier_owner_of_a_layer_decides_nothing(engine: EmbeddedEngine) -> None:
    earlier, other, later = (Owner(engine, token) for token in (1, 2, 3))
    earlier.take(["bronze", "silver"])
    other.take(["gold"])
    earlier.decide(CLOSED, {}, 1)
    later.take(["silver"])
    for layers in (["silver"], ["bronze", "silver"]):
        with pytest.raises(LeaseLostError):
            earlier.take(layers)
        with pytest.raises(LeaseLostError):
            earlier.decide(SKIP, {"jumps": [], "reason": "too late"})
    other.decide(CLOSED, {}, 2)
    later.decide(CLOSED, {}, 3)
    assert kinds(engine) == [CLOSED] * 3


def test_an_owner_that_is_replaced_between_its_look_and_its_append_decides_nothing(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, append = Owner(engine, 1), engine.append
    owner.take(["bronze"])

    def replaced(*arguments: Any) -> None:
        monkeypatch.setattr(engine, "append", append)
        Owner(engine, 2).take(["bronze"])
        append(*arguments)

    monkeypatch.setattr(engine, "append", replaced)
    with pytest.raises(LeaseLostError):
        owner.decide(CLOSED, {}, 1)
    assert kinds(engine) == []


def test_what_was_decided_is_read_as_it_was(engine: EmbeddedEngine) -> None:
    place = MERGED.place({"closed_at": 9, "tenant": "t", "due": 5, "merge_key": "k"})
    tail = Tail(7, place, None, 4)
    values = dict.fromkeys(CORRECTED.order, 3) | {
        name: "x" for name in CORRECTED.order if name in ("tenant", "source", "topic")
    }
    corrected = Tail(2, CORRECTED.place(values), None, None)
    begun = Generation(
        1,
        4,
        {ORDERS: 17},
        {0: tail},
        "reset",
        0,
        "why",
        0,
        "life",
        {1: corrected},
        {ORDERS: 12},
        {ORDERS: InKafka("id", 11, 19)},
        {"silver": "sink (id)"},
        3,
    )
    owner = Owner(engine, 1)
    owner.decide(RULES, epoch_body(engine.lake.settings, 0, 0, {ORDERS: 3}))
    owner.decide(BEGIN, generation_body(begun), 1)
    history = read_history(engine.reader, engine.lake.settings)
    [epoch] = history.epochs
    assert (epoch.settings.rules(), epoch.read_since) == (
        engine.lake.settings.rules(),
        {ORDERS: 3},
    )
    [generation] = history.generations
    assert generation == begun._replace(decided_at=generation.decided_at)
    assert history.skips == [Skip(ORDERS, 12, 17)]
    assert history.is_closed


def decisions(*kinds_and_bodies: tuple[str, dict[str, Any]]) -> list[Decision]:
    return [
        Decision(seq, kind, body.pop("generation", None), body, 0, 0)
        for seq, (kind, body) in enumerate(kinds_and_bodies, 1)
    ]


def test_of_a_fact_the_last_decision_holds(tmp_path: Path) -> None:
    history = history_of(
        decisions(
            (IDENTITY, {"facts": {"partitions": "4", "sources.a.topic": "a (1)"}}),
            (MOVED, {"facts": {"sources.a.topic": "a (2)"}}),
        ),
        settings_for(tmp_path),
    )
    assert history.facts == {"partitions": "4", "sources.a.topic": "a (2)"}


def test_nothing_is_decided_before_the_first_start(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    history = history_of([], settings)
    assert (history.facts, history.generations, history.skips) == ({}, (), [])
    assert [epoch.settings for epoch in history.epochs] == [settings]
    assert history.is_closed


def test_a_gap_that_was_accepted_is_a_skip(tmp_path: Path) -> None:
    gap = {**PLACE, "from_offset": 3, "to_offset": 9}
    history = history_of(
        decisions((SKIP, {"jumps": [gap], "reason": "on_data_loss: continue"})),
        settings_for(tmp_path),
    )
    assert history.skips == [Skip(ORDERS, 3, 9)]

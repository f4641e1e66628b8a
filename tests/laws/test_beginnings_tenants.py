"""A lost lake with tenants: what it takes from the sink's messages is kept as it was said, or
refused in one sentence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.laws.conftest import MakeLake, in_folders
from tests.support.cases import SOURCES, Case, keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake
from tests.support.topics import CheckedProducer, create_topics, produce
from watersmeet.core.idle import IdleDecision
from watersmeet.core.recovery import encode_idle, encode_min_offsets
from watersmeet.core.sequence import (
    CLOSED_AT,
    DUE,
    ID,
    IDLE,
    MIN_OFFSETS,
    RULES,
    SEQ,
    TENANT,
    message_id,
)
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.progress import read_decisions
from watersmeet.lake.recovered import read_since
from watersmeet.running.generations import begin_first
from watersmeet.running.next_offsets import NextOffsets

PARTITIONS = 2
NUMBERS = itertools.count()
WINDOW: dict[str, Any] = {"window": {"gap": "30ms", "max": "100ms"}}
TENANTS: dict[str, Any] = {**WINDOW, "tenant": "g", "tenant_max_lag": "50ms"}

Message = tuple[int, str, str, int, int, Mapping[str, bytes]]
"""Partition, tenant, key, due, closed at (ms), and further headers."""


def lost(
    new_lake: MakeLake, kafka: str, kind: str, messages: Sequence[Message], merge: Mapping[str, Any]
) -> CaseLake:
    """A new lake that is to begin at a sink with these messages; its sources have ten records in
    each partition."""
    name = f"lost-tenants-{kind}-{next(NUMBERS)}"
    topics = {source: f"{name}-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), f"{name}-merged", partitions=PARTITIONS)
    for topic in topics.values():
        produce(
            kafka, topic, [(p, keyed("k", n, g="x")) for n in range(10) for p in range(PARTITIONS)]
        )
    begun = {
        "kafka__start": "sink",
        "merge": merge,
        **{f"sources__{source}__topic": topic for source, topic in topics.items()},
    }
    cases = {p: Case({source: [] for source in SOURCES}, 100) for p in range(PARTITIONS)}
    lake = new_lake(cases, bootstrap=kafka, name=name, publish__topic=f"{name}-merged", **begun)
    producer = CheckedProducer(kafka)
    seqs = dict.fromkeys(range(PARTITIONS), 0)
    for p, tenant, key, due, closed_at, more in messages:
        said = {
            SEQ: str(seqs[p]),
            ID: message_id(p, due - 30, key, tenant),
            CLOSED_AT: str(closed_at),
            DUE: str(due),
        }
        said |= {RULES: lake.settings.fingerprint} if MIN_OFFSETS in more else {}
        headers = {
            name: text.encode()
            for name, text in (said | ({TENANT: tenant} if tenant else {})).items()
        }
        producer.produce(f"{name}-merged", b"{}", key, p, headers={**headers, **more})
        seqs[p] += 1
    assert producer.flush(30) == 0
    return lake


def begin(lake: CaseLake) -> None:
    begin_first(lake.owner(), lake.settings, PARTITIONS)


def test_what_the_sink_says_of_tenants_is_kept_as_it_was_said(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    decisions = {
        "orders": (
            IdleDecision(4, 900, (("\uff61", 890), ("\U0001f600", 855))),
            IdleDecision(4, 950, (("a/b 100%", 940), ("\U0001f600", 905))),
            IdleDecision(6, 990),
        ),
        "tracking": (IdleDecision(-1, 850, (("x", 845),)),),
    }
    begins = {"tracking": 7, "orders": 5}
    telling = {MIN_OFFSETS: encode_min_offsets(begins), IDLE: encode_idle(decisions)}
    messages: list[Message] = [
        (0, "x", "before", 840, 849, {}),
        (0, "\U0001f600", "k/1", 845, 850, {}),
        (0, "a/b 100%", "k/1", 900, 1000, telling),
    ]
    lake = lost(new_lake, kafka, kind, messages, TENANTS)
    begin(lake)
    generation = read_history(lake.reader, lake.settings).generations.newest
    columns = ["partition", "tenant", "merge_key", "event_time", "due", "closed_at"]
    found = lake.reader.select(
        tables.PASSED, columns, [[("merge_key", "is not null", None)]]
    ).to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [
        (0, "a/b 100%", "k/1", 870, 900, 1000),
        (0, "\U0001f600", "k/1", 815, 845, 850),
    ], "those that may hold a record which is read again: closed after 1000 - 1 - 50 - 100"
    assert read_since(lake.reader, generation) == {0: 849}, (
        "an empty partition is read from the beginning, and nothing passed over"
    )
    of_source = {
        source: tuple(
            d
            for tp, d in read_decisions(lake.reader, generation)
            if tp == (lake.input_of(source), 0)
        )
        for source in SOURCES
    }
    assert of_source == decisions
    assert {
        s: NextOffsets(lake.reader, lake.settings, PARTITIONS).of(lake.input_of(s))[0]
        for s in SOURCES
    } == begins
    version = lake.reader.version(tables.SILVER)
    begin(lake)
    assert lake.reader.version(tables.SILVER) == version, "decided once"


@in_folders
@pytest.mark.parametrize(
    ("former", "merge"),
    [(WINDOW, TENANTS), (TENANTS, WINDOW), (TENANTS, {"timeout": "100ms"})],
    ids=["without", "with", "with-a-timeout"],
)
def test_messages_of_tenants_are_taken_up_with_tenants_alone(
    new_lake: MakeLake,
    kafka: str,
    kind: str,
    tmp_path: Path,
    former: dict[str, Any],
    merge: dict[str, Any],
) -> None:
    rules = settings_for(tmp_path, merge=former).fingerprint
    offsets = encode_min_offsets({"tracking": 7, "orders": 5})
    telling = {MIN_OFFSETS: offsets, RULES: rules.encode()}
    tenant = "x" if "tenant" in former else ""
    lake = lost(new_lake, kafka, kind, [(1, tenant, "k", 900, 1000, telling)], merge)
    with pytest.raises(
        ConfigurationError, match=rf"made by other rules \({rules}\).*; begin with the former rules"
    ):
        begin(lake)
    assert lake.reader.select(tables.PASSED, ["partition"]).num_rows == 0


@in_folders
@pytest.mark.parametrize(
    ("rules", "refused"),
    [
        (
            b"0123abcd,89abcdef",
            r"was read and merged by rules that changed meanwhile \(0123abcd, 89abcdef; those of "
            r"this configuration are",
        ),
        (
            b"0123abcd",
            r"made by other rules \(0123abcd\) than those of this configuration .*; begin with the "
            r"former rules",
        ),
    ],
)
@pytest.mark.promise("B121")
@pytest.mark.fault("lost", "rules")
def test_a_lost_lake_is_taken_up_by_the_rules_that_it_had_alone(
    new_lake: MakeLake, kafka: str, kind: str, rules: bytes, refused: str
) -> None:
    """Also where only one partition tells of others."""
    telling = {MIN_OFFSETS: encode_min_offsets({"tracking": 7, "orders": 5})}
    messages: list[Message] = [
        (0, "x", "k", 900, 1000, telling),
        (1, "x", "k", 900, 1000, {**telling, RULES: rules}),
    ]
    lake = lost(new_lake, kafka, kind, messages, TENANTS)
    with pytest.raises(ConfigurationError, match=refused):
        begin(lake)
    assert lake.reader.select(tables.PASSED, ["partition"]).num_rows == 0
    assert not read_history(lake.reader, lake.settings).generations

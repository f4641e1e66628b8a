"""Whether keys live in one partition: what `verify` and `validate` can see of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import SOURCES, keyed
from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.repartitioning import expected_partition
from tests.support.topics import create_topics, produce
from watersmeet.audit.doubts import check_sample
from watersmeet.audit.partitioning import (
    ENOUGH,
    SAMPLED,
    KeyPartitions,
    Place,
    check_key_partition,
)
from watersmeet.audit.problems import Findings

PARTITIONS = 3


def test_keys_in_two_partitions_are_counted_and_an_example_has_its_first_records() -> None:
    key_partitions = KeyPartitions()
    key_partitions.add(tp_of("tracking", 0), dict.fromkeys([4, 9], ("a", "")) | {7: ("b", "")})
    key_partitions.add(tp_of("orders", 0), {1: ("a", ""), 2: ("c", "")})
    assert key_partitions.note() is None
    key_partitions.add(tp_of("orders", 1), dict.fromkeys([5, 8], ("b", "")))
    note = key_partitions.note()
    assert note is not None
    assert note.startswith(
        "keys are in more than one partition, where their records never meet: 1 of those looked at"
    )
    assert ", such as that of tracking[0]@7 and orders[1]@5; " in note


def test_a_key_of_two_tenants_is_two_keys() -> None:
    key_partitions = KeyPartitions()
    key_partitions.add(tp_of("tracking", 0), {4: ("a", "x")})
    key_partitions.add(tp_of("orders", 1), {1: ("a", "y")})
    assert key_partitions.note() is None
    key_partitions.add(tp_of("orders", 2), {1: ("a", "x")})
    assert "never meet: 1 of those" in (key_partitions.note() or "")


def test_without_keys_there_is_nothing_to_tell() -> None:
    key_partitions = KeyPartitions()
    assert key_partitions.note() is None
    key_partitions.add(tp_of("tracking", 0), {})
    assert key_partitions.note() is None


def test_a_record_away_from_its_keys_partition_is_named() -> None:
    findings, right = Findings("keys"), expected_partition(b"a", PARTITIONS)
    check_key_partition(Place(tp_of("orders", right), 3, "a"), PARTITIONS, findings)
    assert findings.problems == []
    check_key_partition(
        Place(tp_of("orders", (right + 1) % PARTITIONS), 4, "a"), PARTITIONS, findings
    )
    [problem] = findings.problems
    assert problem.where == f"orders[{(right + 1) % PARTITIONS}]@4"
    assert problem.what.startswith(f"the key 'a' belongs to partition {right}")


# -- what the last records say


def murmur2(key: str) -> int:
    return expected_partition(key.encode(), PARTITIONS)


def another(key: str) -> int:
    """A partitioner of its own."""
    return sum(key.encode()) % PARTITIONS


def anywhere(key: str) -> int:
    """The same for all sources, and none that Kafka knows."""
    return len(key) % PARTITIONS


@pytest.mark.parametrize(
    ("partitioners", "keys", "is_repartitioned", "is_found"),
    [
        ((murmur2, murmur2), ENOUGH, False, False),
        ((anywhere, anywhere), ENOUGH, False, False),
        ((another, murmur2), 3 * ENOUGH, False, True),
        ((another, murmur2), ENOUGH - 1, False, False),
        ((murmur2, murmur2), 3 * ENOUGH, True, False),
        ((another, murmur2), 3 * ENOUGH, True, True),
        ((anywhere, anywhere), 3 * ENOUGH, True, True),
    ],
    ids=lambda part: (
        "-".join(one.__name__ for one in part) if isinstance(part, tuple) else str(part)
    ),
)
def test_other_partitioners_are_seen_in_the_last_records(
    kafka: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    partitioners: tuple[Callable[[str], int], Callable[[str], int]],
    keys: int,
    is_repartitioned: bool,
    is_found: bool,
) -> None:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")
    topics = {source: f"{name}-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=PARTITIONS)
    for source, partitioner in zip(("orders", "tracking"), partitioners, strict=True):
        names = [f"key {'x' * (n % 7)}{n}" for n in range(keys)]
        produce(
            kafka,
            topics[source],
            [(partitioner(key), keyed(key, 1)) for key in names] + [(0, b"{")],
        )
    more: dict[str, Any] = {f"sources__{source}__topic": topic for source, topic in topics.items()}
    settings = settings_for(tmp_path, bootstrap=kafka, **more)
    if is_repartitioned:
        of_source = settings.sources["tracking"].model_dump(by_alias=True, exclude_defaults=True)
        of_source["repartition"] = {"from": f"{name}-raw", "partitions": PARTITIONS}
        settings = settings_for(
            tmp_path, bootstrap=kafka, **{**more, "sources__tracking": of_source}
        )
    problems, _ = check_sample(settings, PARTITIONS)
    assert bool(problems) == is_found
    for problem in problems[:1]:
        assert "never meet" in problem.what
        assert re.search(rf"{name}-\w+\[\d\]@\d+", problem.where)


def test_keys_that_two_tenants_share_need_not_be_in_one_partition(
    kafka: str, tmp_path: Path
) -> None:
    topics = {source: f"homes-tenants-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=2)
    of_sources = {f"sources__{source}__topic": topic for source, topic in topics.items()}
    for partition, (tenant, topic) in enumerate(zip("xy", topics.values(), strict=True)):
        produce(
            kafka, topic, [(partition, keyed(f"key {n}", 1, g=tenant)) for n in range(2 * ENOUGH)]
        )
    plain = settings_for(tmp_path, bootstrap=kafka, **of_sources)
    assert len(check_sample(plain, 2)[0]) == 1
    tenants = settings_for(
        tmp_path, bootstrap=kafka, **of_sources, merge__tenant="g", merge__tenant_max_lag="1h"
    )
    assert check_sample(tenants, 2)[0] == []


def test_only_the_last_records_of_a_partition_are_looked_at(kafka: str, tmp_path: Path) -> None:
    topics = {source: f"homes-many-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=2)
    wrong = (
        [(0, keyed(f"key {n}", 1)) for n in range(50)],
        [(1, keyed(f"key {n}", 1)) for n in range(50)],
    )
    settings = settings_for(
        tmp_path, bootstrap=kafka, **{f"sources__{s}__topic": t for s, t in topics.items()}
    )
    for topic, records in zip(topics.values(), wrong, strict=True):
        produce(kafka, topic, records)
    assert len(check_sample(settings, 2)[0]) == 1
    for topic in topics.values():
        produce(kafka, topic, [(p, keyed("later", 2)) for p in (0, 1) for _ in range(SAMPLED)])
    assert check_sample(settings, 2)[0] == []

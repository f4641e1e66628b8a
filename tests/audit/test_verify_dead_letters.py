"""`verify` looks at topics of dead letters: it accepts what gold sent, whatever became of the lake,
and finds each change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.cases import heartbeat, keyed
from tests.support.commands import here
from tests.support.effort import first_then_nightly
from tests.support.model_lakes import rewrite
from tests.support.rivers import River
from tests.support.topics import (
    CheckedProducer,
    consume,
    create_topics,
    dead_letters,
    delete_records,
    delete_topic,
)
from watersmeet.audit import evidence, problems, verify_dead_letters
from watersmeet.audit.verify import verify
from watersmeet.core.dead_letters import OFFSET, PARTITION, REASON
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.lake.published import sink_of, topic_columns
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.settings import Settings

pytestmark = [pytest.mark.long, pytest.mark.promise("A2")]

TABLES = (tables.LATE, tables.QUARANTINE)
STRETCHES = 3


class Sent(NamedTuple):
    """A message of a topic of dead letters."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def ours(self) -> dict[str, str]:
        return {name: (value or b"").decode() for name, value in self.headers}

    @property
    def offset(self) -> int:
        return int(self.ours[OFFSET])

    @property
    def place(self) -> str:
        return f"{self.ours['watersmeet.topic']}[{self.ours[PARTITION]}]@{self.offset}"

    def saying(self, name: str, value: object) -> Sent:
        """With another value of a header."""
        return self._replace(
            headers=tuple((n, str(value).encode() if n == name else v) for n, v in self.headers)
        )


Problem = tuple[int | None, str, str]
"""The offset in the topic of what is wrong (None: it is not there), which record it was, and the
words that matter."""

Breaking = Callable[[list[Sent], int], tuple[list[Sent], list[Problem]]]
"""Of a partition's messages, what it has instead and what must be found; the number: of a message
in its middle whose neighbours are of the same source."""


def missing(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    return [*sent[:i], *sent[i + 1 :]], [(None, sent[i].place, "is missing")]


def repeated(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    return [*sent[: i + 1], *sent[i:]], [
        (i + 1, sent[i].place, f"after the record at offset {sent[i].offset}: a repeat")
    ]


def repeated_at_the_end(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    *_, last = (
        one for one in sent[:-1] if one.ours["watersmeet.topic"] == sent[i].ours["watersmeet.topic"]
    )
    again = sent[-1]._replace(key=sent[i].key, value=sent[i].value)
    for name in (REASON, "watersmeet.topic", OFFSET):
        again = again.saying(name, sent[i].ours[name])
    largest = max(
        last.offset,
        *(one.offset for one in sent if one.place.split("@")[0] == last.place.split("@")[0]),
    )
    return [*sent, again], [
        (len(sent), sent[i].place, f"after the record at offset {largest}: a repeat")
    ]


def swapped(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    found = [
        (
            i + 1,
            sent[i].place,
            f"after the record at offset {sent[i + 1].offset}: a repeat, or out of order",
        )
    ]
    return [*sent[:i], sent[i + 1], sent[i], *sent[i + 2 :]], [
        *found,
        (None, sent[i].place, "is missing"),
    ]


def changed(**columns: Any) -> Breaking:
    def change(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
        words = f"{' and '.join(columns)} differ{'s' * (len(columns) == 1)} from the record's"
        return [*sent[:i], sent[i]._replace(**columns), *sent[i + 1 :]], [(i, sent[i].place, words)]

    return change


def with_another_header(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    other = sent[i]._replace(headers=(("added", b"1"), *sent[i].headers))
    return [*sent[:i], other, *sent[i + 1 :]], [
        (i, other.place, "headers differs from the record's")
    ]


def for_another_reason(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    return [*sent[:i], sent[i].saying(REASON, "whim"), *sent[i + 1 :]], [
        (i, sent[i].place, "reason differs from the record's")
    ]


def unknown(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    """Between two letters of one source, a record that was merged or is a heartbeat."""
    assert sent[i].offset + 1 < sent[i + 1].offset
    other = sent[i].saying(OFFSET, sent[i].offset + 1)
    return [*sent[: i + 1], other, *sent[i + 1 :]], [(i + 1, other.place, "has no such record")]


def foreign(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    return [*sent[:i], Sent(b"k", b"{}", ()), *sent[i:]], [
        (i, "", "not a dead letter of these sources")
    ]


def beyond_all_offsets(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    return [*sent[:i], sent[i].saying(OFFSET, 2**64), *sent[i:]], [
        (i, "", "not a dead letter of these sources")
    ]


def of_another_partition(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    wrong = [(i, "", "not a dead letter of these sources"), (None, sent[i].place, "is missing")]
    return [*sent[:i], sent[i].saying(PARTITION, 77), *sent[i + 1 :]], wrong


def without_its_end(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    wrong = [
        (len(sent) - 2, "", "has no watersmeet.next_offsets"),
        (None, sent[-1].place, "is missing"),
    ]
    return sent[:-1], wrong


def standing_elsewhere(sent: list[Sent], i: int) -> tuple[list[Sent], list[Problem]]:
    there = sent[-1].saying("watersmeet.next_offsets", '{"orders":1,"tracking":1}')
    return [*sent[:-1], there], [
        (len(sent) - 1, "", "has 1 for tracking"),
        (len(sent) - 1, "", "has 1 for orders"),
    ]


BREAKINGS: list[Breaking] = [
    missing,
    repeated,
    repeated_at_the_end,
    swapped,
    changed(value=b"{}"),
    changed(key=b"k", value=None),
    with_another_header,
    for_another_reason,
    unknown,
    foreign,
    beyond_all_offsets,
    of_another_partition,
    without_its_end,
    standing_elsewhere,
]
PARTITIONS = len(BREAKINGS) + 1
"""One stays as it is."""


@dataclass
class Lettered:
    """A healthy lake with topics of dead letters, which nobody changes."""

    kafka: str
    river: River

    def sent(self, table: str) -> dict[int, list[Sent]]:
        found: dict[int, list[Sent]] = {p: [] for p in range(PARTITIONS)}
        for message in consume(
            self.kafka, self.river.settings.publish.dead_letter_topics[table], PARTITIONS
        ):
            found[message.partition()].append(
                Sent(message.key(), message.value(), tuple(message.headers()))
            )
        return found


def run(river: River) -> None:
    Run(river.settings, LAYERS, Reporter()).once()


def topics_of_letters(name: str) -> dict[str, str]:
    return {f"publish__{table}_topic": f"{name}-{table}" for table in TABLES}


@pytest.fixture(scope="module")
def lettered(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Lettered:
    overrides: dict[str, Any] = topics_of_letters("lettered")
    river = River.make(
        kafka, tmp_path_factory.mktemp("lettered"), "lettered", partitions=PARTITIONS, **overrides
    )
    for _ in range(STRETCHES):
        river.flow(records=60)
        run(river)
    return Lettered(kafka, river)


def found_in(settings: Settings, *, full: bool = True) -> list[dict[str, str]]:
    found = verify(DeltaRsReader(Lake(settings)), settings, full=full)
    assert found["ok"] == (not found["problems"])
    return list(found["problems"])


def in_the_middle(sent: list[Sent]) -> int:
    """Of the first letter that stands between two of its source, the next of which was not the next
    record."""
    topics = [one.ours["watersmeet.topic"] for one in sent]
    pairs = range(1, len(sent) - 2)
    is_fit = (
        topics[i - 1] == topics[i] == topics[i + 1] and sent[i].offset + 1 < sent[i + 1].offset
        for i in pairs
    )
    return next(i for i, fit in zip(pairs, is_fit, strict=True) if fit)


def broken(lettered: Lettered, folder: Path, name: str) -> tuple[Settings, set[tuple[str, str]]]:
    """The lake with other topics of dead letters, each partition broken in its way, noted as sent;
    and what must be found."""
    publish, expected = {}, set()
    producer = CheckedProducer(lettered.kafka)
    for table in TABLES:
        topic = publish[f"{table}_topic"] = f"{name}-{table}"
        create_topics(lettered.kafka, topic, partitions=PARTITIONS)
        for p, sent in lettered.sent(table).items():
            messages, wrong = (
                BREAKINGS[p](sent, in_the_middle(sent)) if p < len(BREAKINGS) else (sent, [])
            )
            for one in messages:
                producer.produce(topic, one.value, one.key, p, headers=list(one.headers))
            for at, record, words in wrong:
                place = (
                    topic
                    + f"[{p}]"
                    + ("" if at is None else f"@{at}")
                    + (f": {record}" if record else "")
                )
                expected.add((place, words))
    assert producer.flush(30) == 0
    river = lettered.river
    shutil.copytree(str(river.settings.lake), folder / "lake")
    settings = river.settings.model_copy(
        update={
            "lake": str(folder / "lake"),
            "publish": river.settings.publish.model_copy(update=publish),
        }
    )
    cluster = Cluster(settings.kafka)
    old, new = (s.publish.dead_letter_topics for s in (river.settings, settings))
    sinks = {cluster.identified(old[table]): cluster.identified(new[table]) for table in TABLES}
    rewrite(
        settings,
        tables.PUBLISHED,
        lambda row: {**row, **topic_columns(sinks.get(sink_of(row), sink_of(row)))},
    )
    return settings, expected


def the_same(found: list[dict[str, str]], expected: set[tuple[str, str]]) -> None:
    left = [(one["where"], one["what"]) for one in found]
    for where, words in sorted(expected):
        match = next((each for each in left if each[0] == where and words in each[1]), None)
        assert match is not None, (where, words, left)
        left.remove(match)
    assert left == []


@pytest.mark.parametrize("full", first_then_nightly([True, False]), ids=["all", "a sample"])
def test_what_gold_sent_breaks_no_promise(
    lettered: Lettered, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    monkeypatch.setattr(evidence, "SAMPLED_RECORDS", 50)
    assert all(len(mine) > 10 for table in TABLES for mine in lettered.sent(table).values())
    assert found_in(lettered.river.settings, full=full) == []


@pytest.mark.fault("damage")
@pytest.mark.parametrize(
    "read", [pytest.param(3, marks=pytest.mark.nightly), 5_000], ids=["in pieces", "at once"]
)
def test_every_letter_that_is_missing_repeated_changed_or_foreign_is_found(
    lettered: Lettered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 50)
    monkeypatch.setattr(verify_dead_letters, "READ", read)
    settings, expected = broken(lettered, tmp_path, f"broken-{read}")
    found = found_in(settings)
    the_same(found, expected)
    for problem in found:
        table = next(
            table for table in TABLES if problem["where"].startswith(f"broken-{read}-{table}")
        )
        assert (
            problem["fix"]
            == f"name a new topic in publish.{table}_topic: gold fills it from {table}"
        )


@pytest.mark.fault("damage")
def test_in_a_sample_of_the_records_all_but_some_changes_are_found(
    lettered: Lettered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 50)
    monkeypatch.setattr(evidence, "SAMPLED_RECORDS", 1)  # of thousands: so none
    settings, expected = broken(lettered, tmp_path, "broken-sample")
    the_same(
        found_in(settings, full=False),
        {(where, words) for where, words in expected if "differ" not in words},
    )


# -- no false alarm


@pytest.mark.fault("retention")
@pytest.mark.nightly
def test_letters_that_retention_deleted_are_not_missing(kafka: str, tmp_path: Path) -> None:
    overrides: dict[str, Any] = topics_of_letters("short-letters")
    river = River.make(kafka, tmp_path, "short-letters", **overrides)
    for _ in range(2):
        river.flow(records=60)
        run(river)
    for topic in river.settings.publish.dead_letter_topics.values():
        delete_records(kafka, topic, 0, 3)
        delete_records(kafka, topic, 1, Cluster(river.settings.kafka).bounds(topic, 2)[1][1])
    assert river.broken_promises() == []
    river.flow(records=60)
    run(river)
    assert river.broken_promises() == []
    topic = river.settings.publish.dead_letter_topics[tables.LATE]
    delete_topic(kafka, topic)
    assert river.broken_promises() == []
    run(river)
    assert river.broken_promises() == []


@pytest.mark.fault("retention")
@pytest.mark.nightly
def test_forgotten_records_and_rows_that_ended_leave_their_letters(
    kafka: str, tmp_path: Path
) -> None:
    keep = {"bronze": "1500ms", "silver": "2500ms", "late": "1500ms", "quarantine": "1s"}
    overrides: dict[str, Any] = {**topics_of_letters("old-letters"), "keep": keep}
    river = River.make(kafka, tmp_path, "old-letters", **overrides)
    for _ in range(4):
        river.flow(records=60)
        run(river)
    before = {table: river.reader.version(table) for table in TABLES}
    here(river, "forget", "a", "--apply")
    assert river.broken_promises() == []
    here(river, "maintain")
    assert all(river.reader.version(table) > before[table] for table in TABLES), (
        "both tables have lost rows or contents"
    )
    assert river.broken_promises() == []
    river.flow(records=60)
    run(river)
    here(river, "forget", "b", "--apply")
    assert river.broken_promises() == []


@pytest.mark.fault("jumps", "lost")
@pytest.mark.nightly
def test_jumps_and_lost_lakes_leave_the_letters_that_were_sent(kafka: str, tmp_path: Path) -> None:
    """Reading begins late, goes back before that, and forth; in the end the lake is lost."""
    overrides: dict[str, Any] = {**topics_of_letters("jumping-letters"), "kafka__start": "latest"}
    river = River.make(kafka, tmp_path, "jumping-letters", **overrides)
    river.flow(records=60)
    run(river)
    for target in ("earliest", "latest", "earliest"):
        river.flow(records=60)
        run(river)
        assert river.broken_promises() == []
        here(river, "reset", "--to", target, "--yes")
        run(river)
        assert river.broken_promises() == []
    shutil.rmtree(river.folder / "lake")
    river.config["kafka"]["start"] = "sink"
    river.write()
    for _ in range(2):
        run(river)
        assert river.broken_promises() == []
        river.flow(records=60)


def test_what_waited_and_is_late_by_another_window_is_not_sent_behind_later_letters(
    kafka: str, tmp_path: Path
) -> None:
    merge = {"timeout": "100ms", "tenant": "g", "tenant_max_lag": "1s"}
    river = River.make(
        kafka, tmp_path, "waiting-letters", merge=merge, publish__late_topic="waiting-letters-late"
    )
    tracking = [
        heartbeat(5000, g="x"),
        heartbeat(4500, g="y"),
        keyed("a", 4450, g="y"),
        keyed("b", 4800, g="x"),
    ]
    for source, values in {"tracking": tracking, "orders": [heartbeat(5000, g="x")]}.items():
        for value in values:
            river.send(source, 0, value)
    run(river)
    assert river.reader.select(tables.LATE, ["offset"])["offset"].to_pylist() == [3]
    river.config["merge"]["timeout"] = "1ms"
    river.write()
    here(river, "evolve", "--apply")
    run(river)
    assert sorted(river.reader.select(tables.LATE, ["offset"])["offset"].to_pylist()) == [2, 3]
    assert [one.offset for one in dead_letters(kafka, "waiting-letters-late", 2)] == [3]
    assert river.broken_promises() == []


@pytest.mark.nightly
def test_topics_that_are_named_later_are_filled_and_verified(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "later-letters")
    river.flow(records=60)
    run(river)
    river.config["publish"] |= {f"{table}_topic": f"later-letters-{table}" for table in TABLES}
    river.write()
    assert river.broken_promises() == []
    run(river)
    assert river.broken_promises() == []
    assert all(consume(kafka, f"later-letters-{table}", 2) for table in TABLES)

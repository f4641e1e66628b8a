"""`verify` compares the topic of corrections, on a real broker, and what `publish` makes of
corrections: no alarm in a right lake, and each planted fault is found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.audit.inputs import case_of, settings_of, with_topics
from tests.audit.test_verify import Change, altered, the_same
from tests.laws.test_corrections import limited
from tests.laws.test_gold_corrections import given_cases
from tests.laws.test_tenants import with_rules
from tests.support.cases import Case, cases_with_ids, heartbeat, keyed
from tests.support.configurations import IDS
from tests.support.corrections import corrections_of
from tests.support.crashes import CrashError, dying_at
from tests.support.effort import first_then_nightly
from tests.support.lakes import CaseLake
from tests.support.model_lakes import rewrite
from tests.support.tenants import merge_of, tenant_cases
from tests.support.topics import (
    CheckedProducer,
    consume,
    create_topics,
    delete_records,
    delete_topic,
)
from watersmeet.audit import problems
from watersmeet.audit.verify import verify
from watersmeet.core.sequence import CORRECTED
from watersmeet.engine.choice import open_engine
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.expressions import Outcome
from watersmeet.gold import Gold
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import Generation, generation_body, read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.journal import BEGIN
from watersmeet.lake.location import Lake
from watersmeet.lake.published import topic_columns
from watersmeet.operations.forget import Forgetting
from watersmeet.operations.retention import expire
from watersmeet.settings import Settings

pytestmark = pytest.mark.promise("R21")

ALL = "1d"


def topic_of(name: str) -> dict[str, Any]:
    return {"publish__corrections": {"topic": f"{name}-corrections", "within": ALL}}


def new_lake(
    kafka: str, folder: Path, name: str, given: dict[int, Case], **overrides: Any
) -> CaseLake:
    settings = with_topics(kafka, folder, name, max(given) + 1, **topic_of(name), **overrides)
    return CaseLake(open_engine(settings), settings, given)


def corrected(lake: CaseLake) -> Gold:
    return Gold(lake.owner(), lake.settings, lake.partitions, kind=CORRECTED)


def publish(lake: CaseLake) -> None:
    """One start of gold, of both sequences."""
    lake.publish()
    list(corrected(lake).drain())


def step(lake: CaseLake, share: float = 1.0) -> None:
    lake.arrive(share)
    lake.merge()
    publish(lake)


def found_in(settings: Settings, **options: Any) -> list[tuple[str, str]]:
    answer = verify(DeltaRsReader(Lake(settings)), settings, full=True, **options)
    return sorted((problem["where"], problem["what"]) for problem in answer["problems"])


def cases(count: int) -> dict[int, Case]:
    """The cases with most late records."""
    given = cases_with_ids(given_cases()).values()
    richest = sorted(given, key=lambda case: -len(case.merged().late))
    return dict(enumerate(richest[:count]))


def late_case() -> Case:
    """Settled at 1001 are three records of `a`, which was merged, and one that opens `b`."""
    late = [keyed("a", 50), keyed("a", 60), keyed("b", 70), keyed("a", 40)]
    tracking: list[bytes | None] = [keyed("a", 0), heartbeat(1000), *late, heartbeat(2000)]
    return Case(
        {"tracking": tracking, "orders": [heartbeat(1000), heartbeat(2000)]},
        100,
        ["tracking", "tracking", "orders", *["tracking"] * 5, "orders"],
    )


# -- right lakes


def test_a_right_topic_is_right_with_ids(kafka: str, tmp_path: Path) -> None:
    lake = new_lake(kafka, tmp_path, "right", cases(4), **IDS)
    for share in (0.6, 1.0):
        step(lake, share)
        assert found_in(lake.settings) == []
    assert len(corrections_of(lake.reader)) > 10


def test_a_right_topic_is_right_with_tenants_and_through_epochs(kafka: str, tmp_path: Path) -> None:
    rules = [(100, None, 300), (30, 90, 1000), (80, None, 500)]
    lake = new_lake(kafka, tmp_path, "right-tenants", tenant_cases(4), merge=merge_of(rules[0]))
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    for number, within in enumerate([ALL, "150ms", None]):
        if number:
            lake.settings = limited(with_rules(lake.settings, rules[number]), within)
            next_batch = lake.plans[-1].batch + 1
            begin_epoch(lake.reader, lake.engine.append, lake.settings, next_batch)
        step(lake, (number + 1) / 3)
        assert found_in(lake.settings) == []
    assert len({row[2] for row in corrections_of(lake.reader)}) > 1


@pytest.mark.fault("retention", "topics")
@pytest.mark.long
def test_what_retention_has_deleted_and_a_topic_made_again_are_no_broken_promise(
    kafka: str, tmp_path: Path
) -> None:
    given = cases(3)
    lake = new_lake(kafka, tmp_path, "right-emptied", given)
    topic = lake.settings.publish.corrections_topic or ""
    step(lake, 0.7)
    ends = {m.partition(): m.offset() for m in consume(kafka, topic, 3)}
    assert len(ends) > 1
    for p, offset in ends.items():
        delete_records(kafka, topic, p, offset + p)
    step(lake)
    assert found_in(lake.settings) == []
    delete_topic(kafka, topic)
    assert found_in(lake.settings) == []
    publish(lake)
    assert found_in(lake.settings) == []


@pytest.mark.fault("jumps")
@pytest.mark.long
@pytest.mark.parametrize("is_back", first_then_nightly([True, False]), ids=["back", "on"])
def test_a_jump_breaks_no_promise(kafka: str, tmp_path: Path, is_back: bool) -> None:
    """Some of the corrections are not out then."""
    given = cases(4)
    lake = new_lake(kafka, tmp_path, f"right-jump-{is_back}", given)
    step(lake, 0.6)
    lake.arrive(0.8)
    lake.merge()
    tails = corrected(lake).recover()
    assert len(corrections_of(lake.reader)) > sum(tail.seq + 1 for tail in tails.values()) > 0
    ends = {tp: case_end(lake, tp.partition, tp.input.source, 0.8) for tp in lake.every}
    begin = dict.fromkeys(lake.every, 0) if is_back else ends
    lake.jump(begin, lake.gold().recover(), correction_tails=tails)
    step(lake, 0.9)
    step(lake)
    assert found_in(lake.settings) == []
    assert read_history(lake.reader, lake.settings).generations.newest.correction_tails


def case_end(lake: CaseLake, partition: int, source: str, share: float) -> int:
    """The offset up to which a topic-partition has arrived."""
    arrivals = lake.cases[partition].arrivals
    return arrivals[: round(share * len(arrivals))].count(source)


@pytest.mark.fault("lost")
@pytest.mark.long
def test_a_lost_lakes_corrections_are_not_compared(kafka: str, tmp_path: Path) -> None:
    given = cases(3)
    lost = new_lake(kafka, tmp_path / "lost", "lost", given)
    step(lost, 0.7)
    tails = corrected(lost).recover()
    assert tails
    settings = settings_of(kafka, tmp_path, "lost", **topic_of("lost"), kafka__start="latest")
    lake = CaseLake(open_engine(settings), settings, given)
    begin = {tp: case_end(lake, tp.partition, tp.input.source, 0.7) for tp in lake.every}
    first = Generation(0, 0, begin, lost.gold().recover(), correction_tails=tails)
    lake.owner().decide(BEGIN, generation_body(first), 0)
    step(lake)
    assert found_in(lake.settings) == []


@pytest.mark.nightly
@pytest.mark.long
def test_messages_of_a_forgotten_key_are_passed_over_whose_merge_record_keep_has_deleted(
    kafka: str, tmp_path: Path
) -> None:
    """A correction's last event time is later, so that it stays longer."""
    late = [keyed("a", 20), heartbeat(1000), keyed("a", 100), heartbeat(1100)]
    tracking = [*late, keyed("b", 30_000), heartbeat(30_500)]
    orders = [heartbeat(1000), heartbeat(1100), heartbeat(30_500)]
    arrivals = [*["tracking"] * 4, *["orders"] * 2, "tracking", "tracking", "orders"]
    case = case_of(tracking, orders)
    case.arrivals = arrivals
    name = "kept-shorter"
    keep = {"bronze": "29s", "silver": "30440ms", "late": "25s"}
    corrected_within = {"topic": f"{name}-corrections", "within": "20s"}
    settings = with_topics(kafka, tmp_path, name, keep=keep, publish__corrections=corrected_within)
    lake = CaseLake(open_engine(settings), settings, {0: case})
    step(lake, 6 / 9)
    step(lake)
    for table in (*map(tables.bronze, settings.sources), tables.SILVER):
        expire(lake.owner(), settings, table)
    assert [row[1] for row in lake.silver()] == ["b"]
    assert len(corrections_of(lake.reader)) == 1
    forgetting = Forgetting(lake.reader, settings, "a")
    assert forgetting.partitions == {0}
    forgetting.erase(lake.owner())
    assert found_in(settings) == []


@pytest.mark.long
def test_messages_of_forgotten_keys_are_passed_over(kafka: str, tmp_path: Path) -> None:
    """Also while `forget` is cut short, which is told, and with tombstones in the topic."""
    lake = new_lake(kafka, tmp_path, "right-forgotten", {0: late_case()})
    step(lake)
    dying = dying_at(lake.engine, "merge", tables.SILVER)
    with pytest.raises(CrashError):
        Forgetting(lake.reader, lake.settings, "a").erase(lake.owner(dying))
    assert all("`forget` was cut short" in what for _, what in found_in(lake.settings))
    for key in "ab":
        assert corrected(lake).send_tombstones(key, {0}) == 1
        Forgetting(lake.reader, lake.settings, key).erase(lake.owner())
        assert found_in(lake.settings) == []
    assert corrections_of(lake.reader) == []


@pytest.mark.fault("retention")
@pytest.mark.long
def test_what_keep_has_deleted_is_not_compared(kafka: str, tmp_path: Path) -> None:
    case = late_case()
    case.values["orders"].append(heartbeat(90_000))
    case.values["tracking"] += [keyed("c", 90_000), keyed("c", 89_500), heartbeat(99_000)]
    case.values["orders"].append(heartbeat(99_000))
    case.arrivals += ["orders", *["tracking"] * 3, "orders"]
    keep = {"silver": "30s", "late": "30s"}
    corrections = {"topic": "right-kept-corrections", "within": "20s"}
    settings = with_topics(
        kafka, tmp_path, "right-kept", 1, publish__corrections=corrections, keep=keep
    )
    lake = CaseLake(open_engine(settings), settings, {0: case})
    step(lake)
    assert len(corrections_of(lake.reader)) == 5
    expire(lake.owner(), lake.settings, tables.SILVER)
    assert len(corrections_of(lake.reader)) == 1
    assert found_in(lake.settings) == []


# -- `publish.valid` and `publish.value`


def lake_with(kafka: str, folder: Path, name: str, case: Case, **own: str) -> CaseLake:
    settings = with_topics(kafka, folder, name, 1, **topic_of(name), **own)
    return CaseLake(EmbeddedEngine(Lake(settings)), settings, {0: case})


def judged_lake(kafka: str, folder: Path, name: str) -> CaseLake:
    """The first merge record and the second version of it have one tracking record and three; the
    second epoch takes as valid what has less than three, as the only correction of `c` has."""
    case = late_case()
    case.values["tracking"].insert(5, keyed("c", 70))
    case.arrivals.insert(3, "tracking")
    case.values["tracking"] += [keyed("a", 20), keyed("b", 90), heartbeat(4000)]
    case.values["orders"].append(heartbeat(4000))
    case.arrivals += ["tracking", "tracking", "tracking", "orders"]
    own = {
        "publish__valid": "size(tracking) = 2",
        "publish__value": "epoch_us(last_event_time)::VARCHAR",
    }
    lake = lake_with(kafka, folder, name, case, **own)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    step(lake, 10 / 14)
    update = {"valid": "size(tracking) < 3"}
    changed = lake.settings.publish.model_copy(update=update).after(lake.settings.publish)
    lake.settings = lake.settings.model_copy(update={"publish": changed})
    begin_epoch(lake.reader, lake.engine.append, lake.settings, lake.plans[-1].batch + 1)
    step(lake)
    return lake


@pytest.mark.fault("rules")
@pytest.mark.long
def test_valid_and_value_are_judged_by_the_epoch_that_settles(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = judged_lake(kafka, tmp_path, "right-judged")
    topic = lake.settings.publish.corrections_topic or ""
    values = [m.value() for m in consume(kafka, topic, 1)]
    columns = ["merge_key", "version", "valid", "has_message"]
    rows = lake.reader.select(tables.CORRECTIONS, columns).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [
        ("a", 1, True, True),
        ("a", 2, False, True),
        ("a", 3, False, True),
        ("a", 4, False, True),
        ("b", 1, False, False),
        ("b", 2, True, True),
        ("c", 1, False, False),
    ]
    assert values == [b"50000", None, None, None, b"90000"]
    assert found_in(lake.settings) == []
    monkeypatch.setattr(
        "watersmeet.expressions.publish.Expressions.messages",
        lambda _, rows: Outcome(
            rows["merge_key"].cast(pa.large_binary()), pc.is_null(rows["merge_key"]), None
        ),
    )
    assert {what for where, what in found_in(lake.settings)} == {
        "value differs from the row of corrections"
    }


@pytest.mark.long
def test_what_is_valid_only_since_a_jump_is_behind_the_topic_and_not_missing(
    kafka: str, tmp_path: Path
) -> None:
    """The correction of `c` is valid by the rules of the second epoch."""
    lake = judged_lake(kafka, tmp_path, "right-behind")
    tails = corrected(lake).recover()
    lake.jump(dict.fromkeys(lake.every, 0), lake.gold().recover(), correction_tails=tails)
    step(lake)
    columns = ["generation", "merge_key", "version", "has_message"]
    rows = lake.reader.select(tables.CORRECTIONS, columns, [[("generation", "=", 1)]]).to_pylist()
    assert (1, "c", 1, True) in [tuple(row.values()) for row in rows]
    assert corrected(lake).recover() == tails
    assert found_in(lake.settings) == []


@pytest.mark.long
def test_what_a_jump_has_closed_was_valid_when_it_was_corrected(kafka: str, tmp_path: Path) -> None:
    """Nothing is out before the jump; the first correction of `a` is not valid, its merge record
    was."""
    own = {"publish__valid": "size(tracking) = 1"}
    lake = lake_with(kafka, tmp_path, "right-closed", late_case(), **own)
    lake.arrive()
    lake.merge()
    lake.jump({tp: case_end(lake, 0, tp.input.source, 1.0) for tp in lake.every})
    names = ["merge_key", "valid", "invalid_reason"]
    [silver] = lake.reader.select(tables.MERGED, names).to_pylist()
    assert tuple(silver.values()) == ("a", False, "reset")
    assert found_in(lake.settings) == []
    assert found_in(lake.settings) == []


@pytest.mark.long
def test_what_is_too_large_takes_back_what_is_out(kafka: str, tmp_path: Path) -> None:
    given = {0: late_case()}
    lake = new_lake(kafka, tmp_path, "right-large", given, publish__max_bytes=784)
    step(lake)
    rows = lake.reader.select(tables.CORRECTIONS, ["merge_key", "version", "invalid_reason"])
    assert sorted(tuple(row.values()) for row in rows.to_pylist()) == [
        ("a", 1, None),
        ("a", 2, None),
        ("a", 3, "too_large"),
        ("b", 1, None),
    ]
    assert found_in(lake.settings) == []


# -- what is broken

Sent = tuple[bytes | None, bytes | None, int, dict[str, bytes]]
"""Key, value, timestamp and headers of a message."""


def with_headers(message: Sent, **changed: bytes) -> Sent:
    own = {f"watersmeet.{name}": value for name, value in changed.items()}
    return (*message[:3], message[3] | own)


def renumbered(message: Sent, seq: int) -> Sent:
    return with_headers(message, seq=b"%d" % seq)


AT_A = "version {} of '{}/0/a'"
IN_ROW = "from the row of corrections"
NO_ROW = "no row of corrections has this message"
MISSING = "a row of corrections is missing in the topic"
NOTED = "the last message has seq 2, and 3 was published"

FAULTS: list[tuple[Callable[[list[Sent]], list[Sent]], list[tuple[str, str]]]] = [
    (lambda m: m, []),
    (
        lambda m: [m[0], *m[2:]],
        [("@1: seq 2, version 1 of 'late/{t}/0/4'", "a gap"), (": " + AT_A, MISSING)],
    ),
    (lambda m: [m[0], m[1], *m[1:]], [("@2: seq 1, " + AT_A, "seq 1 after 1: a repeat")]),
    (
        lambda m: [m[0], m[1], renumbered(m[3], 2), renumbered(m[2], 3)],
        [("@3: seq 3, version 1 of 'late/{t}/0/4'", "is not in the order of publication")],
    ),
    (
        lambda m: [m[0], (m[1][0], b"{}", *m[1][2:]), *m[2:]],
        [("@1: seq 1, " + AT_A, f"value differs {IN_ROW}")],
    ),
    (
        lambda m: [m[0], (m[1][0], None, *m[1][2:]), *m[2:]],
        [("@1: seq 1, " + AT_A, f"value differs {IN_ROW}")],
    ),
    (
        lambda m: [m[0], with_headers(m[1], version=b"7"), *m[2:]],
        [("@1: seq 1, version 7 of '{p}/0/a'", f"version differs {IN_ROW}")],
    ),
    (
        lambda m: [m[0], renumbered(m[2], 1), renumbered(m[3], 2)],
        [
            (": " + AT_A, MISSING),
            ("@2: seq 2, version 3 of '{p}/0/a'", NOTED),
        ],
    ),
    (
        lambda m: m[:3],
        [("@2: seq 2, version 1 of 'late/{t}/0/4'", NOTED)],
    ),
    (
        lambda m: [*m[:3], with_headers(m[3], late=b"tracking/other/9/5")],
        [(": version 3 of '{p}/0/a'", MISSING), ("@3: seq 3, version 3 of '{p}/0/a'", NO_ROW)],
    ),
    (
        lambda m: [m[0], with_headers(m[1], late=b"tracking/corrected_tracking/0/3"), *m[2:]],
        [("@1: seq 1, " + AT_A, f"late differs {IN_ROW}")],
    ),
    (
        lambda m: [m[0], (b"b", *m[1][1:2], 7, with_headers(m[1], id=b"7/0/a")[3]), *m[2:]],
        [("@1: seq 1, version 2 of '7/0/a'", f"key and timestamp and id differ {IN_ROW}")],
    ),
    (lambda m: [*m, (*m[3][:3], {})], [("@4", "not a message of Watersmeet")]),
]
"""By partition what becomes of its messages, and what is found: where it is, and what is wrong."""


def told(p: int, topic: str, source_topic: str, where: str) -> str:
    """The whole of a place: with the merge record of the second message, where it is named."""
    text = where.replace("version {} of '{}/0/a'", f"version 2 of '{p}/0/a'")
    text = text.replace("{t}/0", f"tracking/{source_topic}/{p}").replace("{p}", str(p))
    return f"{topic}[{p}]{text}"


@dataclass
class Broken:
    """A right lake, and a topic with its corrections in which something is wrong."""

    kafka: str
    lake: CaseLake

    def copy(self, folder: Path, **overrides: Any) -> Settings:
        """The same lake with the wrong topic."""
        shutil.copytree(str(self.lake.settings.lake), folder / "lake", dirs_exist_ok=True)
        corrections = {"topic": "broken-corrections", "within": ALL}
        settings = settings_of(
            self.kafka, folder, "corrected", publish__corrections=corrections, **overrides
        )
        name = topic_columns(Cluster(settings.kafka).identified("broken-corrections"))
        rewrite(
            settings,
            tables.PUBLISHED,
            lambda row: row if row["last_u"] is None else {**row, **name},
        )
        return settings


@pytest.fixture(scope="module")
def broken(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Broken:
    given = {p: late_case() for p in range(len(FAULTS))}
    lake = new_lake(kafka, tmp_path_factory.mktemp("corrected"), "corrected", given)
    step(lake)
    create_topics(kafka, "broken-corrections", partitions=len(FAULTS))
    producer = CheckedProducer(kafka)
    sent: dict[int, list[Sent]] = {p: [] for p in given}
    for m in consume(kafka, "corrected-corrections", len(FAULTS)):
        headers = dict(m.headers())
        sent[m.partition()].append((m.key(), m.value(), m.timestamp()[1], headers))
    for p, (fault, _) in enumerate(FAULTS):
        assert len(sent[p]) == 4
        for key, value, timestamp, headers in fault(sent[p]):
            producer.produce(
                "broken-corrections", value, key, p, timestamp=timestamp, headers=[*headers.items()]
            )
    assert producer.flush(30) == 0
    return Broken(kafka, lake)


@pytest.mark.promise("A1")
@pytest.mark.fault("damage")
@pytest.mark.parametrize(
    ("delivery", "forgiven"),
    [
        ("exactly_once", ()),
        ("at_least_once", ("a repeat",)),
        ("at_most_once", ("a gap", MISSING, NOTED)),
    ],
)
def test_every_fault_in_the_topic_is_found(
    broken: Broken,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    delivery: str,
    forgiven: tuple[str, ...],
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 50)
    settings = broken.copy(tmp_path, publish__delivery=delivery)
    expected = [
        (told(p, "broken-corrections", "corrected_tracking", where), words)
        for p, (_, found) in enumerate(FAULTS)
        for where, words in found
        if not words.endswith(forgiven)
    ]
    the_same(found_in(settings), expected)


ROWS: list[tuple[Change, list[str]]] = [
    (altered(valid=False, invalid_reason="predicate"), ["valid is False (predicate), and must be"]),
    (altered(invalid_reason="reset"), ["valid is True (reset), and must be True (None)"]),
    (altered(has_message=False), ["has_message is False, and must be True"]),
    (altered(id="0/0/aa"), ["id is '0/0/aa', and must be '0/0/a'"]),
    (altered(id="late/tracking/corrected_tracking/0/2"), ["and must be '0/0/a'"]),
]
IN_TOPIC = [
    [f"value differs {IN_ROW}"],
    [],
    [NO_ROW],
    [f"id differs {IN_ROW}"],
    [f"id differs {IN_ROW}"],
]


@pytest.mark.fault("damage")
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_fault_in_the_table_is_found(broken: Broken, tmp_path: Path, number: int) -> None:
    """Of the row, and of the message that was right."""
    change, in_table = ROWS[number]
    shutil.copytree(str(broken.lake.settings.lake), tmp_path / "lake")
    settings = settings_of(broken.kafka, tmp_path, "corrected", **topic_of("corrected"))

    def changed(row: dict[str, Any]) -> Any:
        return change(row) if (row["partition"], row["offset"]) == (0, 3) else row

    rewrite(settings, tables.CORRECTIONS, changed)
    of_row = "corrections: corrected_tracking[0]@3"
    id_in_row = "version 2 of '0/0/a'"
    of_message = f"corrected-corrections[0]@1: seq 1, {id_in_row}"
    expected = [(of_row, words) for words in in_table]
    the_same(found_in(settings), [*expected, *((of_message, words) for words in IN_TOPIC[number])])


def test_a_wrong_id_of_what_a_late_record_has_opened_is_found(
    broken: Broken, tmp_path: Path
) -> None:
    shutil.copytree(str(broken.lake.settings.lake), tmp_path / "lake")
    settings = settings_of(broken.kafka, tmp_path, "corrected", **topic_of("corrected"))
    wrong = {"id": "0/70/b"}
    rewrite(
        settings,
        tables.CORRECTIONS,
        lambda row: {**row, **wrong} if (row["partition"], row["offset"]) == (0, 4) else row,
    )
    right = "late/tracking/corrected_tracking/0/4"
    the_same(
        found_in(settings),
        [
            ("corrections: corrected_tracking[0]@4", f"id is '0/70/b', and must be '{right}'"),
            (
                f"corrected-corrections[0]@2: seq 2, version 1 of '{right}'",
                f"id differs {IN_ROW}",
            ),
        ],
    )

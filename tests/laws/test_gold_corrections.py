"""Corrections in a real topic: per partition one gapless sequence in order, in every delivery mode,
whatever is cut, crashed, emptied or made again; and a consumer of both topics has each record once.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeLake, in_folders, one_of
from tests.laws.test_corrections import ALL_MS
from tests.support.cases import SOURCES, Case, heartbeat, keyed, rich_cases
from tests.support.corrections import CorrectionModels, consumed, corrections_in
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake
from tests.support.tenants import merge_of, tenant_cases
from tests.support.topics import consume, delete_records, delete_topic
from watersmeet.ask.answers import rows
from watersmeet.ask.explain import explain
from watersmeet.core.sequence import CORRECTED
from watersmeet.gold import Gold
from watersmeet.lake import tables
from watersmeet.running.owner import Owner

pytestmark = pytest.mark.promise("R20")

kind = one_of([QUICK, SPARK_FOLDER])

PARTITIONS = 6
SHARES = (0.3, 0.7, 1.0)


def given_cases() -> dict[int, Case]:
    cases = rich_cases(PARTITIONS, 3300)
    for case in cases.values():
        for source, values in case.values.items():
            values.append(heartbeat(100_000))
            case.arrivals.append(source)
    return cases


def corrected_lake(
    new_lake: MakeLake, kafka: str, sink: str, cases: dict[int, Case], **more: Any
) -> CaseLake:
    corrections = {"topic": f"{sink}-corrections", "within": "1d"}
    publish = {"publish__topic": sink, "publish__corrections": corrections}
    return new_lake(cases, bootstrap=kafka, name=sink, **publish, **more)


def publish(lake: CaseLake, engine: Any = None) -> None:
    """One start of gold, of both sequences."""
    list(lake.gold(engine).drain())
    owner = lake.owner(engine)
    list(Gold(owner, lake.settings, PARTITIONS, kind=CORRECTED).drain())


def in_topic(lake: CaseLake) -> list[tuple[Any, ...]]:
    topic = lake.settings.publish.corrections_topic or ""
    return corrections_in(lake.settings.kafka.bootstrap_servers, topic, PARTITIONS)


def both(lake: CaseLake) -> dict[str, Any]:
    topics = lake.settings.publish.sequence_topics
    return consumed(lake.settings.kafka.bootstrap_servers, topics, lake.partitions)


@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once", "at_most_once"])
def test_corrections_are_published_as_their_model_has_them(
    new_lake: MakeLake, kafka: str, kind: str, delivery: str
) -> None:
    cases = given_cases()
    sink = f"laws-corrected-{kind}-{delivery}"
    lake = corrected_lake(new_lake, kafka, sink, cases, publish__delivery=delivery)
    models = CorrectionModels(cases, (100, None, None), ALL_MS)
    _published_in_steps(lake, models)
    assert len(models.messages()) > 10
    _each_once(lake, models)


@in_folders
def test_a_pass_without_news_reads_no_correction(
    new_lake: MakeLake, kafka: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = given_cases()
    lake = corrected_lake(new_lake, kafka, f"laws-corrected-free-{kind}", cases)
    models = CorrectionModels(cases, (100, None, None), ALL_MS)
    gold = Gold(lake.owner(), lake.settings, PARTITIONS, kind=CORRECTED)
    reads: list[str] = []
    rows = lake.reader.rows

    def counted(table: str, *arguments: Any) -> Any:
        reads.append(table)
        return rows(table, *arguments)

    for share in SHARES:
        lake.arrive(share)
        lake.merge()
        list(gold.drain())
        assert list(gold.drain()) == []
        models.arrive(share)
        assert in_topic(lake) == models.messages()
        with monkeypatch.context() as patched:
            patched.setattr(gold.owner.engine.reader, "rows", counted)
            assert list(gold.drain()) == []
            assert reads == []
    assert models.messages()


def _published_in_steps(lake: CaseLake, models: CorrectionModels) -> None:
    for share in SHARES:
        lake.arrive(share)
        lake.merge(lake.quick)
        publish(lake)
        models.arrive(share)
        assert in_topic(lake) == models.messages()


def _each_once(lake: CaseLake, models: CorrectionModels) -> None:
    """Records are told apart by source, offset and key: values have their offset as `n`."""
    found: Counter[tuple[str, str, int]] = Counter()
    for name, value in both(lake).items():
        partition = name.split("/")[3 if name.startswith("late/") else 0]
        found.update((partition, s, part["n"]) for s in SOURCES for part in value[s])
    assert found == Counter({(str(p), s, n): count for (p, s, n), count in models.newest().items()})
    assert set(found.values()) == {1}


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_explain_says_where_in_the_topic_each_version_is(new_lake: MakeLake, kafka: str) -> None:
    cases = given_cases()
    lake = corrected_lake(new_lake, kafka, "laws-corrected-explained", cases)
    models = CorrectionModels(cases, (100, None, None), ALL_MS)
    for share in SHARES:
        lake.arrive(share)
        lake.merge()
        publish(lake)
    models.arrive(1.0)
    topic = lake.settings.publish.corrections_topic or ""
    offsets = [(m.partition(), m.offset()) for m in consume(kafka, topic, PARTITIONS)]
    expected = [row[:5] for row in models.messages()]
    found = []
    for key in {row[1] for row in expected}:
        for record in explain(lake.reader, lake.settings, key)["records"]:
            for version in record["versions"]:
                late = [str(version[name]) for name in ("source", "topic", "partition", "offset")]
                out = version["published"]
                found.append(
                    (out["partition"], key, out["seq"], version["version"], "/".join(late))
                )
                assert (out["partition"], out["offset"]) in offsets
    assert sorted(found) == expected


@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_with_tenants_and_windows_a_consumer_has_each_record_once(
    new_lake: MakeLake, kafka: str
) -> None:
    rules = (100, 250, 300)
    cases = tenant_cases(PARTITIONS)
    sink = "laws-corrected-tenants"
    lake = corrected_lake(new_lake, kafka, sink, cases, merge=merge_of(rules))
    models = CorrectionModels(cases, rules, ALL_MS)
    _published_in_steps(lake, models)
    _each_once(lake, models)


@pytest.mark.fault("kill", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("delivery", ["exactly_once", "at_most_once"])
def test_a_crash_before_the_note_repeats_and_loses_nothing(
    new_lake: MakeLake, kafka: str, delivery: str
) -> None:
    cases = given_cases()
    sink = f"laws-corrected-crashed-{delivery}"
    lake = corrected_lake(new_lake, kafka, sink, cases, publish__delivery=delivery)
    models = CorrectionModels(cases, (100, None, None), ALL_MS)
    for share in SHARES:
        lake.arrive(share)
        lake.merge()
        list(lake.gold().drain())
        dying = lake.owner(dying_at(lake.engine, "append", tables.PUBLISHED))
        gold = Gold(dying, lake.settings, PARTITIONS, kind=CORRECTED)
        if lake.reader.rows(tables.CORRECTIONS, ["offset"]).num_rows:
            with pytest.raises(CrashError):
                list(gold.drain())
        publish(lake)
    models.arrive(1.0)
    assert in_topic(lake) == models.messages()


@pytest.mark.fault("retention", "topics")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_partition_that_retention_has_emptied_goes_on_and_a_new_topic_begins_anew(
    new_lake: MakeLake, kafka: str
) -> None:
    cases = given_cases()
    lake = corrected_lake(new_lake, kafka, "laws-corrected-emptied", cases)
    models = CorrectionModels(cases, (100, None, None), ALL_MS)
    topic = lake.settings.publish.corrections_topic or ""
    lake.arrive(0.7)
    lake.merge()
    publish(lake)
    first = in_topic(lake)
    for p in {row[0] for row in first}:
        ends = [m.offset() for m in consume(kafka, topic, PARTITIONS) if m.partition() == p]
        delete_records(kafka, topic, p, max(ends) + 2)
    lake.arrive()
    lake.merge()
    publish(lake)
    models.arrive(1.0)
    assert first
    assert in_topic(lake) == [row for row in models.messages() if row not in first]
    delete_topic(kafka, topic)
    publish(lake)
    assert in_topic(lake) == models.messages()


@pytest.mark.fault("jumps")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_jump_back_passes_over_the_late_records_of_published_corrections(
    new_lake: MakeLake, kafka: str
) -> None:
    """The late record is read again from the beginning, where it would not be late."""
    case = Case(
        {
            "tracking": [keyed("a", 0), heartbeat(1000), keyed("a", 50, n=2), heartbeat(2000)],
            "orders": [heartbeat(1000), heartbeat(2000)],
        },
        100,
        ["tracking", "tracking", "orders", "tracking", "tracking", "orders"],
    )
    lake = corrected_lake(new_lake, kafka, "laws-corrected-jump", {0: case})
    lake.arrive()
    lake.merge()
    list(lake.gold().drain())
    gold = Gold(lake.owner(), lake.settings, 1, kind=CORRECTED)
    list(gold.drain())
    tails = lake.gold().recover()
    before = corrections_in(kafka, "laws-corrected-jump-corrections", 1)
    assert [row[3:5] for row in before] == [(1, "tracking/tracking/0/2")]
    lake.jump(dict.fromkeys(lake.every, 0), tails, correction_tails=gold.recover())
    lake.merge()
    list(lake.gold().drain())
    list(Gold(lake.owner(), lake.settings, 1, kind=CORRECTED).drain())
    assert corrections_in(kafka, "laws-corrected-jump-corrections", 1) == before
    assert len(lake.messages()) == 1


def jumping_lake(new_lake: MakeLake, kafka: str, name: str) -> CaseLake:
    """Late records of `a`, which was merged, and of `b` and `c`, which were not."""
    tracking = [keyed("a", 0, n=1), heartbeat(1000), keyed("a", 50, n=2), keyed("b", 60, n=3)]
    later = [heartbeat(2000), heartbeat(2500), keyed("c", 70, n=4), heartbeat(3000)]
    case = Case(
        {"tracking": [*tracking, *later], "orders": [heartbeat(n) for n in (1000, 2000, 3000)]},
        100,
        [*["tracking"] * 2, "orders", *["tracking"] * 3, "orders", *["tracking"] * 3, "orders"],
    )
    lake = corrected_lake(new_lake, kafka, name, {0: case})
    lake.arrive(0.64)
    lake.merge()
    return lake


def corrector(lake: CaseLake, engine: Any = None) -> Gold:
    return Gold(lake.owner(engine), lake.settings, 1, kind=CORRECTED)


def closed(lake: CaseLake) -> list[tuple[Any, ...]]:
    names = ["merge_key", "valid", "invalid_reason", "has_message"]
    found = lake.reader.select(tables.CORRECTIONS, names, [[("generation", "=", 0)]])
    return sorted(tuple(row.values()) for row in found.to_pylist())


def view_of_corrected(lake: CaseLake) -> list[tuple[Any, ...]]:
    found = rows(lake.quick.reader, "SELECT merge_key, version FROM corrected")
    return sorted(tuple(row.values()) for row in found)


@pytest.mark.fault("jumps")
def test_corrections_that_a_jump_finds_unpublished_are_closed_and_their_records_come_anew(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    """Also where a crash cuts the jump short; and what `corrected` has is what is out, or will
    be."""
    lake = jumping_lake(new_lake, kafka, f"laws-corrected-closed-{kind}")
    assert view_of_corrected(lake) == [("a", 1), ("b", 1)]
    list(lake.gold().drain())
    tails = lake.gold().recover()
    begin = dict.fromkeys(lake.every, 0)
    closing = dying_at(lake.engine, "update", tables.SILVER)
    with pytest.raises(CrashError):
        lake.jump(begin, tails, Owner(closing, lake.token))
    assert closed(lake) == [("a", True, None, True), ("b", True, None, True)]
    lake.start().complete()
    assert closed(lake) == [("a", False, "reset", False), ("b", False, "reset", False)]
    assert view_of_corrected(lake) == [("a", 0)]
    assert list(corrector(lake).drain()) == []
    lake.arrive()
    lake.merge()
    list(lake.gold().drain())
    list(corrector(lake).drain())
    topic = lake.settings.publish.corrections_topic or ""
    late = [row[4] for row in corrections_in(kafka, topic, 1)]
    assert late == [f"tracking/tracking/0/{offset}" for offset in (2, 3, 6)]
    found = Counter(p["n"] for value in both(lake).values() for s in SOURCES for p in value[s])
    assert set(found.values()) == {1}
    assert len(found) == 4


@pytest.mark.promise("N18")
@pytest.mark.fault("jumps", "topics")
def test_a_topic_that_is_made_again_gets_the_corrections_of_all_generations(
    new_lake: MakeLake, kafka: str, kind: str
) -> None:
    """In their order, numbered from 0 on, also where a crash cuts it short; none that was closed
    before it was out, and none that sorts before what was out when its generation began."""
    lake = jumping_lake(new_lake, kafka, f"laws-corrected-generations-{kind}")
    topic = lake.settings.publish.corrections_topic or ""
    list(lake.gold().drain())
    list(corrector(lake).drain())
    here = {tp: at.next_offset for tp, at in lake.start().recover().state.cursors.items()}
    for begin in (dict.fromkeys(lake.every, 0), here):
        lake.jump(begin, lake.gold().recover(), correction_tails=corrector(lake).recover())
    lake.arrive()
    lake.merge()
    list(lake.gold().drain())
    list(corrector(lake).drain())
    before = corrections_in(kafka, topic, 1)
    assert [row[:2] for row in before] == [(0, "a"), (0, "b"), (0, "c")]
    delete_topic(kafka, topic)
    with pytest.raises(CrashError):
        list(corrector(lake, dying_at(lake.engine, "append", tables.PUBLISHED)).drain())
    list(corrector(lake).drain())
    assert corrections_in(kafka, topic, 1) == before
    assert list(corrector(lake).drain()) == []


@pytest.mark.parametrize("kind", [pytest.param(QUICK, marks=pytest.mark.long)], indirect=True)
def test_an_invalid_correction_takes_back_what_is_out_and_a_valid_one_brings_it(
    new_lake: MakeLake, kafka: str
) -> None:
    """Valid are those with two parts: `a` has two, and a third that is late; `b` has one, and a
    second and a third that are late."""
    case = Case(
        {
            "tracking": [
                *(keyed("a", 0), keyed("a", 1), keyed("b", 2), heartbeat(1000)),
                *(keyed("a", 50), keyed("b", 60), keyed("b", 70), heartbeat(2000)),
            ],
            "orders": [heartbeat(1000), heartbeat(2000)],
        },
        100,
        [*["tracking"] * 4, "orders", *["tracking"] * 4, "orders"],
    )
    valid = "size(tracking) = 2"
    lake = corrected_lake(new_lake, kafka, "laws-corrected-valid", {0: case}, publish__valid=valid)
    lake.arrive()
    lake.merge()
    list(lake.gold().drain())
    list(Gold(lake.owner(), lake.settings, 1, kind=CORRECTED).drain())
    assert [m.key for m in lake.messages()] == [b"a"]
    found = corrections_in(kafka, "laws-corrected-valid-corrections", 1)
    assert [(key, version, value is None) for _, key, _, version, _, value in found] == [
        ("a", 1, True),
        ("b", 1, False),
        ("b", 2, True),
    ]

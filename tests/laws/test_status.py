"""`status` adds up: each record that has timed out is out, not valid, still to be published, or
never published for a reason that is named."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tests.laws.conftest import QUICK, MakeLake, one_of
from tests.laws.test_gold_corrections import given_cases, publish
from tests.support.cases import SOURCES, Case, heartbeat, keyed, rich_cases
from tests.support.crashes import CrashError
from tests.support.lakes import CaseLake
from tests.support.tenants import merge_of, tenant_cases
from tests.support.topics import consume, create_topics, delete_topic
from watersmeet.ask.explain import Topics, explain
from watersmeet.ask.status import status
from watersmeet.audit.show import explain_view, status_view
from watersmeet.kafka.publisher import Publisher
from watersmeet.lake import tables
from watersmeet.operations.forget import Forgetting

kind = one_of([QUICK])

PARTITIONS = 4
LARGE = {"pad": "x" * 5000}
SMALL = {"publish__max_bytes": "4KiB"}


def shown(lake: CaseLake) -> list[dict[str, Any]]:
    """What `status` says, once it is seen that it adds up and agrees with silver and the sink."""
    partitions: list[dict[str, Any]] = status(lake.reader, lake.settings, 0.5)["partitions"]
    columns = ["partition", "merge_key", "event_time", "tenant", "status", "valid"]
    rows = lake.reader.select(tables.MERGED, [*columns, "invalid_reason"]).to_pylist()
    finished = [row for row in rows if row["status"] == "timed_out"]
    messages = Counter((m.partition, m.key.decode(), m.timestamp) for m in lake.messages())
    for at in partitions:
        here = [row for row in finished if row["partition"] == at["partition"]]
        assert at["timed_out"] == len(here)
        reasons = Counter(row["invalid_reason"] for row in here if not row["valid"])
        assert (at["not_valid"], at["not_valid_reasons"]) == (reasons.total(), dict(reasons))
        valid = Counter(
            (row["partition"], row["merge_key"], max(1, row["event_time"]))
            for row in here
            if row["valid"]
        )
        out = Counter({place: n for place, n in messages.items() if place[0] == at["partition"]})
        assert at["to_publish"] + at["behind_sink"] + at["in_former_sink"] == (
            (valid - out).total() - (at["published"] - out.total())
        ), "what was noted, and never sent, counts as published"
        assert at["not_in_silver"] == (out - valid).total()
        assert at["timed_out"] + at["not_in_silver"] == (
            sum(at[name] for name in ("published", "not_valid", "to_publish", "behind_sink"))
            + at["in_former_sink"]
        )
    return partitions


def total(partitions: list[dict[str, Any]], name: str) -> int:
    return sum(at[name] for at in partitions)


def made(
    new_lake: MakeLake, kafka: str, name: str, cases: dict[int, Case], **more: Any
) -> CaseLake:
    """A lake whose topics exist; `name` is the sink."""
    topics = {f"sources__{source}__topic": f"{name}-{source}" for source in SOURCES}
    create_topics(kafka, name, *topics.values(), partitions=len(cases))
    return new_lake(cases, bootstrap=kafka, name=name, publish__topic=name, **topics, **more)


def with_large_ones(cases: dict[int, Case]) -> dict[int, Case]:
    """The cases, each with a record whose message is too large, and heartbeats at which everything
    times out."""
    for case in cases.values():
        case.values["tracking"] += [keyed("large", 50_000, **LARGE), heartbeat(100_000)]
        case.values["orders"].append(heartbeat(100_000))
        case.arrivals += ["tracking", "tracking", "orders"]
    return cases


def steps(lake: CaseLake) -> list[list[dict[str, Any]]]:
    """What is shown after each step of a lake's life."""
    seen = [shown(lake)]
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
        seen.append(shown(lake))
        lake.publish()
        seen.append(shown(lake))
    return seen


def test_whatever_is_merged_and_published(new_lake: MakeLake, kafka: str) -> None:
    cases = with_large_ones(rich_cases(PARTITIONS, 3300))
    lake = made(new_lake, kafka, "adds-up", cases, **SMALL)
    _, merged, published, _, at_the_end = steps(lake)
    assert total(merged, "to_publish") > 0
    assert total(published, "to_publish") == 0
    assert [at["not_valid_reasons"] for at in at_the_end] == [{"too_large": 1}] * PARTITIONS
    assert total(at_the_end, "not_in_silver") == total(at_the_end, "in_former_sink") == 0
    Forgetting(lake.reader, lake.settings, "a").erase(lake.owner())
    assert total(shown(lake), "not_in_silver") > 0, "the messages of what was forgotten"


def test_messages_are_those_of_the_sink_that_is_configured(new_lake: MakeLake, kafka: str) -> None:
    lake = made(new_lake, kafka, "another-sink", rich_cases(PARTITIONS, 3301))
    *_, at_the_end = steps(lake)
    publish = lake.settings.publish.model_copy(update={"topic": "not-there-yet"})
    settings = lake.settings.model_copy(update={"publish": publish})
    of_other = status(lake.reader, settings, 0.5)["partitions"]
    assert total(of_other, "published") == 0
    assert total(of_other, "to_publish") == total(at_the_end, "published") > 0


@pytest.mark.parametrize("delivery", ["exactly_once", "at_most_once"])
def test_messages_whose_value_could_not_be_made_are_counted(
    new_lake: MakeLake, kafka: str, delivery: str
) -> None:
    name = f"failed-values-{delivery.replace('_', '-')}"
    corrections = {"topic": f"{name}-corrections", "within": "1d"}
    value = "CAST(if(merge_key = 'a', '1', merge_key) AS INTEGER)::VARCHAR"
    more = {"publish__delivery": delivery, "publish__corrections": corrections}
    lake = made(new_lake, kafka, name, given_cases(), publish__value=value, **more)
    partitions = lake.partitions
    steps(lake)
    publish(lake)
    at_the_end = shown(lake)
    messages = consume(kafka, name, partitions) + consume(kafka, f"{name}-corrections", partitions)
    failed = Counter(m.partition() for m in messages if m.value() is None)
    assert [at["failed_values"] for at in at_the_end] == [failed[p] for p in range(partitions)]
    assert 0 < failed.total() < len(messages)
    assert f"failed values {failed[0]}" in text(lake)


def test_with_tenants_and_a_window(new_lake: MakeLake, kafka: str) -> None:
    merge = merge_of((100, 250, 300))
    lake = made(new_lake, kafka, "adds-up-tenants", tenant_cases(PARTITIONS), merge=merge)
    assert total(steps(lake)[-1], "published") > 0


def test_with_corrections(new_lake: MakeLake, kafka: str) -> None:
    name = "adds-up-corrected"
    corrections = {"topic": f"{name}-corrections", "within": "1d"}
    lake = made(new_lake, kafka, name, given_cases(), publish__corrections=corrections)
    assert total(steps(lake)[-1], "corrections") > 0


def test_a_gap_of_at_most_once_counts_as_published(
    new_lake: MakeLake, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = with_large_ones(rich_cases(PARTITIONS, 3300))
    lake = made(new_lake, kafka, "adds-up-gap", cases, publish__delivery="at_most_once", **SMALL)
    lake.arrive(0.5)
    lake.merge()

    def die(*_: Any) -> None:
        raise CrashError

    monkeypatch.setattr(Publisher, "send", die)
    with pytest.raises(CrashError):
        lake.publish()
    monkeypatch.undo()
    gap = total(shown(lake), "published")
    assert gap > 0
    lake.arrive()
    lake.merge()
    lake.publish()
    assert total(shown(lake), "published") == gap + len(lake.messages())


def test_after_a_jump_and_where_the_sink_was_made_again(new_lake: MakeLake, kafka: str) -> None:
    cases = with_large_ones(rich_cases(PARTITIONS, 2500, wealth="late timed_out open"))
    lake = made(new_lake, kafka, "adds-up-jump", cases, **SMALL)
    lake.arrive(0.4)
    lake.merge()
    lake.publish()
    lake.arrive(0.6)
    lake.merge()
    lake.jump(dict.fromkeys(lake.every, 0), lake.gold().recover())
    lake.merge()
    jumped = shown(lake)
    assert sum(at["not_valid_reasons"].get("reset", 0) for at in jumped) > 0
    lake.arrive()
    lake.merge()
    lake.publish()
    assert total(shown(lake), "to_publish") == 0
    out = len(lake.messages())
    delete_topic(kafka, lake.settings.publish.topic)
    lake.publish()
    assert total(shown(lake), "in_former_sink") == 0
    assert len(lake.messages()) == out, "those of the former generation, too"


def test_people_see_where_each_record_is_and_what_an_open_one_waits_for(
    new_lake: MakeLake, kafka: str
) -> None:
    """As in the docs: 7 records have timed out and 6 are published."""
    tracking = [keyed(f"k{i}", i) for i in range(6)] + [keyed("large", 6, **LARGE)]
    case = Case(
        {"tracking": [*tracking, keyed("open", 900), heartbeat(950)], "orders": [heartbeat(950)]},
        100,
        ["tracking"] * 9 + ["orders"],
    )
    lake = made(new_lake, kafka, "adds-up-seen", {0: case}, **SMALL)
    lake.arrive()
    lake.merge()
    assert "timed out 7 · published 0 · not valid 1 (too large) · to publish 6" in text(lake)
    [record] = explain(lake.reader, lake.settings, "k3")["records"]
    assert record["reason"].endswith("; not published yet")
    lake.publish()
    assert "open 1 · timed out 7 · published 6 · not valid 1 (too large) · late 0" in text(lake)
    assert "clock 1970-01-01 00:00:00.950Z  next due 1970-01-01 00:00:01.000Z" in text(lake)
    [record] = explain(lake.reader, lake.settings, "k3")["records"]
    assert "not published" not in record["reason"]
    assert status(lake.reader, lake.settings)["partitions"][0]["next_due"] == 1000


def test_a_message_keeps_its_number_where_later_rows_are_forgotten(
    new_lake: MakeLake, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are left do not say it: the topic does, and where it is away, nobody."""
    tracking = [keyed(f"k{i}", i) for i in range(4)]
    case = Case(
        {"tracking": [*tracking, heartbeat(950)], "orders": [heartbeat(950)]},
        100,
        ["tracking"] * 5 + ["orders"],
    )
    lake = made(new_lake, kafka, "forgotten-behind", {0: case})
    lake.arrive()
    lake.merge()
    lake.publish()

    def told(key: str) -> tuple[Any, Any]:
        [record] = explain(lake.reader, lake.settings, key)["records"]
        return record["published"]["offset"], record["published"]["seq"]

    offsets = {f"k{i}": told(f"k{i}")[0] for i in range(4)}
    assert [told(key)[1] for key in offsets] == [0, 1, 2, 3]
    Forgetting(lake.reader, lake.settings, "k2").erase(lake.owner())
    numbers = {"k0": 0, "k1": 1, "k3": 3}
    assert {key: told(key) for key in numbers} == {
        key: (offsets[key], seq) for key, seq in numbers.items()
    }
    monkeypatch.setattr(Topics, "_is_away", True, raising=False)
    monkeypatch.setattr(Topics, "__init__", lambda *_: None)
    assert told("k0")[1] is None
    assert "published at offset" in explained(lake, "k0")


def explained(lake: CaseLake, key: str) -> str:
    console = Console(record=True, width=300, file=StringIO())
    console.print(explain_view(explain(lake.reader, lake.settings, key)))
    return console.export_text()


def text(lake: CaseLake) -> str:
    console = Console(record=True, width=300, file=StringIO())
    console.print(status_view(status(lake.reader, lake.settings)))
    return console.export_text()

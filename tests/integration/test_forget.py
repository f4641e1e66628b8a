"""`forget` on a river: a key leaves lake and log, says what still holds it, and nothing else
changes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.support.cases import BAD_VALUES, SOURCES, expected_messages, heartbeat, keyed
from tests.support.commands import here
from tests.support.fault_points import IN_FORGET
from tests.support.rivers import River, RunProcess, until
from tests.support.topics import consume, dead_letters, published

pytestmark = pytest.mark.long

KEY = "alice-1234"


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """Alice has merge records that are open and published, a late record and a refused one; the
    same bytes bear other keys."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[-50:]
    topics: dict[str, Any] = {
        f"publish__{table}_topic": f"{name}-{table}" for table in ("late", "quarantine")
    }
    river = River.make(kafka, tmp_path, name, **topics)
    river.flow()
    send(river, 1000, 1100)
    river.flow()
    river.send("orders", 0, keyed(KEY, 3))
    river.send("tracking", 0, b'{"k":"%s"}' % KEY.encode())
    send(river, 2000, 2100, 2900)
    river.flow()
    send(river, 2950)
    river.finish()
    return river


def send(river: River, *times: int) -> None:
    for time in times:
        river.send("tracking", 0, keyed(KEY, time))


def watersmeet(river: River, *words: str, exit_code: int = 0) -> str:
    program = [sys.executable, "-m", "watersmeet", *words, "-c", str(river.file)]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=120, check=False, cwd=river.folder
    )
    assert done.returncode == exit_code, done.stderr
    return done.stdout if exit_code == 0 else done.stderr


def forget(river: River, *options: str) -> dict[str, Any]:
    return dict(json.loads(here(river, "forget", KEY, "--json", *options)))


def counts(found: dict[str, Any], column: str) -> dict[str, int]:
    return {row["table"]: row[column] for row in found["tables"]}


@pytest.mark.promise("N9")
def test_a_forgotten_key_leaves_the_lake_and_the_log_and_all_else_stays(
    river: River, tmp_path: Path
) -> None:
    rows = {
        "merged": 3,
        "waiting": 0,
        "late": 1,
        "duplicates": 0,
        "excess": 0,
        "passed": 0,
        "corrections": 0,
        "quarantine": 1,
        "bronze_tracking": 7,
        "bronze_orders": 1,
        "published": 0,
    }
    sent = published(river.kafka, river.sink, 2)
    before = forget(river)
    assert (before["applied"], {**counts(before, "before"), "published": 0}) == (False, rows)
    held = {row["where"]: row["records"] for row in before["held"]}
    of_topics = {
        "tracking": 7,
        "orders": 1,
        "merged": sum(m.key == KEY.encode() for m in sent),
        "late": 1,
        "quarantine": 1,
    }
    expected = {f"topic {river.config['name']}-{name}": count for name, count in of_topics.items()}
    assert held == {"time travel and change files": None, **expected}
    assert of_topics["merged"] == 2
    assert counts(forget(river), "before") == counts(before, "before"), "nothing was changed"

    known = set((river.folder / "lake").rglob("*"))
    found = json.loads(watersmeet(river, "forget", KEY, "--json", "--apply"))
    assert counts(found, "before") == counts(before, "before")
    assert {
        name: n for name, n in counts(found, "after").items() if name != "published"
    } == dict.fromkeys(rows.keys() - {"published"}, 0)
    log = {file for file in (river.folder / "lake").rglob("*.json") if file not in known}
    tables_now = [
        DeltaTable(str(folder.parent)) for folder in (river.folder / "lake").rglob("_delta_log")
    ]
    now = log | {
        Path(file)
        for table in tables_now
        for file in table.file_uris()
        if "/published/" not in file
    }
    assert len(log) >= 6
    assert [file for file in now if KEY.encode() in file.read_bytes()] == [], (
        "nor does the log say whom it forgot"
    )
    assert json.loads(here(river, "explain", KEY, "--json"))["records"] == []
    later = {row["where"]: row["records"] for row in forget(river)["held"]}
    assert later == dict.fromkeys(held), "nothing says any more how many there are"

    assert river.broken_promises() == []
    into = tmp_path / "rebuilt"
    here(river, "rebuild", "--into", str(into))
    here(river, "verify", "--against", str(into))
    assert published(river.kafka, river.sink, 2) == sent
    again = json.loads(here(river, "redrive", "--reason", "no_event_time", "--json"))["records"]
    refused = river.reader.select("quarantine", ["reason", "detail"]).to_pylist()
    left = [
        row for row in refused if row["reason"] == "no_event_time" and row["detail"] != "forgotten"
    ]
    assert (
        sum(row["found"] for row in again)
        == len(left)
        < sum(row["reason"] == "no_event_time" for row in refused)
    )

    letters = [
        dead_letters(river.kafka, topic, 2)
        for topic in river.settings.publish.dead_letter_topics.values()
    ]
    send(river, 3950)
    for source in SOURCES:
        for p in range(2):
            river.send(source, p, heartbeat(9000))
    river.finish()
    after = published(river.kafka, river.sink, 2)
    assert [m for m in after if m in sent] == sent
    assert [m.id for m in after if m.key == KEY.encode() and m not in sent] == [f"0/3950/{KEY}"], (
        "a key that comes again begins anew"
    )
    assert river.broken_promises() == []
    assert [
        dead_letters(river.kafka, t, 2) for t in river.settings.publish.dead_letter_topics.values()
    ] == letters


def merged_all(river: River) -> bool:
    """Whether silver has merged what the river has sent; both sources end with a heartbeat of the
    same time."""
    rows = river.reader.summary("progress", ["partition"], {"clock": ("max", "clock")}).to_pylist()
    return {row["clock"] for row in rows} == {river.chunks * 1000}


def content(messages: Any) -> list[tuple[Any, ...]]:
    """What messages of other keys say, but for their numbers."""
    return sorted(
        (m.partition, m.key, m.timestamp, m.value, m.id) for m in messages if m.key != KEY.encode()
    )


def is_as_if_the_key_had_never_been(river: River, tmp_path: Path) -> None:
    """All promises hold, a rebuild is the same, other keys' messages are each there once, and no
    file of the lake has the key."""
    assert river.broken_promises() == []
    here(river, "rebuild", "--into", str(tmp_path / "rebuilt"))
    here(river, "verify", "--against", str(tmp_path / "rebuilt"))
    refused: dict[bytes | None, bytes | None] = {b'{"k":"%s"}' % KEY.encode(): BAD_VALUES[0]}
    for case in river.cases.values():
        case.values = {
            source: [refused.get(value, value) for value in values]
            for source, values in case.values.items()
        }
    assert content(published(river.kafka, river.sink, 2)) == content(expected_messages(river.cases))
    assert all(n == 0 for name, n in counts(forget(river), "before").items() if name != "published")


@pytest.mark.nightly
@pytest.mark.promise("N9")
@pytest.mark.fault("owners")
def test_a_run_goes_on_beside_it_and_nothing_is_lost_or_repeated(
    river: River, tmp_path: Path
) -> None:
    run = RunProcess(river.file)
    try:
        for times in ((3100, 3900), (4100, 4900), (5100,)):
            send(river, *times)
            river.flow()
            found = forget(river, "--apply")
            assert found["applied"] is True
        river.flow()
        until(lambda: merged_all(river), "the last batch")
        assert run.process.poll() is None, "it is still the same run"
        # What the run had not read at the time of the last call was not in the lake yet.
        forget(river, "--apply")
    finally:
        assert run.stop() == 0, run.said()
    assert "waiting for `watersmeet forget` to end" in run.said()
    river.finish()
    is_as_if_the_key_had_never_been(river, tmp_path)


@pytest.mark.nightly
@pytest.mark.promise("N9")
@pytest.mark.fault("kill")
def test_it_is_killed_in_its_midst_while_a_run_goes_on_and_called_again(
    river: River, tmp_path: Path
) -> None:
    run = RunProcess(river.file)
    try:
        for count in range(1, 7):
            times = [river.chunks * 1000 + ms for ms in (100, 500)]
            send(river, *times)
            river.send("orders", 0, keyed(KEY, times[0] - 900))
            river.send("tracking", 0, b'{"k":"%s"}' % KEY.encode())
            river.flow()
            until(lambda: merged_all(river), "the batch")
            cut_short = RunProcess(
                river.file, KEY, "--apply", point=IN_FORGET, count=count, command="forget"
            )
            cut_short.await_held()
            cut_short.kill()
        river.flow()
        until(lambda: merged_all(river), "the last batch")
        forget(river, "--apply")
    finally:
        assert run.stop() == 0, run.said()
    river.finish()
    is_as_if_the_key_had_never_been(river, tmp_path)


KILLED_AT_ITS_END = """
import os
from watersmeet.operations.forget import Forgetting
erase = Forgetting.erase
def erase_and_die(self, owner):
    erase(self, owner)
    os._exit(137)
Forgetting.erase = erase_and_die
from watersmeet.cli import main
main()
"""


@pytest.mark.promise("N9")
@pytest.mark.fault("kill")
def test_one_that_was_killed_at_its_very_end_is_ended_by_another_call(river: River) -> None:
    river.send("tracking", 0, b'{"k":"other"}')
    river.flow()
    program = (sys.executable, "-c", KILLED_AT_ITS_END)
    killed = RunProcess(river.file, KEY, "--apply", program=program, command="forget")
    assert killed.wait() == 137
    redrive = ("redrive", "--reason", "no_event_time", "--apply")
    said = watersmeet(river, *redrive, exit_code=1)
    assert "call it again if it was cut short" in said
    assert counts(forget(river, "--apply"), "before")["merged"] == 0, "nothing was left to erase"
    assert "sent again" in watersmeet(river, *redrive)


@pytest.mark.nightly
def test_a_run_that_waits_for_it_is_ended_by_a_signal(river: River) -> None:
    holding = RunProcess(river.file, KEY, "--apply", point=IN_FORGET, command="forget")
    holding.await_held()
    run = RunProcess(river.file)
    until(lambda: "waiting for `watersmeet forget` to end" in run.said(), "the run")
    assert run.stop() == 0
    assert json.loads(here(river, "status", "--json"))["partitions"]
    assert "try again when that one has ended" in watersmeet(river, "maintain", exit_code=1)
    holding.let_go()
    assert holding.wait() == 0
    assert counts(forget(river), "before")["merged"] == 0


def tombstones(river: River) -> list[tuple[Any, ...]]:
    """Partition, key, value and headers of every tombstone of the sink."""
    found = consume(river.kafka, river.sink, 2)
    return [
        (m.partition(), m.key(), m.value(), dict(m.headers())) for m in found if m.value() is None
    ]


@pytest.mark.promise("N10")
@pytest.mark.fault("kill", "lost")
def test_a_tombstone_is_sent_once_and_the_sequence_goes_on_behind_it(
    river: River, tmp_path: Path
) -> None:
    for point in ("publisher.committed", IN_FORGET):
        process = RunProcess(
            river.file, KEY, "--apply", "--tombstone", point=point, command="forget"
        )
        process.await_held()
        process.kill()
    assert forget(river, "--apply", "--tombstone")["tombstones"] == 0, "it has been sent before"
    [(partition, key, value, headers)] = tombstones(river)
    assert (partition, key, value) == (0, KEY.encode(), None)
    assert list(headers) == ["watersmeet.forgotten"]
    before = [m for m in consume(river.kafka, river.sink, 2) if m.partition() == 0][-2]
    said = dict(before.headers())
    numbers = {name: int(said[f"watersmeet.{name}"]) for name in ("seq", "closed_at", "due")}
    stands = {"id": said["watersmeet.id"].decode(), **numbers}
    assert json.loads(headers["watersmeet.forgotten"]) == stands
    assert river.broken_promises() == []
    river.flow()
    river.finish()
    assert forget(river, "--apply", "--tombstone")["tombstones"] == 2, (
        "nothing says any more where the key was"
    )
    river.flow()
    river.finish()
    is_as_if_the_key_had_never_been(river, tmp_path)

    shutil.rmtree(river.folder / "lake")
    river.config["kafka"]["start"] = "sink"
    river.write()
    sent = published(river.kafka, river.sink, 2)
    assert forget(river, "--apply", "--tombstone")["tombstones"] == 2
    river.flow()
    river.finish()
    after = published(river.kafka, river.sink, 2)
    assert [m for m in after if m in sent] == sent
    assert len(after) > len(sent)
    assert river.broken_promises() == []


@pytest.mark.nightly
@pytest.mark.promise("N9")
@pytest.mark.fault("owners")
def test_one_that_was_replaced_while_it_stood_still_erases_nothing_more(
    river: River, tmp_path: Path
) -> None:
    paused = RunProcess(river.file, KEY, "--apply", point=IN_FORGET, count=3, command="forget")
    paused.await_held()
    paused.pause()
    river.flow()
    river.finish()
    names = ("silver", "bronze_tracking", "bronze_orders")
    before = [river.reader.version(name) for name in names]
    paused.resume()
    paused.let_go()
    assert paused.wait() == 1
    assert "fenced and writes nothing more" in paused.said()
    assert [river.reader.version(name) for name in names] == before
    forget(river, "--apply")
    is_as_if_the_key_had_never_been(river, tmp_path)

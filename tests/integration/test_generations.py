"""Operations that follow each other, or are cut short: each record is in one message at most, and
the rest is the model's."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.effort import first_then_nightly
from tests.support.fault_points import IN_BEGINNING, IN_RESET
from tests.support.lives import Life, killed_at
from tests.support.topics import CheckedProducer, create_topics, delete_records, delete_topic
from watersmeet.core.silver import IDLE, in_silver
from watersmeet.core.times import time_text
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.journal import BEGIN
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import last_batch
from watersmeet.lake.table_reader import row_count
from watersmeet.lake.tables import Table
from watersmeet.running.owner import now_ms

pytestmark = pytest.mark.long

FAR = 10_000
"""An event time (ms) behind which everything is closed."""


def pairs(begin: int, count: int = 5) -> list[tuple[str | None, int]]:
    """Records of so many keys, some event times apart."""
    return [(f"k{begin + n}", begin + 10 * n) for n in range(count)]


def fed(life: Life, begin: int = 0, count: int = 5) -> list[int]:
    """Records of both sources that meet, and are finished and published by a run."""
    numbers = life.both(*pairs(begin, count), (None, begin + 1000))
    life.run()
    return numbers


def late_now(life: Life) -> int:
    """How many late records the newest generation has."""
    newest = read_history(life.river.reader, life.river.settings).generations.newest
    return row_count(life.river.reader, tables.LATE, [[("batch", ">=", newest.from_batch)]])


def new_sink(life: Life) -> None:
    name = f"{life.river.config['name']}-again"
    create_topics(life.river.kafka, name, partitions=1)
    life.configure("publish.topic", name)


@pytest.mark.nightly
@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "kill", "rules")
@pytest.mark.parametrize(
    ("point", "layers"),
    first_then_nightly(
        sorted(product(IN_RESET[1:], [(), ("gold",)]), key=lambda each: each[0] != "reset.close")
    ),
)
def test_a_jump_back_after_a_change_of_rules_that_is_cut_short_makes_nothing_late_or_double(
    kafka: str, tmp_path: Path, point: str, layers: tuple[str, ...]
) -> None:
    life = Life.make(kafka, tmp_path)
    before = fed(life)
    life.both(("open", 1500))
    life.run()
    life.evolve("merge.timeout", "500ms")
    with killed_at(point):
        life.call("reset", "--to", "earliest", "--yes", exit_code=1)
    life.run(*layers)
    fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert late_now(life) == 0
    assert set(before) <= set(life.numbers())
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("B121")
@pytest.mark.fault("jumps", "lost")
def test_a_lost_lake_is_not_taken_up_from_before_a_jump(kafka: str, tmp_path: Path) -> None:
    """Also where an idle decision far ahead was jumped over."""
    life = Life.make(kafka, tmp_path, merge={"timeout": "300ms", "max_future": "30d"})
    fed(life)
    life.send("tracking", ("far", 20 * 86_400_000))
    life.run()
    decide(life, "orders", 19 * 86_400_000)
    life.run()
    life.call("reset", "--to", "latest", "--yes")
    fed(life, 3000)
    life.check()
    life.lose()
    new = [*fed(life, 5000), *fed(life, 7000)]
    life.both((None, FAR))
    life.run()
    assert late_now(life) == 0
    assert set(new) <= set(life.numbers())
    life.check()


def decide(life: Life, source: str, time_ms: int) -> None:
    """The idle policy speaks for a source."""
    lake = Lake(life.river.settings)
    after = life.river.reader.summary(tables.bronze(source), [], {"last": ("max", "offset")})[
        "last"
    ][0].as_py()
    newest = read_history(life.river.reader, life.river.settings).generations.newest.number
    before = last_batch(life.river.reader)
    assert before is not None
    row = {
        "source": source,
        "topic": life.river.topic(source),
        "partition": 0,
        "after_offset": after,
        "event_time": time_ms,
        "decided_at": 1,
        "batch": before.batch + 1,
        "generation": newest,
    }
    rows = Table(tables.IDLE_HEARTBEATS, IDLE).rows_of([row])
    silver = in_silver(rows, "idle", lake.schema(tables.SILVER))
    write_deltalake(lake.address(tables.SILVER), silver, mode="append")


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "silence")
def test_an_idle_decision_does_not_hold_after_a_jump_past_it(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    decide(life, "orders", 20 * 3_600_000)
    life.send("tracking", (None, 20 * 3_600_000))
    life.run()
    life.call("reset", "--to", "latest", "--yes")
    new = fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert set(new) <= set(life.numbers())
    life.check()


@pytest.mark.promise("N120")
@pytest.mark.fault("jumps", "rules", "lost")
def test_a_redriven_record_and_the_refused_one_are_never_both_merged(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    life.send("tracking", ("", 1100), id="k1")  # refused: an empty key
    life.run()
    life.evolve("sources.tracking.key", {"first_of": ["id", "k"]})
    life.call("redrive", "--reason", "no_key", "--apply")
    fed(life, 1100)
    life.both((None, FAR))
    life.run()
    life.check()
    life.lose("earliest")
    new_sink(life)
    life.run()
    counts = life.numbers()
    assert set(counts.values()) == {1}
    assert life.keyed <= set(counts)
    life.check()


@pytest.mark.promise("B120", "N120")
@pytest.mark.fault("jumps", "rules", "retention")
def test_a_redriven_record_that_is_out_comes_by_no_jump_nor_does_the_refused_one_that_keep_deleted(
    kafka: str, tmp_path: Path
) -> None:
    """To a time between them, by Kafka's own times, and to before both, where the refused one is
    read anew, by rules that take it."""
    life = Life.make(kafka, tmp_path, keep={"quarantine": "1s"})
    begin, refused = now_ms(), ("", now_ms())
    life.send("tracking", refused, id="k1")  # an empty key
    life.run()
    life.evolve("sources.tracking.key", {"first_of": ["id", "k"]})
    between = time_text(now_ms())
    life.call("redrive", "--reason", "no_key", "--apply")
    life.both((None, begin + FAR))
    life.run()
    [number] = life.numbers()
    life.both((None, now_ms() + 60_000))
    life.run()
    life.call("maintain")
    reader = life.river.reader
    assert row_count(reader, tables.QUARANTINE) == 0
    life.evolve("merge.timeout", "1h")  # what is merged anew sorts behind what is out
    for number_of, to in enumerate((between, "earliest"), start=1):
        life.call("reset", "--to", to, "--yes")
        life.both((None, now_ms() + 2 * 3_600_000))
        life.run()
        assert row_count(reader, tables.MERGED, [[("generation", "=", number_of)]]) == 0, to
    assert life.numbers() == {number: 1}
    life.call("verify")


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "retention")
def test_copies_of_what_is_out_in_messages_and_corrections_come_by_no_jump_forward(
    kafka: str, tmp_path: Path
) -> None:
    """Another lake has redriven them since. What `keep` deletes afterwards changes nothing."""
    corrections = {"topic": f"{tmp_path.name}-corrections", "within": "1h"}
    life = Life.make(kafka, tmp_path, publish__corrections=corrections)
    life.send("tracking", ("a", 0))
    life.both((None, 1000))
    life.send("tracking", ("b", 100))  # late
    life.both((None, 3000))
    life.run()
    reader, topic = life.river.reader, life.river.topic("tracking")
    assert row_count(reader, tables.CORRECTIONS, [[("valid", "=", True)]]) == 1
    life.call("reset", "--to", "latest", "--yes")
    rows = reader.select(tables.bronze("tracking"), ["offset", "merge_key", "value"]).to_pylist()
    producer = CheckedProducer(kafka)
    for row in rows:
        if row["merge_key"] is not None:
            claim = f"{topic}/0/{row['offset']}".encode()
            headers: list[tuple[str, str | bytes | None]] = [("watersmeet.redriven", claim)]
            producer.produce(topic, row["value"], partition=0, headers=headers)
    assert producer.flush() == 0
    life.both((None, FAR))
    life.run()
    of_second = [[("generation", "=", 1)]]
    assert row_count(reader, tables.MERGED, of_second) == 0
    assert row_count(reader, tables.PASSED, of_second) == 2
    life.check()
    after = 3 * 86_400_000
    life.both(("z", after), (None, after + FAR))
    life.run()
    life.configure("keep", {"silver": "1d"})
    life.call("maintain")
    assert row_count(reader, tables.MERGED, [[("merge_key", "=", "a")]]) == 0
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("B121")
@pytest.mark.fault("lost", "rules")
@pytest.mark.parametrize(
    ("path", "value"),
    first_then_nightly([("sources.tracking.key", ["id", "k"]), ("merge.max_future", "1d")]),
)
def test_a_lake_that_was_lost_after_a_change_of_rules_is_refused_and_the_advice_works(
    kafka: str, tmp_path: Path, path: str, value: object
) -> None:
    life = Life.make(kafka, tmp_path, merge={"timeout": "300ms", "max_future": "2d"})
    before = json.loads(json.dumps(life.river.config))
    fed(life)
    life.evolve(path, value)
    life.lose()
    said = life.call("run", "--once", exit_code=2)
    assert "begin with the former rules, and change them with `watersmeet evolve` then" in said
    now = life.river.config
    life.river.config = {**before, "kafka": {**before["kafka"], "start": "sink"}}
    life.river.write()
    life.run()
    life.river.config = now
    life.river.write()
    life.call("evolve", "--apply")
    fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert set(life.numbers().values()) == {1}
    life.check()


@pytest.mark.promise("B122")
@pytest.mark.fault("owners")
def test_silver_that_starts_before_bronze_has_begun_waits_for_it(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    life.lose()
    life.both(*pairs(1100))
    for layer in ("silver", "gold", "bronze", "silver", "gold"):
        life.run(layer)
    fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert life.keyed == life.sent_once()
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "kill")
def test_a_jump_that_was_cut_short_after_bronze_had_read_changes_no_answer(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path, kafka__start="latest")
    life.both(*pairs(0))
    life.run()
    fed(life, 3000)
    with killed_at("beginning.known"):
        life.call("reset", "--to", "earliest", "--yes", exit_code=1)
    life.check()
    fed(life, 5000)
    life.check()


@pytest.mark.nightly
def test_a_rebuild_is_compared_with_the_generation_that_it_is_of(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    into = str(tmp_path / "before")
    life.call("rebuild", "--into", into)
    life.call("reset", "--to", "earliest", "--yes")
    life.call("verify", "--against", into)
    fed(life, 3000)
    life.call("verify", "--against", into)
    life.check()


@pytest.mark.promise("B123")
@pytest.mark.fault("jumps")
def test_a_look_at_a_jump_makes_no_lake(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("k", 1000))
    assert "no lake has begun" in life.call("reset", "--to", "latest", exit_code=2)
    assert not (tmp_path / "lake").exists()
    life.run()
    logs = [*(tmp_path / "lake").glob("*/_delta_log/*")]
    life.call("reset", "--to", "latest")
    assert [*(tmp_path / "lake").glob("*/_delta_log/*")] == logs


@pytest.mark.promise("B123")
@pytest.mark.fault("jumps")
def test_who_only_looks_at_a_jump_decides_nothing_and_is_told_what_is_not_out(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path, kafka__start="latest")
    life.both(*pairs(0))
    with killed_at("beginning.decide"):
        life.call("run", "--once", exit_code=1)
    life.call("reset", "--to", "earliest")
    decided = DeltaTable(str(tmp_path / "lake" / tables.JOURNAL)).to_pyarrow_table()
    assert BEGIN not in decided["kind"].to_pylist()
    life.run()
    life.both(*pairs(3000), (None, FAR), ("open", FAR + 1))
    life.run("bronze", "silver")
    said = json.loads(life.call("reset", "--to", "earliest", "--json"))
    assert (said["open_records_closed"], said["unpublished_records_closed"]) == (1, 5)


@pytest.mark.nightly
@pytest.mark.promise("B123")
@pytest.mark.fault("jumps", "retention")
def test_who_looks_at_a_jump_over_a_sink_that_retention_has_emptied_is_told_what_is_not_out(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(*pairs(0), (None, FAR))
    life.run()
    delete_records(kafka, life.river.sink, 0, -1)
    said = json.loads(life.call("reset", "--to", "earliest", "--json"))
    assert said["unpublished_records_closed"] == 0
    life.both(*pairs(FAR + 1, 3), (None, 2 * FAR))
    life.run("bronze", "silver")
    said = json.loads(life.call("reset", "--to", "earliest", "--json"))
    assert said["unpublished_records_closed"] == 3


@pytest.mark.promise("N121")
@pytest.mark.fault("jumps")
def test_a_key_that_was_forgotten_does_not_come_back_by_reading_again(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path, keep={"bronze": "1s", "silver": "1s"})
    fed(life)
    life.call("forget", "k1", "--apply")
    fed(life, 50_000)
    life.call("maintain")
    life.call("reset", "--to", "earliest", "--yes")
    life.run()
    rows = life.river.reader.select(
        tables.bronze("tracking"), ["merge_key", "key", "value"]
    ).to_pylist()
    assert "k1" not in {row["merge_key"] for row in rows}
    assert not any(b'"k1"' in (row["value"] or b"") for row in rows)
    life.check()


def test_a_jump_to_what_was_never_read_says_that_a_forgotten_key_may_be_there(
    kafka: str, tmp_path: Path
) -> None:
    """The first record lay before the lake's beginning, and a jump had passed over another."""
    life = Life.make(kafka, tmp_path)
    life.both(("k101", 0))
    life.configure("kafka.start", "latest")
    life.run()
    fed(life, 100)

    def jumped(to: str) -> bool:
        return bool(json.loads(life.call("reset", "--to", to, "--json"))["forget_again"])

    assert not jumped("earliest"), "no key was forgotten"
    life.call("forget", "k101", "--apply")
    assert jumped("earliest")
    assert not jumped("latest")
    life.both(("k101", 1500))
    life.call("reset", "--to", "latest", "--yes")
    life.call("reset", "--to", "earliest", "--yes")
    life.both((None, FAR))
    life.run()
    life.call("forget", "k101", "--apply")
    assert not json.loads(life.call("reset", "--to", "latest", "--json"))["forget_again"]
    for table in ("bronze_tracking", "bronze_orders", "merged"):
        keys = life.river.reader.select(table, ["merge_key"])["merge_key"].to_pylist()
        assert keys
        assert "k101" not in keys
    life.check()


@pytest.mark.nightly
def test_the_place_of_an_erased_record_goes_once_kafka_no_longer_has_it(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("a", 0), (None, 1000), ("a", 5000), (None, FAR))
    life.run()
    life.call("forget", "a", "--apply")
    columns = ["source", "partition", "offset"]
    of_orders = {("orders", 0, 0), ("orders", 0, 2)}
    for begin, of_tracking in ((1, {("tracking", 0, 2)}), (3, set())):
        delete_records(kafka, life.river.topic("tracking"), 0, begin)
        life.call("maintain")
        of_records = [[("source", "is not null", None)]]
        rows = life.river.reader.select(tables.ERASED, columns, of_records).to_pylist()
        assert {tuple(row.values()) for row in rows} == of_orders | of_tracking
    life.call("reset", "--to", "earliest", "--yes")
    life.run()
    keys = life.river.reader.select(tables.SILVER, ["merge_key"])["merge_key"].to_pylist()
    assert "a" not in keys


@pytest.mark.nightly
@pytest.mark.promise("N9")
@pytest.mark.fault("retention")
def test_a_key_that_was_forgotten_does_not_come_back_where_keep_has_deleted_its_records(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path, keep={"bronze": "1s"})
    life.both(("a", 0), (None, 1000))
    life.run()
    for time in (5000, 9000):
        life.both(("b", time), (None, 30_000 * (time > 5000) + 6000))
        life.run()
    life.both((None, 60_000))
    life.run()
    life.call("maintain")
    keys = life.river.reader.select("bronze_tracking", ["merge_key"])["merge_key"].to_pylist()
    assert "a" not in keys, "keep has deleted it"
    life.call("forget", "a", "--apply")
    life.call("reset", "--to", "earliest", "--yes")
    life.run()
    for table in ("bronze_tracking", "bronze_orders", "silver"):
        keys = life.river.reader.select(table, ["merge_key"])["merge_key"].to_pylist()
        assert "a" not in keys


@pytest.mark.nightly
def test_a_jump_after_a_change_to_a_window_closes_nothing_that_is_out(
    kafka: str, tmp_path: Path
) -> None:
    """The messages of what a timeout has closed before do not say it, and are behind a tail of the
    same kind all the same."""
    life = Life.make(kafka, tmp_path)
    before = fed(life)
    del life.river.config["merge"]["timeout"]
    life.evolve("merge.window", {"gap": "200ms", "max": "1s"})
    life.call("reset", "--to", "earliest", "--yes")
    fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert set(before) <= set(life.numbers())
    rows = life.river.reader.select(
        tables.MERGED, ["invalid_reason"], [[("event_time", "<", 1000)]]
    ).to_pylist()
    assert {row["invalid_reason"] for row in rows} == {None}
    life.check()


def test_rules_that_may_not_change_yet_are_refused_with_what_helps(
    kafka: str, tmp_path: Path
) -> None:
    """Messages that were read back may hold records which the new rules would have read
    otherwise."""
    life = Life.make(kafka, tmp_path)
    fed(life)
    fed(life, 1500)
    life.lose()
    life.run()
    life.configure("merge.timeout", "5s")
    assert "wait until its clock has passed" in life.call("evolve", "--apply", exit_code=2)
    life.configure("merge.timeout", "300ms")
    fed(life, 9000)
    life.evolve("merge.timeout", "5s")
    life.check()


@pytest.mark.nightly
def test_a_window_that_saw_no_batch_leaves_the_closing_of_later_ones_and_verify_knows(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    del life.river.config["merge"]["timeout"]
    life.evolve("merge.window", {"gap": "200ms", "max": "1s"})
    del life.river.config["merge"]["window"]
    life.evolve("merge.timeout", "300ms")
    new = fed(life, 3000)
    assert set(new) <= set(life.numbers())
    life.check()


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "lost")
@pytest.mark.parametrize("layers", [(), ("bronze",)], ids=["merged", "read"])
def test_a_recovered_lake_jumps_once_it_has_read_what_is_out_and_merges_the_rest_once(
    kafka: str, tmp_path: Path, layers: tuple[str, ...]
) -> None:
    """The rest has the key of a message that was read back."""
    life = Life.make(kafka, tmp_path)
    fed(life)
    life.lose()
    life.run(*layers)
    since = time_text(now_ms())
    life.both(("out", 1500))
    life.send("tracking", ("k1", 2500))
    life.run(*layers)
    if layers:
        said = life.call("reset", "--to", since, "--yes", exit_code=2)
        assert "records that are out are still to be read in partition 0" in said
    life.both((None, 2000))
    life.run()
    life.call("reset", "--to", since, "--yes")
    life.both((None, FAR))
    life.run()
    assert life.keyed == life.sent_once()
    life.check()


@pytest.mark.nightly
def test_a_jump_after_a_jump_passes_over_all_that_is_out(kafka: str, tmp_path: Path) -> None:
    """What is out lies in several ranges of offsets, and the second jump reads nothing again that
    the first one had read."""
    life = Life.make(kafka, tmp_path)
    before = [*fed(life), *fed(life, 3000)]
    for _ in range(2):
        life.call("reset", "--to", "earliest", "--yes")
    known = life.river.reader.select(
        tables.PASSED,
        ["generation", "source", "from_offset", "until_offset"],
        [[("status", "=", "out")]],
    ).to_pylist()
    first, second = (
        [tuple(row.values())[1:] for row in known if row["generation"] == number]
        for number in (1, 2)
    )
    assert sorted(second) == sorted(first)
    fed(life, 5000)
    life.both((None, FAR))
    life.run()
    silver = life.river.reader.select(
        tables.MERGED, ["batch", "event_time"], [[("event_time", "<", 4000)]]
    ).to_pylist()
    assert max(row["batch"] for row in silver) == 1, "none is merged again"
    assert set(before) <= set(life.numbers())
    life.check()


@pytest.mark.nightly
@pytest.mark.parametrize("point", IN_BEGINNING)
def test_a_start_from_the_sink_that_is_cut_short_is_made_again(
    kafka: str, tmp_path: Path, point: str
) -> None:
    """What it has written of the messages makes no lake of an earlier version."""
    life = Life.make(kafka, tmp_path)
    fed(life)
    life.lose()
    with killed_at(point):
        life.call("run", "--once", exit_code=1)
    life.run()
    newest = read_history(life.river.reader, life.river.settings).generations.newest
    assert newest.kind == "sink"
    assert newest.tails[0].seq == 4
    life.call("reset", "--to", "latest", "--yes")
    fed(life, 3000)
    life.check()


@pytest.mark.promise("B121")
@pytest.mark.fault("lost")
def test_a_start_that_is_refused_leaves_nothing_of_a_lake_and_the_advice_works(
    kafka: str, tmp_path: Path
) -> None:
    """Also where the rules decide which columns there are."""
    life = Life.make(kafka, tmp_path)
    fed(life)
    before = json.loads(json.dumps(life.river.config["merge"]))
    life.lose()
    life.river.config["merge"] = {"window": {"gap": "200ms", "max": "1s"}}
    assert "begin with the former rules" in life.call("run", "--once", exit_code=2)
    assert list((tmp_path / "lake").rglob("*.parquet")) == []
    life.river.config["merge"] = before
    life.river.write()
    fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert set(life.numbers().values()) == {1}
    life.check()


def taken_up(kafka: str, folder: Path) -> Life:
    """A lake with a timeout that was lost and taken up from its sink, and has gone on."""
    life = Life.make(kafka, folder, merge={"timeout": "100ms"})
    for begin in (0, 2000, 4000):
        fed(life, begin)
    life.lose()
    life.both((None, 5500))
    life.run()
    return life


@pytest.mark.nightly
@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "lost")
def test_a_lake_that_was_taken_up_does_not_jump_before_where_it_began(
    kafka: str, tmp_path: Path
) -> None:
    """It does not know which of those records are out."""
    life = taken_up(kafka, tmp_path)
    said = life.call("reset", "--to", "earliest", "--yes", exit_code=2)
    assert "this lake does not know what lies before offset" in said
    assert "its sink was taken up there" in said
    assert said == life.call("reset", "--to", "earliest", exit_code=2), "the preview says so, too"
    life.call("reset", "--to", "latest", "--yes")
    fed(life, 6000)
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("N22")
@pytest.mark.fault("lost")
def test_a_run_goes_on_only_once_a_deleted_table_is_back(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    numbers = life.both(("open", 1500))
    life.run()
    silver, elsewhere = life.river.folder / "lake" / "silver", tmp_path / "elsewhere"
    silver.rename(elsewhere)
    for command in (
        ("run", "--once"),
        ("validate", "--json"),
        ("reset", "--to", "earliest", "--yes"),
    ):
        assert "the table silver does not exist, " in life.call(*command, exit_code=2)
    assert not silver.exists()
    elsewhere.rename(silver)
    life.both((None, FAR))
    life.run()
    assert set(numbers) <= set(life.numbers())
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("N18")
@pytest.mark.fault("jumps", "topics")
def test_a_sink_that_is_made_again_gets_what_all_generations_have_published(
    kafka: str, tmp_path: Path
) -> None:
    """In their order, also where a crash cuts it short; and nothing that was behind the sink."""
    life = Life.make(kafka, tmp_path)
    fed(life)
    life.send("tracking", ("late", 5))
    life.both(("open", 1500))
    life.run()
    life.call("reset", "--to", "earliest", "--yes")
    fed(life, 3000)
    life.call("reset", "--to", "latest", "--yes")
    fed(life, 5000)
    before = life.messages()
    assert len(before) > 15
    delete_topic(kafka, life.river.sink)
    with killed_at("gold.note"):
        life.call("run", "--once", exit_code=1)
    life.run()
    assert life.messages() == before
    life.check()
    fed(life, 7000)
    life.check()

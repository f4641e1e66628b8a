"""A record may be of any size, unpacked: it stops no source, ends no process, and its size is its
own fate alone."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.laws.conftest import FOLDER_AT_NIGHT, QUICK, MakeLake, one_of
from tests.support.cases import SOURCES, Case, heartbeat, keyed
from tests.support.commands import here
from tests.support.lakes import folder_of
from tests.support.memory import peak_mib_of
from tests.support.rivers import ENGINES, FOLDER, WATERSMEET, River
from tests.support.topics import (
    CheckedProducer,
    consume,
    create_topics,
    dead_letters,
    delete_records,
)
from watersmeet.ask.status import status
from watersmeet.audit.validate import check_kafka, check_keys
from watersmeet.core.repartition import assign_partitions
from watersmeet.errors import ConfigurationError, UnreadableRecordsError
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.operations.redrive import Redrive

kind = one_of([QUICK, FOLDER_AT_NIGHT])
MIB = 2**20


def produce_packed(
    kafka: str,
    topic: str,
    values: list[bytes],
    codec: str,
    key: bytes | None = None,
    headers: list[Any] | None = None,
    partition: int = 0,
) -> None:
    """Sends records together, each of any size, compressed by this codec."""
    options: dict[str, Any] = {
        "compression.type": codec,
        "message.max.bytes": 10**9,
        "linger.ms": 50,
        "batch.size": 10**9,
    }
    producer = CheckedProducer(kafka, **{"queue.buffering.max.kbytes": 2**21 - 1}, **options)
    for value in values:
        producer.produce(topic, value, key, partition, headers=headers)
    assert producer.flush(60) == 0


@pytest.mark.promise("R50")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize("kind", [QUICK, pytest.param("spark-folder", marks=pytest.mark.long)])
def test_a_record_that_is_too_large_is_refused_and_its_length_is_kept(
    kafka: str, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    name = f"large-{kind}"
    bound: dict[str, Any] = {
        "kafka__max_record_bytes": 1000,
        "publish__quarantine_topic": f"{name}-letters",
    }
    river = River.make(kafka, tmp_path, name, partitions=1, **bound)
    if kind != QUICK:
        river.config["engine"] = ENGINES["folder"]
        request.getfixturevalue("on_spark")(river)
    tracking, orders = map(river.topic, SOURCES)
    fits = keyed("fits", 10, text="x" * (1000 - len(keyed("fits", 10, text=""))))
    assert len(fits) == 1000
    produce_packed(
        kafka,
        tracking,
        [fits, keyed("over", 10, text="x" * 5000)],
        "gzip",
        b"key",
        [("name", b"1")],
    )
    produce_packed(kafka, tracking, [keyed("a", 10)], "none", b"k" * 2000)
    produce_packed(kafka, tracking, [keyed("b", 10)], "none", b"key", [("name", b"h" * 2000)])
    produce_packed(kafka, tracking, [heartbeat(10_000)], "none")
    produce_packed(kafka, orders, [keyed("fits", 10), heartbeat(10_000)], "none")
    river.finish()
    columns = ["offset", "key", "value", "headers", "reason", "detail", "record_bytes"]
    of_bronze = (
        river.reader.select(tables.bronze("tracking"), [*columns, "merge_key"])
        .sort_by("offset")
        .to_pylist()
    )
    headers, over = [{"key": "name", "value": b"1"}], len(keyed("over", 10, text="x" * 5000))
    assert (of_bronze[0]["merge_key"], of_bronze[0]["reason"], of_bronze[0]["value"]) == (
        "fits",
        None,
        fits,
    )
    refused = river.reader.select(tables.QUARANTINE, columns).sort_by("offset").to_pylist()
    assert refused == [{name: row[name] for name in columns} for row in of_bronze[1:4]]
    kept = [tuple(row.values()) for row in refused]
    is_ = "kafka.max_record_bytes is 1000"
    small = len(keyed("a", 10))
    assert kept == [
        (1, b"key", None, headers, "too_large", f"the value has {over} bytes; {is_}", 8),
        (
            2,
            None,
            None,
            None,
            "too_large",
            f"the value has {small} bytes, key and headers 2000; {is_}",
            0,
        ),
        (
            3,
            None,
            None,
            None,
            "too_large",
            f"the value has {small} bytes, key and headers 2007; {is_}",
            0,
        ),
    ]
    letters = [
        (letter.offset, letter.reason, letter.key, letter.value)
        for letter in dead_letters(kafka, f"{name}-letters", 1)
    ]
    assert letters == [
        (1, "too_large", b"key", None),
        (2, "too_large", None, None),
        (3, "too_large", None, None),
    ]
    with pytest.raises(ConfigurationError, match="are not kept"):
        Redrive(river.reader, river.settings, "too_large")
    assert river.broken_promises() == []


@pytest.mark.long
@pytest.mark.promise("R50")
@pytest.mark.fault("hostile", "rules")
def test_the_bound_on_a_record_changes_by_an_epoch_and_what_was_refused_stays_so(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "large-epoch", partitions=1, kafka__max_record_bytes=1000)
    tracking, orders = map(river.topic, SOURCES)
    large = keyed("a", 10, text="x" * 2000)
    produce_packed(kafka, tracking, [large], "none")
    produce_packed(kafka, orders, [keyed("b", 10)], "none")
    river.finish()
    river.config["kafka"]["max_record_bytes"] = "1MiB"
    river.write()
    assert "kafka.max_record_bytes: the lake has other rules" in here(
        river, "run", "--once", exit_code=2
    )
    assert "kafka.max_record_bytes" in here(river, "evolve", "--apply")
    produce_packed(kafka, tracking, [large, heartbeat(10_000)], "none")
    produce_packed(kafka, orders, [heartbeat(10_000)], "none")
    river.finish()
    found = (
        river.reader.select(tables.bronze("tracking"), ["offset", "reason", "value"])
        .sort_by("offset")
        .to_pylist()
    )
    assert [(row["reason"], row["value"]) for row in found[:2]] == [
        ("too_large", None),
        (None, large),
    ]
    assert river.broken_promises() == []


@pytest.mark.promise("R50")
@pytest.mark.fault("hostile")
def test_one_of_two_sources_of_a_topic_refuses_what_is_too_large_also_when_repartitioned(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "large-shared", partitions=1, kafka__max_record_bytes=1000)
    for source in SOURCES:
        where = {"where": {"field": "of", "equals": source}, "tombstone": "skip"}
        river.config["sources"][source] |= {"topic": "large-both", **where}
    create_topics(kafka, "large-both", partitions=1)
    river.write()
    produce_packed(kafka, "large-both", [keyed("a", 10, of="orders", text="x" * 2000)], "none")
    river.finish("bronze")
    reasons = {
        s: river.reader.select(tables.bronze(s), ["reason"])["reason"].to_pylist() for s in SOURCES
    }
    assert reasons == {SOURCES[0]: ["too_large"], SOURCES[1]: [None]}
    [batch] = read_range(river.settings.kafka, Range("large-both", 0, 0, 1))
    [copied] = assign_partitions(batch, river.settings.reading_rules(SOURCES[0]))[
        "value"
    ].to_pylist()
    assert copied.startswith(b"the value has ")


@pytest.mark.promise("R51")
@pytest.mark.fault("hostile")
def test_what_the_client_cannot_unpack_is_named_and_passed_over_as_the_sentence_says(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "packed", partitions=1)
    tracking, orders = map(river.topic, SOURCES)
    packed = [keyed("a", 10), bytes(3 * MIB), keyed("b", 10)]
    produce_packed(kafka, tracking, [keyed("first", 5)], "none")
    produce_packed(kafka, tracking, packed, "zstd")
    produce_packed(kafka, tracking, [keyed("last", 10), heartbeat(10_000)], "none")
    produce_packed(kafka, orders, [heartbeat(10_000)], "none")
    river.config["kafka"]["options"] = {
        "receive.message.max.bytes": "2000000",
        "fetch.max.bytes": "1000000",
    }
    river.write()
    with pytest.raises(
        UnreadableRecordsError, match=r"^packed-tracking\[0\] .* at offset 1: .*offsets 1 to 3"
    ) as raised:
        list(read_range(river.settings.kafka, Range(tracking, 0, 0, 6)))
    said = str(raised.value)
    assert said in here(river, "run", "--once", exit_code=1)
    [problem], _ = check_keys(river.settings, river.reader)
    assert f"{problem.what}; {problem.fix}" == said
    assert status(river.reader, river.settings)["partitions"][0]["sources"]["tracking"][
        "lag"
    ] == 6 - _read(river)
    delete_records(kafka, tracking, 0, 4)
    river.config["kafka"]["on_data_loss"] = "continue"
    river.write()
    river.finish()
    keys = river.reader.select(tables.SILVER, ["merge_key"])["merge_key"].to_pylist()
    assert "last" in keys
    assert river.broken_promises() == []


@pytest.mark.long
@pytest.mark.promise("N70")
@pytest.mark.fault("hostile")
def test_a_dead_letter_that_its_topic_does_not_take_stops_nothing(
    kafka: str, tmp_path: Path
) -> None:
    """What was packed is packed again; what is still too large goes without its value, or without
    anything of its own. A topic may also unpack what it gets.
    """
    name = "large-letters"
    letters: dict[str, str] = {
        f"{table}_topic": f"{name}-{table}" for table in ("late", "quarantine")
    }
    changes: dict[str, Any] = {f"publish__{key}": topic for key, topic in letters.items()}
    river = River.make(kafka, tmp_path, name, partitions=1, **changes)
    small = {"max.message.bytes": "60000"}
    create_topics(kafka, letters["quarantine_topic"], partitions=1, **small)
    create_topics(
        kafka, letters["late_topic"], partitions=1, **{**small, "compression.type": "uncompressed"}
    )
    tracking, orders = map(river.topic, SOURCES)
    rng = random.Random(1)
    packs, noise, packs_well = (
        b"{" * 3 * MIB,
        rng.randbytes(100_000),
        keyed("a", 10, text="x" * 100_000),
    )
    produce_packed(kafka, tracking, [packs], "gzip", b"key", [("name", b"1")])
    produce_packed(kafka, tracking, [noise], "none", b"key", [("name", b"2")])
    produce_packed(kafka, tracking, [noise], "none", noise, [("name", b"3")])
    produce_packed(kafka, tracking, [heartbeat(10_000), packs_well, keyed("b", 10)], "none")
    produce_packed(kafka, orders, [heartbeat(10_000)], "none")
    river.finish()
    river.finish()
    sent = {topic: consume(kafka, topic, 1) for topic in letters.values()}
    found = [
        (m.value(), m.key(), dict(m.headers()).get("name"), _value_bytes(m))
        for m in sent[letters["quarantine_topic"]]
    ]
    assert found == [
        (packs, b"key", b"1", None),
        (None, b"key", b"2", b"100000"),
        (None, None, None, b"100000"),
    ]
    late = [(m.value(), _value_bytes(m)) for m in sent[letters["late_topic"]]]
    assert late == [(None, b"%d" % len(packs_well)), (keyed("b", 10), None)]
    assert river.broken_promises() == []


def _value_bytes(message: Any) -> bytes | None:
    found: bytes | None = dict(message.headers()).get("watersmeet.value_bytes")
    return found


def _read(river: River) -> int:
    table = tables.bronze("tracking")
    return len(river.reader.select(table, ["offset"])) if river.reader.exists(table) else 0


@pytest.mark.nightly
@pytest.mark.promise("R51")
@pytest.mark.fault("hostile", "memory")
def test_a_few_kilobytes_that_unpack_to_hundreds_of_megabytes_end_nothing_and_take_bounded_memory(
    kafka: str, tmp_path: Path
) -> None:
    """More than the client would take of itself, by zstd; more than a record may have, by gzip; and
    many that fit, together."""
    river = River.make(kafka, tmp_path, "bombs", partitions=1)
    tracking, orders = map(river.topic, SOURCES)
    for codec, size in (("zstd", 150), ("gzip", 70)):
        produce_packed(kafka, tracking, [bytes(size * MIB)], codec)
    produce_packed(kafka, tracking, [keyed("a", 10, text="x" * 20 * MIB)] * 10, "zstd")
    produce_packed(kafka, tracking, [keyed("b", 20), heartbeat(10_000)], "none")
    produce_packed(kafka, orders, [keyed("b", 20), heartbeat(10_000)], "none")
    assert status(river.reader, river.settings)["partitions"][0]["sources"]["tracking"]["lag"] == 14
    assert [*check_kafka(river.settings), *check_keys(river.settings, river.reader)[0]] == []
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*WATERSMEET, "run", "--once", "-c", str(river.file)], stdout=out, stderr=out
        )
        peak_mib = peak_mib_of(process)
    assert process.returncode == 0, (tmp_path / "out").read_text()
    assert peak_mib < 1.5 * 1024, f"{peak_mib:.0f} MiB"
    merged = river.reader.select(tables.SILVER, ["merge_key", "status"]).to_pylist()
    assert {row["merge_key"] for row in merged if row["status"] == "timed_out"} == {"a", "b"}
    assert (
        len(river.reader.select(tables.QUARANTINE, ["offset"], [[("reason", "=", "too_large")]]))
        == 2
    )


@pytest.mark.nightly
@pytest.mark.promise("R50")
@pytest.mark.fault("hostile", "memory")
def test_sparks_jvm_needs_no_more_memory_for_records_as_large_as_may_be(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "spark-large", partitions=2, lake=FOLDER)
    river.config["spark"] = {"spark.driver.memory": "600m"}
    river.write()
    for n in range(3):
        for source in SOURCES:
            for partition in range(2):
                value = keyed(f"k{n}", 10 * n, text="x" * 60 * MIB)
                produce_packed(kafka, river.topic(source), [value], "zstd", partition=partition)
    for source in SOURCES:
        for partition in range(2):
            topic = river.topic(source)
            produce_packed(kafka, topic, [heartbeat(10_000)], "none", partition=partition)
    river.finish()
    merged = river.reader.select(tables.SILVER, ["status", "record_bytes"])
    assert merged["status"].to_pylist() == ["timed_out"] * 6
    assert min(merged["record_bytes"].to_pylist()) > 120 * MIB
    assert river.broken_promises() == []


@pytest.mark.promise("C50")
@pytest.mark.fault("hostile")
def test_no_statistics_of_a_file_hold_a_whole_key_value_header_or_part(
    new_lake: MakeLake, kind: str
) -> None:
    # Nothing short exceeds what begins so: it cannot be cut, and count as a larger one.
    value = keyed("\U0010ffff" * 750, 10, text="x" * 3000)
    values: dict[str, list[bytes | None]] = {
        SOURCES[0]: [value, b"\xff" * 3000, heartbeat(10_000)],
        SOURCES[1]: [value, heartbeat(10_000)],
    }
    lake = new_lake({0: Case(values, 300, [source for source in SOURCES for _ in values[source]])})
    lake.arrive(engine=lake.engine)
    lake.merge()
    files = [
        file
        for file in Path(folder_of(lake.settings)).rglob("*.parquet")
        if "_delta_log" not in file.parts
    ]
    assert {file.relative_to(folder_of(lake.settings)).parts[0] for file in files} >= {
        "silver",
        "bronze_tracking",
    }
    for file in files:
        found = pq.ParquetFile(file).metadata
        for group in range(found.num_row_groups):
            for column in range(found.num_columns):
                of_column = found.row_group(group).column(column)
                statistics = of_column.statistics
                if (
                    statistics is not None
                    and statistics.has_min_max
                    and isinstance(statistics.max, (str, bytes))
                ):
                    sizes = len(statistics.min), len(statistics.max)
                    assert max(sizes) <= 64, (file, of_column.path_in_schema, sizes)

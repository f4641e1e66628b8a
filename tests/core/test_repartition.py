"""Where a record goes when its topic is repartitioned, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pyarrow as pa
import pytest

from watersmeet.core import repartition
from watersmeet.core.reading import KAFKA, ReadingRules
from watersmeet.core.repartition import (
    ORIGIN,
    InputPartition,
    Origin,
    RepartitionProgress,
    assign_partitions,
    is_redriven,
    murmur2,
    origin_of,
    repartition_messages,
    written,
)
from watersmeet.core.types import TIME

RULES = ReadingRules(
    event_times=(("ts",),), max_future_ms=1000, keys=((("k",),),), heartbeat=(("type",), "beat")
)
AFTER = RepartitionProgress(
    {"clicks": "clicks (1.2)", "web (old)": "web (old) (-1.2)"},
    {
        InputPartition("clicks", 0): 7,
        InputPartition("clicks", 11): 9,
        InputPartition("web (old)", 2): 4,
    },
    {InputPartition("clicks", 11): 5},
)


def records(
    *values: bytes | None,
    key: bytes | None = None,
    partition: int = 2,
    time_ms: int = 5000,
    **more: Any,
) -> pa.Table:
    given = {
        "topic": ["clicks"] * len(values),
        "partition": [partition] * len(values),
        "offset": list(range(len(values))),
        "key": [key] * len(values),
        "value": list(values),
        "timestamp_type": [0] * len(values),
        **more,
    }
    columns = {
        name: pa.array(given.get(name, [None] * len(values)), kind)
        for name, kind in zip(KAFKA.names, KAFKA.types, strict=True)
    }
    columns["kafka_timestamp"] = pa.array([time_ms * 1000] * len(values), pa.int64()).cast(TIME)
    return pa.table(columns, schema=KAFKA)


def sent(
    rows: pa.Table, partitions: int, after: RepartitionProgress = AFTER
) -> list[dict[str, Any]]:
    return list(pa.concat_tables(repartition_messages(rows, partitions, after)).to_pylist())


def said(message: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [(one["key"], one["value"]) for one in message["headers"]]


# -- the partitioner


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_a_key_has_the_hash_that_javas_client_gives_it(key: bytes, signed: int) -> None:
    """The values are those of Kafka's own tests (`UtilsTest`)."""
    assert murmur2(key) == signed & 0x7FFFFFFF


# -- where a record goes


def hashes(rows: pa.Table) -> list[int | None]:
    return list(rows["hash"].to_pylist())


def test_a_record_goes_where_its_merge_key_says_and_not_its_kafka_key() -> None:
    found = assign_partitions(records(b'{"ts":1,"k":"a"}', b'{"ts":2,"k":7}', key=b"other"), RULES)
    assert hashes(found) == [murmur2(b"a"), murmur2(b"7")]
    assert [message["partition"] for message in sent(found, 5)] == [
        murmur2(b"a") % 5,
        murmur2(b"7") % 5,
    ]


def test_without_a_path_the_kafka_key_says_where_also_for_a_tombstone() -> None:
    rules = ReadingRules(event_times=(("ts",),), max_future_ms=1000)
    assert (
        hashes(assign_partitions(records(b'{"ts":1}', None, b"{", key="é".encode()), rules))
        == [murmur2("é".encode())] * 3
    )


def test_a_refused_record_goes_where_its_key_says_as_far_as_it_has_one() -> None:
    values = [b'{"ts":99999,"k":"a"}', b'{"ts":"soon","k":"a"}', b'{"ts":1}', b"{", None, b"\xff"]
    found = assign_partitions(records(*values), RULES)
    assert hashes(found) == [murmur2(b"a"), murmur2(b"a"), None, None, None, None]
    assert found["event_time"].null_count == len(values)
    assert [message["partition"] for message in sent(found, 2)[2:]] == [2 % 2] * 4


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_heartbeat_goes_to_every_partition_in_its_turn(partitions: int) -> None:
    found = sent(
        assign_partitions(
            records(b'{"ts":1,"k":"a"}', b'{"ts":2,"type":"beat"}', b'{"ts":3,"k":"a"}'), RULES
        ),
        partitions,
    )
    expected_partition = murmur2(b"a") % partitions
    assert [m["partition"] for m in found] == [
        expected_partition,
        *range(partitions),
        expected_partition,
    ]
    assert [m["value"] for m in found[1:-1]] == [b'{"ts":2,"type":"beat"}'] * partitions


# -- what is sent


def test_a_record_is_sent_as_it_came_and_says_where_it_was() -> None:
    own = [{"key": "n", "value": b"1"}, {"key": "none", "value": None}]
    rows = records(b'{"ts":1,"k":"a"}', None, key=b"key", headers=[own, None])
    first, second = sent(assign_partitions(rows, RULES), 1)
    assert (first["key"], first["value"], first["timestamp"]) == (b"key", b'{"ts":1,"k":"a"}', 5000)
    assert said(first) == [("n", b"1"), ("none", None), (ORIGIN, b"clicks/2/0")]
    assert (second["value"], said(second)[0]) == (None, (ORIGIN, b"clicks/2/1"))


@pytest.mark.parametrize(("time_ms", "is_sent_as"), [(-1, 0), (0, 1), (1, 1)])
def test_a_timestamp_stays_as_it_is_except_where_it_would_mean_none(
    time_ms: int, is_sent_as: int
) -> None:
    assert (
        sent(assign_partitions(records(b"{", time_ms=time_ms), RULES), 1)[0]["timestamp"]
        == is_sent_as
    )


def test_the_last_message_of_each_partition_says_how_much_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repartition, "CHUNK_ROWS", 3)
    found = sent(
        assign_partitions(records(*(b'{"ts":1,"k":"%d"}' % (n % 7) for n in range(20))), RULES), 4
    )
    lasts = {message["partition"]: i for i, message in enumerate(found)}
    for i, message in enumerate(found):
        if i == lasts[message["partition"]]:
            assert written(said(message)) == AFTER
        else:
            assert [name for name, _ in said(message)] == [ORIGIN]


def test_what_was_written_is_what_stands_behind_the_last_origin() -> None:
    """A topic that was repartitioned may be repartitioned again: its records bring such headers
    along."""
    before = RepartitionProgress({"older": "older (1.1)"}, {InputPartition("older", 0): 1}, {})
    own = [(ORIGIN, b"older/0/0"), *before.headers()]
    assert written([*own, (ORIGIN, b"clicks/0/0"), *AFTER.headers()]) == AFTER
    with pytest.raises(ValueError, match=r"watersmeet\.next_offsets"):
        written([*own, (ORIGIN, b"clicks/0/0")])


@pytest.mark.parametrize("missing", ["watersmeet.next_offsets", "watersmeet.positions"])
@pytest.mark.parametrize("instead", [None, b"{", b"[]", b'{"0":-1}', b'{"0":"1"}'])
def test_what_says_nothing_of_it_is_refused(missing: str, instead: bytes | None) -> None:
    headers: Sequence[tuple[str, bytes | None]] = [
        (name, instead if name == missing else value) for name, value in AFTER.headers()
    ]
    with pytest.raises(ValueError, match=missing):
        written(headers)


def test_the_last_origin_is_a_records_own() -> None:
    headers = [(ORIGIN, b"older/0/0"), (ORIGIN, b"a/b/3/14"), *AFTER.headers()]
    assert origin_of(headers) == Origin("a/b", 3, 14)


@pytest.mark.parametrize("value", [None, b"", b"clicks", b"clicks/0", b"clicks/x/1", b"\xff/0/1"])
def test_what_names_no_origin_is_refused(value: bytes | None) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        origin_of([(ORIGIN, value), *AFTER.headers()])
    with pytest.raises(ValueError):  # noqa: PT011
        origin_of(AFTER.headers())


def test_only_a_message_that_a_redrive_sent_itself_is_passed_over() -> None:
    redriven = ("watersmeet.redriven", b"clicks/0/1")
    assert is_redriven([*AFTER.headers(), redriven])
    assert not is_redriven([redriven, (ORIGIN, b"clicks/0/2"), *AFTER.headers()])
    assert not is_redriven([])


def test_each_topic_has_three_headers_of_its_own_with_numbers_from_zero_on_in_json() -> None:
    said = AFTER.headers()
    assert [name.removeprefix("watersmeet.") for name, _ in said] == [
        "from",
        "next_offsets",
        "positions",
    ] * 2
    assert [value for _, value in said[::3]] == [b"clicks (1.2)", b"web (old) (-1.2)"]
    numbers = [orjson.loads(value) for _, value in (*said[1:3], *said[4:])]
    assert numbers == [{"0": 7, "11": 9}, {"11": 5}, {"2": 4}, {}]

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import draws
from tests.support.sequences import in_sequence
from tests.support.strategies import cuts
from watersmeet.core.columns import time_column
from watersmeet.core.message import (
    MESSAGES,
    SAYS_CLOSING,
    exceeds,
    message_bytes,
    message_values,
    messages,
)
from watersmeet.core.sequence import (
    CLOSED_AT,
    DUE,
    ID,
    SEQ,
    TENANT,
    MessageTime,
    SequenceTail,
    message_id,
    place_of,
)
from watersmeet.core.types import TIME

law = draws(30)

SOURCES = ("tracking", "orders", "carts")
CART = pa.struct(
    [("s", pa.string()), ("n", pa.int64()), ("list", pa.list_(pa.struct([("b", pa.bool_())])))]
)
KEYS = st.text(max_size=5) | st.sampled_from(
    ['say "hi"', "a\\b", "\x00\x1f\x7f\u2028", "\U0001f600", "\uff61", ""]
)
TIMES = st.integers(0, 253_402_300_799_999) | st.integers(0, 3)


# -- values


TENANTS = st.text(min_size=1, max_size=4) | st.sampled_from(
    ["a/b", "100%", 'say "hi"', " ", "\uff61", "\U0001f600", "é"]
)
"""'\uff61' sorts before the emoji in UTF-8, and behind it in UTF-16."""


class Row(NamedTuple):
    """A row of silver: times in ms, and by source the values of its parts (JSON texts, in `carts`
    structs)."""

    key: str
    event_time: int
    last_event_time: int
    tracking: list[str]
    orders: list[str]
    carts: list[dict[str, Any]]
    tenant: str = ""


TEXTS = st.sampled_from(
    ["{}", '{"n":1}', ' { "k" : 1.50e400 }\n', '{"s":"é\U0001f600\\n\u2028"}', '{"a":1,"a":2}']
)
CARTS = st.fixed_dictionaries(
    {
        "s": st.none() | KEYS,
        "n": st.none() | st.integers(-(2**63), 2**63 - 1),
        "list": st.none()
        | st.lists(st.none() | st.fixed_dictionaries({"b": st.none() | st.booleans()}), max_size=3),
    }
)
PARTS = st.lists(TEXTS, max_size=3), st.lists(TEXTS, max_size=3), st.lists(CARTS, max_size=3)
ROWS = st.lists(st.builds(Row, KEYS, TIMES, TIMES, *PARTS, st.just("") | TENANTS), max_size=6)


def silver(rows: Sequence[Row], text: pa.DataType | None = None) -> pa.Table:
    kinds = (text or pa.string(), pa.string(), CART)
    columns = {
        "merge_key": pa.array([row.key for row in rows], text or pa.string()),
        "event_time": pa.array([row.event_time * 1000 for row in rows], pa.int64()).cast(TIME),
        "last_event_time": pa.array([row.last_event_time * 1000 for row in rows], pa.int64()).cast(
            TIME
        ),
    }
    for source, kind in zip(SOURCES, kinds, strict=True):
        part = pa.struct([("offset", pa.int64()), ("event_time", TIME), ("value", kind)])
        parts = [
            [{"offset": i, "value": value} for i, value in enumerate(getattr(row, source))]
            for row in rows
        ]
        columns[source] = pa.array(parts, pa.list_(part))
    columns["tenant"] = pa.array([row.tenant for row in rows], text or pa.string())
    return pa.table(columns)


def quoted(value: object) -> str:
    """The JSON of a value as the contract has it, in plain Python."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return re.sub(r"\\u00(..)", lambda match: f"\\u00{match[1].upper()}", text)


def expected_value(row: Row) -> bytes:
    carts = ",".join(quoted({field.name: cart[field.name] for field in CART}) for cart in row.carts)
    tenant = f'"tenant":{quoted(row.tenant)},' if row.tenant else ""
    return (
        f'{{"key":{quoted(row.key)},{tenant}"event_time":{row.event_time},"last_event_time":{row.last_event_time},'
        f'"tracking":[{",".join(row.tracking)}],"orders":[{",".join(row.orders)}],"carts":[{carts}]}}'
    ).encode()


def test_the_default_value_is_one_json_object_with_its_fields_in_order() -> None:
    row = Row(
        "k", 5, 1_700_000_000_123, ['{"n":1}', '{"n":2}'], [], [{"s": "é", "n": None, "list": []}]
    )
    assert message_values(silver([row]), SOURCES).to_pylist() == [
        '{"key":"k","event_time":5,"last_event_time":1700000000123,"tracking":[{"n":1},{"n":2}],"orders":[],'
        '"carts":[{"s":"é","n":null,"list":[]}]}'.encode()
    ]


def test_a_tenant_comes_right_after_the_key() -> None:
    row = Row("k", 5, 6, [], ['{"n":1}'], [], 'a/"é"')
    assert message_values(silver([row]), SOURCES).to_pylist() == [
        '{"key":"k","tenant":"a/\\"é\\"","event_time":5,"last_event_time":6,"tracking":[],"orders":[{"n":1}],"carts":[]}'.encode()
    ]


@law
@given(rows=ROWS)
def test_every_row_has_the_value_that_the_contract_says(rows: list[Row]) -> None:
    values = message_values(silver(rows), SOURCES)
    assert values.type == pa.large_binary()
    assert values.to_pylist() == [expected_value(row) for row in rows]


@law
@given(data=st.data(), rows=ROWS)
def test_values_do_not_depend_on_how_rows_are_cut(data: st.DataObject, rows: list[Row]) -> None:
    whole = silver(rows)
    chunks = [silver(chunk) for chunk in data.draw(cuts(rows)) if chunk]
    expected = [expected_value(row) for row in rows]
    assert (
        message_values(pa.concat_tables([whole.schema.empty_table(), *chunks]), SOURCES).to_pylist()
        == expected
    )
    since = data.draw(st.integers(0, len(rows)))
    assert message_values(whole.slice(since, 2), SOURCES).to_pylist() == expected[since : since + 2]


def test_large_types_have_the_same_value() -> None:
    rows = [Row('a"', 5, 6, ["{}"], [], []), Row("b", 0, 0, [], ["{}"], [])]
    assert message_values(silver(rows, pa.large_string()), SOURCES).to_pylist() == [
        expected_value(row) for row in rows
    ]


@law
@given(data=st.data(), rows=ROWS)
def test_a_message_exceeds_a_limit_where_value_key_and_headers_are_longer(
    data: st.DataObject, rows: list[Row]
) -> None:
    lengths = [
        message_bytes(len(expected_value(row)), len(row.key.encode()), len(row.tenant.encode()))
        for row in rows
    ]
    table = silver(rows)
    for max_bytes in {
        data.draw(st.integers(0, 500)),
        *(length - data.draw(st.integers(0, 1)) for length in lengths),
    }:
        found = exceeds(table, SOURCES, max_bytes)
        assert found.type == pa.bool_()
        assert found.to_pylist() == [length > max_bytes for length in lengths]


@pytest.mark.parametrize(
    "column", ["merge_key", "tenant", "event_time", "last_event_time", "tracking", "carts"]
)
def test_a_row_of_silver_that_lacks_something_raises(column: str) -> None:
    table = silver([Row("k", 5, 5, ["{}"], [], [], "x")])
    without = table.set_column(
        table.column_names.index(column), column, pa.nulls(1, table.schema.field(column).type)
    )
    for function in (
        lambda: message_values(without, SOURCES),
        lambda: exceeds(without, SOURCES, 10),
    ):
        with pytest.raises(ValueError, match="a row of silver has no"):
            function()  # type: ignore[no-untyped-call]


def test_a_part_without_a_value_raises() -> None:
    row = Row("k", 5, 5, [None], [], [])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a part has no value"):
        message_values(silver([row]), SOURCES)


# -- the sequence


class Finished(NamedTuple):
    """A finished row; `due` and `closed_at` where its message says them, `tenant` where there are
    tenants."""

    event_time: int
    key: str
    due: int | None = None
    closed_at: int | None = None
    tenant: str = ""


@st.composite
def places(draw: st.DrawFn) -> list[Finished]:
    """What a partition publishes: each place once, in order, first what timeouts closed; or all of
    it with tenants."""
    found = draw(st.lists(st.tuples(st.integers(0, 5), KEYS), unique=True, max_size=8))
    plain = [Finished(*each) for each in found]
    times = st.integers(0, 5)
    closings = draw(
        st.lists(st.tuples(times, KEYS, times, times), unique_by=lambda each: each[1:], max_size=8)
    )
    closed = [Finished(*each) for each in closings]
    few = st.tuples(times, KEYS, st.integers(0, 2), st.integers(0, 2), TENANTS)
    of_tenants = [
        Finished(*each) for each in draw(st.lists(few, unique_by=lambda each: each[1:], max_size=8))
    ]
    return sorted(
        draw(st.sampled_from([plain, closed, plain + closed, of_tenants])),
        key=lambda row: place_of(*row),
    )


def finished(rows: Sequence[tuple[Any, ...]], partition: int = 3) -> pa.Table:
    times, keys, dues, closed, tenants = (
        zip(*(Finished(*row) for row in rows), strict=True) if rows else ((), (), (), (), ())
    )
    columns = {
        "partition": pa.array([partition] * len(rows), pa.int32()),
        "merge_key": pa.array(keys, pa.string()),
        "event_time": time_column(np.array(times, np.int64)),
        "tenant": pa.array(tenants, pa.string()),
        SAYS_CLOSING: pa.array([at is not None for at in closed], pa.bool_()),
    }
    # A row whose message says neither has both all the same, and they do not count.
    for name, mine in (("due", dues), ("closed_at", closed)):
        filled = [time + 7 if at is None else at for at, time in zip(mine, times, strict=True)]
        columns[name] = time_column(np.array(filled, np.int64))
    return pa.table(columns)


def value_of(row: tuple[Any, ...]) -> bytes | None:
    return None if row[1] == "" else f"{tuple(row)}".encode()


def publish(
    rows: Sequence[tuple[Any, ...]],
    tail: SequenceTail | None = None,
    headers: Mapping[MessageTime, list[tuple[str, bytes]]] | None = None,
) -> list[dict[str, Any]]:
    found = messages(
        finished(rows), pa.array([value_of(row) for row in rows], pa.binary()), tail, headers or {}
    )
    assert found.schema == MESSAGES
    return found.to_pylist()  # type: ignore[no-any-return]


def tail_at(rows: Sequence[Finished], first_seq: int = 0) -> SequenceTail | None:
    if not rows:
        return None
    last = rows[-1]
    return SequenceTail(
        first_seq + len(rows) - 1,
        last.event_time,
        last.key,
        7,
        last.due,
        last.closed_at,
        last.tenant,
    )


@law
@given(rows=places(), data=st.data(), first_seq=st.integers(0, 2**40))
def test_messages_are_numbered_on_from_the_tail_and_what_is_out_is_skipped(
    rows: list[Finished], data: st.DataObject, first_seq: int
) -> None:
    tail = tail_at(rows[: data.draw(st.integers(0, len(rows)))], first_seq)
    by_place = {place_of(*row): row for row in rows}
    expected = []
    for seq, place in in_sequence(by_place, tail):
        event_time, key, due, closed_at, tenant = row = by_place[place]
        closing = [] if closed_at is None else [(CLOSED_AT, str(closed_at)), (DUE, str(due))]
        closing += [(TENANT, tenant)] if tenant else []
        headers = [(SEQ, str(seq)), (ID, message_id(3, event_time, key, tenant)), *closing]
        message = {
            "partition": 3,
            "key": key.encode(),
            "value": value_of(row),
            "timestamp": max(1, event_time),
        }
        message |= {
            "headers": [{"key": name, "value": text.encode()} for name, text in headers],
            "seq": seq,
        }
        expected.append(
            {
                **message,
                "event_time": event_time,
                "due": due,
                "closed_at": closed_at,
                "tenant": tenant,
            }
        )
    assert publish(rows, tail) == expected


@law
@given(rows=places(), data=st.data())
def test_no_cut_into_calls_changes_a_message(rows: list[Finished], data: st.DataObject) -> None:
    sent: list[dict[str, Any]] = []
    for chunk in data.draw(cuts(rows)):
        sent += publish(chunk, tail_at(rows[: len(sent)]))
    assert sent == publish(rows)


@law
@given(rows=places(), data=st.data())
def test_a_second_call_gives_what_is_missing_and_nothing_twice(
    rows: list[Finished], data: st.DataObject
) -> None:
    until = data.draw(st.integers(0, len(rows)))
    first = publish(rows[:until])
    assert first + publish(rows, tail_at(rows[:until])) == publish(rows)
    assert publish(rows, tail_at(rows)) == ([] if rows else publish(rows))


@law
@given(rows=places(), data=st.data())
def test_what_is_out_is_never_published_again(rows: list[Finished], data: st.DataObject) -> None:
    """An attempt may begin anywhere before the tail, and end anywhere: before it, at it, or
    beyond."""
    sent: list[dict[str, Any]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        until, since = data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(sent)))
        sent += publish(rows[since:until], tail_at(rows[: len(sent)]))
    assert sent + publish(rows, tail_at(rows[: len(sent)])) == publish(rows)
    assert [each["seq"] for each in publish(rows)] == list(range(len(rows)))


def test_event_time_comes_before_the_key() -> None:
    assert [
        (each["seq"], each["event_time"])
        for each in publish([(9, "z"), (10, "a")], SequenceTail(41, 9, "z", 0))
    ] == [(42, 10)]


def test_a_tail_beyond_all_rows_leaves_nothing() -> None:
    assert publish([(1, "a"), (2, "a")], SequenceTail(9, 2, "b", None)) == []
    assert [
        each["seq"] for each in publish([(1, "a"), (2, "c")], SequenceTail(9, 2, "b", None))
    ] == [10]


@law
@given(rows=places().filter(lambda rows: len(rows) > 1), data=st.data(), is_out=st.booleans())
def test_disorder_and_repeats_are_refused_even_among_what_is_out(
    rows: list[Finished], data: st.DataObject, is_out: bool
) -> None:
    first = data.draw(st.integers(0, len(rows) - 2))
    second = data.draw(st.integers(first, len(rows) - 1))
    wrong = [*rows[: second + 1], rows[first], *rows[second + 1 :]]
    with pytest.raises(ValueError, match="comes after a record that sorts behind it"):
        publish(wrong, tail_at(rows) if is_out else None)


def test_keys_are_ordered_as_utf_8_bytes() -> None:
    # In UTF-16 the latter comes first, since it begins with a surrogate.
    halfwidth_stop, smile = (
        "\uff61",
        "\U0001f600",
    )
    assert [each["seq"] for each in publish([(5, halfwidth_stop), (5, smile)])] == [0, 1]
    assert [
        each["seq"]
        for each in publish(
            [(5, halfwidth_stop), (5, smile)], SequenceTail(0, 5, halfwidth_stop, 0)
        )
    ] == [1]
    with pytest.raises(ValueError, match=re.escape(f"{halfwidth_stop!r} at 5 comes after")):
        publish([(5, smile), (5, halfwidth_stop)])


def test_tenants_are_ordered_as_utf_8_bytes_before_due_and_key() -> None:
    rows = [
        (5, "b", 9, 10, "x"),
        (5, "a", 8, 10, "\uff61"),
        (5, "a", 7, 10, "\U0001f600"),
        (5, "a", 6, 11, "a"),
    ]
    assert [each["tenant"] for each in publish(rows)] == ["x", "\uff61", "\U0001f600", "a"]
    assert [each["seq"] for each in publish(rows, SequenceTail(4, 5, "a", 0, 8, 10, "\uff61"))] == [
        5,
        6,
    ]
    with pytest.raises(ValueError, match="comes after"):
        publish([rows[0], rows[2], rows[1]])


def test_an_id_names_the_tenant_percent_encoded_and_a_header_as_it_is() -> None:
    [message] = publish([(5, "k/1", 9, 10, "a/b 100%")])
    assert [(header["key"], header["value"]) for header in message["headers"]] == [
        (SEQ, b"0"),
        (ID, b"3/5/a%2Fb%20100%25/k/1"),
        (CLOSED_AT, b"10"),
        (DUE, b"9"),
        (TENANT, b"a/b 100%"),
    ]


def test_event_time_0_is_sent_as_1_and_said_as_0() -> None:
    first, second = publish([(0, "a"), (2, "a")])
    assert (first["timestamp"], first["event_time"], first["headers"][1]["value"]) == (
        1,
        0,
        b"3/0/a",
    )
    assert (second["timestamp"], second["event_time"]) == (2, 2)


def test_extra_headers_follow_on_the_messages_of_their_event_time() -> None:
    extra = {
        MessageTime(2, says_closing=False): [("x", b"\x00"), ("y", b"")],
        MessageTime(9, says_closing=False): [("z", b"1")],
    }
    found = publish([(1, "a"), (2, "a"), (2, "b"), (3, "a")], None, extra)
    names = [[header["key"] for header in each["headers"]] for each in found]
    assert names == [[SEQ, ID], [SEQ, ID, "x", "y"], [SEQ, ID, "x", "y"], [SEQ, ID]]
    assert found[1]["headers"][2:] == [{"key": "x", "value": b"\x00"}, {"key": "y", "value": b""}]
    assert [
        header["key"]
        for header in publish([(1, "a"), (2, "a")], SequenceTail(0, 1, "a", 0), extra)[0]["headers"]
    ] == [
        SEQ,
        ID,
        "x",
        "y",
    ]


def test_extra_headers_follow_on_the_messages_that_say_that_they_were_closed_then() -> None:
    extra = {MessageTime(9, says_closing=True): [("x", b"")]}
    found = publish([(9, "a"), (1, "a", 5, 9), (9, "a", 9, 10)], None, extra)
    own = [[SEQ, ID], [SEQ, ID, CLOSED_AT, DUE, "x"], [SEQ, ID, CLOSED_AT, DUE]]
    assert [[header["key"] for header in each["headers"]] for each in found] == own


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_values_may_be_text_or_bytes_in_any_chunks(kind: pa.DataType) -> None:
    values = pa.chunked_array([pa.array(["é"], kind), pa.array([None, ""], kind)])
    found = messages(
        finished([(1, "a"), (2, "a"), (3, "a")]), values, SequenceTail(0, 1, "a", None), {}
    )
    assert found["value"].to_pylist() == [None, b""]
    assert found.schema == MESSAGES


def test_of_no_rows_come_no_messages() -> None:
    for tail in (None, SequenceTail(4, 5, "a", 6)):
        assert messages(finished([]), pa.array([], pa.binary()), tail, {}) == MESSAGES.empty_table()


def test_rows_of_several_partitions_are_refused() -> None:
    both = pa.concat_tables([finished([(1, "a")], 0), finished([(2, "a")], 1)])
    with pytest.raises(ValueError, match="not for 2 at once"):
        messages(both, pa.array([b"", b""]), None, {})

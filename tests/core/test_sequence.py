"""The id of a message says which record it is, and its form stays; messages are numbered in the
order of their kind; their headers, or a tombstone's, say where a sequence stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import draws
from tests.support.sequences import merged_tail
from tests.support.strategies import cuts
from watersmeet.core.columns import time_column
from watersmeet.core.sequence import (
    CLOSED_AT,
    CORRECTED,
    DUE,
    FORGOTTEN,
    ID,
    LATE,
    MERGED,
    MESSAGES,
    SEQ,
    SETTLED_AT,
    TENANT,
    VERSION,
    Place,
    Sequence,
    Tail,
    U,
    message_id,
    parse_message_id,
)

law = draws(80)

# "｡" is before "😀" in UTF-8, and after it in UTF-16, where the latter begins with a surrogate.
KEYS = st.sampled_from(["a", "b", "a/b", "", "é", "\uff61", "\U0001f600"]) | st.text(max_size=4)
TENANTS = st.sampled_from(["x", "a/b", "%2F", "100%", " ", "é", "\uff61", "\U0001f600"]) | st.text(
    min_size=1, max_size=4
)
NAMES = st.sampled_from(["a", "b", "\uff61", "\U0001f600"])
TIMES = st.integers(0, 253_402_300_799_999)
FEW = st.integers(0, 3)
IDS = st.tuples(st.integers(0, 2**31 - 1), TIMES, KEYS, TENANTS)
KINDS = [pytest.param(MERGED, id="merged"), pytest.param(CORRECTED, id="corrected")]
of_both_kinds = pytest.mark.parametrize("kind", KINDS)


@law
@given(partition=st.integers(0, 2**31 - 1), event_time=TIMES, key=KEYS)
def test_an_id_says_which_record_it_is(partition: int, event_time: int, key: str) -> None:
    assert parse_message_id(message_id(partition, event_time, key)) == (
        partition,
        event_time,
        key,
        "",
    )


@law
@given(one=IDS, other=IDS)
def test_an_id_with_a_tenant_says_which_record_of_which_tenant_it_is(
    one: tuple[int, int, str, str], other: tuple[int, int, str, str]
) -> None:
    assert parse_message_id(message_id(*one), has_tenant=True) == one
    assert (message_id(*one) == message_id(*other)) == (one == other)


def test_the_form_of_an_id_stays() -> None:
    assert message_id(3, 1700, "a/é/\U0001f600") == "3/1700/a/é/\U0001f600"
    assert (
        message_id(3, 1700, "a/é/\U0001f600", "a/b é%_.-~")
        == "3/1700/a%2Fb%20%C3%A9%25_.-~/a/é/\U0001f600"
    )


@pytest.mark.parametrize(
    "text", ["", "3", "3/1700", "a/1700/key", "3/b/key", "/1700/key", "3//key"]
)
def test_what_is_no_id_is_refused(text: str) -> None:
    for has_tenant in (False, True):
        with pytest.raises(ValueError, match=r"invalid literal|not enough values"):
            parse_message_id(text, has_tenant=has_tenant)


def test_an_id_without_a_key_after_its_tenant_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        parse_message_id("3/1700/x", has_tenant=True)


# -- rows, and what their messages say


@st.composite
def rows_of(draw: st.DrawFn, kind: Sequence, at_least: int = 0) -> list[dict[str, Any]]:
    """Rows of a partition with a message: each place once, in order; times in ms."""
    content = {"event_time": FEW, "merge_key": KEYS, "tenant": st.just("") | TENANTS}
    own: dict[str, st.SearchStrategy[Any]] = (
        {"closed_at": FEW, "due": FEW}
        if kind is MERGED
        else {
            "settled_at": FEW,
            "u": FEW,
            "source": NAMES,
            "topic": NAMES,
            "offset": FEW,
            "version": FEW,
            "id": KEYS,
        }
    )
    row = st.fixed_dictionaries({**content, **own})
    rows = st.lists(row, unique_by=lambda row: by_hand(kind, row), min_size=at_least, max_size=8)
    return sorted(draw(rows), key=lambda row: by_hand(kind, row))


def by_hand(kind: Sequence, row: dict[str, Any]) -> tuple[Any, ...]:
    """The order as semantics.md and corrections.md say it."""
    names = (
        ("closed_at", "tenant", "due", "merge_key")
        if kind is MERGED
        else ("settled_at", "tenant", "u", "source", "topic", "offset")
    )
    return tuple(row[n].encode() if isinstance(row[n], str) else row[n] for n in names)


def columns_of(kind: Sequence, rows: list[dict[str, Any]], partition: int = 3) -> pa.Table:
    times = {"event_time", "closed_at", "due", "settled_at", "u"}
    names = {"event_time", "merge_key", *kind.order}
    names |= set() if kind is MERGED else {"version", "id"}
    columns = {}
    for name in sorted(names):
        values = [row[name] for row in rows]
        if name in times:
            columns[name] = time_column(np.array(values, np.int64))
        else:
            kinds = pa.int64() if name in ("version", "offset") else pa.string()
            columns[name] = pa.array(values, kinds)
    return pa.table({"partition": pa.array([partition] * len(rows), pa.int32()), **columns})


def headers_by_hand(kind: Sequence, row: dict[str, Any], seq: int) -> list[tuple[str, str]]:
    tenant = [(TENANT, row["tenant"])] if row["tenant"] else []
    if kind is MERGED:
        identity = message_id(3, row["event_time"], row["merge_key"], row["tenant"])
        closed = [(CLOSED_AT, str(row["closed_at"])), (DUE, str(row["due"]))]
        return [(SEQ, str(seq)), (ID, identity), *closed, *tenant]
    late = f"{row['source']}/{row['topic']}/3/{row['offset']}"
    times = [(SETTLED_AT, str(row["settled_at"])), (U, str(row["u"]))]
    version = (VERSION, str(row["version"]))
    return [(SEQ, str(seq)), (ID, row["id"]), version, (LATE, late), *times, *tenant]


def value_of(row: dict[str, Any]) -> bytes | None:
    return None if row["merge_key"] == "" else f"{row}".encode()


def publish(
    kind: Sequence,
    rows: list[dict[str, Any]],
    tail: Tail | None = None,
    further: dict[int, list[tuple[str, bytes]]] | None = None,
) -> tuple[list[dict[str, Any]], Tail]:
    values = pa.array([value_of(row) for row in rows], pa.binary())
    made, end = kind.messages(columns_of(kind, rows), values, tail, further or {})
    assert made.schema == MESSAGES
    return made.to_pylist(), end


def tail_at(kind: Sequence, rows: list[dict[str, Any]], first_seq: int = 0) -> Tail | None:
    if not rows:
        return None
    event_time = rows[-1]["event_time"] if kind is MERGED else None
    return Tail(first_seq + len(rows) - 1, by_hand(kind, rows[-1]), None, event_time)


@of_both_kinds
@law
@given(data=st.data(), first_seq=st.integers(0, 2**40))
def test_messages_are_numbered_on_from_the_tail_and_say_where_they_are(
    kind: Sequence, data: st.DataObject, first_seq: int
) -> None:
    rows = data.draw(rows_of(kind, at_least=1))
    begin = data.draw(st.integers(0, len(rows) - 1))
    made, end = publish(kind, rows[begin:], tail_at(kind, rows[:begin], first_seq))
    first = first_seq + begin if begin else 0
    assert made == [
        {
            "partition": 3,
            "key": row["merge_key"].encode(),
            "value": value_of(row),
            "timestamp": max(1, row["event_time"]),
            "headers": [
                {"key": name, "value": text.encode()}
                for name, text in headers_by_hand(kind, row, seq)
            ],
        }
        for seq, row in enumerate(rows[begin:], first)
    ]
    assert end == tail_at(kind, rows, first_seq if begin else 0)


@of_both_kinds
@law
@given(data=st.data())
def test_no_cut_into_calls_changes_a_message(kind: Sequence, data: st.DataObject) -> None:
    rows = data.draw(rows_of(kind, at_least=1))
    sent: list[dict[str, Any]] = []
    tail: Tail | None = None
    for chunk in filter(len, data.draw(cuts(rows))):
        made, tail = publish(kind, list(chunk), tail)
        sent += made
    assert (sent, tail) == publish(kind, rows)


@of_both_kinds
@law
@given(data=st.data())
def test_disorder_repeats_and_what_is_out_are_refused(kind: Sequence, data: st.DataObject) -> None:
    rows = data.draw(rows_of(kind, at_least=1))
    first = data.draw(st.integers(0, len(rows) - 1))
    second = data.draw(st.integers(first, len(rows) - 1))
    wrong = [*rows[: second + 1], rows[first], *rows[second + 1 :]]
    for some, tail in ((wrong, None), (rows[first:], tail_at(kind, rows[: second + 1]))):
        with pytest.raises(ValueError, match="comes after a record that sorts behind it"):
            publish(kind, some, tail)


@of_both_kinds
@law
@given(data=st.data())
def test_rows_are_ordered_and_compared_as_the_rules_say(
    kind: Sequence, data: st.DataObject
) -> None:
    """Texts as UTF-8 bytes; the first columns of a place stand for all places that begin so."""
    ordered = data.draw(rows_of(kind))
    rows = data.draw(st.permutations(ordered))
    table = columns_of(kind, rows)
    places = [by_hand(kind, row) for row in rows]
    assert kind.places(table) == [kind.place(row) for row in rows] == places
    assert kind.places(kind.in_order(table)) == sorted(places)
    if not rows:
        return
    place: Place = data.draw(st.sampled_from(places))
    place = place[: data.draw(st.integers(1, len(place)))]
    is_after = [each[: len(place)] > place for each in places]
    assert kind.is_after(table, place).tolist() == is_after
    assert kind.is_up_to(table, {3: place, 4: place}).tolist() == [not each for each in is_after]
    assert not kind.is_up_to(table, {4: place}).any()


@of_both_kinds
@pytest.mark.parametrize(
    "kind_of", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
)
def test_values_may_be_text_or_bytes_in_any_chunks(kind: Sequence, kind_of: pa.DataType) -> None:
    values = pa.chunked_array([pa.array(["é"], kind_of), pa.array([None, ""], kind_of)])
    made, _ = kind.messages(columns_of(kind, [row_at(kind, n) for n in range(3)]), values, None)
    assert made["value"].to_pylist() == ["é".encode(), None, b""]


def row_at(kind: Sequence, time: int) -> dict[str, Any]:
    times = dict.fromkeys(("event_time", "closed_at", "due", "settled_at", "u"), time)
    late = {"source": "a", "topic": "a", "offset": 0, "version": 1, "id": "x"}
    return {"merge_key": "k", "tenant": "", **times, **late}


@of_both_kinds
def test_further_headers_follow_on_the_messages_of_their_rows(kind: Sequence) -> None:
    further = {0: [("x", b"\x00"), ("y", b"")], 2: [("z", b"1")]}
    made, _ = publish(kind, [row_at(kind, n) for n in range(3)], None, further)
    own = len(headers_by_hand(kind, row_at(kind, 0), 0))
    assert [
        [(header["key"], header["value"]) for header in message["headers"][own:]]
        for message in made
    ] == [further[0], [], further[2]]


def test_rows_of_several_partitions_and_of_none_are_refused() -> None:
    row = row_at(MERGED, 1)
    both = pa.concat_tables([columns_of(MERGED, [row], p) for p in (0, 1)])
    with pytest.raises(ValueError, match="not for 2 at once"):
        MERGED.messages(both, pa.array([b"", b""]), None)
    with pytest.raises(ValueError, match="not for 0 at once"):
        MERGED.messages(columns_of(MERGED, []), pa.array([], pa.binary()), None)


# -- where a sequence stands


@of_both_kinds
@law
@given(data=st.data())
def test_headers_say_where_a_sequence_stands_and_a_tombstone_repeats_it(
    kind: Sequence, data: st.DataObject
) -> None:
    rows = data.draw(rows_of(kind, at_least=1))
    made, end = publish(kind, rows)
    assert kind.parse({each["key"]: each["value"] for each in made[-1]["headers"]}) == end
    [tombstone] = kind.tombstones("gone", [(3, end)]).to_pylist()
    assert (tombstone["key"], tombstone["value"]) == (b"gone", None)
    assert kind.parse({each["key"]: each["value"] for each in tombstone["headers"]}) == end


def test_the_form_of_a_tombstone_stays() -> None:
    merged = [merged_tail(7, 5, "k", 9, 10), merged_tail(7, 5, "k", 9, 10, "a/b")]
    corrected = [Tail(7, (10, tenant, 9, b"orders", b"o", 4)) for tenant in (b"", b"x")]
    assert [
        row["headers"][0]["value"]
        for kind, tails in ((MERGED, merged), (CORRECTED, corrected))
        for row in kind.tombstones("k", [(3, tail) for tail in tails]).to_pylist()
    ] == [
        b'{"seq":7,"id":"3/5/k","due":9,"closed_at":10}',
        b'{"seq":7,"id":"3/5/a%2Fb/k","due":9,"closed_at":10,"tenant":"a/b"}',
        b'{"seq":7,"late":"orders/o/3/4","settled_at":10,"u":9,"tenant":""}',
        b'{"seq":7,"late":"orders/o/3/4","settled_at":10,"u":9,"tenant":"x"}',
    ]


def test_what_an_earlier_version_did_not_say_of_a_timeout_follows_from_it() -> None:
    said = {SEQ: b"7", ID: b"3/5/k"}
    assert MERGED.parse(said, timeout_ms=100) == merged_tail(7, 5, "k", 105, 106)
    with pytest.raises(ValueError, match=r"watersmeet\.due"):
        MERGED.parse(said)


MINE = {SEQ: b"7", ID: b"3/5/x/k/1", CLOSED_AT: b"10", DUE: b"9", TENANT: b"x"}
OF_CORRECTION = {SEQ: b"7", ID: b"x", LATE: b"a/b/3/4", SETTLED_AT: b"10", U: b"9"}


@pytest.mark.parametrize(
    "wrong",
    [
        {TENANT: b"y"},
        {TENANT: None},
        {TENANT: b"\xff"},
        {ID: b"3/5/k"},
        {ID: None},
        {SEQ: b""},
        {SEQ: b"-1"},
        {CLOSED_AT: b""},
        {DUE: b"9223372036854775808"},
        {FORGOTTEN: b"[]"},
        {
            FORGOTTEN: orjson.dumps(
                {"seq": 7, "id": "3/5/x/k", "due": 9, "closed_at": 10, "tenant": "y"}
            )
        },
        {
            FORGOTTEN: orjson.dumps(
                {"seq": 7, "id": "3/5/x/k", "due": 9, "closed_at": 10, "tenant": 5}
            )
        },
    ],
)
def test_headers_that_are_not_ours_are_refused(wrong: dict[str, bytes | None]) -> None:
    assert MERGED.parse(MINE) == merged_tail(7, 5, "k/1", 9, 10, "x")
    with pytest.raises(ValueError, match=r"."):
        MERGED.parse({**MINE, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {LATE: b"a/b/3"},
        {LATE: b"a/b/3/x"},
        {LATE: None},
        {SETTLED_AT: b""},
        {U: b"-1"},
        {FORGOTTEN: b"{}"},
        {FORGOTTEN: orjson.dumps({"seq": 7, "late": 4, "settled_at": 1, "u": 1, "tenant": ""})},
    ],
)
def test_headers_that_are_not_a_corrections_are_refused(wrong: dict[str, bytes | None]) -> None:
    assert CORRECTED.parse(OF_CORRECTION) == Tail(7, (10, b"", 9, b"a", b"b", 4))
    with pytest.raises(ValueError, match=r"."):
        CORRECTED.parse({**OF_CORRECTION, **wrong})

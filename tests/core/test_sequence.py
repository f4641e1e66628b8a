"""The id of a message says which record it is, and its form stays; its headers, or a tombstone's,
say where a sequence stands."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.effort import draws
from watersmeet.core.sequence import (
    CLOSED_AT,
    DUE,
    FORGOTTEN,
    ID,
    SEQ,
    TENANT,
    SequenceTail,
    message_id,
    parse_message_id,
    parse_tail,
    place_of,
    tombstones,
)

law = draws(80)

# "｡" is before "😀" in UTF-8, and after it in UTF-16, where the latter begins with a surrogate.
KEYS = st.sampled_from(["a", "b", "a/b", "", "é", "\uff61", "\U0001f600"]) | st.text(max_size=4)
TENANTS = st.sampled_from(["x", "a/b", "%2F", "100%", " ", "é", "\uff61", "\U0001f600"]) | st.text(
    min_size=1, max_size=4
)
TIMES = st.integers(0, 253_402_300_799_999)
IDS = st.tuples(st.integers(0, 2**31 - 1), TIMES, KEYS, TENANTS)


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


# -- where a sequence stands


@st.composite
def tails(draw: st.DrawFn) -> SequenceTail:
    tenant = draw(st.just("") | TENANTS)
    closed = draw(st.tuples(TIMES, TIMES)) if tenant or draw(st.booleans()) else (None, None)
    return SequenceTail(
        draw(st.integers(0, 2**62)), draw(TIMES), draw(KEYS), None, *closed
    )._replace(tenant=tenant)


def headers_of(tail: SequenceTail) -> dict[str, Any]:
    said = {SEQ: str(tail.seq), ID: message_id(3, tail.event_time, tail.key, tail.tenant)}
    said |= {} if tail.closed_at is None else {CLOSED_AT: str(tail.closed_at), DUE: str(tail.due)}
    return {
        name: text.encode()
        for name, text in (said | ({TENANT: tail.tenant} if tail.tenant else {})).items()
    }


@law
@given(tail=tails())
def test_headers_say_where_a_sequence_stands_and_a_tombstone_repeats_it(tail: SequenceTail) -> None:
    assert parse_tail(headers_of(tail)) == tail
    [tombstone] = tombstones("gone", [(3, tail)]).to_pylist()
    assert tombstone["value"] is None
    assert parse_tail({header["key"]: header["value"] for header in tombstone["headers"]}) == tail


def test_the_form_of_a_tombstone_stays() -> None:
    plain, closed, of_tenant = (
        SequenceTail(7, 5, "k", 1),
        SequenceTail(7, 5, "k", 1, 9, 10),
        SequenceTail(7, 5, "k", 1, 9, 10, "a/b"),
    )
    assert [
        row["headers"][0]["value"]
        for row in tombstones("k", [(3, plain), (3, closed), (3, of_tenant)]).to_pylist()
    ] == [
        b'{"seq":7,"id":"3/5/k"}',
        b'{"seq":7,"id":"3/5/k","due":9,"closed_at":10}',
        b'{"seq":7,"id":"3/5/a%2Fb/k","due":9,"closed_at":10,"tenant":"a/b"}',
    ]


MINE = headers_of(SequenceTail(7, 5, "k/1", None, 9, 10, "x"))


@pytest.mark.parametrize(
    "wrong",
    [
        {TENANT: b"y"},
        {TENANT: None},
        {TENANT: b"\xff"},
        {ID: b"3/5/k"},
        {ID: None},
        {SEQ: b""},
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
    with pytest.raises(ValueError, match=r"."):
        parse_tail({**MINE, **wrong})


@law
@given(one=tails(), other=tails())
def test_places_are_ordered_by_closing_then_tenant_then_due_then_key(
    one: SequenceTail, other: SequenceTail
) -> None:
    """What a timeout closed before there was anything else comes first, by its event time and
    key."""

    def by_hand(tail: SequenceTail) -> tuple[Any, ...]:
        if tail.closed_at is None:
            return (-1, b"", tail.event_time, tail.key.encode())
        return (tail.closed_at, tail.tenant.encode(), tail.due, tail.key.encode())

    assert (one.place < other.place) == (by_hand(one) < by_hand(other))
    assert one.place == place_of(
        one.event_time, one.key, one.due, one.closed_at, one.tenant or None
    )

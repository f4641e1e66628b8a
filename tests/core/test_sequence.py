from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.sequence import Outgoing, Tail, message_id, parse_message_id, resume
from tests.support.strategies import cuts

law = settings(max_examples=200, deadline=None, derandomize=True)

# "｡" is before "😀" in UTF-8, and after it in UTF-16, where the latter begins with a surrogate.
HALFWIDTH_STOP, SMILE = "\uff61", "\U0001f600"
KEYS = st.sampled_from(["a", "b", "a/b", "", "é", HALFWIDTH_STOP, SMILE]) | st.text(max_size=4)


@st.composite
def sequences(draw: st.DrawFn, max_size: int = 12) -> list[Outgoing]:
    """What a partition publishes: each place once, in order."""
    places = draw(st.lists(st.tuples(st.integers(0, 5), KEYS), unique=True, max_size=max_size))
    rows = [Outgoing(event_time, key, key.encode() or None) for event_time, key in places]
    return sorted(rows, key=lambda row: (row.event_time, row.key.encode()))


def publish(rows: Iterable[Outgoing], tail: Tail | None) -> tuple[list[tuple[int, Outgoing]], Tail | None]:
    """One publication, and the tail that the sink then has."""
    numbered = list(resume(rows, tail))
    if not numbered:
        return [], tail
    seq, row = numbered[-1]
    return numbered, Tail(seq, row.event_time, row.key, offset=1000 + 2 * seq)


def tail_after(rows: Sequence[Outgoing], first_seq: int = 0) -> Tail | None:
    return Tail(first_seq + len(rows) - 1, rows[-1].event_time, rows[-1].key, 7) if rows else None


@law
@given(rows=sequences())
def test_a_new_sequence_counts_from_zero(rows: list[Outgoing]) -> None:
    assert list(resume(rows, None)) == list(enumerate(rows))


@law
@given(data=st.data(), rows=sequences())
def test_no_cut_into_publications_changes_a_number(data: st.DataObject, rows: list[Outgoing]) -> None:
    sink: list[tuple[int, Outgoing]] = []
    tail: Tail | None = None
    for piece in data.draw(cuts(rows)):
        numbered, tail = publish(piece, tail)
        sink += numbered
    assert sink == list(enumerate(rows))


@law
@given(data=st.data(), rows=sequences())
def test_what_is_out_is_never_published_again(data: st.DataObject, rows: list[Outgoing]) -> None:
    """An attempt may begin anywhere before the tail, and end anywhere: before it, at it, or beyond."""
    sink: list[tuple[int, Outgoing]] = []
    tail: Tail | None = None
    for _ in range(data.draw(st.integers(1, 5))):
        until = data.draw(st.integers(0, len(rows)))
        since = data.draw(st.integers(0, len(sink)))
        numbered, tail = publish(rows[since:until], tail)
        sink += numbered
    numbered, _ = publish(rows, tail)
    assert sink + numbered == list(enumerate(rows))


@law
@given(rows=sequences(), first_seq=st.integers(0, 2**62))
def test_a_second_attempt_at_the_same_rows_publishes_nothing(rows: list[Outgoing], first_seq: int) -> None:
    assert list(resume(rows, tail_after(rows, first_seq))) == ([] if rows else list(enumerate(rows)))


@law
@given(data=st.data(), rows=sequences().filter(lambda rows: len(rows) > 1), out=st.booleans())
def test_disorder_and_repeats_are_refused_even_among_what_is_out(data: st.DataObject, rows: list[Outgoing], out: bool) -> None:
    first = data.draw(st.integers(0, len(rows) - 2))
    second = data.draw(st.integers(first, len(rows) - 1))
    wrong = [*rows[: second + 1], rows[first], *rows[second + 1 :]]
    with pytest.raises(ValueError, match="comes after a record that sorts behind it"):
        list(resume(wrong, tail_after(rows) if out else None))


def test_a_row_out_of_order_is_never_numbered() -> None:
    numbered = resume([Outgoing(2, "a", None), Outgoing(1, "a", None)], None)
    assert next(numbered) == (0, Outgoing(2, "a", None))
    with pytest.raises(ValueError, match="'a' at 1 comes after"):
        next(numbered)


def test_keys_are_ordered_as_utf_8_bytes() -> None:
    right = [Outgoing(5, HALFWIDTH_STOP, None), Outgoing(5, SMILE, None)]
    assert [row.key for _, row in resume(right, None)] == [HALFWIDTH_STOP, SMILE]
    assert list(resume(right, Tail(0, 5, HALFWIDTH_STOP, 0))) == [(1, right[1])]
    assert list(resume(right, Tail(1, 5, SMILE, 2))) == []
    with pytest.raises(ValueError, match="sorts behind it"):
        list(resume(right[::-1], None))


def test_event_time_comes_before_the_key() -> None:
    rows = [Outgoing(9, "z", None), Outgoing(10, "a", None)]
    assert list(resume(rows, Tail(41, 9, "z", 0))) == [(42, rows[1])]


@law
@given(partition=st.integers(0, 2**31 - 1), event_time=st.integers(0, 253_402_300_799_999), key=KEYS)
def test_an_id_says_which_record_it_is(partition: int, event_time: int, key: str) -> None:
    assert parse_message_id(message_id(partition, event_time, key)) == (partition, event_time, key)


def test_the_form_of_an_id_stays() -> None:
    assert message_id(3, 1700, "a/é/\U0001f600") == "3/1700/a/é/\U0001f600"


@pytest.mark.parametrize("text", ["", "3", "3/1700", "a/1700/key", "3/b/key", "/1700/key", "3//key"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|not enough values"):
        parse_message_id(text)

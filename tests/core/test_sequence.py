"""The id of a message says which record it is, and its form stays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.sequence import message_id, parse_message_id

law = settings(max_examples=200, deadline=None, derandomize=True)

# "｡" is before "😀" in UTF-8, and after it in UTF-16, where the latter begins with a surrogate.
KEYS = st.sampled_from(["a", "b", "a/b", "", "é", "\uff61", "\U0001f600"]) | st.text(max_size=4)


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

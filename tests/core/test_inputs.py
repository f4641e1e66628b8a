"""Inputs and their names: the order of the one is that of the other, and no two share a name."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from watersmeet.core.columns import input_numbers, part_topics
from watersmeet.core.inputs import InputId, input_of_part, names_of, of_source, several_topics

_SOURCES = st.from_regex("[a-z][a-z0-9_]{0,3}", fullmatch=True)
_TOPICS = st.text("AZaz09._-", min_size=1, max_size=4)
_INPUTS = st.dictionaries(_SOURCES, st.sets(_TOPICS, min_size=1, max_size=3), min_size=1).map(
    lambda topics: [InputId(source, topic) for source in topics for topic in topics[source]]
)

WEB, APP, ORDERS = (InputId("tracking", "web"), InputId("tracking", "app"), InputId("orders", "o"))


@given(_INPUTS)
def test_inputs_sort_as_the_utf8_bytes_of_their_names(inputs: list[InputId]) -> None:
    """Also where a character of a name sorts before the slash between two names."""
    names = names_of(inputs)
    assert sorted(inputs) == sorted(inputs, key=lambda input_id: names[input_id].encode())


@given(_INPUTS)
def test_no_two_inputs_share_a_name(inputs: list[InputId]) -> None:
    assert len({*names_of(inputs).values()}) == len(inputs)


def test_a_name_has_the_topic_where_the_source_has_several() -> None:
    assert names_of([WEB, APP, ORDERS]) == {
        WEB: "tracking/web",
        APP: "tracking/app",
        ORDERS: "orders",
    }
    assert names_of([APP, ORDERS]) == {APP: "tracking", ORDERS: "orders"}
    assert several_topics([WEB, APP, ORDERS]) == {"tracking"}
    assert of_source([WEB, ORDERS, APP], "tracking") == [WEB, APP]


def test_rows_are_told_apart_by_source_and_topic() -> None:
    places = [WEB, ORDERS, InputId("orders", "web"), APP, InputId("tracking", "o"), WEB]
    rows = pa.table({"source": [p.source for p in places], "topic": [p.topic for p in places]})
    assert input_numbers(rows, [APP, WEB, ORDERS]).to_pylist() == [1, 2, None, 0, None, 1]
    assert input_numbers(rows.slice(0, 0), [APP]).to_pylist() == []


def test_a_part_says_its_topic_where_the_source_has_several() -> None:
    of_several = pa.array([{"topic": "web", "offset": 1}, {"topic": "app", "offset": 2}])
    of_one = pa.array([{"offset": 1}, {"offset": 2}])
    inputs = [WEB, APP, ORDERS]
    assert part_topics(of_several, inputs, "tracking").to_pylist() == ["web", "app"]
    assert part_topics(of_one, inputs, "orders").to_pylist() == ["o", "o"]
    assert [input_of_part(inputs, "tracking", part) for part in of_several.to_pylist()] == [
        WEB,
        APP,
    ]
    assert [input_of_part(inputs, "orders", part) for part in of_one.to_pylist()] == [ORDERS] * 2

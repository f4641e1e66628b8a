"""Laws of a source with several topics, on arbitrary arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.inputs import source_of, topic_of
from pipelines.core.model import MergeRules, PartitionMerge, Record
from tests.property.test_model import outcome
from tests.support.cases import INPUTS, rules_of
from tests.support.strategies import TIMEOUT_MS, arrivals, cuts

Parts = dict[str, list[tuple[int, str, int]]]

SEPARATE = {name: name.replace("/", "_") for name in INPUTS}
"""By input the source that it would be if it were one of its own."""

law = settings(max_examples=200, deadline=None, derandomize=True)


def merged(pieces: Iterable[Sequence[Record]], rules: MergeRules) -> PartitionMerge:
    model = PartitionMerge(rules)
    for piece in pieces:
        model.arrive(*piece)
        model.advance()
    return model


def together(pieces: Iterable[Sequence[Record]]) -> PartitionMerge:
    return merged(pieces, rules_of(INPUTS, TIMEOUT_MS))


@law
@given(data=st.data(), records=arrivals(inputs=INPUTS))
def test_no_cut_into_batches_changes_the_outcome(data: st.DataObject, records: list[Record]) -> None:
    assert outcome(together(data.draw(cuts(records)))) == outcome(together([records]))


@law
@given(records=arrivals(inputs=INPUTS))
def test_topics_are_merged_as_sources_are_whose_parts_stand_together_by_time_topic_and_offset(records: list[Record]) -> None:
    one = together([records])
    separate = [replace(record, source=SEPARATE[record.source]) for record in records]
    other = merged([separate], MergeRules(tuple(SEPARATE.values()), TIMEOUT_MS))
    assert (one.clock, [late.position for late in one.late]) == (other.clock, [late.position for late in other.late])
    for mine, theirs in ((one.timed_out, other.timed_out), ([*one.open.values()], [*other.open.values()])):
        assert [(row.key, row.event_time, row.last_event_time) for row in mine] == [
            (row.key, row.event_time, row.last_event_time) for row in theirs
        ]
        for row, apart in zip(mine, theirs, strict=True):
            expected: Parts = {source: [] for source in ("tracking", "orders")}
            for name, source in SEPARATE.items():
                expected[source_of(name)] += [(part.event_time, topic_of(name), part.offset) for part in apart.parts[source]]
            parts = zip(row.parts, row.content()[3], strict=True)
            found = {source: [(part.event_time, part.topic, part.offset) for part in of_source] for source, of_source in parts}
            assert found == {source: sorted(of_source) for source, of_source in expected.items()}

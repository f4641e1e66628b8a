"""Corrections over Arrow are what their model makes of the same records, however the input is
cut."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_merge_tenants import VALUE_TYPES, PureLake, rules_of, sized
from tests.support.cases import SOURCES
from tests.support.effort import draws
from tests.support.inputs import input_of
from tests.support.merges import KINDS
from tests.support.strategies import cuts
from watersmeet.configuration.values import RESERVED_NAMES
from watersmeet.core.clocks import clocks_of
from watersmeet.core.correction_model import (
    MAX_VERSIONS,
    Correction,
    CorrectionPlace,
    PartitionCorrections,
)
from watersmeet.core.corrections import (
    LateRules,
    correct,
    correction_schema,
    newest,
    settled,
    with_validity,
)
from watersmeet.core.merge import LATE_SCHEMA, Batch
from watersmeet.core.model import MergeRules, PartitionMerge, Record
from watersmeet.core.plan import Rules
from watersmeet.core.sequence import late_born_id, message_id
from watersmeet.settings import CorrectionSettings

law = draws(50)

CORRECTIONS = correction_schema(VALUE_TYPES, has_ids=True)
ONE_TOPIC_EACH = [kind for kind in KINDS if not kind.startswith("topics")]


class CorrectingLake(PureLake):
    """A lake of one partition without storage, whose late records are corrected."""

    def __init__(
        self,
        rules: Rules,
        within_ms: int | None,
        corrected_before: CorrectionPlace | None = None,
        max_versions: int = MAX_VERSIONS,
    ) -> None:
        super().__init__(rules, within_ms)
        self.max_versions = max_versions
        self.corrected_before = {} if corrected_before is None else {0: corrected_before}
        self.corrections = CORRECTIONS.empty_table()
        self.late_duplicates: list[dict[str, Any]] = []

    def noted(self, batch: Batch, records: pa.Table) -> None:
        done = {
            (row["source"], row["offset"])
            for row in [*self.corrections.to_pylist(), *self.late_duplicates]
        }
        pending = [
            row
            for row in self.late
            if row["u"] is not None and (row["source"], row["offset"]) not in done
        ]
        clocks = clocks_of(batch.rules, batch.plan, batch.idle, records, self.state.heads)
        late = settled(
            pa.Table.from_pylist(pending, LATE_SCHEMA), clocks, batch.plan.clocks, batch.rules
        )
        is_closed = [status == "timed_out" for status in self.silver["status"].to_pylist()]
        count = late.rows.num_rows
        late_rules = LateRules(
            np.full(count, batch.rules.window.gap_ms), np.full(count, self.max_versions)
        )
        closed = self.silver.filter(pa.array(is_closed, pa.bool_()))
        before = self.corrected_before
        corrected = self.corrections.filter(pc.greater(self.corrections["version"], 0))
        made = correct(late, late_rules, closed, corrected, batch, corrected_before=before)
        valid = with_validity(made.corrections, [None] * len(made.corrections))
        self.corrections = pa.concat_tables([self.corrections, valid, made.not_corrected])
        self.late_duplicates += made.duplicates.to_pylist()


def made_by(lake: CorrectingLake) -> list[tuple[Any, ...]]:
    times = ["settled_at", "u", "event_time", "due", "closed_at"]
    times += ["first_event_time", "last_event_time"]
    return sorted(
        (
            *(_ms(row[name]) for name in times),
            *(row[name] for name in ("tenant", "merge_key", "is_late_born", "version", "id")),
            row["source"],
            row["offset"],
            *([(_ms(part["event_time"]), part["offset"]) for part in row[s]] for s in SOURCES),
        )
        for row in lake.corrections.to_pylist()
    )


def _ms(time: datetime) -> int:
    return round(time.timestamp() * 1000)


def expected(found: PartitionCorrections, lake: CorrectingLake) -> list[tuple[Any, ...]]:
    return sorted(
        _row(each, lake) for each in [*found.corrections, *found.too_many, *found.too_large]
    )


def _row(each: Correction, lake: CorrectingLake) -> tuple[Any, ...]:
    source = each.late.record.input.source
    if each.is_late_born:
        opened = [
            row
            for row in lake.corrections.to_pylist()
            if (row["tenant"], row["merge_key"], _ms(row["event_time"]), row["version"])
            == (each.tenant, each.key, each.event_time, 1)
            and row["is_late_born"]
        ]
        # Of those that a lost lake may have, which take no other, any number begin at one time.
        own = source, lake.offsets[source, each.late.record.offset]
        firsts = [(row["source"], row["offset"]) for row in opened]
        # One that is too large alone opens nothing.
        first_source, first = own if own in firsts or not firsts else firsts[-1]
        record_id = late_born_id(first_source, first_source, 0, first)
    else:
        record_id = message_id(0, each.event_time, each.key, each.tenant)
    return (
        *(each.place.settled_at, each.place.u, each.event_time, each.due, each.closed_at),
        *(each.first_event_time, each.last_event_time),
        *(each.tenant, each.key, each.is_late_born, each.version, record_id),
        *(source, lake.offsets[source, each.late.record.offset]),
        *(
            [(part.event_time, lake.offsets[s, part.offset]) for part in each.parts[s]]
            for s in SOURCES
        ),
    )


@pytest.mark.promise("R18")
@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize("kind", ONE_TOPIC_EACH)
@law
@given(data=st.data())
def test_corrections_are_what_the_model_makes_of_the_same_records(
    kind: str, data: st.DataObject
) -> None:
    river = sized(data.draw(KINDS[kind]))
    within_ms = data.draw(st.sampled_from([0, 50, 300, 100_000]))
    most = data.draw(st.sampled_from([1, 2, MAX_VERSIONS]))
    places = [each.place for each in _of_model(river.rules, within_ms, river.records).corrections]
    before = data.draw(st.none() | st.sampled_from(places)) if places else None
    before = before and before._replace(offset=2**62)  # a lake has other offsets than the model
    lake = CorrectingLake(rules_of(river.rules), within_ms, before, most)
    for chunk in data.draw(cuts(river.records)):
        for record in chunk:
            lake.arrive(record)
        lake.drain(lambda: data.draw(st.integers(1, 6), label="share"))
    lake.drain(lambda: 10**9)
    found = _of_model(river.rules, within_ms, river.records, before, most)
    assert made_by(lake) == expected(found, lake)
    assert sorted(
        (row["source"], row["offset"], row["of_offset"]) for row in lake.late_duplicates
    ) == sorted(
        (
            each.record.input.source,
            *(lake.offsets[each.record.input.source, at] for at in (each[0].offset, each[1])),
        )
        for each in found.duplicates
    )


def _of_model(
    rules: MergeRules,
    within_ms: int,
    records: Sequence[Record],
    corrected_before: CorrectionPlace | None = None,
    most: int = MAX_VERSIONS,
) -> PartitionCorrections:
    found = PartitionCorrections(PartitionMerge(rules), within_ms, corrected_before)
    found.max_versions = most
    found.merge.arrive(*records)
    found.merge.advance()
    found.settle()
    return found


def test_an_invalid_correction_has_a_message_only_where_something_before_it_had_one() -> None:
    """The last two are opened by late records of one key and time."""

    def row(name: str, version: int, *, was_valid: bool = False) -> dict[str, Any]:
        return {"id": name, "merge_key": "a", "version": version, "has_message": was_valid}

    rows = [
        *(row("0/0/a", version) for version in (1, 2, 3)),
        row("0/900/a", 1, was_valid=True),
        *(row(late_born_id("orders", "orders", 0, offset), 1) for offset in (7, 8)),
    ]
    reasons = ["predicate", None, "too_large", "predicate", None, "predicate"]
    made = with_validity(pa.Table.from_pylist(rows, CORRECTIONS), reasons)
    assert made["valid"].to_pylist() == [reason is None for reason in reasons]
    assert made["has_message"].to_pylist() == [False, True, True, True, True, False]
    assert made["invalid_reason"].to_pylist() == reasons


def test_of_two_late_born_records_of_one_key_and_time_each_has_its_newest_correction() -> None:
    """There are two where the first one is in corrections of a lake that was lost."""
    names = [late_born_id("orders", "orders", 0, offset) for offset in (7, 9)]
    one = {"partition": 0, "tenant": "", "merge_key": "a", "is_late_born": True}
    versions = [(names[0], 1), (names[1], 1), (names[0], 2)]
    rows = [{**one, "id": name, "version": version} for name, version in versions]
    made = pa.Table.from_pylist(rows, CORRECTIONS)
    found = made.take(newest(made)).select(["id", "version"]).to_pylist()
    assert found == [{"id": names[0], "version": 2}, {"id": names[1], "version": 1}]


def test_the_model_lets_a_merge_record_have_as_many_versions_as_the_configuration_does() -> None:
    assert CorrectionSettings.model_fields["max_versions"].default == MAX_VERSIONS


def test_no_source_can_be_called_like_a_column_of_corrections() -> None:
    columns = set(CORRECTIONS.names) - set(SOURCES)
    assert columns <= RESERVED_NAMES


def test_no_id_of_a_late_born_record_can_be_that_of_another() -> None:
    source, topic = input_of("orders")
    assert not late_born_id(source, topic, 0, 7)[0].isdigit()

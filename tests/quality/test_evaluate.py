"""What is said of an expectation that is not met, or cannot be checked."""

from __future__ import annotations

import pyarrow as pa
import pytest

from watersmeet.quality.evaluate import evaluate
from watersmeet.quality.suites import Suite


@pytest.mark.promise("A37")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("expect_column_mean_to_be_between", {"min_value": 0}),
        ("expect_column_stdev_to_be_between", {"min_value": 0}),
        ("expect_column_values_to_be_between", {"min_value": 0}),
        ("expect_column_sum_to_be_between", {"min_value": 0}),
    ],
)
def test_a_message_of_the_library_is_not_shown(kind: str, more: dict[str, object]) -> None:
    rows = pa.table({"partition": [0, 1], "key": ["alice-of-the-secret", "bob"]})
    [[outcome]] = evaluate(
        rows,
        [Suite("mine", "silver", ({"type": kind, "kwargs": {"column": "key", **more}},), "f")],
        ["partition"],
    )
    assert not outcome.success
    assert outcome.trouble is not None
    assert outcome.trouble.isidentifier() or "does not say" in outcome.trouble
    assert "alice" not in str(outcome)


@pytest.mark.promise("A7")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize(
    ("kind", "more", "observed"),
    [
        ("expect_column_max_to_be_between", {"max_value": "2020-01-01"}, "not shown"),
        ("expect_column_min_to_be_between", {"max_value": "2020-01-01T00:00:00"}, "not shown"),
        ("expect_column_unique_value_count_to_be_between", {"min_value": 2}, "1"),
    ],
)
@pytest.mark.parametrize("column", ["key", "value", "detail"])
def test_a_found_value_is_not_shown_where_it_is_what_a_sender_wrote(
    kind: str, more: dict[str, object], observed: str, column: str
) -> None:
    rows = pa.table({"partition": [0, 1], column: ["2024-05-06", "2024-05-06"]})
    document = {"type": kind, "kwargs": {"column": column, **more}}
    [[outcome]] = evaluate(rows, [Suite("mine", "silver", (document,), "f")], ["partition"])
    assert not outcome.success
    assert observed in str(outcome.observed)
    assert "2024" not in str(outcome)

"""What is said of an expectation that cannot be checked."""

from __future__ import annotations

import pyarrow as pa
import pytest

from watersmeet.quality.evaluate import evaluate
from watersmeet.quality.suites import Suite


@pytest.mark.promise("A37")
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

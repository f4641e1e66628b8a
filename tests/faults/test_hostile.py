"""A short `make hostile`: whatever records, a registry and connections do, what is good comes out,
and what is bad is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hostile import siege

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.promise("R70"),
    pytest.mark.fault("hostile", "outage", "kill", oracle=True),
]

SECONDS = 6


def test_nothing_that_others_may_do_loses_changes_or_stops_what_is_good(
    kafka: str, tmp_path: Path
) -> None:
    with siege(kafka, tmp_path, "hostile", "embedded", seed=1) as one:
        one.run(SECONDS)
        assert one.judge() == []
    assert {
        "too_large",
        "undecodable",
        "no_key",
        "no_event_time",
        "event_time_in_future",
        None,
    } == {record.reason for record in one.sent.values()}
    assert one.stops
